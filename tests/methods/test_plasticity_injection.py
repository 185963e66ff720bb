"""Plasticity injection: the output stays, a fresh head learns, the old one is frozen."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam

from pliant import L2, PlasticityInjection
from pliant.methods._core.initial import draw_fresh, seeded
from pliant.methods.plasticity_injection import InjectedSequential
from tests import zoo
from tests.loops import assert_same, snapshot, train, training_step

X, Y = zoo.batch("mlp")


class Reference(nn.Module):
    """An encoder, a head that learns, and frozen heads as modules of their own."""

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head
        self.frozen: list[tuple[float, nn.Module]] = []

    def inject(self, fresh: nn.Module) -> None:
        self.frozen += [(1.0, copy.deepcopy(self.head)), (-1.0, copy.deepcopy(fresh))]
        self.head = fresh

    def forward(self, x: Tensor) -> Tensor:
        features = self.encoder(x)
        return self.head(features) + sum(sign * head(features) for sign, head in self.frozen)


def test_same_trajectory_as_three_heads() -> None:
    model, plain = zoo.build("mlp"), zoo.build("mlp")
    slow = Reference(plain[:2], plain[2:])
    optimizer = SGD(model.parameters(), lr=0.1)
    method = PlasticityInjection(model, seed=3).attach(optimizer)
    for step in range(9):
        if step in (3, 6):
            before = model(X).detach()
            receipt = method.apply()
            torch.testing.assert_close(model(X), before, rtol=1e-12, atol=1e-14)
            fresh = copy.deepcopy(slow.head)
            with seeded(3, step // 3 - 1):
                values = draw_fresh(model)
            fresh.load_state_dict({name: values[name] for name in fresh.state_dict()})
            slow.inject(fresh)
            assert receipt.details["injections"] == step // 3
            assert receipt.entries == sum(p.numel() for p in slow.head.parameters())
            assert receipt.details["frozen_entries"] == 2 * (step // 3) * receipt.entries
        batch = zoo.batch("mlp", seed=100 + step)
        training_step(model, optimizer, batch)
        training_step(slow, SGD([*slow.encoder.parameters(), *slow.head.parameters()], lr=0.1), batch)
        torch.testing.assert_close(model(X), slow(X), rtol=1e-10, atol=1e-12)
    for mine, theirs in zip(model[2:].parameters(), slow.head.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_names_parameters_and_learnable_entries_stay() -> None:
    model = zoo.build("cnn_bn")
    before = {name: id(p) for name, p in model.named_parameters()}
    method = PlasticityInjection(model, seed=0)
    method.apply(Adam(model.parameters()))
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert set(method.parameters) == {"9.weight", "9.bias", "11.weight", "11.bias"}


def test_a_saved_model_computes_the_same_and_loads_more_or_fewer_heads() -> None:
    model = zoo.build("mlp")
    method = PlasticityInjection(model, seed=0, optimizer_state="keep")
    plain = copy.deepcopy(model.state_dict())
    method.apply()
    train(model, SGD(model.parameters(), lr=0.1), "mlp", range(2))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = zoo.build("mlp", seed=4)
    PlasticityInjection(other)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(X), model(X))
    assert torch.equal(copy.deepcopy(model)(X), model(X))
    other.load_state_dict(plain)
    assert torch.equal(other(X), zoo.build("mlp")(X))
    assert other.copies == 0


def test_a_model_that_was_not_loaded_is_an_error() -> None:
    method = PlasticityInjection(zoo.build("mlp"), seed=0, optimizer_state="keep")
    method.apply()
    model = zoo.build("mlp")
    other = PlasticityInjection(model, seed=0, optimizer_state="keep")
    other.load_state_dict(method.state_dict())
    with pytest.raises(ValueError, match="has the frozen heads of 0 injections"):
        other.attach(SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="has the frozen heads of 0 injections"):
        other.apply()
    model.load_state_dict(method.model.state_dict())
    assert other.apply().details["injections"] == 2


def test_a_part_of_a_model_can_hold_the_head() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(12, 8)
            self.critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.critic(self.body(x).relu())

    model = Net().double()
    with pytest.raises(
        ValueError, match=r"head: 'the model' is a Net; it must be an nn.Sequential .*\(there are critic\)"
    ):
        PlasticityInjection(model)
    method = PlasticityInjection(model, head="critic", optimizer_state="keep")
    expected = model(X)
    method.apply()
    torch.testing.assert_close(model(X), expected)
    assert isinstance(model.critic, InjectedSequential)
    cross_entropy(model(X), Y).backward()
    assert model.body.weight.grad.abs().sum() > 0


def test_other_methods_go_on() -> None:
    model = zoo.build("mlp")
    optimizer = Adam(model.parameters(), lr=1e-2)
    L2(model, lam=0.1).attach(optimizer)
    method = PlasticityInjection(model, seed=0).attach(optimizer)
    train(model, optimizer, "mlp", range(2))
    method.apply()
    before = snapshot(model)
    train(model, optimizer, "mlp", range(2, 4))
    frozen = {name: value for name, value in before.items() if "injected" in name}
    assert len(frozen) == 8
    assert_same(frozen, {name: model.state_dict()[name] for name in frozen})


def test_heads_that_make_no_sense_are_errors() -> None:
    with pytest.raises(ValueError, match="layers: 1 is not allowed; it must be ≥ 2"):
        PlasticityInjection(zoo.build("mlp"), layers=1)
    with pytest.raises(ValueError, match="head: it has 3 weight layers, but layers=4"):
        PlasticityInjection(zoo.build("mlp"), layers=4)
    with pytest.raises(ValueError, match="head: it has buffers, such as running statistics"):
        PlasticityInjection(zoo.build("cnn_bn"), layers=3)
    with pytest.raises(ValueError, match="head: 'typo' is not a module of the model"):
        PlasticityInjection(zoo.build("mlp"), head="typo")
