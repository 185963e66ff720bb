"""The papers' statements in `claims/PAPER.toml`, judged by the kept runs.

A statement has a `claim` in words and is about a number: the headline of the recipe's stream, or the `number` that it
names (see `numbers.py`). It compares two labels, `higher` minus `lower`, or is about one `label`. `claimed` is the
range of the number according to the paper, above zero by default. Margins ("at most 0.002 below", "within 0.1") are
ours, since the papers give none. A statement that was not tried names what it `needs`. A statement with `counted =
false` is judged and shown but not counted or listed: it is another reading of a counted statement, or has other
settings than the paper.
"""

import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.reproduction.figures import PAPERS
from benchmarks.reproduction.kept import FEWEST, Estimate, Kept, difference, estimate, load_kept
from benchmarks.reproduction.markdown import write_table

Statement = dict[str, Any]
VERDICTS = ("reproduced", "**not reproduced**", "not decided", "open", "not tried here")
TOO_FEW = f"{{}} of {FEWEST} seeds that it takes at least"
OURS = {"reproduced": "holds", "**not reproduced**": "**does not hold**"}
"""The verdicts on our own, unpublished expectations."""
SECTIONS = PAPERS | {"ours": "Beyond the papers"}


@cache
def load_statements() -> list[Statement]:
    """Read all statements."""
    folder = Path(__file__).parent / "claims"
    return [
        {"paper": paper} | statement
        for paper in SECTIONS
        for statement in tomllib.loads((folder / f"{paper}.toml").read_text())["statements"]
    ]


def judge(statement: Statement) -> tuple[str, str]:
    """Return the verdict on a statement, and its numbers.

    `lower_recipe` is the recipe of `lower`, if it is another one. If a run diverged, the statement is not decided,
    because its number is unknown. The ends of a range do not belong to it: a tie is not a difference.
    """
    if "needs" in statement:
        return "not tried here", f"needs {statement['needs']}"
    kept = load_kept(statement["recipe"])
    other = load_kept(statement.get("lower_recipe", statement["recipe"]))
    if not kept or not other:
        return "open", TOO_FEW.format(0)
    name = statement.get("number", kept.headline)
    found = find_number(statement, name, kept, other)
    shown = f"{found.show(sign='+')}, {found.count} seeds" if found else "no seed"
    sources = {"label": kept, "higher": kept, "lower": other}
    if diverged := sum(source.diverged(statement[key], name) for key, source in sources.items() if key in statement):
        return "not decided", f"{shown}, {diverged} diverged"
    if not found or found.count < FEWEST:
        return "open", TOO_FEW.format(found.count if found else 0)
    low, high = statement.get("claimed", (0.0, float("inf")))
    if low < found.low and found.high < high:
        return "reproduced", shown
    return ("**not reproduced**" if found.high <= low or high <= found.low else "not decided"), shown


def find_number(statement: Statement, name: str, kept: Kept, other: Kept) -> Estimate | None:
    """Estimate the number of a statement, with `lower` from `other`; None without runs."""
    if "label" in statement:
        values = kept.values(statement["label"], name)
        return estimate(values.values()) if values else None
    return difference(kept.values(statement["higher"], name), other.values(statement["lower"], name))


def is_counted(statement: Statement) -> bool:
    """Return whether a statement is counted and listed."""
    return bool(statement.get("counted", True))


def statements_block(paper: str) -> str:
    """Make the table of a paper's statements, and count the open ones by the recipe whose runs are missing.

    Verdicts on statements that are not counted are in parentheses.
    """
    rows = [["statement", "verdict", "number, 95 % interval", "runs"]]
    waiting: Counter[str] = Counter()
    for statement in load_statements():
        if statement["paper"] != paper:
            continue
        verdict, numbers = judge(statement)
        if verdict == "open":
            waiting[_lacking(statement)] += is_counted(statement)
            continue
        recipes = ", ".join(f"`{statement[key]}`" for key in ("recipe", "lower_recipe") if key in statement)
        said = OURS.get(verdict, verdict) if paper == "ours" else verdict
        rows.append([statement["claim"], said if is_counted(statement) else f"({said})", numbers, recipes])
    table = write_table(rows)
    counts = ", ".join(f"{count} for `{recipe}`" for recipe, count in waiting.items() if count)
    if not counts:
        return table
    return f"{table}\n\nOpen because runs are missing: {counts} (see `benchmarks/reproduction/claims/{paper}.toml`)."


def _lacking(statement: Statement) -> str:
    """Return the recipe whose runs an open statement lacks: the one with fewer seeds."""
    places = [("recipe", "higher" if "higher" in statement else "label"), ("lower_recipe", "lower")]
    seeds = {}
    for key, label in places:
        if key in statement:
            kept = load_kept(statement[key])
            seeds[statement[key]] = len(
                kept.values(statement[label], statement.get("number", kept.headline)) if kept else ()
            )
    return min(seeds, key=lambda recipe: seeds[recipe])


def found_block(which: str) -> str:
    """Count the verdicts by paper (`all`), or list the statements with one verdict (`not-reproduced`)."""
    judged = [(statement, *judge(statement)) for statement in load_statements() if is_counted(statement)]
    if which == "all":
        rows = [["", *VERDICTS]]
        for paper, title in SECTIONS.items():
            verdicts = [verdict for statement, verdict, _ in judged if statement["paper"] == paper]
            rows.append([title, *(str(verdicts.count(verdict)) for verdict in VERDICTS)])
        return write_table(rows)
    wanted = which.replace("-", " ")
    listed = [
        f"- {SECTIONS[statement['paper']]}, {statement['claim']}: {numbers}"
        for statement, verdict, numbers in judged
        if verdict.strip("*") == wanted
    ]
    return "\n".join(listed or ["- none"])
