"""UPGD: around SGD it is the paper's optimizer, around Adam the authors' adaptive form."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam

from pliant import SWR, UPGD
from pliant.methods._core.initial import seeded
from pliant.methods.upgd import protections
from tests import zoo
from tests.loops import train
from tests.methods.trajectories import STEPS, assert_close
from tests.reference import rules

SETTINGS = {"sigma": 0.05, "beta": 0.9, "weight_decay": 0.1}


def gates_of(utilities: list[Tensor]) -> list[Tensor]:
    """Return 1 − sigmoid(u / max u)."""
    return [1 - share for share in protections(utilities)]


def noise_of(model: nn.Module, seed: int, draw: int) -> list[Tensor]:
    with seeded(seed, draw):
        return [torch.randn(p.shape, dtype=p.dtype) for p in model.parameters()]


@pytest.mark.parametrize(
    ("name", "normalizer"), [*((name, "corrected") for name in (*zoo.PAPER_MODELS, "tied")), ("mlp", "authors")]
)
@pytest.mark.parametrize("adaptive", [False, True])
def test_same_trajectory_as_the_papers_optimizer(name: str, normalizer: str, adaptive: bool) -> None:
    model, slow = zoo.build(name), zoo.build(name)
    lr = 1e-3 if adaptive else 0.02
    optimizer = Adam(model.parameters(), lr=lr) if adaptive else SGD(model.parameters(), lr=lr)
    method = UPGD(model, seed=3, normalizer=normalizer, **SETTINGS).attach(optimizer)
    train(model, optimizer, name, range(STEPS[name]))

    reference = rules.UPGD(slow, lr=lr, normalizer=normalizer, **SETTINGS)
    direction = rules.AdamDirection() if adaptive else lambda _, g: g
    for step in range(STEPS[name]):
        inputs, labels = zoo.batch(name, seed=100 + step)
        slow.zero_grad()
        cross_entropy(slow(inputs), labels).backward()
        reference.step(noise_of(slow, 3, step), direction)
    assert_close(model, slow, rtol=1e-7, atol=1e-9)
    assert method.receipt is not None
    assert (0.26 if normalizer == "corrected" else 0.0) < method.receipt.details["mean_gate"] < 1


def test_gates() -> None:
    """The most useful weight of all tensors moves least, 1 − sigmoid(1), a useless one by half, harmful ones most."""
    gates = gates_of([torch.tensor([4.0, 0.0, -400.0]), torch.tensor([2.0])])
    torch.testing.assert_close(gates[0], torch.tensor([0.26894, 0.5, 1.0]), rtol=1e-4, atol=0)
    torch.testing.assert_close(gates[1], torch.tensor([0.37754]), rtol=1e-4, atol=0)


def test_gates_without_any_useful_weight() -> None:
    """Dividing by a negative maximum would protect the most harmful weights."""
    gates = gates_of([torch.tensor([-1.0, -3.0, 0.0])])[0]
    assert gates.tolist() == [1.0, 1.0, 0.5]


def test_noise_has_the_size_it_says() -> None:
    torch.manual_seed(0)
    model = nn.Linear(200, 200, bias=False).double()
    before = model.weight.detach().clone()
    optimizer = SGD(model.parameters(), lr=0.5)
    UPGD(model, sigma=0.1, seed=1).attach(optimizer)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    moved = model.weight.detach() - before
    assert float(moved.std()) == pytest.approx(0.5 * 0.1 * 0.5, rel=0.02)  # lr · σ · the gate of no utility


def test_each_parameter_group_has_its_learning_rate() -> None:
    model, slow = zoo.build("mlp"), zoo.build("mlp")
    groups = [
        {"params": model[0].parameters(), "lr": 0.5},
        {"params": [*model[2].parameters(), *model[4].parameters()]},
    ]
    optimizer = SGD(groups, lr=0.1)
    UPGD(model, sigma=0.1, beta=0.5, weight_decay=0.2, seed=2).attach(optimizer)
    train(model, optimizer, "mlp", range(1))
    inputs, labels = zoo.batch("mlp", seed=100)
    cross_entropy(slow(inputs), labels).backward()
    noise = noise_of(slow, 2, 0)
    utilities = [-p.grad * p.detach() for p in slow.parameters()]
    gates = gates_of(utilities)
    for i, (mine, p) in enumerate(zip(model.parameters(), slow.parameters(), strict=True)):
        lr = 0.5 if i < 2 else 0.1
        expected = (1 - lr * 0.2) * p.detach() - lr * (p.grad + 0.1 * noise[i]) * gates[i]
        torch.testing.assert_close(mine.detach(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("order", [1, -1])
def test_a_rescaler_acts_after_it_whatever_was_attached_first(order: int) -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.05)
    swr = SWR(model, plan={"order": ["0", "2", "4"]}, lam=1.0)
    for method in (UPGD(model, sigma=0.01, seed=0), swr)[::order]:
        method.attach(optimizer)
    train(model, optimizer, "mlp", range(5))
    assert swr.receipt is not None
    for growth in swr.receipt.details["norm_growth"].values():
        assert growth == pytest.approx(1.0, rel=1e-9)


def test_calling_it_by_hand_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"acts on an optimizer's step: call attach\(\)"):
        UPGD(zoo.build("mlp")).step()


def test_a_sparse_gradient_is_refused_before_anything_moves() -> None:
    model = nn.Embedding(4, 3, sparse=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    method = UPGD(model).attach(optimizer)
    before = model.weight.detach().clone()
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="'weight' has a sparse gradient, but upgd needs a dense one"):
        optimizer.step()
    assert torch.equal(model.weight, before)
    assert method.steps == []


def test_an_optimizer_without_a_learning_rate_is_refused() -> None:
    class Own(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            pass

    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="this Own has no learning rate, but it scales its noise by the rate"):
        UPGD(model).attach(Own(model.parameters(), {}))


def test_the_receipt_has_the_gates_of_each_optimizer() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    method = UPGD(model, sigma=0.0, beta=0.0).attach(*optimizers)
    for layer, optimizer, size in zip(model, optimizers, (1e4, 1.0), strict=True):
        (size * layer(torch.randn(3, 4)).square().sum()).backward()
        optimizer.step()
    gates = [gates_of([utility]) for utility in method.averages["utilities"].values()]
    expected = sum(float(gate.sum()) for (gate,) in gates) / 32
    assert method.receipt is not None
    assert method.receipt.details["mean_gate"] == pytest.approx(expected)
