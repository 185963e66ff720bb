"""The report as text: Markdown, a LaTeX table for a paper, CSV for whatever comes next."""

import csv
import io
import math
from collections.abc import Sequence

from pliant.experiments.report.analysis import Contrast
from pliant.experiments.report.document import Section
from pliant.experiments.report.statistics import Interval
from pliant.experiments.report.table import Cell, ResultTable


def markdown(sections: Sequence[Section]) -> str:
    """Write the answers, tables and failures as Markdown."""
    return "\n".join(_markdown_section(section) for section in sections)


def _markdown_section(section: Section) -> str:
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
    lines += [f"- {key}: {_plain(value)}" for key, value in (section.setting | section.environment).items()]
    return "\n".join([*lines, ""])


def _markdown_table(table: ResultTable) -> list[str]:
    def write(cell: Cell) -> str:
        value = f"**{cell.text}**" if cell.mark == "best" else cell.text
        details = f"({'; '.join(cell.details)})" if cell.details else ""
        return " ".join(filter(None, [value, cell.mark and f"*{cell.mark}*", details]))

    rows = [[_plain(name), *map(write, cells)] for name, cells in zip(table.contenders, table.cells, strict=True)]
    header = f"| {' | '.join(table.columns)} |"
    rule = f"|---|{'---:|' * (len(table.columns) - 1)}"
    return [header, rule, *(f"| {' | '.join(row)} |" for row in rows)]


def _plain(text: str) -> str:
    """Take the meaning out of what Markdown would take for markup."""
    for character in "\\`*_|<>[]#":
        text = text.replace(character, f"\\{character}")
    return text.replace("\n", " ")


_COLUMNS = (
    "comparison", "method", "settings", "role", "metric", "mean", "low", "high", "seeds", "mark",
    "difference_to_vanilla", "difference_low", "difference_high", "p_corrected", "difference_to_fresh",
    "published", "published_spread", "seconds_a_step", "bytes_kept",
)  # fmt: skip


def csv_table(sections: Sequence[Section]) -> str:
    """Write every number of the tables in full: a line for each contender and metric."""
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
                    line["difference_to_fresh"] = row.against_fresh and row.against_fresh.difference.interval.mean
                    if row.published:
                        line["published"], line["published_spread"] = row.published
                    if row.cost:
                        line |= {"seconds_a_step": row.cost.seconds, "bytes_kept": row.cost.bytes}
                writer.writerow({key: _blank(value) for key, value in line.items()})
    return out.getvalue()


def _contrast_columns(contrast: Contrast | None) -> dict[str, object]:
    if contrast is None:
        return {}
    gap: Interval = contrast.difference.interval
    return {
        "difference_to_vanilla": gap.mean,
        "difference_low": gap.low,
        "difference_high": gap.high,
        "p_corrected": contrast.p,
    }


def _blank(value: object) -> object:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def latex(sections: Sequence[Section]) -> str:
    """Write the tables of results for a paper; they need the package booktabs."""
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
        for name, cells in zip(table.contenders, table.cells, strict=True)
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
