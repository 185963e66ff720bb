"""Hooks run once a step, whatever classes an optimizer has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

from pliant import L2, SWR, UPGD, FeatureRankRegularization, HareTortoise, Monitor, ReDo
from pliant._step_hooks import _StepHook, after_step
from pliant.methods import Method
from tests import zoo
from tests.loops import assert_same, snapshot, train


class Logging(SGD):
    """A step of its own that calls the one above it."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


X, Y = zoo.batch("mlp")
METHODS: dict[str, Callable[[nn.Module], Method]] = {
    "l2": lambda model: L2(model, lam=1.0),
    "swr": lambda model: SWR(model, X, lam=0.5),
    "swr, every other step": lambda model: SWR(model, X, lam=0.5, every=2, schedule="reinit"),
    "upgd": lambda model: UPGD(model, seed=0),
    "hare_tortoise": lambda model: HareTortoise(model, beta=0.5, every=2),
    "redo": lambda model: ReDo(model, X, every=2, tau=0.5, seed=0),
    "feature_rank": lambda model: FeatureRankRegularization(model, X, lam=1e-2),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_step_that_calls_the_one_above_it_is_one_step(name: str) -> None:
    found, steps = [], []
    for kind in (SGD, Logging):  # torch has wrapped the step of SGD when the other is made
        model = zoo.build("mlp")
        optimizer = kind(model.parameters(), lr=0.1)
        method = METHODS[name](model).attach(optimizer)
        train(model, optimizer, "mlp", range(4))
        found.append(snapshot(model))
        steps.append(method.steps)
    assert_same(*found)
    assert steps[0] == steps[1]
    assert sum(steps[0]) == 4


def test_a_step_that_failed_does_not_count_as_one_around_the_next() -> None:
    model = zoo.build("mlp")
    optimizer = Logging(model.parameters(), lr=0.1)
    method = L2(model, lam=1.0).attach(optimizer)

    def fail() -> float:
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        optimizer.step(fail)
    train(model, optimizer, "mlp", range(3))
    assert method.steps == [3]


def test_a_monitor_counts_such_a_step_once() -> None:
    model = zoo.build("mlp")
    optimizer = Logging(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, every=1, measures=["update_l1"], loss_fn=cross_entropy, budget=None)
    train(model, optimizer, "mlp", range(3))
    assert len(monitor.records) == 3


@pytest.mark.parametrize(("kind", "looks"), [(SGD, False), (AdamW, False), (Logging, True)])
def test_only_what_needs_it_looks_at_the_stack(kind: Any, looks: bool) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(2))], lr=0.1)
    after_step(optimizer, lambda *_: None)
    (hook,) = optimizer._optimizer_step_post_hooks.values()
    assert isinstance(hook, _StepHook)
    assert hook._outermost == looks
