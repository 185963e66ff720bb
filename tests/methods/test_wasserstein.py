"""Wasserstein regularization: exact order, the closed form, and both reductions."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

from pliant import L2Init, WassersteinRegularization
from pliant.methods._core.sorting import rank_order
from pliant.methods.wasserstein import match_order
from tests import zoo
from tests.loops import assert_same, differs, snapshot, train
from tests.methods.trajectories import OPTIMIZERS, STEPS, assert_close, train_with_term
from tests.reference import penalties

LAM = 0.02
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def initial_values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", [*zoo.PAPER_MODELS, "tied"])
def test_same_trajectory_as_the_term_in_the_loss(name: str, optimizer: str) -> None:
    closed, slow = zoo.build(name), zoo.build(name)
    initial = initial_values(slow)
    made = OPTIMIZERS[optimizer](closed)
    penalty = WassersteinRegularization(closed, lam=LAM).attach(made)
    train(closed, made, name, range(STEPS[name]))
    train_with_term(slow, name, OPTIMIZERS[optimizer](slow), lambda m: LAM * penalties.wasserstein(m, initial))
    assert_close(closed, slow)
    assert float(penalty.value()) == pytest.approx(LAM * penalties.wasserstein(slow, initial).item(), rel=1e-7)


def test_mean_reduction() -> None:
    closed, slow = zoo.build("mlp"), zoo.build("mlp")
    initial = initial_values(slow)
    optimizer = OPTIMIZERS["sgd"](closed)
    WassersteinRegularization(closed, lam=1.0, reduction="mean").attach(optimizer)
    train(closed, optimizer, "mlp", range(STEPS["mlp"]))
    train_with_term(slow, "mlp", OPTIMIZERS["sgd"](slow), lambda m: penalties.wasserstein_mean(m, initial))
    assert_close(closed, slow)
    with pytest.raises(ValueError, match="reduction: 'max' is not allowed; it must be one of 'sum', 'mean'"):
        WassersteinRegularization(closed, reduction="max")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", FLOATS)
@settings(deadline=None, max_examples=40)
@given(values=st.lists(st.floats(-1e3, 1e3, width=16), min_size=1, max_size=200))
def test_rank_order_sorts_floats(dtype: torch.dtype, values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    ordered = tensor[rank_order(tensor)]
    assert torch.equal(ordered, tensor.sort().values)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rank_order_sorts_extreme_floats(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    values = [-torch.inf, info.min, -1.0, -info.tiny, 0.0, info.tiny, info.eps, 1.0, info.max, torch.inf]
    expected = torch.tensor(values, dtype=dtype)
    for seed in range(5):
        shuffled = expected[torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))]
        assert torch.equal(shuffled[rank_order(shuffled)], expected)


def test_rank_order_sorts_large_vectors() -> None:
    """torch uses radix sort for large vectors only."""
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(values[rank_order(values)], values.sort().values)


def test_match_order_is_optimal_transport() -> None:
    """No other assignment of initial values to entries has a smaller cost."""
    from itertools import permutations

    generator = torch.Generator().manual_seed(0)
    values, initial = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(2))
    (matched,) = match_order([values], [initial.sort().values])
    cost = float(((values - matched) ** 2).sum())
    assert cost == pytest.approx(min(float(((values - torch.stack(p)) ** 2).sum()) for p in permutations(initial)))


def test_term_is_below_l2_init() -> None:
    """§5: sorting can only reduce the distance. λ = 2 offsets the factor ½ of L2 Init."""
    model = zoo.build("cnn_bn")
    ours, theirs = WassersteinRegularization(model, lam=1.0), L2Init(model, lam=2.0)
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(20):
        train(model, optimizer, "cnn_bn", [step])
        assert 0 < float(ours.value()) < float(theirs.value())


def test_permuted_initial_values_cost_nothing() -> None:
    model = zoo.build("mlp")
    penalty = WassersteinRegularization(model, lam=1.0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.flatten().flip(0).view(p.shape))
    assert float(penalty.value()) == 0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    penalty.step()
    assert not any(p.grad.any() for p in model.parameters())


def test_refresh_sorts_every_nth_step() -> None:
    """Between two sorts the targets are fixed; the default sorts at every step."""

    def run(make: Callable[[nn.Module], WassersteinRegularization]) -> dict[str, Tensor]:
        model = zoo.build("mlp")
        optimizer = SGD(model.parameters(), lr=0.3)
        make(model).attach(optimizer)
        train(model, optimizer, "mlp", range(9))
        return snapshot(model)

    exact = run(lambda m: WassersteinRegularization(m, lam=0.1))
    assert_same(exact, run(lambda m: WassersteinRegularization(m, lam=0.1, refresh=1)))
    seldom = run(lambda m: WassersteinRegularization(m, lam=0.1, refresh=4))
    assert differs(exact, seldom)

    model = zoo.build("mlp")
    initial = {name: p.detach().flatten().sort().values for name, p in model.named_parameters()}
    optimizer = SGD(model.parameters(), lr=0.3)
    targets: dict[str, Tensor] = {}
    for step in range(9):
        if step % 4 == 0:
            for name, p in model.named_parameters():
                ranks = p.detach().flatten().argsort().argsort()
                targets[name] = initial[name][ranks].view(p.shape)
        inputs, labels = zoo.batch("mlp", seed=100 + step)
        optimizer.zero_grad()
        pull = sum(((p - targets[name]) ** 2).sum() for name, p in model.named_parameters())
        (nn.functional.cross_entropy(model(inputs), labels) + 0.1 * pull).backward()
        optimizer.step()
    for name, value in snapshot(model).items():
        torch.testing.assert_close(seldom[name], value, rtol=1e-10, atol=1e-12)


def test_refresh_resumes_from_a_state() -> None:
    def fresh() -> tuple[nn.Module, SGD, WassersteinRegularization]:
        model = zoo.build("mlp")
        return model, SGD(model.parameters(), lr=0.3), WassersteinRegularization(model, lam=0.1, refresh=3)

    model, optimizer, penalty = fresh()
    penalty.attach(optimizer)
    train(model, optimizer, "mlp", range(8))

    first, optimizer, penalty = fresh()
    penalty.attach(optimizer)
    train(first, optimizer, "mlp", range(4))
    second, other, resumed = fresh()
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(penalty.state_dict())
    resumed.attach(other)
    train(second, other, "mlp", range(4, 8))
    assert_same(snapshot(second), snapshot(model))
