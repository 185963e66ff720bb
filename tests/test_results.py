"""docs/results.md and the method cards say what the kept runs say."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.reproduction import effects, explanations, statements
from benchmarks.reproduction.documents import BLOCK, DOCS, PAGES, render
from benchmarks.reproduction.drawings import NOTHING_DONE, Drawing, digest, known_drawings, make_rows
from benchmarks.reproduction.effects import EFFECT, effect_block, name_effect, sum_up
from benchmarks.reproduction.explanations import explanations_block
from benchmarks.reproduction.figures import PAPERS
from benchmarks.reproduction.kept import (
    KEPT,
    Estimate,
    Kept,
    asks_for,
    compare_settings,
    count_seeds,
    find_recipe,
    kept_runs,
    load_kept,
    summarise,
)
from benchmarks.reproduction.numbers import EXACT, more_numbers
from benchmarks.reproduction.pages import make_page
from benchmarks.reproduction.statements import SECTIONS, found_block, judge, load_statements, statements_block
from torch.nn.modules.batchnorm import _BatchNorm

from pliant import methods, models
from pliant.experiments.config import Part, RunConfig
from pliant.experiments.recipe import make_recipe
from pliant.experiments.store import Run, load_runs
from pliant.training import Settings

STATEMENTS = load_statements()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_is_what_the_command_writes(page: Path) -> None:
    text = page.read_text()
    assert render(text) == text, "python -m benchmarks.reproduction writes it anew"


def test_page_shows_every_statement_and_every_kept_experiment() -> None:
    blocks = set(BLOCK.findall((DOCS / "results.md").read_text()))
    assert {statement["paper"] for statement in STATEMENTS} == set(SECTIONS)
    assert {("statements", paper) for paper in SECTIONS} <= blocks
    kept = {file.name.removesuffix(".jsonl.gz") for file in KEPT.glob("*.gz")}
    assert {("table", name) for name in kept - {EFFECT}} <= blocks
    assert ("effect", "all") in blocks


@pytest.mark.parametrize("drawing", known_drawings(), ids=lambda drawing: drawing.name)
def test_figure_shows_the_kept_runs(drawing: Drawing) -> None:
    path = DOCS / "images" / f"{drawing.name}.svg"
    rows = make_rows(drawing)
    assert path.read_text().startswith(f"<!-- numbers: {digest(rows)} -->"), (
        "python -m benchmarks.reproduction draws it"
    )
    assert f"(images/{path.name})" in (DOCS / "results.md").read_text()
    assert {row["label"] for row in rows} == {
        entry.label for entry in find_recipe(drawing.name).methods if not drawing.settings or len(entry.variants()) > 1
    }
    lines = {*drawing.settings, NOTHING_DONE} if drawing.settings else set(drawing.quantities.values())
    assert {row["quantity"] for row in rows} == lines


SHARES = {
    "error", "dormant_fraction", "dead_fraction", "feature_rank", "hessian_rank", "hessian_exact_rank", "fisher_rank",
    "gauss_newton_rank", "gradient_overlap",
}  # fmt: skip


KEPT_NAMES = sorted(file.name.removesuffix(".jsonl.gz") for file in KEPT.glob("*.gz"))


@pytest.mark.parametrize("name", [name for name in KEPT_NAMES if find_recipe(name).measures])
def test_kept_measures_are_numbers_that_they_can_be(name: str) -> None:
    """Norms, ranks and shares are not negative, nor is the sharpness of cross-entropy; dormancy is minus an entropy."""
    seen = set()
    with kept_runs(name) as (runs, _):
        for run in runs:
            for record in run.records:
                for key, value in record.get("measures", {}).items():
                    measure, where = key.partition("/")[0], (run.id, record["task"], record["epoch"], key)
                    if value is not None:
                        seen.add(measure)
                        assert value <= 0 if measure == "dormancy" else value >= 0, where
                        assert value <= 1 or measure not in SHARES, where
    assert seen >= set(find_recipe(name).measures)


def test_list_of_recipes_shows_every_paper() -> None:
    assert BLOCK.findall((DOCS / "recipes.md").read_text()) == [("figures", paper) for paper in PAPERS]


@pytest.mark.parametrize("name", methods.names())
def test_card_shows_the_effect_of_its_method(name: str) -> None:
    assert BLOCK.findall((DOCS / "methods" / f"{name}.md").read_text()) == [("effect", name)]
    assert any(name in {part.name for part in entry.parts} for entry in find_recipe(EFFECT).methods)


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


def test_what_is_lost_and_what_is_kept_do_not_overlap() -> None:
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


@pytest.mark.parametrize("file", sorted(KEPT.glob("*.gz")), ids=lambda file: file.name)
def test_kept_runs_are_those_of_the_recipe(file: Path) -> None:
    name = file.name.removesuffix(".jsonl.gz")
    recipe = find_recipe(name)
    with kept_runs(name) as (runs, _):
        assert runs
        assert all(asks_for(recipe, run) and run.config.seed in recipe.seeds for run in runs)


def make_kept(numbers: dict[str, dict[int, dict[str, float]]], headline: str = "x", bad: int = 0) -> Kept:
    return Kept(headline, {}, list(numbers), numbers, {label: [bad] for label in numbers}, dict.fromkeys(numbers, 0))


def test_difference_pairs_seeds() -> None:
    kept = make_kept({"a": {0: {"x": 1.0}, 1: {"x": 3.0}, 7: {"x": 100.0}}, "b": {0: {"x": 0.5}, 1: {"x": 2.5}}})
    gap = kept.difference("a", "b", "x")
    assert gap is not None
    assert (gap.mean, gap.half, gap.count) == (0.5, 0.0, 2)


def test_explanations_sort_measures_by_what_they_tell_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        "lost": {"hessian_rank_change": -0.9, "weight_l1_change": 0.5, "dormancy_change": 0.4, "sharpness_change": 2.0},
        "kept": {"hessian_rank_change": -0.1, "weight_l1_change": 0.5, "dormancy_change": -0.1},
    }
    changes["lost"]["train_error_growth"], changes["kept"]["train_error_growth"] = 0.4, 0.0
    noise = (-0.01, 0.0, 0.01)
    numbers = {
        label: {seed: {name: value + noise[seed] for name, value in values.items()} for seed in range(3)}
        for label, values in changes.items()
    }
    monkeypatch.setattr(explanations, "load_kept", lambda name: make_kept(numbers | {"not run": {}}))
    assert explanations_block("any").splitlines() == [
        "- (of not run the runs do not tell whether it was kept)",
        "- falls more, or rises less, in those that lost it (lost) than in those that kept it (kept): `hessian_rank`",
        "- rises more, or falls less, in those that lost it: `dormancy`",
        "- does not tell them apart: `weight_l1`",
        "- is not defined for all of them, or starts from zero: `sharpness`",
    ]


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
def test_verdict_asks_where_the_whole_interval_lies(
    values: tuple, claimed: tuple | None, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = make_kept({"a": {seed: {"x": value} for seed, value in enumerate(values)}})
    monkeypatch.setattr(statements, "load_kept", lambda name: kept)
    statement = {"recipe": "r", "label": "a"} | ({} if claimed is None else {"claimed": claimed})
    assert judge(statement)[0] == verdict


@pytest.mark.parametrize(("left", "seen"), [(3, "+0.2100 ± 0.0248, 3 seeds"), (1, "+0.2000, 1 seeds"), (0, "no seed")])
def test_nothing_is_decided_by_the_runs_that_did_not_diverge(
    left: int, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"a": {seed: {"x": 0.2 + 0.01 * seed} for seed in range(left)}}
    monkeypatch.setattr(statements, "load_kept", lambda name: make_kept(numbers, bad=2))
    assert judge({"recipe": "r", "label": "a"}) == ("not decided", f"{seen}, 2 diverged")
    assert judge({"recipe": "r", "label": "a", "claimed": (0.5, 1.0)})[0] == "not decided"


def test_only_runs_that_diverged_where_a_number_is_from_keep_it_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"setting_1": 0.2, "x": 0.2}  # of the second setting, which has diverged, there is nothing
    numbers = {"a": {seed: {name: value + 0.01 * seed for name, value in told.items()} for seed in range(3)}}
    monkeypatch.setattr(statements, "load_kept", lambda name: Kept("x", {}, ["a"], numbers, {"a": [0, 1]}, {"a": 0}))
    verdicts = {name: judge({"recipe": "r", "label": "a", "number": name}) for name in (*told, "setting_2")}
    verdicts["setting_range"] = judge({"recipe": "r", "label": "a", "number": "setting_range"})
    assert verdicts["x"][0] == verdicts["setting_1"][0] == "reproduced"
    assert verdicts["setting_2"] == verdicts["setting_range"] == ("not decided", "no seed, 1 diverged")


def test_labels_of_two_recipes_are_compared_seed_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_statement_that_is_not_counted_is_shown_in_parentheses_alone(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert statements_block("P0").splitlines()[-1].startswith("Open, for want of runs: 1 for `r`")


def test_open_statement_waits_for_the_recipe_that_lacks_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {name: make_kept({"a": {seed: {"x": 0.0} for seed in range(n)}}) for name, n in (("one", 3), ("other", 2))}
    said = {"paper": "P0", "claim": "", "recipe": "one", "higher": "a", "lower": "a", "lower_recipe": "other"}
    monkeypatch.setattr(statements, "load_kept", kept.get)
    monkeypatch.setattr(statements, "load_statements", lambda: [said, said | {"lower_recipe": "never run"}])
    assert "Open, for want of runs: 1 for `other`, 1 for `never run`" in statements_block("P0")


def test_effect_is_named_by_the_difference_in_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert name_effect(Estimate(-0.2, 0.1, 3)) == "helps"
    assert name_effect(Estimate(0.2, 0.1, 3)) == "hurts"
    assert name_effect(Estimate(0.2, 0.3, 3)) == "no difference seen"
    assert name_effect(Estimate(-0.2, 0.1, 2)) == name_effect(None) == "too few seeds"

    def runs(*accuracies: float) -> dict[int, dict[str, float]]:
        return {seed: {"mean_train_accuracy": a, "final_train_accuracy": a / 2} for seed, a in enumerate(accuracies)}

    numbers = {"vanilla": runs(0.5, 0.52, 0.51), "fresh": runs(0.99), "FIRE": runs(0.9, 0.92, 0.91), "L2 1e-3": runs()}
    monkeypatch.setattr(effects, "load_kept", lambda name: make_kept(numbers, "mean_train_accuracy"))
    rows = effect_block("fire").splitlines()[4:]
    assert rows == [
        "| *doing nothing* | 49.0 ± 2.5 | 74.5 ± 1.2 |  |  | 3 |",
        "| *a fresh network for every task* | 1.0 | 50.5 |  |  | 1 |",
        "| FIRE | 9.0 ± 2.5 | 54.5 ± 1.2 | -40.0 ± 0.0 | helps | 3 |",
        "",
        "It helps here with `FIRE`.",
    ]
    assert "| L2 1e-3 | – | – | – | too few seeds | 0 |" in effect_block("l2")


def test_sentence_says_what_all_settings_come_to() -> None:
    assert sum_up({"hurts": ["c"], "helps": ["a", "b"]}) == "It helps here with a and b; it hurts with c."
    assert sum_up({"no difference seen": ["a"], "diverges": ["b"]}) == (
        "**No help was seen here**: it diverges with b; it makes no difference that was seen with a."
    )
    assert sum_up({"too few seeds": ["a", "b", "c"], "helps": ["d"]}) == (
        "Too few seeds to say what it does here with a, b and c."
    )


AT_THE_END = {"train_accuracy": 1.0, "task_online_accuracy": 1.0}
"""What a record of a task's last epoch has beside its test."""


def make_run(records: list[dict[str, Any]], *measures: str) -> Run:
    config = RunConfig(
        label="a",
        methods=(),
        fresh=False,
        data=Part("digits"),
        model=Part("mlp"),
        stream=Part("random_labels"),
        training=Settings(),
        measures=measures,
        seed=0,
        purpose="result",
        holdout=0.0,
        device="cpu",
    )
    run = Run(Path("nowhere"), config, "finished", {}, "")
    run.__dict__["records"] = records
    return run


def test_settings_of_a_grid_are_compared_where_they_were_run() -> None:
    values = {"data": "digits", "model": "mlp", "stream": {"name": "single", "epochs": 1}}
    grid = {"name": "l2", "grid": {"lam": [0.1, 0.2]}}
    recipe = make_recipe(values | {"methods": ["vanilla", grid], "seeds": 2, "selection": {"on": "test"}})
    runs = []
    for entry in recipe.methods:
        for seed in (0, 1):
            for place, parts in enumerate(entry.variants()):
                if (seed, place) != (1, 1):
                    result = {"final_test_accuracy": 0.5 + 0.25 * place}
                    runs.append(Run(Path("x"), recipe.config(entry, parts, seed, "result"), "finished", result, ""))
                    runs[-1].__dict__["records"] = [{"task": 0, "train_accuracy": 1.0}]
    kept = summarise("x", recipe, runs, {"l2": {"chosen": "l2(lam=0.2)"}})
    assert kept.values("l2", "final_test_accuracy") == {0: 0.75}
    assert kept.values("l2", "setting_range") == {0: 0.25}
    assert kept.values("l2", "worst_setting") == {0: 0.5}
    assert kept.values("l2", "setting_1") == {0: 0.5, 1: 0.5}
    assert kept.values("l2", "setting_2") == {0: 0.75}
    assert kept.values("vanilla", "setting_range") == {}
    unchosen = summarise("x", recipe, runs, {})
    assert (unchosen.values("l2", "final_test_accuracy"), len(unchosen.numbers["vanilla"])) == ({}, 2)
    assert unchosen.values("l2", "setting_1") == {0: 0.5, 1: 0.5}
    assert (count_seeds(unchosen, "l2"), count_seeds(unchosen, "vanilla")) == ("0", "2")
    failed = replace(runs[-1], config=recipe.config(entry, entry.variants()[1], 1, "result"), status="diverged")
    unlucky = summarise("x", recipe, [*runs, failed], {"l2": {"chosen": "l2(lam=0.1)"}})
    assert unlucky.values("l2", "setting_2") == unlucky.values("l2", "setting_range") == {}
    assert unlucky.values("l2", "worst_setting") == {}
    numbers = ("final_test_accuracy", "setting_1", "setting_2", "setting_range", "worst_setting")
    assert [unlucky.diverged("l2", name) for name in numbers] == [0, 0, 1, 1, 1]
    assert [unlucky.diverged("vanilla", name) for name in ("final_test_accuracy", "setting_1")] == [0, 0]
    chosen = summarise("x", recipe, [*runs, failed], {"l2": {"chosen": "l2(lam=0.2)"}})
    assert chosen.diverged("l2", "final_test_accuracy") == 1
    assert count_seeds(chosen, "l2") == "1, 1 diverged"


def test_best_and_worst_setting_are_the_same_for_all_seeds() -> None:
    """Where equal settings differ by chance, the best of each seed minus the worst of each would be a range."""
    noise = ((0.5, 0.6), (0.6, 0.5), (0.5, 0.6), (0.6, 0.5))
    found = compare_settings({seed: dict(enumerate(pair)) for seed, pair in enumerate(noise)}, [0, 0])
    assert sum(told["setting_range"] for told in found.values()) == pytest.approx(0.0)
    assert len({told["worst_setting"] == told["setting_1"] for told in found.values()}) == 1


def test_measure_counts_where_it_is_read() -> None:
    """A value that is not defined at a later step of a task does not take away those at the first steps."""
    records = [
        {"task": task, "measures": {"weight_l1": 1.0 + task if first else None, "update_l1": 1.0 if first else None}}
        | AT_THE_END
        for task in range(5)
        for first in (True, False)
    ]
    numbers = dict(more_numbers(make_run(records, "weight_l1", "update_l1")))
    assert numbers["weight_l1_change"] == 4.0
    assert "update_l1_change" not in numbers
    records[0]["measures"]["weight_l1"] = None
    assert "weight_l1_change" not in dict(more_numbers(make_run(records, "weight_l1")))


def test_change_is_from_the_first_tasks_to_the_last() -> None:
    records: list[dict[str, Any]] = []
    for task in range(10):
        for epoch in (1, 2, 3):
            measures = {"weight_l1": 1.0 + task + 100 * (epoch - 1), "update_l1": 2.0 + task + 2 * epoch, "loss": None}
            measures["update_l1"] += 1000.0 if epoch == 1 else 0.0
            records.append({"task": task, "epoch": epoch, "measures": measures})
        records[-1] |= {"train_accuracy": 0.9 - 0.01 * task, "task_online_accuracy": 0.8 - 0.03 * task}
    numbers = dict(more_numbers(make_run(records, "weight_l1", "update_l1", "loss")))
    assert numbers == pytest.approx(
        {
            "weight_l1_change": (9.5 - 1.5) / 1.5,  # at the first step of a task
            "weight_l1_mean": 5.5,
            "update_l1_change": (15.5 - 7.5) / 7.5,  # over the task, its first step left out
            "update_l1_mean": 11.5,
            "weight_l1_late_change": (9.5 - 7.5) / 7.5,
            "update_l1_late_change": (15.5 - 13.5) / 13.5,
            "train_error_growth": 0.085,  # from the end of the first task
            "train_error_trend": 0.08,  # from the first two tasks
            "first_train_error": 0.1,
            "early_train_error": 0.105,
            "late_train_error": 0.185,
            "online_error_growth": 0.24,
        }
    )


def test_drop_is_at_once_and_first_loss_is_after_an_epoch() -> None:
    def epoch(task: int, accuracy: float, **more: float) -> dict[str, Any]:
        return {"task": task, "test_accuracy": accuracy} | AT_THE_END | more

    records = [
        epoch(0, 0.9),
        epoch(0, 0.8),
        epoch(1, 0.6, entry_test_accuracy=0.7),
        epoch(1, 0.95),
        epoch(2, 0.93, entry_test_accuracy=0.92),
    ]
    numbers = dict(more_numbers(make_run(records)))
    assert numbers["mean_drop"] == pytest.approx((0.1 + 0.03) / 2)
    assert numbers["mean_first_loss"] == pytest.approx((0.2 + 0.02) / 2)
    assert "best_test_accuracy" not in numbers  # of one test there is no best
    assert numbers["best_gain"] == pytest.approx(0.03)
    del records[2]["test_accuracy"]
    assert "mean_first_loss" not in dict(more_numbers(make_run(records)))


def test_late_accuracy_is_over_the_last_ten_tests() -> None:
    records = [{"task": 0, "test_accuracy": float(epoch), "train_accuracy": 1.0} for epoch in range(12)]
    assert dict(more_numbers(make_run(records)))["late_test_accuracy"] == 6.5
    assert "late_test_accuracy" not in dict(more_numbers(make_run(records[:9])))


def test_least_gain_is_the_worst_step_between_the_ends_of_tasks() -> None:
    ends = (0.5, 0.7, 0.6, 0.9)
    records = [
        {"task": task, "test_accuracy": 0.0 if epoch < 2 else end, "entry_test_accuracy": 0.0} | AT_THE_END
        for task, end in enumerate(ends)
        for epoch in range(12)
    ]
    assert dict(more_numbers(make_run(records)))["least_gain"] == pytest.approx(-0.1)
    assert "least_gain" not in dict(more_numbers(make_run(records[3:])))


def test_runs_of_an_earlier_form_of_the_recipe_do_not_count() -> None:
    values = {"data": "digits", "model": "mlp", "stream": {"name": "single", "epochs": 1}}
    entry = {"name": "l2", "lam": 0.1}
    recipe = make_recipe(values | {"methods": [entry], "seeds": 2})
    (asked,) = recipe.methods
    config = recipe.config(asked, asked.variants()[0], 0, "result")
    runs = [
        Run(Path("x"), changed, "finished", {"final_test_accuracy": 0.5}, "")
        for changed in (
            replace(config, measures=("loss",)),
            replace(config, seed=1, training=Settings(batch_size=3)),
            replace(config, seed=1, methods=(Part("l2", {"lam": 0.2}),)),
            replace(config, seed=1, label="gone"),
        )
    ]
    for run in runs:
        run.__dict__["records"] = [{"task": 0, "train_accuracy": 1.0}]
    assert summarise("x", recipe, runs, {}).values("l2", "final_test_accuracy") == {0: 0.5}


def test_single_task_has_its_last_measure() -> None:
    records = [{"task": 0, "test_accuracy": 0.5, "measures": {"balancedness": value}} for value in (1.5, 1.25)]
    assert dict(more_numbers(make_run(records, "balancedness"))) == {
        "best_test_accuracy": 0.5,
        "balancedness_last": 1.25,
    }


def test_approximations_of_a_rank_are_held_against_it() -> None:
    exact, approximate = (0.5, 0.6, 0.4, 0.3, 0.2), (0.6, 0.7, 0.5, 0.4, 0.4)
    records = [
        {"task": task, "measures": {EXACT: one, "fisher_rank": other}} | AT_THE_END
        for task, (one, other) in enumerate(zip(exact, approximate, strict=True))
    ]
    numbers = dict(more_numbers(make_run(records, EXACT, "fisher_rank")))
    assert numbers["fisher_rank_first_gap"] == pytest.approx(0.1)
    assert numbers["fisher_rank_late_gap"] == pytest.approx(0.2)
    assert numbers["fisher_rank_gap_growth"] == pytest.approx(0.1)
    assert numbers["fisher_rank_correlation"] == pytest.approx(4 / 17**0.5)
    for record in records:
        record["measures"]["fisher_rank"] = 0.5
    assert "fisher_rank_correlation" not in dict(more_numbers(make_run(records, EXACT, "fisher_rank")))


def test_kept_experiment_becomes_a_report_with_the_published_numbers(tmp_path: Path) -> None:
    page = make_page("p0_table1_mnist", tmp_path / "page").read_text()
    recipe = find_recipe("p0_table1_mnist")
    mean, spread = recipe.published["SWR"]
    assert f"{100 * mean:.2f} ± {100 * spread:.2f}" in page
    assert recipe.title in page
    assert "unreadable" not in page
    assert len(load_runs(tmp_path / "page")) > 0
