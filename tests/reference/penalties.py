"""Penalties as terms of the loss, written as in the papers and differentiated by autograd."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)
Vectors = dict[str, tuple[Tensor, Tensor]]


def parameters_by_kind(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield name, kind ("weight", "scale" or "shift") and value of every parameter."""
    kinds = {}
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.Linear | _ConvNd):
                kinds[parameter] = leaf if leaf == "weight" else "shift"
            elif isinstance(module, NORMS):
                kinds[parameter] = "scale" if leaf == "weight" else "shift"
            else:
                kinds[parameter] = "shift"  # a class token or position embedding
    for name, parameter in model.named_parameters():
        yield name, kinds[parameter], parameter


def spectral(model: nn.Module, vectors: Vectors, k: float) -> Tensor:
    """Return Σ (σ₁ᵏ − 1)² + Σ_i (|γ_i|ᵏ − 1)² + (‖b‖ᵏ)², after one power iteration on each weight."""
    total = torch.zeros(())
    for name, kind, parameter in parameters_by_kind(model):
        if kind == "weight":
            sigma = iterate(parameter.flatten(1), vectors, name)
            total = total + (sigma**k - 1) ** 2
        elif kind == "scale":
            total = total + ((parameter.abs() ** k - 1) ** 2).sum()
        else:
            total = total + (parameter**2).sum() ** k  # (‖b‖ᵏ)² without a root, which has no derivative at zero
    return total


def spectral_norm(model: nn.Module, vectors: Vectors) -> Tensor:
    """Return ½ Σ σ₁², after one power iteration on each weight."""
    total = torch.zeros(())
    for name, kind, parameter in parameters_by_kind(model):
        if kind == "weight":
            total = total + iterate(parameter.flatten(1), vectors, name) ** 2 / 2
    return total


def iterate(weight: Tensor, vectors: Vectors, name: str) -> Tensor:
    """Do one power iteration; return σ = uᵀWv with u and v held fixed."""
    u, _ = vectors[name]
    with torch.no_grad():
        v = weight.T @ u
        v = v / v.norm()
        u = weight @ v
        u = u / u.norm()
    vectors[name] = (u, v)
    return u @ weight @ v


def wasserstein(model: nn.Module, initial: Sequence[Tensor]) -> Tensor:
    """Return Σ_l Σ_i (θ_(i) − θ⁰_(i))²."""
    total = torch.zeros(())
    for parameter, start in zip(model.parameters(), initial, strict=True):
        total = total + ((parameter.flatten().sort().values - start.flatten().sort().values) ** 2).sum()
    return total


def wasserstein_mean(model: nn.Module, initial: Sequence[Tensor]) -> Tensor:
    """Return the term with each tensor's sum divided by its size."""
    total = torch.zeros(())
    for parameter, start in zip(model.parameters(), initial, strict=True):
        total = total + ((parameter.flatten().sort().values - start.flatten().sort().values) ** 2).mean()
    return total


def parseval(model: nn.Module, s: float, norm_scales: bool) -> Tensor:
    """Return Σ ‖WWᵀ − sI‖² on the smaller side, and Σ ‖γ² − 1‖²."""
    total = torch.zeros(())
    for _, kind, parameter in parameters_by_kind(model):
        if kind == "weight":
            weight = parameter.flatten(1)
            product = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
            total = total + ((product - s * torch.eye(len(product), dtype=weight.dtype)) ** 2).sum()
        elif kind == "scale" and norm_scales:
            total = total + ((parameter**2 - 1) ** 2).sum()
    return total


def feature_rank(features: Tensor) -> Tensor:
    """Return σ₁² − σ_d² of the features, one row per example."""
    values = torch.linalg.svdvals(features.flatten(0, -2))
    return values[0] ** 2 - values[-1] ** 2


class StreamingEWC:
    """λ/2 Σ F(θ − θ̄)² with moving averages that are divided by 1 − βᵗ when used."""

    def __init__(self, model: nn.Module, lam: float, beta: float) -> None:
        self.parameters = list(model.parameters())
        self.lam, self.beta, self.steps = lam, beta, 0
        self.values = [torch.zeros_like(p) for p in self.parameters]
        self.squares = [torch.zeros_like(p) for p in self.parameters]

    def term(self, gradients: Sequence[Tensor]) -> Tensor:
        """Update the averages with θ and g; return the term of this step."""
        self.steps += 1
        correction = 1 - self.beta**self.steps
        total = torch.zeros(())
        for i, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            self.values[i] = self.beta * self.values[i] + (1 - self.beta) * parameter.detach()
            self.squares[i] = self.beta * self.squares[i] + (1 - self.beta) * gradient**2
            distance = parameter - self.values[i] / correction
            total = total + self.lam / 2 * (self.squares[i] / correction * distance**2).sum()
        return total
