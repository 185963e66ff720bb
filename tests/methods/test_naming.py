"""Module names in arguments: a mistake is an error that states the argument, the value and what is allowed."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from pliant import FIRE, SWR, FeatureRankRegularization, HeadReset, LayerwiseReset
from tests import zoo

X = zoo.batch("mlp")[0]
CASES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "SWR, order": (lambda m: SWR(m, plan={"order": ["0", "typo"]}), "order: the model has no module 'typo'"),
    "SWR, empty order": (lambda m: SWR(m, plan={"order": []}), r"order: \[\] is empty"),
    "Layerwise": (
        lambda m: LayerwiseReset(m, blocks=[["0"], ["typo"], ["4"]]),
        r"blocks\[1\]: the model has no module 'ty",
    ),
    "Layerwise, strings": (
        lambda m: LayerwiseReset(m, blocks=["0", "2"]),
        r"blocks\[0\]: '0' is a string; it must be a l",
    ),
    "HeadReset": (lambda m: HeadReset(m, head=["typo"]), "head: the model has no module 'typo'"),
    "HeadReset, a string": (lambda m: HeadReset(m, head="4"), "head: '4' is a string"),
    "HeadReset, empty": (lambda m: HeadReset(m, head=[]), r"head: \[\] is empty"),
    "FeatureRankRegularization": (
        lambda m: FeatureRankRegularization(m, classifier="44", lam=1e-4),
        r"classifier: .* '44'; did you mean '4'\?",
    ),
    "FIRE": (lambda m: FIRE(m, packed="0"), "packed: '0' is a string"),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_name_is_an_error(name: str) -> None:
    make, message = CASES[name]
    with pytest.raises(ValueError, match=message):
        make(zoo.build("mlp"))


@pytest.mark.parametrize("make", [SWR, HeadReset, partial(FeatureRankRegularization, lam=1e-4), LayerwiseReset])
def test_example_of_another_type_is_an_error(make: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match="example is a list; allowed are a tensor, a tuple of positional arguments"):
        make(zoo.build("mlp"), [X])


def test_chain_without_a_learnable_weight_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.LayerNorm(3, elementwise_affine=False))
    model.append(nn.Linear(3, 2, bias=False))
    with pytest.raises(ValueError, match="no weight can be rescaled"):
        SWR(model, plan={"order": ["0", "1"]})


def test_model_of_one_layer() -> None:
    model = nn.Linear(3, 2)
    assert SWR(model, torch.ones(1, 3), lam=0.1, lam_classifier=0.5).lam.tolist() == [0.5]
