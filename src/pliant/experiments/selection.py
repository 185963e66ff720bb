"""Choose the values of grids: the best mean over seeds, and how that choice is put into words."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pliant._files import write_atomically
from pliant._json import seal
from pliant.experiments.recipe import Entry, Recipe
from pliant.experiments.run_config import Part, RunConfig, describe, full_name
from pliant.experiments.store import Run, load_run
from pliant.training import direction

_MOST_NAMES = 6
"""The number of tied settings that a sentence names."""


def choose(
    recipe: Recipe, entries: Sequence[Entry], trials: Sequence[RunConfig], root: Path, tell: Callable[[str], None]
) -> dict[str, tuple[Part, ...]]:
    """Choose the setting with the best mean for every entry, and write `selection.json`.

    Args:
        recipe: The experiment.
        entries: The entries with a grid.
        trials: The runs that decide.
        root: The folder of the experiment.
        tell: Gets one line for every entry.

    Returns:
        The settings by label; the first of those with equal means. A setting with a failed or diverged run is chosen
        only if all settings have one.

    Raises:
        ValueError: If the runs do not report the headline.
    """
    headline = recipe.deciding
    runs = {trial.id: load_run(root / "runs" / trial.id) for trial in trials}
    for run in runs.values():
        if run and run.status == "finished" and headline not in run.result:
            raise ValueError(f"headline is {headline!r}, which {run.path} lacks; allowed: {', '.join(run.result)}")
    sign = direction(headline)
    worst = -sign * math.inf
    scores = {name: run.result.get(headline, worst) if run else worst for name, run in runs.items()}
    choice: dict[str, tuple[Part, ...]] = {}
    labels = {}
    for entry in entries:
        tried = [trial for trial in trials if trial.label == entry.label]
        table: dict[str, float] = {}
        best = -math.inf
        for parts in entry.variants():
            values = [scores[trial.id] for trial in tried if trial.methods == parts]
            mean = math.fsum(values) / len(values)
            table[describe(parts)] = mean
            if sign * mean > best or entry.label not in choice:
                best, choice[entry.label] = sign * mean, parts
        labels[entry.label] = {
            "chosen": describe(choice[entry.label]),
            "scores": {key: value if math.isfinite(value) else None for key, value in table.items()},
            "seeds": len(tried) // len(table),
            "examples": _count_examples(runs[trial.id] for trial in tried) if "test" in headline else None,
        }
        tell(tell_choice(entry.label, labels[entry.label], recipe.selection.on))
    content = {"on": recipe.selection.on, "headline": headline, "labels": labels}
    write_atomically(root / "selection.json", seal(content, indent=1))
    return choice


def _count_examples(runs: Iterable[Run | None]) -> int | None:
    """Return the number of test examples that the first finished run recorded; None without a record."""
    finished = next((run for run in runs if run and run.status == "finished"), None)
    with contextlib.suppress(ValueError, TypeError, OSError):  # A damaged log costs only this number.
        for event in reversed(finished.events if finished else []):
            if "test_examples" in event:
                return int(event["test_examples"])
    return None


def is_tied(choice: Mapping[str, Any]) -> bool:
    """Whether other settings have exactly the score of the chosen one."""
    return len(_tied(choice)) > 1


def tell_choice(label: str, choice: Mapping[str, Any], on: Literal["validation", "test"]) -> str:
    """Say what was chosen and why, in one line.

    Args:
        label: The label of the entry.
        choice: The entry in `selection.json`: the `chosen` setting, all `scores`, the number of `seeds`, and the
            number of test `examples` of the smaller of the first and the last task, or None if no test decided.
        on: Whether held-out training data or the test data decided.

    Example:
        >>> scores = {"l2(lam=0.1)": 0.64, "l2(lam=1)": 0.57}
        >>> tell_choice("l2", {"chosen": "l2(lam=0.1)", "scores": scores, "seeds": 2, "examples": 14}, "validation")
        'chosen: l2(lam=0.1) (0.640; next 0.570 with lam=1), by 2 seeds on 14 held-out examples each'
    """
    chosen, scores = choice["chosen"], choice["scores"]
    told = f"chosen: {full_name(label, chosen)}"
    if chosen not in scores:
        return told
    seeds, examples = choice["seeds"], choice["examples"]
    tied = [_brief(each, chosen) for each in _tied(choice) if each != chosen]
    if scores[chosen] is None:
        told += " (the first: every setting has a run that did not finish)"
    elif tied:
        others = "; ".join([*tied[:_MOST_NAMES], *(["…"] if tied[_MOST_NAMES:] else [])])
        told += f", the first of {len(tied) + 1} that score {scores[chosen]:.3f} (also {others})"
    elif behind := {each: score for each, score in scores.items() if each != chosen and score is not None}:
        second = min(behind, key=lambda each: abs(behind[each] - scores[chosen]))  # the chosen score is the extreme one
        told += f" ({scores[chosen]:.3f}; next {behind[second]:.3f} with {_brief(second, chosen)})"
    else:
        told += f" ({scores[chosen]:.3f}; the only one whose runs all finished)"
    told += f", by {seeds} seed{'s' if seeds > 1 else ''}"
    if examples:
        which = "held-out" if on == "validation" else "test"
        told += f" on {examples} {which} examples{' each' if seeds > 1 else ''}"
    if tied:
        larger = "a larger selection.fraction or " if examples and on == "validation" else ""
        told += f"; {larger}more {'selection.' if on == 'validation' else ''}seeds would tell more"
    return told


def _tied(choice: Mapping[str, Any]) -> list[str]:
    """Return all settings with the score of the chosen one, if it has a score."""
    best = choice["scores"].get(choice["chosen"])
    return [each for each, score in choice["scores"].items() if score == best is not None]


def _brief(settings: str, chosen: str) -> str:
    """Leave out the name of a single method, which the chosen setting has named."""
    name = chosen.partition("(")[0]
    return settings if " + " in settings else settings.removeprefix(f"{name}(").removesuffix(")")
