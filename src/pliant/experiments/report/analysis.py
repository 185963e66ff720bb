"""What a comparison came to: intervals, differences, costs and who is best, as far as that can be told."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pliant.experiments.report.reading import Comparison, Contender
from pliant.experiments.report.statistics import LEVEL, Difference, Interval, adjust, compare, difference, interval
from pliant.experiments.report.wording import direction
from pliant.experiments.store import Run, read_lines

Mark = Literal["best", "tied", ""]


@dataclass(frozen=True)
class Contrast:
    """A difference between two contenders, as one of a family of tests.

    Args:
        difference: The difference.
        p: Its p-value, corrected for the family.
        family: How many tests the family has.
    """

    difference: Difference
    p: float
    family: int

    @property
    def distinguishable(self) -> bool:
        """Whether the two can be told apart."""
        return self.p < LEVEL


@dataclass(frozen=True)
class Cost:
    """What a contender's runs took.

    Args:
        seconds: Median seconds a training step.
        range: The fewest and the most, over seeds.
        time: The same, relative to vanilla; NaN if that is not known.
        bytes: What weights, optimizer and methods keep between steps.
        memory: The same, relative to vanilla; NaN if that is not known.
    """

    seconds: float
    range: tuple[float, float]
    time: float
    bytes: float
    memory: float


@dataclass(frozen=True)
class Row:
    """A contender and what it came to.

    Args:
        contender: Who.
        numbers: Every metric, over the seeds that finished.
        marks: Where it is best or cannot be told from the best, by metric.
        against_vanilla: Its headline minus vanilla's, seed by seed; None if either is missing.
        against_fresh: Its headline minus that of a network trained from scratch.
        published: The source's own mean and spread; None if there is none.
        cost: What it took; None if that was not recorded.
        counts: How many of its runs ended in which way.
    """

    contender: Contender
    numbers: dict[str, Interval]
    marks: dict[str, Mark]
    against_vanilla: Contrast | None
    against_fresh: Contrast | None
    published: tuple[float, float] | None
    cost: Cost | None
    counts: dict[str, int]


class Analysis:
    """A comparison, analysed.

    Args:
        comparison: What to analyse.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.headline = comparison.headline
        self.metrics = _distinct(comparison)

    @cached_property
    def candidates(self) -> list[Contender]:
        """Who may be called best: whatever is no mere reference, has a finished seed and none that diverged."""
        able = [
            contender
            for contender in self.comparison.contenders
            if contender.role != "fresh" and not contender.diverged and contender.values(self.headline)
        ]
        return self._sorted(able, self.headline)

    @property
    def best(self) -> Contender | None:
        """The candidate with the best mean; that says nothing about how sure it is."""
        return self.candidates[0] if self.candidates else None

    @cached_property
    def rivals(self) -> dict[str, Contrast]:
        """The best candidate against every other, by name, the closest first: one family of tests."""
        if not self.candidates:
            return {}
        first, *others = self.candidates
        values = first.values(self.headline)
        return _correct({other.name: difference(values, other.values(self.headline)) for other in others})

    @cached_property
    def rows(self) -> list[Row]:
        """A row for every contender, best mean first."""
        vanilla = self._contrasts("vanilla")
        fresh = self._contrasts("fresh")
        marks = self._marks()
        costs = self._costs()
        published = (self.comparison.recipe or {}).get("published", {})
        return [
            Row(
                contender=contender,
                numbers={
                    metric: interval(list(values.values()))
                    for metric in self.metrics
                    if (values := contender.values(metric))
                },
                marks=marks.get(contender.name, {}),
                against_vanilla=vanilla.get(contender.name),
                against_fresh=fresh.get(contender.name),
                published=_pair(published.get(contender.label)),
                cost=costs.get(contender.name),
                counts=_count_ends(contender.runs),
            )
            for contender in self._sorted(self.comparison.contenders, self.headline)
        ]

    def row(self, contender: Contender) -> Row:
        """The row of a contender."""
        return next(row for row in self.rows if row.contender is contender)

    def _sorted(self, contenders: Sequence[Contender], metric: str) -> list[Contender]:
        sign = direction(metric)

        def rank(contender: Contender) -> float:
            values = contender.values(metric)
            return -sign * statistics.fmean(values.values()) if values else math.inf

        return sorted(contenders, key=rank)

    def _contrasts(self, role: Literal["vanilla", "fresh"]) -> dict[str, Contrast]:
        """Everyone's headline against a baseline's: one family of tests."""
        baseline = self.comparison.baseline(role)
        reference = baseline.values(self.headline) if baseline else {}
        if not reference:
            return {}
        found = {
            contender.name: difference(values, reference)
            for contender in self.comparison.contenders
            if contender is not baseline and (values := contender.values(self.headline))
        }
        return _correct(found)

    def _marks(self) -> dict[str, dict[str, Mark]]:
        """Mark the best of each metric if it can be told from all others, else it and those it cannot be told from."""
        tests = {(self.headline, name): contrast.p for name, contrast in self.rivals.items()}
        leaders = {self.headline: self.candidates[0].name} if self.rivals else {}
        others: dict[tuple[str, str], float] = {}
        for metric in self.metrics:
            able = self._sorted([c for c in self.candidates if c.values(metric)], metric)
            if metric != self.headline and len(able) > 1:
                leaders[metric] = able[0].name
                first = able[0].values(metric)
                others |= {(metric, rival.name): compare(first, rival.values(metric)) for rival in able[1:]}
        # The headline decides and is a family of its own; all other metrics together are another.
        tests |= dict(zip(others, adjust(list(others.values())), strict=True))
        marks: dict[str, dict[str, Mark]] = defaultdict(dict)
        for metric, leader in leaders.items():
            rivals = [name for which, name in tests if which == metric]
            tied = [name for name in rivals if not tests[metric, name] < LEVEL]
            if len(tied) == len(rivals):
                continue  # A mark that everyone has says nothing.
            marks[leader][metric] = "tied" if tied else "best"
            for name in tied:
                marks[name][metric] = "tied"
        return marks

    def _costs(self) -> dict[str, Cost]:
        recorded = {contender.name: _read_cost(contender.runs) for contender in self.comparison.contenders}
        baseline = self.comparison.baseline("vanilla")
        seconds, size = (recorded[baseline.name] if baseline else None) or ([math.nan], math.nan)
        unit = statistics.median(seconds)
        return {
            name: Cost(
                seconds=statistics.median(cost[0]),
                range=(min(cost[0]), max(cost[0])),
                time=statistics.median(cost[0]) / unit,
                bytes=cost[1],
                memory=cost[1] / size,
            )
            for name, cost in recorded.items()
            if cost is not None
        }


def _distinct(comparison: Comparison) -> list[str]:
    """The metrics that results have: the headline, its likes, the rest; none that repeats another in every run."""
    columns: dict[tuple[float | None, ...], str] = {}
    headline, kind = comparison.headline, comparison.headline.partition("_")[0]
    for metric in sorted(comparison.metrics, key=lambda name: (name != headline, not name.startswith(kind))):
        columns.setdefault(tuple(run.result.get(metric) for run in comparison.runs), metric)
    return list(columns.values())


def _correct(differences: Mapping[str, Difference]) -> dict[str, Contrast]:
    corrected = adjust([gap.p for gap in differences.values()])
    family = sum(not math.isnan(p) for p in corrected)
    return {name: Contrast(gap, p, family) for (name, gap), p in zip(differences.items(), corrected, strict=True)}


def _read_cost(runs: Sequence[Run]) -> tuple[list[float], float] | None:
    """Seconds a step of each run whose events tell, and the median of the bytes kept."""
    seconds, sizes = [], []
    for run in runs:
        if run.status != "finished":
            continue
        try:
            end = next(event for event in reversed(read_lines(run.path / "events.jsonl")) if event["event"] == "end")
            steps, sum_of_seconds, kept = end["steps"], end["seconds"], end["bytes"]
        except (StopIteration, KeyError, ValueError, OSError):
            continue
        if steps:
            seconds.append(sum_of_seconds / steps)
            sizes.append(sum(kept.values()))
    return (seconds, statistics.median(sizes)) if seconds else None


def _count_ends(runs: Sequence[Run]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.status] = counts.get(run.status, 0) + 1
    return counts


def _pair(value: Sequence[float] | None) -> tuple[float, float] | None:
    return None if value is None else (float(value[0]), float(value[1]))
