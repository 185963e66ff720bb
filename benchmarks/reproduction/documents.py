"""The pages of the documentation with blocks generated from the kept runs."""

import re
from pathlib import Path

from benchmarks.reproduction.drawings import known_drawings, write_drawing
from benchmarks.reproduction.effects import effect_block
from benchmarks.reproduction.explanations import explanations_block
from benchmarks.reproduction.figures import figures_block
from benchmarks.reproduction.kept import NOTHING, count_seeds, estimate, load_kept
from benchmarks.reproduction.markdown import write_table
from benchmarks.reproduction.statements import found_block, statements_block

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "results.md", DOCS / "recipes.md", *sorted((DOCS / "methods").glob("*.md"))]
BLOCK = re.compile(r"<!-- (found|statements|table|effect|explanations|figures): (\S+) -->\n.*?<!-- end -->", re.DOTALL)


def table_block(name: str) -> str:
    """Make the table of an experiment: published numbers and ours."""
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
            part = f" ({len(values)} seeds)" if len(values) < len(kept.values(label, kept.headline)) else ""
            cells.append(estimate(values).show() + part if values else "–")
        rows.append([*cells, count_seeds(kept, label)])
    if len(columns) > 2 * len(kept.labels):
        rows = [list(row) for row in zip(*rows, strict=True)]
    return write_table(rows)


def render(page: str) -> str:
    """Regenerate every block of a page."""
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


def write_documents() -> None:
    """Regenerate every figure and every block."""
    for drawing in known_drawings():
        write_drawing(drawing, DOCS / "images")
    for page in PAGES:
        page.write_text(render(page.read_text()))
