"""Each statement of a paper is about its runs, and gets one of five verdicts."""

import math
from collections import Counter

import pytest
from benchmarks.reproduction import explanations, statements
from benchmarks.reproduction.kept import Kept, find_recipe, load_kept
from benchmarks.reproduction.numbers import EXACT
from benchmarks.reproduction.results_tables import show_verdict
from benchmarks.reproduction.scale import count_steps, show_scale
from benchmarks.reproduction.statements import (
    SECTIONS,
    VERDICTS,
    Judged,
    find_margin,
    find_samples,
    has_own_threshold,
    is_counted,
    is_small,
    judge,
    judge_paper,
    list_labels,
    load_statements,
)
from torch.nn.modules.batchnorm import _BatchNorm

from pliant import models
from pliant.rl.agent_learner import MEASURES
from pliant.rl.results import RESULTS
from tests.reproduction.helpers import make_kept

STATEMENTS = load_statements()
SHARED = {"paper", "figure", "column", "recipe", "claim"}
MAY_HAVE = {"number", "claimed", "counted", "check", "main", "small", "margin", "theirs", "why"}


def name_statement(statement: dict) -> str:
    return f"{statement['paper']} {statement['figure']} {statement['column']} {statement['claim']}"[:90]


@pytest.mark.parametrize("statement", STATEMENTS, ids=name_statement)
def test_statement_names_labels_and_numbers_of_its_recipe(statement: dict) -> None:
    if "needs" in statement:
        assert SHARED | {"needs"} <= set(statement) <= SHARED | {"needs", "number", "counted", "small"}
        assert not statement["recipe"]
        return
    about = {"label"} if "label" in statement else {"higher", "lower"}
    more = {"lower_recipe", "minus"} if "lower" in about else set()
    assert SHARED | about <= set(statement) <= SHARED | about | more | MAY_HAVE
    recipe = find_recipe(statement["recipe"])
    for key in about:
        for place in ["lower_recipe" if key == "lower" else "recipe", *({"minus"} & set(statement))]:
            known = find_recipe(statement.get(place, statement["recipe"]))
            assert set(list_labels(statement, key)) <= {entry.label for entry in known.methods}
    assert statement.get("higher") != statement.get("lower") or "lower_recipe" in statement or "label" in statement
    plain = {
        "worst_setting",
        "setting_range",
        "mean_drop",
        "mean_first_loss",
        "best_gain",
        "best_test_accuracy",
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
    of_agents = {f"late_{name}" for name in ("overestimation", *MEASURES, "gradient_l2")}
    of_agents |= {f"{name} ({network})" for name in of_agents for network in ("actor", "critic.0")}
    known = plain | (of_agents | set(RESULTS) if recipe.domain == "rl" else of_measures)
    assert statement.get("number", "mean_drop") in known
    low, high = statement.get("claimed", (0, 1))
    assert low < high


@pytest.mark.parametrize("statement", [s for s in STATEMENTS if s["recipe"]], ids=name_statement)
def test_statement_is_about_a_number_that_its_runs_have(statement: dict) -> None:
    for key, place in (("label", "recipe"), ("higher", "recipe"), ("lower", "lower_recipe")):
        kept = load_kept(statement.get(place, statement["recipe"])) if key in statement else None
        if kept is not None:
            name = statement.get("number", kept.headline)
            diverged = any(kept.diverged(label, name) for label in list_labels(statement, key))
            assert any(kept.values(label, name) for label in kept.labels) or diverged, name


def test_one_datum_counts_once() -> None:
    """No two counted statements of a paper rest on the same numbers, up to sign."""
    for paper in SECTIONS:
        seen: dict[tuple, str] = {}
        for statement in STATEMENTS:
            if statement["paper"] == paper and is_counted(statement) and "needs" not in statement:
                values = find_samples(statement)[0]
                if not any(values.values()):
                    continue
                one, other = (tuple((seed, round(sign * v, 9)) for seed, v in values.items()) for sign in (1, -1))
                same = seen.get(one, seen.get(other))
                assert same is None, (name_statement(statement), same)
                seen[one] = name_statement(statement)


def test_every_column_has_one_main_statement() -> None:
    columns = Counter()
    for statement in STATEMENTS:
        if is_counted(statement) and "needs" not in statement:
            columns[statement["paper"], statement["figure"], statement["column"]] += statement.get("main", False)
    assert set(columns.values()) == {1}


def test_ranges_of_lost_and_kept_do_not_overlap() -> None:
    """A paper's statements on the growth of the error part at one margin; zero is for an error that falls."""
    margins: dict[str, set[float]] = {}
    for statement in STATEMENTS:
        if statement.get("number") == "train_error_growth":
            margins.setdefault(statement["paper"], set()).update(map(abs, statement["claimed"]))
    assert margins == {"P2": {0.0, 0.02, math.inf}, "P3": {explanations.KEPT_BELOW, math.inf}}


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


def say(**more: object) -> dict:
    return {"paper": "P0", "figure": "f", "column": "c", "claim": "", "recipe": "p0_table1_mnist"} | more


def judge_values(monkeypatch: pytest.MonkeyPatch, values: tuple, bad: int = 0, **more: object) -> Judged:
    kept = make_kept({"a": {seed: {"accuracy": value} for seed, value in enumerate(values)}}, "accuracy", bad=bad)
    monkeypatch.setattr(statements, "load_kept", lambda name: kept)
    (judged,) = judge([say(label="a", **more)])
    return judged


@pytest.mark.parametrize(
    ("values", "claimed", "verdict"),
    [
        ((0.2, 0.21, 0.19), None, "supported"),
        ((-0.2, -0.21, -0.19), None, "contradicted"),
        ((-0.1, 0.1, 0.2), None, "underpowered"),
        ((-0.2, -0.21, -0.19), (-math.inf, 0.0), "supported"),
        ((0.01, 0.012, 0.011), (-0.05, 0.05), "supported"),
        ((0.2, 0.21, 0.19), (-0.05, 0.05), "contradicted"),
        ((0.0, 0.05, 0.1), (-0.05, 0.05), "underpowered"),
        ((0.2, 0.21), None, "untested"),
        ((0.0, 0.0, 0.0), None, "equivalent"),  # a tie is not above
        ((0.0001, -0.0001, 0.0002), None, "equivalent"),
        ((0.0001, -0.0001, 0.0002), (-math.inf, 0.0), "equivalent"),
        ((0.0, 0.0, 0.0), (-0.05, 0.05), "supported"),
        ((-0.0501, -0.0499, -0.05), (-0.05, math.inf), "underpowered"),  # not a claim of a difference
    ],
)
def test_five_verdicts(values: tuple, claimed: tuple | None, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = judge_values(monkeypatch, values, **({"claimed": claimed} if claimed else {}))
    assert judged.verdict == verdict
    assert judged.verdict in VERDICTS


def test_untested_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    (needing,) = judge([say(recipe="", needs="a GPU")])
    assert (needing.verdict, needing.reason) == ("untested", "needs a GPU")
    assert judge_values(monkeypatch, (0.1, 0.2)).reason == "2 of 3 seeds"
    assert judge_values(monkeypatch, (), why="too short").reason == "too short"
    monkeypatch.setattr(statements, "load_kept", lambda name: None)
    assert judge([say(label="a")])[0].reason == "no kept runs"


def test_underpowered_names_the_seeds_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = judge_values(monkeypatch, (0.0, 0.1, 0.2))
    assert (judged.verdict, judged.needed) == ("underpowered", 10)
    assert show_verdict(judged) == "underpowered (n=10)"
    assert show_verdict(judge_values(monkeypatch, (0.3, -0.3, 0.001))) == "underpowered (n>100)"


def test_a_diverged_run_leaves_the_statement_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = judge_values(monkeypatch, (0.2, 0.21, 0.22), bad=2)
    assert show_verdict(judged) == "underpowered (2 diverged)"
    assert math.isnan(judged.q)


def test_only_diverged_runs_behind_the_number_leave_it_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"setting_1": 0.2, "x": 0.2}  # of the second setting, which has diverged, there is nothing
    numbers = {"a": {seed: {name: value + 0.01 * seed for name, value in told.items()} for seed in range(3)}}
    monkeypatch.setattr(statements, "load_kept", lambda name: Kept("x", {}, ["a"], numbers, {"a": [0, 1]}, {"a": 0}))
    names = (*told, "setting_2", "setting_range")
    found = {name: judge([say(label="a", number=name)])[0] for name in names}
    assert found["x"].verdict == found["setting_1"].verdict == "supported"
    assert found["setting_2"].diverged == found["setting_range"].diverged == 1


def test_labels_of_two_recipes_are_paired_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {
        "one": make_kept({"a": {seed: {"x": 0.5 + 0.1 * seed} for seed in range(4)}}),
        "other": make_kept({"a": {seed: {"x": 0.2 + 0.1 * seed + 0.01 * (seed % 2)} for seed in range(1, 4)}}),
    }
    monkeypatch.setattr(statements, "load_kept", kept.get)
    values, _ = find_samples(say(recipe="one", higher="a", lower="a", lower_recipe="other"))
    assert values == pytest.approx({1: 0.29, 2: 0.3, 3: 0.29})


@pytest.mark.parametrize("side", ["one", "other"])
def test_runs_that_diverged_count_on_their_own_side_of_a_comparison(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {
        name: make_kept({"a": {seed: {"x": value} for seed in range(3)}}, bad=2 if name == side else 0)
        for name, value in (("one", 0.6), ("other", 0.2))
    }
    monkeypatch.setattr(statements, "load_kept", kept.get)
    assert find_samples(say(recipe="one", higher="a", lower="a", lower_recipe="other"))[1] == 2


def test_synergy_is_the_interaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much more a regularizer lowers the error with a norm layer than without."""
    errors = {"norm": {"none": 0.6, "both": 0.1}, "plain": {"none": 0.9, "both": 0.7}}
    kept = {
        recipe: make_kept({label: {seed: {"x": e + 0.01 * seed} for seed in range(3)} for label, e in by.items()})
        for recipe, by in errors.items()
    }
    monkeypatch.setattr(statements, "load_kept", kept.get)
    values, _ = find_samples(say(recipe="norm", higher="none", lower="both", minus="plain"))
    assert values == pytest.approx(dict.fromkeys(range(3), 0.3))


def test_many_statements_are_corrected_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A p-value that is small alone is not small among twenty."""
    numbers = {"a": {seed: {"x": x} for seed, x in enumerate((0.1, 0.2, 0.3, 0.25, 0.01))}}
    numbers |= {f"n{i}": {seed: {"x": x} for seed, x in enumerate((0.5, -0.5, 0.4, -0.3, i / 100))} for i in range(20)}
    monkeypatch.setattr(statements, "load_kept", lambda name: make_kept(numbers))
    alone, among = (judge([say(label=label) for label in labels])[0] for labels in (["a"], list(numbers)))
    assert alone.p == among.p < 0.05 < among.q
    assert (alone.verdict, among.verdict) == ("supported", "underpowered")
    uncounted = judge([say(label="a"), *(say(label=f"n{i}", counted=False) for i in range(20))])
    assert uncounted[0].q == uncounted[0].p


def test_margin_is_half_of_the_published_difference_or_half_a_point() -> None:
    assert find_margin(say(higher="SWR", lower="L2"), 0.03) == 0.015
    assert (
        find_margin(say(higher="a", lower="b"), None) == find_margin(say(label="a", number="best_gain"), None) == 0.005
    )
    assert find_margin(say(higher="a", lower="b", margin=0.1), 0.03) == 0.1
    assert find_margin(say(label="a", number="update_l1_change"), None) is None
    assert find_margin(say(label="a", claimed=(-0.002, math.inf)), 0.03) is None


def test_late_number_stands_beside_the_final_one(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {
        label: {seed: {"final_test_accuracy": value, "late_test_accuracy": value / 2} for seed in range(3)}
        for label, value in (("a", 0.9), ("b", 0.7))
    }
    monkeypatch.setattr(statements, "load_kept", lambda name: make_kept(numbers, "final_test_accuracy"))
    (judged,) = judge([say(higher="a", lower="b")])
    assert judged.found is not None
    assert judged.late is not None
    assert (judged.found.mean, judged.late.mean) == pytest.approx((0.2, 0.1))


def test_divisions_checks_and_thresholds() -> None:
    assert [is_small(one) for one in (say(recipe="r-quick"), say(small="other data"), say())] == [True, True, False]
    assert [is_counted(one) for one in (say(check=True), say(counted=False), say())] == [False, False, True]
    ours, theirs = say(claimed=(0.02, math.inf)), say(claimed=(0.04, math.inf), theirs=True)
    assert [has_own_threshold(one) for one in (ours, theirs, say())] == [True, False, False]
    assert "check: holds" in {show_verdict(one) for one in judge_paper("P0")}


def test_scale_counts_steps_of_the_stream() -> None:
    assert count_steps(find_recipe("p0_table1_mnist")) == 200 * 235
    assert count_steps(find_recipe("p0_full_mnist")) == 100 * sum(-(-6000 * k // 256) for k in range(1, 11))
    assert show_scale("p0_fig1_proportionality-quick") == "1.6 % steps, 4 % data"


def test_quick_statements_never_claim_the_paper_scale() -> None:
    for paper in SECTIONS:
        assert all(one.small for one in judge_paper(paper) if one.statement["recipe"].endswith("-quick"))
