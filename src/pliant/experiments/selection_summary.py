"""Which settings were chosen, in words: by what scores, on how much, and whether others did as well."""

from collections.abc import Mapping
from typing import Any, Literal

from pliant.experiments.run_config import full_name

_MOST_NAMES = 6
"""How many settings a sentence names."""


def is_tied(choice: Mapping[str, Any]) -> bool:
    """Whether other settings score exactly as the chosen one."""
    return len(_tied(choice)) > 1


def tell_choice(label: str, choice: Mapping[str, Any], on: Literal["validation", "test"]) -> str:
    """Say what was chosen and why, in a line.

    Args:
        label: What tables call the method.
        choice: Of a label in `selection.json`: what is `chosen`, all `scores`, how many `seeds` decided, and how many
            `examples` each was tested on, if a test decided (in the first or the last task, whichever has fewer);
            older choices do not tell the latter two.
        on: What it was tested on: examples held out of the training data, or the test data.

    Example:
        >>> scores = {"l2(lam=0.1)": 0.64, "l2(lam=1)": 0.57}
        >>> tell_choice("l2", {"chosen": "l2(lam=0.1)", "scores": scores, "seeds": 2, "examples": 14}, "validation")
        'chosen: l2(lam=0.1) (0.640; next 0.570 with lam=1), by 2 seeds on 14 held-out examples each'
    """
    chosen, scores = choice["chosen"], choice["scores"]
    told = f"chosen: {full_name(label, chosen)}"
    if chosen not in scores:
        return told
    tied = [_brief(each, chosen) for each in _tied(choice) if each != chosen]
    if scores[chosen] is None:
        told += " (the first: each has a run that did not finish)"
    elif tied:
        others = "; ".join([*tied[:_MOST_NAMES], *(["…"] if tied[_MOST_NAMES:] else [])])
        told += f", the first of {len(tied) + 1} that score {scores[chosen]:.3f} (also {others})"
    elif behind := {each: score for each, score in scores.items() if each != chosen and score is not None}:
        second = max(behind, key=behind.__getitem__)
        told += f" ({scores[chosen]:.3f}; next {behind[second]:.3f} with {_brief(second, chosen)})"
    else:
        told += f" ({scores[chosen]:.3f}; the only one whose runs all finished)"
    seeds, examples = choice.get("seeds"), choice.get("examples")
    if seeds:
        told += f", by {seeds} seed{'s' if seeds > 1 else ''}"
    if seeds and examples:
        which = "held-out" if on == "validation" else "test"
        told += f" on {examples} {which} examples{' each' if seeds > 1 else ''}"
    if tied:
        larger = "a larger selection.fraction or " if examples and on == "validation" else ""
        told += f"; {larger}more {'selection.' if on == 'validation' else ''}seeds would tell more"
    return told


def _tied(choice: Mapping[str, Any]) -> list[str]:
    """Name all that score as the chosen one does, if it has a score."""
    best = choice["scores"].get(choice["chosen"])
    return [each for each, score in choice["scores"].items() if score == best is not None]


def _brief(settings: str, chosen: str) -> str:
    """Leave out the name of the method, which the chosen one has told, unless there are several."""
    name = chosen.partition("(")[0]
    return settings if " + " in settings else settings.removeprefix(f"{name}(").removesuffix(")")
