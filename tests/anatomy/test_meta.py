"""A model on the meta device has no values, and its scales are those of the same model with values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pliant.anatomy import analyze
from pliant.models import create


def gpt2() -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64)
    return transformers.GPT2LMHeadModel(config), {"input_ids": torch.zeros(1, 8, dtype=torch.int64)}


def resnet() -> tuple[nn.Module, Any]:
    return create("resnet18", (3, 16, 16), 10), torch.zeros(2, 3, 16, 16)


@pytest.mark.parametrize("build", [gpt2, resnet])
def test_the_scales_are_those_of_the_model_with_values(build: Callable[[], tuple[nn.Module, Any]]) -> None:
    plan = analyze(*build()).plan()
    with torch.device("meta"):
        model, example = build()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    without_values = analyze(model, example).plan()
    assert without_values.wishes == plan.wishes
    assert without_values.targets == plan.targets
    assert torch.equal(without_values.matrix, plan.matrix)
    assert torch.equal(without_values.outputs, plan.outputs)
    assert len(plan.wishes) > 5
