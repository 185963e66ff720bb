"""Formulas on hidden activations: dormancy, and distances from a reference. Ranks are in `spectra`.

A *unit* is a column of a [samples, units] matrix of activations. For a convolution it is a channel, whose positions
count as samples. *Dormant* means a score ≤ τ, *dead* means never active.
"""

import math

import torch
from torch import Tensor


def unit_scores(mean_abs: Tensor) -> Tensor:
    """Return each unit's share of activity, mean|h_i| / mean_j mean|h_j| (Sokar 2023).

    If all units are zero, all scores are zero.

    Args:
        mean_abs: The mean absolute activation of each unit of one layer.

    Example:
        >>> unit_scores(torch.tensor([0.0, 1.0, 2.0])).tolist()
        [0.0, 1.0, 2.0]
    """
    mean_abs = mean_abs.double()
    average = mean_abs.mean()
    return mean_abs / average if average != 0 else torch.zeros_like(mean_abs)


def dormant_fraction(scores: Tensor, tau: float = 0.025) -> float:
    """Return the fraction of units with score ≤ τ, or NaN if any score is NaN.

    Args:
        scores: The scores of `unit_scores`.
        tau: The threshold. Sokar 2023 and FIRE use 0.025.

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
    """Return Σ p log p with p = mean|h_i| / Σ_j mean|h_j|: how concentrated the activity is (Curvature, app. A).

    Higher is more dormant. The range is from −log(units), if all units are equally active, to 0, if only one is active.

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
        reference: H̃, for the same samples.

    Returns:
        A number in [0, √2], or NaN if one of the two is zero and cannot be normalized.

    Example:
        >>> covariance_distance(torch.eye(2), 3 * torch.eye(2))
        0.0
    """
    if len(features) != len(reference):
        raise ValueError(
            f"features and reference must have the same number of samples, got {len(features)} and {len(reference)}"
        )

    def normalized(h: Tensor) -> Tensor:
        h = h.detach().flatten(1).double()
        square = h.square().sum()
        return h @ h.T / square if square != 0 else torch.full((len(h), len(h)), math.nan, dtype=torch.float64)

    return float((normalized(features) - normalized(reference)).norm())


def representation_change(features: Tensor, reference: Tensor) -> float:
    """Return the mean over samples of ‖h_i − h̃_i‖ (Spectral regularization §5.2).

    The source compares the network at the start of a task with the network at the start of the next task, on one batch.
    It does not name the norm; this is L2.

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
