"""Hold the papers' statements against the kept runs: `python -m benchmarks.reproduction` writes docs/results.md anew.

The runs are in `results/reproduction/RECIPE.jsonl.gz`, packed by `pliant pack`; what the papers state is in
`statements.toml`. Every number and verdict on the page stands between the marks of a generated block and comes from
them; the prose around is kept. A test makes sure that the page is what this command writes.
"""

import math
import re
import tempfile
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from scipy import stats

from pliant import streams
from pliant.experiments.archive import unpack
from pliant.experiments.recipe import Recipe, load_recipe, recipe_folder
from pliant.experiments.store import Run, load_runs, load_selection

HERE = Path(__file__).parent
KEPT = HERE / "results" / "reproduction"
PAGE = HERE.parent / "docs" / "results.md"
BLOCK = re.compile(r"<!-- (table|statements): (\S+) -->\n.*?<!-- end -->", re.DOTALL)
FEWEST = 3
"""Seeds below which nothing is said about a difference."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, half the width of its 95 % interval (NaN for a single value), and how many values."""

    mean: float
    half: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if math.isnan(self.half) else f"{self.mean:.4f} ± {self.half:.4f}"


def estimate(values: Collection[float]) -> Estimate:
    """Estimate a mean by Student's t, which unlike a bootstrap is honest about three seeds.

    Example:
        >>> str(estimate([1.0, 2.0, 3.0]))
        '2.0000 ± 2.4841'
    """
    n = len(values)
    half = stats.t.ppf(0.975, n - 1) * stats.sem(list(values)) if n > 1 else math.nan
    return Estimate(math.fsum(values) / n, float(half), n)


@dataclass(frozen=True)
class Kept:
    """The results of one experiment.

    Args:
        headline: The number that its tables show.
        published: The source's own numbers, by label.
        labels: The rows, in the order of the recipe.
        numbers: By label, seed and name: the numbers of every finished run, with the chosen settings.
        bad: By label: how many runs diverged.
    """

    headline: str
    published: dict[str, tuple[float, float]]
    labels: list[str]
    numbers: dict[str, dict[int, dict[str, float]]]
    bad: dict[str, int]

    def values(self, label: str, name: str) -> dict[int, float]:
        """The values of a number by seed."""
        return {seed: numbers[name] for seed, numbers in self.numbers.get(label, {}).items() if name in numbers}


def find_recipe(name: str) -> Recipe:
    """Read the recipe of a kept experiment: `RECIPE`, or `RECIPE-quick` for its quick scale."""
    stem, quick, _ = name.partition("-quick")
    return load_recipe(recipe_folder() / f"{stem}.toml", scale="quick" if quick else "paper")


def load_kept(name: str) -> Kept | None:
    """Read the kept results of an experiment; None if there are none."""
    file = KEPT / f"{name}.jsonl.gz"
    if not file.exists():
        return None
    recipe = find_recipe(name)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "experiment"
        unpack(file, root)
        chosen = load_selection(root).get("labels", {})
        runs = [run for run in load_runs(root) if run.config.purpose == "result"]
        labels = [entry.label for entry in recipe.methods]
        numbers: dict[str, dict[int, dict[str, float]]] = {label: {} for label in labels}
        bad = dict.fromkeys(labels, 0)
        for run in runs:
            label, settings = run.config.variant
            if label in chosen and chosen[label]["chosen"] != settings:
                continue
            if run.status == "finished":
                numbers[label][run.config.seed] = run.result | dict(more_numbers(run))
            else:
                bad[label] += 1
    published = {} if "-quick" in name else recipe.published
    return Kept(streams.stream_class(recipe.stream.name).headline, published, labels, numbers, bad)


def more_numbers(run: Run) -> Iterator[tuple[str, float]]:
    """Yield numbers that a run's records tell beyond its result.

    `…_change` is the relative change of a measure from the first step of the first task to that of the last.
    """
    last = run.records[-1]["task"]
    tested = [record["test_accuracy"] for record in run.records if "test_accuracy" in record and record["task"] == last]
    if tested:
        yield "best_test_accuracy", max(tested)
    ends = {record["task"]: record["test_accuracy"] for record in run.records if "test_accuracy" in record}
    drops = [
        ends[record["task"] - 1] - record["entry_test_accuracy"]
        for record in run.records
        if "entry_test_accuracy" in record and record["task"] - 1 in ends
    ]
    if drops:
        yield "mean_drop", math.fsum(drops) / len(drops)
    errors = [1 - record["train_accuracy"] for record in run.records if "train_accuracy" in record]
    if len(errors) > 1:
        yield "first_train_error", errors[0]
        yield "last_train_error", errors[-1]
        yield "train_error_growth", errors[-1] - errors[0]
    entered = [record["measures"] for record in run.records if record["epoch"] == 1 and "measures" in record]
    if len(entered) > 1:
        for name in entered[0]:
            if "/" not in name and None not in (entered[0][name], entered[-1].get(name)):
                yield f"{name}_change", (entered[-1][name] - entered[0][name]) / abs(entered[0][name])


def difference(kept: Kept, better: str, worse: str, name: str) -> Estimate | None:
    """Estimate by how much one label is above another, seed by seed."""
    one, two = kept.values(better, name), kept.values(worse, name)
    shared = sorted(one.keys() & two.keys())
    return estimate([one[seed] - two[seed] for seed in shared]) if shared else None


def judge(statement: dict[str, str]) -> tuple[str, str]:
    """Return the verdict on a statement, and the numbers it rests on."""
    if "needs" in statement:
        return "not tried here", f"needs {statement['needs']}"
    kept = load_kept(statement["recipe"])
    gap = kept and difference(
        kept, statement["higher"], statement["lower"], statement.get("number", kept.headline if kept else "")
    )
    if gap is None or gap.count < FEWEST:
        return "open", f"{gap.count if gap else 0} of {FEWEST} seeds that it takes at least"
    shown = f"{gap.mean:+.4f} ± {gap.half:.4f}, {gap.count} seeds"
    if abs(gap.mean) <= gap.half:
        return "not decided", shown
    return ("reproduced" if gap.mean > 0 else "**not reproduced**"), shown


def statements_block(paper: str) -> str:
    """Make the table of a paper's statements."""
    known = tomllib.loads((HERE / "statements.toml").read_text())["statements"]
    lines = ["| statement | verdict | difference, 95 % interval | runs |", "|---|---|---|---|"]
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
        return "No run has ended yet."
    columns = [kept.headline, "best_test_accuracy", "mean_drop", "train_error_growth"]
    measured = {name for numbers in kept.numbers.values() for run in numbers.values() for name in run}
    columns += sorted(name for name in measured if name.endswith("_change"))
    columns = [column for column in columns if any(kept.values(label, column) for label in kept.labels)]
    heads = ["", *(["published"] if kept.published else []), *(column.replace("_", " ") for column in columns), "seeds"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for label in kept.labels:
        cells = [label]
        if kept.published:
            cells.append("{:.4f} ± {:.4f}".format(*kept.published[label]) if label in kept.published else "–")
        for column in columns:
            values = kept.values(label, column).values()
            cells.append(str(estimate(values)) if values else "–")
        bad = f", {kept.bad[label]} diverged" if kept.bad[label] else ""
        lines.append("| " + " | ".join([*cells, f"{len(kept.numbers[label])}{bad}"]) + " |")
    return "\n".join(lines)


def render(page: str) -> str:
    """Make every generated block of the page anew."""
    makers = {"table": table_block, "statements": statements_block}

    def fill(match: re.Match[str]) -> str:
        kind, subject = match.groups()
        return f"<!-- {kind}: {subject} -->\n{makers[kind](subject)}\n<!-- end -->"

    return BLOCK.sub(fill, page)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
