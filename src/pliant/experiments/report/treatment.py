"""What to do with a checkpoint: continue, apply a remedy or train from scratch; in words, a table and a page."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pliant.experiments.halving import Tried
from pliant.experiments.report.analysis import Contrast
from pliant.experiments.report.answer import Answer, Certainty
from pliant.experiments.report.comparison import Comparison, Contender
from pliant.experiments.report.document import Section
from pliant.experiments.report.formatting import change, count, enumerate_names, limits, number, probability, size, span
from pliant.experiments.report.statistics import interval, seeds_needed
from pliant.experiments.report.table import Cell, ResultTable
from pliant.experiments.store import Run

CONTINUE, SCRATCH = "continue", "train from scratch"
"""The labels of the two ways to train without a remedy."""

NEW, OLD = "final_test_accuracy", "final_old_test_accuracy"

NEGLIGIBLE = 0.01
"""If the interval of a remedy's gain ends below this accuracy, the seeds are enough to go on without it. If training
from scratch leads a remedy of the same cost by more, it is preferred."""
MUCH_CHEAPER = 0.8
"""A remedy below training from scratch is still advised if it takes less than this fraction of its time."""

Action = Literal["apply", "scratch", "continue", "none"]


@dataclass(frozen=True)
class Verdict:
    """What to do, and the tests behind it.

    Args:
        gain: The remedy minus continuing.
        lift: Training from scratch minus continuing.
        gap: The remedy minus training from scratch.
        time: The time of the remedy relative to training from scratch; NaN if unknown.
    """

    gain: Contrast
    lift: Contrast
    gap: Contrast
    time: float

    @property
    def action(self) -> Action:
        """What to do. Continuing is the default: another way must be significantly better.

        If a remedy and training from scratch are both better, the remedy is preferred, unless training from scratch
        leads it significantly or by a point, at about the same cost.
        """
        gains, lifts = (test.significant and test.difference.mean > 0 for test in (self.gain, self.lift))
        lead = -self.gap.difference.mean
        falls_short = lead > NEGLIGIBLE or (self.gap.significant and lead > 0)
        if gains and not (lifts and falls_short and not self.time < MUCH_CHEAPER):
            return "apply"
        return "scratch" if lifts else "continue"


class TreatmentSection(Section):
    """The comparison of continuing, the chosen remedy and training from scratch.

    Args:
        comparison: The runs, labeled `CONTINUE`, `SCRATCH` and with the remedy's label.
        remedy: The label of the remedy.
        tried: Every setting that was tried to choose the remedy, best first.
        times: The time of each label's training, relative to training from scratch.
        left_out: Why methods or settings were not tried, one sentence each.
        code: Python code that does what the answer says, by action.
    """

    def __init__(
        self,
        comparison: Comparison,
        remedy: str,
        tried: Sequence[Tried],
        times: Mapping[str, float],
        left_out: Sequence[str],
        code: Mapping[Action, str],
    ) -> None:
        super().__init__(comparison)
        self.remedy = remedy
        self.all_tried = list(tried)
        self.times = dict(times)
        self.left_out = list(left_out)
        self._code = dict(code)

    @cached_property
    def verdict(self) -> Verdict | None:
        """What to do; None if one of the three has no finished run."""
        rows = {row.contender.label: row for row in self.analysis.rows}
        remedy, scratch = rows.get(self.remedy), rows.get(SCRATCH)
        if remedy is None or scratch is None:
            return None
        gain, lift, gap = remedy.against_vanilla, scratch.against_vanilla, remedy.against_fresh
        if gain is None or lift is None or gap is None:
            return None
        return Verdict(gain, lift, gap, self._time(self.remedy))

    @property
    def action(self) -> Action:
        """What to do, in a word."""
        return "none" if self.verdict is None else self.verdict.action

    @property
    def code(self) -> str:
        """Python code that does what the answer says; empty without an answer."""
        return self._code.get(self.action, "")

    @cached_property
    def answer(self) -> Answer:
        """The answer in words."""
        verdict = self.verdict
        if verdict is None:
            lacking = [label for label in (CONTINUE, self.remedy, SCRATCH) if not self._values(label, NEW)]
            return Answer(f"There is no answer: {enumerate_names(lacking)} has no finished run.", (), "none")
        gain, lift, gap = (each.difference.mean for each in (verdict.gain, verdict.lift, verdict.gap))
        name = _in_words(self.remedy)
        certainty: Certainty = "clear"
        if verdict.action == "apply":
            cheap = self._cost_in_words(self.remedy, SCRATCH)
            beside = f"{_above(gap)} training from scratch{_doubt(verdict.gap)}"
            sentence = f"Apply {name} tonight: {_above(gain)} continuing, {beside}{cheap}."
        elif verdict.action == "scratch":
            worse = f"{_above(-gap)} the best remedy, {name}{_doubt(verdict.gap)}"
            cheap = self._cost_in_words(SCRATCH, CONTINUE)
            sentence = f"Train from scratch tonight: {_above(lift)} continuing{cheap}, {worse}."
        else:
            sentence = "No remedy beats continuing: go on as you do."
            if not verdict.gain.interval.high < NEGLIGIBLE:
                certainty = "unclear"
                sentence = "No remedy is shown to beat continuing: go on as you do, or add seeds to be sure."
        return Answer(sentence, tuple(filter(None, self._reasons(verdict))), certainty)

    def _reasons(self, verdict: Verdict) -> list[str]:
        seeds = verdict.gain.difference.count
        rounds = max((len(each.scores) for each in self.all_tried), default=0)
        how = f"chosen from {count(len(self.all_tried), 'setting')} in {count(rounds, 'round')} on held-out data"
        if not rounds:
            how = "the only setting that was tried"
        return [
            f"The best remedy is {_in_words(self.remedy)}, {how}; it was then tested on {count(seeds, 'other seed')} "
            "and on test data that chose nothing.",
            f"Paired by seed: {_contrast_in_words(verdict.gain, 'the remedy against continuing')}; "
            f"{_contrast_in_words(verdict.lift, 'training from scratch against continuing')}.",
            self._exclusion(verdict),
            self._speed_sentence(),
            self._forgetting_sentence(),
            *self.left_out,
        ]

    def _exclusion(self, verdict: Verdict) -> str:
        high = verdict.gain.interval.high
        if verdict.action != "continue" or math.isnan(high):
            return ""
        if high < NEGLIGIBLE:
            return f"A gain of more than {size(max(high, 0.0), NEW)} is unlikely."
        needed = (
            seeds_needed(verdict.gain.difference, verdict.gain.family) if verdict.gain.difference.mean > 0 else None
        )
        hint = (
            f"about {needed} seeds (--seeds) would show it if it is as large as observed" if needed else "add --seeds"
        )
        return f"These seeds cannot exclude a gain of up to {size(high, NEW)}: {hint}."

    def _speed_sentence(self) -> str:
        """Say after how many epochs the network reaches what training from scratch ends with."""
        label = self.remedy if self.action == "apply" else CONTINUE
        level = statistics.fmean(self._values(SCRATCH, NEW).values())
        curve = mean_curve([run.records for run in self._runs(label)])
        reached = next((epoch for epoch, accuracy in enumerate(curve) if accuracy >= level), None)
        who, all_epochs = "The remedy" if label == self.remedy else "Continuing", count(len(curve) - 1, "epoch")
        if reached is None:
            return f"{who} does not reach the mean accuracy of training from scratch within {all_epochs}."
        when = "before any training" if reached == 0 else f"after {reached} of {all_epochs}"
        return f"{who} reaches the mean accuracy that training from scratch ends with {when}."

    def _forgetting_sentence(self) -> str:
        before = self._before(OLD)
        if math.isnan(before):
            return ""
        ends = [
            f"{_in_words(label)} {number(statistics.fmean(values.values()), OLD)}"
            for label in (CONTINUE, self.remedy, SCRATCH)
            if (values := self._values(label, OLD))
        ]
        return f"Accuracy on the old data: {number(before, OLD)} in the checkpoint; afterwards {', '.join(ends)}."

    @cached_property
    def table(self) -> ResultTable:
        """The three ways to train: accuracy on new and old data, differences, time."""
        remembers = any(self._values(label, OLD) for label in (CONTINUE, self.remedy, SCRATCH))
        columns = ["", "new data, %", "vs. continuing", "vs. scratch", *(["old data, %"] if remembers else [])]
        columns.append("time vs. scratch")
        tests = self._tests()
        names, cells = [], []
        for row in self.analysis.rows:
            label = row.contender.label
            names.append(row.contender.name)
            line = [self._accuracy(label, NEW), tests.get((label, CONTINUE), Cell(""))]
            line.append(tests.get((label, SCRATCH), Cell("")))
            if remembers:
                line.append(self._accuracy(label, OLD))
            cells.append([*line, _ratio(self._time(label))])
        notes = [
            "Means over seeds with 95 % intervals. Differences are paired by seed; p-values are from paired t-tests. "
            "They and the intervals of differences are corrected by Holm's procedure for the number of comparisons.",
            "Time is training time without evaluations, relative to training from scratch. What a method "
            "adds was measured on steps with and without it in alternation.",
        ]
        before = {"new": self._before(NEW), "old": self._before(OLD)}
        known = [f"{number(value, NEW)} on the {which} data" for which, value in before.items() if value == value]
        if known:
            notes.append(f"Before any training the checkpoint has {' and '.join(known)}.")
        return ResultTable(columns, names, cells, notes)

    def rows(self) -> list[dict[str, str | float]]:
        """Return the numbers of the table: one row for each of the three."""

        def mean(values: Mapping[int, float]) -> float:
            return statistics.fmean(values.values()) if values else math.nan

        return [
            {
                "method": row.contender.label,
                "new_accuracy": mean(self._values(row.contender.label, NEW)),
                "old_accuracy": mean(self._values(row.contender.label, OLD)),
                "time_to_scratch": self._time(row.contender.label),
                "seeds": len(self._values(row.contender.label, NEW)),
            }
            for row in self.analysis.rows
        ]

    @property
    def metrics(self) -> None:
        """The table shows all that matters here."""
        return

    @property
    def tried(self) -> ResultTable | None:
        """Every setting with its results on held-out data; None if nothing was to be chosen."""
        if not self.all_tried or not self.all_tried[0].scores:
            return None
        columns = ["setting", "held-out accuracy, %", "seeds", "vs. continuing"]
        old = any(self._trial_values(each.label, OLD) for each in self.all_tried)
        columns += ["old data, %"] if old else []
        continued = self._trial_values(CONTINUE, NEW)
        cells = []
        for each in self.all_tried:
            values = self._trial_values(each.label, NEW)
            shared = [values[seed] - continued[seed] for seed in values if seed in continued]
            line = [
                Cell(number(each.mean, NEW, unit=False) if math.isfinite(each.mean) else "did not finish"),
                Cell(str(len(each.scores))),
                Cell(change(statistics.fmean(shared), NEW, unit=False) if shared else "–"),
            ]
            forgot = self._trial_values(each.label, OLD)
            if old:
                line.append(Cell(number(statistics.fmean(forgot.values()), OLD, unit=False) if forgot else "–"))
            cells.append(line)
        notes = [
            "Successive halving: each round gives every setting one more seed and drops the worse half. Every run has "
            "its full length. Differences to continuing are over the same seeds."
        ]
        return ResultTable(columns, [each.label for each in self.all_tried], cells, notes)

    @property
    def facts(self) -> list[str]:
        """The numbers of settings, seeds and runs."""
        runs = [*self.comparison.runs, *self.comparison.trials]
        finished = sum(run.status == "finished" for run in runs)
        return [
            f"{count(len(self.all_tried), 'setting')} tried",
            count(len({run.config.seed for run in self.comparison.runs}), "seed") + " to test",
            f"{finished} of {count(len(runs), 'run')} finished",
        ]

    def _tests(self) -> dict[tuple[str, str], Cell]:
        if self.verdict is None:
            return {}
        pairs = {
            (self.remedy, CONTINUE): self.verdict.gain,
            (SCRATCH, CONTINUE): self.verdict.lift,
            (self.remedy, SCRATCH): self.verdict.gap,
            (CONTINUE, SCRATCH): self.verdict.lift.reversed,
        }
        return {pair: _difference_cell(contrast) for pair, contrast in pairs.items()}

    def _accuracy(self, label: str, metric: str) -> Cell:
        values = self._values(label, metric)
        if not values:
            return Cell("–")
        estimate = interval(list(values.values()), limits(metric))
        ends = span(estimate, metric)
        return Cell(number(estimate.mean, metric, unit=False), (ends,) if ends else ())

    def _contender(self, label: str) -> Contender | None:
        return next((each for each in self.comparison.contenders if each.label == label), None)

    def _runs(self, label: str) -> list[Run]:
        contender = self._contender(label)
        return [run for run in contender.runs if run.status == "finished"] if contender else []

    def _values(self, label: str, metric: str) -> dict[int, float]:
        contender = self._contender(label)
        return contender.values(metric) if contender else {}

    def _trial_values(self, label: str, metric: str) -> dict[int, float]:
        trials = (run for run in self.comparison.trials if run.config.label == label and metric in run.result)
        return {run.config.seed: run.result[metric] for run in trials}

    def _before(self, metric: str) -> float:
        """Return the accuracy of the checkpoint before any training; NaN if unknown."""
        name = f"entry_{metric.removeprefix('final_')}"
        runs = self._runs(CONTINUE)
        return float(runs[0].records[0].get(name, math.nan)) if runs and runs[0].records else math.nan

    def _time(self, label: str, relative_to: str = SCRATCH) -> float:
        """Return the time of a label relative to another; NaN if unknown."""
        return self.times.get(label, math.nan) / self.times.get(relative_to, math.nan)

    def _cost_in_words(self, label: str, relative_to: str) -> str:
        time = self._time(label, relative_to)
        if math.isnan(time) or MUCH_CHEAPER <= time <= 1 / MUCH_CHEAPER:
            return "" if math.isnan(time) else " at about the same cost"
        return f" at {100 * time:.0f} % of its cost" if time < 1 else f" at {time:.1f} times its cost"


def _in_words(label: str) -> str:
    """Write a setting for a sentence.

    Example:
        >>> _in_words("shrink_perturb(lam=0.4)"), _in_words("continue")
        ('shrink_perturb (lam=0.4)', 'continuing')
    """
    return {CONTINUE: "continuing", SCRATCH: "training from scratch"}.get(label, label.replace("(", " (", 1))


def _above(gap: float) -> str:
    """Write a difference as a position: "+2.1 points over", "0.3 points below", "level with"."""
    if round(100 * gap, 2) == 0:
        return "level with"
    return f"+{size(gap, NEW)} over" if gap > 0 else f"{size(gap, NEW)} below"


def _doubt(contrast: Contrast) -> str:
    return "" if contrast.significant or round(100 * contrast.difference.mean, 2) == 0 else " (not significant)"


def _contrast_in_words(contrast: Contrast, what: str) -> str:
    ends = span(contrast.interval, NEW, signed=True)
    known = "; ".join(filter(None, [ends and f"95 % interval {ends}", probability(contrast.p)]))
    return f"{what} {change(contrast.difference.mean, NEW)} ({known})"


def _difference_cell(contrast: Contrast) -> Cell:
    details = filter(None, [span(contrast.interval, NEW, signed=True), probability(contrast.p)])
    return Cell(change(contrast.difference.mean, NEW, unit=False), tuple(details))


def _ratio(time: float) -> Cell:
    return Cell("–" if math.isnan(time) else f"×{time:.2f}")


def mean_curve(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[float]:
    """Return the mean test accuracy over runs, before the first epoch and after each; NaN where it was not evaluated.

    Example:
        >>> mean_curve([[{"entry_test_accuracy": 0.25, "test_accuracy": 0.5}, {"test_accuracy": 1.0}]])
        [0.25, 0.5, 1.0]
    """
    curves = [
        [run[0].get("entry_test_accuracy", math.nan), *(record.get("test_accuracy", math.nan) for record in run)]
        for run in runs
        if run
    ]
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]
