"""The tables of docs/results.md and of the page of each paper."""

import math
import re
from collections import Counter
from collections.abc import Sequence

from benchmarks.reproduction.kept import KEPT, Estimate, load_kept
from benchmarks.reproduction.markdown import link, write_table
from benchmarks.reproduction.scale import show_scale
from benchmarks.reproduction.statements import (
    SECTIONS,
    VERDICTS,
    Judged,
    Statement,
    find_margin,
    has_own_threshold,
    is_share,
    judge_paper,
)
from benchmarks.reproduction.verdicts import MOST_SEEDS

PAGES = {"P0": "soft-weight-rescaling", "P2": "spectral", "P3": "curvature", "P4": "fire", "ours": "ours"}
"""The page of each paper in docs/results."""
DIVISIONS = {False: "at the paper's settings", True: "in small"}
NONE = "–"
_PARENTHESES = re.compile(r" \([^)]*\)")
OURS = "†"
"""Marks claims whose threshold is ours."""


def in_points(statement: Statement) -> bool:
    """Return whether a statement's number is a share of examples, which is shown in points."""
    kept = load_kept(statement["recipe"])
    return is_share(str(statement.get("number", kept.headline if kept else "accuracy")))


def show(value: Estimate, points: bool) -> str:
    """Write a mean and its interval, in points with two digits or as it is with three, or one from 10 on.

    Example:
        >>> show(Estimate(0.0035, 0.0013, 5), True), show(Estimate(-0.92, 0.03, 10), False)
        ('+0.35±0.13', '-0.920±0.030')
    """
    digits = 3 if abs(value.mean) < 10 else 1
    return (value.show(2, 100, "+") if points else value.show(digits, sign="+")).replace(" ", "")


def show_verdict(judged: Judged) -> str:
    """Write a verdict with what belongs to it: the margin, or the seeds that are needed."""
    if judged.statement.get("check"):
        return "check: holds" if judged.verdict == "supported" else "check: **fails**"
    said = f"**{judged.verdict}**" if judged.verdict == "contradicted" else judged.verdict
    if judged.verdict == "equivalent":
        factor = 100 if in_points(judged.statement) else 1
        said += f" (±{factor * (find_margin(judged.statement, judged.published) or 0):.2g})"
    if judged.verdict == "underpowered":
        needed = f"n={judged.needed}" if judged.needed else f"n>{MOST_SEEDS}"
        said += f" ({judged.diverged} diverged)" if judged.diverged else f" ({needed})"
    return said if judged.counts else f"({said})"


def show_claim(statement: Statement) -> str:
    """Write a claim, marked if its threshold is ours."""
    return statement["claim"] + (f" {OURS}" if has_own_threshold(statement) else "")


def show_short(statement: Statement) -> str:
    """Write a claim with its place and without what stands in parentheses.

    Example:
        >>> show_short({"figure": "Table 1", "column": "MNIST", "claim": "a is low (below 0.1)", "claimed": [-1, 0.1]})
        '**Table 1, MNIST**: a is low †'
    """
    mark = f" {OURS}" if has_own_threshold(statement) else ""
    return f"**{place_of(statement)}**: {_PARENTHESES.sub('', statement['claim'])}{mark}"


def show_numbers(judged: Judged) -> list[str]:
    """Write published number, ours, late number and seeds of a statement."""
    points = in_points(judged.statement)
    published = judged.published
    return [
        NONE if published is None else f"{100 * published:+.2f}",
        show(judged.found, points) if judged.found else NONE,
        show(judged.late, points) if judged.late else NONE,
        str(len(judged.samples)),
    ]


def place_of(statement: Statement) -> str:
    """Return the table or figure of a statement, with the column."""
    return f"{statement['figure']}, {statement['column']}"


def scale_of(statement: Statement) -> str:
    """Write the scale of a statement's runs beside the paper's."""
    return str(statement.get("small") or show_scale(statement["recipe"]))


def count_block(_: str) -> str:
    """Count the verdicts of each paper; the two divisions are never summed."""
    rows = [["", "division", *VERDICTS]]
    for paper, title in SECTIONS.items():
        for small, division in DIVISIONS.items():
            judged = [one for one in judge_paper(paper) if one.counts and one.small == small]
            counts = Counter(one.verdict for one in judged)
            if judged:
                page = link(title, f"results/{PAGES[paper]}.md")
                rows.append([page, division, *(str(counts[verdict]) for verdict in VERDICTS)])
    return write_table(rows, "")


def main_block(paper: str) -> str:
    """Make a row for each table or figure of a paper with tested statements: its main one."""
    rows = [["claim", "verdict", "published", "ours", "late", "seeds", "scale"]]
    rows += [
        [show_short(one.statement), show_verdict(one), *show_numbers(one), scale_of(one.statement)]
        for one in judge_paper(paper)
        if one.statement.get("main") and one.verdict != "untested"
    ]
    return write_table(drop_empty(rows), "")


def drop_empty(rows: list[list[str]]) -> list[list[str]]:
    """Drop the columns without a number."""
    empty = {index for index in range(len(rows[0])) if all(row[index] in (NONE, "") for row in rows[1:])}
    return [[cell for index, cell in enumerate(row) if index not in empty] for row in rows]


def coverage_block(_: str) -> str:
    """Say for each paper which columns of its tables and figures were tested."""
    lines = []
    for paper, title in SECTIONS.items():
        if paper == "ours":
            continue
        columns: dict[str, dict[str, bool]] = {}
        small: dict[str, set[str]] = {}
        for one in judge_paper(paper):
            figure, column = one.statement["figure"], one.statement["column"]
            tested = one.verdict != "untested"
            if one.small:
                small.setdefault(figure, set()).add(column)
            elif one.counts:
                known = columns.setdefault(figure, {})
                known[column] = known.get(column, False) or tested
        parts = [
            f"{figure} {sum(known.values())} of {len(known)}"
            for figure, known in columns.items()
            if any(known.values())
        ]
        parts += [f"{figure} in small" for figure in small if not any(columns.get(figure, {}).values())]
        missing = [figure for figure, known in columns.items() if not any(known.values()) and figure not in small]
        untested = f" Untested: {', '.join(missing)}." if missing else ""
        lines.append(f"- {title}: {', '.join(parts)}.{untested}")
    return "\n".join(lines)


def statements_block(paper: str) -> str:
    """Make the tables of a paper's tested statements, by division, and count the untested by what they lack."""
    parts = []
    for small, division in DIVISIONS.items():
        chosen = [one for one in judge_paper(paper) if one.small == small and one.verdict != "untested"]
        if chosen:
            parts += [f"**{division[0].upper()}{division[1:]}**", statement_table(chosen, small)]
    waiting: dict[str, Counter[str]] = {}
    for one in judge_paper(paper):
        if one.verdict == "untested" and one.counts:
            waiting.setdefault(one.reason, Counter())[one.statement["figure"]] += 1
    if waiting:
        lines = [
            f"- {reason}: {', '.join(f'{figure} ({count})' for figure, count in figures.items())}"
            for reason, figures in waiting.items()
        ]
        parts += ["**Untested**, with the number of statements", "\n".join(lines)]
    return "\n\n".join(parts)


def statement_table(chosen: Sequence[Judged], small: bool) -> str:
    """Make a table of statements, with a row of its own for each table or figure."""
    rows = [["claim", "verdict", "published", "ours", "late", "seeds", "q"]]
    before = ""
    for one in chosen:
        place = place_of(one.statement) + (f": {scale_of(one.statement)}" if small else "")
        if place != before:
            rows.append([f"**{place}**", *[""] * (len(rows[0]) - 1)])
        q = NONE if math.isnan(one.q) else f"{one.q:.2g}"
        rows.append([show_claim(one.statement), show_verdict(one), *show_numbers(one), q])
        before = place
    return write_table(drop_empty(rows), "")


def kept_names() -> list[str]:
    """Return the names of the kept experiments."""
    return sorted(file.name.removesuffix(".jsonl.gz") for file in KEPT.glob("*.jsonl.gz"))
