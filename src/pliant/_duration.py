"""Read and write durations such as 90s, 30m or 1h30m."""

import math
import re

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s?)?")


def parse_duration(name: str, value: str | float) -> float:
    """Return a duration in seconds.

    Args:
        name: The argument that an error names.
        value: A number of seconds, or a text such as "90s", "30m" or "1h30m".

    Raises:
        ValueError: If it is not a positive duration.

    Example:
        >>> parse_duration("budget", "1h30m"), parse_duration("budget", 90)
        (5400.0, 90.0)
    """
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        seconds = sum(float(number) * _UNITS[unit] for unit, number in match.groupdict().items() if number)
    else:
        seconds = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a positive duration: 90s, 30m, 1h30m, or seconds")
    return seconds


def write_duration(seconds: float) -> str:
    """Write a duration with at most two units.

    Example:
        >>> write_duration(5400), write_duration(75), write_duration(8.25)
        ('1 h 30 min', '1 min 15 s', '8.2 s')
    """
    if seconds < 10:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    pair = ((hours, "h"), (minutes, "min")) if hours else ((minutes, "min"), (rest, "s"))
    return " ".join(f"{number} {unit}" for number, unit in pair if number)
