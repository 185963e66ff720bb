"""Forest plots: how far each statement's number lies on the claimed side, with its 95 % interval."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from benchmarks.reproduction.figures import PAPERS
from benchmarks.reproduction.kept import load_kept
from benchmarks.reproduction.results_tables import in_points, place_of
from benchmarks.reproduction.statements import (
    SECTIONS,
    Judged,
    Statement,
    claimed_range,
    describe_number,
    judge_paper,
)
from pliant.experiments.report.chart_style import LIGHT, print_config

HUES = {"supported": "#2a6f3c", "contradicted": "#b3261e", "equivalent": "#5b5f97", "underpowered": "#8a8a8a"}
SHAPES = {"supported": "circle", "contradicted": "cross", "equivalent": "square", "underpowered": "diamond"}
TICKS = [-100, -10, -1, 0, 1, 10, 100]


@dataclass(frozen=True)
class Forest:
    """A forest plot.

    Args:
        name: The name of its file.
        papers: The papers whose counted, tested statements it shows.
        main: Whether it shows the main statements alone, in one panel a paper instead of one a figure.
    """

    name: str
    papers: tuple[str, ...]
    main: bool = False


FORESTS = (
    Forest("forest", tuple(PAPERS), main=True),
    *(Forest(f"forest_{paper.lower()}", (paper,)) for paper in SECTIONS),
)


def distances(judged: Judged) -> tuple[float, float, float]:
    """Return how far the mean and the ends of its interval lie inside the claimed range, negative outside.

    Example:
        >>> distances(Judged({"recipe": "", "claimed": [-0.5, 0.5]}, "supported", (0.25, 0.25, 0.25)))
        (0.25, 0.25, 0.25)
    """
    low, high = claimed_range(judged.statement)
    found = judged.found
    assert found is not None
    inside = [min(value - low, high - value) for value in (found.mean, found.low, found.high)]
    middle = (low + high) / 2
    peak = [high - middle] if found.low < middle < found.high else []
    return inside[0], min(inside), max(inside + peak)


def find_unit(statement: Statement) -> str:
    """Return the unit of a statement's number: points for shares of examples, the agent's return, else hundredths."""
    if in_points(statement):
        return "points"
    kept = load_kept(statement["recipe"])
    name = statement.get("number", kept.headline if kept else "")
    return "return" if name.endswith(("return", "overestimation")) else "hundredths"


def make_forest(forest: Forest) -> list[dict[str, Any]]:
    """Return the rows of a forest plot, in the unit of each number."""
    rows = []
    for paper in forest.papers:
        for one in judge_paper(paper):
            if not one.counts or not one.samples or one.verdict == "untested" or one.diverged:
                continue
            if forest.main and not one.statement.get("main"):
                continue
            what = describe_number(one.statement)
            unit = find_unit(one.statement)
            factor = 1 if unit == "return" else 100
            mean, low, high = (float(f"{factor * value:.3g}") for value in distances(one))
            rows.append(
                {
                    "panel": SECTIONS[paper] if forest.main else place_of(one.statement),
                    "row": place_of(one.statement) if forest.main else what,
                    "mean": mean,
                    "low": low,
                    "high": high,
                    "unit": unit,
                    "verdict": one.verdict,
                }
            )
    return rows


def draw_forest(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make the Vega-Lite specification of a forest plot."""
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    order = list(dict.fromkeys(row["row"] for row in rows))
    scale = alt.Scale(type="symlog", constant=0.1, domain=[-150, 400], nice=False)
    axis = alt.Axis(values=TICKS, format="~f", grid=False)
    names = [name for name in HUES if any(row["verdict"] == name for row in rows)]
    hue = alt.Color(
        "verdict:N",
        scale=alt.Scale(domain=names, range=[HUES[name] for name in names]),
        legend=alt.Legend(orient="bottom", title=None, labelFontSize=12, columnPadding=24),
    )
    shape = alt.Shape("verdict:N", scale=alt.Scale(domain=names, range=[SHAPES[name] for name in names]))
    y = alt.Y(
        "row:N", sort=order, title=None, axis=alt.Axis(labelLimit=250, labelFontSize=11, ticks=False, domain=False)
    )
    base = alt.Chart().encode(y=y)
    shade = alt.Chart().mark_rect(color="#e4efe6").encode(x=alt.datum(0, type="quantitative"), x2=alt.datum(400))
    line = alt.Chart().mark_rule(color=LIGHT["ink"]).encode(x=alt.datum(0))
    span = base.mark_rule(strokeWidth=1.6, clip=True).encode(
        x=alt.X(
            "low:Q",
            scale=scale,
            axis=axis,
            title="beyond the claimed bound: points, returns, or hundredths of a measure",
        ),
        x2="high:Q",
        color=hue,
    )
    point = base.mark_point(filled=True, size=48, opacity=1, clip=True).encode(x="mean:Q", color=hue, shape=shape)
    chart = alt.layer(shade, line, span, point, data=alt.InlineData(values=list(rows))).properties(width=240)
    header = alt.Header(labelOrient="top", labelAnchor="start", labelFontWeight="bold", labelFontSize=12)
    facets = chart.properties(height=alt.Step(17)).facet(
        row=alt.Row("panel:N", sort=panels, title=None, header=header), spacing=8
    )
    spec: dict[str, Any] = facets.resolve_scale(y="independent").to_dict()
    config = print_config([])
    del config["range"]
    # Browsers set text wider than it was measured.
    return spec | {"config": config, "padding": {"left": 40, "right": 50, "top": 5, "bottom": 5}}
