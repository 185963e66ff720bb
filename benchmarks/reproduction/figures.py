"""Which recipe reproduces which table or figure of the papers, and which have kept runs."""

import re

from benchmarks.reproduction.kept import KEPT
from benchmarks.reproduction.markdown import write_table
from pliant.experiments.recipe_files import load_recipe, recipe_folder

PAPERS = {"P0": "Soft weight rescaling", "P2": "Spectral regularization", "P3": "Curvature", "P4": "FIRE"}
_NUMBERS = re.compile(r"\b(figure|table)s? (\d+[a-z]?(?:(?:, | and | to )\d+[a-z]?)*)")


def read_source(source: str) -> list[tuple[str, str]]:
    """Find the tables and figures named in a recipe's source, up to the first semicolon.

    Example:
        >>> read_source("Curvature, C.2, figures 3 and 10 to 12; strengths from table 6")
        [('figure', '3'), ('figure', '10'), ('figure', '11'), ('figure', '12')]
    """
    found: list[tuple[str, str]] = []
    for kind, listed in _NUMBERS.findall(source.partition(";")[0]):
        for part in re.split(r", | and ", listed):
            first, _, last = part.partition(" to ")
            span = map(str, range(int(first), int(last) + 1)) if last else [first]
            found += [(kind, number) for number in span]
    return found


def find_repeats(paper: str) -> dict[tuple[str, str], list[str]]:
    """Return the names of the recipes for each table and figure of a paper."""
    repeats: dict[tuple[str, str], list[str]] = {}
    for path in sorted(recipe_folder().glob("*.toml")):
        source = load_recipe(path).source
        for what in read_source(source) if source.startswith(f"{PAPERS[paper]},") else ():
            repeats.setdefault(what, []).append(path.stem)
    return dict(sorted(repeats.items(), key=lambda item: (item[0][0], int(re.sub(r"\D", "", item[0][1])), item[0][1])))


def figures_block(paper: str) -> str:
    """Make the table of a paper's tables and figures with their recipes."""
    rows = [["", "recipes", "kept runs"]]
    for (kind, number), names in find_repeats(paper).items():
        kept = [f"`{run}`" for name in names for run in (name, f"{name}-quick") if (KEPT / f"{run}.jsonl.gz").exists()]
        rows.append([f"{kind} {number}", ", ".join(f"`{name}`" for name in names), ", ".join(kept) or "–"])
    return write_table(rows)
