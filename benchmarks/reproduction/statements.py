"""The papers' statements in `claims/PAPER.toml`, judged by the kept runs.

A file lists tables and figures. `where` names the columns of a table, or the data and network of a figure, with the
recipe of each ("" if there is none). Every statement is made for every column; what a figure sets (`number`, `small`,
`counted`, `why`) holds for all its statements. A statement has a `claim` in words and either

- compares two labels, `higher` minus `lower` (from `lower_recipe`, if that is another recipe), seed by seed; or
- is about one `label`; or
- `needs` what was not at hand, and is untested.

A list of labels stands for how far they are apart: the best of them minus the worst, by their means over seeds.

`number` is the number that is compared, by default the headline of the recipe's stream (see `numbers.py`). `minus`
names a recipe whose same difference is subtracted: the interaction of two factors. `claimed` is the range of the number
according to the paper, above zero by default. Its thresholds are ours unless `theirs = true`. `margin` is the margin of
equivalence. `check = true` marks what holds by construction: listed, not counted. `counted = false` marks another
reading of a counted statement. `main = true` marks the statement that stands for the figure on docs/results.md. `small`
says what differs if data, network or method is not the paper's; a recipe at quick scale is small anyway.
"""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.reproduction import verdicts
from benchmarks.reproduction.figures import PAPERS
from benchmarks.reproduction.kept import FEWEST, Estimate, Kept, estimate, find_recipe, load_kept
from benchmarks.reproduction.verdicts import LEVEL, Range

Statement = dict[str, Any]
VERDICTS = ("supported", "contradicted", "equivalent", "underpowered", "untested")
SECTIONS = PAPERS | {"ours": "Beyond the papers"}
ABOVE: Range = (0.0, math.inf)
POINT_MARGIN = 0.005
"""The margin of equivalence of accuracies and errors without published numbers: half a point."""
LATE = "late_test_accuracy"
FRACTIONS = ("accuracy", "error", "drop", "loss", "gain", "growth", "trend", "range")
"""What a number that is a share of examples ends with; a loss is lost accuracy, unless it is one of `LOSSES`."""
LOSSES = ("train_loss", "test_loss", "online_loss")
"""What the value of a loss function ends with."""


@dataclass(frozen=True)
class Judged:
    """A statement with its verdict.

    Args:
        statement: The statement.
        verdict: One of `VERDICTS`.
        samples: Its numbers, one a seed.
        late: The same by the mean of the last ten tests, if the number is the final test accuracy.
        published: The published number, if there is one.
        p: The p-value, two-sided; NaN if it was not tested.
        q: The p-value, corrected.
        needed: The seeds that would decide an underpowered statement; None if more than 100.
        diverged: How many of its runs diverged.
        reason: Why it is untested.
    """

    statement: Statement
    verdict: str
    samples: tuple[float, ...] = ()
    late: Estimate | None = None
    published: float | None = None
    p: float = math.nan
    q: float = math.nan
    needed: int | None = None
    diverged: int = 0
    reason: str = ""

    @property
    def found(self) -> Estimate | None:
        """The mean over seeds with its 95 % interval."""
        return estimate(self.samples) if self.samples else None

    @property
    def counts(self) -> bool:
        """Whether it is counted."""
        return is_counted(self.statement)

    @property
    def small(self) -> bool:
        """Whether it belongs to the division in small."""
        return is_small(self.statement)


@cache
def load_statements() -> list[Statement]:
    """Read all statements."""
    folder = Path(__file__).parent / "claims"
    return [
        {"paper": paper} | statement
        for paper in SECTIONS
        for figure in tomllib.loads((folder / f"{paper}.toml").read_text())["figures"]
        for statement in expand(figure)
    ]


def expand(figure: dict[str, Any]) -> list[Statement]:
    """Make the statements of a table or figure for each of its columns.

    Example:
        >>> expand({"name": "Table 1", "where": {"MNIST": "r"}, "statements": [{"claim": "a", "label": "b"}]})
        [{'figure': 'Table 1', 'column': 'MNIST', 'recipe': 'r', 'claim': 'a', 'label': 'b'}]
    """
    shared = {key: value for key, value in figure.items() if key not in ("name", "where", "statements")}
    return [
        {"figure": figure["name"], "column": column, "recipe": recipe} | shared | statement
        for column, recipe in figure["where"].items()
        for statement in figure["statements"]
    ]


def is_counted(statement: Statement) -> bool:
    """Return whether a statement is counted as evidence."""
    return bool(statement.get("counted", True)) and not statement.get("check", False)


def is_small(statement: Statement) -> bool:
    """Return whether a statement was tried in small: at quick scale, or with other data, network or method."""
    return bool(statement.get("small")) or statement["recipe"].endswith("-quick")


def claimed_range(statement: Statement) -> Range:
    """Return the claimed range of a statement's number."""
    low, high = statement.get("claimed", ABOVE)
    return float(low), float(high)


def has_own_threshold(statement: Statement) -> bool:
    """Return whether a threshold of the claimed range is ours: the papers mostly say "low", "stays", "comparable"."""
    nonzero = any(end and math.isfinite(end) for end in claimed_range(statement))
    return nonzero and not statement.get("theirs", False)


def list_labels(statement: Statement, *keys: str) -> list[str]:
    """Return the labels that a statement has under some keys.

    Example:
        >>> list_labels({"higher": ["a", "b"], "lower": "c"}, "higher", "lower")
        ['a', 'b', 'c']
    """
    found = [statement[key] for key in keys if key in statement]
    return [label for one in found for label in (one if isinstance(one, list) else [one])]


def is_share(name: str) -> bool:
    """Return whether a number is a share of examples, so that points are its unit.

    Example:
        >>> is_share("mean_first_loss"), is_share("final_train_loss"), is_share("final_late_return")
        (True, False, False)
    """
    if name.startswith("hessian") or name.endswith(LOSSES):
        return False
    return name.startswith(("setting_", "worst_")) or name.rpartition("_")[2] in FRACTIONS


def find_samples(statement: Statement, number: str = "") -> tuple[dict[int, float], int]:
    """Return a statement's numbers by seed, and how many runs behind them diverged."""
    terms = [(1, statement["recipe"], key) for key in ("label", "higher") if key in statement]
    if "lower" in statement:
        terms.append((-1, statement.get("lower_recipe", statement["recipe"]), "lower"))
    if "minus" in statement:
        terms += [(-sign, statement["minus"], key) for sign, _, key in terms]
    columns, diverged = [], 0
    for sign, recipe, key in terms:
        kept = load_kept(recipe)
        if kept is None:
            return {}, 0
        name = number or statement.get("number", kept.headline)
        labels = list_labels(statement, key)
        found = kept.values(labels[0], name) if len(labels) == 1 else kept.spread(labels, name)
        columns.append({seed: sign * value for seed, value in found.items()})
        diverged += sum(kept.diverged(label, name) for label in labels)
    seeds = set.intersection(*(set(column) for column in columns))
    return {seed: sum(column[seed] for column in columns) for seed in sorted(seeds)}, diverged


def find_published(statement: Statement) -> float | None:
    """Return the published number of a statement about headlines, if its labels have one."""
    kept = load_kept(statement["recipe"])
    plain = kept is not None and statement.get("number", kept.headline) == kept.headline
    if not plain or {"minus", "lower_recipe", "small"} & statement.keys():
        return None
    known = find_recipe(statement["recipe"].removesuffix("-quick")).published
    labels = list_labels(statement, "label", "higher", "lower")
    if any(label not in known for label in labels):
        return None
    means = [known[label][0] for label in labels]
    return means[0] - means[1] if len(means) > 1 else means[0]


def find_margin(statement: Statement, published: float | None) -> float | None:
    """Return the margin of equivalence of a statement that claims a difference; None if it has none."""
    if claimed_range(statement) not in (ABOVE, (-math.inf, 0.0)):
        return None
    if "margin" in statement:
        return float(statement["margin"])
    if published is not None and "lower" in statement:
        return abs(published) / 2
    kept = load_kept(statement["recipe"])
    return POINT_MARGIN if is_share(statement.get("number", kept.headline if kept else "")) else None


@cache
def judge_paper(paper: str) -> list[Judged]:
    """Judge the statements of a paper; counted statements are corrected together, and the others together."""
    statements = [statement for statement in load_statements() if statement["paper"] == paper]
    return judge(statements)


def judge(statements: Sequence[Statement]) -> list[Judged]:
    """Judge statements that are corrected together."""
    judged = [measure(statement) for statement in statements]
    for counted in (True, False):
        family = [place for place, one in enumerate(judged) if one.counts == counted and not math.isnan(one.p)]
        margins = {place: find_margin(judged[place].statement, judged[place].published) for place in family}
        close = {place: margin for place, margin in margins.items() if margin}
        same = verdicts.correct([verdicts.equivalence(judged[place].samples, close[place]) for place in close])
        equal = dict(zip(close, same, strict=True))
        for place, q in zip(family, verdicts.correct([judged[place].p for place in family]), strict=True):
            judged[place] = conclude(judged[place], q, equal.get(place, 1.0))
    return judged


def measure(statement: Statement) -> Judged:
    """Collect the numbers of a statement; it is untested or lacks power until it is concluded."""
    if "needs" in statement:
        return Judged(statement, "untested", reason=f"needs {statement['needs']}")
    values, diverged = find_samples(statement)
    samples, published = tuple(values.values()), find_published(statement)
    late = find_late(statement)
    if diverged:
        return Judged(statement, "underpowered", samples, late, published, diverged=diverged)
    if len(samples) < FEWEST:
        reason = statement.get("why") or (f"{len(samples)} of {FEWEST} seeds" if samples else "no kept runs")
        return Judged(statement, "untested", samples, late, published, reason=reason)
    p, _ = verdicts.decide(samples, claimed_range(statement))
    return Judged(statement, "underpowered", samples, late, published, p)


def find_late(statement: Statement) -> Estimate | None:
    """Return a statement's number by the mean of the last ten tests, if it is about the final test accuracy."""
    kept = load_kept(statement["recipe"])
    if kept is None or statement.get("number", kept.headline) != "final_test_accuracy":
        return None
    values, _ = find_samples(statement, LATE)
    return estimate(values.values()) if len(values) >= FEWEST else None


def conclude(judged: Judged, q: float, equal: float) -> Judged:
    """Give the verdict on a tested statement, from its corrected p-values of a difference and of equivalence."""
    claimed = claimed_range(judged.statement)
    _, verdict = verdicts.decide(judged.samples, claimed)
    if q > LEVEL:
        verdict = "equivalent" if equal <= LEVEL else "underpowered"
    needed = verdicts.seeds_needed(judged.samples, claimed) if verdict == "underpowered" else None
    return Judged(
        judged.statement, verdict, judged.samples, judged.late, judged.published, judged.p, q, needed, judged.diverged
    )


def describe_number(statement: Statement) -> str:
    """Name what a statement's number is of: `SWR − L2`, or `ReLU`, with the number if it is not the headline."""
    kind: Kept | None = load_kept(statement["recipe"]) if statement["recipe"] else None
    name = statement.get("number", kind.headline if kind else "")
    labels = statement.get("label") or " − ".join(name_labels(statement.get(key, "")) for key in ("higher", "lower"))
    return labels if kind and name == kind.headline else f"{labels}: {name.replace('_', ' ')}"


def name_labels(labels: str | list[str]) -> str:
    """Name a label, or the distance between several.

    Example:
        >>> name_labels("FIRE"), name_labels(["L2 1e-3", "L2 1e-4"])
        ('FIRE', 'range of (L2 1e-3, L2 1e-4)')
    """
    return labels if isinstance(labels, str) else f"range of ({', '.join(labels)})"
