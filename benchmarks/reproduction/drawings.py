"""The figures of docs/results/, over tasks, or over the epochs of a single task."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from benchmarks.reproduction.kept import FEWEST, KEPT, asks_for, estimate, find_recipe, kept_runs
from benchmarks.reproduction.numbers import end_errors, split_tasks, take_measure
from pliant.experiments.report.chart_style import LIGHT, color, look_of, print_config
from pliant.experiments.run_config import Part
from pliant.experiments.store import Run

ERROR = "train_error"
"""The training error at the end of a task."""
TEST = "test_accuracy"
"""The test accuracy after each epoch."""
SHARES = {ERROR, TEST, "feature_rank", "hessian_rank", "hessian_exact_rank", "gauss_newton_rank", "fisher_rank"}
"""Quantities in [0, 1], whose intervals are clipped to this range."""
PLAIN = "plain training"


@dataclass(frozen=True)
class Drawing:
    """A figure of small panels.

    Args:
        name: The kept experiment.
        quantities: The quantities and their names: measures, the error or, for a single task, the test accuracy.
        panel_is: Which gets one panel each, "quantity" or "label"; the other is shown by color.
        shared: Whether all panels share one scale.
        over: The x axis: "task" or, for a single task, "epoch".
        settings: For a sweep, the names of the settings in the order of each method's grid. Then each method has a
            panel with a line per setting and one for plain training, and one quantity is shown.
    """

    name: str
    quantities: dict[str, str]
    panel_is: str = "quantity"
    shared: bool = False
    over: str = "task"
    settings: tuple[str, ...] = ()


DRAWINGS = (
    Drawing("p0_fig5_balancedness", {"balancedness": "balancedness", TEST: "test accuracy"}, over="epoch"),
    Drawing(
        "p3_fig1_explanations",
        {
            ERROR: "error at the end of a task",
            "update_l1": "update norm",
            "feature_rank": "feature rank",
            "dormancy": "dormancy",
            "weight_l1": "weight norm",
            "hessian_rank": "Hessian rank",
        },
    ),
    Drawing(
        "p3_fig3_hessian_rank",
        {
            "hessian_exact_rank": "Hessian",
            "gauss_newton_rank": "Gauss–Newton",
            "fisher_rank": "Fisher",
            "hessian_rank": "empirical Fisher",
        },
        panel_is="label",
        shared=True,
    ),
    Drawing("p2_random_labels_mnist", {ERROR: "error at the end of a task"}),
    Drawing("p2_random_labels_mnist_ln", {ERROR: "error at the end of a task"}),
    Drawing(
        "p2_fig4_sensitivity_mnist",
        {ERROR: "error at the end of a task"},
        panel_is="label",
        shared=True,
        settings=("strength 0.01", "0.001", "0.0001"),
    ),
)


def read_series(run: Run, quantity: str) -> list[float]:
    """Return a quantity of a run over its tasks, or over the epochs of a single task; [] if it was not measured."""
    tasks = split_tasks(run)
    if quantity == ERROR:
        return end_errors(tasks)
    if quantity == TEST:
        return [record[TEST] for record in tasks[0]]
    return take_measure(quantity, tasks)


def make_rows(drawing: Drawing) -> list[dict[str, Any]]:
    """Average the quantities of a figure over seeds, with 95 % intervals if there are enough seeds."""
    found: dict[tuple[str, str, str, int], list[float]] = defaultdict(list)
    recipe = find_recipe(drawing.name)
    runs, _ = kept_runs(drawing.name)
    counted = [run for run in runs if run.status == "finished" and asks_for(recipe, run)]
    labels = {run.config.label for run in counted}
    grids = {entry.label: entry.variants() for entry in recipe.methods if entry.label in labels}
    for run, quantity in product(counted, drawing.quantities):
        series = list(enumerate(read_series(run, quantity), start=1))
        for label, line in find_lines(drawing, run, quantity, grids):
            for place, value in series:
                found[label, line, quantity, place].append(value)
    rows = []
    order = [entry.label for entry in recipe.methods]
    for (label, line, quantity, place), values in sorted(found.items(), key=lambda item: order.index(item[0][0])):
        mean = estimate(values)
        low, high = (mean.mean, mean.mean) if mean.count < FEWEST else (mean.low, mean.high)
        if quantity in SHARES:
            low, high = max(low, 0.0), min(high, 1.0)
        shown = {"label": label, "quantity": line, drawing.over: place}
        rows.append(
            shown | {name: float(f"{x:.4g}") for name, x in (("mean", mean.mean), ("low", low), ("high", high))}
        )
    return rows


def find_lines(
    drawing: Drawing, run: Run, quantity: str, grids: Mapping[str, Sequence[tuple[Part, ...]]]
) -> list[tuple[str, str]]:
    """Return the labels and lines of a quantity of a run; plain training is in the panel of every sweep."""
    label = run.config.label
    if not drawing.settings:
        return [(label, drawing.quantities[quantity])]
    if len(grids[label]) > 1:
        return [(label, drawing.settings[grids[label].index(run.config.methods)])]
    return [(swept, PLAIN) for swept, grid in grids.items() if len(grid) > 1]


def choose_looks(lines: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the color slot and line pattern of each line; plain training has the same in every figure."""
    methods = (look_of(place) for place in count())
    return [("vanilla", look_of(0)[1]) if line in ("vanilla", PLAIN) else next(methods) for line in lines]


def draw(drawing: Drawing, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make the Vega-Lite specification of a figure."""
    panel, line = ("quantity", "label") if drawing.panel_is == "quantity" else ("label", "quantity")
    panels, lines = (list(dict.fromkeys(row[name] for row in rows)) for name in (panel, line))
    if drawing.settings:
        lines = [*drawing.settings, PLAIN]
    legend = alt.Legend(symbolType="stroke", symbolOpacity=1, symbolStrokeWidth=2.5, orient="bottom", labelFontSize=12)
    looks = choose_looks(lines)
    hues, dashes = [color(slot, LIGHT) for slot, _ in looks], [list(dash) for _, dash in looks]
    hue = alt.Color(f"{line}:N", title=None, scale=alt.Scale(domain=lines, range=hues), legend=legend)
    dash = alt.StrokeDash(f"{line}:N", title=None, scale=alt.Scale(domain=lines, range=dashes), legend=legend)
    last = max(row[drawing.over] for row in rows)
    axis, scale = alt.Axis(tickMinStep=1, format="d"), alt.Scale(domain=[1, last], nice=False)
    x = alt.X(f"{drawing.over}:Q", title=drawing.over, axis=axis, scale=scale)
    base = alt.Chart().encode(x=x, color=hue)
    band = base.mark_area(opacity=0.14, clip=True).encode(y=alt.Y("low:Q", title=None), y2="high:Q")
    curve = base.mark_line().encode(y=alt.Y("mean:Q", title=None).scale(zero=False), strokeDash=dash)
    size = {"width": 240, "height": 150} if len(panels) > 1 else {"width": 560, "height": 240}
    chart = alt.layer(band, curve, data=alt.InlineData(values=list(rows))).properties(**size)
    facets = chart.facet(alt.Facet(f"{panel}:N", title=None, sort=panels), columns=3)
    spec: dict[str, Any] = (
        facets.resolve_scale(y="shared" if drawing.shared else "independent").resolve_axis(x="independent").to_dict()
    )
    config = print_config([])
    del config["range"]
    return spec | {"config": config | {"header": {"labelFontSize": 12, "labelAnchor": "start"}}}


def digest(rows: Sequence[dict[str, Any]]) -> str:
    """Return a digest of the numbers of a figure, which a test compares."""
    return hashlib.sha256(json.dumps(list(rows)).encode()).hexdigest()[:16]


def write_drawing(drawing: Drawing, folder: Path) -> Path:
    """Draw a figure into a file.

    Args:
        drawing: The figure.
        folder: The folder of the file.

    Returns:
        The file.
    """
    rows = make_rows(drawing)
    return write_picture(draw(drawing, rows), rows, folder / f"{drawing.name}.svg")


def write_picture(spec: dict[str, Any], rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draw a specification into a file that begins with the digest of its numbers."""
    path.write_text(f"<!-- numbers: {digest(rows)} -->\n{vl_convert.vegalite_to_svg(spec)}\n")
    return path


def known_drawings() -> list[Drawing]:
    """Return the figures with kept runs."""
    return [drawing for drawing in DRAWINGS if (KEPT / f"{drawing.name}.jsonl.gz").exists()]
