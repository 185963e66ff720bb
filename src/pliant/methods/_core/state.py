"""States of methods: nested dictionaries of tensors and plain values, compared and copied as one."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def check_same_shapes(ours: Mapping[str, list[int]], theirs: Mapping[str, list[int]]) -> None:
    """Raise a ValueError naming the first parameter that a state was made for in another shape, or that one lacks."""
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            then, now = theirs.get(name, "none"), ours.get(name, "none")
            raise ValueError(f"state_dict: made for a parameter {name!r} of shape {then}, this model's is {now}")


def check_same_structure(mine: Any, theirs: Any, path: str) -> None:
    """Raise a ValueError that names the first place where two states differ in keys, types or shapes."""
    if isinstance(mine, Mapping):
        if not isinstance(theirs, Mapping):
            raise ValueError(f"{path}: a dictionary here, {type(theirs).__name__} in the given state")
        for key in mine:
            if key not in theirs:
                raise ValueError(f"{path}: {key!r} is missing in the given state")
        for key in theirs:
            if key not in mine:
                raise ValueError(f"{path}: {key!r} is in the given state, but not here")
        for key, value in mine.items():
            check_same_structure(value, theirs[key], f"{path}[{key!r}]")
    elif isinstance(mine, Tensor):
        if not isinstance(theirs, Tensor):
            raise ValueError(f"{path}: a tensor here, {type(theirs).__name__} in the given state")
        if mine.shape != theirs.shape:
            raise ValueError(f"{path}: shape {tuple(mine.shape)} here, {tuple(theirs.shape)} in the given state")
    elif isinstance(theirs, Tensor | Mapping):
        raise ValueError(f"{path}: {type(mine).__name__} here, {type(theirs).__name__} in the given state")


def copy_state_(mine: Any, theirs: Any) -> Any:
    """Copy tensors in place, so that their device and dtype stay; return the state with the plain values replaced."""
    if isinstance(mine, Mapping):
        return {key: copy_state_(value, theirs[key]) for key, value in mine.items()}
    if isinstance(mine, Tensor):
        return mine.copy_(theirs)
    return theirs
