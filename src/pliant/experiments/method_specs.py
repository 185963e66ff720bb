"""What is to be compared, as a command line has it: `vanilla`, `swr:lam=1e-3`, `swr+l2:lam=1e-2|1e-4`."""

import re
from typing import Any

from pliant import methods
from pliant._key_values import parse_value
from pliant._names import suggest

BASELINES = {"vanilla": "plain training, nothing attached", "fresh": "an untrained network at every task"}
"""What can stand among the methods without being one."""


def split_methods(text: str) -> list[str]:
    """Split what is to act at once, `swr+l2:lam=1e-3`, at the + between; that of a number such as 1e+3 stays.

    Example:
        >>> split_methods("swr + l2:lam=1e+0")
        ['swr', 'l2:lam=1e+0']
    """
    return [part.strip() for part in re.split(r"(?<![0-9][eE])\+", text)]


def parse_part(text: str) -> dict[str, Any]:
    """Read a method as the command line has it: `swr`, `swr:lam=1e-3`, with a grid `swr:lam=1e-3|1e-4`.

    Several settings follow each other: `redo:tau=0.1:every=97`.

    Example:
        >>> parse_part("l2:lam=0.1|0.01")
        {'name': 'l2', 'settings': {}, 'grid': {'lam': [0.1, 0.01]}}
    """
    name, *assignments = text.split(":")
    settings: dict[str, Any] = {}
    grid: dict[str, list[Any]] = {}
    for assignment in assignments:
        key, sign, value = assignment.partition("=")
        if not sign:
            raise ValueError(f"{text!r}: {assignment!r} must be of the form setting=value")
        if key in settings or key in grid:
            raise ValueError(f"{text!r}: {key} has two values; put | between values to choose from")
        values = [parse_value(each) for each in value.split("|")]
        if len(values) > 1:
            grid[key] = values
        else:
            settings[key] = values[0]
    return {"name": name, "settings": settings, "grid": grid}


def check_method(name: str) -> None:
    """Raise a ValueError that says what was probably meant if there is no such method.

    Example:
        >>> check_method("every=97")
        Traceback (most recent call last):
        ValueError: there is no method 'every=97'; a colon stands before every setting: redo:tau=0.1:every=97
    """
    if name in BASELINES:
        raise ValueError(f"{name} is no method but a baseline, which stands alone and has no settings")
    if name not in methods.names():
        known = suggest(name, (*BASELINES, *methods.names()))
        hint = "a colon stands before every setting: redo:tau=0.1:every=97" if "=" in name else known
        raise ValueError(f"there is no method {name!r}; {hint}")


def published_sweep(name: str) -> dict[str, list[Any]]:
    """Return the sources' own sweep of the first of a method's tunables that has one; empty if there is none.

    Example:
        >>> published_sweep("shrink_perturb"), published_sweep("head_reset")
        ({'lam': [0.2, 0.4, 0.6, 0.8]}, {})
    """
    tunables = methods.info(name).tunables if name in methods.names() else ()
    return next(({tunable.name: list(tunable.sweep)} for tunable in tunables if tunable.sweep), {})
