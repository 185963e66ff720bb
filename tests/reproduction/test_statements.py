"""Each statement of a paper is about its runs, and is judged by where the whole interval lies."""

import re

import pytest
from benchmarks.reproduction import explanations, statements
from benchmarks.reproduction.kept import Kept, find_recipe, load_kept
from benchmarks.reproduction.numbers import EXACT
from benchmarks.reproduction.statements import SECTIONS, found_block, judge, load_statements, statements_block
from torch.nn.modules.batchnorm import _BatchNorm

from pliant import models
from tests.reproduction.helpers import make_kept

STATEMENTS = load_statements()


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: statement["claim"][:60])
def test_statement_names_labels_and_numbers_of_its_recipe(statement: dict) -> None:
    if "needs" in statement:
        assert set(statement) == {"paper", "claim", "needs"}
        return
    about = {"label"} if "label" in statement else {"higher", "lower"}
    may_have = {"number", "claimed", "counted"} | ({"lower_recipe"} if "lower" in about else set())
    assert {"paper", "claim", "recipe"} | about <= set(statement) <= {"paper", "claim", "recipe"} | about | may_have
    recipe, other = (find_recipe(statement.get(key, statement["recipe"])) for key in ("recipe", "lower_recipe"))
    assert {statement.get("label", statement.get("higher"))} <= {entry.label for entry in recipe.methods}
    assert "label" in statement or statement["lower"] in {entry.label for entry in other.methods}
    assert statement.get("higher") != statement.get("lower") or "lower_recipe" in statement or "label" in statement
    plain = {
        "worst_setting",
        "setting_range",
        "mean_drop",
        "mean_first_loss",
        "best_gain",
        "best_test_accuracy",
        "late_test_accuracy",
        "least_gain",
        "first_train_error",
        "early_train_error",
        "late_train_error",
        "train_error_growth",
        "train_error_trend",
        "online_error_growth",
    }
    grids = [len(entry.variants()) for entry in recipe.methods]
    plain |= {f"setting_{place}" for place in range(1, max(grids) + 1)}
    of_ranks = ("first_gap", "late_gap", "gap_growth", "correlation") if EXACT in recipe.measures else ()
    of_measures = {
        f"{name}_{what}" for name in recipe.measures for what in ("mean", "change", "late_change", "last", *of_ranks)
    }
    assert statement.get("number", "mean_drop") in plain | of_measures
    low, high = statement.get("claimed", (0, 1))
    assert low < high


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: statement["claim"][:60])
def test_statement_is_about_a_number_that_its_runs_have(statement: dict) -> None:
    for key, place in (("label", "recipe"), ("higher", "recipe"), ("lower", "lower_recipe")):
        kept = load_kept(statement.get(place, statement["recipe"])) if key in statement else None
        if kept is not None:
            name = statement.get("number", kept.headline)
            assert any(kept.values(label, name) for label in kept.labels) or kept.diverged(statement[key], name), name


def test_ranges_of_lost_and_kept_do_not_overlap() -> None:
    """A paper's statements on the growth of the error part at one margin; zero is for an error that falls."""
    margins: dict[str, set[float]] = {}
    for statement in STATEMENTS:
        if statement.get("number") == "train_error_growth":
            margins.setdefault(statement["paper"], set()).update(map(abs, statement["claimed"]))
    assert margins == {"P2": {0.0, 0.02, float("inf")}, "P3": {explanations.KEPT_BELOW, float("inf")}}


@pytest.mark.parametrize("recipe", sorted({s["recipe"] for s in STATEMENTS if s.get("number") == "mean_drop"}))
def test_drops_are_judged_without_batch_norm(recipe: str) -> None:
    """Before any step, its running statistics are those of the weights that a method has just changed."""
    found = find_recipe(recipe).model
    model = models.create(found.name, (3, 32, 32), 10, seed=0, **found.options)
    assert not any(isinstance(module, _BatchNorm) for module in model.modules())


def test_difference_pairs_seeds() -> None:
    kept = make_kept({"a": {0: {"x": 1.0}, 1: {"x": 3.0}, 7: {"x": 100.0}}, "b": {0: {"x": 0.5}, 1: {"x": 2.5}}})
    gap = kept.difference("a", "b", "x")
    assert gap is not None
    assert (gap.mean, gap.half, gap.count) == (0.5, 0.0, 2)


def test_statement_without_runs_stays_open() -> None:
    missing = {"recipe": "nowhere", "higher": "a", "lower": "b"}
    assert judge(missing) == ("open", "0 of 3 seeds that it takes at least")
    assert judge({"needs": "a GPU"}) == ("not tried here", "needs a GPU")


@pytest.mark.parametrize(
    ("values", "claimed", "verdict"),
    [
        ((0.2, 0.21, 0.19), None, "reproduced"),
        ((-0.2, -0.21, -0.19), None, "**not reproduced**"),
        ((-0.1, 0.1, 0.2), None, "not decided"),
        ((-0.2, -0.21, -0.19), (float("-inf"), 0.0), "reproduced"),
        ((0.01, 0.012, 0.011), (-0.05, 0.05), "reproduced"),
        ((0.2, 0.21, 0.19), (-0.05, 0.05), "**not reproduced**"),
        ((0.0, 0.05, 0.1), (-0.05, 0.05), "not decided"),
        ((0.2, 0.21), None, "open"),
        ((0.0, 0.0, 0.0), None, "**not reproduced**"),  # a tie is not above
        ((0.0, 0.0, 0.0), (-0.05, 0.05), "reproduced"),
    ],
)
def test_verdict_depends_on_the_whole_interval(
    values: tuple, claimed: tuple | None, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = make_kept({"a": {seed: {"x": value} for seed, value in enumerate(values)}})
    monkeypatch.setattr(statements, "load_kept", lambda name: kept)
    statement = {"recipe": "r", "label": "a"} | ({} if claimed is None else {"claimed": claimed})
    assert judge(statement)[0] == verdict


@pytest.mark.parametrize(("left", "seen"), [(3, "+0.2100 ± 0.0248, 3 seeds"), (1, "+0.2000, 1 seeds"), (0, "no seed")])
def test_a_diverged_run_leaves_the_statement_undecided(left: int, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"a": {seed: {"x": 0.2 + 0.01 * seed} for seed in range(left)}}
    monkeypatch.setattr(statements, "load_kept", lambda name: make_kept(numbers, bad=2))
    assert judge({"recipe": "r", "label": "a"}) == ("not decided", f"{seen}, 2 diverged")
    assert judge({"recipe": "r", "label": "a", "claimed": (0.5, 1.0)})[0] == "not decided"


def test_only_diverged_runs_behind_the_number_leave_it_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"setting_1": 0.2, "x": 0.2}  # of the second setting, which has diverged, there is nothing
    numbers = {"a": {seed: {name: value + 0.01 * seed for name, value in told.items()} for seed in range(3)}}
    monkeypatch.setattr(statements, "load_kept", lambda name: Kept("x", {}, ["a"], numbers, {"a": [0, 1]}, {"a": 0}))
    verdicts = {name: judge({"recipe": "r", "label": "a", "number": name}) for name in (*told, "setting_2")}
    verdicts["setting_range"] = judge({"recipe": "r", "label": "a", "number": "setting_range"})
    assert verdicts["x"][0] == verdicts["setting_1"][0] == "reproduced"
    assert verdicts["setting_2"] == verdicts["setting_range"] == ("not decided", "no seed, 1 diverged")


def test_labels_of_two_recipes_are_paired_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {
        "one": make_kept({"a": {seed: {"x": 0.5 + 0.1 * seed} for seed in range(4)}}),
        "other": make_kept({"a": {seed: {"x": 0.2 + 0.1 * seed + 0.01 * (seed % 2)} for seed in range(1, 4)}}),
    }
    monkeypatch.setattr(statements, "load_kept", kept.get)
    statement = {"recipe": "one", "higher": "a", "lower": "a", "lower_recipe": "other"}
    assert judge(statement)[0] == "reproduced"
    assert judge(statement)[1].endswith("3 seeds")


@pytest.mark.parametrize("side", ["one", "other"])
def test_runs_that_diverged_count_on_their_own_side_of_a_comparison(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"one": 0.6, "other": 0.2}
    kept = {
        name: make_kept({"a": {seed: {"x": value} for seed in range(3)}}, bad=2 if name == side else 0)
        for name, value in runs.items()
    }
    monkeypatch.setattr(statements, "load_kept", kept.get)
    verdict, shown = judge({"recipe": "one", "higher": "a", "lower": "a", "lower_recipe": "other"})
    assert verdict == "not decided"
    assert shown.endswith("3 seeds, 2 diverged")


def test_summary_counts_every_statement_and_lists_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = re.findall(r" (\d+) ", found_block("all"))
    counted = [statement for statement in STATEMENTS if statement.get("counted", True)]
    assert sum(map(int, counts)) == len(counted) < len(STATEMENTS)
    judged = iter([("**not reproduced**", "-1"), *[("open", "0 of 3")] * (len(counted) - 1)])
    monkeypatch.setattr(statements, "judge", lambda statement: next(judged))
    first = STATEMENTS[0]
    assert found_block("not-reproduced") == f"- {SECTIONS[first['paper']]}, {first['claim']}: -1"


def test_uncounted_statements_are_in_parentheses(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"paper": "P0", "claim": "as printed", "recipe": "r"}
    known = [said, said | {"claim": "another reading", "counted": False}]
    monkeypatch.setattr(statements, "load_statements", lambda: known)
    monkeypatch.setattr(statements, "judge", lambda statement: ("**not reproduced**", "-1"))
    assert statements_block("P0").splitlines()[2:] == [
        "| as printed | **not reproduced** | -1 | `r` |",
        "| another reading | (**not reproduced**) | -1 | `r` |",
    ]
    assert found_block("not-reproduced") == "- Soft weight rescaling, as printed: -1"
    assert "| Soft weight rescaling | 0 | 1 | 0 | 0 | 0 |" in found_block("all").splitlines()
    monkeypatch.setattr(statements, "judge", lambda statement: ("open", "0 of 3"))
    assert statements_block("P0").splitlines()[-1].startswith("Open because runs are missing: 1 for `r`")


def test_open_statement_waits_for_the_recipe_that_lacks_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {name: make_kept({"a": {seed: {"x": 0.0} for seed in range(n)}}) for name, n in (("one", 3), ("other", 2))}
    said = {"paper": "P0", "claim": "", "recipe": "one", "higher": "a", "lower": "a", "lower_recipe": "other"}
    monkeypatch.setattr(statements, "load_kept", kept.get)
    monkeypatch.setattr(statements, "load_statements", lambda: [said, said | {"lower_recipe": "never run"}])
    assert "Open because runs are missing: 1 for `other`, 1 for `never run`" in statements_block("P0")
