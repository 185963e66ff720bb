"""Streams of text: a permuted vocabulary, more text after the first, texts in turn."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from pliant._seeding import permutation
from pliant._validation import check_choice, check_number, require_positive
from pliant.data.dataset import Examples
from pliant.streams.stream import Change, Stream, Task
from pliant.streams.task_shifts import Drifting

Checkpoint = Literal["best", "middle", "last"]
CHECKPOINTS: tuple[Checkpoint, ...] = get_args(Checkpoint)
"""Checkpoints of a first task, from which the second may start."""


def check_texts(stream: Stream, name: str, least: int) -> int:
    """Return the number of texts of a stream's data set, or raise a ValueError if there are too few."""
    source = stream.dataset.train.source
    found = 0 if source is None else int(source.max()) + 1
    if found < least:
        what = f"data {stream.dataset.name}: {name}"
        if not found:
            raise ValueError(f"{what} needs a text, such as python_docs")
        raise ValueError(f"{what} needs {least} texts; give a folder of .txt files, or a second text with data.then=")
    return found


@dataclass(frozen=True)
class PermutedVocabulary(Drifting):
    """Every task gives the tokens of the same text new names, by one random permutation of the vocabulary.

    A fresh network finds all tasks equally hard. The stream tests how well a network memorizes, so its number is the
    training loss.

    Args:
        tasks: Number of tasks.
        epochs: Epochs per task.
        drift: The number of tasks that a change takes.
    """

    paper: ClassVar[str] = "beyond the papers: language that changes its alphabet"
    headline: ClassVar[str] = "mean_train_loss"
    change: ClassVar[Change] = "labels"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_texts(self, "permuted_vocabulary", 1)

    def permutation(self, index: int) -> Tensor:
        """Return the new name of each token in a task."""
        return permutation(self.classes, "vocabulary", self.seed, index)

    def _state(self, index: int) -> tuple[Examples, Examples | None]:
        names = self.permutation(index).to(self.dataset.train.y.device)
        train, test = (
            replace(examples, x=names[examples.x], y=names[examples.y])
            for examples in (self.dataset.train, self.dataset.test)
        )
        return train, test


@dataclass(frozen=True)
class TextWarmStart(Stream):
    """One text first, then this text together with a second one: continual pre-training.

    Args:
        first_epochs: Epochs on the first text. At a constant learning rate, fewer epochs start the second task from an
            earlier checkpoint of the same run.
        epochs: Epochs on both texts.
        share: The share of the first text's windows in the second task; None for all windows of both texts.
        checkpoint: Where the second task starts. None: each run trains the first task itself, with its methods.
            "last", "middle", "best": the first task is trained once for each seed, without methods, and all runs of an
            experiment start from its end, from half of its epochs, or where the test loss was lowest.
    """

    first_epochs: int = 100
    epochs: int = 10
    share: float | None = None
    checkpoint: Checkpoint | None = None
    paper: ClassVar[str] = "FIRE, §4.2"
    headline: ClassVar[str] = "final_test_loss"

    def __post_init__(self) -> None:
        require_positive(first_epochs=self.first_epochs, epochs=self.epochs)
        if self.share is not None:
            check_number("share", self.share, high=1.0, below=True)
        if self.checkpoint is not None:
            check_choice("checkpoint", self.checkpoint, CHECKPOINTS)
        check_texts(self, "text_warm_start", 2)

    def __len__(self) -> int:
        return 2

    def _task(self, index: int) -> Task:
        train, test = self.dataset.train, self.dataset.test
        others = {"first": test.from_source(0), "second": test.from_source(1)}
        if index == 0:
            return Task(0, train.from_source(0), others["first"], self.first_epochs, frozenset(), others)
        assert train.source is not None
        old, new = ((train.source == source).nonzero().flatten().cpu() for source in (0, 1))
        if self.share is not None:
            count = min(len(old), round(len(new) * self.share / (1 - self.share)))
            old = old[permutation(len(old), "text_warm_start", self.seed)[:count]]
        mixed = torch.cat([old, new])
        return Task(1, train.select(mixed), test, self.epochs, self._boundary(1, "examples"), others)


@dataclass(frozen=True)
class TextCycle(Stream):
    """Texts in turn, again and again: languages, authors, topics.

    Args:
        tasks: Number of tasks.
        epochs: Epochs per task.
        probe: Whether the last text is never trained on. Its loss shows what carries over to other texts.
    """

    tasks: int = 10
    epochs: int = 10
    probe: bool = False
    paper: ClassVar[str] = "beyond the papers: corpora in turn"
    headline: ClassVar[str] = "mean_test_loss"

    def __post_init__(self) -> None:
        require_positive(tasks=self.tasks, epochs=self.epochs)
        check_texts(self, "text_cycle", 3 if self.probe else 2)

    def __len__(self) -> int:
        return self.tasks

    def _task(self, index: int) -> Task:
        train, test = self.dataset.train, self.dataset.test
        texts = check_texts(self, "text_cycle", 2)
        others = {"probe": test.from_source(texts - 1)} if self.probe else {}
        text = index % (texts - self.probe)
        return Task(
            index,
            train.from_source(text),
            test.from_source(text),
            self.epochs,
            self._boundary(index, "examples"),
            others,
        )
