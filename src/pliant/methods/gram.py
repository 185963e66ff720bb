"""Gram matrices at less than the price of a matrix product."""

import torch
from torch import Tensor

_SMALLEST_BLOCK = 64
"""Rows below which splitting costs more than it saves."""


def gram(matrix: Tensor) -> Tensor:
    """Return M Mᵀ, computing only one of the two halves that mirror each other.

    The matrix is split into an upper and a lower part twice over, so that 5/8 of the products remain.

    Args:
        matrix: M.

    Example:
        >>> gram(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
        tensor([[5., 2.],
                [2., 1.]])
    """
    result = matrix.new_empty(len(matrix), len(matrix))
    _fill(matrix, result, splits=2)
    return result


def _fill(matrix: Tensor, result: Tensor, splits: int) -> None:
    half = len(matrix) // 2
    if splits == 0 or half < _SMALLEST_BLOCK:
        torch.mm(matrix, matrix.mT, out=result)
        return
    upper, lower = matrix[:half], matrix[half:]
    _fill(upper, result[:half, :half], splits - 1)
    _fill(lower, result[half:, half:], splits - 1)
    torch.mm(lower, upper.mT, out=result[half:, :half])
    result[:half, half:] = result[half:, :half].mT
