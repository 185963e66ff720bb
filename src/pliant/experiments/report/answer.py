"""The answer in words: which method, by how much, and whether the evidence is enough."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pliant.experiments.report.analysis import Analysis, Contrast
from pliant.experiments.report.reading import Contender
from pliant.experiments.report.statistics import MANY_SEEDS, POWER, seeds_needed
from pliant.experiments.report.wording import (
    brief,
    change,
    count,
    enumerate_names,
    name_of,
    probability,
    size,
    span,
)

Certainty = Literal["clear", "unclear", "none"]

FEW_SEEDS = 4
"""With so few seeds or fewer, a 95 % interval is known to be too narrow."""


@dataclass(frozen=True)
class Answer:
    """What a comparison says.

    Args:
        verdict: The answer, in a sentence.
        reasons: What it rests on, and what is missing, a sentence each.
        certainty: "clear": the evidence is enough; "unclear": it is not; "none": there is none.
    """

    verdict: str
    reasons: tuple[str, ...]
    certainty: Certainty

    def __str__(self) -> str:
        return " ".join([self.verdict, *self.reasons])


def answer(analysis: Analysis) -> Answer:
    """Say which method to use, how it compares with doing nothing and with starting anew, and how sure that is."""
    best = analysis.best
    if best is None:
        return _nothing_yet(analysis)
    verdict, certainty = _judge(analysis, best)
    reasons = [_evidence_sentence(analysis, best), _difference_sentence(analysis, best), *_caveats(analysis, best)]
    return Answer(verdict, tuple(filter(None, reasons)), certainty)


def _judge(analysis: Analysis, best: Contender) -> tuple[str, Certainty]:
    row, headline = analysis.row(best), analysis.headline
    reached = f"{brief(row.numbers[headline].mean, headline)} {name_of(headline)}"
    others = list(analysis.rivals.values())
    told_apart = all(contrast.distinguishable for contrast in others)
    if best.role == "vanilla" and others:
        if told_apart:
            return f"Do nothing: plain training reaches {reached}, and every method is worse.", "clear"
        return f"No method does better than doing nothing, which reaches {reached}.", "unclear"
    if row.against_vanilla is not None:
        above = _above([(row.against_vanilla, "doing nothing"), (row.against_fresh, "training from scratch")], headline)
        if row.against_vanilla.distinguishable:
            return f"Use {best.name}: {reached}, {above}.", "clear" if told_apart else "unclear"
        return f"No method can be told from doing nothing yet. {best.name} looks best: {reached}, {above}.", "unclear"
    if not others:
        return f"{best.name} reaches {reached}; there is nothing to compare it with.", "none"
    if told_apart:
        return f"Use {best.name}: {reached}, better than every other.", "clear"
    return f"{best.name} has the best mean, {reached}, but cannot be told from others.", "unclear"


def _above(contrasts: Sequence[tuple[Contrast | None, str]], headline: str) -> str:
    """Say how far above or below its references the best is."""
    parts = []
    for contrast, reference in contrasts:
        if contrast is not None:
            mean = contrast.difference.interval.mean
            parts.append(f"{size(mean, headline)} {'above' if mean > 0 else 'below'} {reference}")
    return " and ".join(parts)


def _nothing_yet(analysis: Analysis) -> Answer:
    runs = analysis.comparison.runs
    under_way = [run for run in runs if run.status == "unfinished"]
    diverged = [contender.name for contender in analysis.comparison.contenders if contender.diverged]
    if under_way:
        furthest = max(run.progress for run in under_way)
        return Answer(
            "No run has finished yet.",
            (f"{count(len(under_way), 'run')} begun; the furthest is at {100 * furthest:.0f} %.",),
            "none",
        )
    if diverged:
        return Answer("There is no method to recommend.", (f"{enumerate_names(diverged)} diverged.",), "none")
    return Answer("There is no finished run of a method to compare.", (), "none")


def _difference_sentence(analysis: Analysis, best: Contender) -> str:
    """Say how sure the differences to the references are."""
    row = analysis.row(best)
    parts = []
    for contrast, reference in ((row.against_vanilla, "doing nothing"), (row.against_fresh, "training from scratch")):
        if contrast is None or not (ends := span(contrast.difference.interval, analysis.headline, signed=True)):
            continue
        told = "" if contrast.distinguishable else ": not distinguishable"
        parts.append(
            f"{change(contrast.difference.interval.mean, analysis.headline)} against {reference} "
            f"(95 % interval {ends}; {probability(contrast.p)}{told})"
        )
    if not parts:
        return ""
    family = max(contrast.family for contrast in (row.against_vanilla, row.against_fresh) if contrast)
    corrected = f" All p-values are corrected for {family} comparisons." if family > 1 else ""
    return f"Seed by seed: {' and '.join(parts)}.{corrected}"


def _evidence_sentence(analysis: Analysis, best: Contender) -> str:
    """Say whether the seeds are enough to tell the best from its rivals, and if not, how many would be."""
    if not analysis.rivals:
        return ""
    seeds = len(best.values(analysis.headline))
    if seeds < 2:
        return "The evidence is not enough: one seed cannot tell an effect from chance; run at least five."
    tied = [name for name, contrast in analysis.rivals.items() if not contrast.distinguishable]
    if not tied:
        others = "every other method" if len(analysis.rivals) > 1 else next(iter(analysis.rivals))
        return f"The evidence is enough: {count(seeds, 'seed')} tell {best.name} from {others}."
    sentence = f"{count(seeds, 'seed').capitalize()} cannot tell {best.name} from {enumerate_names(tied)}"
    vanilla = analysis.comparison.baseline("vanilla")
    rival = vanilla.name if vanilla and vanilla.name in tied else tied[0]
    return f"{sentence}; {_what_would(analysis.rivals[rival], rival, seeds, alone=len(tied) == 1)}."


def _what_would(contrast: Contrast, rival: str, seeds: int, *, alone: bool) -> str:
    """Say how many seeds would tell the best from a rival."""
    if contrast.difference.interval.mean == 0:
        return f"{rival} has the very same mean"
    if not contrast.difference.paired:
        return f"runs of {rival} with the same seeds would tell more"
    needed = seeds_needed(contrast.difference, contrast.family)
    if needed is None:
        return f"not even {MANY_SEEDS} would tell it from {rival} if the difference is as small as it looks"
    would = "would" if alone else f"would tell it from {rival}"
    sure = f"{100 * POWER:.0f} % power, if the difference is as large as it looks"
    return f"about {max(1, needed - seeds)} more {would} ({sure})"


def _caveats(analysis: Analysis, best: Contender) -> list[str]:
    comparison = analysis.comparison
    found = []
    seeds = len(best.values(analysis.headline))
    if 2 <= seeds <= FEW_SEEDS:
        found.append(
            f"With {seeds} seeds an interval is hardly wider than the seeds' own range and holds the true mean "
            f"in about {100 - 100 * 2.0 ** (1 - seeds):.0f} % of cases, not 95 %."
        )
    found += [
        f"{contender.name} diverged on {contender.diverged} of {count(len(contender.runs), 'seed')} "
        "and is not considered."
        for contender in comparison.contenders
        if contender.diverged
    ]
    unfinished = sum(run.status == "unfinished" for run in comparison.runs)
    if unfinished:
        found.append(f"{unfinished} of {len(comparison.runs)} runs are not finished: this may change.")
    if comparison.selection.get("on") == "test":
        found.append("Settings were chosen on the test data itself, as the sources do: optimistic.")
    return found
