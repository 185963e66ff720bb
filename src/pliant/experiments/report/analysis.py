"""What a comparison came to: intervals, differences, costs and who is best, as far as that can be told."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pliant.experiments.report.comparison import Comparison, Contender
from pliant.experiments.report.formatting import direction
from pliant.experiments.report.statistics import (
    LEVEL,
    Difference,
    Interval,
    adjust,
    compare,
    difference,
    interval,
    mean_difference,
)
from pliant.experiments.store import Run

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
        """Whether the two can be told apart; that does not say which of them is better."""
        return self.p < LEVEL

    @property
    def reversed(self) -> "Contrast":
        """The same test of the second against the first."""
        return Contrast(self.difference.reversed, self.p, self.family)


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
    """A comparison, analyzed.

    Args:
        comparison: What to analyze.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.headline = comparison.headline
        self.metrics = _distinct(comparison)

    @cached_property
    def candidates(self) -> list[Contender]:
        """Who may be called best: whatever is no mere reference, has a finished seed and none that diverged.

        The best mean comes first, over the seeds that all of them have: a mean over other seeds may be higher
        for no other reason than the seeds.
        """
        able = [
            contender
            for contender in self.comparison.contenders
            if contender.role != "fresh" and not contender.diverged and contender.values(self.headline)
        ]
        return _sorted(able, self.headline, _shared_seeds(able, self.headline))

    @cached_property
    def shared_seeds(self) -> set[int]:
        """The seeds that all candidates have, on which they are ranked; if there are none, each is by its own."""
        return _shared_seeds(self.candidates, self.headline)

    @property
    def uneven(self) -> bool:
        """Whether candidates have other seeds than those that all share."""
        return any(candidate.values(self.headline).keys() != self.shared_seeds for candidate in self.candidates)

    @property
    def best(self) -> Contender | None:
        """The candidate with the best mean; that says nothing about how sure it is."""
        return self.candidates[0] if self.candidates else None

    def score(self, candidate: Contender) -> float:
        """The mean by which a candidate is ranked."""
        return _mean(candidate, self.headline, self.shared_seeds)

    @cached_property
    def rivals(self) -> dict[str, Contrast]:
        """The best candidate against every other, by name, the closest first."""
        if not self.candidates:
            return {}
        first, *others = self.candidates
        return {other.name: self._contrasts[first.name, other.name] for other in others}

    def wins(self, contrast: Contrast) -> bool:
        """Whether the first of the two is better, and can be told from the second."""
        return contrast.distinguishable and direction(self.headline) * contrast.difference.interval.mean > 0

    @cached_property
    def rows(self) -> list[Row]:
        """A row for every contender, best mean first."""
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
                against_vanilla=self._against(contender, "vanilla"),
                against_fresh=self._against(contender, "fresh"),
                published=_pair(published.get(contender.label)),
                cost=costs.get(contender.name),
                counts=dict(Counter(run.status for run in contender.runs)),
            )
            for contender in _sorted(self.comparison.contenders, self.headline, set())
        ]

    def row(self, contender: Contender) -> Row:
        """The row of a contender."""
        return next(row for row in self.rows if row.contender is contender)

    @cached_property
    def _contrasts(self) -> dict[tuple[str, str], Contrast]:
        """Every test of the headline, by the two names, in both directions.

        All against vanilla are a family, all against fresh another, the best against every other a third. A pair
        is tested in the first of them that has it, so that it has one p-value wherever it is told.
        """
        tests: dict[tuple[str, str], Contrast] = {}
        known = [contender for contender in self.comparison.contenders if contender.values(self.headline)]
        for reference, others in (
            (self.comparison.baseline("vanilla"), known),
            (self.comparison.baseline("fresh"), known),
            (self.best, self.candidates),
        ):
            if reference not in known:
                continue
            values = reference.values(self.headline)
            family = {
                (other.name, reference.name): difference(other.values(self.headline), values)
                for other in others
                if other is not reference and (other.name, reference.name) not in tests
            }
            for (name, of), contrast in _correct(family).items():
                tests[name, of], tests[of, name] = contrast, contrast.reversed
        return tests

    def _against(self, contender: Contender, role: Literal["vanilla", "fresh"]) -> Contrast | None:
        baseline = self.comparison.baseline(role)
        return self._contrasts.get((contender.name, baseline.name)) if baseline else None

    def _marks(self) -> dict[str, dict[str, Mark]]:
        """Mark the best of each metric if it can be told from all others, else it and those it cannot be told from."""
        told = {(self.headline, name): self.wins(contrast) for name, contrast in self.rivals.items()}
        leaders = {self.headline: self.candidates[0].name} if self.rivals else {}
        pairs: dict[tuple[str, str], tuple[dict[int, float], dict[int, float]]] = {}
        for metric in self.metrics:
            known = [candidate for candidate in self.candidates if candidate.values(metric)]
            able = _sorted(known, metric, _shared_seeds(known, metric))
            if metric != self.headline and len(able) > 1:
                leaders[metric] = able[0].name
                first = able[0].values(metric)
                pairs |= {(metric, rival.name): (first, rival.values(metric)) for rival in able[1:]}
        # The headline decides and has families of its own; all other metrics together are another.
        for (key, pair), p in zip(pairs.items(), adjust([compare(*pair) for pair in pairs.values()]), strict=True):
            told[key] = p < LEVEL and direction(key[0]) * mean_difference(*pair) > 0
        marks: dict[str, dict[str, Mark]] = defaultdict(dict)
        for metric, leader in leaders.items():
            rivals = [name for which, name in told if which == metric]
            tied = [name for name in rivals if not told[metric, name]]
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


def _shared_seeds(contenders: Sequence[Contender], metric: str) -> set[int]:
    seeds = [contender.values(metric).keys() for contender in contenders]
    return set.intersection(*map(set, seeds)) if seeds else set()


def _mean(contender: Contender, metric: str, seeds: set[int]) -> float:
    """The mean over these seeds, or over all if there are none; NaN without a value."""
    values = [value for seed, value in contender.values(metric).items() if seed in seeds or not seeds]
    return statistics.fmean(values) if values else math.nan


def _sorted(contenders: Sequence[Contender], metric: str, seeds: set[int]) -> list[Contender]:
    """Put the best mean first, and last who has none."""

    def rank(contender: Contender) -> float:
        mean = _mean(contender, metric, seeds)
        return math.inf if math.isnan(mean) else -direction(metric) * mean

    return sorted(contenders, key=rank)


def _correct(differences: Mapping[tuple[str, str], Difference]) -> dict[tuple[str, str], Contrast]:
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
            end = next(event for event in reversed(run.events) if event["event"] == "end")
            steps, sum_of_seconds, kept = end["steps"], end["seconds"], end["bytes"]
        except (StopIteration, KeyError, ValueError, OSError):
            continue
        if steps:
            seconds.append(sum_of_seconds / steps)
            sizes.append(sum(kept.values()))
    return (seconds, statistics.median(sizes)) if seconds else None


def _pair(value: Sequence[float] | None) -> tuple[float, float] | None:
    return None if value is None else (float(value[0]), float(value[1]))
