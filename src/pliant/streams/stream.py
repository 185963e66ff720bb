"""The base class of streams: a sequence of tasks with random access.

A stream is a frozen record of its options. Task i depends only on the options and the seed, so `stream[37]` costs no
more than `stream[0]`, and a stream has no state to resume.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from pliant._validation import require_positive
from pliant.data.dataset import Dataset, Examples

Change = Literal["examples", "labels", "pixels", "classes", "head", "inputs", "targets"]


OTHERS = ("first", "second", "probe")
"""Names of test examples beside a task's own: of the first or second of two texts, or of a text never trained on."""


@dataclass(frozen=True)
class Task:
    """One stationary part of a stream.

    Args:
        index: Position in the stream, from 0.
        train: Training examples.
        test: Test examples; None if a test is meaningless, as for random labels, or if there are none.
        epochs: Epochs of training.
        changed: What differs from the previous task; empty for the first task.
        others: Other test examples, by a name of `OTHERS`.
    """

    index: int
    train: Examples
    test: Examples | None
    epochs: int
    changed: frozenset[Change]
    others: Mapping[str, Examples] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.train) == 0:
            raise ValueError(f"task {self.index} has no training examples; every task needs some")


@dataclass(frozen=True)
class Stream(ABC):
    """A seeded sequence of tasks over one data set.

    Args:
        dataset: The data set.
        seed: Seed of all random choices: chunks, labels, permutations.
    """

    dataset: Dataset
    seed: int

    paper: ClassVar[str]
    """The papers that use the stream."""
    headline: ClassVar[str] = "final_test_accuracy"
    """The metric that decides: a key of a run's result."""
    alike: ClassVar[bool] = False
    """Whether all tasks are equally hard, so that a worse result on a later task means lost plasticity."""
    renews_head: ClassVar[bool] = False
    """Whether every task comes with a new output layer."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tasks."""

    @abstractmethod
    def _task(self, index: int) -> Task:
        """Make task `index`; the index is in range."""

    @property
    def classes(self) -> int:
        """The number of classes of the data set."""
        return len(self.dataset.classes)

    @property
    def outputs(self) -> int:
        """The number of outputs of a network."""
        return self.classes

    def workload(self) -> list[int]:
        """Return the training examples times epochs of each task."""
        return [len(task.train) * task.epochs for task in self]

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(f"index is {index}; the stream has tasks 0 … {len(self) - 1}")
        return self._task(index)

    def __iter__(self) -> Iterator[Task]:
        return (self._task(index) for index in range(len(self)))

    def _boundary(self, index: int, *changed: Change) -> frozenset[Change]:
        """Return what changed at the start of task `index`; nothing at the first."""
        return frozenset(changed if index else ())


@dataclass(frozen=True)
class EqualTasks(Stream):
    """Tasks of equal length that a fresh network finds equally hard.

    Args:
        tasks: Number of tasks.
        epochs: Epochs per task.
    """

    tasks: int = 50
    epochs: int = 40
    headline: ClassVar[str] = "mean_test_accuracy"
    alike: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive(tasks=self.tasks, epochs=self.epochs)

    def __len__(self) -> int:
        return self.tasks


def some_or_none(examples: Examples) -> Examples | None:
    """Return the examples, or None if there are none."""
    return examples if len(examples) else None


def split_evenly(order: Tensor, parts: int, what: str) -> tuple[Tensor, ...]:
    """Split into parts whose sizes differ by at most one."""
    if not 1 <= parts <= len(order):
        raise ValueError(f"{what} is {parts}; it must be 1 … {len(order)}, the number of entries to split")
    return order.tensor_split(parts)
