"""Streams: seeded sequences of tasks over a data set."""

from dataclasses import MISSING, fields
from typing import Any

from pliant._names import check_names, suggest
from pliant.data.dataset import Dataset
from pliant.streams.environment_streams import (
    EnvironmentSequence,
    EnvironmentStream,
    Intervention,
    Priming,
    SingleEnvironment,
)
from pliant.streams.incremental import (
    ClassIncremental,
    ContinualFull,
    ContinualLimited,
    SingleTask,
    Transfer,
    WarmStart,
)
from pliant.streams.language import PermutedVocabulary, TextCycle, TextWarmStart
from pliant.streams.regression import SlowRegression, TeacherRegression
from pliant.streams.stream import Stream, Task
from pliant.streams.task_shifts import (
    BinaryPairs,
    LabelFlip,
    PixelPermutation,
    RandomLabels,
)

__all__ = [
    "BinaryPairs",
    "ClassIncremental",
    "ContinualFull",
    "ContinualLimited",
    "EnvironmentSequence",
    "EnvironmentStream",
    "Intervention",
    "LabelFlip",
    "PermutedVocabulary",
    "PixelPermutation",
    "Priming",
    "RandomLabels",
    "SingleEnvironment",
    "SingleTask",
    "SlowRegression",
    "Stream",
    "Task",
    "TeacherRegression",
    "TextCycle",
    "TextWarmStart",
    "Transfer",
    "WarmStart",
    "create",
    "is_of_environments",
    "names",
    "options",
    "stream_class",
]

_STREAMS: dict[str, type[Stream] | type[EnvironmentStream]] = {
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
    "text_warm_start": TextWarmStart,
    "text_cycle": TextCycle,
    "binary_pairs": BinaryPairs,
    "teacher_regression": TeacherRegression,
    "slow_regression": SlowRegression,
    "environment": SingleEnvironment,
    "intervention": Intervention,
    "environment_sequence": EnvironmentSequence,
    "priming": Priming,
}


def names() -> tuple[str, ...]:
    """Return the names of the streams."""
    return tuple(_STREAMS)


def stream_class(name: str) -> type[Stream] | type[EnvironmentStream]:
    """Return the class of a stream."""
    if name not in _STREAMS:
        raise ValueError(f"stream is {name!r}; {suggest(name, names())}")
    return _STREAMS[name]


def options(name: str) -> dict[str, Any]:
    """Return a stream's options with their defaults."""
    own = [field for field in fields(stream_class(name)) if field.name not in ("dataset", "seed")]
    return {field.name: field.default if field.default_factory is MISSING else field.default_factory() for field in own}


def is_of_environments(name: str) -> bool:
    """Return whether the tasks of a stream are environment steps of an agent."""
    return issubclass(stream_class(name), EnvironmentStream)


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
    cls = stream_class(name)
    if issubclass(cls, EnvironmentStream):
        raise ValueError(f"stream is {name!r}, which is for agents; use it in a recipe with domain 'rl'")
    return cls(dataset, seed, **settings)
