"""Warnings name the line of the user's own code."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from pliant import L2, SWR, FullReset, L2Init, methods
from tests import zoo

REWRITING = [name for name in methods.names() if methods.info(name).kind in ("after_step", "recycler", "reinitializer")]


class Averaging(SGD):
    """Shows an average of the weights in evaluation, as the schedule-free optimizers do."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.param_groups[0]["train_mode"] = True

    def eval(self) -> None: ...


@pytest.mark.parametrize("name", REWRITING)
def test_an_optimizer_that_shows_an_average_is_named(name: str) -> None:
    model = zoo.build("mlp")
    method = methods.create(name, model, example=zoo.batch("mlp")[0])
    with pytest.warns(UserWarning, match=f"{name} rewrites the weights that Averaging trains, but not the av") as told:
        method.attach(Averaging(model.parameters(), lr=0.1))
    assert [warning.filename for warning in told] == [__file__]


def test_it_is_named_where_it_is_only_given() -> None:
    model = zoo.build("mlp")
    with pytest.warns(UserWarning, match="full_reset rewrites the weights that Averaging trains") as told:
        FullReset(model).apply(Averaging(model.parameters(), lr=0.1))
    assert [warning.filename for warning in told] == [__file__]


STEPPING = [name for name in methods.names() if methods.info(name).kind in ("penalty", "after_step", "recycler")]


@pytest.mark.parametrize("name", STEPPING)
def test_a_second_one_on_the_same_optimizer_is_told(name: str) -> None:
    """The cell of a notebook that is run again leaves the first one at work, out of reach."""
    model, example = zoo.build("mlp"), zoo.batch("mlp")[0]
    optimizer = SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        methods.create(name, model, example=example, **zoo.REQUIRED.get(name, {})).attach(optimizer).detach()
        first = methods.create(name, model, example=example, **zoo.REQUIRED.get(name, {})).attach(optimizer)
    with pytest.warns(UserWarning, match=f"another {name} is attached to this SGD and acts on the same param") as told:
        methods.create(name, model, example=example, **zoo.REQUIRED.get(name, {})).attach(optimizer)
    assert [warning.filename for warning in told] == [__file__]
    assert first.optimizers == (optimizer,)


def test_foreign_hooks_are_ignored() -> None:
    """A hook may belong to anything: a list that collects steps cannot be hashed."""
    model, seen = zoo.build("mlp"), []
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *arguments: None)
    optimizer.register_step_pre_hook(seen.__contains__)
    assert L2(model).attach(optimizer).optimizers == (optimizer,)


def test_two_methods_on_different_parameters_do_not_warn() -> None:
    model, example = zoo.build("mlp"), zoo.batch("mlp")[0]
    optimizer = SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        L2(model, lam={"0.*": 0.1}).attach(optimizer)
        L2(model, lam={"2.*": 0.2}).attach(optimizer)
        L2Init(model).attach(optimizer)
        SWR(model, example, where=lambda name, _: name.startswith("0.")).attach(optimizer)
        SWR(model, example, where=lambda name, _: name.startswith("2.")).attach(optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == 5  # SWR's only look whether the model is still the same
    assert len(optimizer._optimizer_step_post_hooks) == 2


def test_warnings_in_a_step_point_to_the_line_of_the_step() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = SGD(model.parameters(), lr=0.1)
    SWR(model, torch.randn(2, 4)).attach(optimizer)
    late = nn.Linear(3, 2)
    model.append(late)
    optimizer.add_param_group({"params": list(late.parameters())})
    with pytest.warns(UserWarning, match="swr does not act on") as told:
        optimizer.step()
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
