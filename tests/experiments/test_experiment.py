"""From recipe to results: settings are chosen on data that the results are not measured on."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import pliant
from pliant import data
from pliant.experiments.experiment import run_experiment
from pliant.experiments.recipe import make_recipe
from pliant.experiments.run import execute, make_stream
from pliant.experiments.run_config import RunConfig
from pliant.experiments.store import Status, load_recipe_values, load_runs, load_selection
from tests.data.pictures import write_folder

VALUES: dict[str, Any] = {
    "title": "small",
    "data": {"name": "digits", "first": 120},
    "model": {"name": "mlp", "widths": [16]},
    "stream": {"name": "single", "epochs": 4},
    "training": {"batch_size": 16},
    "methods": ["vanilla", "l2:lam=1e-4|30"],
    "seeds": 2,
    "selection": {"seeds": 2, "fraction": 0.25},
}


class InThisProcess:
    """Does runs one after the other, and remembers them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.batches: list[list[RunConfig]] = []

    def __call__(self, configs: Sequence[RunConfig]) -> dict[str, Status]:
        self.batches.append(list(configs))
        return {config.id: execute(config, self.root).status for config in configs}


def test_settings_are_chosen_without_the_test_data(tmp_path: Path) -> None:
    run_all = InThisProcess(tmp_path)
    statuses = run_experiment(make_recipe(VALUES), tmp_path, run_all)
    trials, results = run_all.batches
    assert {config.purpose for config in trials} == {"selection"}
    assert {config.label for config in trials} == {"l2"}
    assert {config.purpose for config in results} == {"result"}
    assert not {config.seed for config in trials} & {config.seed for config in results}
    assert [(config.label, config.seed) for config in results] == [("vanilla", 0), ("l2", 0), ("vanilla", 1), ("l2", 1)]
    assert {config.methods[0].options["lam"] for config in results if config.methods} == {1e-4}
    assert set(statuses.values()) == {"finished"}
    selection = load_selection(tmp_path)
    assert (selection["on"], selection["labels"]["l2"]["chosen"]) == ("validation", "l2(lam=0.0001)")
    scores = selection["labels"]["l2"]["scores"]
    assert scores["l2(lam=0.0001)"] > scores["l2(lam=30)"]
    assert load_recipe_values(tmp_path)["title"] == "small"


def test_a_selection_run_sees_training_examples_only() -> None:
    recipe = make_recipe(VALUES)
    entry = recipe.methods[1]
    stream = make_stream(recipe.config(entry, entry.variants()[0], 7, "selection"))
    (task,) = stream
    original = data.load("digits", first=120)
    both = torch.cat([task.train.rows, task.test.rows])
    assert torch.equal(both.sort().values, torch.arange(120))
    assert len(task.test) == 30
    assert torch.equal(task.test.x, original.train.x)


def test_the_sources_protocol_only_if_asked_for(tmp_path: Path) -> None:
    run_all = InThisProcess(tmp_path)
    run_experiment(make_recipe(VALUES | {"selection": {"on": "test"}}), tmp_path, run_all)
    (results,) = run_all.batches
    assert len(results) == 2 + 4
    selection = load_selection(tmp_path)
    assert selection["on"] == "test"
    scores = [
        run.result["final_test_accuracy"] for run in load_runs(tmp_path) if run.config.variant[1] == "l2(lam=0.0001)"
    ]
    assert len(scores) == 2
    assert selection["labels"]["l2"]["scores"]["l2(lam=0.0001)"] == pytest.approx(sum(scores) / 2)


def test_a_setting_that_diverges_is_not_chosen(tmp_path: Path) -> None:
    values = VALUES | {
        "methods": ["l2:lam=1e30|30"],
        "training": {"batch_size": 16, "optimizer": "sgd", "lr": 0.01},
    }
    run_experiment(make_recipe(values), tmp_path, InThisProcess(tmp_path))
    label = load_selection(tmp_path)["labels"]["l2"]
    assert (label["chosen"], label["scores"]["l2(lam=1e+30)"]) == ("l2(lam=30)", None)
    json.loads((tmp_path / "selection.json").read_text())


def test_of_losses_the_lowest_is_chosen(tmp_path: Path) -> None:
    values = VALUES | {"headline": "final_train_loss", "selection": {"seeds": 1, "fraction": 0.25}, "seeds": 1}
    told: list[str] = []
    run_experiment(make_recipe(values), tmp_path, InThisProcess(tmp_path), told.append)
    label = load_selection(tmp_path)["labels"]["l2"]
    assert label["scores"]["l2(lam=0.0001)"] < label["scores"]["l2(lam=30)"]
    assert label["chosen"] == "l2(lam=0.0001)"
    assert any("next" in line and "with lam=30" in line for line in told)


def test_the_output_names_the_data_that_chose_a_setting(tmp_path: Path) -> None:
    told: list[str] = []
    run_experiment(make_recipe(VALUES), tmp_path, InThisProcess(tmp_path), told.append)
    scores = load_selection(tmp_path)["labels"]["l2"]["scores"]
    best, other = scores["l2(lam=0.0001)"], scores["l2(lam=30)"]
    assert told == [
        f"chosen: l2(lam=0.0001) ({best:.3f}; next {other:.3f} with lam=30), by 2 seeds on 30 held-out examples each"
    ]
    told.clear()
    run_experiment(
        make_recipe(VALUES | {"selection": {"on": "test"}}),
        tmp_path / "test",
        InThisProcess(tmp_path / "test"),
        told.append,
    )
    assert told[0].endswith("with lam=30), by 2 seeds on 360 test examples each")


def test_a_tie_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    values = VALUES | {"methods": ["vanilla", "shrink_perturb:lam=0.2|0.4|0.6"], "selection": {"seeds": 1}}
    recipe = make_recipe(values)  # Without a second task it never acts.
    run_experiment(recipe, tmp_path, InThisProcess(tmp_path), told.append)
    (score,) = set(load_selection(tmp_path)["labels"]["shrink_perturb"]["scores"].values())
    line = (
        f"hosen: shrink_perturb(lam=0.2), the first of 3 that score {score:.3f} (also lam=0.4; lam=0.6), by 1 seed on "
        "12 held-out examples; a larger selection.fraction or more selection.seeds would tell more"
    )
    assert told == [f"c{line}"]
    (section,) = pliant.report(tmp_path).sections
    assert section.choices == [f"C{line}."]
    assert f"C{line}." in section.answer.reasons


def test_the_order_of_settings_does_not_change_the_choice(tmp_path: Path) -> None:
    values = VALUES | {"methods": ["vanilla", "redo:every=5|9:tau=0.1"], "selection": {"seeds": 1}}
    run_experiment(make_recipe(values), tmp_path, InThisProcess(tmp_path))
    (section,) = pliant.report(tmp_path).sections
    assert section.table.contenders == ["vanilla", "redo"]


def test_results_do_not_go_into_a_folder_of_images(tmp_path: Path) -> None:
    zoo = write_folder(tmp_path / "zoo")
    values = {"data": str(zoo), "model": "mlp", "stream": {"name": "single", "epochs": 1}, "methods": ["vanilla"]}
    with pytest.raises(ValueError, match=r"the folder of results '.*runs' is inside the data '.*zoo'; choose another"):
        run_experiment(make_recipe(values), zoo / "runs", dict)
    assert sorted(path.name for path in zoo.iterdir()) == ["cat", "dog", "owl"]


def test_a_second_call_runs_nothing(tmp_path: Path) -> None:
    run_experiment(make_recipe(VALUES), tmp_path, InThisProcess(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json*")}
    run_experiment(make_recipe(VALUES), tmp_path, InThisProcess(tmp_path))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json*")} == before


def test_a_choice_of_an_earlier_recipe_no_longer_counts(tmp_path: Path) -> None:
    def nothing(configs: Sequence[RunConfig]) -> dict[str, Status]:
        return {}

    stale = tmp_path / "selection.json"
    run_experiment(make_recipe(VALUES | {"methods": ["l2:lam=1|2"]}), tmp_path, nothing)
    assert stale.exists()
    run_experiment(make_recipe(VALUES | {"methods": ["l2:lam=3"]}), tmp_path, nothing)
    assert not stale.exists()
    run_experiment(make_recipe(VALUES | {"methods": ["l2:lam=1|2"]}), tmp_path, nothing)

    def interrupted(configs: Sequence[RunConfig]) -> dict[str, Status]:
        raise KeyboardInterrupt

    for methods, kept in (["l2:lam=1|2"], True), (["l2:lam=1|3"], False):
        with pytest.raises(KeyboardInterrupt):
            run_experiment(make_recipe(VALUES | {"methods": methods}), tmp_path, interrupted)
        assert stale.exists() is kept


def test_a_trial_without_a_folder_is_the_worst(tmp_path: Path) -> None:
    recipe = make_recipe(VALUES | {"selection": {"seeds": 1}})

    def only_the_second(configs: Sequence[RunConfig]) -> dict[str, Status]:
        return {config.id: execute(config, tmp_path).status for config in configs[1:2]}

    run_experiment(recipe, tmp_path, only_the_second)
    label = load_selection(tmp_path)["labels"]["l2"]
    assert (label["chosen"], label["scores"]["l2(lam=0.0001)"]) == ("l2(lam=30)", None)


def test_selection_by_a_metric_that_no_run_has_is_refused(tmp_path: Path) -> None:
    values = VALUES | {
        "stream": {"name": "random_labels", "tasks": 1, "epochs": 1},
        "headline": "final_test_accuracy",
        "selection": {"seeds": 1},
    }
    with pytest.raises(ValueError, match=r"headline is 'final_test_accuracy', which .* lacks; allowed: final"):
        run_experiment(make_recipe(values), tmp_path, InThisProcess(tmp_path))
