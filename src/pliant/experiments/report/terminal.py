"""The report in a terminal: the answer and the table."""

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pliant.experiments.report.document import Section
from pliant.experiments.report.formatting import count
from pliant.experiments.report.table import Cell

_HEADING = 22
_COLUMN = 32
"""How wide a column of numbers is, about; as many are shown as fit."""
_FAILURES = 10


def show(section: Section, console: Console | None = None) -> None:
    """Print a comparison's answer and table.

    Args:
        section: The comparison.
        console: Where to; the standard output by default.
    """
    console = console or Console()
    table = section.table
    if table.contenders:
        fitting = max(1, console.width // _COLUMN)
        kept = [*range(1, min(fitting, len(table.columns) - 2) + 1), len(table.columns) - 1]
        shown = Table(title=escape(section.title), title_justify="left", caption_justify="left")
        shown.add_column("method", overflow="fold")
        for column in kept:
            shown.add_column(textwrap.fill(table.columns[column], _HEADING), justify="right", no_wrap=True)
        for name, cells in zip(table.contenders, table.cells, strict=True):
            shown.add_row(escape(name), *(_write(cells[column - 1]) for column in kept))
        console.print(shown)
    console.print(section.answer.verdict, style="bold", markup=False, highlight=False)
    for reason in section.answer.reasons:
        console.print(reason, markup=False, highlight=False)
    if section.failures:
        console.print(f"{len(section.failures)} did not end well or cannot be read:")
        for failure in section.failures[:_FAILURES]:
            line = f"  {failure.what}: {failure.status}: {failure.reason}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if len(section.failures) > _FAILURES:
            console.print(f"  and {len(section.failures) - _FAILURES} more; the page lists them all")


def name_rest(sections: Sequence[Section], console: Console | None = None) -> None:
    """Name comparisons that are not shown, and say how to see them."""
    titles = "; ".join(section.title for section in sections)
    runs = sum(len(section.comparison.runs) for section in sections)
    folders = " ".join(dict.fromkeys(str(folder) for section in sections for folder in section.comparison.folders))
    line = f"also there, with other settings: {titles} ({count(runs, 'run')}); see `pliant report {folders}`"
    (console or Console()).print(line, markup=False, highlight=False, soft_wrap=True)


def _write(cell: Cell) -> str:
    """Write a cell in a line: of what qualifies the number, the last part says most."""
    value = escape(cell.text)
    mark = f"[dim]{cell.mark}[/dim] " if cell.mark else ""
    detail = f" [dim]({escape(cell.details[-1])})[/dim]" if cell.details else ""
    return f"{mark}[bold]{value}[/bold]{detail}" if cell.mark == "best" else f"{mark}{value}{detail}"
