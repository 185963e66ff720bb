"""Data sets by name, from a folder, from a file or from a function."""

from pliant.data.dataset import Dataset, Examples, from_tensors
from pliant.data.embedded import digits
from pliant.spelling import suggest

__all__ = ["Dataset", "Examples", "from_tensors", "load", "names"]

_EMBEDDED = {"digits": digits}


def names() -> tuple[str, ...]:
    """Names that `load` knows."""
    return tuple(_EMBEDDED)


def load(name: str, *, first: int | None = None) -> Dataset:
    """Load a data set.

    Args:
        name: One of `names()`.
        first: How many training examples to keep; all by default.

    Returns:
        The data set, its inputs in memory or memory-mapped.
    """
    if name not in _EMBEDDED:
        raise ValueError(f"data is {name!r}; {suggest(name, names())}")
    dataset = _EMBEDDED[name]()
    return dataset if first is None else dataset.first(first)
