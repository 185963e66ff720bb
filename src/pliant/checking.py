"""Arguments that are not what they must be: errors that name the argument, the value and what is allowed."""

from collections.abc import Sequence
from numbers import Integral, Real


def check_number(argument: str, value: float, *, low: float = 0.0, high: float = float("inf")) -> float:
    """Return the number if it is finite and in [low, high], else raise a ValueError that says so."""
    allowed = f"in [{low:g}, {high:g}]" if high < float("inf") else f"finite and ≥ {low:g}"
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= value <= high or value == float("inf"):
        raise ValueError(f"{argument}: {value!r} is not allowed; it must be a number that is {allowed}")
    return float(value)


def check_choice(argument: str, value: object, allowed: Sequence[object]) -> None:
    """Raise a ValueError that lists what is allowed if the value is none of it."""
    if value not in allowed:
        raise ValueError(f"{argument}: {value!r} is not allowed; it must be one of {', '.join(map(repr, allowed))}")


def check_positive_int(argument: str, value: int) -> int:
    """Return the value if it is an integer ≥ 1, else raise a ValueError that says so."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{argument}: {value!r} is not allowed; it must be an integer ≥ 1")
    return int(value)


def require_positive(**counts: int) -> None:
    """Raise a ValueError that names the first that is no integer ≥ 1."""
    for name, count in counts.items():
        check_positive_int(name, count)
