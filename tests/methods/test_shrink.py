"""Shrink, with and without keeping the function."""

import pytest
import torch
from torch import nn

from pliant import Shrink
from tests import zoo


@pytest.mark.parametrize("name", zoo.MODELS)
def test_proportional_shrinking_keeps_the_function(name: str) -> None:
    model, (x, _) = zoo.build(name).eval(), zoo.batch(name)
    before = model(x)
    weights = {key: p.detach().clone() for key, p in model.named_parameters()}
    Shrink(model, x, lam=0.3).apply()
    after = model(x)
    ratio = (after / before)[before.abs() > 1e-3]
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-3, atol=0.0)
    assert all(p.norm() < weights[key].norm() for key, p in model.named_parameters() if p.ndim > 1)


def test_output_shrinks_by_the_product_of_all_factors() -> None:
    model, (x, _) = zoo.build("mlp"), zoo.batch("mlp")
    before = model(x)
    layers = sum(p.ndim == 2 for p in model.parameters())
    Shrink(model, x, lam=0.3).apply()
    torch.testing.assert_close(model(x), before * 0.7**layers)


def test_without_proportional_only_the_weights_shrink() -> None:
    model, (x, _) = zoo.build("mlp"), zoo.batch("mlp")
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    outputs = model(x)
    Shrink(model, x, lam=0.3, proportional=False).apply()
    for key, p in model.named_parameters():
        torch.testing.assert_close(p, before[key] * (0.7 if p.ndim == 2 else 1.0))
    ratio = model(x) / outputs
    assert ratio.std() > 0.01


def test_without_proportional_layers_before_tanh_shrink_too() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), torch.ones(1, 4)
    model[2].weight.requires_grad_(False)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    Shrink(model, x, lam=0.5, proportional=False).apply()
    for key, p in model.named_parameters():
        assert torch.equal(p, before[key] * (0.5 if key in ("0.weight", "4.weight") else 1.0))


def test_where_leaves_weights_out() -> None:
    model, (x, _) = zoo.build("mlp"), zoo.batch("mlp")
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    first = next(key for key, p in model.named_parameters() if p.ndim == 2)
    Shrink(model, x, lam=0.3, proportional=False, where=lambda name, _: name == first).apply()
    assert [key for key, p in model.named_parameters() if not torch.equal(p, before[key])] == [first]


@pytest.mark.parametrize("lam", [-0.1, 1.0, 1.5])
def test_lam_out_of_range_is_an_error(lam: float) -> None:
    with pytest.raises(ValueError, match="lam"):
        Shrink(zoo.build("mlp"), zoo.batch("mlp")[0], lam=lam)


def test_missing_example_is_an_error() -> None:
    with pytest.raises(ValueError, match="example: None, but shrink analyzes the model on one"):
        Shrink(zoo.build("mlp"))


def test_only_moments_of_shrunk_parameters_are_reset() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    chosen = {"optimizer_state": "reset", "where": lambda name, p: name == "0.weight"}
    Shrink(model, torch.zeros(1, 3), proportional=False, **chosen).apply(optimizer)
    assert set(optimizer.state) == set(model.parameters()) - {model[0].weight}
