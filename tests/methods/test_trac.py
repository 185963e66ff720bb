"""TRAC: the distance from the initial weights is learned."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scipy.special import erfi as scipy_erfi
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer
from trac_optimizer import trac as package

from pliant import TRAC
from pliant.methods.trac import erfi
from tests import zoo
from tests.loops import steady_adam, train
from tests.methods.trajectories import assert_close
from tests.reference import rules

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda model: steady_adam(model),
}


def test_erfi() -> None:
    x = torch.linspace(-12, 12, 241, dtype=torch.float64)
    torch.testing.assert_close(erfi(x), torch.from_numpy(scipy_erfi(x.numpy())), rtol=1e-11, atol=0.0)
    assert torch.equal(erfi(torch.tensor([100.0, -100.0]).double()), erfi(torch.tensor([12.0, -12.0]).double()))


@pytest.mark.parametrize("base", OPTIMIZERS)
@pytest.mark.parametrize("name", zoo.PAPER_MODELS)
def test_same_trajectory_as_the_reference(name: str, base: str) -> None:
    model, slow = zoo.build(name), zoo.build(name)
    optimizer, other = OPTIMIZERS[base](model), OPTIMIZERS[base](slow)
    # With the authors' scale the weights would hardly move in a few steps.
    method = TRAC(model, scale=1e-2).attach(optimizer)
    reference = rules.TRAC(slow, scale=1e-2)
    initial = [p.detach().clone() for p in model.parameters()]
    for _ in range(8):  # always the same batch, so that moving away pays
        train(model, optimizer, name, [0])
        before = [p.detach().clone() for p in slow.parameters()]
        train(slow, other, name, [0])
        reference.step(before, [p.grad for p in slow.parameters()])
    assert_close(model, slow)
    assert method.receipt is not None
    assert method.receipt.details["scale"] == pytest.approx(sum(reference.s), rel=1e-8)
    gaps = [(p.detach() - start).norm() for p, start in zip(model.parameters(), initial, strict=True)]
    assert method.receipt.details["distance"] == pytest.approx(float(torch.stack(gaps).norm()), rel=1e-5)
    assert method.receipt.details["distance"] > 1e-3


@pytest.mark.parametrize("base", [SGD, Adam])
def test_same_moves_as_the_authors_package(
    base: type[Optimizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tuners are in single precision, and its own erfi is 1 % too small near zero: here it is given scipy's."""
    small = torch.tensor([1e-3, 0.1, 0.5])
    ratios = package.erfi(small) / torch.from_numpy(scipy_erfi(small.numpy()))
    assert (ratios < 0.992).all()
    monkeypatch.setattr(package, "erfi", lambda x: torch.as_tensor(scipy_erfi(x.double().numpy())).to(x.dtype))
    model, theirs = zoo.build("mlp"), zoo.build("mlp")
    initial = zoo.build("mlp")
    optimizer = base(model.parameters(), lr=0.1)
    method = TRAC(model, scale=1e-4).attach(optimizer)
    other = package.start_trac(str(tmp_path / "log"), base, s_prev=1e-4)(theirs.parameters(), lr=0.1)
    inputs, labels = zoo.batch("mlp", seed=100)
    for _ in range(20):
        train(model, optimizer, "mlp", [0])
        other.zero_grad()
        cross_entropy(theirs(inputs), labels).backward()
        other.step()
    assert method.receipt is not None
    assert method.receipt.details["distance"] > 1e-3
    for mine, their, start in zip(model.parameters(), theirs.parameters(), initial.parameters(), strict=True):
        torch.testing.assert_close(mine - start, their - start, rtol=1e-4, atol=1e-7)


def test_a_scale_below_zero_returns_to_the_initial_weights() -> None:
    """Gradients that point away from where the optimizer went: every tuner's scale falls below zero."""
    model = nn.Linear(2, 1, bias=False).double()
    start = model.weight.detach().clone()
    optimizer = SGD(model.parameters(), lr=0.1)
    method = TRAC(model, scale=1.0).attach(optimizer)

    def take_step(sign: float) -> None:
        model.weight.grad = sign * torch.ones_like(model.weight)
        optimizer.step()

    take_step(1.0)
    with pytest.warns(UserWarning, match="trac: at step 2 the weights are back .*; detach it"):
        take_step(-1.0)
    assert float(method.receipt.details["scale"]) < 0
    torch.testing.assert_close(model.weight.detach(), start, rtol=0, atol=1e-12)
    with warnings.catch_warnings(action="error"):  # said once
        for sign in (-1.0, -1.0, *12 * [1.0]):
            take_step(sign)
    assert torch.equal(model.weight.detach(), start)  # for good, although moving away would pay now
    assert method.receipt.details["distance"] == 0


def test_the_authors_package_stays_at_the_initial_weights_too(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, bias=False)
    start = model.weight.detach().clone()
    optimizer = package.start_trac(str(tmp_path / "log"), SGD, s_prev=1.0)(model.parameters(), lr=0.1)
    moved = []
    for sign in (1.0, -1.0, -1.0, -1.0, *12 * [1.0]):
        model.weight.grad = sign * torch.ones_like(model.weight)
        optimizer.step()
        moved.append(not torch.equal(model.weight.detach(), start))
    assert moved == [True, *15 * [False]]


def test_settings_that_make_no_sense_are_errors() -> None:
    with pytest.raises(ValueError, match="scale: 0 is not allowed"):
        TRAC(zoo.build("mlp"), scale=0)
    with pytest.raises(TypeError, match="trac acts on an optimizer's step"):
        TRAC(zoo.build("mlp")).step()
