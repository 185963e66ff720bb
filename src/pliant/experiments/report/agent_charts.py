"""Charts of agents' results: interquartile mean, at the end and during training, and what else is usual for agents."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from pliant.experiments.report.aggregates import (
    bootstrap,
    bootstrap_band,
    interquartile_mean,
    performance_profile,
    probability_of_improvement,
    sample_efficiency,
    spread_thresholds,
)
from pliant.experiments.report.analysis import Analysis
from pliant.experiments.report.chart_style import Series
from pliant.experiments.report.figures import Figure, Table, axis_format, curve_table, lines
from pliant.experiments.report.formatting import name_of, number, span
from pliant.experiments.report.histories import MANY_TASKS, Curve, Histories, gather
from pliant.experiments.report.result_charts import dot_plot
from pliant.experiments.report.statistics import Floats, Interval

_RETURN = "evaluation_return"
_POINTS = 100
_DRAWS = 500
"""Draws for each point of a curve."""


def aggregate_figures(analysis: Analysis, histories: Histories, series: Sequence[Series]) -> list[Figure]:
    """Draw interquartile means at the end and during training, probabilities of improvement, performance profile."""
    scores = {
        row.contender.name: np.array(list(values.values()))[:, None]
        for row in analysis.rows
        if len(values := row.contender.values(analysis.headline)) > 1
    }
    if not scores:
        return []
    vanilla = analysis.comparison.baseline("vanilla")
    shown = name_of(analysis.headline)
    figures = [
        _dots(
            {name: bootstrap(interquartile_mean, table) for name, table in scores.items()},
            series,
            "interquartile_mean",
            f"Interquartile mean of the {shown}",
            "The mean over the middle half of the seeds.",
            analysis.headline,
        )
    ]
    if vanilla is not None and vanilla.name in scores:
        others = {name: table for name, table in scores.items() if name != vanilla.name}
        compare = partial(bootstrap, probability_of_improvement)
        if others:
            figures.append(
                _dots(
                    {name: compare(table, scores[vanilla.name]) for name, table in others.items()},
                    series,
                    "probability_of_improvement",
                    "Probability of improvement over plain training",
                    "The chance that a seed of the method does better than a seed of plain training.",
                    "probability",
                    zero=0.5,
                )
            )
    figures.append(_profile(scores, series, shown))
    curves = _efficiency_curves(histories, series)
    return [*figures, _efficiency(curves, histories, series)] if curves else figures


def _dots(
    estimates: dict[str, Interval],
    series: Sequence[Series],
    name: str,
    title: str,
    note: str,
    metric: str,
    zero: float | None = None,
) -> Figure:
    key_of = {each.name: each.key for each in series}
    ordered = sorted(estimates.items(), key=lambda pair: -pair[1].mean)
    summary, table = [], []
    for contender, estimate in ordered:
        written = [number(estimate.mean, metric), span(estimate, metric)]
        summary.append([key_of[contender], contender, estimate.mean, estimate.low, estimate.high, *written, ""])
        table.append([contender, *written])
    chart = dot_plot(summary, [], series, axis_format(metric), zero=zero)
    return Figure(name, title, note, chart, Table(["method", "estimate", "95 % interval"], table))


def _profile(scores: dict[str, Floats], series: Sequence[Series], shown: str) -> Figure:
    thresholds = spread_thresholds(list(scores.values()))
    places = np.zeros(len(thresholds), dtype=np.int64)
    curves, table = {}, []
    for each in (each for each in series if each.name in scores):
        profile = partial(performance_profile, thresholds=thresholds)
        above = profile(scores[each.name])
        curves[each.key] = Curve(thresholds, places, places, above, *_band(profile, scores[each.name]))
        table.append([each.name, *(f"{share:.2f}" for share in above[:: len(above) // 5])])
    heads = [number(threshold, "return") for threshold in thresholds[:: len(thresholds) // 5]]
    return Figure(
        "performance_profile",
        "Performance profile",
        f"The fraction of seeds whose {shown} exceeds a value.",
        lines(curves, series, x_title=shown, y_title="fraction of seeds", metric="fraction"),
        Table(["method", *heads], table),
    )


def _efficiency_curves(histories: Histories, series: Sequence[Series]) -> dict[str, Curve]:
    """Return the interquartile mean at each evaluation by key, of methods with two seeds that went to the end."""
    curves = {}
    for each in series:
        samples = gather(histories.of[each.name], _RETURN, points=_POINTS)
        if samples is None:
            continue
        table = samples.values[np.isfinite(samples.values).all(axis=1)]
        if len(table) > 1:
            middle, band = sample_efficiency(table), _band(sample_efficiency, table)
            curves[each.key] = Curve(samples.x, samples.task, samples.epoch, middle, *band)
    return curves


def _efficiency(curves: dict[str, Curve], histories: Histories, series: Sequence[Series]) -> Figure:
    boundaries = histories.boundaries if histories.tasks <= MANY_TASKS else []
    note = "The interquartile mean of the seeds' evaluations after so many environment steps"
    return Figure(
        "sample_efficiency",
        "Sample efficiency",
        note + (f"; dotted lines mark {histories.mark}." if boundaries else "."),
        lines(
            curves,
            series,
            x_title=histories.x_title,
            y_title=name_of(_RETURN),
            metric=_RETURN,
            boundaries=boundaries,
        ),
        curve_table(curves, series, _RETURN),
    )


def _band(statistic: Callable[[Floats], Floats], table: Floats) -> tuple[Floats, Floats]:
    """Return the ends of a curve's interval; NaN with two seeds, whose draws say too little."""
    if len(table) > 2:
        return bootstrap_band(statistic, table, _DRAWS)
    unknown = np.full_like(statistic(table), np.nan)
    return unknown, unknown
