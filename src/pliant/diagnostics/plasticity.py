"""Plasticity itself: how well a learner still learns, task after task (Curvature §2, C.1).

Signs such as ranks and norms explain or fail to explain; these say whether there is anything to explain. All take an
error (or loss) for each task, lower is better.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan
from statistics import fmean

from torch import Tensor

IGNORED = -100
"""The class index of what does not count, as that of `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True)
class Plasticity:
    """How a learner fared over a sequence of tasks of equal difficulty.

    Attributes:
        final: J_K, the error over all of a task's data at its end, for each task.
        online: The mean error over each task's steps, if it was recorded. It rises when only a task's *start* gets
            worse, so it can suggest a loss that the end of the task does not have (Curvature C.1).
        fresh: The error of a freshly initialized network trained for the same budget, for each task or one for all.
    """

    final: tuple[float, ...]
    online: tuple[float, ...] = ()
    fresh: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.final:
            raise ValueError("final must hold the error of at least one task, got none")
        for name, allowed in (("online", (0, len(self.final))), ("fresh", (0, 1, len(self.final)))):
            if len(getattr(self, name)) not in allowed:
                raise ValueError(f"{name} must have one of {allowed} entries, got {len(getattr(self, name))}")

    @property
    def change(self) -> float:
        """Mean final error over the last quarter of the tasks minus that over the first: > 0 is loss of plasticity."""
        quarter = max(1, len(self.final) // 4)
        return fmean(self.final[-quarter:]) - fmean(self.final[:quarter])

    @property
    def trend(self) -> float:
        """Least-squares slope of the final error, a task: > 0 is loss of plasticity; 0 for a single task."""
        return slope(self.final)

    @property
    def gap(self) -> tuple[float, ...]:
        """Final error minus the fresh network's, for each task; empty without one."""
        if not self.fresh:
            return ()
        fresh = self.fresh * len(self.final) if len(self.fresh) == 1 else self.fresh
        return tuple(ours - theirs for ours, theirs in zip(self.final, fresh, strict=True))


def error_rate(output: Tensor, target: Tensor) -> float:
    """Return the fraction of samples whose largest output is not at the target class.

    NaN if there is none, or if an output that counts is NaN or +inf.

    Args:
        output: [samples, …, classes].
        target: Class indices of the shape of `output` without its last dimension; `IGNORED` where nothing counts.

    Example:
        >>> import torch
        >>> error_rate(torch.eye(2), torch.tensor([0, 0]))
        0.5
    """
    if output.shape[:-1] != target.shape:
        raise ValueError(
            f"target must have the output's shape without classes, got {tuple(target.shape)} for {tuple(output.shape)}"
        )
    counted = target != IGNORED
    output, target = output[counted], target[counted]
    if not (output < inf).all():  # −inf stands for a class that is ruled out
        return nan
    return float((output.argmax(-1) != target).double().mean())


def slope(values: Sequence[float]) -> float:
    """Return the least-squares slope of equally spaced values; 0 for a single one.

    Example:
        >>> slope([1.0, 3.0, 5.0])
        2.0
    """
    middle = (len(values) - 1) / 2
    spread = sum((k - middle) ** 2 for k in range(len(values)))
    return sum((k - middle) * v for k, v in enumerate(values)) / spread if spread else 0.0
