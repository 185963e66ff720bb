"""The effect and the cost of every method in one table, from the runs behind the cards and the kept benchmark."""

import math
import re
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.reproduction.effects import EFFECT, MEAN, is_told, judge_effects, show_error
from benchmarks.reproduction.kept import FEWEST, NOTHING, Kept, estimate, find_recipe, load_kept
from benchmarks.reproduction.markdown import link, write_table
from benchmarks.reproduction.verdicts import LEVEL, correct, decide
from pliant.experiments.recipe import Entry
from pliant.methods import info, names

COSTS = Path(__file__).parents[1] / "results" / "methods.txt"
"""The output of `python -m benchmarks methods`."""
_COST = re.compile(
    r": (?:training step with (?P<step>\w+) / without|(?P<act>\w+)[\w ]* / a training step) +(?P<ratio>[\d.]+)"
)
_TIMING = ("every", "first", "at")
"""Settings that say when a method acts; a sweep of another setting may need others of them."""
_PHASES = ("first", "at")
"""Those that do not say how often: they have no smaller or larger values to try."""
_FAR = 0.05
"""The difference in error from which on a default is far from the best setting."""
_MOST = {"layers": 4}
"""Largest values that the recipe's network allows: it has four weight layers."""


def effects_block(kind: str) -> str:
    """Make one of the tables."""
    return {"all": overview_block, "defaults": defaults_block}[kind]()


def overview_block() -> str:
    """Make the table of all methods, each with its best setting, those that help most first."""
    kept = load_kept(EFFECT)
    if kept is None:
        return NOTHING
    recipe, costs, judged = find_recipe(EFFECT), read_costs(COSTS.read_text()), judge_effects(kept, MEAN)
    known, unknown = [], []
    for method in names():
        entries = [entry for entry in recipe.methods if [part.name for part in entry.parts] == [method]]
        ready = [entry for entry in entries if is_ready(kept, entry.label)]
        name, settings = link(f"`{method}`", f"{method}.md"), f"{len(ready)} of {len(entries)}"
        if not ready:
            unknown.append([name, "–", "", "–", "–", "too few seeds", settings, "–", costs[method]])
            continue
        best = min(ready, key=lambda entry: mean_error(kept, entry.label))
        gap = kept.difference("vanilla", best.label, MEAN)
        edge = " †" if is_at_edge(best, ready) else ""
        seeds = len(kept.values(best.label, MEAN))
        row = [
            name, best.label + edge, "yes" if is_told(best) else "", show_error(kept, best.label, MEAN),
            gap.show(1, 100, "+") if gap else "–", judged[best.label], settings, str(seeds), costs[method],
        ]  # fmt: skip
        known.append((mean_error(kept, best.label), row))
    rows = [
        ["method", "best setting", "told", "error", "error − plain training", "verdict", "settings", "seeds", "cost"],
        *(row for _, row in sorted(known, key=lambda pair: pair[0])),
        *unknown,
    ]
    plain, fresh = (show_error(kept, label, MEAN) for label in ("vanilla", "fresh"))
    where = (
        "Random labels on MNIST (`recipes/methods_effect.toml`). *Error*: on each task's own images at its end, mean "
        f"over tasks, in percent; mean over seeds and 95 % interval. Plain training has {plain}, a fresh network for "
        f"every task {fresh}. *Settings*: how many have at least {FEWEST} seeds; the best of them is chosen on the "
        "seeds of this table, so its error is a little too low ([leaderboard](../leaderboard.md): chosen on other "
        "seeds). Verdicts are corrected for the number of settings (Benjamini–Hochberg). † the smallest or largest of "
        "these. *Told*: the method must be told that a task starts. *Cost*: a training step with the method, divided "
        "by one without; for methods on new data, one action in training steps (`benchmarks/results/methods.txt`: MLP "
        "4 × 256, batch 256, a CPU, one thread)."
    )
    return f"{where}\n\n{write_table(rows)}"


def defaults_block() -> str:
    """Make the table of the methods whose default setting is far from their best one, and significantly worse."""
    kept = load_kept(EFFECT)
    if kept is None:
        return NOTHING
    pairs, values = [], []
    for method in names():
        entries = [entry for entry in find_recipe(EFFECT).methods if [part.name for part in entry.parts] == [method]]
        ready = [entry for entry in entries if is_ready(kept, entry.label)]
        default = find_default(method, ready)
        if default is None:
            continue
        best = min(ready, key=lambda entry: mean_error(kept, entry.label))
        one, other = (kept.values(entry.label, MEAN) for entry in (default, best))
        gaps = [other[seed] - one[seed] for seed in sorted(one.keys() & other.keys())]
        if best is not default and len(gaps) >= FEWEST:
            pairs.append((method, default.label, best.label, gaps))
            values.append(decide(gaps, (0.0, math.inf))[0])
    rows = [["method", "default", "error", "best setting", "error", "difference", "seeds"]]
    for (method, default_label, best_label, gaps), q in zip(pairs, correct(values), strict=True):
        if q <= LEVEL and fmean(gaps) >= _FAR:
            errors = [show_error(kept, label, MEAN) for label in (default_label, best_label)]
            gap = estimate(gaps).show(1, 100, "+")
            name = link(f"`{method}`", f"methods/{method}.md")
            rows.append([name, default_label, errors[0], best_label, errors[1], gap, str(len(gaps))])
    return write_table(rows)


def find_default(method: str, entries: list[Entry]) -> Entry | None:
    """Return the entry with a method's default settings; `every` may differ by a factor of two."""
    usual = {tunable.name: tunable.default for tunable in info(method).tunables if tunable.default is not None}
    for entry in entries:
        own = number_settings(entry)
        ratio = own.get("every", 1) / usual.get("every", own.get("every", 1))
        if drop(own, {*_TIMING}) == drop(usual, {*_TIMING}) and 0.5 <= ratio <= 2:
            return entry
    return None


def is_ready(kept: Kept, label: str) -> bool:
    """Say whether a setting has enough seeds for a verdict, none of them diverged."""
    return len(kept.values(label, MEAN)) >= FEWEST and not kept.diverged(label, kept.headline)


def mean_error(kept: Kept, label: str) -> float:
    """Return the error of a setting, the mean over its seeds."""
    return 1 - estimate(kept.values(label, MEAN).values()).mean


def is_at_edge(best: Entry, entries: list[Entry]) -> bool:
    """Say whether one of a setting's numbers is the smallest or largest tried beside otherwise equal settings.

    A number at a bound of the method's own, such as τ = 0, or of the network is not at an edge.

    Example:
        >>> low, high = (Entry.model_validate(f"l2:lam={lam}") for lam in (0.1, 0.2))
        >>> is_at_edge(low, [low]), is_at_edge(low, [low, high])
        (False, True)
    """
    own = number_settings(best)
    bounds = {tunable.name: (tunable.low, tunable.high) for tunable in info(best.parts[0].name).tunables}
    for key, value in own.items():
        if isinstance(value, str) or key in _PHASES or value in (*bounds.get(key, ()), _MOST.get(key)):
            continue
        ignored = {key, *(_TIMING if key in _TIMING else ())}
        beside = [
            other[key]
            for other in map(number_settings, entries)
            if key in other and drop(other, ignored) == drop(own, ignored)
        ]
        if len(set(beside)) > 1 and value in (min(beside), max(beside)):
            return True
    return False


def number_settings(entry: Entry) -> dict[str, Any]:
    """Return the settings of an entry's only method, with the defaults of those that have a number to tune."""
    part = entry.parts[0]
    defaults = {tunable.name: tunable.default for tunable in info(part.name).tunables}
    return {key: value for key, value in (defaults | part.settings).items() if value is not None}


def drop(settings: dict[str, Any], ignored: set[str]) -> dict[str, Any]:
    """Return the settings without some of them."""
    return {key: value for key, value in settings.items() if key not in ignored}


def read_costs(text: str) -> dict[str, str]:
    """Read the cost of each method from the output of `python -m benchmarks methods`.

    Example:
        >>> read_costs("mlp, batch 256: training step with l2 / without    1.018")
        {'l2': '1.02'}
        >>> read_costs("mlp, batch 256: dash with one batch / a training step    1.154")
        {'dash': '1.15 steps'}
    """
    found = {}
    for line in text.splitlines():
        if match := _COST.search(line):
            ratio = float(match["ratio"])
            found[match["step"] or match["act"]] = f"{ratio:.2f}" + ("" if match["step"] else " steps")
    return found
