"""Reinitializers that act by themselves: `at` given steps, and `every` so many."""

import warnings
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam

from pliant import FullReset, HareTortoise, ShrinkPerturb, methods
from tests import zoo
from tests.loops import assert_same, snapshot, train

REINITIALIZERS = [name for name in methods.names() if methods.info(name).kind == "reinitializer"]
X = zoo.batch("cnn_bn")[0]


def run(name: str, apply_after: tuple[int, ...] = (), **settings: Any) -> dict[str, torch.Tensor]:
    model = zoo.build("cnn_bn")
    optimizer = Adam(model.parameters(), lr=1e-2)
    method = methods.create(name, model, example=X, seed=3, **settings).attach(optimizer)
    for step in range(7):
        train(model, optimizer, "cnn_bn", [step])
        if step + 1 in apply_after:
            method.apply()
    return snapshot(model)


@pytest.mark.parametrize("name", [name for name in REINITIALIZERS if name != "dash"])
def test_the_same_as_apply_after_these_steps(name: str) -> None:
    assert_same(run(name, at=[2, 5]), run(name, apply_after=(2, 5)))
    assert_same(run(name, every=3), run(name, apply_after=(3, 6)))


def test_dash_uses_the_gradient_of_the_step() -> None:
    model, slow = zoo.build("mlp"), zoo.build("mlp")
    optimizer, other = SGD(model.parameters(), lr=0.1), SGD(slow.parameters(), lr=0.1)
    methods.create("dash", model, at=2).attach(optimizer)
    train(model, optimizer, "mlp", range(2))
    train(slow, other, "mlp", range(2))
    with torch.no_grad():
        for p in slow.parameters():
            rows = p if p.ndim > 1 else p[None]
            for row, g in zip(rows, p.grad if p.ndim > 1 else p.grad[None], strict=True):
                row *= max(float(torch.cosine_similarity(row.flatten(), -g.flatten(), dim=0)), 0.3)
    for left, right in zip(model.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(left, right)


def test_acts_once_for_several_optimizers_and_resets_the_state_of_all() -> None:
    model = zoo.build("mlp")
    body = Adam([*model[0].parameters(), *model[2].parameters()])
    head = Adam(model[4].parameters())
    method = FullReset(model, seed=1, at=[2]).attach(body, head)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2):
            for optimizer in (head, body):
                train(model, optimizer, "mlp", [step])
    assert method.draws == 1
    assert method.steps == [2, 2]
    assert not body.state
    assert not head.state


def test_a_resumed_run_acts_at_the_same_steps() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    method = ShrinkPerturb(model, at=[2, 4], toward="fresh", seed=1).attach(optimizer)
    train(model, optimizer, "mlp", range(3))
    values, state = snapshot(model), method.state_dict()
    other = zoo.build("mlp", seed=5)
    again = SGD(other.parameters(), lr=0.1)
    resumed = ShrinkPerturb(other, at=[2, 4], toward="fresh", seed=1)
    other.load_state_dict(values)
    resumed.load_state_dict(state)
    resumed.attach(again)
    train(model, optimizer, "mlp", range(3, 6))
    train(other, again, "mlp", range(3, 6))
    assert_same(snapshot(model), snapshot(other))
    assert resumed.draws == 2


def test_a_due_step_that_is_skipped_leaves_the_action_to_the_next() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    method = FullReset(model, seed=1, at=2, optimizer_state="keep").attach(optimizer)
    train(model, optimizer, "mlp", [0])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(zoo.batch("mlp")[0]).sum() * torch.inf).backward()
    scaler.step(optimizer)
    assert method.receipt is None
    train(model, optimizer, "mlp", [1])
    assert method.receipt is not None


def test_acts_after_all_other_methods() -> None:
    """As `apply()` after the step would: the tortoise has followed the hare before the hare is reset."""
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    FullReset(model, seed=1, at=1, optimizer_state="keep").attach(optimizer)
    hare = HareTortoise(model, beta=0.0, every=None).attach(optimizer)
    train(model, optimizer, "mlp", [0])
    plain = zoo.build("mlp")
    train(plain, SGD(plain.parameters(), lr=0.1), "mlp", [0])
    assert torch.equal(hare.tortoise["0.weight"], plain[0].weight)
    assert not torch.equal(model[0].weight, plain[0].weight)


@pytest.mark.parametrize("name", REINITIALIZERS)
def test_steps_that_make_no_sense_are_errors(name: str) -> None:
    for settings, message in (({"at": [0]}, "at: 0"), ({"at": "2"}, "at: '2'"), ({"every": 0}, "every: 0")):
        with pytest.raises(ValueError, match=f"{message} is not allowed; it must be an integer ≥ 1"):
            methods.create(name, zoo.build("cnn_bn"), example=X, **settings)


@pytest.mark.parametrize("name", REINITIALIZERS)
def test_waits_for_new_data_unless_it_has_a_schedule(name: str) -> None:
    assert methods.create(name, zoo.build("cnn_bn"), example=X).acts_on_new_data
    assert not methods.create(name, zoo.build("cnn_bn"), example=X, every=5).acts_on_new_data
