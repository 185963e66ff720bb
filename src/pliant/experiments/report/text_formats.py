"""The report as text: in a terminal, as Markdown, as a LaTeX table, as CSV."""

import csv
import io
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pliant._console import SafeConsole
from pliant.experiments.report.analysis import Contrast
from pliant.experiments.report.formatting import count
from pliant.experiments.report.table import Cell, ResultTable

if TYPE_CHECKING:
    from pliant.experiments.report.document import Section

_HEADING = 22
_COLUMN = 32
"""The approximate width of a column in a terminal. Columns that do not fit are left out."""
_FAILURES = 10


def print_section(section: "Section", console: Console | None = None) -> None:
    """Print a comparison's table and answer.

    Args:
        section: The comparison.
        console: The console to print to; standard output by default.
    """
    console = console or SafeConsole()
    table = section.table
    if table.contenders:
        fitting = max(1, console.width // _COLUMN)
        kept = [*range(1, min(fitting, len(table.columns) - 2) + 1), len(table.columns) - 1]
        shown = Table(title=escape(section.title), title_justify="left", caption_justify="left")
        shown.add_column("method", overflow="fold")
        for column in kept:
            shown.add_column(escape(textwrap.fill(table.columns[column], _HEADING)), justify="right", no_wrap=True)
        for name, cells in zip(table.contenders, table.cells, strict=True):
            settings = table.settings.get(name, "")
            named = f"{escape(name)}\n[dim]{escape(settings)}[/dim]" if settings else escape(name)
            shown.add_row(named, *(_terminal_cell(cells[column - 1]) for column in kept))
        console.print(shown)
    console.print(section.answer.verdict, style="bold", markup=False, highlight=False)
    for reason in section.answer.reasons:
        console.print(reason, markup=False, highlight=False)
    if section.failures:
        console.print(f"{len(section.failures)} failed, diverged or cannot be read:")
        for failure in section.failures[:_FAILURES]:
            line = f"  {failure.what}: {failure.status}: {failure.reason}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if len(section.failures) > _FAILURES:
            console.print(f"  and {len(section.failures) - _FAILURES} more; the HTML report lists all of them")


def print_titles(sections: "Sequence[Section]", console: Console | None = None) -> None:
    """Name comparisons that were not printed, and the command that shows them."""
    titles = "; ".join(section.title for section in sections)
    runs = sum(len(section.comparison.runs) for section in sections)
    folders = " ".join(dict.fromkeys(str(folder) for section in sections for folder in section.comparison.folders))
    line = f"runs with other settings: {titles} ({count(runs, 'run')}); see `pliant report {folders}`"
    (console or SafeConsole()).print(line, markup=False, highlight=False, soft_wrap=True)


def _terminal_cell(cell: Cell) -> str:
    """Write a cell in one line, with only the last detail, which is the most informative."""
    value = escape(cell.text)
    mark = f"[dim]{cell.mark}[/dim] " if cell.mark else ""
    detail = f" [dim]({escape(cell.details[-1])})[/dim]" if cell.details else ""
    return f"{mark}[bold]{value}[/bold]{detail}" if cell.mark == "best" else f"{mark}{value}{detail}"


def markdown(sections: "Sequence[Section]") -> str:
    """Write the answers, tables and failures as Markdown."""
    return "\n".join(_markdown_section(section) for section in sections)


def _markdown_section(section: "Section") -> str:
    lines = [f"# {_plain(section.title)}", "", f"**{_plain(section.answer.verdict)}**", ""]
    lines += [f"- {_plain(reason)}" for reason in section.answer.reasons]
    for table in filter(None, (section.table, section.metrics)):
        lines += ["", *_markdown_table(table)]
        if table.notes:
            lines += ["", " ".join(table.notes)]
    if section.failures:
        lines += ["", "## Failed runs", ""]
        lines += [f"- {_plain(f.what)}: {f.status}: {_plain(f.reason)}" for f in section.failures]
    lines += ["", "## Settings", ""]
    lines += [f"- {_plain(each.name)}: {_plain(section.settings_of(each))}" for each in section.comparison.contenders]
    if section.choices:
        lines += ["", _plain(" ".join(section.choices))]
    lines += ["", "## Configuration", ""]
    lines += [f"- {_plain(key)}: {_plain(value)}" for key, value in (section.setting | section.environment).items()]
    return "\n".join([*lines, ""])


def _markdown_table(table: ResultTable) -> list[str]:
    def write(cell: Cell) -> str:
        value = f"**{cell.text}**" if cell.mark == "best" else cell.text
        details = f"({'; '.join(cell.details)})" if cell.details else ""
        return " ".join(filter(None, [value, cell.mark and f"*{cell.mark}*", details]))

    rows = [[_plain(name), *map(write, cells)] for name, cells in zip(_named(table), table.cells, strict=True)]
    header = f"| {' | '.join(map(_plain, table.columns))} |"
    rule = f"|---|{'---:|' * (len(table.columns) - 1)}"
    return [header, rule, *(f"| {' | '.join(row)} |" for row in rows)]


def _named(table: ResultTable) -> list[str]:
    """Return the name of each row, with its settings in parentheses."""
    return [f"{name} ({table.settings[name]})" if name in table.settings else name for name in table.contenders]


def _plain(text: str) -> str:
    """Escape Markdown markup."""
    for character in "\\`*_|<>[]#":
        text = text.replace(character, f"\\{character}")
    return text.replace("\n", " ")


_COLUMNS = (
    "comparison", "method", "settings", "role", "metric", "mean", "low", "high", "seeds", "mark",
    "difference_to_vanilla", "difference_low", "difference_high", "p_corrected", "difference_to_fresh",
    "published", "published_spread", "seconds_per_step", "bytes",
)  # fmt: skip


def csv_table(sections: "Sequence[Section]") -> str:
    """Write all numbers in full precision, one line per contender and metric."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for section in sections:
        headline = section.analysis.headline
        for row in section.analysis.rows:
            for metric, estimate in row.numbers.items():
                line: dict[str, object] = {
                    "comparison": section.title,
                    "method": row.contender.name,
                    "settings": row.contender.settings,
                    "role": row.contender.role,
                    "metric": metric,
                    "mean": estimate.mean,
                    "low": estimate.low,
                    "high": estimate.high,
                    "seeds": estimate.count,
                    "mark": row.marks.get(metric, ""),
                }
                if metric == headline:
                    line |= _contrast_columns(row.against_vanilla)
                    line["difference_to_fresh"] = row.against_fresh and row.against_fresh.difference.mean
                    if row.published:
                        line["published"], line["published_spread"] = row.published
                    if row.cost:
                        line |= {"seconds_per_step": row.cost.seconds, "bytes": row.cost.bytes}
                writer.writerow({key: _blank(value) for key, value in line.items()})
    return out.getvalue()


def _contrast_columns(contrast: Contrast | None) -> dict[str, object]:
    if contrast is None:
        return {}
    gap = contrast.interval
    return {
        "difference_to_vanilla": gap.mean,
        "difference_low": gap.low,
        "difference_high": gap.high,
        "p_corrected": contrast.p,
    }


_FORMULA = ("=", "+", "-", "@", "\t")
"""Spreadsheets compute a text that begins like this, unless an apostrophe stands before it."""


def _blank(value: object) -> object:
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA) else value
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def latex(sections: "Sequence[Section]") -> str:
    """Write the tables of results for a paper, using the package booktabs."""
    return "\n".join(_latex_table(section.table, section.title) for section in sections)


def _latex_table(table: ResultTable, title: str) -> str:
    def write(cell: Cell) -> str:
        value = _latex(cell.text)
        if cell.mark == "best":
            value = rf"\textbf{{{value}}}"
        if cell.mark == "tied":
            value = rf"\underline{{{value}}}"
        return rf"{value} {{\scriptsize {_latex('; '.join(cell.details))}}}" if cell.details else value

    rows = [
        rf"{_latex(name)} & {' & '.join(map(write, cells))} \\"
        for name, cells in zip(_named(table), table.cells, strict=True)
    ]
    marks = {cell.mark for cells in table.cells for cell in cells}
    means = {"best": "Bold: best.", "tied": "Underlined: tied."}
    notes = " ".join([*table.notes, *(meaning for mark, meaning in means.items() if mark in marks)])
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex(title)}. {_latex(notes)}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
            r"\toprule",
            rf"{' & '.join(map(_latex, table.columns))} \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "%": r"\%",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": r"$-$",
    "–": r"--",
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
