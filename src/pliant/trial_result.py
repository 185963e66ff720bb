"""What a trial found, and the rule of its verdict: pure functions of learning curves."""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

from pliant._importing import naming_extra
from pliant._json import without_infinities

Verdict = Literal["plastic", "lost", "undecided"]
Value = Literal["accuracy", "loss"]
Labels = Literal["given", "random"]

NOTICEABLE = 0.01
"""A network is called lost if its gap in the best held-out result is larger than this for certain.

All gaps are fractions of what a fresh network gains.
"""
TOLERATED = 0.02
"""A network is called plastic only if its gap in the best held-out result is smaller than this for certain."""
DRAWS = 2.0
"""A network is called lost by its best result only if its gap is also larger than this many standard deviations of the
gap over pairs. Each pair has another fresh network, and some draws learn a little worse than others.
"""
SLOWER = 0.1
"""A network is called lost if its gap in area is larger than this for certain, and plastic only if it is smaller."""
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Gap:
    """By how much fresh networks were better than this one, over pairs.

    Attributes:
        mean: Fresh minus aged, as a fraction of what the fresh network gains.
        low: Lower end of the interval.
        high: Upper end of the interval.
        deviation: Standard deviation over pairs.
    """

    mean: float
    low: float
    high: float
    deviation: float = 0.0

    def __str__(self) -> str:
        return f"{self.mean:+.1%} [{self.low:+.1%}, {self.high:+.1%}]"


@dataclass(frozen=True)
class Pair:
    """One copy of the network and one fresh twin that learned the same data.

    Attributes:
        seed: The number of the pair.
        aged: Held-out value of the copy at each evaluation; higher is better. Values below the untrained twin's are
            raised to it: a copy that diverged is not worse than an untrained network.
        fresh: The same of the fresh twin.
        aged_training: Training value of the copy at the end.
        fresh_training: The same of the fresh twin.
    """

    seed: int
    aged: tuple[float, ...]
    fresh: tuple[float, ...]
    aged_training: float
    fresh_training: float

    @property
    def gain(self) -> float:
        """What the fresh twin gained, from its first evaluation to its best."""
        return max(max(self.fresh) - self.fresh[0], 1e-9)

    @property
    def final_gap(self) -> float:
        """Fresh minus aged at the end, as a fraction of the gain."""
        return (self.fresh[-1] - self.aged[-1]) / self.gain

    @property
    def best_gap(self) -> float:
        """Fresh minus aged, each at its best, as a fraction of the gain."""
        return (max(self.fresh) - max(self.aged)) / self.gain

    @property
    def area_gap(self) -> float:
        """Fresh minus aged, area under the learning curve, as a fraction of the gain."""
        return (area(self.fresh) - area(self.aged)) / self.gain

    @property
    def relative_steps(self) -> float:
        """Steps until the copy reaches the twin's final value, divided by the twin's own; infinite if never."""
        level = self.fresh[-1]
        own = next(i for i, value in enumerate(self.fresh) if value >= level)
        reached = next((i for i, value in enumerate(self.aged) if value >= level), math.inf)
        return reached / max(own, 1)


@dataclass(frozen=True)
class Trial:
    """What a trial found.

    Attributes:
        verdict: "plastic", "lost" or "undecided".
        gap: How much of a fresh network's area under the learning curve is missing, as a fraction of its gain.
        interval: The interval of `gap`.
        best_gap: How much of a fresh network's best held-out result is missing.
        final_gap: How much of its held-out result at the end is missing.
        relative_steps: Median over pairs of the steps to the fresh network's level, relative to the fresh network.
        learned: Whether the fresh networks learned the data. If not, nothing can be decided.
        value: What was measured: "accuracy", or "loss" with its sign changed.
        steps: The steps at which held-out data was evaluated.
        pairs: The learning curves, one pair for each seed.
        stress: Area under the training curve on random labels of this network ("aged") and of fresh ones ("fresh").
        seconds: How long the trial took.
        shortened_from: The default number of steps, if the budget did not allow it.
        restored: How much of the gap in area a fresh head on top of the frozen one restores, as a fraction; None if it
            was not asked for, or nothing is lost.
        labels: Whether the labels were the data's own or random ones.
    """

    verdict: Verdict
    gap: float
    interval: tuple[float, float]
    best_gap: Gap
    final_gap: Gap
    relative_steps: float
    learned: bool
    value: Value
    steps: tuple[int, ...]
    pairs: tuple[Pair, ...]
    stress: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    shortened_from: int | None = None
    restored: float | None = None
    labels: Labels = "given"

    def to_dict(self) -> dict[str, Any]:
        """Return the trial in plain types, ready for JSON: None in place of a number that is not finite."""
        plain: dict[str, Any] = without_infinities(asdict(self))
        return plain

    def __str__(self) -> str:
        """Write the verdict, then the numbers that it rests on."""
        return "\n".join([f"{self.verdict}: {self.answer}", *(f"  {line}" for line in self.details)])

    def _repr_html_(self) -> str:
        rest = "".join(f"<li>{html.escape(line)}</li>" for line in self.details)
        return f"<p><b>{self.verdict}: {html.escape(self.answer)}</b></p><ul>{rest}</ul>"

    @property
    def answer(self) -> str:
        """The verdict as a sentence."""
        if not self.learned:
            return "fresh networks do not learn this data within the trial, so there is nothing to compare with"
        what = "random labels" if self.labels == "random" else "the new data"
        nearly = "nearly " if self.best_gap.low > 0 else ""
        return {
            "plastic": f"this network learns {what} {nearly}as well as a fresh one",
            "lost": f"this network learns {what} worse than a fresh one",
            "undecided": f"{len(self.pairs)} pairs do not show whether a fresh network learns {what} better",
        }[self.verdict]

    @property
    def details(self) -> list[str]:
        """The numbers that the verdict rests on, as sentences."""
        sign = -1 if self.value == "loss" else 1
        aged, fresh = (sign * mean(max(curve) for curve in self.curves(which)) for which in ("aged", "fresh"))
        training = (sign * mean(getattr(p, f"{which}_training") for p in self.pairs) for which in ("aged", "fresh"))
        whole = Gap(self.gap, *self.interval)
        seen = "training" if self.labels == "random" else "held-out"
        lines = [
            f"{seen} {self.value} at its best: {aged:.4g}, fresh network {fresh:.4g}",
            "training {} at the end: {:.4g}, fresh network {:.4g}".format(self.value, *training),
        ]
        if self.labels == "random":
            lines.append("a healthy network that has trained for long may fail this test; real labels would tell")
        if self.learned:
            lines.append(
                f"gap to a fresh network, as a share of what that gains: {self.best_gap} at its best, "
                f"{self.final_gap} at the end, {whole} in area"
            )
            lines.append(self._speed)
        if self.stress:
            lines.append(
                f"stress test on random labels (not part of the verdict): area {self.stress['aged']:.2f}, "
                f"fresh network {self.stress['fresh']:.2f}"
            )
        if self.restored is not None:
            lines.append(f"injecting fresh plasticity into the head restores {self.restored:.0%} of the gap in area")
        shortened = f" (the budget does not allow {self.shortened_from})" if self.shortened_from else ""
        cost = f"cost: {len(self.pairs)} pairs, {self.steps[-1]} steps each{shortened}, {self.seconds:.1f} seconds"
        return [*lines, cost]

    @property
    def _speed(self) -> str:
        if self.relative_steps == 0:
            return "it begins at the fresh network's final level"
        if math.isfinite(self.relative_steps):
            return f"it reaches the fresh network's final level in {self.relative_steps:.0%} of the steps"
        return "it does not reach the fresh network's final level within the trial"

    def curves(self, which: str) -> list[tuple[float, ...]]:
        """Return the learning curves of the copies ("aged") or of the fresh twins ("fresh")."""
        return [getattr(pair, which) for pair in self.pairs]


def list_looks(seeds: int, most: int) -> list[int]:
    """Return the numbers of pairs after which a verdict is asked for.

    Example:
        >>> list_looks(3, 12), list_looks(4, 10)
        ([3, 6, 12], [4, 8, 10])
    """
    looks = [seeds]
    while looks[-1] < most:
        looks.append(min(2 * looks[-1], most))
    return looks


def decide(pairs: Sequence[Pair], looks: int, resolution: float) -> Verdict:
    """Return the verdict on the pairs so far, corrected for the number of times that it is asked for."""
    if not have_learned(pairs, looks):
        return "undecided"
    best, speed = (measure_gap(pairs, name, looks, resolution) for name in ("best", "area"))
    beyond_draws = best.mean - NOTICEABLE > DRAWS * best.deviation
    if (best.low > NOTICEABLE and beyond_draws) or speed.low > SLOWER:
        return "lost"
    if best.high < TOLERATED and speed.high < SLOWER:
        return "plastic"
    return "undecided"


def have_learned(pairs: Sequence[Pair], looks: int) -> bool:
    """Return whether every fresh network gained something, and certainly does better while it learns than before.

    A gap is a fraction of the gain, so a pair without a gain says nothing.
    """
    if any(max(pair.fresh) <= pair.fresh[0] for pair in pairs):
        return False
    return interval([mean(pair.fresh[1:]) - pair.fresh[0] for pair in pairs], looks).low > 0


def measure_gap(pairs: Sequence[Pair], name: str, looks: int, resolution: float) -> Gap:
    """Return the mean of one gap over pairs ("best", "area" or "final"), with its interval."""
    gain = mean(pair.gain for pair in pairs)
    return interval([getattr(pair, f"{name}_gap") for pair in pairs], looks, resolution / gain)


def interval(values: Sequence[float], looks: int, resolution: float = 0.0) -> Gap:
    """Return mean and Student's t interval, its level divided among the looks (Bonferroni).

    Accuracies on few examples are often equal by chance. So the standard deviation is taken to be `resolution` at
    least: one example.
    """
    with naming_extra("trial", "cli"):
        from scipy.stats import t

    center, n = mean(values), len(values)
    deviation = max(math.sqrt(math.fsum((value - center) ** 2 for value in values) / (n - 1)), resolution)
    half = float(t.ppf(1 - (1 - CONFIDENCE) / 2 / looks, n - 1)) * deviation / math.sqrt(n)
    return Gap(center, center - half, center + half, deviation)


def area(curve: Sequence[float]) -> float:
    """Return the area under a curve over evenly spaced points, as its mean height.

    Example:
        >>> area([0.0, 1.0, 1.0])
        0.75
    """
    return math.fsum((a + b) / 2 for a, b in pairwise(curve)) / (len(curve) - 1)


def mean(values: Iterable[float]) -> float:
    """Return the mean."""
    found = list(values)
    return math.fsum(found) / len(found)
