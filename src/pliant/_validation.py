"""Checks of arguments: each error names the argument, the value and what is allowed."""

import math
from collections.abc import Sequence
from numbers import Integral, Real

from torch import nn

from pliant._names import suggest


def check_number(
    argument: str,
    value: float,
    *,
    low: float = 0.0,
    high: float = math.inf,
    above: bool = False,
    below: bool = False,
    otherwise: str = "",
) -> float:
    """Return the number if it is finite and in [low, high], else raise a ValueError.

    Args:
        argument: The name of the argument.
        value: The number.
        low: The smallest number that is allowed.
        high: The largest number that is allowed.
        above: Whether `low` itself is excluded.
        below: Whether `high` itself is excluded.
        otherwise: What else is allowed, added to the message.

    Example:
        >>> check_number("beta", 1, high=1.0, below=True)
        Traceback (most recent call last):
        ValueError: beta: 1 is not allowed; it must be a number that is in [0, 1)
    """
    if _is_finite(value) and low <= value <= high and not (above and value == low) and not (below and value == high):
        return float(value)
    if high < math.inf:
        allowed = f"in {'(' if above else '['}{low:g}, {high:g}{')' if below else ']'}"
    else:
        allowed = f"finite and {'>' if above else '≥'} {low:g}"
    raise ValueError(f"{argument}: {value!r} is not allowed; it must be a number that is {allowed}{otherwise}")


def _is_finite(value: object) -> bool:
    """Return whether a value is a number that a float can hold."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def check_choice(argument: str, value: object, allowed: Sequence[object]) -> None:
    """Raise a ValueError if the value is not one of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{argument}: {value!r} is not allowed; it must be one of {', '.join(map(repr, allowed))}")


def check_positive_int(argument: str, value: int) -> int:
    """Return the value if it is an integer ≥ 1, else raise a ValueError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{argument}: {value!r} is not allowed; it must be an integer ≥ 1")
    return int(value)


def require_positive(**counts: int) -> None:
    """Raise a ValueError that names the first argument that is not an integer ≥ 1."""
    for name, count in counts.items():
        check_positive_int(name, count)


def check_seed(seed: int | None) -> int | None:
    """Return the seed if it is an integer or None, else raise a ValueError."""
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise ValueError(f"seed: {seed!r} is not allowed; it must be a whole number or None")
    return int(seed)


def check_modules(argument: str, model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names if each is a module of the model, else raise a ValueError.

    Args:
        argument: The name of the argument.
        model: The model.
        names: The names.

    Example:
        >>> check_modules("head", nn.Sequential(nn.Linear(1, 1)), ["0"])
        ('0',)
    """
    if isinstance(names, str):
        raise ValueError(f"{argument}: {names!r} is a string; it must be a list of module names, [{names!r}]")
    if not names:
        raise ValueError(f"{argument}: {names!r} is empty; it must be a list of module names")
    known = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for name in names:
        if name not in known:
            raise ValueError(f"{argument}: the model has no module {name!r}; {suggest(str(name), filter(None, known))}")
    return tuple(names)
