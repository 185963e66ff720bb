"""Soft weight rescaling as in the paper: plain loops over layers, one scalar at a time."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)
Form = Literal["printed", "paper", "exact"]


def frobenius(weight: Tensor) -> float:
    """Return the Frobenius norm."""
    return math.sqrt(sum(float(w) ** 2 for w in weight.detach().double().flatten()))


def layers_of(model: nn.Sequential) -> list[nn.Module]:
    return [m for m in model if next(m.parameters(), None) is not None]


@torch.no_grad()
def rescale(layers: list[nn.Module], initial: list[float], lam: list[float], form: Form) -> None:
    """Run one pass of Algorithm 1 after a gradient update.

    form="printed" is the algorithm as printed; form="paper" corrects its erratum (accumulate for l > k, not l ≥ k);
    form="exact" also keeps the function for biases between norm layers and in eval mode.
    """
    norms = [i for i, layer in enumerate(layers, start=1) if isinstance(layer, NORMS)]
    k = norms[-1] if norms else 0
    accumulated = 1.0
    for l, layer in enumerate(layers, start=1):
        norm = frobenius(layer.weight)
        c = (lam[l - 1] * initial[l - 1] + (1 - lam[l - 1]) * norm) / norm
        if form == "exact":
            if isinstance(layer, NORMS):
                if getattr(layer, "running_mean", None) is not None:
                    layer.running_mean *= accumulated
                    layer.running_var *= accumulated**2
                accumulated = c
            else:
                accumulated *= c
        elif (l >= k) if form == "printed" else (l > k):
            accumulated *= c
        else:
            accumulated = c
        layer.weight *= c
        if layer.bias is not None:
            layer.bias *= accumulated
