"""What methods do for a GPT on text: a table of the method cards, and the tables of docs/howto-language.md."""

from statistics import fmean

from benchmarks.reproduction.effects import BASELINES, name_effect
from benchmarks.reproduction.kept import (
    FEWEST,
    count_seeds,
    estimate,
    find_recipe,
    kept_runs,
    load_kept,
    unfinished_runs,
)
from benchmarks.reproduction.markdown import write_table
from benchmarks.reproduction.numbers import split_tasks, take_measure
from pliant.experiments.store import Run

LANGUAGE = "ours_language_core"
"""The experiment behind the tables of methods."""
PLAIN = "vanilla"
LOSSES = {"loss, tasks 8–10": slice(7, 10), "loss, tasks 18–20": slice(17, 20)}
MEASURES = {
    "spectral_norm": ("largest singular value", 2),
    "attention_entropy": ("attention entropy", 2),
    "weight_l2": ("weight norm", 1),
    "feature_rank": ("feature rank", 2),
    "dormant_fraction": ("dormant", 2),
}
"""The measures of the table, with their names there and their digits."""


def language_block(method: str) -> str:
    """Make the table of a method's effect on text; empty if no kept run has it."""
    kept = load_kept(LANGUAGE)
    if kept is None:
        return ""
    parts = {entry.label: {part.name for part in entry.parts} for entry in find_recipe(LANGUAGE).methods}
    own = [label for label in kept.labels if method in parts[label] and kept.values(label, kept.headline)]
    if not own:
        return ""
    rows = [["text (GPT)", "training loss, last task", "difference to plain training", "verdict", "seeds"]]
    for label in [*(label for label in BASELINES if label in kept.labels), *own]:
        loss = estimate(kept.values(label, kept.headline).values()).show(2)
        gap = kept.difference(label, PLAIN, kept.headline) if label not in BASELINES else None
        judged = [gap.show(2, sign="+"), name_effect(gap)] if gap else ["", ""]
        rows.append([BASELINES.get(label, label), loss, *judged, count_seeds(kept, label)])
    return write_table(rows)


def text_block(name: str) -> str:
    """Make the table of losses and measures of every method on permuted vocabularies, the lowest final loss first.

    Runs of an experiment that is not complete are shown too, with the number of their seeds.
    """
    runs = kept_runs(name)[0] or unfinished_runs(name)
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        if run.status == "finished":
            by_label.setdefault(run.config.label, []).append(run)
    rows = [[f"`{name}`", *LOSSES, *(title for title, _ in MEASURES.values()), "seeds"]]
    rows += sorted((write_row(label, found) for label, found in by_label.items()), key=lambda row: row[len(LOSSES)])
    return write_table(rows)


def write_row(label: str, runs: list[Run]) -> list[str]:
    """Write the losses of a method, and its measures at the start of the first and of the last task."""
    tasks = [split_tasks(run) for run in runs]
    cells = [BASELINES.get(label, label)]
    for part in LOSSES.values():
        losses = [fmean(records[-1]["train_loss"] for records in each[part]) for each in tasks]
        cells.append(estimate(losses).show(2) if len(losses) >= FEWEST else f"{fmean(losses):.2f}")
    for measure, (_, digits) in MEASURES.items():
        values = [take_measure(measure, each) for each in tasks]
        first, last = (f"{fmean(each[end] for each in values):.{digits}f}" for end in (0, -1))
        cells.append(first if first == last else f"{first} → {last}")
    return [*cells, str(len(runs))]


def kept_block(names: str) -> str:
    """Make a table of recipes, what they ask, and how many of their runs are kept.

    Args:
        names: The recipes, with commas between them.
    """
    rows = [["recipe", "what it asks", "kept runs"]]
    for name in names.split(","):
        if found := len(kept_runs(name)[0]):
            kept = str(found)
        else:
            part = len(unfinished_runs(name))
            kept = f"{part}, not complete (`benchmarks/results/unfinished`)" if part else "none"
        rows.append([f"`{name}`", find_recipe(name).title, kept])
    return write_table(rows)
