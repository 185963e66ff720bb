"""Bias-corrected exponential moving averages of values that belong to parameters, as plain state."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pliant._precision import widen
from pliant.methods._core import host

Averages = dict[str, Any]
"""`counts`, one number per parameter, and for each averaged quantity a dictionary of tensors by parameter name."""


def average_weights(counts: Tensor, beta: float) -> Tensor:
    """Return (1 − β)/(1 − βᵗ): the weight of the t-th value in a bias-corrected exponential moving average.

    The corrected average itself is updated: x̄ ← x̄ + w(x − x̄).

    Args:
        counts: t ≥ 1 of each average.
        beta: β in [0, 1).

    Example:
        >>> average_weights(torch.tensor([1.0, 2.0]), 0.5)
        tensor([1.0000, 0.6667])
    """
    return (1 - beta) / -torch.expm1(counts * (math.log(beta) if beta > 0 else -math.inf))


def bias_corrections(averages: Averages, beta: float, names: Sequence[str]) -> Tensor:
    """Return 1 − βᵗ of these parameters: a corrected average times this is the average that started at zero."""
    counts: Tensor = averages["counts"]
    return -torch.expm1(counts[_positions(averages, names)] * (math.log(beta) if beta > 0 else -math.inf))


def start_averages(parameters: Mapping[str, Tensor], *quantities: str) -> Averages:
    """Return empty averages.

    Args:
        parameters: Parameters by name; the averaged values have their shapes.
        quantities: The names of the averaged quantities.
    """
    wide = {name: widen(parameter.detach()) for name, parameter in parameters.items()}
    first = next(iter(wide.values()))
    # The counts are on the device because only the device knows whether a GradScaler skips the step.
    averages: Averages = {"counts": torch.zeros(len(wide), dtype=first.dtype, device=first.device)}
    for quantity in quantities:
        averages[quantity] = {name: torch.zeros_like(tensor) for name, tensor in wide.items()}
    return averages


def update_averages_(
    averages: Averages,
    beta: float,
    names: Sequence[str],
    values: Mapping[str, Sequence[Tensor]],
    found_inf: Tensor | None,
) -> None:
    """Add one value of each quantity to the averages of these parameters.

    Args:
        averages: The averages.
        beta: β in [0, 1).
        names: The parameters.
        values: For each quantity, the value of each of these parameters.
        found_inf: If it is given and not zero, nothing changes.
    """
    counts: Tensor = averages["counts"]
    positions = _positions(averages, names)
    taken = 1 if found_inf is None else (found_inf == 0).to(counts.dtype)
    counts[positions] += taken
    weights = average_weights(counts[positions], beta)
    if found_inf is not None:
        # A value that is not finite times a weight of zero would be NaN.
        weights = torch.where(found_inf == 0, weights, 0)
        values = {key: [torch.where(found_inf == 0, value, 0) for value in each] for key, each in values.items()}
    for quantity, each in values.items():
        means = [averages[quantity][name] for name in names]
        if host.is_on_host(weights):
            torch._foreach_lerp_(means, list(each), weights.tolist())  # numbers are faster than tensors of one entry
        else:
            fitting = [weight.to(mean.dtype) for weight, mean in zip(weights.unbind(), means, strict=True)]
            torch._foreach_lerp_(means, list(each), fitting)


def _positions(averages: Averages, names: Sequence[str]) -> slice | Tensor:
    all_names = next(list(value) for value in averages.values() if isinstance(value, Mapping))
    if list(names) == all_names:
        return slice(None)
    places = {name: place for place, name in enumerate(all_names)}
    return torch.tensor([places[name] for name in names], device=averages["counts"].device)
