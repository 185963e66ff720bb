"""FIRE as in the paper: Algorithm 1 in float64, one matrix at a time."""

import math

import torch
from torch import Tensor, nn


def newton_schulz(matrix: Tensor, iterations: int, polynomial: str = "cubic") -> Tensor:
    """Run Algorithm 1 of the paper ("cubic") or the recurrence of A.2 ("quintic")."""
    x = matrix.double() / math.sqrt(float((matrix.double() ** 2).sum()))
    for _ in range(iterations):
        a = x.T @ x
        x = 1.5 * x - 0.5 * x @ a if polynomial == "cubic" else 2 * x - 1.5 * x @ a + 0.5 * x @ a @ a
    return x


def polar_factor(matrix: Tensor) -> Tensor:
    """Return the nearest matrix with orthonormal rows or columns."""
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    return left @ right


@torch.no_grad()
def fire(modules: list[nn.Module], iterations: int = 10, polynomial: str = "cubic") -> None:
    """Rewrite the weights of linear and convolution layers."""
    for module in modules:
        weight = module.weight
        if weight.ndim == 2:
            scale = math.sqrt(weight.shape[0] / weight.shape[1])
            weight.copy_(scale * newton_schulz(weight, iterations, polynomial))
            continue
        outputs, inputs, height, width = weight.shape
        scale = math.sqrt(outputs / inputs) / (height * width)
        for i in range(height):
            for j in range(width):
                weight[:, :, i, j] = scale * newton_schulz(weight[:, :, i, j].clone(), iterations, polynomial)
