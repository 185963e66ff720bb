"""Render the report as one self-contained HTML file."""

import datetime
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2
import vl_convert
from markupsafe import Markup, escape

from pliant import _html
from pliant._terminal import printable
from pliant._version import __version__
from pliant.experiments.report.chart_style import DARK, LIGHT, page_config, series_colors

if TYPE_CHECKING:
    from pliant.experiments.report.document import Section


def render_page(sections: "Sequence[Section]", title: str) -> str:
    """Return the report as HTML.

    Args:
        sections: The comparisons.
        title: The title of the page.
    """
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
    )
    environment.filters["unbroken"] = _unbroken
    environment.filters["breakable"] = _breakable
    charts = _charts(sections)
    body = environment.from_string(_asset("page.html")).render(
        sections=sections,
        folders=dict.fromkeys(folder for section in sections for folder in section.comparison.folders),
        version=__version__,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        script=Markup(_asset("script.js")),
        charts=Markup(_json(charts)),
        library=Markup(_library()) if charts["charts"] else "",
    )
    light, dark = (colors | series_colors(theme) for colors, theme in ((_html.LIGHT, LIGHT), (_html.DARK, DARK)))
    return _html.render_page(title, body, light, dark)


def _unbroken(text: str) -> str:
    """Keep a number and its percent sign on one line."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def _breakable(label: str) -> Markup:
    """Let a label break between words and before its settings."""
    return Markup(str(escape(printable(label))).replace("(", "<wbr>(").replace("_", "_<wbr>"))


def _charts(sections: "Sequence[Section]") -> dict[str, Any]:
    """Return the specifications of all charts by element id, and the configuration of each section."""
    charts = {}
    for number, section in enumerate(sections):
        for group in section.groups:
            for place, figure in enumerate(group.figures):
                spec = figure.spec(width="container")
                spec["description"] += " The numbers follow as a table."
                charts[f"s{number}-{group.name}-{place}"] = {"spec": spec, "section": str(number)}
    configs = {str(number): page_config(section.series) for number, section in enumerate(sections)}
    return {"charts": charts, "configs": configs if charts else {}}


def _json(value: Any) -> str:
    """Return JSON that is safe inside a script element. Line separators become spaces: Vega's expressions have none."""
    text = re.sub("[\u2028\u2029]", " ", json.dumps(value, separators=(",", ":"), ensure_ascii=False))
    return re.sub(
        "[<\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", lambda found: f"\\u{ord(found.group()):04x}", text
    )


@cache
def _library() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script."""
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")).replace("</script", "<\\/script")


def _asset(name: str) -> str:
    return resources.files("pliant.experiments.report").joinpath("assets", name).read_text(encoding="utf8")
