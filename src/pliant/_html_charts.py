"""Charts for pages, drawn as HTML and SVG: learning curves, and bars. Colors follow the page's theme."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pliant._html import escape


@dataclass(frozen=True)
class Curves:
    """Several curves of one kind, such as one for each seed.

    Attributes:
        name: What they show.
        color: The color, as CSS.
        values: One sequence of heights for each curve.
        dash: The pattern of their lines, as in SVG.
    """

    name: str
    color: str
    values: Sequence[Sequence[float]]
    dash: str = "none"


def render_curves(label: str, places: Sequence[float], groups: Sequence[Curves], x_title: str) -> str:
    """Draw groups of curves over common places: each curve thin, the mean of each group thick.

    Args:
        label: What the chart shows, for screen readers.
        places: The x of each value.
        groups: The curves.
        x_title: What the x axis shows.
    """
    heights = [value for group in groups for curve in group.values for value in curve if math.isfinite(value)]
    ticks = find_ticks(min(heights), max(heights))
    low, high = min(ticks[0], *heights), max(ticks[-1], *heights)

    def line(curve: Sequence[float], width: float, opacity: float, group: Curves) -> str:
        points = " ".join(
            f"{100 * (x - places[0]) / (places[-1] - places[0]):.2f},{100 * (high - max(y, low)) / (high - low):.2f}"
            for x, y in zip(places, curve, strict=True)
        )
        return (
            f'<polyline points="{points}" stroke="{group.color}" stroke-width="{width}" stroke-opacity="{opacity}" '
            f'stroke-dasharray="{group.dash}"/>'
        )

    levels = {tick: 100 * (high - tick) / (high - low) for tick in ticks}
    grid = "".join(f'<line x1="0" x2="100" y1="{y:.2f}" y2="{y:.2f}" stroke="var(--faint)"/>' for y in levels.values())
    thin = "".join(line(curve, 1, 0.3, group) for group in groups for curve in group.values)
    means = [[math.fsum(column) / len(column) for column in zip(*group.values, strict=True)] for group in groups]
    thick = "".join(line(mean, 2.5, 1, group) for mean, group in zip(means, groups, strict=True))
    y_labels = "".join(f'<span class="tick y" style="top:{y:.2f}%">{tick:g}</span>' for tick, y in levels.items())
    middle = (places[0] + places[-1]) / 2
    x_labels = "".join(
        f'<span class="tick x" style="left:{left}%;transform:translateX(-{left}%)">{text}</span>'
        for left, text in ((0, f"{places[0]:g}"), (50, f"{middle:g} {escape(x_title)}"), (100, f"{places[-1]:g}"))
    )
    return (
        f"{_render_legend(groups)}\n"
        f'<div class="plot" role="img" aria-label="{escape(label)}"><svg viewBox="0 0 100 100" '
        f'preserveAspectRatio="none" aria-hidden="true">{grid}{thin}{thick}</svg>{y_labels}{x_labels}</div>'
    )


def _render_legend(groups: Sequence[Curves]) -> str:
    keys = "".join(
        f'<span class="series"><svg class="swatch" width="22" height="10" aria-hidden="true"><line x1="1" y1="5" '
        f'x2="21" y2="5" stroke="{group.color}" stroke-width="2.5" stroke-dasharray="{group.dash}"/></svg>'
        f"{escape(group.name)}</span>"
        for group in groups
    )
    return f'<div class="keys">{keys}</div>'


def render_bars(label: str, values: Mapping[str, float], limit: float) -> str:
    """Draw one bar for each value, and a mark at a limit on every bar. Bars beyond the limit are highlighted.

    Args:
        label: What the bars show, for screen readers.
        values: The length of each bar by name; infinite ones fill the track.
        limit: Where the mark is.
    """
    finite = [value for value in values.values() if math.isfinite(value)]
    longest = max([limit * 1.25, *finite])
    rows = []
    for name, value in values.items():
        width = 100 * min(value, longest) / longest if value > 0 else 0.0
        beyond = " beyond" if value > limit else ""
        rows.append(
            f'<span>{escape(name)}</span><span class="track"><span class="limit" style="left:'
            f'{100 * limit / longest:.1f}%"></span><span class="fill{beyond}" style="display:block;width:{width:.1f}%">'
            f"</span></span><span>{_write_times(value)}</span>"
        )
    return f'<div class="bars" role="group" aria-label="{escape(label)}">{"".join(rows)}</div>'


def _write_times(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{value:.2g}x" if value < 100 else f"{value:.0f}x"


def find_ticks(low: float, high: float) -> list[float]:
    """Return three to six round numbers inside a range.

    Example:
        >>> find_ticks(0.08, 0.96)
        [0.2, 0.4, 0.6, 0.8]
    """
    if high <= low:
        high = low + 1
    power = 10 ** math.floor(math.log10((high - low) / 3))
    step = max(power * factor for factor in (1, 2, 5) if power * factor <= (high - low) / 3)
    return [round(step * k, 10) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
