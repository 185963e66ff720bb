"""Numbers of the kept runs of an experiment: means over seeds, and differences paired by seed.

The runs are in `results/reproduction/RECIPE.jsonl.gz`, packed by `pliant pack`.
"""

import atexit
import json
import math
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy import stats

from benchmarks.reproduction.numbers import more_numbers
from pliant.experiments.archive import unpack
from pliant.experiments.recipe import Recipe
from pliant.experiments.recipe_files import load_recipe, recipe_folder
from pliant.experiments.run_config import describe
from pliant.experiments.store import Run, load_runs, load_selection

KEPT = Path(__file__).parents[1] / "results" / "reproduction"
FEWEST = 3
"""The fewest seeds for a verdict."""
PRIMING = "ours_rl_priming"
NOTHING = "No run has ended yet."


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, half the width of its 95 % interval (NaN for a single value), and the number of values."""

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
        """Write mean and interval, multiplied by a factor; `sign="+"` writes the sign of positive means."""
        mean = f"{self.mean * factor:{sign}.{digits}f}"
        return mean if math.isnan(self.half) else f"{mean} ± {self.half * factor:.{digits}f}"


def estimate(values: Collection[float]) -> Estimate:
    """Estimate a mean with Student's t interval, which is wide enough for three seeds, unlike a bootstrap.

    Example:
        >>> estimate([1.0, 2.0, 3.0]).show()
        '2.0000 ± 2.4841'
    """
    n = len(values)
    half = stats.t.ppf(0.975, n - 1) * stats.sem(list(values)) if n > 1 else math.nan
    return Estimate(fmean(values), float(half), n)


def difference(one: dict[int, float], other: dict[int, float]) -> Estimate | None:
    """Estimate the difference of two numbers on their shared seeds."""
    shared = sorted(one.keys() & other.keys())
    return estimate([one[seed] - other[seed] for seed in shared]) if shared else None


@dataclass(frozen=True)
class Kept:
    """The results of one experiment.

    Args:
        headline: The metric of its tables.
        published: The source's numbers, by label.
        labels: The rows, in the order of the recipe.
        numbers: The numbers of every finished run with the chosen settings, by label, seed and name; also the headlines
            of all settings of a grid.
        bad: The number of diverged runs by label, for each setting of its grid.
        chosen: The index of the chosen setting in the grid by label, if it is chosen.
    """

    headline: str
    published: dict[str, tuple[float, float]]
    labels: list[str]
    numbers: dict[str, dict[int, dict[str, float]]]
    bad: dict[str, list[int]]
    chosen: dict[str, int]

    @property
    def is_of_agents(self) -> bool:
        """Whether agents were trained: the headline is a return."""
        return self.headline.endswith("return")

    def values(self, label: str, name: str) -> dict[int, float]:
        """Return the values of a number by seed."""
        return {seed: numbers[name] for seed, numbers in self.numbers.get(label, {}).items() if name in numbers}

    def spread(self, labels: Sequence[str], name: str) -> dict[int, float]:
        """Return a number of the best of some labels minus that of the worst, by seed; the means over seeds decide.

        Example:
            >>> numbers = {"a": {0: {"x": 1.0}, 1: {"x": 3.0}}, "b": {0: {"x": 0.0}, 1: {"x": 5.0}}, "c": {}}
            >>> kept = Kept("x", {}, list(numbers), numbers, {}, {})
            >>> kept.spread(["a", "b"], "x"), kept.spread(["a", "c"], "x")
            ({0: -1.0, 1: 2.0}, {})
        """
        columns = [self.values(label, name) for label in labels]
        seeds = sorted(set.intersection(*(set(column) for column in columns)))
        if not seeds:
            return {}
        ordered = sorted(columns, key=lambda column: fmean(column[seed] for seed in seeds))
        return {seed: ordered[-1][seed] - ordered[0][seed] for seed in seeds}

    def diverged(self, label: str, name: str) -> int:
        """Return how many of the runs behind a number diverged."""
        bad = self.bad[label]
        if name in ("worst_setting", "setting_range"):
            return sum(bad)
        if name.startswith("setting_"):
            return bad[int(name.removeprefix("setting_")) - 1]
        return bad[self.chosen[label]] if label in self.chosen else 0

    def difference(self, one: str, other: str, name: str) -> Estimate | None:
        """Estimate the difference of two labels on their shared seeds."""
        return difference(self.values(one, name), self.values(other, name))


def count_seeds(kept: Kept, label: str) -> str:
    """Write the number of seeds of a row, and how many diverged."""
    bad = kept.diverged(label, kept.headline)
    return f"{len(kept.values(label, kept.headline))}" + (f", {bad} diverged" if bad else "")


def find_recipe(name: str) -> Recipe:
    """Read the recipe of a kept experiment: `RECIPE`, or `RECIPE-quick` for its quick scale."""
    stem, quick, _ = name.partition("-quick")
    return load_recipe(recipe_folder() / f"{stem}.toml", scale="quick" if quick else "paper")


@cache
def unpack_runs(file: Path) -> Path:
    """Unpack an archive, once a process: the folder is deleted when the process ends."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    root = Path(folder.name) / "experiment"
    unpack(file, root)
    return root


def kept_runs(name: str) -> tuple[list[Run], dict[str, Any]]:
    """Return the kept runs of an experiment, with the chosen settings by label; nothing if there are none."""
    file = KEPT / f"{name}.jsonl.gz"
    if not file.exists():
        return [], {}
    root = unpack_runs(file)
    return [run for run in load_runs(root) if run.config.purpose == "result"], load_selection(root).get("labels", {})


def unfinished_runs(name: str) -> list[Run]:
    """Return the runs that a recipe asks for and that ended, of an experiment that is not complete."""
    file = KEPT.parent / "unfinished" / f"{name}.jsonl.gz"
    if not file.exists():
        return []
    recipe = find_recipe(name)
    return [run for run in load_runs(unpack_runs(file)) if asks_for(recipe, run)]


@cache
def load_kept(name: str) -> Kept | None:
    """Read the kept results of an experiment; None if there are none."""
    if not (KEPT / f"{name}.jsonl.gz").exists():
        return load_priming() if name == PRIMING else None
    runs, selection = kept_runs(name)
    return summarize(name, find_recipe(name), runs, selection)


def load_priming() -> Kept:
    """Read the kept runs of `benchmarks.rl.priming`, whose agents have the settings of the recipe `PRIMING`.

    They stand for the recipe until its own runs are kept. The headline is the mean return of the training episodes in
    the last fifth of the steps; the recipe's own runs have greedy evaluations instead.
    """
    labels = {"primed": "vanilla", "full_reset": "full reset", "fire": "FIRE", "unprimed": "unprimed"}
    numbers: dict[str, dict[int, dict[str, float]]] = {label: {} for label in labels.values()}
    for line in (KEPT.parent / "priming.jsonl").read_text().splitlines():
        run = json.loads(line)
        numbers[labels[run["condition"]]][run["seed"]] = {"late_train_return": run["late_return"]}
    none_bad = {label: [0] for label in numbers}
    return Kept("late_train_return", {}, list(numbers), numbers, none_bad, dict.fromkeys(numbers, 0))


def summarize(name: str, recipe: Recipe, runs: list[Run], selection: dict[str, Any]) -> Kept:
    """Collect the numbers of the runs that a recipe asks for.

    A grid is represented by its chosen setting. `setting_1` … are the headlines of all its settings, in the order of
    the grid. `worst_setting` is the headline of the worst setting, and `setting_range` the best minus the worst; the
    means over seeds with all settings decide which they are. Settings with a diverged run have none of these.
    """
    headline = recipe.deciding
    entries = {entry.label: entry for entry in recipe.methods}
    grids = {label: [describe(parts) for parts in entry.variants()] for label, entry in entries.items()}
    picked = {
        label: grid[0] if len(grid) == 1 else selection.get(label, {}).get("chosen") for label, grid in grids.items()
    }
    chosen = {label: grids[label].index(one) for label, one in picked.items() if one in grids[label]}
    numbers: dict[str, dict[int, dict[str, float]]] = {label: {} for label in entries}
    bad = {label: [0] * len(grid) for label, grid in grids.items()}
    scores: dict[str, dict[int, dict[int, float]]] = {label: {} for label in entries}
    for run in runs:
        if not asks_for(recipe, run):
            continue
        label, settings = run.config.variant
        place = grids[label].index(settings)
        if run.status != "finished":
            bad[label][place] += 1
            continue
        scores[label].setdefault(run.config.seed, {})[place] = run.result[headline]
        if place == chosen.get(label):
            numbers[label][run.config.seed] = run.result | dict(more_numbers(run))
    for label, grid in grids.items():
        if len(grid) > 1:
            for seed, told in compare_settings(scores[label], bad[label]).items():
                numbers[label].setdefault(seed, {}).update(told)
    return Kept(headline, {} if "-quick" in name else recipe.published, list(entries), numbers, bad, chosen)


def compare_settings(scores: dict[int, dict[int, float]], bad: list[int]) -> dict[int, dict[str, float]]:
    """Return `setting_1` …, `worst_setting` and `setting_range` of a grid, by seed.

    Args:
        scores: By seed and place in the grid.
        bad: The number of diverged runs at each place.

    Example:
        >>> compare_settings({0: {0: 0.5, 1: 0.75}, 1: {0: 0.75, 1: 0.625}}, [0, 0])[1]
        {'setting_1': 0.75, 'setting_2': 0.625, 'worst_setting': 0.75, 'setting_range': -0.125}
    """
    told = {
        seed: {f"setting_{place + 1}": score for place, score in sorted(found.items()) if not bad[place]}
        for seed, found in scores.items()
    }
    complete = [found for found in scores.values() if len(found) == len(bad)]
    if any(bad) or not complete:
        return told
    means = [fmean(found[place] for found in complete) for place in range(len(bad))]
    worst, best = means.index(min(means)), means.index(max(means))
    for seed, found in scores.items():
        if len(found) == len(bad):
            told[seed] |= {"worst_setting": found[worst], "setting_range": found[best] - found[worst]}
    return told


def asks_for(recipe: Recipe, run: Run) -> bool:
    """Return whether a recipe asks for a run; its measures may differ, as they do not affect training."""
    for entry in recipe.methods:
        if entry.label == run.config.label and run.config.methods in entry.variants():
            asked = recipe.config(entry, run.config.methods, run.config.seed, "result")
            return replace(asked, measures=run.config.measures) == run.config
    return False
