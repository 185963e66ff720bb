"""L2 Init: the closed-form gradient gives the trajectory of the term in the loss."""

import pytest
from torch import Tensor, nn
from torch.optim import SGD

from pliant import L2Init
from tests import zoo
from tests.loops import train
from tests.methods.trajectories import OPTIMIZERS, STEPS, assert_close, train_with_term

LAM = 0.05


def sgd_with_momentum(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.02, momentum=0.9)


def l2_init_term(model: nn.Module, initial: list[Tensor]) -> Tensor:
    return LAM / 2 * sum(((p - q) ** 2).sum() for p, q in zip(model.parameters(), initial, strict=True))


@pytest.mark.parametrize("make_optimizer", [*OPTIMIZERS.values(), sgd_with_momentum], ids=[*OPTIMIZERS, "momentum"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "vgg", "tied"])
def test_same_trajectory_as_the_term_in_the_loss(name, make_optimizer) -> None:
    closed, slow = zoo.build(name), zoo.build(name)
    initial = [p.detach().clone() for p in slow.parameters()]
    optimizer = make_optimizer(closed)
    penalty = L2Init(closed, lam=LAM).attach(optimizer)
    train(closed, optimizer, name, range(STEPS[name]))
    train_with_term(slow, name, make_optimizer(slow), lambda model: l2_init_term(model, initial))
    assert_close(closed, slow)
    assert float(penalty.value()) == pytest.approx(l2_init_term(slow, initial).item(), rel=1e-9)
