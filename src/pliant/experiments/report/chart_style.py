"""Colors and line patterns of charts. A contender has the same ones in every chart.

Any two of the six hues and two grays differ by ΔE ≥ 16 in CIELAB for normal, protan, deutan and tritan vision. Each has
a contrast of at least 3:1 with its background.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pliant import _html
from pliant.experiments.report.comparison import Contender

LIGHT: dict[str, Any] = {
    **_html.LIGHT,
    "vanilla": "#2b2f36",
    "fresh": "#8b919b",
    "hues": ("#4090da", "#db735a", "#3d6921", "#7a2b93", "#988705", "#e41b6f"),
}
DARK: dict[str, Any] = {
    **_html.DARK,
    "vanilla": "#e6e8eb",
    "fresh": "#878d97",
    "hues": ("#87c0fb", "#e58234", "#9af0a4", "#9d6cdb", "#f5dd72", "#f43a5c"),
}
_DASHES = ((1, 0), (5, 2), (2, 2), (8, 2, 2, 2), (1, 3))
"""Line patterns; the next one is used when the hues run out."""
_FRESH_DASH = (4, 3)

SHOWN = 8
"""The number of contenders that charts show initially, if there are many."""


@dataclass(frozen=True)
class Series:
    """The color and line pattern of a contender.

    Args:
        key: The identifier in chart data.
        name: The displayed name.
        slot: The color: "vanilla", "fresh", or the number of a hue.
        dash: The line pattern.
        shown: Whether charts show it initially.
    """

    key: str
    name: str
    slot: str
    dash: tuple[int, ...]
    shown: bool


def assign_series(ranked: Sequence[Contender]) -> list[Series]:
    """Assign a color and a line pattern to every contender; the best get the first hues.

    Args:
        ranked: The contenders, best first.
    """
    series = []
    methods = 0
    few = len(ranked) <= SHOWN + 2
    for place, contender in enumerate(ranked):
        slot: str = contender.role
        dash: tuple[int, ...] = _DASHES[0]
        shown = True
        if contender.role == "fresh":
            dash = _FRESH_DASH
        elif contender.role == "method":
            slot, dash = look_of(methods)
            shown = few or methods < SHOWN - 2
            methods += 1
        series.append(Series(f"c{place}", contender.name, slot, dash, shown))
    return series


def look_of(place: int) -> tuple[str, tuple[int, ...]]:
    """Return the color slot and the line pattern of the n-th method."""
    return str(place % len(LIGHT["hues"])), _DASHES[place // len(LIGHT["hues"]) % len(_DASHES)]


def color(slot: str, theme: dict[str, Any]) -> str:
    """Return the color of a slot in a theme."""
    return str(theme["hues"][int(slot)] if slot.isdigit() else theme[slot])


def series_colors(theme: dict[str, Any]) -> dict[str, str]:
    """Return the colors of all slots by the names of their CSS variables."""
    slots = ("vanilla", "fresh", *map(str, range(len(theme["hues"]))))
    return {f"series-{slot}": color(slot, theme) for slot in slots}


def print_config(series: Sequence[Series]) -> dict[str, Any]:
    """Return the Vega-Lite configuration of saved figures, in the light theme."""
    return _config([color(each.slot, LIGHT) for each in series], LIGHT["ink"], LIGHT["muted"], LIGHT["line"]) | {
        "background": LIGHT["page"]
    }


def page_config(series: Sequence[Series]) -> dict[str, Any]:
    """Return the Vega-Lite configuration of the page. Colors are CSS variables, so a new theme needs no redrawing."""
    hues = [f"var(--series-{each.slot})" for each in series]
    return _config(hues, "var(--ink)", "var(--muted)", "var(--line)") | {"background": None}


def _config(category: list[str], ink: Any, muted: Any, line: Any) -> dict[str, Any]:
    return {
        "font": _html.FONT,
        "view": {"stroke": None},
        "range": {"category": category},
        "axis": {
            "domainColor": line,
            "gridColor": line,
            "gridOpacity": 0.6,
            "tickColor": line,
            "labelColor": muted,
            "labelFontSize": 11,
            "labelLimit": 220,
            "titleColor": muted,
            "titleFontSize": 11,
            "titleFontWeight": "normal",
            "titlePadding": 8,
        },
        "axisX": {"grid": False, "labelFlush": True},
        "axisY": {"domain": False, "ticks": False},
        "title": {"color": ink, "fontSize": 12, "anchor": "start", "fontWeight": 600},
        "line": {"strokeWidth": 2, "strokeJoin": "round"},
        "rule": {"color": muted},
        "text": {"fontSize": 11, "color": ink},
        "style": {"quiet": {"stroke": muted, "fill": muted}},
    }
