"""What the Gram matrix of per-sample gradients says: directions of curvature, and how diverse the gradients are.

All functions take K = GᵀG, [samples, samples], of `gram.gradient_gram`: the singular values of G are the square roots
of K's eigenvalues, and the eigenvalues of the outer-product approximation of the Hessian, GGᵀ, are K's own.
"""

import math

import torch
from torch import Tensor

from pliant.diagnostics.spectra import condition_number, effective_rank, srank


def eigenvalues(gram: Tensor) -> Tensor:
    """Return the eigenvalues of a Gram matrix, largest first, zero where they cannot be told from zero.

    NaNs if the matrix is not finite.

    Example:
        >>> eigenvalues(torch.tensor([[2.0, 0.0], [0.0, 3.0]])).tolist()
        [3.0, 2.0]
    """
    gram = gram.double()
    if not torch.isfinite(gram).all():
        return torch.full((len(gram),), math.nan, dtype=torch.float64, device=gram.device)
    values: Tensor = torch.linalg.eigvalsh(gram).flip(0)
    return torch.where(values > len(gram) * torch.finfo(torch.float64).eps * values[0], values, 0)


def hessian_rank(gram: Tensor, delta: float = 0.01) -> float:
    """Return srank_δ(GGᵀ) / M: the share of directions of curvature that M samples still have (Curvature §4).

    Measured with the new task's data at its first step. NaN if the matrix is not finite.

    Args:
        gram: GᵀG.
        delta: The share of the sum of eigenvalues that may be left out.

    Example:
        >>> hessian_rank(torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0])))
        0.5
    """
    values = eigenvalues(gram)
    return srank(values, delta) / len(gram) if torch.isfinite(values).all() else math.nan


def gradient_condition_number(gram: Tensor) -> float:
    """Return σ₁(G) / σ_M(G): how unevenly gradients spread over directions (Spectral regularization §3.3).

    Infinite where the gradients of M samples are linearly dependent.

    Example:
        >>> gradient_condition_number(torch.diag(torch.tensor([4.0, 1.0])))
        2.0
    """
    return condition_number(eigenvalues(gram).sqrt())


def gradient_effective_rank(gram: Tensor) -> float:
    """Return exp of the entropy of G's normalised singular values (Spectral regularization §3.3).

    Example:
        >>> round(gradient_effective_rank(torch.eye(3)), 6)
        3.0
    """
    return effective_rank(eigenvalues(gram).sqrt())


def gradient_overlap(gram: Tensor, delta: float = 0.01) -> float:
    """Return gᵀHg / (‖g‖‖Hg‖), H the outer-product Hessian cut to its top srank_δ directions (Curvature §6.2).

    With K = VΛVᵀ the directions are u_k = G v_k/√λ_k, and the mean gradient is g = G1/M, so that u_kᵀg = √λ_k v_kᵀ1/M:
    nothing of the model's size is needed. It is the cosine of the angle between g and Hg: 1 if g lies in one
    eigenspace, less if it spreads over unequal ones or leaves the top directions.

    Args:
        gram: GᵀG.
        delta: The share of the sum of eigenvalues that is cut off.

    Returns:
        A number in [0, 1]; NaN if there is no gradient or the matrix is not finite.

    Example:
        >>> round(gradient_overlap(torch.ones(2, 2)), 6)
        1.0
    """
    if not torch.isfinite(gram).all():
        return math.nan
    values, vectors = torch.linalg.eigh(gram.double())
    values = values.flip(0).clamp(min=0)
    top = srank(values, delta)
    along = (values.sqrt() * vectors.flip(1).sum(0) / len(gram))[:top]  # u_kᵀg
    norm = (gram.double().sum().clamp(min=0)).sqrt() / len(gram)
    image = (values[:top] * along).norm()
    return float((values[:top] * along.square()).sum() / (norm * image)) if norm * image != 0 else math.nan
