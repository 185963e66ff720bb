"""Streams: seeded sequences of tasks over a data set."""

from dataclasses import fields
from typing import Any

from pliant._names import check_names, suggest
from pliant.data.dataset import Dataset
from pliant.streams.incremental import (
    ClassIncremental,
    ContinualFull,
    ContinualLimited,
    SingleTask,
    Transfer,
    WarmStart,
)
from pliant.streams.regression import SlowRegression, TeacherRegression
from pliant.streams.stream import Stream, Task
from pliant.streams.task_shifts import (
    BinaryPairs,
    LabelFlip,
    PermutedVocabulary,
    PixelPermutation,
    RandomLabels,
)

__all__ = [
    "BinaryPairs",
    "ClassIncremental",
    "ContinualFull",
    "ContinualLimited",
    "LabelFlip",
    "PermutedVocabulary",
    "PixelPermutation",
    "RandomLabels",
    "SingleTask",
    "SlowRegression",
    "Stream",
    "Task",
    "TeacherRegression",
    "Transfer",
    "WarmStart",
    "create",
    "names",
    "options",
    "stream_class",
]

_STREAMS: dict[str, type[Stream]] = {
    "single": SingleTask,
    "warm_start": WarmStart,
    "transfer": Transfer,
    "continual_full": ContinualFull,
    "continual_limited": ContinualLimited,
    "class_incremental": ClassIncremental,
    "random_labels": RandomLabels,
    "pixel_permutation": PixelPermutation,
    "label_flip": LabelFlip,
    "permuted_vocabulary": PermutedVocabulary,
    "binary_pairs": BinaryPairs,
    "teacher_regression": TeacherRegression,
    "slow_regression": SlowRegression,
}


def names() -> tuple[str, ...]:
    """Return the names of the streams."""
    return tuple(_STREAMS)


def stream_class(name: str) -> type[Stream]:
    """Return the class of a stream."""
    if name not in _STREAMS:
        raise ValueError(f"stream is {name!r}; {suggest(name, names())}")
    return _STREAMS[name]


def options(name: str) -> dict[str, Any]:
    """Return a stream's options with their defaults."""
    own = [field for field in fields(stream_class(name)) if field.name not in ("dataset", "seed")]
    return {field.name: field.default for field in own}


def create(name: str, dataset: Dataset, seed: int = 0, **settings: Any) -> Stream:
    """Make a stream.

    Args:
        name: One of `names()`.
        dataset: The data set.
        seed: Seed of all random choices.
        settings: The stream's options; see its class.

    Returns:
        The stream.
    """
    check_names(f"stream {name!r}", settings, options(name))
    return stream_class(name)(dataset, seed, **settings)
