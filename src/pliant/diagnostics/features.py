"""What the hidden activations of a batch say: dormancy, and how far they moved. Their ranks are those of `spectra`.

A *unit* is a column of a [samples, units] matrix of activations; for a convolution, a channel, whose positions count as
samples. Dormant (score ≤ τ) and dead (never active) are different things and have different names.
"""

import math

import torch
from torch import Tensor


def unit_scores(mean_abs: Tensor) -> Tensor:
    """Return each unit's share of activity, mean|h_i| / mean_j mean|h_j| (Sokar 2023).

    A layer that is silent altogether gets scores of zero.

    Args:
        mean_abs: Mean absolute activation of each unit of one layer.

    Example:
        >>> unit_scores(torch.tensor([0.0, 1.0, 2.0])).tolist()
        [0.0, 1.0, 2.0]
    """
    mean_abs = mean_abs.double()
    average = mean_abs.mean()
    return mean_abs / average if average != 0 else torch.zeros_like(mean_abs)


def dormant_fraction(scores: Tensor, tau: float = 0.025) -> float:
    """Return the fraction of units with score ≤ τ; NaN if a score is.

    Args:
        scores: As of `unit_scores`.
        tau: The threshold; 0.025 is that of Sokar 2023 and FIRE.

    Example:
        >>> dormant_fraction(torch.tensor([0.0, 0.025, 1.0, 3.0]))
        0.5
    """
    if tau < 0:
        raise ValueError(f"tau must not be negative, got {tau}")
    return math.nan if scores.isnan().any() else float((scores <= tau).double().mean())


def dead_fraction(active: Tensor) -> float:
    """Return the fraction of units that are never active.

    Args:
        active: For each unit, how often its activation was not zero.

    Example:
        >>> dead_fraction(torch.tensor([0, 3, 5, 0]))
        0.5
    """
    return float((active == 0).double().mean())


def negative_entropy(mean_abs: Tensor) -> float:
    """Return Σ p log p, p = mean|h_i| / Σ_j mean|h_j|: how much of the activity is in few units (Curvature, app. A).

    Higher is more dormant. It lies between −log(units), all units alike, and 0, one unit alone.

    Example:
        >>> negative_entropy(torch.tensor([0.0, 7.0]))
        0.0
    """
    mean_abs = mean_abs.double()
    total = mean_abs.sum()
    if total == 0:
        return 0.0
    return -float(torch.special.entr(mean_abs / total).sum()) + 0.0  # + 0.0 turns −0 into 0


def covariance_distance(features: Tensor, reference: Tensor) -> float:
    """Return ‖HHᵀ/‖H‖² − H̃H̃ᵀ/‖H̃‖²‖_F: how differently two networks arrange the same samples (FIRE thm. 1).

    Args:
        features: H, [samples, anything].
        reference: H̃, with as many samples.

    Returns:
        A number in [0, √2]; NaN if one of them is all zero, since nothing can be normalized then.

    Example:
        >>> covariance_distance(torch.eye(2), 3 * torch.eye(2))
        0.0
    """
    if len(features) != len(reference):
        raise ValueError(f"features and reference must have as many samples, got {len(features)} and {len(reference)}")

    def normalized(h: Tensor) -> Tensor:
        h = h.detach().flatten(1).double()
        square = h.square().sum()
        return h @ h.T / square if square != 0 else torch.full((len(h), len(h)), math.nan, dtype=torch.float64)

    return float((normalized(features) - normalized(reference)).norm())


def representation_change(features: Tensor, reference: Tensor) -> float:
    """Return the mean over samples of ‖h_i − h̃_i‖ (Spectral regularization §5.2).

    Measured on one batch with the network at the start of a task and at the start of the next. The source names no
    norm; this is L2.

    Args:
        features: [samples, …].
        reference: The same shape.

    Example:
        >>> representation_change(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.zeros(2, 2))
        2.5
    """
    if features.shape != reference.shape:
        raise ValueError(
            f"features and reference must have one shape, got {tuple(features.shape)} and {tuple(reference.shape)}"
        )
    difference = features.detach().double() - reference.detach().double()
    return float(difference.flatten(1).norm(dim=1).mean())
