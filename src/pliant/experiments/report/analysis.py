"""The statistics of a comparison: intervals, differences, costs, and the best contender."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pliant.experiments.report.comparison import Comparison, Contender
from pliant.experiments.report.formatting import limits
from pliant.experiments.report.histories import at_task_ends, read_history
from pliant.experiments.report.statistics import (
    LEVEL,
    Difference,
    Interval,
    adjust,
    difference,
    interval,
    matching_level,
)
from pliant.experiments.store import Run
from pliant.training import direction

Mark = Literal["best", "tied", ""]


@dataclass(frozen=True)
class Contrast:
    """A difference between two contenders, as one of a family of tests.

    Args:
        difference: The difference.
        p: Its p-value, corrected for the family.
        family: The number of tests in the family.
    """

    difference: Difference
    p: float
    family: int

    @property
    def interval(self) -> Interval:
        """The interval of the difference; it excludes zero exactly if the difference is significant."""
        return self.difference.interval(matching_level(self.difference.p, self.p, self.family))

    @property
    def significant(self) -> bool:
        """Whether the two differ significantly, in either direction."""
        return self.p < LEVEL

    @property
    def reversed(self) -> "Contrast":
        """The same test with the two contenders exchanged."""
        return Contrast(self.difference.reversed, self.p, self.family)


@dataclass(frozen=True)
class Cost:
    """Time and memory of a contender's runs.

    Args:
        seconds: Median seconds per training step; not comparable between runs that shared a machine differently.
        bytes: Memory that weights, optimizer and methods occupy between steps.
        memory: Bytes relative to plain training; NaN if unknown.
    """

    seconds: float
    bytes: float
    memory: float


@dataclass(frozen=True)
class Trend:
    """How a metric changed over tasks of equal difficulty.

    Args:
        first: The mean over seeds at the end of the first task.
        last: The mean over seeds at the end of the last task.
        declining: Whether the last is significantly worse, by a test paired by seed.
    """

    first: float
    last: float
    declining: bool


@dataclass(frozen=True)
class Row:
    """The results of a contender.

    Args:
        contender: The contender.
        numbers: Every metric, over the finished seeds.
        marks: The metrics where it is the best or does not differ significantly from the best.
        against_vanilla: Its headline minus plain training's, paired by seed; None if either is missing.
        against_fresh: Its headline minus the headline of training from scratch.
        published: The source's mean and spread; None if unknown.
        cost: Time and memory; None if not recorded.
        counts: The number of runs by status.
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
        comparison: The comparison to analyze.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.headline = comparison.headline
        self.metrics = _distinct(comparison)

    @cached_property
    def candidates(self) -> list[Contender]:
        """The contenders that may be best, ranked: with a finished seed, none diverged, not training from scratch.

        They are ranked by their mean over the seeds that all of them have, since seeds differ in difficulty.
        """
        able = [
            contender
            for contender in self.comparison.contenders
            if contender.role != "fresh" and not contender.diverged and contender.values(self.headline)
        ]
        return _sorted(able, self.headline, _shared_seeds(able, self.headline))

    @cached_property
    def shared_seeds(self) -> set[int]:
        """The seeds that all candidates have and are ranked on. If there are none, each is ranked on its own seeds."""
        return _shared_seeds(self.candidates, self.headline)

    @property
    def uneven(self) -> bool:
        """Whether some candidate has more seeds than the shared ones."""
        return any(candidate.values(self.headline).keys() != self.shared_seeds for candidate in self.candidates)

    @property
    def best(self) -> Contender | None:
        """The candidate with the best mean, significant or not."""
        return self.candidates[0] if self.candidates else None

    def score(self, candidate: Contender) -> float:
        """Return the mean by which a candidate is ranked."""
        return _mean(candidate, self.headline, self.shared_seeds)

    @cached_property
    def rivals(self) -> dict[str, Contrast]:
        """The best candidate against every other candidate, by name, the closest first."""
        if not self.candidates:
            return {}
        first, *others = self.candidates
        return {other.name: self._contrasts[first.name, other.name] for other in others}

    def wins(self, contrast: Contrast) -> bool:
        """Return whether the first of the two is significantly better."""
        return contrast.significant and direction(self.headline) * contrast.difference.mean > 0

    @property
    def last_task(self) -> str | None:
        """The metric of the last task, if the headline is a mean over tasks."""
        name = f"final_{self.comparison.metric}"
        return name if name != self.headline and name in self.metrics else None

    def trend(self, contender: Contender) -> Trend | None:
        """Compare a contender's last task with its first; None if the tasks differ in difficulty or in no record."""
        if self.last_task is None or not self.comparison.tasks_alike:
            return None
        try:
            histories = [read_history(run) for run in contender.runs if run.status == "finished"]
        except (ValueError, KeyError, TypeError, OSError):
            return None  # The page lists the file as unreadable.
        ends = at_task_ends(histories, self.comparison.metric)
        known = [(each.seed, row) for each, row in zip(histories, ends.tolist(), strict=True) if row]
        firsts, lasts = ({seed: row[place] for seed, row in known} for place in (0, -1))
        if not known or not all(map(math.isfinite, (*firsts.values(), *lasts.values()))):
            return None
        gap = difference(lasts, firsts)
        worse = gap.p < LEVEL and direction(self.headline) * gap.mean < 0
        return Trend(statistics.fmean(firsts.values()), statistics.fmean(lasts.values()), worse)

    @cached_property
    def rows(self) -> list[Row]:
        """The results of every contender, best mean first."""
        marks = self._marks()
        costs = self._costs()
        published = (self.comparison.recipe or {}).get("published", {})
        return [
            Row(
                contender=contender,
                numbers={
                    metric: interval(list(values.values()), limits(metric))
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
        """Return the results of a contender."""
        return next(row for row in self.rows if row.contender is contender)

    @cached_property
    def _contrasts(self) -> dict[tuple[str, str], Contrast]:
        """All tests of the headline, by the two names, in both directions.

        There are three families: all against plain training, all against training from scratch, and the best against
        every other. A pair is tested only in the first family that has it, so it has one p-value everywhere.
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
        """Mark the best of each metric, or mark as tied the best and all that do not differ significantly from it."""
        wins = {(self.headline, name): self.wins(contrast) for name, contrast in self.rivals.items()}
        leaders = {self.headline: self.candidates[0].name} if self.rivals else {}
        gaps: dict[tuple[str, str], Difference] = {}
        for metric in self.metrics:
            known = [candidate for candidate in self.candidates if candidate.values(metric)]
            able = _sorted(known, metric, _shared_seeds(known, metric))
            if metric != self.headline and len(able) > 1 and direction(metric):
                leaders[metric] = able[0].name
                first = able[0].values(metric)
                gaps |= {(metric, rival.name): difference(first, rival.values(metric)) for rival in able[1:]}
        # The headline has families of its own. All other metrics together form one family.
        for (key, gap), p in zip(gaps.items(), adjust([gap.p for gap in gaps.values()]), strict=True):
            wins[key] = p < LEVEL and direction(key[0]) * gap.mean > 0
        marks: dict[str, dict[str, Mark]] = defaultdict(dict)
        for metric, leader in leaders.items():
            rivals = [name for which, name in wins if which == metric]
            tied = [name for name in rivals if not wins[metric, name]]
            if len(tied) == len(rivals):
                continue  # All are tied.
            marks[leader][metric] = "tied" if tied else "best"
            for name in tied:
                marks[name][metric] = "tied"
        return marks

    def _costs(self) -> dict[str, Cost]:
        recorded = {contender.name: _read_cost(contender.runs) for contender in self.comparison.contenders}
        baseline = self.comparison.baseline("vanilla")
        _, size = (recorded[baseline.name] if baseline else None) or ([], math.nan)
        return {
            name: Cost(
                seconds=statistics.median(cost[0]),
                bytes=cost[1],
                memory=cost[1] / size,
            )
            for name, cost in recorded.items()
            if cost is not None
        }


def _distinct(comparison: Comparison) -> list[str]:
    """Return the metrics: the headline, its last task, metrics of its kind, the rest. Equal metrics appear once.

    Where a loss decides, losses come before accuracies.
    """
    columns: dict[tuple[float | None, ...], str] = {}
    headline, kind = comparison.headline, comparison.headline.partition("_")[0]
    last = f"final_{comparison.metric}"
    # Where accuracy decides, losses stay in the files: they would only repeat it.
    shown = [m for m in comparison.metrics if headline.endswith("loss") or not m.endswith("_loss")]
    decided_by = headline.rpartition("_")[2]
    for metric in sorted(
        shown, key=lambda m: (m != headline, m != last, not m.startswith(kind), not m.endswith(decided_by))
    ):
        columns.setdefault(tuple(run.result.get(metric) for run in comparison.runs), metric)
    return list(columns.values())


def _shared_seeds(contenders: Sequence[Contender], metric: str) -> set[int]:
    seeds = [contender.values(metric).keys() for contender in contenders]
    return set.intersection(*map(set, seeds)) if seeds else set()


def _mean(contender: Contender, metric: str, seeds: set[int]) -> float:
    """Return the mean over these seeds, or over all if the set is empty; NaN without a value."""
    values = [value for seed, value in contender.values(metric).items() if seed in seeds or not seeds]
    return statistics.fmean(values) if values else math.nan


def _sorted(contenders: Sequence[Contender], metric: str, seeds: set[int]) -> list[Contender]:
    """Sort by mean, best first; contenders without a mean come last."""

    def rank(contender: Contender) -> float:
        mean = _mean(contender, metric, seeds)
        return math.inf if math.isnan(mean) else -direction(metric) * mean

    return sorted(contenders, key=rank)


def _correct(differences: Mapping[tuple[str, str], Difference]) -> dict[tuple[str, str], Contrast]:
    corrected = adjust([gap.p for gap in differences.values()])
    family = sum(not math.isnan(p) for p in corrected)
    return {name: Contrast(gap, p, family) for (name, gap), p in zip(differences.items(), corrected, strict=True)}


def _read_cost(runs: Sequence[Run]) -> tuple[list[float], float] | None:
    """Return the seconds per step of each finished run, and the median memory."""
    seconds, sizes = [], []
    for run in runs:
        if run.status != "finished":
            continue
        try:
            end = next(event for event in reversed(run.events) if event["event"] == "end")
            if end["steps"]:
                per_step, size = float(end["seconds"] / end["steps"]), int(sum(end["bytes"].values()))
                seconds.append(per_step)
                sizes.append(size)
        except (StopIteration, KeyError, ValueError, TypeError, AttributeError, OSError):
            continue  # A log may hold anything; without one, only the cost is unknown.
    return (seconds, statistics.median(sizes)) if seconds else None


def _pair(value: Sequence[float] | None) -> tuple[float, float] | None:
    return None if value is None else (float(value[0]), float(value[1]))
