"""Charts of results: differences, learning curves, task ends, sensitivity to settings."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np

from pliant.experiments.report.analysis import Analysis
from pliant.experiments.report.chart_style import Series
from pliant.experiments.report.comparison import Comparison, Contender
from pliant.experiments.report.figures import (
    HEIGHT,
    IS_SHOWN,
    WIDTH,
    Figure,
    Table,
    average_curves,
    axis_format,
    by_contender,
    curve_table,
    inline,
    lines,
    shown_parameter,
    tooltip_title,
)
from pliant.experiments.report.formatting import change, is_share, limits, name_of, number, probability, span
from pliant.experiments.report.histories import MANY_TASKS, Curve, Histories, Samples, at_task_ends, average
from pliant.experiments.report.statistics import ANYTHING, Floats, interval
from pliant.experiments.store import Run
from pliant.training import direction

_ROWS = 16_000
"""The most points of a chart of curves; keeps the page small."""
_STEP = 26
_FIRST = ("evaluation_return", "train_return", "test_accuracy", "online_accuracy", "test_loss", "loss")
_NOT_CURVES = (
    "train_loss", "train_accuracy", "task_online_accuracy", "task_online_loss", "late_return", "task_return",
)  # fmt: skip


def differences(analysis: Analysis, series: Sequence[Series]) -> Figure | None:
    """Draw every contender's difference to plain training, or its result if there is no plain training."""
    vanilla = analysis.comparison.baseline("vanilla")
    reference = vanilla.values(analysis.headline) if vanilla else {}
    key_of = {each.name: each.key for each in series}
    summary, seeds, table = [], [], []
    for row in analysis.rows:
        values = row.contender.values(analysis.headline)
        if not values or row.contender is vanilla:
            continue
        key, name = key_of[row.contender.name], row.contender.name
        if row.against_vanilla is not None:
            estimate, p = row.against_vanilla.interval, row.against_vanilla.p
            values = {seed: value - reference[seed] for seed, value in values.items() if seed in reference}
            written = [change(estimate.mean, analysis.headline), span(estimate, analysis.headline, signed=True)]
            table.append([name, *written, probability(p)])
        else:
            estimate = row.numbers[analysis.headline]
            written = [number(estimate.mean, analysis.headline), span(estimate, analysis.headline)]
            table.append([name, *written, ""])
        summary.append([key, name, estimate.mean, estimate.low, estimate.high, *written, table[-1][-1]])
        seeds += [[key, name, value, seed] for seed, value in values.items()]
    if not summary:
        return None
    form = ("+" if reference else "") + axis_format(analysis.headline)
    chart = dot_plot(summary, seeds, series, form, zero=0.0 if reference else None)
    return Figure(
        name="differences",
        title=f"Difference to {_in_words(vanilla)}" if vanilla and reference else "Results",
        note=f"{name_of(analysis.headline).capitalize()}: dots are means, bars 95 % intervals, ticks single seeds"
        + (_NOTE_ON_DIFFERENCES.format(_in_words(vanilla)) if vanilla and reference else "."),
        chart=chart,
        table=Table(["method", "difference" if reference else "mean", "95 % interval", "p, corrected"], table),
    )


_NOTE_ON_DIFFERENCES = ", each minus {} with the same seed. A bar that crosses zero is not a significant difference."


def _in_words(baseline: Contender) -> str:
    return {"vanilla": "plain training", "continue": "continuing"}.get(baseline.name, baseline.name)


def dot_plot(
    summary: list[list[Any]],
    seeds: list[list[Any]],
    series: Sequence[Series],
    form: str,
    zero: float | None,
) -> alt.TopLevelMixin:
    """Draw one row a contender: its mean, its interval and its single seeds.

    Args:
        summary: Rows of key, name, mean, low, high, and mean, interval and test in words.
        seeds: Rows of key, name, value and seed.
        series: The contenders' colors.
        form: The number format.
        zero: Position of a vertical reference line.
    """
    names = [row[1] for row in summary]
    y = alt.Y("name:N", sort=names, title=None, axis=alt.Axis(domain=False, ticks=False, labelPadding=10))
    x = alt.X("mean:Q", title=None, axis=alt.Axis(format=form, grid=True, tickCount=6)).scale(zero=False)
    if zero is not None:
        # Differences of percentages are in points.
        label = "format(100 * datum.value, '+~g')" if "%" in form else f"format(datum.value, '{form}')"
        x = x.title("points" if "%" in form else None)
        x = x.axis(labelExpr=f"datum.value == 0 ? '0' : {label}", grid=True, tickCount=6)
    columns = dict.fromkeys(("key", "name"), "string") | dict.fromkeys(("mean", "low", "high"), "number")
    columns |= dict.fromkeys(("value", "span", "p"), "string")
    base = alt.Chart(inline(columns, summary)).transform_filter(IS_SHOWN)
    single = alt.Chart(
        inline({"key": "string", "name": "string", "mean": "number", "seed": "number"}, seeds)
    ).transform_filter(IS_SHOWN)
    tooltip = [
        alt.Tooltip("name:N", title="method"),
        alt.Tooltip("value:N", title="mean"),
        alt.Tooltip("span:N", title="95 %"),
        alt.Tooltip("p:N", title="test"),
    ]
    of_seed = [
        alt.Tooltip("name:N", title="method"),
        alt.Tooltip("seed:Q", title="seed"),
        alt.Tooltip("mean:Q", title="value", format=form.replace("~", ".2") if "%" in form else ".4~g"),
    ]
    colors = by_contender(series)
    layers = [
        single.mark_tick(thickness=1.5, size=11, opacity=0.55).encode(x=x, y=y, color=colors, tooltip=of_seed),
        base.mark_point(filled=True, size=95, opacity=1).encode(x=x, y=y, color=colors, tooltip=tooltip),
    ]
    if any(not math.isnan(row[3]) for row in summary):
        layers.insert(1, base.mark_rule(strokeWidth=2.5).encode(x=alt.X("low:Q"), x2="high:Q", y=y, color=colors))
    if zero is not None:
        layers.insert(0, alt.Chart(inline({"mean": "number"}, [[zero]])).mark_rule(style="quiet").encode(x=x))
    keys = [row[0] for row in summary]
    shown = sum(each.shown for each in series if each.key in keys)
    rows = {"step": _STEP, "keys": keys}  # The page adjusts the height to the visible rows.
    chart = alt.layer(*layers).add_params(shown_parameter(series))
    return chart.properties(width=WIDTH, height=_STEP * max(1, shown), usermeta=rows)


def learning_curves(histories: Histories, series: Sequence[Series]) -> list[Figure]:
    """Draw the metrics of every epoch over the whole stream."""
    hidden = {*_NOT_CURVES, "test_loss", "old_test_loss"} if "test_accuracy" in histories.names else set(_NOT_CURVES)
    names = [name for name in histories.names if name not in hidden]
    names.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    figures = []
    for name in names:
        budget = max(40, min(400, _ROWS // max(1, len(series))))
        curves = average_curves(histories, series, name, budget)
        if not any(len(curve.x) > 1 for curve in curves.values()):
            continue
        positive = all(np.nanmin(curve.mean) > 0 for curve in curves.values())
        figures.append(
            Figure(
                name=f"curve_{name}",
                title=name_of(name).capitalize(),
                note=_curve_note(name, histories),
                chart=lines(
                    curves,
                    series,
                    x_title=histories.x_title,
                    y_title=name_of(name),
                    metric=name,
                    boundaries=histories.boundaries if histories.tasks <= MANY_TASKS else (),
                    log=name.endswith("loss") and positive,
                ),
                table=curve_table(curves, series, name),
            )
        )
    return figures


def _curve_note(name: str, histories: Histories) -> str:
    tasks = histories.tasks
    note = "Lines are means over seeds, bands their 95 % intervals"
    if tasks > MANY_TASKS:
        return f"{note}, after the last epoch of each task."
    if tasks > 1:
        note += f"; dotted lines mark {histories.mark}"
    # Test accuracy is also measured after the methods acted on a new task, before its first step.
    drop = " A vertical drop there is the immediate cost of a method's action."
    return note + "." + (drop if tasks > 1 and name == "test_accuracy" else "")


def task_ends(comparison: Comparison, histories: Histories, series: Sequence[Series]) -> list[Figure]:
    """Draw the results at the end of each task, and their difference to a fresh network."""
    metric = comparison.metric
    if not histories.has_new_tasks:
        return []
    share = metric.endswith("accuracy")
    shown_as = metric.replace("accuracy", "error") if share else metric
    ends = {each.key: at_task_ends(histories.of[each.name], metric) for each in series}
    ends = {key: 1 - table if share else table for key, table in ends.items()}
    curves = {key: curve for key, table in ends.items() if (curve := _over_tasks(table, limits(shown_as))) is not None}
    if not curves:
        return []
    fresh, points = comparison.baseline("fresh"), histories.tasks <= 40
    figures = [
        Figure(
            name="task_ends",
            title=f"{name_of(shown_as).capitalize()} at the end of each task",
            note=_note_on_tasks(comparison.tasks_alike, direction(shown_as)) + (_NOTE_ON_FRESH if fresh else ""),
            chart=lines(curves, series, x_title="task", y_title=name_of(shown_as), metric=shown_as, points=points),
            table=curve_table(curves, series, shown_as, "task"),
        )
    ]
    gaps = _gaps_to_fresh(comparison, histories, series, ends)
    if gaps:
        figures.append(
            Figure(
                name="fresh_gap",
                title=f"{name_of(shown_as).capitalize()} minus a fresh network's",
                note=f"{'Below' if direction(shown_as) > 0 else 'Above'} the line: worse than a network trained from "
                "scratch on the same task, paired by seed.",
                chart=lines(
                    gaps, series, x_title="task", y_title="difference", metric=shown_as, zero=0.0, points=points
                ),
                table=curve_table(gaps, series, shown_as, "task"),
            )
        )
    return figures


_NOTE_ON_FRESH = " The dashed line is a network trained from scratch on each task."


def _note_on_tasks(alike: bool, better: int) -> str:
    if alike:
        moves = "falls" if better > 0 else "rises"
        return f"The line of a network that keeps its plasticity stays level; it {moves} if plasticity is lost."
    return (
        "Tasks of this stream differ in difficulty, so a line may rise or fall whether or not plasticity is lost: "
        "compare it with a fresh network's line."
    )


def _over_tasks(table: Floats, within: tuple[float, float] = ANYTHING) -> Curve | None:
    """Average a table of seeds × tasks over seeds."""
    known = np.flatnonzero(np.isfinite(table).any(axis=0))
    if len(known) == 0:
        return None
    return average(Samples((known + 1).astype(np.float64), known, np.zeros_like(known), table[:, known]), within)


def _gaps_to_fresh(
    comparison: Comparison, histories: Histories, series: Sequence[Series], ends: dict[str, Floats]
) -> dict[str, Curve]:
    """Return end-of-task values minus the values of the fresh network with the same seed."""
    fresh = comparison.baseline("fresh")
    if fresh is None:
        return {}
    key_of = {each.name: each.key for each in series}
    reference = ends[key_of[fresh.name]]
    place = {history.seed: row for row, history in enumerate(histories.of[fresh.name])}
    gaps = {}
    for contender in comparison.contenders:
        table = ends[key_of[contender.name]]
        seeds = [history.seed for history in histories.of[contender.name]]
        shared = [(row, place[seed]) for row, seed in enumerate(seeds) if seed in place]
        if contender.role == "fresh" or not shared:
            continue
        width = min(table.shape[1], reference.shape[1])
        gap = np.array([table[row, :width] - reference[other, :width] for row, other in shared])
        if (curve := _over_tasks(gap)) is not None:
            gaps[key_of[contender.name]] = curve
    return gaps


@dataclass(frozen=True)
class _Trial:
    """The scores of one value of a setting."""

    value: Any
    scores: list[float]
    settings: str


def sensitivity(comparison: Comparison, series: Sequence[Series]) -> list[Figure]:
    """Draw the results for each value of each setting, from the runs that chose the settings."""
    key_of = {each.name: each.key for each in series}
    grouped: defaultdict[str, list[Run]] = defaultdict(list)
    for run in comparison.trials:
        if comparison.headline in run.result:
            grouped[run.config.label].append(run)
    figures = []
    for label, runs in grouped.items():
        contender = next((c for c in comparison.contenders if c.label == label), None)
        if contender is None:
            continue  # Without a final run it has no color yet.
        key = key_of[contender.name]
        for setting in _varied(runs):
            trials = _best_by_value(runs, setting, comparison.headline)
            figures.append(_sensitivity_figure(comparison, series, label, key, setting, trials))
    return figures


def _options(run: Run) -> dict[str, Any]:
    several = len(run.config.methods) > 1
    return {
        f"{part.name}.{name}" if several else name: value
        for part in run.config.methods
        for name, value in part.options.items()
    }


def _varied(runs: Sequence[Run]) -> list[str]:
    values: defaultdict[str, set[str]] = defaultdict(set)
    for run in runs:
        for name, value in _options(run).items():
            values[name].add(repr(value))
    return [name for name, found in values.items() if len(found) > 1]


def _best_by_value(runs: Sequence[Run], setting: str, headline: str) -> list[_Trial]:
    """Return for each value of a setting the scores with the other settings at their best."""
    scores: defaultdict[Any, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        value = _options(run).get(setting)
        if value is not None:
            scores[value if isinstance(value, int | float) else str(value)][run.config.variant[1]].append(
                run.result[headline]
            )
    trials = []
    for value, variants in scores.items():
        settings, best = max(variants.items(), key=lambda item: direction(headline) * float(np.mean(item[1])))
        trials.append(_Trial(value, best, settings))
    return sorted(trials, key=lambda trial: (isinstance(trial.value, str), trial.value))


def _sensitivity_figure(
    comparison: Comparison, series: Sequence[Series], label: str, key: str, setting: str, trials: list[_Trial]
) -> Figure:
    metric = comparison.headline
    numeric = all(isinstance(trial.value, int | float) and not isinstance(trial.value, bool) for trial in trials)
    chosen = comparison.choices.get(label, {}).get("chosen")
    rows, table = [], []
    for trial in trials:
        estimate = interval(trial.scores, limits(metric))
        rows.append([key, str(trial.value), estimate.mean, estimate.low, estimate.high, str(trial.settings == chosen)])
        written = [number(estimate.mean, metric), span(estimate, metric)]
        table.append([f"{trial.value}", *written, "chosen" if trial.settings == chosen else ""])
    columns = {"key": "string", "value": "string", "mean": "number", "low": "number", "high": "number"}
    data = inline(columns | {"chosen": "string"}, rows)
    order = [str(trial.value) for trial in trials]
    # Evenly spaced: sweeps are logarithmic, and words have no distance.
    x = alt.X("value:O", sort=order, title=setting, axis=alt.Axis(labelAngle=0, grid=False)).scale(
        type="point", padding=0.4
    )
    y = alt.Y("mean:Q", title=None, axis=alt.Axis(format=axis_format(metric), tickCount=4))
    y = y.scale(zero=False)
    colors = by_contender(series)
    base = alt.Chart(data)
    tooltip = [
        alt.Tooltip("value:N", title=tooltip_title(setting)),
        alt.Tooltip("mean:Q", title="mean", format=".2%" if is_share(metric) else ".4~g"),
        alt.Tooltip("chosen:N"),
    ]
    filled = alt.condition("datum.chosen == 'True'", alt.value(120), alt.value(50))
    layers = [
        base.mark_point(filled=True, opacity=1).encode(x=x, y=y, color=colors, size=filled, tooltip=tooltip),
    ]
    if any(len(trial.scores) > 1 for trial in trials):
        bar = base.mark_rule(strokeWidth=1.5, opacity=0.7)
        layers.insert(0, bar.encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=colors))
    if numeric:
        layers.insert(0, base.mark_line().encode(x=x, y=y, color=colors))
    return Figure(
        name=f"sensitivity_{label}_{setting}",
        title=f"{label}: {setting}",
        note="",
        chart=alt.layer(*layers).properties(width=WIDTH // 2, height=HEIGHT // 2),
        table=Table([setting, name_of(metric), "95 % interval", ""], table),
        contender=key,
    )
