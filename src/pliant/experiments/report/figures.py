"""Figures, the files they are saved to, and the parts of charts: data, axes, bands, labels at the ends of lines."""

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import vl_convert

from pliant._files import write_atomically
from pliant.experiments.report.chart_style import Series, print_config
from pliant.experiments.report.formatting import is_share, limits, number
from pliant.experiments.report.histories import Curve, Histories, average, gather
from pliant.experiments.report.statistics import ANYTHING

HEIGHT = 300
WIDTH = 640
"""Size of a saved figure. In the page, figures take the available width."""

_LABEL_ROOM = 126
_LABEL_STEP = 14
_TABLE_ROWS = 30
_NARROW = 420
"""Below this width there is no room for labels beside the lines."""
_PIXELS = 3.0
"""PNG pixels per page pixel: about 300 dpi at the width of a column."""


@dataclass(frozen=True)
class Table:
    """The numbers behind a chart.

    Args:
        columns: The headings.
        rows: The formatted numbers; the first entry of each row is its name.
    """

    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Figure:
    """A chart with its title, note and numbers.

    Args:
        name: The file name without suffix.
        title: The title.
        note: How to read the chart; empty if the introduction of its group says it.
        chart: The chart.
        table: The numbers of the chart.
        contender: The key of the contender, if the chart shows only one.
    """

    name: str
    title: str
    note: str
    chart: alt.TopLevelMixin
    table: Table
    contender: str | None = None

    @property
    def description(self) -> str:
        """Title and note, as the alternative text of the chart."""
        return f"{self.title}. {self.note}".strip()

    def spec(self, config: dict[str, Any] | None = None, *, width: int | str = WIDTH) -> dict[str, Any]:
        """Return the Vega-Lite specification; without a `config` the page sets the style."""
        # A test validates the charts. Validation takes longer than drawing.
        spec: dict[str, Any] = self.chart.to_dict(validate=False)
        fit = {"type": "fit-x", "contains": "padding"} if width == "container" else {"type": "pad"}
        spec |= {"width": width, "autosize": fit, "description": self.description}
        return spec if config is None else spec | {"config": config}


def save_figures(
    sections: Sequence[tuple[Sequence[Figure], Sequence[Series]]], folder: Path, format: str
) -> list[Path]:
    """Draw every figure into a file.

    Args:
        sections: The figures and the series of each comparison.
        folder: The folder for the files; created if missing.
        format: png, svg or pdf.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    alike: Counter[str] = Counter()
    for place, (figures, series) in enumerate(sections, start=1):
        config = print_config(series)
        for figure in figures:
            prefix = f"{place}_" if len(sections) > 1 else ""
            stem = prefix + re.sub(r"[^\w-]+", "-", figure.name)
            alike[stem.casefold()] += 1
            again = f"-{alike[stem.casefold()]}" if alike[stem.casefold()] > 1 else ""
            path = folder / f"{stem}{again}.{format}"
            spec = figure.spec(config)
            if format == "svg":
                content = vl_convert.vegalite_to_svg(spec).encode()
            elif format == "pdf":
                content = vl_convert.vegalite_to_pdf(spec)
            else:
                content = vl_convert.vegalite_to_png(spec, scale=_PIXELS)
            write_atomically(path, content)
            files.append(path)
    return files


def average_curves(
    histories: Histories, series: Sequence[Series], name: str, points: int, *, measure: bool = False
) -> dict[str, Curve]:
    """Return the mean over seeds of a metric, by the keys of the series that have it."""
    gathered = {each.key: gather(histories.of[each.name], name, points=points, measure=measure) for each in series}
    within = ANYTHING if measure else limits(name)
    return {key: average(samples, within) for key, samples in gathered.items() if samples is not None}


def inline(columns: dict[str, str], rows: Iterable[Sequence[Any]]) -> alt.InlineData:
    """Make inline CSV data for a chart.

    Args:
        columns: The columns and their types: "number" or "string".
        rows: The values; NaN and None are missing.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_compact(value) for value in row] for row in rows)
    return alt.InlineData(values=text.getvalue(), format=alt.CsvDataFormat(type="csv", parse=columns))


def _compact(value: Any) -> Any:
    if not isinstance(value, float):
        return "" if value is None else value
    if not math.isfinite(value):
        return ""
    return int(value) if value.is_integer() else f"{value:.5g}"


def shown_parameter(series: Sequence[Series]) -> alt.Parameter:
    """Return the Vega parameter that lists the visible contenders; the page changes it."""
    return alt.param(name="shown", value=[each.key for each in series if each.shown])


def tooltip_title(name: str) -> str:
    r"""Escape a name for a tooltip: Vega-Lite writes it into an expression, and escapes its quotes only.

    Example:
        >>> print(tooltip_title("a\\b"))
        a\\b
    """
    return " ".join(name.splitlines()).replace("\\", "\\\\")  # No string of an expression may hold a line break.


IS_SHOWN = "indexof(shown, datum.key) >= 0"


def by_contender(series: Sequence[Series]) -> alt.Color:
    """Return the color channel by contender; the configuration sets the colors."""
    return alt.Color("key:N", scale=alt.Scale(domain=[each.key for each in series]), legend=None)


def by_dash(series: Sequence[Series]) -> alt.StrokeDash:
    """Return the line pattern by contender, which separates contenders of one color."""
    scale = alt.Scale(domain=[each.key for each in series], range=[list(each.dash) for each in series])
    return alt.StrokeDash("key:N", scale=scale, legend=None)


def axis_format(metric: str) -> str:
    """Return the number format of a metric's axis."""
    return "~%" if is_share(metric) else ".6~g"


def curve_rows(curves: dict[str, Curve]) -> list[list[Any]]:
    """Return the rows of a chart of curves: key, order, x, task and epoch from 1, mean, low, high."""
    return [
        [key, place, x, task + 1, epoch, mean, low, high]
        for key, curve in curves.items()
        for place, (x, task, epoch, mean, low, high) in enumerate(
            zip(
                curve.x.tolist(),
                curve.task.tolist(),
                curve.epoch.tolist(),
                curve.mean.tolist(),
                curve.low.tolist(),
                curve.high.tolist(),
                strict=True,
            )
        )
    ]


_CURVE = {
    "key": "string",
    "place": "number",
    "x": "number",
    "task": "number",
    "epoch": "number",
    "mean": "number",
    "low": "number",
    "high": "number",
}


def lines(
    curves: dict[str, Curve],
    series: Sequence[Series],
    *,
    x_title: str,
    y_title: str | None,
    metric: str,
    boundaries: Sequence[float] = (),
    zero: float | None = None,
    points: bool = False,
    labels: bool = True,
    log: bool = False,
    height: int = HEIGHT,
) -> alt.TopLevelMixin:
    """Draw curves with bands, labels at their ends, and a tooltip with all values.

    Args:
        curves: The curve of each contender, by key.
        series: The contenders' colors and line patterns.
        x_title: Title of the x axis.
        y_title: Title of the y axis.
        metric: The metric, which sets the number format.
        boundaries: The epochs at which new tasks begin.
        zero: Position of a horizontal reference line.
        points: Whether to draw a point at each value.
        labels: Whether to label the curves at their ends.
        log: Whether the y axis is logarithmic.
        height: Height of the chart.
    """
    data = inline(_CURVE, curve_rows(curves))
    edge = f"(width > {_NARROW} ? width - {_LABEL_ROOM} : width)" if labels else "width"
    x = alt.X("x:Q", title=x_title, scale=alt.Scale(range=[0, alt.ExprRef(edge)], nice=False, zero=False))
    x = x.axis(**_whole_ticks(curves), format="d")
    y = alt.Y("mean:Q", title=y_title, axis=alt.Axis(format=axis_format(metric), tickCount=5))
    ticks = _decades(curves) if log else []
    y = y.scale(type="log", nice=False).axis(values=ticks) if len(ticks) > 1 else y.scale(zero=False)
    base = alt.Chart(data).transform_filter(IS_SHOWN)
    colors, dashes = by_contender(series), by_dash(series)
    layers: list[alt.Chart] = []
    if boundaries:
        places = inline({"x": "number"}, [[x] for x in boundaries])
        layers.append(
            alt.Chart(places)
            .mark_rule(style="quiet", strokeWidth=1, strokeDash=[2, 3], opacity=0.55 if len(boundaries) < 40 else 0.2)
            .encode(x=x)
        )
    if zero is not None:
        layers.append(alt.Chart(inline({"mean": "number"}, [[zero]])).mark_rule(style="quiet").encode(y=y))
    if any(np.isfinite(curve.low).any() for curve in curves.values()):
        layers.append(
            base.transform_filter("isValid(datum.low)")
            .mark_area(opacity=0.14, line=False)
            .encode(x=x, y=alt.Y("low:Q", title=y_title), y2="high:Q", color=colors)
        )
    layers.append(base.mark_line().encode(x=x, y=y, order="place:O", color=colors, strokeDash=dashes))
    if points:
        layers.append(base.mark_point(filled=True, size=36, opacity=1).encode(x=x, y=y, color=colors))
    layers += _hover(data, series, x, metric)
    if labels:
        layers += _end_labels(curves, series, y, colors, edge, log)
    return alt.layer(*layers).add_params(shown_parameter(series)).properties(width=WIDTH, height=height)


def _hover(data: alt.InlineData, series: Sequence[Series], x: alt.X, metric: str) -> list[alt.Chart]:
    """Draw a rule at the pointer with a tooltip that lists all visible contenders."""
    nearest = alt.selection_point(
        name="hover", nearest=True, on="pointerover", clear="pointerout", fields=["x"], empty=False
    )
    form = ".2%" if is_share(metric) else ".4~g"
    tooltip = [alt.Tooltip("task:Q", title="task"), alt.Tooltip("epoch:Q", title="epoch")]
    tooltip += [alt.Tooltip(f"{each.key}:Q", title=tooltip_title(each.name), format=form) for each in series]
    rule = (
        alt.Chart(data)
        .transform_filter(IS_SHOWN)
        .transform_pivot("key", value="mean", groupby=["x", "task", "epoch"])
        .mark_rule(style="quiet", strokeWidth=1)
        .encode(x=x, tooltip=tooltip, opacity=alt.condition(nearest, alt.value(0.9), alt.value(0)))
        .add_params(nearest)
    )
    return [rule]


def _end_labels(
    curves: dict[str, Curve], series: Sequence[Series], y: alt.Y, colors: alt.Color, edge: str, log: bool
) -> list[alt.Chart]:
    """Label curves at their right ends, shifting labels down where they would overlap."""
    names = {each.key: each.name for each in series}
    ends = []
    for key, curve in curves.items():
        known = np.flatnonzero(np.isfinite(curve.mean))
        if len(known):
            bounds = [float(np.nanmin(curve.low[known], initial=curve.mean[known].min()))]
            bounds.append(float(np.nanmax(curve.high[known], initial=curve.mean[known].max())))
            ends.append([key, names[key], float(curve.x[known[-1]]), float(curve.mean[known[-1]]), *bounds])
    columns = dict.fromkeys(("key", "name"), "string") | dict.fromkeys(("x", "mean", "low", "high"), "number")
    to, back = ("log({})", "exp({})") if log else ("{}", "{}")
    step = f"datum.step * {_LABEL_STEP} / height"
    base = (
        alt.Chart(inline(columns, ends))
        .transform_filter(IS_SHOWN)
        .transform_window(place="row_number()", sort=[alt.SortField("mean", order="descending")])
        .transform_joinaggregate(total="count()", lowest="min(low)", highest="max(high)")
        .transform_filter(f"width > {_NARROW} && datum.total * {_LABEL_STEP} <= height + {_LABEL_STEP}")
        .transform_calculate(step=f"{to.format('datum.highest')} - {to.format('datum.lowest')}")
        .transform_calculate(room=f"{to.format('datum.mean')} + datum.place * {step}")
        .transform_window(room="min(room)", sort=[alt.SortField("place")], frame=[None, 0])
        .transform_calculate(
            at=back.format(
                f"max(datum.room - datum.place * {step}, "
                f"{to.format('datum.lowest')} + (datum.total - datum.place) * {step})"
            )
        )
    )
    at = y.copy()
    at.shorthand = "at:Q"
    leader = base.mark_rule(strokeWidth=0.8).encode(
        x=alt.value(alt.ExprRef("scale('x', datum.x) + 2")),
        x2=alt.value(alt.ExprRef(f"{edge} + 14")),
        y=y,
        y2="at:Q",
        color=colors,
    )
    text = base.mark_text(align="left", baseline="middle", limit=_LABEL_ROOM - 20).encode(
        x=alt.value(alt.ExprRef(f"{edge} + 18")), y=at, text="name:N", color=colors
    )
    return [leader, text]


def _decades(curves: dict[str, Curve]) -> list[float]:
    """Return ticks of a logarithmic axis: powers of ten, or 1, 2, 5 times these if the range is small."""
    means = [mean for curve in curves.values() for mean in curve.mean.tolist() if math.isfinite(mean)]
    low, high = math.floor(math.log10(min(means))), math.ceil(math.log10(max(means)))
    steps = (1, 2, 5) if high - low <= 2 else (1,)
    values = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    return [value for value in values if min(means) <= value <= max(means)]


def _whole_ticks(curves: dict[str, Curve]) -> dict[str, Any]:
    """Return ticks at whole numbers; for a short axis Vega would choose halves."""
    places = [x for curve in curves.values() for x in (curve.x.min(), curve.x.max())]
    first, last = math.ceil(min(places)), math.floor(max(places))
    return {"values": list(range(first, last + 1))} if last - first < _FEW_TICKS else {"tickCount": _FEW_TICKS}


_FEW_TICKS = 8


def curve_table(curves: dict[str, Curve], series: Sequence[Series], metric: str, what: str = "end of task") -> Table:
    """Return the means at the ends of tasks, one column per contender; of many tasks, evenly spaced ones."""
    at_end: dict[str, dict[int, float]] = {
        key: dict(zip(curve.task.tolist(), curve.mean.tolist(), strict=True)) for key, curve in curves.items()
    }
    tasks = sorted({task for ends in at_end.values() for task in ends})
    every = math.ceil(len(tasks) / _TABLE_ROWS)
    tasks = tasks[::-1][::every][::-1]
    present = [each for each in series if each.key in curves]
    return Table(
        [what, *(each.name for each in present)],
        [
            [str(task + 1), *(number(at_end[each.key].get(task, math.nan), metric) for each in present)]
            for task in tasks
        ],
    )
