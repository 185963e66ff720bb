"""The answer in words: which method, by how much, and whether the evidence is enough."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from pliant.experiments.report.analysis import Analysis, Contrast
from pliant.experiments.report.comparison import Contender
from pliant.experiments.report.formatting import (
    brief,
    change,
    count,
    enumerate_names,
    name_of,
    probability,
    sentence,
    size,
    span,
)
from pliant.experiments.report.statistics import MANY_SEEDS, POWER, seeds_needed
from pliant.experiments.run_config import describe
from pliant.experiments.selection import is_tied

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
    reasons = [
        _evidence_sentence(analysis, best),
        _ranking_sentence(analysis),
        _difference_sentence(analysis, best),
        *_caveats(analysis, best),
    ]
    return Answer(verdict, tuple(filter(None, reasons)), certainty)


def _judge(analysis: Analysis, best: Contender) -> tuple[str, Certainty]:
    headline, against_nothing = analysis.headline, _against(analysis, best, "vanilla")
    reached = f"{brief(analysis.score(best), headline)} {name_of(headline)}"
    others = list(analysis.rivals.values())
    told_apart = all(map(analysis.wins, others))
    lacking = bool(_without_result(analysis))
    certainty: Certainty = "clear" if told_apart and not lacking else "unclear"
    if best.role == "vanilla" and others:
        if told_apart:
            every = "every method that has a result" if lacking else "every method"
            return f"Do nothing: plain training reaches {reached}, and {every} is worse.", certainty
        unknown = "whether one is better is not known yet"
        return f"No method has a better mean than doing nothing, which reaches {reached}; {unknown}.", "unclear"
    name = _name_with_settings(best, chosen=best.label in analysis.comparison.choices)
    above = _above(_references(analysis, best), headline)
    if against_nothing is not None:
        if analysis.wins(against_nothing):
            return f"Use {name}: {reached}, {above}.", certainty
        if surer := _better_than_nothing(analysis):
            verb = "is" if len(surer) == 1 else "are"
            shown = f"only {enumerate_names(surer)} {verb} shown to be better than doing nothing"
            return f"{name} looks best, {reached}, {above}, but {shown}.", "unclear"
        if against_nothing.distinguishable:
            return f"No method is shown to be better than doing nothing. {name}: {reached}, {above}.", "unclear"
        return f"No method can be told from doing nothing yet. {name} looks best: {reached}, {above}.", "unclear"
    if not others:
        told = f"{reached}, {above}" if above else reached
        return f"{name} reaches {told}; {_why_alone(analysis, best)}.", "none"
    if told_apart:
        every = "every other that has a result" if lacking else "every other"
        return f"Use {name}: {reached}, better than {every}, {above}.", certainty
    return f"{name} has the best mean, {reached}, but cannot be told from others.", "unclear"


def _without_result(analysis: Analysis) -> list[str]:
    """Name the methods that are asked for and that nothing is known of yet: not begun, under way, or failed."""
    comparison = analysis.comparison
    begun = [other for other in comparison.contenders if other.role != "fresh" and not other.diverged]
    labels = {contender.label for contender in comparison.contenders}
    return [other.name for other in begun if other not in analysis.candidates] + [
        label for label in dict.fromkeys(label for label, _ in comparison.not_begun) if label not in labels
    ]


def _why_alone(analysis: Analysis, best: Contender) -> str:
    """Say why there is nothing to compare the only candidate with."""
    others = [other for other in analysis.comparison.contenders if other is not best and other.role != "fresh"]
    for other in others:
        if other.role == "vanilla" and other.diverged:
            return f"doing nothing diverged on {other.diverged} of {count(len(other.runs), 'seed')}"
    if others and all(other.diverged for other in others):
        return "every method diverged" if best.role == "vanilla" else "every other method diverged"
    waiting = {label for label, _ in analysis.comparison.not_begun} - {best.name}
    if others:
        yet = " yet" if waiting or any(other.count("unfinished") for other in others) else ""
        return f"no other method has a result{yet}"
    return "no run of another method has begun yet" if waiting else "there is no other method to compare it with"


def _against(analysis: Analysis, contender: Contender, role: Literal["vanilla", "fresh"]) -> Contrast | None:
    """How a contender differs from a baseline; None if that diverged, as the seeds that are left flatter it."""
    baseline, row = analysis.comparison.baseline(role), analysis.row(contender)
    if baseline is None or baseline.diverged:
        return None
    return row.against_vanilla if role == "vanilla" else row.against_fresh


def _better_than_nothing(analysis: Analysis) -> list[str]:
    """Name the candidates that are shown to be better than doing nothing."""
    against = {candidate.name: _against(analysis, candidate, "vanilla") for candidate in analysis.candidates}
    return [name for name, contrast in against.items() if contrast is not None and analysis.wins(contrast)]


def _name_with_settings(best: Contender, *, chosen: bool) -> str:
    """Name the best with the settings that were given or chosen; its name may tell what was given."""
    parts = [part for part in best.runs[0].config.methods if part.options]
    if not parts or (not chosen and all(f"{key}=" in best.name for part in parts for key in part.options)):
        return best.name
    alone = len(best.runs[0].config.methods) == 1
    return f"{best.name} with {parts[0].written_options if alone else describe(parts)}"


def _references(analysis: Analysis, best: Contender) -> list[tuple[Contrast, str]]:
    """What the best is held against: doing nothing, or else the next best; and training from scratch."""
    first = (_against(analysis, best, "vanilla"), "doing nothing")
    if first[0] is None and analysis.rivals:
        rival, contrast = next(iter(analysis.rivals.items()))
        first = (contrast, f"the next best ({rival})")
    named = (first, (_against(analysis, best, "fresh"), "training from scratch"))
    return [(contrast, reference) for contrast, reference in named if contrast is not None]


def _above(references: Sequence[tuple[Contrast, str]], headline: str) -> str:
    """Say how far above or below its references the best is."""
    parts = []
    for contrast, reference in references:
        mean = contrast.difference.interval.mean
        gap = f"{size(mean, headline)} {'above' if mean > 0 else 'below'}" if mean else "as good as"
        parts.append(f"{gap} {reference}")
    return " and ".join(parts)


def _nothing_yet(analysis: Analysis) -> Answer:
    runs = analysis.comparison.runs
    choosing = [run for run in analysis.comparison.trials if run.config.purpose == "selection"]
    under_way = [run for run in runs if run.status == "unfinished"]
    diverged = [contender.name for contender in analysis.comparison.contenders if contender.diverged]
    if under_way:
        furthest = max(run.progress for run in under_way)
        finished = any(run.status == "finished" for run in runs)
        verdict = "No method can be judged yet." if finished else "No run has finished yet."
        reasons = [f"{count(len(under_way), 'run')} under way; the furthest is at {100 * furthest:.0f} %."]
        reasons += [f"{enumerate_names(diverged)} diverged."] if diverged else []
        return Answer(verdict, tuple(reasons), "none")
    if choosing and not runs:
        ended = sum(run.status != "unfinished" for run in choosing)
        told = f"Of {count(len(choosing), 'run')} begun for that, {ended} ended."
        return Answer("Settings are being chosen; no run that counts has begun yet.", (told,), "none")
    if diverged:
        return Answer("There is no method to recommend.", (f"{enumerate_names(diverged)} diverged.",), "none")
    lacking = sum(run.status == "finished" and analysis.headline not in run.result for run in runs)
    if lacking:
        told = f"{count(lacking, 'run')} finished without a finite {name_of(analysis.headline)}."
        return Answer("There is nothing to judge methods by.", (told,), "none")
    return Answer("There is no finished run of a method to compare.", (), "none")


def _difference_sentence(analysis: Analysis, best: Contender) -> str:
    """Say how sure the differences to the references are."""
    references = _references(analysis, best)
    parts, paired = [], True
    for contrast, reference in references:
        if not (ends := span(contrast.difference.interval, analysis.headline, signed=True)):
            continue
        told = "" if contrast.distinguishable else ": not distinguishable"
        if not contrast.difference.paired:
            paired, told = False, f"{told}, over different seeds"
        parts.append(
            f"{change(contrast.difference.interval.mean, analysis.headline)} against {reference} "
            f"(95 % interval {ends}; {probability(contrast.p)}{told})"
        )
    if not parts:
        return ""
    families = dict.fromkeys(contrast.family for contrast, _ in references)
    comparisons = " and ".join(map(str, families))
    corrected = f" p-values are corrected for {comparisons} comparisons." if max(families) > 1 else ""
    return f"{'Seed by seed' if paired else 'Differences'}: {' and '.join(parts)}.{corrected}"


def _evidence_sentence(analysis: Analysis, best: Contender) -> str:
    """Say whether the seeds are enough to tell the best from its rivals, and if not, how many would be."""
    rivals = analysis.rivals
    if not rivals:
        return ""
    if all(contrast.difference.interval.count < 2 for contrast in rivals.values()):
        return "The evidence is not enough: one seed cannot tell an effect from chance; run at least five."
    better = [name for name, contrast in rivals.items() if analysis.wins(contrast.reversed)]
    if better:
        verb = "does" if len(better) == 1 else "do"
        return (
            f"The evidence contradicts itself: {enumerate_names(better)} {verb} better than {best.name} on the seeds "
            "that both have, though not on those that all share; finish the seeds that are missing."
        )
    tied = [name for name, contrast in rivals.items() if not analysis.wins(contrast)]
    seeds = count(min(rivals[name].difference.interval.count for name in tied or rivals), "seed")
    if not tied:
        every = "every other method that has a result" if _without_result(analysis) else "every other method"
        others = every if len(rivals) > 1 else next(iter(rivals))
        return f"The evidence is enough: {seeds} tell {best.name} from {others}."
    vanilla = analysis.comparison.baseline("vanilla")
    rival = vanilla.name if vanilla and vanilla.name in tied else tied[0]
    would = _what_would(rivals[rival], rival, alone=len(tied) == 1)
    return f"{seeds} cannot tell {best.name} from {enumerate_names(tied)}; {would}."


def _what_would(contrast: Contrast, rival: str, *, alone: bool) -> str:
    """Say how many seeds would tell the best from a rival."""
    gap = contrast.difference
    if gap.interval.mean == 0:
        return f"{rival} has the very same mean"
    if not gap.paired:
        return f"runs of {rival} with the same seeds would tell more"
    needed = seeds_needed(gap, contrast.family)
    if needed is None:
        return f"not even {MANY_SEEDS} would tell it from {rival} if the difference is as small as it looks"
    would = "would" if alone else f"would tell it from {rival}"
    sure = f"{100 * POWER:.0f} % power, if the difference is as large as it looks"
    if gap.scatter == 0:
        sure = "by the differences' signs alone, if all stay alike"
    return f"about {max(1, needed - gap.interval.count)} more {would} ({sure})"


def _ranking_sentence(analysis: Analysis) -> str:
    """Say on which seeds the candidates were ranked, if they do not all have the same."""
    shared = analysis.shared_seeds
    if not analysis.uneven:
        return ""
    if not shared:
        return "There is no seed that all share: each is ranked by the seeds it has."
    return f"Ranked on the {count(len(shared), 'seed')} that all share; the table's means are over all that each has."


_FITTED = "final_train_accuracy"
_LEARNT = 0.7
"""Below this part of the training examples, what is compared may be how fast methods learn, not what they reach."""


def _caveats(analysis: Analysis, best: Contender) -> list[str]:
    comparison = analysis.comparison
    found = list(comparison.mixed)
    fitted = [fmean(parts.values()) for each in comparison.contenders if (parts := each.values(_FITTED))]
    if fitted and max(fitted) < _LEARNT:
        found.append(
            f"At the end even the best has learned only {100 * max(fitted):.0f} % of its training examples: more "
            "epochs, or a smaller training.batch_size, may change the order."
        )
    seeds = len(best.values(analysis.headline))
    if 2 <= seeds <= FEW_SEEDS:
        found.append(
            f"With {seeds} seeds an interval is hardly wider than the seeds' own range and holds the true mean "
            f"in about {math.floor(100 - 100 * 2.0 ** (1 - seeds))} % of cases, not 95 %."
        )
    found += [
        f"{contender.name} diverged on {contender.diverged} of {count(len(contender.runs), 'seed')} "
        "and is not considered."
        for contender in comparison.contenders
        if contender.diverged
    ]
    for contender in comparison.contenders:
        if failed := contender.count("failed"):
            found.append(f"{contender.name} failed on {failed} of {count(len(contender.runs), 'seed')}: not counted.")
        if lacking := contender.count("finished") - len(contender.values(analysis.headline)):
            found.append(
                f"{contender.name} finished {count(lacking, 'seed')} without a finite number to judge by: not counted."
            )
    unfinished = sum(run.status == "unfinished" for run in comparison.runs)
    if unfinished:
        found.append(f"{unfinished} of {len(comparison.runs)} runs are not finished: this may change.")
    if comparison.not_begun:
        found.append(f"{count(len(comparison.not_begun), 'run')} that the recipe asks for have not begun.")
    found += [sentence(choice["told"]) for choice in comparison.choices.values() if is_tied(choice)]
    if comparison.selection.get("on") == "test":
        found.append("Settings were chosen on the test data itself, as the sources do: optimistic.")
    return found
