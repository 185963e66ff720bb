"""The pages of the documentation with blocks generated from the kept runs."""

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.leaderboard import leaderboard_block
from benchmarks.pictures import draw_pictures
from benchmarks.reproduction.agent_effects import agent_block
from benchmarks.reproduction.decisions import decision_block
from benchmarks.reproduction.drawings import known_drawings, write_drawing, write_picture
from benchmarks.reproduction.effect_overview import effects_block
from benchmarks.reproduction.effects import effect_block
from benchmarks.reproduction.explanations import explanations_block
from benchmarks.reproduction.figures import figures_block
from benchmarks.reproduction.forest import FORESTS, draw_forest, make_forest
from benchmarks.reproduction.kept import NOTHING, count_seeds, estimate, load_kept
from benchmarks.reproduction.language_effects import kept_block, language_block, text_block
from benchmarks.reproduction.markdown import write_table
from benchmarks.reproduction.result_files import FILES, provenance_block
from benchmarks.reproduction.results_tables import count_block, coverage_block, main_block, statements_block

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    *(
        DOCS / f"{name}.md"
        for name in ("results", "recipes", "leaderboard", "which-method", "howto-language", "defaults")
    ),
    *sorted((DOCS / "results").glob("*.md")),
    *sorted((DOCS / "methods").glob("*.md")),
]
MORE_COLUMNS = ("late_test_accuracy", "mean_drop", "mean_first_loss", "train_error_growth", "setting_range")
"""The columns of a table after the headline, where the runs have them."""


def table_block(name: str) -> str:
    """Make the table of an experiment: published numbers and ours."""
    kept = load_kept(name)
    if kept is None:
        return NOTHING
    columns = [kept.headline, *MORE_COLUMNS]
    columns = [column for column in columns if any(kept.values(label, column) for label in kept.labels)]
    rows = [
        ["", *(["published"] if kept.published else []), *(column.replace("_", " ") for column in columns), "seeds"]
    ]
    for label in kept.labels:
        cells = [label]
        if kept.published:
            cells.append("{:.4f}±{:.4f}".format(*kept.published[label]) if label in kept.published else "–")
        for column in columns:
            values = kept.values(label, column).values()
            cells.append(estimate(values).show().replace(" ", "") if values else "–")
        rows.append([*cells, count_seeds(kept, label)])
    return write_table(rows, "")


def card_block(method: str) -> str:
    """Make the tables of a method card: the effect on a stream of images, and on agents and text where it ran."""
    return "\n\n".join(filter(None, (effect_block(method), agent_block(method), language_block(method))))


MAKERS: dict[str, Callable[[str], str]] = {
    "counts": count_block,
    "main": main_block,
    "coverage": coverage_block,
    "provenance": provenance_block,
    "statements": statements_block,
    "table": table_block,
    "effect": card_block,
    "effects": effects_block,
    "explanations": explanations_block,
    "figures": figures_block,
    "leaderboard": leaderboard_block,
    "decisions": decision_block,
    "text": text_block,
    "kept": kept_block,
}
BLOCK = re.compile(rf"<!-- ({'|'.join(MAKERS)}): (\S+) -->\n.*?<!-- end -->", re.DOTALL)


def render(page: str) -> str:
    """Regenerate every block of a page."""

    def fill(match: re.Match[str]) -> str:
        kind, subject = match.groups()
        return f"<!-- {kind}: {subject} -->\n{MAKERS[kind](subject)}\n<!-- end -->"

    return BLOCK.sub(fill, page)


def write_documents() -> None:
    """Regenerate every figure, every table beside the pages, and every block."""
    for drawing in known_drawings():
        write_drawing(drawing, DOCS / "images")
    for forest in FORESTS:
        rows = make_forest(forest)
        write_picture(draw_forest(rows), rows, DOCS / "images" / f"{forest.name}.svg")
    draw_pictures()
    for name, make in FILES.items():
        (DOCS / "results" / name).write_text(make())
    for page in PAGES:
        page.write_text(render(page.read_text()))
