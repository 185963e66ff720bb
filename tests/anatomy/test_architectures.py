"""The promise itself: on every architecture, a rescaling multiplies the outputs and does nothing else."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pliant.anatomy import analyze
from tests.anatomy.architectures import ALL

TINY = torch.finfo(torch.float64).tiny
# LLaMA's norm layers and rotary embeddings compute in float32, whatever the model's type.
ROUNDING = {"hf_llama": 16 * torch.finfo(torch.float32).eps}


def prepared(name: str, dtype: torch.dtype = torch.float64, eps: float | None = TINY) -> tuple[nn.Module, Any]:
    """Return a model at a generic point: no parameter or statistic is zero or constant."""
    torch.manual_seed(0)
    model, example = ALL[name]()
    model.to(dtype)
    for tensor in model.parameters():
        tensor.data += 0.1 * torch.randn_like(tensor)
    for key, tensor in model.named_buffers():
        if key.endswith("running_mean"):
            tensor.copy_(torch.randn_like(tensor))
        elif key.endswith("running_var"):
            tensor.copy_(torch.rand_like(tensor) + 0.5)
    if eps is not None:
        for module in model.modules():
            for attribute in ("eps", "variance_epsilon"):
                if hasattr(module, attribute):
                    setattr(module, attribute, eps)
    return model, torch.utils._pytree.tree_map_only(
        Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, example
    )


def call(model: nn.Module, example: Any, training: bool) -> dict[str, Tensor]:
    """Run a copy of a model, so that no statistic moves, always with the same dropout masks."""
    model = copy.deepcopy(model).train(training)
    torch.manual_seed(1)
    with torch.no_grad():
        if isinstance(example, dict):
            result = model(**example)
        else:
            result = model(*example) if isinstance(example, tuple) else model(example)
    if isinstance(result, Tensor):
        return {"output": result}
    return {key: value for key, value in result.items() if isinstance(value, Tensor)}


def random_wishes(names: list[str], spread: float = 0.7) -> dict[str, float]:
    generator = torch.Generator().manual_seed(2)
    return {name: float(torch.empty(()).uniform_(-spread, spread, generator=generator).exp()) for name in names}


@pytest.mark.parametrize("name", ALL)
def test_exactly_proportional(name: str) -> None:
    model, example = prepared(name)
    graph = analyze(model, example)
    wishes = random_wishes([str(block) for block in graph.plan().wishes])
    before = {training: call(model, example, training) for training in (True, False)}
    rescaling = graph.rescale_(wishes)
    tolerance = ROUNDING.get(name, 1e-11)
    assert max(rescaling.drift.values()) < tolerance
    for training, outputs in before.items():
        after = call(model, example, training)
        for key, output in outputs.items():
            expected = output * rescaling.outputs[key]
            assert (after[key] - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("name", ["densenet", "unet", "gpt_tied", "encoder"])
def test_eval_mode_gives_the_same_plan(name: str) -> None:
    model, example = prepared(name)
    plans = [analyze(model.train(training), example).plan() for training in (True, False)]
    assert plans[0].wishes == plans[1].wishes
    assert plans[0].targets == plans[1].targets
    torch.testing.assert_close(plans[0].matrix, plans[1].matrix, rtol=0, atol=0)
    torch.testing.assert_close(plans[0].outputs, plans[1].outputs, rtol=0, atol=0)


def test_every_parameter_is_covered() -> None:
    model, example = prepared("cross_attention")
    graph = analyze(model, example)
    for name, parameter in model.named_parameters():
        covered = torch.zeros_like(parameter)
        for block in graph.blocks:
            if block.name == name:
                block.of(covered).add_(1)
        assert bool((covered == 1).all())


@pytest.mark.parametrize("name", ["resnet18", "preact_resnet", "vit_relu", "gpt_tied", "hf_llama"])
def test_default_epsilons_drift_little_and_are_reported(name: str) -> None:
    model, example = prepared(name, torch.float32, eps=None)
    graph = analyze(model, example)
    rescaling = graph.rescale_(random_wishes([str(block) for block in graph.plan().wishes], spread=0.1))
    assert 0 < max(rescaling.drift.values()) < 1e-3
    assert "norm layers add an epsilon" in graph.explain()


@pytest.mark.parametrize("name", [pytest.param("resnet18", marks=pytest.mark.long), "preact_resnet", "vit_relu"])
def test_predictions_on_ten_thousand_inputs_are_kept(name: str) -> None:
    model, example = prepared(name)
    model.eval()
    graph = analyze(model, example)
    inputs = torch.randn(10_000, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        model.head.bias -= model(inputs[:1000]).mean(0)  # so that no class wins by its bias alone
        before = model(inputs).argmax(-1)
        graph.rescale_(random_wishes([str(block) for block in graph.plan().wishes]))
        after = model(inputs).argmax(-1)
    assert before.bincount().max() < 5_000
    assert int((before != after).sum()) == 0
