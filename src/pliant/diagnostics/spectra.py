"""Numbers that summarize singular values: ranks that are stable to perturbation, and conditioning.

The field calls several different things "effective rank". Each has its own name here:

- `effective_rank`: exp of the entropy of the normalized singular values (Roy & Vetterli 2007). Spectral
  regularization (§3.3) prints the entropy without its minus sign and without the exponential, which turns the
  order of matrices round.
- `srank`: how many singular values carry 1 − δ of their sum (Kumar 2021; Curvature §4, FIRE thm. 3). Curvature asks
  for *more* than 99 %, FIRE for *at least* that; they differ only on exact ties, and this is the latter.
- `stable_rank`: ‖A‖²_F / σ₁².

All take the singular values, so that one decomposition serves them all; `singular_values` gives them.
"""

import math

import torch
from torch import Tensor

from pliant._precision import widen
from pliant._validation import check_number


def as_matrix(weight: Tensor) -> Tensor:
    """Return a weight as the matrix [out, everything else], in float32 at least.

    Args:
        weight: A tensor of two or more dimensions; a convolution's becomes [C_out, C_in·k_h·k_w], a
            transposed one's, which is stored the other way round, [C_in, C_out·k_h·k_w].

    Raises:
        ValueError: If the tensor has fewer than two dimensions.
    """
    if weight.ndim < 2:
        raise ValueError(f"weight must have at least 2 dimensions, got shape {tuple(weight.shape)}")
    return widen(weight.detach().flatten(1))


def singular_values(matrix: Tensor) -> Tensor:
    """Return the singular values of a matrix, largest first, as float64.

    They are as exact as the matrix's own precision, float32 at least, in which it is decomposed. Non-finite
    entries give non-finite values rather than an error of the decomposition, so that a caller can name the layer at
    fault.

    Example:
        >>> singular_values(torch.diag(torch.tensor([3.0, 4.0]))).tolist()
        [4.0, 3.0]
    """
    matrix = as_matrix(matrix)
    if not torch.isfinite(matrix).all():
        return torch.full((min(matrix.shape),), math.nan, dtype=torch.float64, device=matrix.device)
    sigma: Tensor = torch.linalg.svdvals(matrix)
    return sigma.double()


def effective_rank(sigma: Tensor) -> float:
    """Return exp(−Σ p log p), p = σ / Σσ: between 1 and the number of values, 0 for a zero matrix.

    Args:
        sigma: Singular values in any order.

    Example:
        >>> round(effective_rank(torch.ones(8)), 6)
        8.0
    """
    sigma = sigma.double()
    total = sigma.sum()
    if total == 0:
        return 0.0
    p = sigma / total
    return float(torch.special.entr(p).sum().exp())


def srank(sigma: Tensor, delta: float = 0.01) -> int:
    """Return the least k such that the k largest values hold at least 1 − δ of the sum; 0 for a zero matrix.

    Args:
        sigma: Singular values in any order.
        delta: The share that may be left out, in [0, 1).

    Raises:
        ValueError: If `delta` is outside [0, 1), or if a value is NaN or infinite: no rank can be counted then.

    Example:
        >>> srank(torch.tensor([98.0, 1.5, 0.5]))
        2
    """
    check_number("delta", delta, high=1.0, below=True)
    if not torch.isfinite(sigma).all():
        raise ValueError("sigma must be finite to have a rank, got NaN or inf")
    ordered = sigma.double().sort(descending=True).values
    total = ordered.sum()
    if total == 0:
        return 0
    # A tie such as 99 of 100 equal values must not hang on the rounding of the sum.
    reached = ordered.cumsum(0) >= (1 - delta) * total * (1 - 1e-12)
    return int(reached.long().argmax()) + 1


def stable_rank(sigma: Tensor) -> float:
    """Return Σσ² / σ₁², at most the rank; 0 for a zero matrix.

    Example:
        >>> stable_rank(torch.tensor([2.0, 1.0, 1.0]))
        1.5
    """
    sigma = sigma.double()
    top = sigma.max()
    return float(((sigma / top) ** 2).sum()) if top != 0 else 0.0


def condition_number(sigma: Tensor) -> float:
    """Return σ₁ / σ_min, infinite if σ_min is zero.

    Of a matrix that is not of full rank, rounding leaves a σ_min that is seldom zero, so that the number is then about
    what the precision can tell apart: 10⁷ and more in float32, 10¹⁵ and more in float64.

    Args:
        sigma: All singular values, zeros included.

    Example:
        >>> condition_number(torch.tensor([6.0, 3.0]))
        2.0
    """
    sigma = sigma.double()
    smallest = float(sigma.min())
    return float(sigma.max()) / smallest if smallest != 0 else math.inf
