"""Hold the papers' statements against the kept runs: `python -m benchmarks.reproduction` writes the pages anew.

What the papers state is in `statements.toml`. Every number and verdict in docs/results.md, in the tables of the method
cards and in the list of recipes stands between the marks of a generated block and comes from the kept runs; the prose
around is kept. A test makes sure that the pages are what this command writes.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.effects import effect_block
from benchmarks.figures import figures_block
from benchmarks.kept import FEWEST, NOTHING, Estimate, Kept, count_seeds, estimate, load_kept
from benchmarks.markdown import write_table

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PAGES = [DOCS / "results.md", DOCS / "recipes.md", *sorted((DOCS / "methods").glob("*.md"))]
BLOCK = re.compile(r"<!-- (table|statements|effect|figures): (\S+) -->\n.*?<!-- end -->", re.DOTALL)


def judge(statement: dict[str, Any]) -> tuple[str, str]:
    """Return the verdict on a statement, and the numbers it rests on.

    A statement is about the difference between two labels, `higher` − `lower`, or about one `label`; `claimed` is where
    it says that the number lies, above zero by default.
    """
    if "needs" in statement:
        return "not tried here", f"needs {statement['needs']}"
    kept = load_kept(statement["recipe"])
    found = kept and find_number(statement, kept)
    if not found or found.count < FEWEST:
        return "open", f"{found.count if found else 0} of {FEWEST} seeds that it takes at least"
    shown = f"{found.show(sign='+')}, {found.count} seeds"
    low, high = statement.get("claimed", (0.0, float("inf")))
    if low < found.low and found.high < high:
        return "reproduced", shown
    if found.high < low or high < found.low:
        return "**not reproduced**", shown
    return "not decided", shown


def find_number(statement: dict[str, Any], kept: Kept) -> Estimate | None:
    """Estimate the number that a statement is about; None if there is no run to tell."""
    name = statement.get("number", kept.headline)
    if "label" in statement:
        values = kept.values(statement["label"], name)
        return estimate(values.values()) if values else None
    return kept.difference(statement["higher"], statement["lower"], name)


def statements_block(paper: str) -> str:
    """Make the table of a paper's statements."""
    known = tomllib.loads((HERE / "statements.toml").read_text())["statements"]
    lines = ["| statement | verdict | number, 95 % interval | runs |", "|---|---|---|---|"]
    for statement in known:
        if statement["paper"] == paper:
            verdict, numbers = judge(statement)
            recipe = f"`{statement['recipe']}`" if "recipe" in statement else ""
            lines.append(f"| {statement['claim']} | {verdict} | {numbers} | {recipe} |")
    return "\n".join(lines)


def table_block(name: str) -> str:
    """Make the table of an experiment: published and ours."""
    kept = load_kept(name)
    if kept is None:
        return NOTHING
    columns = [kept.headline, "best_test_accuracy", "mean_drop", "mean_dip", "train_error_growth"]
    known = {name for numbers in kept.numbers.values() for run in numbers.values() for name in run}
    columns += sorted(name for name in known if name.endswith(("_change", "_last", "_gap", "_correlation")))
    columns = [column for column in columns if any(kept.values(label, column) for label in kept.labels)]
    rows = [
        ["", *(["published"] if kept.published else []), *(column.replace("_", " ") for column in columns), "seeds"]
    ]
    for label in kept.labels:
        cells = [label]
        if kept.published:
            cells.append("{:.4f} ± {:.4f}".format(*kept.published[label]) if label in kept.published else "–")
        for column in columns:
            values = kept.values(label, column).values()
            cells.append(estimate(values).show() if values else "–")
        rows.append([*cells, count_seeds(kept, label)])
    return write_table(rows)


def render(page: str) -> str:
    """Make every generated block of a page anew."""
    makers = {"table": table_block, "statements": statements_block, "effect": effect_block, "figures": figures_block}

    def fill(match: re.Match[str]) -> str:
        kind, subject = match.groups()
        return f"<!-- {kind}: {subject} -->\n{makers[kind](subject)}\n<!-- end -->"

    return BLOCK.sub(fill, page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(render(page.read_text()))
