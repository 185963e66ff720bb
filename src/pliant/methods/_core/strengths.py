"""Strengths: one λ for all parameters, or one for each pattern of names."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from pliant._precision import widen
from pliant._validation import check_number

Strength = float | Mapping[str, float]


def resolve_strengths(
    lam: Strength, names: Iterable[str], *, high: float = float("inf"), wholes: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Return the strength of each named parameter; one that matches no pattern is left out.

    Args:
        lam: One strength for all, or strengths by shell pattern (`{"head.*": 1e-2, "*": 1e-4}`): the first pattern
            that matches a name counts.
        names: The parameters' names.
        high: The largest strength that makes sense.
        wholes: What the names are parts of, by name, where a pattern for the whole is one for all its parts.

    Returns:
        The strengths by name.

    Raises:
        ValueError: If a strength is out of range or a pattern matches no name.

    Example:
        >>> resolve_strengths({"head.*": 1e-2}, ["body.weight", "head.weight"])
        {'head.weight': 0.01}
    """
    names = list(names)

    def matches(name: str, pattern: str) -> bool:
        # A part of a weight has brackets in its name, which a pattern would take for a choice of letters.
        candidates = (name, (wholes or {}).get(name, name))
        return any(each == pattern or fnmatchcase(each, pattern) for each in candidates)

    if not isinstance(lam, Mapping):
        return dict.fromkeys(names, check_number("lam", lam, high=high))
    if not lam:
        raise ValueError("lam: {} gives no parameter a strength; it must be a number or have a pattern at least")
    for pattern, strength in lam.items():
        check_number(f"lam[{pattern!r}]", strength, high=high)
        if not any(matches(name, pattern) for name in names):
            raise ValueError(f"lam: the pattern {pattern!r} matches no parameter; there are {', '.join(names)}")
    found = {name: next((float(s) for p, s in lam.items() if matches(name, p)), None) for name in names}
    return {name: strength for name, strength in found.items() if strength is not None}


def add_scaled_(
    gradients: Mapping[str, Tensor],
    directions: Mapping[str, Tensor],
    strengths: Mapping[str, float],
    scale: Tensor | None,
    origins: Mapping[str, Tensor] | None = None,
) -> None:
    """Add strength · scale · (direction − origin) to each gradient in place, in batches of equal strength.

    Args:
        gradients: What is added to, by name.
        directions: What is added, by name; a superset of the gradients that have a strength.
        strengths: A factor for each name; a name without one is left alone.
        scale: One more factor for all of them, on the device (a loss scale); none if None.
        origins: What is taken off the directions, by name; nothing if None.
    """
    by_strength: dict[float, list[str]] = {}
    for name in gradients:
        if name in strengths:
            by_strength.setdefault(strengths[name], []).append(name)
    for strength, names in by_strength.items():
        added = [directions[name] for name in names]
        if origins is not None:
            added = list(torch._foreach_sub(added, [origins[name] for name in names]))
        if scale is not None:
            added = list(torch._foreach_mul(added, scale))
        torch._foreach_add_([gradients[name] for name in names], added, alpha=strength)


def half_squared_norm(directions: Mapping[str, Tensor], strengths: Mapping[str, float]) -> Tensor:
    """Return Σ strength/2 · ‖direction‖² over the names that have a strength, accumulated in float32 at least."""
    names = [name for name in directions if name in strengths]
    tensors = [directions[name] for name in names]
    if not tensors:
        return torch.zeros(())
    squares = torch.stack([widen(tensor).norm() for tensor in tensors]) ** 2
    weights = torch.tensor([strengths[name] for name in names], dtype=squares.dtype, device=squares.device)
    return weights.dot(squares) / 2
