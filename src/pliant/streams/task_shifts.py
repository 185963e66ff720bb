"""Streams in which the task changes: random labels, permuted pixels, permuted labels, new pairs of classes.

A change may be gradual (`drift`): then a growing share of the examples follows the new task.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from pliant._seeding import generator, permutation
from pliant._validation import require_positive
from pliant.data.dataset import Examples
from pliant.streams.stream import Change, EqualTasks, Task, some_or_none


@dataclass(frozen=True)
class Drifting(EqualTasks):
    """Tasks of equal length and size; from one state of the world to the next in one task or in several.

    Args:
        tasks: Number of tasks.
        epochs: Epochs per task.
        drift: The number of tasks that a change takes. With 4, a quarter of the examples changes with each task.
    """

    drift: int = 1
    change: ClassVar[Change]

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(drift=self.drift)

    @abstractmethod
    def _state(self, index: int) -> tuple[Examples, Examples | None]:
        """Return the training and test examples of state `index` of the world, in the order of the data set."""

    def workload(self) -> list[int]:
        """Return the examples per task times epochs, without making the tasks."""
        return [len(self.dataset.train) * self.epochs] * self.tasks

    def _task(self, index: int) -> Task:
        state = -(-index // self.drift)
        train, test = self._state(state)
        if part := index % self.drift:
            old_train, old_test = self._state(state - 1)
            train = self._mix(old_train, train, part, state)
            test = None if old_test is None or test is None else self._mix(old_test, test, part, state)
        return Task(index, train, test, self.epochs, self._boundary(index, self.change))

    def _mix(self, old: Examples, new: Examples, part: int, state: int) -> Examples:
        """Take a share of the examples from the new state, and the others from the old one."""
        order = permutation(len(old), "drift", self.seed, state)
        is_new = torch.zeros(len(old), dtype=torch.bool)
        is_new[order[: round(len(old) * part / self.drift)]] = True
        is_new = is_new.to(old.y.device)

        def choose(one: Tensor, other: Tensor) -> Tensor:
            return torch.where(is_new.view(-1, *[1] * (one.ndim - 1)), one, other)

        x = new.x if old.x is new.x else choose(new.x, old.x)
        return replace(new, x=x, y=choose(new.y, old.y))


@dataclass(frozen=True)
class RandomLabels(Drifting):
    """Every task gives every example a new random label. Labels can only be memorized, so there is no test set.

    Args:
        tasks: Number of tasks.
        epochs: Epochs per task.
        drift: The number of tasks that a change takes.
    """

    paper: ClassVar[str] = "Curvature, B.1, B.3; Spectral regularization, §5"
    headline: ClassVar[str] = "mean_train_accuracy"
    change: ClassVar[Change] = "labels"

    def _state(self, index: int) -> tuple[Examples, Examples | None]:
        train = self.dataset.train
        draw = generator("random_labels", self.seed, index)
        return train.relabel(torch.randint(self.classes, (len(train),), generator=draw).to(train.y.device)), None


@dataclass(frozen=True)
class PixelPermutation(Drifting):
    """Every task permutes the pixels of all images by one random permutation.

    Args:
        tasks: Number of tasks.
        epochs: Epochs per task.
        drift: The number of tasks that a change takes.
    """

    paper: ClassVar[str] = "Curvature, B.2; Spectral regularization, §5"
    change: ClassVar[Change] = "pixels"

    def permutation(self, index: int) -> Tensor:
        """Return the pixel order of a task: position i gets the pixel at entry i."""
        positions = self.dataset.shape[-2:] if len(self.dataset.shape) == 3 else self.dataset.shape
        return permutation(torch.Size(positions).numel(), "pixels", self.seed, index)

    def _state(self, index: int) -> tuple[Examples, Examples | None]:
        order = self.permutation(index)
        return self.dataset.train.permute_pixels(order), self.dataset.test.permute_pixels(order)


@dataclass(frozen=True)
class LabelFlip(Drifting):
    """Every task permutes the labels by one random permutation; examples of a class keep a common label.

    Args:
        tasks: Number of tasks.
        epochs: Epochs per task.
        drift: The number of tasks that a change takes.
    """

    paper: ClassVar[str] = "Spectral regularization, §5"
    change: ClassVar[Change] = "labels"

    def permutation(self, index: int) -> Tensor:
        """Return the label of each class in a task."""
        return permutation(self.classes, "label_flip", self.seed, index)

    def _state(self, index: int) -> tuple[Examples, Examples | None]:
        train, test = self.dataset.train, self.dataset.test
        names = self.permutation(index).to(train.y.device)
        return train.relabel(names[train.y]), test.relabel(names[test.y])


@dataclass(frozen=True)
class BinaryPairs(EqualTasks):
    """Every task classifies two classes that are new to the network, with a new output layer.

    When all classes are used, the pairs start over in another order: 20 classes give 10 tasks without a repeated class.

    Args:
        tasks: Number of tasks.
        epochs: Epochs per task.
    """

    epochs: int = 250
    paper: ClassVar[str] = "Dohare et al. 2024 (Continual ImageNet); Curvature, B.4"
    renews_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.dataset.classes) < 2:
            raise ValueError(f"dataset {self.dataset.name} has 1 class; binary_pairs needs at least 2")

    @property
    def outputs(self) -> int:
        """The number of outputs of a network: one for each class of the pair."""
        return 2

    def pair(self, index: int) -> tuple[int, int]:
        """Return the two classes of a task."""
        count = len(self.dataset.classes)
        turn, place = divmod(index, count // 2)
        order = permutation(count, "pairs", self.seed, turn)
        return int(order[2 * place]), int(order[2 * place + 1])

    def _task(self, index: int) -> Task:
        pair = self.pair(index)
        return Task(
            index,
            _select_pair(self.dataset.train, *pair),
            some_or_none(_select_pair(self.dataset.test, *pair)),
            self.epochs,
            self._boundary(index, "classes", "head"),
        )


def _select_pair(examples: Examples, zero: int, one: int) -> Examples:
    """Return the examples of two classes, labeled 0 and 1."""
    chosen = ((examples.y == zero) | (examples.y == one)).nonzero().flatten()
    kept = examples.select(chosen)
    return kept.relabel((kept.y == one).to(torch.int64))
