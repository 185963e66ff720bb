"""Hold the papers' statements against the kept runs: `python -m benchmarks.reproduction` writes the pages anew.

Every number and verdict in docs/results.md, in the tables of the method cards and in the list of recipes stands between
the marks of a generated block and comes from the kept runs; the prose around is kept. A test makes sure that the pages
are what this command writes. The figures of docs/results.md are drawn from the same runs.
"""

import re
from pathlib import Path

from benchmarks.drawings import known_drawings, write_drawing
from benchmarks.effects import effect_block
from benchmarks.explanations import explanations_block
from benchmarks.figures import figures_block
from benchmarks.kept import NOTHING, count_seeds, estimate, load_kept
from benchmarks.markdown import write_table
from benchmarks.statements import found_block, statements_block

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [DOCS / "results.md", DOCS / "recipes.md", *sorted((DOCS / "methods").glob("*.md"))]
BLOCK = re.compile(r"<!-- (found|statements|table|effect|explanations|figures): (\S+) -->\n.*?<!-- end -->", re.DOTALL)


def table_block(name: str) -> str:
    """Make the table of an experiment: published and ours."""
    kept = load_kept(name)
    if kept is None:
        return NOTHING
    columns = [
        kept.headline,
        "late_test_accuracy",
        "best_test_accuracy",
        "mean_drop",
        "mean_first_loss",
        "train_error_growth",
        "setting_range",
    ]
    known = {name for numbers in kept.numbers.values() for run in numbers.values() for name in run}
    columns += sorted(
        name
        for name in known
        if name.endswith(("_change", "_last", "_gap", "_correlation")) and not name.endswith("_late_change")
    )
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
            part = f" ({len(values)} seeds)" if len(values) < len(kept.numbers[label]) else ""
            cells.append(estimate(values).show() + part if values else "–")
        rows.append([*cells, count_seeds(kept, label)])
    if len(columns) > 2 * len(kept.labels):
        rows = [list(row) for row in zip(*rows, strict=True)]
    return write_table(rows)


def render(page: str) -> str:
    """Make every generated block of a page anew."""
    makers = {
        "found": found_block,
        "statements": statements_block,
        "table": table_block,
        "effect": effect_block,
        "explanations": explanations_block,
        "figures": figures_block,
    }

    def fill(match: re.Match[str]) -> str:
        kind, subject = match.groups()
        return f"<!-- {kind}: {subject} -->\n{makers[kind](subject)}\n<!-- end -->"

    return BLOCK.sub(fill, page)


if __name__ == "__main__":
    for drawing in known_drawings():
        write_drawing(drawing, DOCS / "images")
    for page in PAGES:
        page.write_text(render(page.read_text()))
