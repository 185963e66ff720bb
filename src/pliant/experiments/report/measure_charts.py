"""Charts of measures: over time, their correlation with plasticity, and the growth of weights by layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt
import numpy as np

from pliant.diagnostics.measures import info, names
from pliant.experiments.report.chart_style import Series
from pliant.experiments.report.comparison import Comparison
from pliant.experiments.report.figures import (
    HEIGHT,
    WIDTH,
    Figure,
    Table,
    average_curves,
    curve_table,
    inline,
    lines,
)
from pliant.experiments.report.formatting import name_of
from pliant.experiments.report.histories import Curve, Histories, History, at_task_ends, gather
from pliant.experiments.report.statistics import Floats, Interval, interval, rank_correlation

_POINTS = 120
_TASKS_FOR_TREND = 5
"""With at least this many tasks, measures are correlated with plasticity within each run."""
_DEPTH = alt.SchemeParams(name="viridis", extent=[0.3, 0.75])
"""Blue for the first layer to green for the last, visible on light and dark backgrounds."""
_NORMS = ("weight_growth", "weight_l2")
"""Measures of weight norms; the first recorded measure is used."""


def measures_over_time(histories: Histories, series: Sequence[Series]) -> list[Figure]:
    """Draw every measure of the whole network over the stream."""
    figures = []
    for name in [name for name in histories.measures if "/" not in name]:
        curves = average_curves(histories, series, name, _POINTS, measure=True)
        if not curves:
            continue
        title = name_of(name).capitalize()
        chart = lines(
            curves,
            series,
            x_title=histories.x_title,
            y_title=None,
            metric=name,
            boundaries=histories.boundaries if histories.tasks <= 40 else (),
            points=all(len(curve.x) < 3 for curve in curves.values()),
            labels=False,
            log=_spans_decades(curves),
            height=HEIGHT // 2,
        )
        measure = name.partition(" (")[0]  # An agent's measures name their network in parentheses.
        note = info(measure).definition if measure in names() else ""
        figures.append(Figure(f"measure_{name}", title, note, chart, curve_table(curves, series, name, "last in task")))
    return figures


def _spans_decades(curves: dict[str, Curve]) -> bool:
    """Return whether all values are positive and span more than two decades."""
    low = min(float(np.nanmin(curve.mean)) for curve in curves.values())
    high = max(float(np.nanmax(curve.mean)) for curve in curves.values())
    return low > 0 and high / low > 100


@dataclass(frozen=True)
class Association:
    """The rank correlation of a measure with plasticity.

    Args:
        measure: The measure.
        estimate: Spearman's ρ: the mean over runs with its interval, or a single number across runs.
        within: Whether ρ was computed within each run, over its tasks.
    """

    measure: str
    estimate: Interval
    within: bool


def associations(comparison: Comparison, histories: Histories) -> list[Association]:
    """Rank-correlate every measure with plasticity, the strongest first.

    Within each run: the measure at the start of a task with the result at its end, over tasks. If tasks differ in
    difficulty, the result is taken relative to the fresh network of the same seed. With fewer than five tasks, or
    without a fresh network: the last value of the measure with the last result, over runs.
    """
    metric = comparison.metric
    fresh = None if comparison.tasks_alike else comparison.baseline("fresh")
    hardness = (
        {history.seed: at_task_ends([history], metric)[0] for history in histories.of[fresh.name]} if fresh else {}
    )
    within = histories.tasks >= _TASKS_FOR_TREND and (comparison.tasks_alike or bool(hardness))
    past = [c for c in comparison.contenders if c.role != "fresh"]
    found = []
    for name in [name for name in histories.measures if "/" not in name]:
        if within:
            rhos = [
                rho
                for contender in past
                for history in histories.of[contender.name]
                if name in history.measures and (comparison.tasks_alike or history.seed in hardness)
                if not math.isnan(rho := _within_run(history, name, metric, hardness.get(history.seed)))
            ]
            if rhos:
                found.append(Association(name, interval(rhos), True))
        else:
            pairs = [pair for contender in past for pair in _last_values(histories.of[contender.name], name, metric)]
            rho = rank_correlation([x for x, _ in pairs], [y for _, y in pairs])
            if not math.isnan(rho):
                found.append(Association(name, Interval(rho, math.nan, math.nan, len(pairs)), False))
    return sorted(found, key=lambda association: -abs(association.estimate.mean))


def _within_run(history: History, name: str, metric: str, expected: Floats | None) -> float:
    column = history.measures[name]
    starts: dict[int, float] = {}
    for task, value in zip(history.task.tolist(), column.tolist(), strict=True):
        if math.isfinite(value):
            starts.setdefault(task, value)
    ends = at_task_ends([history], metric)[0]
    if expected is not None:
        ends = ends[: len(expected)] - expected[: len(ends)]
    tasks = [task for task in starts if task < len(ends)]
    return rank_correlation([starts[task] for task in tasks], [float(ends[task]) for task in tasks])


def _last_values(histories: Sequence[History], name: str, metric: str) -> list[tuple[float, float]]:
    pairs = []
    for history in histories:
        if name in history.measures and metric in history.values:
            values, results = history.measures[name], history.values[metric]
            known, ended = np.flatnonzero(np.isfinite(values)), np.flatnonzero(np.isfinite(results))
            pairs.append((float(values[known[-1]]), float(results[ended[-1]])))
    return pairs


def association_figure(found: Sequence[Association]) -> Figure | None:
    """Draw the rank correlation of every measure with plasticity."""
    if not found:
        return None
    names = [name_of(each.measure) for each in found]
    estimates = [each.estimate for each in found]
    rows = [[name, e.mean, e.low, e.high, e.count] for name, e in zip(names, estimates, strict=True)]
    columns = {"name": "string"} | dict.fromkeys(("rho", "low", "high", "count"), "number")
    base = alt.Chart(inline(columns, rows))
    y = alt.Y("name:N", sort=names, title=None, axis=alt.Axis(domain=False, ticks=False))
    x = alt.X("rho:Q", title="Spearman's ρ", axis=alt.Axis(grid=True, tickCount=5)).scale(domain=[-1, 1])
    counted = "runs" if found[0].within else "pairs"
    tooltip = [
        alt.Tooltip("name:N", title="measure"),
        alt.Tooltip("rho:Q", title="ρ", format=".2f"),
        alt.Tooltip("count:Q", title=counted),
    ]
    layers = [
        alt.Chart(inline({"rho": "number"}, [[0.0]])).mark_rule(style="quiet").encode(x=x),
        base.mark_point(style="quiet", filled=True, size=80, opacity=1).encode(x=x, y=y, tooltip=tooltip),
    ]
    if found[0].within:
        layers.append(base.mark_rule(style="quiet", strokeWidth=2).encode(x=alt.X("low:Q"), x2="high:Q", y=y))
    chart = alt.layer(*layers).properties(width=WIDTH, height=24 * len(rows))
    note = (
        "Within each run, over tasks: the measure at the start of a task against the result at its end (relative to a "
        "fresh network if tasks differ in difficulty). Dots are means over runs, bars 95 % intervals. A measure near 0 "
        "does not predict the result."
        if found[0].within
        else "Across runs of all methods: the last value of the measure against the result, because there are few "
        "tasks or they differ in difficulty. This also reflects other differences between the methods."
    )
    table = [
        [name, f"{e.mean:+.2f}", "" if math.isnan(e.low) else f"{e.low:+.2f} to {e.high:+.2f}", str(e.count)]
        for name, e in zip(names, estimates, strict=True)
    ]
    return Figure(
        "associations",
        "Rank correlation of measures with plasticity",
        note,
        chart,
        Table(["measure", "ρ", "95 % interval", counted], table),
    )


def layer_growth(comparison: Comparison, histories: Histories, series: Sequence[Series]) -> list[Figure]:
    """Draw the growth of each layer's weight norm: one chart per contender, one line per layer."""
    from_start = all(run.config.reference == "initial" for run in comparison.runs)
    usable = _NORMS if from_start else _NORMS[1:]
    name = next((name for name in usable if any(m.startswith(f"{name}/") for m in histories.measures)), None)
    if name is None:
        return []
    layers = [measure for measure in histories.measures if measure.startswith(f"{name}/")]
    figures = []
    everything: list[float] = []
    panels = []
    for each in series:
        rows, table = [], []
        for depth, layer in enumerate(layers):
            samples = gather(histories.of[each.name], layer, points=_POINTS, measure=True)
            if samples is None:
                continue
            mean = np.nanmean(samples.values, axis=0)
            # Growth is the norm relative to its first positive value.
            positive = mean[np.isfinite(mean) & (mean > 0)]
            if not positive.size:
                continue
            growth = mean if name == _NORMS[0] else mean / positive[0]
            known = growth[np.isfinite(growth)]
            everything += [float(known.min()), float(known.max())]
            short = layer.partition("/")[2]
            rows += [[short, depth, x, value] for x, value in zip(samples.x.tolist(), growth.tolist(), strict=True)]
            table.append([short, f"{growth[0]:.3g}", f"{known.max():.3g}", f"{growth[-1]:.3g}"])
        if rows:
            panels.append((each, rows, table))
    for each, rows, table in panels:
        chart = _growth_chart(rows, (min(everything), max(everything)))
        figures.append(
            Figure(
                name=f"growth_{each.key}",
                title=each.name,
                note="",
                chart=chart,
                table=Table(["layer", "first", "largest", "last"], table),
                contender=each.key,
            )
        )
    return figures


def _growth_chart(rows: list[list[object]], domain: tuple[float, float]) -> alt.TopLevelMixin:
    columns = {"layer": "string", "depth": "number", "x": "number", "growth": "number"}
    log = domain[0] > 0 and domain[1] / domain[0] > 20
    chart: alt.Chart = (
        alt.Chart(inline(columns, rows))
        .mark_line(strokeWidth=1.6)
        .encode(
            x=alt.X("x:Q", title="epochs", axis=alt.Axis(format="d", tickMinStep=1)).scale(nice=False),
            y=alt.Y("growth:Q", title=None, axis=alt.Axis(format=".6~g", tickCount=4)).scale(
                domain=list(domain), type="log" if log else "linear"
            ),
            color=alt.Color("depth:Q", legend=None).scale(scheme=_DEPTH),
            detail="layer:N",
            tooltip=[
                alt.Tooltip("layer:N"),
                alt.Tooltip("x:Q", title="epochs"),
                alt.Tooltip("growth:Q", title="growth", format=".3~g"),
            ],
        )
        .properties(width=WIDTH // 2, height=HEIGHT // 2)
    )
    return chart
