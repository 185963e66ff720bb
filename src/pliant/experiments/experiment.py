"""From a recipe to results: choose settings where there is a choice, then do the runs that count."""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pliant import data
from pliant._files import write_atomically
from pliant.experiments.recipe import Entry, Recipe
from pliant.experiments.run_config import Part, RunConfig, describe
from pliant.experiments.selection_summary import tell_choice
from pliant.experiments.store import Run, Status, load_run

RunAll = Callable[[Sequence[RunConfig]], dict[str, Status]]


def run_experiment(
    recipe: Recipe, root: Path, run_all: RunAll, tell: Callable[[str], None] = lambda line: None
) -> dict[str, Status]:
    """Do all runs of a recipe that are not done yet.

    Args:
        recipe: The experiment.
        root: Its folder.
        run_all: Does runs and says how they ended.
        tell: Gets a line for every choice of settings, as soon as it is made.

    Returns:
        How every run ended, by its name.
    """
    _check_apart(recipe, root)
    root.mkdir(parents=True, exist_ok=True)
    (root / "runs").mkdir(exist_ok=True)
    candidates = {entry.label: entry.variants() for entry in recipe.methods}
    contested = [entry for entry in recipe.methods if len(candidates[entry.label]) > 1]
    _write_recipe(recipe, root, keep_choice=bool(contested))
    statuses: dict[str, Status] = {}
    if recipe.selection.on == "validation":
        trials = [
            recipe.config(entry, parts, seed, "selection")
            for entry in contested
            for parts in candidates[entry.label]
            for seed in recipe.selection.drawn
        ]
        if trials:
            statuses |= run_all(trials)
            choice = choose(recipe, contested, trials, root, tell)
            candidates |= {label: [parts] for label, parts in choice.items()}
    # Seed by seed, so that what an interrupted experiment has done already compares all methods.
    results = [
        recipe.config(entry, parts, seed, "result")
        for seed in recipe.seeds
        for entry in recipe.methods
        for parts in candidates[entry.label]
    ]
    statuses |= run_all(results)
    if recipe.selection.on == "test" and contested:
        choose(recipe, contested, results, root, tell)
    return statuses


def _check_apart(recipe: Recipe, root: Path) -> None:
    """Raise a ValueError if an experiment would write into a folder of images, where it would become a class."""
    for entry in recipe.methods:
        name = recipe.config(entry, (), 0, "result").data.name
        if name not in data.names() and Path(name).is_dir() and root.resolve().is_relative_to(Path(name).resolve()):
            raise ValueError(f"the results' folder {str(root)!r} lies in the data {name!r}; choose another (--out)")


def _write_recipe(recipe: Recipe, root: Path, *, keep_choice: bool) -> None:
    """Write down what is asked for; a choice that another recipe had made there no longer counts."""
    path, content = root / "recipe.json", recipe.model_dump_json(indent=1).encode()
    if path.exists() and path.read_bytes() == content and keep_choice:
        return
    (root / "selection.json").unlink(missing_ok=True)
    write_atomically(path, content)


def choose(
    recipe: Recipe, entries: Sequence[Entry], trials: Sequence[RunConfig], root: Path, tell: Callable[[str], None]
) -> dict[str, tuple[Part, ...]]:
    """Pick the setting with the best mean for every entry, and write down why.

    Args:
        recipe: The experiment.
        entries: Those with a choice.
        trials: The runs that decide.
        root: The experiment's folder.
        tell: Gets a line for every entry.

    Returns:
        The settings by label, the first of those with equal means. One with a run that failed or diverged is only
        picked if all have one.

    Raises:
        ValueError: If the runs do not tell what decides.
    """
    headline = recipe.deciding
    runs = {trial.id: load_run(root / "runs" / trial.id) for trial in trials}
    for run in runs.values():
        if run and run.status == "finished" and headline not in run.result:
            raise ValueError(f"headline is {headline!r}, which {run.path} has not; allowed: {', '.join(run.result)}")
    scores = {name: run.result.get(headline, -math.inf) if run else -math.inf for name, run in runs.items()}
    choice: dict[str, tuple[Part, ...]] = {}
    report = {}
    for entry in entries:
        tried = [trial for trial in trials if trial.label == entry.label]
        table: dict[str, float] = {}
        best = -math.inf
        for parts in entry.variants():
            values = [scores[trial.id] for trial in tried if trial.methods == parts]
            mean = math.fsum(values) / len(values)
            table[describe(parts)] = mean
            if mean > best or entry.label not in choice:
                best, choice[entry.label] = mean, parts
        report[entry.label] = {
            "chosen": describe(choice[entry.label]),
            "scores": {key: value if math.isfinite(value) else None for key, value in table.items()},
            "seeds": len(tried) // len(table),
            "examples": _count_examples(runs[trial.id] for trial in tried) if "test" in headline else None,
        }
        tell(tell_choice(entry.label, report[entry.label], recipe.selection.on))
    content = {"on": recipe.selection.on, "headline": headline, "labels": report}
    write_atomically(root / "selection.json", json.dumps(content, indent=1).encode())
    return choice


def _count_examples(runs: Iterable[Run | None]) -> int | None:
    """Return how many examples runs were tested on, as the first that finished tells; None if it does not."""
    finished = next((run for run in runs if run and run.status == "finished"), None)
    with contextlib.suppress(ValueError, OSError):  # A damaged log decides nothing.
        for event in reversed(finished.events if finished else []):
            if "test_examples" in event:
                return int(event["test_examples"])
    return None
