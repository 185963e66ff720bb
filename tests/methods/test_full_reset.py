"""Full reset: fresh parameters, statistics and moments."""

import warnings
from collections import deque
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.optim import SGD, Adam

from pliant import FullReset
from tests import zoo
from tests.loops import snapshot, train

# apply() without an optimizer warns that no moments are reset; these tests do so on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*is given no optimizer and attached to none")


def trained(name: str) -> tuple[nn.Module, Adam]:
    model = zoo.build(name)
    optimizer = Adam(model.parameters(), lr=1e-2)
    train(model, optimizer, name, range(5))
    return model, optimizer


def test_gives_a_fresh_network() -> None:
    model, optimizer = trained("cnn_bn")
    FullReset(model, seed=1).apply(optimizer)
    assert len(optimizer.state) == 0
    batch_norm = model[1]
    assert (batch_norm.running_mean == 0).all()
    assert (batch_norm.running_var == 1).all()
    assert int(batch_norm.num_batches_tracked) == 0
    control = zoo.build("cnn_bn", seed=11)
    for p, q in zip(model.parameters(), control.parameters(), strict=True):
        if p.dim() > 1:
            assert float(p.detach().std()) == pytest.approx(float(q.detach().std()), rel=0.5)
    train(model, optimizer, "cnn_bn", range(2))
    assert all(int(state["step"]) == 2 for state in optimizer.state.values())


def test_can_keep_the_moments() -> None:
    model, optimizer = trained("mlp")
    FullReset(model, optimizer_state="keep").apply(optimizer)
    assert len(optimizer.state) == 6


def test_seed_leaves_the_global_generator_alone() -> None:
    model, _ = trained("mlp")
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    FullReset(model, seed=1).apply()
    assert torch.equal(torch.rand(1), expected)


def test_without_a_seed_the_global_generator_is_used() -> None:
    results = []
    for seed in (1, 1, 2):
        model, _ = trained("mlp")
        torch.manual_seed(seed)
        FullReset(model).apply()
        results.append(model[0].weight.detach().clone())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def changed_since(before: dict[str, Tensor], model: nn.Module) -> list[str]:
    now = snapshot(model)
    return [name for name in before if not torch.equal(before[name], now[name])]


class Policy(nn.Module):
    """Keeps its last distribution, as policies of Stable-Baselines3 do, and has a target network."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.target = nn.Linear(4, 2), nn.Linear(4, 2)
        self.kept: dict[str, list[Normal]] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.kept["last"] = [Normal(self.mean(x), 1.0)]
        return self.kept["last"][0].rsample()


def test_model_that_keeps_its_last_output() -> None:
    policy = Policy()
    optimizer = SGD(policy.mean.parameters(), lr=0.1)
    reset = FullReset(policy, where=lambda name, _: name.startswith("mean."))
    policy(torch.randn(3, 4)).sum().backward()
    kept, before = policy.kept["last"][0].loc, snapshot(policy)
    reset.apply(optimizer)
    assert changed_since(before, policy) == ["mean.weight", "mean.bias"]
    assert policy.kept["last"][0].loc is kept
    assert kept.grad_fn is not None


class Slotted:
    __slots__ = ("last",)


def _slotted(h: Tensor) -> Slotted:
    keeper = Slotted()
    keeper.last = h
    return keeper


KEEPERS = {
    "deque": lambda h: deque([h]),
    "slots": _slotted,
    "partial": lambda h: partial(torch.add, h),
    "method of a recorder": lambda h: _slotted(h).__getattribute__,
}


@pytest.mark.parametrize("kind", KEEPERS)
def test_model_that_keeps_its_last_output_in_any_container(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    model.kept = KEEPERS[kind](model(torch.randn(3, 4)))
    before = snapshot(model)
    FullReset(model).apply(SGD(model.parameters(), lr=0.1))
    assert changed_since(before, model) == ["0.weight", "0.bias"]


def test_moments_of_attached_and_given_optimizers_are_reset() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    weights, biases = Adam([model[0].weight, model[2].weight]), Adam([model[0].bias, model[2].bias])
    reset = FullReset(model).attach(weights, biases)
    model(torch.randn(5, 4)).sum().backward()
    weights.step()
    biases.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        receipt = reset.apply(weights)
    assert not weights.state
    assert not biases.state
    assert receipt.details["optimizer_tensors_reset"] == 12


def test_rewriting_parameters_outside_the_optimizers_warns() -> None:
    policy = Policy()
    optimizer = SGD(policy.mean.parameters(), lr=0.1)
    with pytest.warns(
        UserWarning, match=r"rewrote parameters that no given or attached optimizer holds: target.weight, target.b"
    ):
        FullReset(policy).apply(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FullReset(policy, where=lambda name, _: name.startswith("mean.")).apply(optimizer)
        FullReset(policy, optimizer_state="keep").apply()  # without an optimizer, nothing is known about training
