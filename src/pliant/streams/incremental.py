"""Streams with new examples or classes: a single task, a warm start, transfer, chunks, class-incremental learning.

The two continual streams have the same chunks for the same seed. In one of them the learner keeps earlier chunks.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from pliant._seeding import generator, permutation
from pliant._validation import check_choice, check_number, require_positive
from pliant.data.dataset import Examples
from pliant.streams.stream import Stream, Task, some_or_none, split_evenly


@dataclass(frozen=True)
class SingleTask(Stream):
    """One data set, as in ordinary supervised learning.

    Args:
        epochs: Epochs of training.
    """

    epochs: int = 200
    paper: ClassVar[str] = "Soft weight rescaling, §4.3"

    def __post_init__(self) -> None:
        require_positive(epochs=self.epochs)

    def __len__(self) -> int:
        return 1

    def _task(self, index: int) -> Task:
        return Task(index, self.dataset.train, self.dataset.test, self.epochs, frozenset())


@dataclass(frozen=True)
class WarmStart(Stream):
    """A random part of the data first, then all of it.

    Args:
        fraction: The fraction of the data in the first task. 1 repeats the same data, which isolates what a method
            does at the boundary.
        first_epochs: Epochs of the first task.
        epochs: Epochs on all data.
        wrong_labels: The fraction of the first task's labels that are wrong. In the second task all labels are right.
    """

    fraction: float = 0.5
    first_epochs: int = 100
    epochs: int = 100
    wrong_labels: float = 0.0
    paper: ClassVar[str] = "Ash & Adams 2020; Soft weight rescaling, §4.1; FIRE, §4.1 (10 %, 1000 epochs)"

    def __post_init__(self) -> None:
        require_positive(first_epochs=self.first_epochs, epochs=self.epochs)
        check_number("fraction", self.fraction, high=1.0, above=True)
        check_number("wrong_labels", self.wrong_labels, high=1.0)

    def __len__(self) -> int:
        return 2

    def _task(self, index: int) -> Task:
        train, test = self.dataset.train, self.dataset.test
        if index == 0:
            order = permutation(len(train), "warm_start", self.seed)
            part = order[: max(1, round(self.fraction * len(train)))]
            return Task(0, self._with_wrong_labels(train.select(part)), test, self.first_epochs, frozenset())
        return Task(1, train, test, self.epochs, self._boundary(1, "examples"))

    def _with_wrong_labels(self, examples: Examples) -> Examples:
        """Give a random part of the examples another class."""
        draw = generator("wrong_labels", self.seed)
        chosen = torch.randperm(len(examples), generator=draw)[: round(self.wrong_labels * len(examples))]
        y = examples.y.clone()
        shift = torch.randint(1, max(self.classes, 2), (len(chosen),), generator=draw)
        y[chosen] = (y[chosen] + shift.to(y.device)) % self.classes
        return examples.relabel(y)


@dataclass(frozen=True)
class Transfer(Stream):
    """Some classes first (the source), then the others (the target): does what was learned help or hurt?

    Args:
        fraction: The fraction of the classes in the source.
        first_epochs: Epochs on the source.
        epochs: Epochs on the target.
    """

    fraction: float = 0.5
    first_epochs: int = 100
    epochs: int = 100
    paper: ClassVar[str] = "beyond the papers: pre-training on other classes"

    def __post_init__(self) -> None:
        require_positive(first_epochs=self.first_epochs, epochs=self.epochs)
        check_number("fraction", self.fraction, high=1.0, above=True, below=True)
        if self.classes < 2:
            raise ValueError(f"dataset {self.dataset.name} has {self.classes} class; transfer needs at least 2")

    def __len__(self) -> int:
        return 2

    def groups(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the classes of the source and of the target."""
        order = permutation(self.classes, "transfer", self.seed)
        n = min(max(1, round(self.fraction * self.classes)), self.classes - 1)
        return order[:n], order[n:]

    def _task(self, index: int) -> Task:
        present = self.groups()[index]
        train, test = (
            examples.select(torch.isin(examples.y.cpu(), present).nonzero().flatten())
            for examples in (self.dataset.train, self.dataset.test)
        )
        epochs = (self.first_epochs, self.epochs)[index]
        return Task(index, train, some_or_none(test), epochs, self._boundary(index, "examples", "classes"))


@dataclass(frozen=True)
class _Chunks(Stream):
    """Random chunks of equal size that arrive one after the other.

    Args:
        chunks: Number of chunks.
        epochs: Epochs after each arrival.
    """

    chunks: int = 10
    epochs: int = 100
    paper: ClassVar[str] = "Soft weight rescaling, §4.2"

    def __post_init__(self) -> None:
        require_positive(chunks=self.chunks, epochs=self.epochs)
        self._chunks()  # Raises if there are too many chunks.

    def __len__(self) -> int:
        return self.chunks

    def _chunks(self) -> tuple[torch.Tensor, ...]:
        order = permutation(len(self.dataset.train), "chunks", self.seed)
        return split_evenly(order, self.chunks, "chunks")


@dataclass(frozen=True)
class ContinualFull(_Chunks):
    """Random chunks arrive and accumulate: the learner trains on all chunks so far.

    Args:
        chunks: Number of chunks.
        epochs: Epochs after each arrival.
    """

    paper: ClassVar[str] = "Soft weight rescaling, §4.2; FIRE, §4.1"

    def _task(self, index: int) -> Task:
        train = self.dataset.train.select(torch.cat(self._chunks()[: index + 1]))
        return Task(index, train, self.dataset.test, self.epochs, self._boundary(index, "examples"))


@dataclass(frozen=True)
class ContinualLimited(_Chunks):
    """Random chunks arrive and go: the learner trains only on the current chunk.

    Args:
        chunks: Number of chunks.
        epochs: Epochs on each chunk.
    """

    def _task(self, index: int) -> Task:
        train = self.dataset.train.select(self._chunks()[index])
        return Task(index, train, self.dataset.test, self.epochs, self._boundary(index, "examples"))


@dataclass(frozen=True)
class ClassIncremental(Stream):
    """Classes arrive in groups, in random order; training and test sets hold the classes so far.

    The network has an output for every class from the start.

    Args:
        phases: Number of groups; their sizes differ by at most one.
        epochs: Epochs after each arrival.
        accumulate: Whether the training set keeps the classes of earlier phases. The test set always does.
    """

    phases: int = 20
    epochs: int = 100
    accumulate: bool = True
    paper: ClassVar[str] = "Spectral regularization, §5 (5 classes a task); FIRE, §4.1 (20 phases)"
    headline: ClassVar[str] = "mean_test_accuracy"

    def __post_init__(self) -> None:
        require_positive(phases=self.phases, epochs=self.epochs)
        check_choice("accumulate", self.accumulate, (True, False))
        split_evenly(torch.arange(self.classes), self.phases, "phases")

    def __len__(self) -> int:
        return self.phases

    def groups(self) -> tuple[torch.Tensor, ...]:
        """Return the classes that arrive with each task."""
        return split_evenly(permutation(self.classes, "classes", self.seed), self.phases, "phases")

    def _task(self, index: int) -> Task:
        groups = self.groups()
        met = torch.cat(groups[: index + 1])
        train, test = self.dataset.train, self.dataset.test
        present = met if self.accumulate else groups[index]
        return Task(
            index,
            train.select(torch.isin(train.y.cpu(), present).nonzero().flatten()),
            some_or_none(test.select(torch.isin(test.y.cpu(), met).nonzero().flatten())),
            self.epochs,
            self._boundary(index, "examples", "classes"),
        )
