"""DASH as in the paper: one weight vector at a time, in float64."""

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

NORMS = (nn.BatchNorm2d, nn.LayerNorm)


def directions(model: nn.Module, chunks: list[tuple[Tensor, Tensor]], alpha: float) -> dict[str, Tensor]:
    """Return the moving average of negative gradients, one step per chunk, starting at zero."""
    model = copy.deepcopy(model)
    average = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for inputs, labels in chunks:
        model.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        for name, p in model.named_parameters():
            average[name] = (1 - alpha) * average[name] + alpha * -p.grad
    return average


def cosine(a: Tensor, b: Tensor) -> float:
    pairs = list(zip(a.flatten().tolist(), b.flatten().tolist(), strict=True))
    norms = math.sqrt(sum(x * x for x, _ in pairs)) * math.sqrt(sum(y * y for _, y in pairs))
    return sum(x * y for x, y in pairs) / norms if norms else 0.0


@torch.no_grad()
def dash(model: nn.Module, average: dict[str, Tensor], lam: float) -> None:
    """Shrink every row of a linear layer, kernel of a convolution, token and bias, but not norm layers."""
    for path, module in model.named_modules():
        if isinstance(module, NORMS):
            continue
        for leaf, weight in module.named_parameters(recurse=False):
            g = average[f"{path}.{leaf}" if path else leaf]
            if weight.ndim >= 3:
                places = [(i, j) for i in range(weight.shape[0]) for j in range(weight.shape[1])]
            elif weight.ndim == 2:
                places = [(i,) for i in range(weight.shape[0])]
            else:
                places = [()]
            for place in places:
                weight[place] *= min(max(cosine(g[place], weight[place]), lam), 1.0)
