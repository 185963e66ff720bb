"""The decision table of docs/which-method.md: for each kind of change, the methods that did best on its stream."""

import re

from benchmarks.leaderboard import FRESH, PLAIN, RESULTS, STREAMS, Scores, load_stream, share
from benchmarks.reproduction.agent_effects import EXPERIMENTS, show_gap
from benchmarks.reproduction.effects import name_effect
from benchmarks.reproduction.kept import count_seeds, estimate, load_kept
from benchmarks.reproduction.markdown import link, write_table
from pliant.methods import info, names
from pliant.methods._core.method import Kind

CHANGES = {
    "random labels, digits": "the labels change, small images",
    "random labels, MNIST": "the labels change, MNIST",
    "warm start, digits": "more data arrives, and wrong labels are corrected",
    "permuted pixels, digits": "the inputs change",
}
"""What changes on each stream of the leaderboard, in the words of somebody who has it."""
SHOWN = 3
FULL = "full_reset"
COST = re.compile(
    r"^mlp_4x256, batch 256: (?:training step with )?(\w+)(?: with one batch)? / \S.*?\s([\d.]+)\s*$", re.MULTILINE
)
CALLS: dict[Kind, tuple[str, str, str]] = {
    "penalty": ("penalty", "`.attach(optimizer)` once", "times a step"),
    "after_step": ("change of weights", "`.attach(optimizer)` once", "times a step"),
    "recycler": ("renewal of units", "`.attach(optimizer)` once", "times a step"),
    "reinitializer": ("reinitializer", "`.apply(optimizer)` when data is new", "steps, each time"),
    "architecture": ("built in", "before the optimizer is made", "times a step"),
}
"""Each kind of method in words, what its user calls, and the unit of its cost."""


def decision_block(kind: str) -> str:
    """Make one of the tables."""
    return {"supervised": supervised_block, "agents": agents_block, "cost": cost_block}[kind]()


def supervised_block() -> str:
    """Make a row a stream: how much plain training loses, and who closes most of the gap."""
    rows = [["what changes", "plain → fresh", "attach once", "apply when data is new", "seeds"]]
    for stream, change in CHANGES.items():
        scores = load_stream(STREAMS[stream])
        seeds = sorted(scores[PLAIN].keys() & scores[FRESH].keys())
        plain, fresh = (abs(estimate([scores[one][seed] for seed in seeds]).mean) for one in (PLAIN, FRESH))
        own = [name for name in names() if name in scores and name != FULL]
        by_itself = [name for name in own if not info(name).needs_telling]
        told = [name for name in own if info(name).needs_telling]
        ends = f"{100 * plain:.1f} → {100 * fresh:.1f} %"
        rows.append([change, ends, name_best(scores, by_itself), name_best(scores, told), str(len(seeds))])
    return write_table(rows)


def name_best(scores: Scores, methods: list[str]) -> str:
    """Name the methods that close most of the gap, with their shares."""
    shares = {name: share(scores, name, sorted(scores[name])) for name in methods}
    best = sorted(shares, key=lambda name: -shares[name])[:SHOWN]
    return ", ".join(f"{link(f'`{name}`', f'methods/{name}.md')} {shares[name]:.2f}" for name in best) or "–"


def agents_block() -> str:
    """Make a row a method of each kept experiment with agents."""
    rows = [["agent (DQN)", "method", "late return", "minus plain training", "verdict", "seeds"]]
    for name, where in EXPERIMENTS.items():
        kept = load_kept(name)
        if kept is None or not kept.values(PLAIN, kept.headline):
            continue
        for label in kept.labels:
            values = kept.values(label, kept.headline)
            if not values:
                continue
            shown = estimate(values.values()).show(0)
            if label == PLAIN:
                rows.append([where, "plain training", shown, "", "", count_seeds(kept, label)])
                continue
            gap = kept.difference(label, PLAIN, kept.headline)
            loss = kept.difference(PLAIN, label, kept.headline)  # `name_effect` judges errors: less is better.
            rows.append([where, label, shown, show_gap(gap), name_effect(loss), count_seeds(kept, label)])
    return write_table(rows)


def cost_block() -> str:
    """Make a row a kind of method: the methods with the lowest and the highest cost."""
    measured = {name: float(ratio) for name, ratio in COST.findall((RESULTS / "methods.txt").read_text())}
    rows = [["kind", "you call", "lowest cost", "highest cost", "measured in"]]
    for kind, (words, call, unit) in CALLS.items():
        own = sorted(
            (name for name in names() if info(name).kind == kind and name in measured), key=measured.__getitem__
        )
        shown = [f"{link(f'`{name}`', f'methods/{name}.md')} {measured[name]:.2f}" for name in (own[0], own[-1])]
        rows.append([words, call, *shown, unit])
    return write_table(rows)
