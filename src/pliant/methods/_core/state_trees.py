"""The state of a method as a tree of dictionaries: walk it, change it, compare it, load it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor


def named_leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values of a tree of dictionaries, each with its path."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from named_leaves(value, f"{path}[{key!r}]" if path else str(key))
    elif values is None or isinstance(values, Tensor | str | bool | int | float | tuple | list):
        yield path, values


def nested_tensors(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the tensors in a tree of dictionaries, each with its path."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from nested_tensors(value, (*path, key))
    elif isinstance(tree, Tensor) and len(path) > 1:
        yield path, tree


def value_at(tree: Any, path: tuple[str, ...]) -> Any:
    """Return what a tree of dictionaries holds at a path."""
    for key in path:
        if key not in tree:
            raise ValueError(f"state_dict: {key!r} is missing in the given state")
        tree = tree[key]
    return tree


def replace_values(tree: Any, values: Mapping[tuple[str, ...], Any], path: tuple[str, ...] = ()) -> Any:
    """Return a copy of a tree of dictionaries, with other values at some paths."""
    if isinstance(tree, Mapping):
        return {key: replace_values(value, values, (*path, key)) for key, value in tree.items()}
    return values.get(path, tree)


def leave_out(tree: Any, left_out: Sequence[tuple[str, ...]], path: tuple[str, ...] = ()) -> Any:
    """Return a copy of a tree of dictionaries, without the values at some paths."""
    if isinstance(tree, Mapping):
        kept = [key for key in tree if (*path, key) not in left_out]
        return {key: leave_out(tree[key], left_out, (*path, key)) for key in kept}
    return tree


def check_same_shapes(ours: Mapping[str, list[int]], theirs: Mapping[str, list[int]]) -> None:
    """Raise a ValueError if a parameter is missing in one state or has another shape."""
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            then, now = theirs.get(name, "none"), ours.get(name, "none")
            raise ValueError(f"state_dict: made for a parameter {name!r} of shape {then}, this model's is {now}")


def check_same_structure(mine: Any, theirs: Any, path: str) -> None:
    """Raise a ValueError if two states differ in keys, types or shapes."""
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
    elif isinstance(theirs, Tensor | Mapping) or (
        type(mine) is not type(theirs) and not (_is_number(mine) and _is_number(theirs)) and None not in (mine, theirs)
    ):
        raise ValueError(f"{path}: {type(mine).__name__} here, {type(theirs).__name__} in the given state")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def copy_state_(mine: Any, theirs: Any) -> Any:
    """Copy tensors in place, which keeps their device and dtype; return the state with plain values replaced."""
    if isinstance(mine, Mapping):
        return {key: copy_state_(value, theirs[key]) for key, value in mine.items()}
    if isinstance(mine, Tensor):
        return mine.copy_(theirs)
    return theirs
