"""The effect of each method on plasticity on one small stream: the tables of the method cards."""

import math

from benchmarks.reproduction.kept import FEWEST, NOTHING, Estimate, Kept, count_seeds, estimate, find_recipe, load_kept
from benchmarks.reproduction.markdown import write_table
from benchmarks.reproduction.verdicts import LEVEL, correct, decide
from pliant.experiments.recipe import Entry
from pliant.experiments.report.formatting import join_names
from pliant.methods import info

EFFECT = "methods_effect"
"""The experiment behind the tables."""
MEAN, LAST = "mean_train_accuracy", "final_train_accuracy"
BASELINES = {"vanilla": "*plain training*", "fresh": "*a fresh network for every task*"}


def effect_block(method: str) -> str:
    """Make the table of a method's effect on plasticity, with plain training and fresh networks."""
    kept = load_kept(EFFECT)
    if kept is None:
        return NOTHING
    recipe = find_recipe(EFFECT)
    names = {entry.label: {part.name for part in entry.parts} for entry in recipe.methods}
    own = [label for label in kept.labels if not names[label] or method in names[label]]
    told = {entry.label for entry in recipe.methods if is_told(entry)}
    judged, judged_late = (judge_effects(kept, accuracy) for accuracy in (MEAN, LAST))
    rows = [["", "told", "mean over tasks", "last task", "mean − plain training", "verdict", "seeds"]]
    verdicts: dict[str, list[str]] = {}
    unknown = kept.diverged("vanilla", kept.headline)
    for label in own:
        errors = [show_error(kept, label, accuracy) for accuracy in (MEAN, LAST)]
        effect = ["", ""]
        if names[label]:
            # Exchanged accuracies give the difference of errors.
            gap = None if unknown else kept.difference("vanilla", label, MEAN)
            verdict, late = judged[label], judged_late[label]
            verdicts.setdefault(verdict, []).append(f"`{label}`")
            if verdict == "no difference seen" and late in ("helps", "hurts"):
                verdict = f"{verdict}; {late} at the last task"
                verdicts.setdefault(f"{late} at the last task", []).append(f"`{label}`")
            effect = [gap.show(1, 100, "+") if gap else "–", verdict]
        mark = "yes" if label in told else ""
        rows.append([BASELINES.get(label, label), mark, *errors, *effect, count_seeds(kept, label)])
    options, images = recipe.stream.options, f"{recipe.data.options['first']:,}".replace(",", " ")
    where = (
        f"Random labels, `recipes/{EFFECT}.toml`: {recipe.data.name.upper()}, {images} images, "
        f"{options['tasks']} tasks of {options['epochs']} epochs. Error on the task's own images at its end, in "
        "percent; mean over seeds and 95 % interval. *Told*: the method must be told that a task starts. Verdicts are "
        "corrected for the number of settings of all methods (Benjamini–Hochberg)."
    )
    return f"{where}\n\n{write_table(rows)}\n\n{sum_up(verdicts)}"


def judge_effects(kept: Kept, accuracy: str) -> dict[str, str]:
    """Return the verdict on each label's error, paired by seed with plain training.

    Paired t-tests, corrected for the number of labels by Benjamini and Hochberg.
    """
    plain = kept.values("vanilla", accuracy)
    verdicts, decided, values = dict.fromkeys(kept.labels, "too few seeds"), {}, {}
    for label in kept.labels:
        own = kept.values(label, accuracy)
        gaps = [own[seed] - plain[seed] for seed in sorted(own.keys() & plain.keys())]
        if kept.diverged(label, kept.headline):
            verdicts[label] = "diverges"
        elif label not in BASELINES and len(gaps) >= FEWEST and not kept.diverged("vanilla", kept.headline):
            values[label], decided[label] = decide(gaps, (0.0, math.inf))
    words = {"supported": "helps", "contradicted": "hurts"}
    for (label, word), q in zip(decided.items(), correct(list(values.values())), strict=True):
        verdicts[label] = words[word] if q <= LEVEL else "no difference seen"
    return verdicts


def is_told(entry: Entry) -> bool:
    """Say whether a method is told when a task starts: fresh networks, and methods that wait for `apply()`."""
    waits = [part for part in entry.parts if not part.settings.keys() & {"at", "every"}]
    return entry.fresh or any(info(part.name).needs_telling for part in waits)


def show_error(kept: Kept, label: str, accuracy: str) -> str:
    """Write the error of a label in percent."""
    values = kept.values(label, accuracy).values()
    return estimate([1 - value for value in values]).show(1, 100) if values else "–"


def name_effect(gap: Estimate | None) -> str:
    """Return the verdict on a difference in error, method − plain training."""
    if gap is None or gap.count < FEWEST:
        return "too few seeds"
    if gap.high < 0:
        return "helps"
    return "hurts" if gap.low > 0 else "no difference seen"


def sum_up(verdicts: dict[str, list[str]]) -> str:
    """Summarize the verdicts on a method's settings in a sentence.

    Args:
        verdicts: The labels by verdict.

    Example:
        >>> sum_up({"helps": ["a"], "hurts": ["b", "c"]})
        'It helps here with a; it hurts with b and c.'
        >>> sum_up({"hurts": ["b"]})
        '**No help was seen here**: it hurts with b.'
        >>> sum_up({"hurts": ["a"], "helps at the last task": ["b"]})
        '**No help was seen here** over all tasks: it hurts with a. At the last task it helps with b.'
    """
    unknown = ""
    if "too few seeds" in verdicts:
        unknown = f"Too few seeds to say what it does here with {join_names(verdicts['too few seeds'])}."
        verdicts = {verdict: labels for verdict, labels in verdicts.items() if verdict != "too few seeds"}
        if not verdicts:
            return unknown
    words = {"helps": "helps here", "hurts": "hurts", "diverges": "diverges"}
    words["no difference seen"] = "shows no significant difference"
    clauses = "; it ".join(f"{words[v]} with {join_names(verdicts[v])}" for v in words if v in verdicts)
    where = " over all tasks" if any(key.endswith("at the last task") for key in verdicts) else ""
    open_or_helps = unknown or "helps" in verdicts
    said = f"It {clauses}." if open_or_helps else f"**No help was seen here**{where}: it {clauses}."
    for late in ("helps", "hurts"):
        if labels := verdicts.get(f"{late} at the last task"):
            said += f" At the last task it {late} with {join_names(labels)}."
    return f"{said} {unknown}".strip()
