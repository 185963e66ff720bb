"""The effect of each method on agents: the second table of a method card, where agents were trained with the method."""

from benchmarks.reproduction.effects import name_effect
from benchmarks.reproduction.kept import PRIMING, Estimate, count_seeds, estimate, find_recipe, load_kept
from benchmarks.reproduction.markdown import write_table

EXPERIMENTS = {
    PRIMING: "CartPole, after priming",
    "ours_rl_intervention": "CartPole, intervention at the midpoint",
    "ours_rl_task_sequence": "CartPole, last four of ten tasks",
}
"""The experiments with agents that a card shows once their runs are kept."""
PLAIN = "vanilla"


def agent_block(method: str) -> str:
    """Make the table of a method's effect on agents; empty if no kept run has it."""
    rows = [["agents (DQN)", "", "late return", "plain training", "difference", "verdict", "seeds"]]
    for name, where in EXPERIMENTS.items():
        kept = load_kept(name)
        if kept is None:
            continue
        own = [entry.label for entry in find_recipe(name).methods if method in {part.name for part in entry.parts}]
        plain = kept.values(PLAIN, kept.headline)
        for label in own:
            values = kept.values(label, kept.headline)
            if not values or not plain:
                continue
            gap = kept.difference(label, PLAIN, kept.headline)
            loss = kept.difference(PLAIN, label, kept.headline)  # `name_effect` judges errors: less is better.
            shown = [estimate(each.values()).show(0) for each in (values, plain)]
            rows.append([where, label, *shown, show_gap(gap), name_effect(loss), count_seeds(kept, label)])
    return write_table(rows) if len(rows) > 1 else ""


def show_gap(gap: Estimate | None) -> str:
    """Write a difference of returns."""
    return "–" if gap is None else gap.show(0, sign="+")
