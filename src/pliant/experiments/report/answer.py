"""The answer in words: which method is best, by how much, and whether the evidence is enough."""

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
from pliant.experiments.report.statistics import LEVEL, MANY_SEEDS, POWER, difference, seeds_needed
from pliant.experiments.selection import is_tied
from pliant.training import direction

Certainty = Literal["clear", "unclear", "none"]


@dataclass(frozen=True)
class Answer:
    """The answer of a comparison.

    Args:
        verdict: The answer in one sentence.
        reasons: Evidence and caveats, one sentence each.
        certainty: "clear": the evidence is enough; "unclear": it is not; "none": there is no evidence.
    """

    verdict: str
    reasons: tuple[str, ...]
    certainty: Certainty

    def __str__(self) -> str:
        return " ".join([self.verdict, *self.reasons])


def answer(analysis: Analysis) -> Answer:
    """Say which method to use, how it compares with plain training and training from scratch, and how certain it is."""
    best = analysis.best
    if best is None:
        return _nothing_yet(analysis)
    verdict, certainty = _judge(analysis, best)
    reasons = [
        _evidence_sentence(analysis, best),
        _last_task_sentence(analysis, best),
        _ranking_sentence(analysis),
        _difference_sentence(analysis, best),
        *_caveats(analysis),
    ]
    return Answer(f"{verdict} {_trend_sentence(analysis, best)}".rstrip(), tuple(filter(None, reasons)), certainty)


def _judge(analysis: Analysis, best: Contender) -> tuple[str, Certainty]:
    headline, against_plain = analysis.headline, _against(analysis, best, "vanilla")
    reached = f"{brief(analysis.score(best), headline)} {name_of(headline)}"
    others = list(analysis.rivals.values())
    all_differ = all(map(analysis.wins, others))
    lacking = bool(_without_result(analysis))
    certainty: Certainty = "clear" if all_differ and not lacking else "unclear"
    if best.role == "vanilla" and others:
        if all_differ:
            every = "every method with a result" if lacking else "every method"
            return f"Use plain training: it reaches {reached}, and {every} is worse.", certainty
        unknown = "the evidence does not show yet whether a method is better"
        return f"No method has a better mean than plain training, which reaches {reached}; {unknown}.", "unclear"
    name = f"{best.name} with {best.written_settings}" if best.written_settings else best.name
    above = _above(_references(analysis, best), headline)
    if against_plain is not None:
        if analysis.wins(against_plain):
            return f"Use {name}: {reached}, {above}.", certainty
        if surer := _better_than_plain(analysis):
            verb = "is" if len(surer) == 1 else "are"
            shown = f"only {enumerate_names(surer)} {verb} significantly better than plain training"
            return f"{name} has the best mean, {reached}, {above}, but {shown}.", "unclear"
        if against_plain.significant:
            return f"No method is significantly better than plain training. {name}: {reached}, {above}.", "unclear"
        nothing = "No method differs significantly from plain training yet"
        return f"{nothing}. {name} has the best mean: {reached}, {above}.", "unclear"
    if not others:
        result = f"{reached}, {above}" if above else reached
        return f"{name} reaches {result}; {_why_alone(analysis, best)}.", "none"
    if all_differ:
        every = "every other method with a result" if lacking else "every other method"
        return f"Use {name}: {reached}, better than {every}, {above}.", certainty
    return f"{name} has the best mean, {reached}, but does not differ significantly from others.", "unclear"


def _trend_sentence(analysis: Analysis, best: Contender) -> str:
    """Say that the best contender gets worse from task to task, if it does."""
    trend = analysis.trend(best)
    if trend is None or not trend.declining:
        return ""
    name = "Plain training" if best.role == "vanilla" else best.name
    course = " → ".join(brief(value, analysis.headline) for value in (trend.first, trend.last))
    return f"{name} is best on average, but still declining: {course} from the first to the last task."


def _last_task_sentence(analysis: Analysis, best: Contender) -> str:
    """Name a contender that is significantly better than the best on the last task."""
    metric = analysis.last_task
    if metric is None or not best.values(metric):
        return ""
    own = best.values(metric)
    ahead = {}
    for other in analysis.candidates:
        if other is not best and (values := other.values(metric)):
            gap = difference(values, own)
            if gap.p < LEVEL and direction(metric) * gap.mean > 0:
                ahead[other.name] = fmean(values.values())
    if not ahead:
        return ""
    name = max(ahead, key=lambda name: direction(metric) * ahead[name])
    return (
        f"On the last task {name} is better: {brief(ahead[name], metric)} against {brief(fmean(own.values()), metric)}."
    )


def _without_result(analysis: Analysis) -> list[str]:
    """Name the methods of the recipe without a result: not started, in progress or failed."""
    comparison = analysis.comparison
    begun = [other for other in comparison.contenders if other.role != "fresh" and not other.diverged]
    labels = {contender.label for contender in comparison.contenders}
    return [other.name for other in begun if other not in analysis.candidates] + [
        label for label in dict.fromkeys(label for label, _ in comparison.not_begun) if label not in labels
    ]


def _why_alone(analysis: Analysis, best: Contender) -> str:
    """Say why the only candidate cannot be compared."""
    others = [other for other in analysis.comparison.contenders if other is not best and other.role != "fresh"]
    for other in others:
        if other.role == "vanilla" and other.diverged:
            return f"plain training diverged on {other.diverged} of {count(len(other.runs), 'seed')}"
    if others and all(other.diverged for other in others):
        return "every method diverged" if best.role == "vanilla" else "every other method diverged"
    waiting = {label for label, _ in analysis.comparison.not_begun} - {best.name}
    if others:
        yet = " yet" if waiting or any(other.count("unfinished") for other in others) else ""
        return f"no other method has a result{yet}"
    return "no run of another method has started yet" if waiting else "there is no other method to compare it with"


def _against(analysis: Analysis, contender: Contender, role: Literal["vanilla", "fresh"]) -> Contrast | None:
    """Compare a contender with a baseline; None if the baseline diverged, since its surviving seeds are too good."""
    baseline, row = analysis.comparison.baseline(role), analysis.row(contender)
    if baseline is None or baseline.diverged:
        return None
    return row.against_vanilla if role == "vanilla" else row.against_fresh


def _better_than_plain(analysis: Analysis) -> list[str]:
    """Name the candidates that are significantly better than plain training."""
    against = {candidate.name: _against(analysis, candidate, "vanilla") for candidate in analysis.candidates}
    return [name for name, contrast in against.items() if contrast is not None and analysis.wins(contrast)]


def _references(analysis: Analysis, best: Contender) -> list[tuple[Contrast, str]]:
    """Return the references of the best contender: plain training, or else the next best; training from scratch."""
    first = (_against(analysis, best, "vanilla"), "plain training")
    if first[0] is None and analysis.rivals:
        rival, contrast = next(iter(analysis.rivals.items()))
        first = (contrast, f"the next best ({rival})")
    named = (first, (_against(analysis, best, "fresh"), "training from scratch"))
    return [(contrast, reference) for contrast, reference in named if contrast is not None]


def _above(references: Sequence[tuple[Contrast, str]], headline: str) -> str:
    """Say how far the best contender is above or below its references."""
    parts = []
    for contrast, reference in references:
        mean = contrast.difference.mean
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
        reasons = [f"{count(len(under_way), 'run')} in progress; the furthest is at {100 * furthest:.0f} %."]
        reasons += [f"{enumerate_names(diverged)} diverged."] if diverged else []
        return Answer(verdict, tuple(reasons), "none")
    if choosing and not runs:
        ended = sum(run.status != "unfinished" for run in choosing)
        progress = f"{ended} of {count(len(choosing), 'run')} started to choose them have ended."
        return Answer("Settings are still being chosen; no final run has started.", (progress,), "none")
    if diverged:
        return Answer("No method can be recommended.", (f"{enumerate_names(diverged)} diverged.",), "none")
    lacking = sum(run.status == "finished" and analysis.headline not in run.result for run in runs)
    if lacking:
        missing = f"{count(lacking, 'run')} finished without a finite {name_of(analysis.headline)}."
        return Answer("The methods cannot be compared.", (missing,), "none")
    return Answer("There is no finished run to compare.", (), "none")


def _difference_sentence(analysis: Analysis, best: Contender) -> str:
    """Give intervals and p-values of the differences to the references."""
    references = _references(analysis, best)
    parts, paired = [], True
    for contrast, reference in references:
        if math.isnan(contrast.p):
            continue
        ends = span(contrast.interval, analysis.headline, signed=True)
        within = f"95 % interval {ends}; " if ends else ""
        qualified = "" if contrast.significant else ", not significant"
        if not contrast.difference.paired:
            paired, qualified = False, f"{qualified}, over different seeds"
        parts.append(
            f"{change(contrast.difference.mean, analysis.headline)} against {reference} "
            f"({within}{probability(contrast.p)}{qualified})"
        )
    if not parts:
        return ""
    families = dict.fromkeys(contrast.family for contrast, _ in references)
    comparisons = " and ".join(map(str, families))
    corrected = f" Intervals and p-values are corrected for {comparisons} comparisons." if max(families) > 1 else ""
    return f"{'Paired by seed' if paired else 'Differences'}: {' and '.join(parts)}.{corrected}"


def _evidence_sentence(analysis: Analysis, best: Contender) -> str:
    """Say whether the seeds separate the best contender from its rivals, and if not, how many seeds would."""
    rivals = analysis.rivals
    if not rivals:
        return ""
    if all(contrast.difference.count < 2 for contrast in rivals.values()):
        return "The evidence is not enough: one seed cannot separate an effect from chance. Run at least five."
    better = [name for name, contrast in rivals.items() if analysis.wins(contrast.reversed)]
    if better:
        verb = "is" if len(better) == 1 else "are"
        return (
            f"The evidence is contradictory: {enumerate_names(better)} {verb} better than {best.name} on the seeds "
            "that both have, but not on the seeds that all methods have. Finish the missing seeds."
        )
    tied = [name for name, contrast in rivals.items() if not analysis.wins(contrast)]
    seeds = count(min(rivals[name].difference.count for name in tied or rivals), "seed")
    if not tied:
        every = "every other method with a result" if _without_result(analysis) else "every other method"
        scratch = ", leaving aside training from scratch" if analysis.comparison.baseline("fresh") else ""
        others = every + scratch if len(rivals) > 1 else next(iter(rivals))
        return f"The evidence is enough: with {seeds}, {best.name} differs significantly from {others}."
    vanilla = analysis.comparison.baseline("vanilla")
    rival = vanilla.name if vanilla and vanilla.name in tied else tied[0]
    remedy = _seeds_to_add(rivals[rival], rival)
    return f"With {seeds}, {best.name} does not differ significantly from {enumerate_names(tied)}; {remedy}."


def _seeds_to_add(contrast: Contrast, rival: str) -> str:
    """Say how many more seeds would separate the best contender from a rival."""
    gap = contrast.difference
    if gap.mean == 0:
        return f"{rival} has the same mean"
    if not gap.paired:
        return f"runs of {rival} with the same seeds would show more"
    needed = seeds_needed(gap, contrast.family)
    if needed is None:
        return f"not even {MANY_SEEDS} seeds would separate it from {rival} if the difference is as small as observed"
    condition = f"{100 * POWER:.0f} % power, if the difference is as large as observed"
    if gap.error == 0:
        condition = "by a sign test, if all differences stay equal"
    more = max(1, needed - gap.count)
    return f"about {more} more would separate it from {rival} ({condition})"


def _ranking_sentence(analysis: Analysis) -> str:
    """Say on which seeds the candidates were ranked, if their seeds differ."""
    shared = analysis.shared_seeds
    if not analysis.uneven:
        return ""
    if not shared:
        return "No seed is common to all methods: each is ranked by its own seeds."
    seeds = count(len(shared), "seed")
    return f"Methods are ranked on the {seeds} that all of them have; the table's means are over all seeds of each."


_FITTED = "final_train_accuracy"
_LEARNED = 0.7
"""Below this training accuracy, methods may differ in speed of learning rather than in what they reach."""


def _caveats(analysis: Analysis) -> list[str]:
    comparison = analysis.comparison
    found = list(comparison.mixed)
    fitted = [fmean(parts.values()) for each in comparison.contenders if (parts := each.values(_FITTED))]
    if fitted and max(fitted) < _LEARNED:
        found.append(
            f"At the end even the best method fits only {100 * max(fitted):.0f} % of its training examples: more "
            "epochs or a smaller training.batch_size may change the ranking."
        )
    found += [
        f"{contender.name} diverged on {contender.diverged} of {count(len(contender.runs), 'seed')} and is excluded."
        for contender in comparison.contenders
        if contender.diverged
    ]
    for contender in comparison.contenders:
        if failed := contender.count("failed"):
            found.append(f"{contender.name} failed on {failed} of {count(len(contender.runs), 'seed')}: excluded.")
        if lacking := contender.count("finished") - len(contender.values(analysis.headline)):
            found.append(
                f"{contender.name} finished {count(lacking, 'seed')} without a finite {name_of(analysis.headline)}: "
                "excluded."
            )
    unfinished = sum(run.status == "unfinished" for run in comparison.runs)
    if unfinished:
        found.append(f"{unfinished} of {len(comparison.runs)} runs are not finished; the answer may change.")
    if comparison.not_begun:
        found.append(f"{count(len(comparison.not_begun), 'run')} of the recipe have not started.")
    found += [sentence(choice["told"]) for choice in comparison.choices.values() if is_tied(choice)]
    if comparison.choices and comparison.untuned:
        tuned, untuned = enumerate_names(list(comparison.choices)), enumerate_names(comparison.untuned)
        found.append(f"{tuned} had settings chosen here, {untuned} not: tune all methods alike before you rank them.")
    if comparison.selection.get("on") == "test":
        found.append("Settings were chosen on the test data, as in the source: the results are optimistic.")
    return found
