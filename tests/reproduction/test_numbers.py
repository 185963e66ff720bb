"""The numbers that statements are judged by, from records of runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.reproduction.kept import (
    compare_settings,
    count_seeds,
    summarize,
)
from benchmarks.reproduction.numbers import EXACT, more_numbers

from pliant.experiments.recipe import make_recipe
from pliant.experiments.run_config import Part, RunConfig
from pliant.experiments.store import Run
from pliant.training import Settings

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


def test_settings_of_a_grid_are_compared_on_complete_seeds() -> None:
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
    kept = summarize("x", recipe, runs, {"l2": {"chosen": "l2(lam=0.2)"}})
    assert kept.values("l2", "final_test_accuracy") == {0: 0.75}
    assert kept.values("l2", "setting_range") == {0: 0.25}
    assert kept.values("l2", "worst_setting") == {0: 0.5}
    assert kept.values("l2", "setting_1") == {0: 0.5, 1: 0.5}
    assert kept.values("l2", "setting_2") == {0: 0.75}
    assert kept.values("vanilla", "setting_range") == {}
    unchosen = summarize("x", recipe, runs, {})
    assert (unchosen.values("l2", "final_test_accuracy"), len(unchosen.numbers["vanilla"])) == ({}, 2)
    assert unchosen.values("l2", "setting_1") == {0: 0.5, 1: 0.5}
    assert (count_seeds(unchosen, "l2"), count_seeds(unchosen, "vanilla")) == ("0", "2")
    failed = replace(runs[-1], config=recipe.config(entry, entry.variants()[1], 1, "result"), status="diverged")
    unlucky = summarize("x", recipe, [*runs, failed], {"l2": {"chosen": "l2(lam=0.1)"}})
    assert unlucky.values("l2", "setting_2") == unlucky.values("l2", "setting_range") == {}
    assert unlucky.values("l2", "worst_setting") == {}
    numbers = ("final_test_accuracy", "setting_1", "setting_2", "setting_range", "worst_setting")
    assert [unlucky.diverged("l2", name) for name in numbers] == [0, 0, 1, 1, 1]
    assert [unlucky.diverged("vanilla", name) for name in ("final_test_accuracy", "setting_1")] == [0, 0]
    chosen = summarize("x", recipe, [*runs, failed], {"l2": {"chosen": "l2(lam=0.2)"}})
    assert chosen.diverged("l2", "final_test_accuracy") == 1
    assert count_seeds(chosen, "l2") == "1, 1 diverged"


def test_best_and_worst_setting_are_the_same_for_all_seeds() -> None:
    """Where equal settings differ by chance, the best of each seed minus the worst of each would be a range."""
    noise = ((0.5, 0.6), (0.6, 0.5), (0.5, 0.6), (0.6, 0.5))
    found = compare_settings({seed: dict(enumerate(pair)) for seed, pair in enumerate(noise)}, [0, 0])
    assert sum(told["setting_range"] for told in found.values()) == pytest.approx(0.0)
    assert len({told["worst_setting"] == told["setting_1"] for told in found.values()}) == 1


def test_value_of_a_measure_in_a_task() -> None:
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


def test_drop_is_before_the_first_step_and_first_loss_after_an_epoch() -> None:
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
    assert summarize("x", recipe, runs, {}).values("l2", "final_test_accuracy") == {0: 0.5}


def test_single_task_has_its_last_measure() -> None:
    records = [{"task": 0, "test_accuracy": 0.5, "measures": {"balancedness": value}} for value in (1.5, 1.25)]
    assert dict(more_numbers(make_run(records, "balancedness"))) == {
        "best_test_accuracy": 0.5,
        "balancedness_last": 1.25,
    }


def test_approximate_ranks_are_compared_with_the_exact_rank() -> None:
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
