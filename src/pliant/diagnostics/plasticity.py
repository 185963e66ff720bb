"""Plasticity itself: how well a learner still learns, task after task (Curvature §2, C.1).

Ranks and norms may explain a loss of plasticity; these numbers say whether there is one. All take an error (or a loss)
for each task, where lower is better.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Plasticity:
    """The errors of a learner over a sequence of tasks of equal difficulty.

    Attributes:
        final: For each task, J_K: the error over all data of the task at its end.
        online: For each task, the mean error over its steps, if recorded. It also rises if only the *start* of a task
            gets worse, so it can suggest a loss that the final error does not show (Curvature C.1).
        fresh: The error of a freshly initialized network with the same budget, for each task or once for all.
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
        """Mean final error over the last quarter of tasks minus the first quarter: > 0 is loss of plasticity."""
        quarter = max(1, len(self.final) // 4)
        return fmean(self.final[-quarter:]) - fmean(self.final[:quarter])

    @property
    def trend(self) -> float:
        """Least-squares slope of the final error per task: > 0 is loss of plasticity, 0 for a single task."""
        return slope(self.final)

    @property
    def gap(self) -> tuple[float, ...]:
        """Final error minus the fresh network's error for each task, or empty without a fresh network."""
        if not self.fresh:
            return ()
        fresh = self.fresh * len(self.final) if len(self.fresh) == 1 else self.fresh
        return tuple(ours - theirs for ours, theirs in zip(self.final, fresh, strict=True))


def slope(values: Sequence[float]) -> float:
    """Return the least-squares slope of equally spaced values, or 0 for a single value.

    Example:
        >>> slope([1.0, 3.0, 5.0])
        2.0
    """
    middle = (len(values) - 1) / 2
    spread = sum((k - middle) ** 2 for k in range(len(values)))
    return sum((k - middle) * v for k, v in enumerate(values)) / spread if spread else 0.0
