"""Ranks and condition numbers from singular values, and from the Gram matrix of per-sample gradients.

The field calls several different things "effective rank". Each has its own name here:

- `effective_rank`: exp of the entropy of the normalized singular values (Roy & Vetterli 2007). Spectral regularization
  (§3.3) prints the entropy without its minus sign and without the exponential, which reverses the order of matrices.
- `srank`: how many singular values hold 1 − δ of their sum (Kumar 2021; Curvature §4, FIRE thm. 3). Curvature asks for
  *more* than 99 %, FIRE for *at least* 99 %. The two differ only on exact ties; this is FIRE's.
- `stable_rank`: ‖A‖²_F / σ₁².

All take singular values, so that one decomposition serves every measure.

The Gram matrix K = GᵀG = VΛVᵀ, [samples, samples], comes from `gradient_gram`. The singular values of G are √Λ. The
outer-product approximation of the Hessian, GGᵀ, has eigenvalues Λ and eigenvectors u_k = G v_k/√λ_k. The mean gradient
is g = G1/M, so u_kᵀg = √λ_k v_kᵀ1/M. So all measures follow from Λ and Vᵀ1, without a vector of the model's size.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pliant._precision import widen


def as_matrix(weight: Tensor) -> Tensor:
    """Return a weight as the matrix [out, everything else], in float32 or wider.

    Args:
        weight: A tensor of two or more dimensions. A convolution's weight becomes [C_out, C_in·k_h·k_w]. A transposed
            convolution stores C_in first, so its weight becomes [C_in, C_out·k_h·k_w].

    Raises:
        ValueError: If the tensor has fewer than two dimensions.
    """
    if weight.ndim < 2:
        raise ValueError(f"weight must have at least 2 dimensions, got shape {tuple(weight.shape)}")
    return widen(weight.detach().flatten(1))


def singular_values(matrix: Tensor) -> Tensor:
    """Return the singular values of a matrix, largest first, as float64.

    The matrix is decomposed in its own precision, float32 or wider. If an entry is not finite, all values are NaN.

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
    """Return exp(−Σ p log p) with p = σ / Σσ: between 1 and the number of values, or 0 for a zero matrix.

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
    """Return the least k such that the k largest values hold at least 1 − δ of the sum, or 0 for a zero matrix.

    Args:
        sigma: Singular values in any order.
        delta: The share that may be left out, in [0, 1).

    Raises:
        ValueError: If `delta` is outside [0, 1), or a value is NaN or infinite.

    Example:
        >>> srank(torch.tensor([98.0, 1.5, 0.5]))
        2
    """
    if not 0 <= delta < 1:
        raise ValueError(f"delta: {delta!r} is not allowed; it must be a number that is in [0, 1)")
    if not torch.isfinite(sigma).all():
        raise ValueError("sigma must be finite to have a rank, got NaN or inf")
    ordered = sigma.double().sort(descending=True).values
    total = ordered.sum()
    if total == 0:
        return 0
    # Rounding of the sum must not decide ties, such as 99 of 100 equal values.
    reached = ordered.cumsum(0) >= (1 - delta) * total * (1 - 1e-12)
    return int(reached.long().argmax()) + 1


def stable_rank(sigma: Tensor) -> float:
    """Return Σσ² / σ₁², at most the rank, or 0 for a zero matrix.

    Example:
        >>> stable_rank(torch.tensor([2.0, 1.0, 1.0]))
        1.5
    """
    sigma = sigma.double()
    top = sigma.max()
    return float(((sigma / top) ** 2).sum()) if top != 0 else 0.0


def condition_number(sigma: Tensor) -> float:
    """Return σ₁ / σ_min, infinite if σ_min is zero.

    For a matrix without full rank, rounding rarely leaves a σ_min of exactly zero. The result is then limited by the
    precision: 10⁷ or more in float32, 10¹⁵ or more in float64.

    Args:
        sigma: All singular values, zeros included.

    Example:
        >>> condition_number(torch.tensor([6.0, 3.0]))
        2.0
    """
    sigma = sigma.double()
    smallest = float(sigma.min())
    return float(sigma.max()) / smallest if smallest != 0 else math.inf


@dataclass(frozen=True)
class GramSpectrum:
    """The spectrum of a Gram matrix of per-sample gradients.

    Attributes:
        values: Λ, largest first. Values below the rounding error are set to zero. All are NaN if the matrix was not
            finite.
        ones: Vᵀ1 in the same order.
    """

    values: Tensor
    ones: Tensor


def decompose_gram(gram: Tensor) -> GramSpectrum:
    """Decompose a Gram matrix.

    Example:
        >>> decompose_gram(torch.tensor([[2.0, 0.0], [0.0, 3.0]])).values.tolist()
        [3.0, 2.0]
    """
    gram = gram.double()
    if not torch.isfinite(gram).all():
        nothing = torch.full((len(gram),), math.nan, dtype=torch.float64, device=gram.device)
        return GramSpectrum(nothing, nothing)
    values, vectors = torch.linalg.eigh(gram)
    values, ones = values.flip(0), vectors.sum(0).flip(0)
    floor = len(gram) * torch.finfo(torch.float64).eps * values[0]
    return GramSpectrum(torch.where(values > floor, values, 0), ones)


def hessian_rank(spectrum: GramSpectrum, delta: float = 0.01) -> float:
    """Return srank_δ(GGᵀ) / M: the share of directions of curvature among M samples (Curvature §4).

    Curvature measures it on the new task's data before the first step. Gradients of d parameters span at most d
    directions, so a layer with d < M parameters stays below d/M.

    Args:
        spectrum: The spectrum of GᵀG.
        delta: The share of the sum of eigenvalues that may be left out.

    Returns:
        A number in [0, 1], or NaN if the gradients are not finite.

    Example:
        >>> hessian_rank(decompose_gram(torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0]))))
        0.5
    """
    values = spectrum.values
    return srank(values, delta) / len(values) if torch.isfinite(values).all() else math.nan


def gradient_condition_number(spectrum: GramSpectrum) -> float:
    """Return σ₁(G) / σ_M(G): how unevenly the gradients spread over directions (Spectral regularization §3.3).

    It is infinite if the gradients of the M samples are linearly dependent.

    Example:
        >>> gradient_condition_number(decompose_gram(torch.diag(torch.tensor([4.0, 1.0]))))
        2.0
    """
    return condition_number(spectrum.values.sqrt())


def gradient_effective_rank(spectrum: GramSpectrum) -> float:
    """Return exp of the entropy of G's normalized singular values (Spectral regularization §3.3).

    Example:
        >>> round(gradient_effective_rank(decompose_gram(torch.eye(3))), 6)
        3.0
    """
    return effective_rank(spectrum.values.sqrt())


def gradient_overlap(spectrum: GramSpectrum, delta: float = 0.01) -> float:
    """Return gᵀHg / (‖g‖‖Hg‖), where H is GGᵀ restricted to its top srank_δ directions (Curvature §6.2).

    It is the cosine of the angle between g and Hg. It is 1 if g lies in one eigenspace, and smaller if g spreads over
    unequal eigenvalues or leaves the top directions.

    Args:
        spectrum: The spectrum of GᵀG.
        delta: The share of the sum of eigenvalues that is cut off.

    Returns:
        A number in [0, 1], or NaN if the gradient is zero or not finite.

    Example:
        >>> round(gradient_overlap(decompose_gram(torch.ones(2, 2))), 6)
        1.0
    """
    values = spectrum.values
    if not torch.isfinite(values).all():
        return math.nan
    along = values.sqrt() * spectrum.ones  # M u_kᵀg
    top = slice(srank(values, delta))
    image = values[top] * along[top]
    norms = along.norm() * image.norm()
    return float(along[top] @ image / norms) if norms != 0 else math.nan
