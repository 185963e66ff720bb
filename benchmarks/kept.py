"""What the kept runs of an experiment say, in numbers: means over seeds, differences seed by seed.

The runs are in `results/reproduction/RECIPE.jsonl.gz`, packed by `pliant pack`.
"""

import math
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy import stats

from pliant import streams
from pliant.diagnostics import measures
from pliant.experiments.archive import unpack
from pliant.experiments.recipe import Recipe, load_recipe, recipe_folder
from pliant.experiments.store import Run, load_runs, load_selection

KEPT = Path(__file__).parent / "results" / "reproduction"
FEWEST = 3
"""Seeds below which nothing is said about a difference."""
NOTHING = "No run has ended yet."
EXACT, APPROXIMATIONS = "hessian_exact_rank", {"hessian_rank", "fisher_rank", "gauss_newton_rank"}
Record = dict[str, Any]
"""What is known after an epoch."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, half the width of its 95 % interval (NaN for a single value), and how many values."""

    mean: float
    half: float
    count: int

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.mean + self.half

    def show(self, digits: int = 4, factor: float = 1.0, sign: str = "") -> str:
        """Write it down, multiplied by a factor; `sign="+"` shows the sign of positive means too."""
        mean = f"{self.mean * factor:{sign}.{digits}f}"
        return mean if math.isnan(self.half) else f"{mean} ± {self.half * factor:.{digits}f}"


def estimate(values: Collection[float]) -> Estimate:
    """Estimate a mean by Student's t, which unlike a bootstrap is honest about three seeds.

    Example:
        >>> estimate([1.0, 2.0, 3.0]).show()
        '2.0000 ± 2.4841'
    """
    n = len(values)
    half = stats.t.ppf(0.975, n - 1) * stats.sem(list(values)) if n > 1 else math.nan
    return Estimate(fmean(values), float(half), n)


@dataclass(frozen=True)
class Kept:
    """The results of one experiment.

    Args:
        headline: The number that its tables show.
        published: The source's own numbers, by label.
        labels: The rows, in the order of the recipe.
        numbers: By label, seed and name: the numbers of every finished run, with the chosen settings.
        bad: By label: how many runs diverged.
    """

    headline: str
    published: dict[str, tuple[float, float]]
    labels: list[str]
    numbers: dict[str, dict[int, dict[str, float]]]
    bad: dict[str, int]

    def values(self, label: str, name: str) -> dict[int, float]:
        """The values of a number by seed."""
        return {seed: numbers[name] for seed, numbers in self.numbers.get(label, {}).items() if name in numbers}

    def difference(self, one: str, other: str, name: str) -> Estimate | None:
        """Estimate by how much one label is above another, on the seeds that both have."""
        first, second = self.values(one, name), self.values(other, name)
        shared = sorted(first.keys() & second.keys())
        return estimate([first[seed] - second[seed] for seed in shared]) if shared else None


def count_seeds(kept: Kept, label: str) -> str:
    """Count the runs behind a row, and those that diverged."""
    return f"{len(kept.numbers[label])}" + (f", {kept.bad[label]} diverged" if kept.bad[label] else "")


def find_recipe(name: str) -> Recipe:
    """Read the recipe of a kept experiment: `RECIPE`, or `RECIPE-quick` for its quick scale."""
    stem, quick, _ = name.partition("-quick")
    return load_recipe(recipe_folder() / f"{stem}.toml", scale="quick" if quick else "paper")


@contextmanager
def kept_runs(name: str) -> Iterator[tuple[list[Run], dict[str, Any]]]:
    """Unpack the kept runs of an experiment for a while, with the settings that were chosen, by label."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "experiment"
        unpack(KEPT / f"{name}.jsonl.gz", root)
        yield [run for run in load_runs(root) if run.config.purpose == "result"], load_selection(root).get("labels", {})


@cache
def load_kept(name: str) -> Kept | None:
    """Read the kept results of an experiment; None if there are none."""
    if not (KEPT / f"{name}.jsonl.gz").exists():
        return None
    with kept_runs(name) as (runs, selection):
        return summarise(name, find_recipe(name), runs, selection)


def summarise(name: str, recipe: Recipe, runs: list[Run], selection: dict[str, Any]) -> Kept:
    """Gather the numbers of an experiment's runs.

    Where a grid's settings were all run with the seeds of the results, `worst_setting` is the headline of the worst of
    them, and `setting_range` how far the best is above it.
    """
    headline = streams.stream_class(recipe.stream.name).headline
    labels = [entry.label for entry in recipe.methods]
    numbers: dict[str, dict[int, dict[str, float]]] = {label: {} for label in labels}
    bad = dict.fromkeys(labels, 0)
    scores: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        label, settings = run.config.variant
        if run.status == "finished":
            scores.setdefault((label, run.config.seed), []).append(run.result[headline])
        if label in selection and selection[label]["chosen"] != settings:
            continue
        if run.status == "finished":
            numbers[label][run.config.seed] = run.result | dict(more_numbers(run))
        else:
            bad[label] += 1
    for entry in recipe.methods:
        for seed, found in numbers[entry.label].items():
            every = scores[entry.label, seed]
            if len(every) == len(entry.variants()) > 1:
                found |= {"worst_setting": min(every), "setting_range": max(every) - min(every)}
    return Kept(headline, {} if "-quick" in name else recipe.published, labels, numbers, bad)


def more_numbers(run: Run) -> Iterator[tuple[str, float]]:
    """Yield numbers that a run's records tell beyond its result.

    - `best_test_accuracy` is that of the last task, and `best_gain` how far it is above the best of the first.
    - `mean_drop` is the test accuracy that is lost when a task begins, before any step on it; `mean_dip` what is lost
      up to the worst moment of the task. Both are means over all tasks but the first.
    - `train_error_growth` is the training error at the ends of the last fifth of the tasks minus that of the first
      fifth; `late_train_error` is the former.
    - `MEASURE_change` is the same of a measure, divided by its value in the first fifth; there is none if that is
      zero and the other is not. `MEASURE_mean` is over all tasks. A measure counts as it is at a task's first step;
      that of an optimizer's step as its mean over the measured steps of the task but the first, which is like no other.
    - `MEASURE_last` is its last value, in runs of a single task.
    - `MEASURE_first_gap` and `MEASURE_late_gap` of an approximation of the Hessian's rank are its mean distance from
      that rank in the first and the last fifth of the tasks, `MEASURE_gap_growth` their difference, and
      `MEASURE_correlation` is Pearson's, over tasks.
    """
    tasks = split_tasks(run)
    yield from test_numbers(tasks)
    if len(tasks) > 1:
        first, late = ends_of([1 - records[-1]["train_accuracy"] for records in tasks])
        yield "late_train_error", late
        yield "train_error_growth", late - first
    series = {name: values for name in run.config.measures if (values := take_measure(name, tasks))}
    for name, values in series.items():
        if len(tasks) == 1:
            yield f"{name}_last", values[-1]
        else:
            first, late = ends_of(values)
            yield f"{name}_mean", fmean(values)
            if first or not late:
                yield f"{name}_change", (late - first) / abs(first) if first else 0.0
    for name in series.keys() & APPROXIMATIONS if EXACT in series else ():
        first, late = ends_of([abs(one - other) for one, other in zip(series[name], series[EXACT], strict=True)])
        yield f"{name}_first_gap", first
        yield f"{name}_late_gap", late
        yield f"{name}_gap_growth", late - first
        yield f"{name}_correlation", float(stats.pearsonr(series[name], series[EXACT]).statistic)


def split_tasks(run: Run) -> list[list[Record]]:
    """Return a run's records, task by task."""
    by_task: dict[int, list[Record]] = {}
    for record in run.records:
        by_task.setdefault(record["task"], []).append(record)
    return [by_task[index] for index in sorted(by_task)]


def test_numbers(tasks: list[list[Record]]) -> Iterator[tuple[str, float]]:
    """Yield what becomes of the test accuracy, in streams that have a test."""
    tested = [[record["test_accuracy"] for record in records if "test_accuracy" in record] for records in tasks]
    if not tested[-1]:
        return
    yield "best_test_accuracy", max(tested[-1])
    if len(tasks) > 1:
        yield "best_gain", max(tested[-1]) - max(tested[0])
        before = [values[-1] for values in tested[:-1]]
        entries = [records[0]["entry_test_accuracy"] for records in tasks[1:]]
        lowest = [min(entry, *values) for entry, values in zip(entries, tested[1:], strict=True)]
        yield "mean_drop", fmean(before) - fmean(entries)
        yield "mean_dip", fmean(before) - fmean(lowest)


def take_measure(name: str, tasks: list[list[Record]]) -> list[float]:
    """Return a measure's value in each task, or all values of a single task; [] if one was not a number."""
    taken = [[record["measures"].get(name) for record in records if "measures" in record] for records in tasks]
    if any(value is None for values in taken for value in values):
        return []
    if len(tasks) == 1:
        return taken[0]
    stepwise = "step" in measures.info(name).needs
    return [fmean(values[1:] or values) if stepwise else values[0] for values in taken]


def ends_of(values: list[float]) -> tuple[float, float]:
    """Return the mean over the first fifth of some values, and over the last.

    Example:
        >>> ends_of([1.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0, 7.0])
        (2.0, 6.0)
    """
    part = max(1, len(values) // 5)
    return fmean(values[:part]), fmean(values[-part:])
