"""Arguments that are not what they must be: errors that name the argument, the value and what is allowed."""

import math
from collections.abc import Sequence
from numbers import Integral, Real


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
    """Return the number if it is finite and in [low, high], else raise a ValueError that says so.

    Args:
        argument: What the number is called.
        value: The number.
        low: The least that is allowed.
        high: The most that is allowed.
        above: Whether `low` itself is not allowed.
        below: Whether `high` itself is not allowed.
        otherwise: What may be given in the place of a number, for the message alone.

    Example:
        >>> check_number("beta", 1, high=1.0, below=True)
        Traceback (most recent call last):
        ValueError: beta: 1 is not allowed; it must be a number that is in [0, 1)
    """
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if number and low <= value <= high and not (above and value == low) and not (below and value == high):
        return float(value)
    if high < math.inf:
        allowed = f"in {'(' if above else '['}{low:g}, {high:g}{')' if below else ']'}"
    else:
        allowed = f"finite and {'>' if above else '≥'} {low:g}"
    raise ValueError(f"{argument}: {value!r} is not allowed; it must be a number that is {allowed}{otherwise}")


def check_choice(argument: str, value: object, allowed: Sequence[object]) -> None:
    """Raise a ValueError that lists what is allowed if the value is none of it."""
    if value not in allowed:
        raise ValueError(f"{argument}: {value!r} is not allowed; it must be one of {', '.join(map(repr, allowed))}")


def check_positive_int(argument: str, value: int) -> int:
    """Return the value if it is an integer ≥ 1, else raise a ValueError that says so."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{argument}: {value!r} is not allowed; it must be an integer ≥ 1")
    return int(value)


def check_seed(seed: int | None) -> int | None:
    """Return the seed if it is a whole number or None, else raise a ValueError that says so."""
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise ValueError(f"seed: {seed!r} is not allowed; it must be a whole number or None")
    return int(seed)


def require_positive(**counts: int) -> None:
    """Raise a ValueError that names the first that is no integer ≥ 1."""
    for name, count in counts.items():
        check_positive_int(name, count)
