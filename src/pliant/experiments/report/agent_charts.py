"""Charts of agents' results: interquartile mean, probability of improvement, performance profile."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from pliant.experiments.report.aggregates import (
    bootstrap,
    interquartile_mean,
    performance_profile,
    probability_of_improvement,
    spread_thresholds,
)
from pliant.experiments.report.analysis import Analysis
from pliant.experiments.report.chart_style import Series
from pliant.experiments.report.figures import Figure, Table, lines
from pliant.experiments.report.formatting import name_of, number, span
from pliant.experiments.report.histories import Curve
from pliant.experiments.report.result_charts import dot_plot
from pliant.experiments.report.statistics import Floats, Interval


def aggregate_figures(analysis: Analysis, series: Sequence[Series]) -> list[Figure]:
    """Draw interquartile means, probabilities of improvement over plain training, and the performance profile."""
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
    return [*figures, _profile(scores, series, shown)]


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
    chart = dot_plot(summary, [], series, "~g", zero=zero)
    return Figure(name, title, note, chart, Table(["method", "estimate", "95 % interval"], table))


def _profile(scores: dict[str, Floats], series: Sequence[Series], shown: str) -> Figure:
    thresholds = spread_thresholds(list(scores.values()))
    places = np.zeros(len(thresholds), dtype=np.int64)
    curves, table = {}, []
    for each in (each for each in series if each.name in scores):
        above = performance_profile(scores[each.name], thresholds)
        unknown = np.full_like(above, np.nan)
        curves[each.key] = Curve(thresholds, places, places, above, unknown, unknown)
        table.append([each.name, *(f"{share:.2f}" for share in above[:: len(above) // 5])])
    heads = [number(threshold, "return") for threshold in thresholds[:: len(thresholds) // 5]]
    return Figure(
        "performance_profile",
        "Performance profile",
        f"The fraction of seeds whose {shown} exceeds a value.",
        lines(curves, series, x_title=shown, y_title="fraction of seeds", metric="fraction"),
        Table(["method", *heads], table),
    )
