"""Methods in a misused model: an error comes before the optimizer has stepped, and says what to do."""

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pliant import methods
from pliant.methods import Method

NAMES = methods.names()
EXAMPLE = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(6) % 3
SETTINGS: dict[str, dict[str, Any]] = {"feature_rank": {"lam": 0.1}}


def make(name: str) -> tuple[nn.Module, Method]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with warnings.catch_warnings(action="ignore"):
        return model, methods.create(name, model, example=EXAMPLE, **SETTINGS.get(name, {}))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    x = EXAMPLE.to(next(model.parameters()).dtype)
    nn.functional.cross_entropy(model(x).float(), LABELS).backward()
    optimizer.step()


def weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", NAMES)
def test_a_method_is_not_made_under_inference_mode(name: str) -> None:
    with torch.inference_mode(), pytest.raises(ValueError, match=r"cannot be made under torch\.inference_mode\(\)"):
        make(name)
    with torch.no_grad():
        model, method = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method.attach(optimizer)
    train(model, optimizer)


def acts_on_steps(method: Method) -> bool:
    return not method.acts_on_new_data and method.kind != "architecture"


@pytest.mark.parametrize("name", [name for name in NAMES if methods.info(name).kind != "architecture"])
def test_replaced_parameters_are_found_before_a_step(name: str) -> None:
    model, method = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method.attach(optimizer)
    train(model, optimizer)
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    model.requires_grad_(True)
    before = weights(optimizer)
    apply = partial(method.apply, optimizer, batches=[(EXAMPLE, LABELS)], loss_fn=nn.functional.cross_entropy)
    act = partial(train, model, optimizer) if acts_on_steps(method) else apply
    with pytest.raises(ValueError, match=rf"was replaced since {name} was made .*construct {name} again"):
        act()
    assert equal(weights(optimizer), before)


@pytest.mark.parametrize("name", NAMES)
def test_a_cast_after_attaching_works_or_is_refused_before_a_step(name: str) -> None:
    model, method = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method.attach(optimizer)
    model.to(torch.bfloat16)
    before = weights(optimizer)
    if method.pins_placement:
        with pytest.raises(ValueError, match=f"cast and move the model first, then make {name}"):
            train(model, optimizer)
        assert equal(weights(optimizer), before)
        return
    with warnings.catch_warnings(action="ignore"):
        for _ in range(4):
            train(model, optimizer)
    assert not equal(weights(optimizer), before)


def test_a_model_that_stays_as_it_is_is_not_refused() -> None:
    model, method = make("l2_init")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method.attach(optimizer)
    model.load_state_dict(copy.deepcopy(model.state_dict()))  # Copies into the same parameters.
    before = weights(optimizer)
    train(model, optimizer)
    assert not equal(weights(optimizer), before)
    assert method.receipt is not None
