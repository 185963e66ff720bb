"""Streams whose targets are real numbers: a new teacher network for each task, and a slowly changing function."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from pliant._seeding import generator
from pliant._validation import check_number, require_positive
from pliant.data.dataset import Examples
from pliant.streams.stream import EqualTasks, Task

_CHUNK = 4096


@dataclass(frozen=True)
class _Regression(EqualTasks):
    """One real target for every example of the data set, in every task."""

    @property
    def outputs(self) -> int:
        """One real number."""
        return 1

    def workload(self) -> list[int]:
        """Return the examples per task times epochs, without making the tasks."""
        return [len(self.dataset.train) * self.epochs] * self.tasks


@dataclass(frozen=True)
class TeacherRegression(_Regression):
    """Every task has new targets for the same inputs, computed by a new random network with one hidden layer.

    The teacher is y = vᵀ tanh(Wx + b), its targets scaled to mean 0 and variance 1 over the training inputs.

    Args:
        tasks: Number of tasks.
        epochs: Epochs per task.
        width: Units of the teacher's hidden layer.
        gain: Standard deviation of Wx for inputs of variance 1. A higher gain makes a rougher function.
    """

    tasks: int = 20
    epochs: int = 40
    width: int = 64
    gain: float = 2.0
    paper: ClassVar[str] = "beyond the papers: functions that change"
    headline: ClassVar[str] = "mean_test_loss"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(width=self.width)
        check_number("gain", self.gain, above=True)

    def _task(self, index: int) -> Task:
        draw = generator("teacher", self.seed, index)
        size = torch.Size(self.dataset.shape).numel()
        w = torch.randn(size, self.width, generator=draw) * self.gain / size**0.5
        b, v = torch.randn(self.width, generator=draw), torch.randn(self.width, 1, generator=draw)
        raw = [_ask(examples, w, b, v) for examples in (self.dataset.train, self.dataset.test)]
        scale = raw[0].std().clamp_min(1e-6)
        train, test = (
            examples.relabel(((y - raw[0].mean()) / scale).to(examples.y.device))
            for examples, y in zip((self.dataset.train, self.dataset.test), raw, strict=True)
        )
        return Task(index, train, test, self.epochs, self._boundary(index, "targets"))


@dataclass(frozen=True)
class SlowRegression(_Regression):
    """A fixed function of slowly changing inputs: the first `slow` features are constant in a task, then one flips.

    The function is a network of linear threshold units with weights ±1, y = vᵀ[Wx ≥ θ] / √width, where θ of a unit is
    β·features minus the number of its negative weights. The learner sees only what changes seldom, and must track it.

    Args:
        tasks: Number of tasks.
        epochs: Epochs per task.
        slow: Number of features that change slowly.
        width: Units of the function's hidden layer.
        beta: β in (0, 1), the threshold as a fraction of the features.
    """

    tasks: int = 200
    epochs: int = 1
    slow: int = 15
    width: int = 100
    beta: float = 0.7
    paper: ClassVar[str] = "Dohare et al. 2024 (slowly changing regression)"
    headline: ClassVar[str] = "mean_task_online_loss"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(slow=self.slow, width=self.width)
        check_number("beta", self.beta, high=1.0, above=True, below=True)
        if len(self.dataset.shape) != 1 or not self.dataset.train.x.is_floating_point():
            raise ValueError(
                f"data {self.dataset.name}: slow_regression needs vectors of features, not inputs of shape "
                f"{self.dataset.shape}; use the data set 'bits', or data.project=20"
            )
        if self.slow > self.dataset.shape[0]:
            raise ValueError(f"slow is {self.slow}; it must be at most {self.dataset.shape[0]}, the number of features")

    def bits(self, index: int) -> Tensor:
        """Return the slow features of a task: random bits, one of which flips with each task."""
        draw = generator("slow_bits", self.seed)
        bits = torch.randint(2, (self.slow,), generator=draw)
        flips = torch.randint(self.slow, (self.tasks,), generator=draw)[:index]
        return ((bits + flips.bincount(minlength=self.slow)) % 2).float()

    def _task(self, index: int) -> Task:
        draw = generator("slow_function", self.seed)
        size = self.dataset.shape[0]
        w = torch.randint(2, (size, self.width), generator=draw).float() * 2 - 1
        v = torch.randint(2, (self.width, 1), generator=draw).float() * 2 - 1
        threshold = self.beta * size - (w < 0).sum(0)

        def shifted(examples: Examples) -> Examples:
            x = examples.batch(torch.arange(len(examples), device=examples.y.device))[0].clone()
            x[:, : self.slow] = self.bits(index).to(x)
            y = ((x.cpu() @ w >= threshold).float() @ v) / self.width**0.5
            return replace(examples, x=x, y=y.to(x.device), rows=None)

        train, test = shifted(self.dataset.train), shifted(self.dataset.test)
        return Task(index, train, test, self.epochs, self._boundary(index, "inputs"))


def _ask(examples: Examples, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """Return vᵀ tanh(Wx + b) for all examples."""
    parts = torch.split(torch.arange(len(examples), device=examples.y.device), _CHUNK)
    return torch.cat([torch.tanh(examples.batch(part)[0].flatten(1).cpu().float() @ w + b) @ v for part in parts])
