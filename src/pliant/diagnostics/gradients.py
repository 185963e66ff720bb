"""What the Gram matrix of per-sample gradients says: directions of curvature, and how diverse the gradients are.

With K = GᵀG = VΛVᵀ, [samples, samples], of `gram.gradient_gram`, the singular values of G are √Λ, and the eigenvalues
of the outer-product approximation of the Hessian, GGᵀ, are Λ with eigenvectors u_k = G v_k/√λ_k. The mean gradient is
g = G1/M, so that u_kᵀg = √λ_k v_kᵀ1/M: all measures here follow from Λ and Vᵀ1, and nothing of the model's size is
needed.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pliant.diagnostics import spectra


@dataclass(frozen=True)
class Spectrum:
    """The spectrum of a Gram matrix.

    Attributes:
        values: Λ, largest first, zero where it cannot be told from zero; NaN if the matrix was not finite.
        ones: Vᵀ1 in the same order.
    """

    values: Tensor
    ones: Tensor

    @property
    def finite(self) -> bool:
        """Whether there is anything to measure."""
        return bool(torch.isfinite(self.values).all())


def spectrum(gram: Tensor) -> Spectrum:
    """Decompose a Gram matrix.

    Example:
        >>> spectrum(torch.tensor([[2.0, 0.0], [0.0, 3.0]])).values.tolist()
        [3.0, 2.0]
    """
    gram = gram.double()
    if not torch.isfinite(gram).all():
        nothing = torch.full((len(gram),), math.nan, dtype=torch.float64, device=gram.device)
        return Spectrum(nothing, nothing)
    values, vectors = torch.linalg.eigh(gram)
    values, ones = values.flip(0), vectors.sum(0).flip(0)
    floor = len(gram) * torch.finfo(torch.float64).eps * values[0]
    return Spectrum(torch.where(values > floor, values, 0), ones)


def hessian_rank(found: Spectrum, delta: float = 0.01) -> float:
    """Return srank_δ(GGᵀ) / M: the share of directions of curvature that M samples still have (Curvature §4).

    Measured with the new task's data at its first step. Gradients of d parameters have d directions at most, so that a
    layer with fewer parameters than there are samples cannot reach 1. NaN if the gradients are not finite.

    Args:
        found: The spectrum of GᵀG.
        delta: The share of the sum of eigenvalues that may be left out.

    Example:
        >>> hessian_rank(spectrum(torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0]))))
        0.5
    """
    return spectra.srank(found.values, delta) / len(found.values) if found.finite else math.nan


def condition_number(found: Spectrum) -> float:
    """Return σ₁(G) / σ_M(G): how unevenly gradients spread over directions (Spectral regularization §3.3).

    Infinite where the gradients of M samples are linearly dependent.

    Example:
        >>> condition_number(spectrum(torch.diag(torch.tensor([4.0, 1.0]))))
        2.0
    """
    return spectra.condition_number(found.values.sqrt())


def effective_rank(found: Spectrum) -> float:
    """Return exp of the entropy of G's normalized singular values (Spectral regularization §3.3).

    Example:
        >>> round(effective_rank(spectrum(torch.eye(3))), 6)
        3.0
    """
    return spectra.effective_rank(found.values.sqrt())


def overlap(found: Spectrum, delta: float = 0.01) -> float:
    """Return gᵀHg / (‖g‖‖Hg‖), H = GGᵀ cut to its top srank_δ directions (Curvature §6.2).

    It is the cosine of the angle between g and Hg: 1 if g lies in one eigenspace, less if it spreads over unequal
    ones or leaves the top directions.

    Args:
        found: The spectrum of GᵀG.
        delta: The share of the sum of eigenvalues that is cut off.

    Returns:
        A number in [0, 1]; NaN if there is no gradient, or one that is not finite.

    Example:
        >>> round(overlap(spectrum(torch.ones(2, 2))), 6)
        1.0
    """
    if not found.finite:
        return math.nan
    along = found.values.sqrt() * found.ones  # M u_kᵀg
    top = slice(spectra.srank(found.values, delta))
    image = found.values[top] * along[top]
    norms = along.norm() * image.norm()
    return float(along[top] @ image / norms) if norms != 0 else math.nan
