"""SWR beside a learning rate that changes: the strength that follows it, and norms that are reset at a decay."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer, lr_scheduler

from pliant import SWR
from pliant.methods._core.learning_rate import Schedule
from tests import zoo
from tests.loops import assert_same, train


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_coupled_strength_follows_the_learning_rate(scheduler_first: bool) -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.4)
    swr = SWR(model, zoo.batch("mlp")[0], lam=0.2, schedule="coupled")
    if not scheduler_first:
        swr.attach(optimizer)
    scheduler = lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=3)
    if scheduler_first:
        swr.attach(optimizer)
    for step in range(5):
        inputs, labels = zoo.batch("mlp", seed=step)
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        rate = optimizer.param_groups[0]["lr"]
        expected = []
        for index in (0, 2, 4):
            after = model[index].weight.detach() - rate * model[index].weight.grad
            lam = 0.2 * rate / 0.4
            expected.append(lam * float(swr.initial_norms[index // 2]) + (1 - lam) * float(after.norm()))
        optimizer.step()
        scheduler.step()
        assert [float(model[i].weight.norm()) for i in (0, 2, 4)] == pytest.approx(expected, rel=1e-12)


def test_reinit_on_decay_takes_the_norms_before_the_first_slow_step() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = lr_scheduler.MultiStepLR(optimizer, milestones=[4], gamma=0.1)
    swr = SWR(model, zoo.batch("mlp")[0], lam=0.1, schedule="reinit").attach(optimizer)
    expected = swr.initial_norms.clone()
    for step in range(6):
        if step == 4:
            expected = swr._norms()
        train(model, optimizer, "mlp", [step])
        assert torch.equal(swr.initial_norms, expected)
        scheduler.step()


SMOOTH: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=20),
    "linear": lambda o: lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.0, total_iters=20),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=7),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, total_iters=20, power=2.0),
    "cosine, one rate for three steps": lambda o: lr_scheduler.LambdaLR(
        o, lambda step: 0.5 + 0.5 * torch.cos(torch.tensor(torch.pi * (step // 3) / 7)).item()
    ),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_schedules_do_not_reset_the_initial_norms(name: str) -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = SMOOTH[name](optimizer)
    swr = SWR(model, zoo.batch("mlp")[0], schedule="reinit").attach(optimizer)
    first = swr.initial_norms.clone()
    for step in range(21):
        train(model, optimizer, "mlp", [step])
        scheduler.step()
    assert torch.equal(swr.initial_norms, first)


def test_a_rate_that_falls_by_rounding_does_not_decline() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    warmup, decay = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.MultiStepLR(optimizer, [4], 0.1)
    scheduler = lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[5])
    swr = SWR(model, zoo.batch("mlp")[0], lam=0.1, schedule="reinit").attach(optimizer)
    first = swr.initial_norms.clone()
    for step in range(12):
        train(model, optimizer, "mlp", [step])
        scheduler.step()
    assert not torch.equal(swr.initial_norms, first)


def test_two_decays_one_after_the_other_both_count() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = lr_scheduler.MultiStepLR(optimizer, milestones=[2, 3], gamma=0.5)
    swr = SWR(model, zoo.batch("mlp")[0], lam=0.1, schedule="reinit").attach(optimizer)
    resets = []
    for step in range(5):
        before = swr.initial_norms.clone()
        train(model, optimizer, "mlp", [step])
        resets.append(not torch.equal(swr.initial_norms, before))
        scheduler.step()
    assert resets == [False, False, True, True, False]


def test_loading_restores_norms_taken_at_a_decay() -> None:
    model = zoo.build("mlp")
    swr = SWR(model, zoo.batch("mlp")[0])
    train(model, SGD(model.parameters(), lr=0.5), "mlp", range(3))
    swr.reset_initial_norms()
    other = SWR(zoo.build("mlp"), zoo.batch("mlp")[0])
    other.load_state_dict(swr.state_dict())
    assert torch.equal(other.initial_norms, swr.initial_norms)
    assert_same({"norms": other.initial_norms}, {"norms": swr._norms()})


@pytest.mark.parametrize("start", [0.0, 0.01])
def test_a_coupled_strength_survives_a_rate_that_rises(start: float) -> None:
    """A cyclic schedule has its base at the small end, a warm-up by hand begins at zero."""
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=start)
    swr = SWR(model, zoo.batch("mlp")[0], lam=0.5, schedule="coupled").attach(optimizer)
    train(model, optimizer, "mlp", [0])
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    with torch.no_grad():
        model[0].weight.mul_(4)
    train(model, optimizer, "mlp", [1])
    norms, growth = swr.initial_norms, swr.receipt.details["norm_growth"]["0.weight"]
    assert norms.isfinite().all()
    if start == 0:
        assert swr.schedule.state["initial"].tolist() == [0.1] * 3
        assert growth == pytest.approx(2.5, rel=0.1)
    else:
        assert growth == pytest.approx(1.0, rel=1e-6)


def norm_at_rest(lam: float, schedule: Schedule, rates: list[float]) -> float:
    """Return where a weight comes to rest that a constant gradient pushes outwards, at the last of some rates."""
    model = torch.nn.Linear(4, 1, bias=False).double()
    torch.nn.init.constant_(model.weight, 0.5)
    optimizer = SGD(model.parameters(), lr=rates[0])
    SWR(model, torch.ones(1, 4).double(), lam=lam, schedule=schedule).attach(optimizer)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        for _ in range(1500):
            model.weight.grad = -torch.ones_like(model.weight)
            optimizer.step()
    return float(model.weight.detach().norm())


def test_a_strength_that_follows_the_rate_keeps_the_equilibrium() -> None:
    """α‖∇L‖ ≈ λ(‖w‖ − ‖w₀‖), appendix E, up to a factor 1 − λ: the same after a decay with λ·lr/lr₀, not with λ."""
    initial, push = 1.0, 2.0
    assert norm_at_rest(0.1, "constant", [0.1]) == pytest.approx(initial + 0.9 * push, rel=1e-6)
    assert norm_at_rest(0.1, "coupled", [0.1, 0.01]) == pytest.approx(initial + 0.99 * push, rel=1e-6)
    assert norm_at_rest(0.1, "constant", [0.1, 0.01]) == pytest.approx(initial + 0.9 * push / 10, rel=1e-6)


def test_by_hand_a_coupled_strength_follows_the_learning_rate_too() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    swr = SWR(model, torch.ones(1, 2), lam=0.5, schedule="coupled").attach(optimizer)
    initial = model.weight.detach().clone()
    model.weight.data.mul_(2)
    optimizer.param_groups[0]["lr"] = 0.1
    swr.step()
    torch.testing.assert_close(model.weight.detach(), 2 * 0.975 * initial)
    swr.detach()
    model.weight.data.copy_(2 * initial)
    swr.step()  # no optimizer tells a rate: λ itself
    torch.testing.assert_close(model.weight.detach(), 1.5 * initial)
