"""The effect of each method on text: the third table of a method card, where a GPT was trained with the method."""

from benchmarks.reproduction.effects import BASELINES, name_effect
from benchmarks.reproduction.kept import count_seeds, estimate, find_recipe, load_kept
from benchmarks.reproduction.markdown import write_table

LANGUAGE = "ours_language_core"
"""The experiment behind the table."""
PLAIN = "vanilla"


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
