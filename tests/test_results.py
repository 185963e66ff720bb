"""docs/results.md says what the kept runs say."""

import tomllib

import pytest
from benchmarks.reproduction import BLOCK, HERE, KEPT, PAGE, Kept, difference, find_recipe, judge, load_kept, render

STATEMENTS = tomllib.loads((HERE / "statements.toml").read_text())["statements"]


def test_page_is_what_the_command_writes() -> None:
    page = PAGE.read_text()
    assert render(page) == page, "python -m benchmarks.reproduction writes it anew"


def test_page_shows_every_statement_and_every_kept_experiment() -> None:
    blocks = {(kind, subject) for kind, subject in BLOCK.findall(PAGE.read_text())}
    assert {("statements", statement["paper"]) for statement in STATEMENTS} <= blocks
    assert {("table", file.name.removesuffix(".jsonl.gz")) for file in KEPT.glob("*.gz")} <= blocks


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: statement["claim"][:60])
def test_statement_names_labels_of_its_recipe(statement: dict[str, str]) -> None:
    if "needs" not in statement:
        labels = {entry.label for entry in find_recipe(statement["recipe"]).methods}
        assert {statement["higher"], statement["lower"]} <= labels


@pytest.mark.parametrize("file", sorted(KEPT.glob("*.gz")), ids=lambda file: file.name)
def test_kept_runs_are_those_of_the_recipe(file) -> None:
    name = file.name.removesuffix(".jsonl.gz")
    kept, recipe = load_kept(name), find_recipe(name)
    assert kept is not None
    assert all(set(numbers) <= set(recipe.seeds) for numbers in kept.numbers.values())


def test_difference_pairs_seeds() -> None:
    numbers = {"a": {0: {"x": 1.0}, 1: {"x": 3.0}, 7: {"x": 100.0}}, "b": {0: {"x": 0.5}, 1: {"x": 2.5}}}
    gap = difference(Kept("x", {}, ["a", "b"], numbers, {"a": 0, "b": 0}), "a", "b", "x")
    assert gap is not None
    assert (gap.mean, gap.half, gap.count) == (0.5, 0.0, 2)


def test_statement_without_runs_stays_open() -> None:
    missing = {"recipe": "nowhere", "higher": "a", "lower": "b"}
    assert judge(missing) == ("open", "0 of 3 seeds that it takes at least")
    assert judge({"needs": "a GPU"}) == ("not tried here", "needs a GPU")
