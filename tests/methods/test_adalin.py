"""AdaLin: the formula one number at a time, and its place in existing models."""

import math

import pytest
import torch
from torch import nn
from torch.optim import Adam

from pliant import AdaLin, AdaptiveLinearity
from pliant.methods.adalin import SLOPES
from tests import zoo
from tests.loops import train


@pytest.mark.parametrize("kind", SLOPES)
def test_matches_the_formula(kind: type[nn.Module]) -> None:
    """φ′ is autograd's, and L is the largest |φ′| on a fine grid."""
    grid = torch.linspace(-6, 6, 100_001, dtype=torch.float64, requires_grad=True)
    phi = kind()
    (slopes,) = torch.autograd.grad(phi(grid).sum(), grid)
    largest = float(slopes.abs().max())
    assert SLOPES[kind][1] == pytest.approx(largest, rel=1e-4)
    module = AdaLin(phi, 3, -1).double()
    with torch.no_grad():
        module.alpha.copy_(torch.tensor([0.5, -1.0, 2.0]))
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    output = module(x)
    (output * torch.arange(12.0).view(4, 3)).sum().backward()
    alphas = [0.0, 0.0, 0.0]
    for i in range(4):
        for j in range(3):
            value = x.detach()[i, j].clone().requires_grad_()
            y = phi(value)
            (slope,) = torch.autograd.grad(y, value)
            flat = math.cos(math.pi / 2 * min(abs(float(slope)) / largest, 1.0))
            alpha = float(module.alpha[j])
            assert float(output[i, j]) == pytest.approx(float(y) + alpha * float(value) * flat, abs=3e-4)
            assert float(x.grad[i, j]) == pytest.approx((3 * i + j) * (float(slope) + alpha * flat), abs=3e-3)
            alphas[j] += (3 * i + j) * float(value) * flat
    assert module.alpha.grad.tolist() == pytest.approx(alphas, abs=3e-3)


@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn_bn", "vgg"])
def test_a_converted_model_computes_the_same_until_it_learns(name: str) -> None:
    model = zoo.build(name)
    x = zoo.batch(name)[0]
    model.eval()
    expected = model(x)
    made = AdaptiveLinearity(model, x)
    assert torch.equal(model(x), expected)
    alphas = {key: p for key, p in model.named_parameters() if key.endswith("alpha")}
    assert made.receipt.tensors == len(alphas) == len(made.changed)
    model.train()
    train(model, Adam(model.parameters(), lr=1e-2), name, range(3))
    assert all(alpha.abs().sum() > 0 for alpha in alphas.values())


def test_a_dead_unit_learns_again() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    AdaptiveLinearity(model, torch.zeros(1, 2), alpha=0.1)
    model(torch.randn(5, 2)).sum().backward()
    assert (model[0].weight.grad.abs().sum(1) > 0).all()


def test_optimizers_made_before_are_refused() -> None:
    model = zoo.build("mlp")
    optimizer = Adam(model.parameters())
    with pytest.raises(ValueError, match=r"holds '0\.weight' but not '1\.alpha', which adalin made"):
        AdaptiveLinearity(model, zoo.batch("mlp")[0]).attach(optimizer)


def test_unknown_activations_are_skipped() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Softplus(), nn.Linear(4, 4), nn.GELU("tanh"), nn.Linear(4, 1))
    with pytest.raises(ValueError, match=r"no activation module follows it .*its GELU is an approximation"):
        AdaptiveLinearity(model, torch.zeros(1, 2))
