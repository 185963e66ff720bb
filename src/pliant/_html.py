"""The look of every HTML page that Pliant writes: colors, style sheet, tables, and the frame of a page.

A page is one file that makes no network requests. Only the standard library is needed.
"""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from pliant._terminal import printable
from pliant._version import __version__

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"

LIGHT = {
    "page": "#ffffff",
    "ink": "#1c1f24",
    "muted": "#5d636e",
    "line": "#d9dce1",
    "soft": "#f1f3f5",
    "faint": "#eef0f2",
    "accent": "#1f5fae",
    "good": "#2c7a4b",
    "warn": "#b7791f",
}
"""The colors of a page on a light screen and on paper."""

DARK = {
    "page": "#15171b",
    "ink": "#eceef1",
    "muted": "#a2a9b4",
    "line": "#343941",
    "soft": "#22262c",
    "faint": "#23272d",
    "accent": "#8ab8f5",
    "good": "#5fc48c",
    "warn": "#e0a94a",
}
"""The colors of a page on a dark screen."""


def escape(text: str) -> str:
    """Return text that can stand in an element or an attribute.

    Example:
        >>> escape("a < b")
        'a &lt; b'
    """
    return html.escape(printable(text))


def render_page(title: str, body: str, light: Mapping[str, str] = LIGHT, dark: Mapping[str, str] = DARK) -> str:
    """Return a whole page.

    Args:
        title: The title, as plain text.
        body: The content of the body, as HTML.
        light: The colors on a light screen. Each becomes a CSS variable, `--name`.
        dark: The colors on a dark screen, with the same names.
    """
    style, script = (_read_asset(name).rstrip() for name in ("_html.css", "_html_theme.js"))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="Pliant {escape(__version__)}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{_theme(light, dark)}
{style}
</style>
</head>
<body>
{body}
<script>
{script}
</script>
</body>
</html>
"""


def render_header(kind: str) -> str:
    """Return the bar at the top of a page, with the button that switches the theme."""
    return (
        f'<header class="bar"><span class="brand">Pliant <span class="quiet">{escape(kind)}</span></span>'
        '<button type="button" id="theme" class="button" aria-live="polite">Dark</button></header>'
    )


def _read_asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _theme(light: Mapping[str, str], dark: Mapping[str, str]) -> str:
    """Return the colors as CSS variables: by the system's theme unless the reader chooses; light in print."""
    day, night = (" ".join(f"--{name}: {value};" for name, value in theme.items()) for theme in (light, dark))
    return (
        f":root {{ --font: {FONT}; color-scheme: light; {day} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {night} }} }}\n"
        f"@media screen {{ :root[data-theme=light] {{ color-scheme: light; {day} }}\n"
        f":root[data-theme=dark] {{ color-scheme: dark; {night} }} }}"
    )


def render_table(label: str, columns: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[str] = ()) -> str:
    """Return a table that scrolls sideways if it is too wide. The first cell of each row is the row's heading.

    Args:
        label: What the table shows, as plain text for screen readers.
        columns: The headings, as plain text.
        rows: The cells, as HTML.
        texts: The columns that hold sentences. They are aligned left and wrap.
    """

    def classes(column: str) -> str:
        return ' class="text"' if column in texts else ""

    head = "".join(f'<th scope="col"{classes(column)}>{escape(column)}</th>' for column in columns)
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td{classes(column)}>{cell}</td>" for column, cell in zip(columns[1:], rest, strict=True))
        lines.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    body = "\n".join(lines)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">\n<table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )
