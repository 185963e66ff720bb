"""Parseval regularization: the closed form on either side, and its limit."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from pliant import ParsevalRegularization
from tests import zoo
from tests.loops import train
from tests.methods.trajectories import OPTIMIZERS, STEPS, assert_close, train_with_term
from tests.reference import penalties

LAM = 0.01


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", [*zoo.PAPER_MODELS, "tied"])
def test_same_trajectory_as_the_term_in_the_loss(name: str, optimizer: str) -> None:
    closed, slow = zoo.build(name), zoo.build(name)
    made = OPTIMIZERS[optimizer](closed)
    penalty = ParsevalRegularization(closed, lam=LAM).attach(made)
    train(closed, made, name, range(STEPS[name]))
    train_with_term(slow, name, OPTIMIZERS[optimizer](slow), lambda m: LAM * penalties.parseval(m, 1.0, False))
    assert_close(closed, slow)
    assert float(penalty.value()) == pytest.approx(LAM * penalties.parseval(slow, 1.0, False).item(), rel=1e-9)


def test_other_lengths_and_norm_scales() -> None:
    closed, slow = zoo.build("cnn_bn"), zoo.build("cnn_bn")
    optimizer = OPTIMIZERS["sgd"](closed)
    penalty = ParsevalRegularization(closed, lam=LAM, s=2.0, norm_scales=True).attach(optimizer)
    assert set(penalty.parameters) == {"0.weight", "1.weight", "4.weight", "5.weight", "9.weight", "11.weight"}
    train(closed, optimizer, "cnn_bn", range(STEPS["cnn_bn"]))
    train_with_term(slow, "cnn_bn", OPTIMIZERS["sgd"](slow), lambda m: LAM * penalties.parseval(m, 2.0, True))
    assert_close(closed, slow)
    assert float(penalty.value()) == pytest.approx(LAM * penalties.parseval(slow, 2.0, True).item(), rel=1e-9)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (6, 6)])
def test_all_singular_values_approach_the_root_of_s(shape: tuple[int, int]) -> None:
    """This includes a weight with more rows than columns, whose rows cannot be orthogonal."""
    torch.manual_seed(0)
    model = nn.Linear(shape[1], shape[0], bias=False).double()
    penalty = ParsevalRegularization(model, lam=0.1, s=4.0)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2000):
        model.weight.grad = torch.zeros_like(model.weight)
        penalty.step()
        optimizer.step()
    values = torch.linalg.svdvals(model.weight.detach())
    torch.testing.assert_close(values, torch.full_like(values, 2.0), rtol=1e-6, atol=1e-6)
    assert float(penalty.value()) < 1e-9


def test_biases_and_norm_layers_are_left_alone() -> None:
    model = zoo.build("cnn_bn")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    ParsevalRegularization(model, lam=1.0).step()
    touched = {name for name, p in model.named_parameters() if p.grad.any()}
    assert touched == {"0.weight", "4.weight", "9.weight", "11.weight"}
