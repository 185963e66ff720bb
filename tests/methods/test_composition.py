"""Several methods on one model."""

import pytest
from torch.optim import SGD

from pliant import (
    L2,
    SWR,
    ParsevalRegularization,
    SpectralRegularization,
)
from tests import zoo
from tests.loops import snapshot, train
from tests.methods.trajectories import STEPS, assert_close, train_with_term
from tests.reference import penalties


def test_swr_with_l2_on_the_head() -> None:
    """The body keeps its norms, the head is pulled to zero; each alone does not do both."""
    model, plain = zoo.build("mlp"), zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    L2(model, lam={"4.*": 0.2}).attach(optimizer)
    swr = SWR(model, plan={"order": ["0", "2"]}, lam=1.0).attach(optimizer)
    train(model, optimizer, "mlp", range(20))
    train(plain, SGD(plain.parameters(), lr=0.1), "mlp", range(20))
    assert swr.receipt is not None
    assert all(growth == pytest.approx(1.0) for growth in swr.receipt.details["norm_growth"].values())
    assert model[4].weight.norm() < 0.9 * plain[4].weight.norm()


def test_two_penalties_have_the_trajectory_of_both_terms() -> None:
    closed, slow = zoo.build("cnn_bn"), zoo.build("cnn_bn")
    optimizer = SGD(closed.parameters(), lr=0.02)
    spectral = SpectralRegularization(closed, lam=0.05).attach(optimizer)
    ParsevalRegularization(closed, lam=0.01).attach(optimizer)
    vectors = {name: (spectral.left[name].clone(), spectral.right[name].clone()) for name in spectral.left}
    train(closed, optimizer, "cnn_bn", range(STEPS["cnn_bn"]))
    train_with_term(
        slow,
        "cnn_bn",
        SGD(slow.parameters(), lr=0.02),
        lambda m: 0.05 * penalties.spectral(m, vectors, 2) + 0.01 * penalties.parseval(m, 1.0, False),
    )
    assert_close(closed, slow)
    assert snapshot(closed).keys() == snapshot(slow).keys()
