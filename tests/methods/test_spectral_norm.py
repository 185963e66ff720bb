"""The spectral norm penalty."""

import pytest
from torch import nn

from pliant import SpectralNormPenalty, SpectralRegularization
from tests import zoo
from tests.loops import train
from tests.methods.trajectories import OPTIMIZERS, STEPS, assert_close, train_with_term
from tests.reference import penalties

LAM = 0.05


def vectors_of(method: SpectralRegularization | SpectralNormPenalty) -> penalties.Vectors:
    return {name: (method.left[name].clone(), method.right[name].clone()) for name in method.left}


@pytest.mark.parametrize("name", ["mlp", "cnn_bn"])
def test_same_trajectory_as_the_term_in_the_loss(name: str) -> None:
    closed, slow = zoo.build(name), zoo.build(name)
    optimizer = OPTIMIZERS["adam"](closed)
    penalty = SpectralNormPenalty(closed, lam=LAM).attach(optimizer)
    vectors = vectors_of(penalty)
    train(closed, optimizer, name, range(STEPS[name]))
    train_with_term(slow, name, OPTIMIZERS["adam"](slow), lambda m: LAM * penalties.spectral_norm(m, vectors))
    assert_close(closed, slow)


def test_model_without_matrices_is_an_error() -> None:
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        SpectralNormPenalty(nn.LayerNorm(3))
