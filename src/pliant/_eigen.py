"""Eigenvalues of symmetric matrices, with float64 as a fallback.

On sparse matrices of low rank (Gram matrices of dead units or of pruned weights), LAPACK may fail to converge in
float32 or return NaN. In float64 it converges.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues in ascending order and the eigenvectors of symmetric matrices.

    Args:
        matrices: [..., n, n].

    Returns:
        [..., n] and, in columns, [..., n, n], in the precision of the matrices.

    Example:
        >>> eigh(torch.tensor([[2.0, 0.0], [0.0, -1.0]]))[0].tolist()
        [-1.0, 2.0]
    """
    values, vectors = _decompose(torch.linalg.eigh, matrices)
    return values, vectors


def eigvalsh(matrices: Tensor) -> Tensor:
    """Return the eigenvalues of symmetric matrices in ascending order, at a third of the cost of `eigh`.

    Example:
        >>> eigvalsh(torch.tensor([[2.0, 0.0], [0.0, -1.0]])).tolist()
        [-1.0, 2.0]
    """
    (values,) = _decompose(lambda given: (torch.linalg.eigvalsh(given),), matrices)
    return values


def _decompose(function: Callable[[Tensor], Any], matrices: Tensor) -> list[Tensor]:
    try:
        found: list[Tensor] = list(function(matrices))
        if torch.stack([torch.isfinite(part).all() for part in found]).all():  # one wait for the device, not one each
            return found
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        pass
    return [part.to(matrices.dtype) for part in function(matrices.double())]
