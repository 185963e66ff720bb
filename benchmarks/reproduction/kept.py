"""What the kept runs of an experiment say, in numbers: means over seeds, differences seed by seed.

The runs are in `results/reproduction/RECIPE.jsonl.gz`, packed by `pliant pack`.
"""

import math
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy import stats

from benchmarks.reproduction.numbers import more_numbers
from pliant.experiments.archive import unpack
from pliant.experiments.config import describe
from pliant.experiments.recipe import Recipe
from pliant.experiments.recipe_files import load_recipe, recipe_folder
from pliant.experiments.store import Run, load_runs, load_selection

KEPT = Path(__file__).parents[1] / "results" / "reproduction"
FEWEST = 3
"""Seeds below which nothing is said about a difference."""
NOTHING = "No run has ended yet."


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


def difference(one: dict[int, float], other: dict[int, float]) -> Estimate | None:
    """Estimate by how much one number is above another, on the seeds that both have."""
    shared = sorted(one.keys() & other.keys())
    return estimate([one[seed] - other[seed] for seed in shared]) if shared else None


@dataclass(frozen=True)
class Kept:
    """The results of one experiment.

    Args:
        headline: The number that its tables show.
        published: The source's own numbers, by label.
        labels: The rows, in the order of the recipe.
        numbers: By label, seed and name: the numbers of every finished run, with the chosen settings; the headlines of
            all settings of a grid.
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
        return difference(self.values(one, name), self.values(other, name))


def count_seeds(kept: Kept, label: str) -> str:
    """Count the runs behind a row, and those that diverged."""
    return f"{len(kept.values(label, kept.headline))}" + (f", {kept.bad[label]} diverged" if kept.bad[label] else "")


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
    """Gather the numbers of the runs that a recipe asks for.

    A grid counts with the setting that was chosen, once it is. `setting_1` … are the headlines of all its settings of
    which no run diverged, in the order of the grid. Where all of them were run and none diverged, `worst_setting` is
    the worst of them and `setting_range` how far the best is above it.
    """
    headline = recipe.deciding
    entries = {entry.label: entry for entry in recipe.methods}
    numbers: dict[str, dict[int, dict[str, float]]] = {label: {} for label in entries}
    bad = dict.fromkeys(entries, 0)
    scores: dict[tuple[str, int], dict[str, float]] = {}
    diverged: set[tuple[str, str]] = set()
    for run in runs:
        label, settings = run.config.variant
        if not asks_for(recipe, run):
            continue
        if run.status == "finished":
            scores.setdefault((label, run.config.seed), {})[settings] = run.result[headline]
        else:
            diverged.add((label, settings))
        if len(entries[label].variants()) > 1 and selection.get(label, {}).get("chosen") != settings:
            continue
        if run.status == "finished":
            numbers[label][run.config.seed] = run.result | dict(more_numbers(run))
        else:
            bad[label] += 1
    for (label, seed), run_with in scores.items():
        grid = [describe(parts) for parts in entries[label].variants()]
        if len(grid) > 1:
            told = {place: run_with[one] for place, one in enumerate(grid, 1) if one in run_with}
            found = numbers[label].setdefault(seed, {})
            found |= {f"setting_{at}": score for at, score in told.items() if (label, grid[at - 1]) not in diverged}
            if len(told) == len(grid) and not any((label, one) in diverged for one in grid):
                worst, best = min(told.values()), max(told.values())
                found |= {"worst_setting": worst, "setting_range": best - worst}
    return Kept(headline, {} if "-quick" in name else recipe.published, list(entries), numbers, bad)


def asks_for(recipe: Recipe, run: Run) -> bool:
    """Whether a recipe asks for a run, whatever is measured on its way, which changes nothing of it.

    Runs of an earlier form of the recipe do not count.
    """
    for entry in recipe.methods:
        if entry.label == run.config.label and run.config.methods in entry.variants():
            asked = recipe.config(entry, run.config.methods, run.config.seed, "result")
            return replace(asked, measures=run.config.measures) == run.config
    return False
