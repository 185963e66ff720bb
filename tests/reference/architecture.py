"""CReLU and layer normalization, one number at a time."""

import math

import torch
from torch import Tensor


def crelu(vector: list[float]) -> list[float]:
    """Return relu(v) of all entries, then relu(−v)."""
    return [v if v > 0 else 0.0 for v in vector] + [-v if v < 0 else 0.0 for v in vector]


def normalize(values: Tensor, eps: float = 1e-5) -> Tensor:
    """Return (values − mean) / standard deviation over all entries of one example."""
    flat = values.flatten().tolist()
    mean = sum(flat) / len(flat)
    variance = sum((v - mean) ** 2 for v in flat) / len(flat)
    return torch.tensor([(v - mean) / math.sqrt(variance + eps) for v in flat], dtype=values.dtype).view(values.shape)


def crelu_mlp(layers: list[tuple[Tensor, Tensor]], x: list[float]) -> list[float]:
    """Return the output of an MLP with CReLU for one example."""
    for i, (weight, bias) in enumerate(layers):
        rows = zip(weight.tolist(), bias.tolist(), strict=True)
        x = [sum(w * v for w, v in zip(row, x, strict=True)) + b for row, b in rows]
        if i < len(layers) - 1:
            x = crelu(x)
    return x
