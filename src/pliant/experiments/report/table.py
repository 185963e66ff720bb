"""The table of results, for all formats."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pliant.experiments.report.analysis import Analysis, Contrast, Mark, Row
from pliant.experiments.report.formatting import change, is_share, name_of, number, probability, span

_METRICS = 3
"""The number of metrics in the first table."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: The number.
        details: Its interval or test.
        mark: Whether it is the best of its column, or tied with the best.
    """

    text: str
    details: tuple[str, ...] = ()
    mark: Mark = ""


@dataclass(frozen=True)
class ResultTable:
    """A table of results.

    Args:
        columns: The headings; the first is the contender's.
        contenders: The name of each row.
        cells: The cells of each row, without the name.
        notes: The notes below the table.
        settings: The settings of the rows that have some, by name.
    """

    columns: list[str]
    contenders: list[str]
    cells: list[list[Cell]]
    notes: list[str]
    settings: dict[str, str] = field(default_factory=dict)


def result_table(analysis: Analysis) -> ResultTable:
    """Make the table of results: headline, differences, published numbers, other metrics, costs, seeds."""
    headline = analysis.headline
    rows = analysis.rows
    columns = ["method", _heading(headline)]
    makers: list[Callable[[Row], Cell]] = [lambda row: _value(row, headline)]
    first = [headline]
    if analysis.last_task is not None:
        first.append(analysis.last_task)
        columns.append(_heading(analysis.last_task))
        makers.append(partial(_value, metric=analysis.last_task))
    if any(row.against_vanilla for row in rows):
        columns.append("vs. plain training")
        makers.append(lambda row: _contrast(row.against_vanilla, headline))
    if any(row.against_fresh for row in rows):
        columns.append("vs. training from scratch")
        makers.append(lambda row: _contrast(row.against_fresh, headline))
    if any(row.published for row in rows):
        columns.append("published")
        makers.append(lambda row: _published(row, headline))
    for metric in [metric for metric in analysis.metrics if metric not in first][: _METRICS - len(first)]:
        columns.append(_heading(metric))
        makers.append(partial(_value, metric=metric))
    if any(row.cost for row in rows):
        columns.append("memory")
        makers.append(_memory)
    columns.append("seeds")
    makers.append(_seeds)
    return ResultTable(
        columns,
        [row.contender.name for row in rows],
        [[make(row) for make in makers] for row in rows],
        _notes(analysis),
        {row.contender.name: written for row in rows if (written := _settings(analysis, row))},
    )


def metric_table(analysis: Analysis) -> ResultTable | None:
    """Make the table of all metrics; None if the first table shows all of them."""
    if len(analysis.metrics) <= _METRICS:
        return None
    return ResultTable(
        ["method", *(_heading(metric) for metric in analysis.metrics)],
        [row.contender.name for row in analysis.rows],
        [[_value(row, metric) for metric in analysis.metrics] for row in analysis.rows],
        [],
    )


def _settings(analysis: Analysis, row: Row) -> str:
    """Write the settings of a row; if others were tuned, say so if it was not."""
    untuned = analysis.comparison.choices and row.contender.name in analysis.comparison.untuned
    return row.contender.written_settings + (", not tuned" if untuned else "")


def _heading(metric: str) -> str:
    return f"{name_of(metric)}, %" if is_share(metric) else name_of(metric)


def _value(row: Row, metric: str) -> Cell:
    if metric not in row.numbers:
        return Cell("–")
    estimate = row.numbers[metric]
    ends = span(estimate, metric)
    return Cell(number(estimate.mean, metric, unit=False), (ends,) if ends else (), row.marks.get(metric, ""))


def _contrast(contrast: Contrast | None, metric: str) -> Cell:
    if contrast is None:
        return Cell("")
    estimate = contrast.interval
    details = filter(None, [span(estimate, metric, signed=True), probability(contrast.p)])
    return Cell(change(estimate.mean, metric, unit=False), tuple(details))


def _published(row: Row, metric: str) -> Cell:
    if row.published is None:
        return Cell("")
    mean, spread = row.published
    return Cell(f"{number(mean, metric, unit=False)} ± {number(spread, metric, unit=False)}")


def _memory(row: Row) -> Cell:
    if row.cost is None:
        return Cell("–")
    kept = f"{row.cost.bytes / 1e6:.3g} MB"
    return Cell(kept) if math.isnan(row.cost.memory) else Cell(f"×{row.cost.memory:.2f}", (kept,))


def _seeds(row: Row) -> Cell:
    others = [f"{count} {status}" for status, count in row.counts.items() if status != "finished"]
    return Cell(str(row.counts.get("finished", 0)), tuple(others))


def _marked(analysis: Analysis, metric: str) -> bool:
    return any(metric in row.marks for row in analysis.rows)


def _notes(analysis: Analysis) -> list[str]:
    notes = ["Means over seeds with Student's 95 % intervals, which need at least three seeds."]
    contrasts = [c for row in analysis.rows for c in (row.against_vanilla, row.against_fresh) if c]
    if any(contrast.difference.paired for contrast in contrasts):
        notes.append("Differences are paired by seed and tested by paired t-tests.")
    if not all(contrast.difference.paired for contrast in contrasts):
        notes.append("With fewer than two shared seeds, differences are of means and tested by Welch's t-tests.")
    if contrasts:
        notes.append(
            "p-values and intervals of differences are corrected by Holm's procedure for the number of comparisons: "
            "an interval excludes 0 exactly if p < 0.05."
        )
    marks = {mark for row in analysis.rows for mark in row.marks.values()}
    diverged = any(row.contender.diverged for row in analysis.rows)
    if "best" in marks:
        all_seeds = " that finished all seeds" if diverged else ""
        notes.append(f"Best: significantly better than every other method{all_seeds}.")
    if "tied" in marks:
        notes.append("Tied: the best mean, and methods that do not differ significantly from it.")
    if diverged:
        notes.append(
            "Methods that diverged on a seed are not marked; their means and differences are over the other seeds."
        )
    if marks and analysis.uneven:
        notes.append("Marks use the seeds that all methods have, if there are any.")
    if len(analysis.candidates) > 1 and not all(_marked(analysis, metric) for metric in analysis.metrics[:_METRICS]):
        notes.append("In a column without marks, no method differs significantly from the best.")
    if any(row.published for row in analysis.rows):
        notes.append("Published: the source's mean and spread.")
    if any(row.cost for row in analysis.rows):
        notes.append("Memory counts weights, optimizer and method between steps, relative to plain training.")
    if analysis.comparison.untuned and not analysis.comparison.choices:
        notes.append("No method was tuned here: each ran with the settings beside its name.")
    chosen_on = {"validation": "held-out training data", "test": "the test data, so the results are optimistic"}
    if (on := analysis.comparison.selection.get("on")) in chosen_on:
        notes.append(f"Settings were chosen on {chosen_on[on]}.")
    return notes
