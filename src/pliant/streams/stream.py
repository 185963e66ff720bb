"""What every stream is: a sequence of tasks that can be entered anywhere.

A stream is a frozen record of its options. Task i is computed from the options and the seed alone, so
`stream[37]` costs no more than `stream[0]`, and a resumed run needs no state of the stream.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from pliant.data.dataset import Dataset, Examples

Change = Literal["examples", "labels", "pixels", "classes", "head"]


@dataclass(frozen=True)
class Task:
    """One stationary stretch of a stream.

    Args:
        index: Place in the stream, from 0.
        train: What to learn from now.
        test: What to be tested on after; None where no test says anything, as for random labels, or where there are
            no examples for it.
        epochs: How often to go through the training examples.
        changed: What differs from the task before; empty for the first task.
    """

    index: int
    train: Examples
    test: Examples | None
    epochs: int
    changed: frozenset[Change]

    def __post_init__(self) -> None:
        if len(self.train) == 0:
            raise ValueError(f"task {self.index} has no training examples; every task of a stream needs some")


@dataclass(frozen=True)
class Stream(ABC):
    """A seeded sequence of tasks over one data set.

    Args:
        dataset: Where the examples come from.
        seed: Decides chunks, labels, permutations: whatever is drawn.
    """

    dataset: Dataset
    seed: int

    paper: ClassVar[str]
    """Where the stream comes from."""
    headline: ClassVar[str] = "final_test_accuracy"
    """The number of a run that a table shows first: an entry of its result."""
    alike: ClassVar[bool] = False
    """Whether all tasks are equally hard, so that to learn a later one worse is to have lost plasticity."""
    renews_head: ClassVar[bool] = False
    """Whether every task comes with a new output layer."""

    @abstractmethod
    def __len__(self) -> int:
        """Count the tasks."""

    @abstractmethod
    def _task(self, index: int) -> Task:
        """Make task `index`, which is in range."""

    @property
    def classes(self) -> int:
        """How many outputs a network needs."""
        return len(self.dataset.classes)

    def workload(self) -> list[int]:
        """Count the examples that each task trains on, repetitions included."""
        return [len(task.train) * task.epochs for task in self]

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(f"index is {index}; the stream has tasks 0 … {len(self) - 1}")
        return self._task(index)

    def __iter__(self) -> Iterator[Task]:
        return (self._task(index) for index in range(len(self)))

    def _boundary(self, index: int, *changed: Change) -> frozenset[Change]:
        """What changed at the start of task `index`: nothing before the first."""
        return frozenset(changed if index else ())


def some_or_none(examples: Examples) -> Examples | None:
    """Turn no examples into None: there is nothing to be tested on."""
    return examples if len(examples) else None


def split_evenly(order: Tensor, parts: int, what: str) -> tuple[Tensor, ...]:
    """Cut into `parts` pieces whose sizes differ by at most one."""
    if not 1 <= parts <= len(order):
        raise ValueError(f"{what} is {parts}; with {len(order)} to share out it must be 1 … {len(order)}")
    return order.tensor_split(parts)
