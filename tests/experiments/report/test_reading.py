"""Which runs belong together, what they are called, and what is said of folders that are broken."""

import json
import shutil
from pathlib import Path

import pytest

from pliant.experiments.config import Part
from pliant.experiments.files import write_atomically
from pliant.experiments.report.reading import read_folders, read_runs
from pliant.experiments.store import load_runs
from tests.experiments.report.stores import config, write_recipe, write_results, write_run


def test_runs_of_a_recipe_are_one_comparison_in_its_order(tmp_path: Path) -> None:
    write_recipe(tmp_path, published={"L2": [0.9, 0.01]})
    write_results(tmp_path, {"L2": [0.8, 0.9], "fresh": [0.9, 0.9], "vanilla": [0.5, 0.6]})
    (comparison,) = read_folders([tmp_path])
    assert comparison.title == "Planted"
    assert comparison.headline == "mean_test_accuracy"
    assert [(c.name, c.role, len(c.runs)) for c in comparison.contenders] == [
        ("vanilla", "vanilla", 2),
        ("fresh", "fresh", 2),
        ("L2", "method", 2),
    ]
    assert comparison.recipe is not None
    assert comparison.recipe["published"] == {"L2": [0.9, 0.01]}
    assert comparison.contenders[2].values("mean_test_accuracy") == pytest.approx({0: 0.8, 1: 0.9})


def test_runs_of_two_folders_come_together_once(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for root, seeds in ((here, (0, 1)), (there, (1, 2))):
        write_recipe(root)
        for seed in seeds:
            # The run that both have is only finished in the second folder.
            status = "unfinished" if root == here and seed == 1 else "finished"
            write_run(root, config("L2", seed), [0.5, 0.6, 0.7], status=status)
    (comparison,) = read_folders([here, there])
    (contender,) = comparison.contenders
    assert [(run.config.seed, run.status) for run in contender.runs] == [
        (0, "finished"),
        (1, "finished"),
        (2, "finished"),
    ]
    assert comparison.folders == (here, there)


def test_runs_of_an_older_recipe_are_a_comparison_of_their_own(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    write_results(tmp_path, {"vanilla": [0.5], "L2": [0.6]})
    write_results(tmp_path, {"vanilla": [0.1], "L2": [0.2]}, stream=Part("label_flip", {"tasks": 3, "epochs": 99}))
    by_title = {comparison.title: comparison for comparison in read_folders([tmp_path])}
    assert len(by_title) == 2
    assert by_title["Planted"].contenders[1].values("mean_test_accuracy") == pytest.approx({0: 0.6})
    (other,) = (comparison for title, comparison in by_title.items() if title != "Planted")
    assert other.recipe is None
    assert other.title == "label flip on digits with mlp"


def test_an_entry_with_a_network_of_its_own_stays_in_its_recipe(tmp_path: Path) -> None:
    entries = [{"name": "vanilla", "label": "relu"}, {"name": "vanilla", "label": "wide", "model": {"widths": [7]}}]
    write_recipe(tmp_path, methods=entries)
    write_results(tmp_path, {"relu": [0.5, 0.6]}, methods=())
    write_results(tmp_path, {"wide": [0.6, 0.7]}, methods=(), model=Part("mlp", {"widths": [7]}))
    (comparison,) = read_folders([tmp_path])
    # Both are plain training, so neither is what the other is measured against.
    assert [(c.name, c.role) for c in comparison.contenders] == [("relu", "method"), ("wide", "method")]


def test_settings_that_nobody_chose_from_are_all_contenders(tmp_path: Path) -> None:
    for lam in (0.1, 0.01):
        write_results(tmp_path, {"l2": [lam]}, methods=(Part("l2", {"lam": lam}),))
    (comparison,) = read_folders([tmp_path])
    assert sorted(c.name for c in comparison.contenders) == ["l2(lam=0.01)", "l2(lam=0.1)"]
    assert len(comparison.trials) == 2


@pytest.mark.parametrize(("on", "trials"), [("validation", 2), ("test", 4)])
def test_chosen_settings_are_the_contender_and_all_were_tried(tmp_path: Path, on: str, trials: int) -> None:
    for lam in (0.1, 0.01):
        methods = (Part("l2", {"lam": lam}),)
        write_run(tmp_path, config("l2", 0, methods=methods), [lam])
        write_run(tmp_path, config("l2", 10**6, methods=methods, purpose="selection"), [lam])
    selection = {"on": on, "labels": {"l2": {"chosen": "l2(lam=0.1)", "scores": {}}}}
    write_atomically(tmp_path / "selection.json", json.dumps(selection).encode())
    (comparison,) = read_folders([tmp_path])
    assert [(c.name, c.settings) for c in comparison.contenders] == [("l2", "l2(lam=0.1)")]
    assert len(comparison.trials) == trials


def test_the_recipe_may_name_the_number_that_decides(tmp_path: Path) -> None:
    write_recipe(tmp_path, headline="mean_train_accuracy")
    write_results(tmp_path, {"vanilla": [0.5, 0.6, 0.7]})
    (comparison,) = read_folders([tmp_path])
    assert comparison.headline == "mean_train_accuracy"


def test_broken_folders_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    write_results(tmp_path, {"vanilla": [0.5, 0.6, 0.7], "L2": [0.6, 0.7, 0.8]})
    torn, wrong, empty, made, alien = sorted((tmp_path / "runs").iterdir())[:3] + [tmp_path / "runs" / n for n in "ab"]
    (torn / "result.json").write_text('{"config": ')
    (wrong / "result.json").write_text('{"status": "finished"}')
    for file in empty.iterdir():
        if file.name != "events.jsonl":
            file.unlink()
    made.mkdir()
    alien.write_text("no folder")
    (comparison,) = read_folders([tmp_path])
    assert {broken.path for broken in comparison.broken} == {torn, wrong, empty}
    assert "config.json" in next(broken.reason for broken in comparison.broken if broken.path == empty)
    assert len(comparison.runs) == 3


def test_a_broken_recipe_costs_its_title_only(tmp_path: Path) -> None:
    write_results(tmp_path, {"vanilla": [0.5], "L2": [0.6]})
    (tmp_path / "recipe.json").write_text('{"methods": []}')
    (tmp_path / "selection.json").write_text("{")
    (comparison,) = read_folders([tmp_path])
    assert len(comparison.contenders) == 2
    assert {broken.path.name for broken in comparison.broken} == {"recipe.json", "selection.json"}


def test_nothing_to_report_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no folder 'runs'"):
        read_folders([tmp_path])
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match="there are no runs in"):
        read_folders([tmp_path])
    with pytest.raises(ValueError, match="runs is empty"):
        read_runs([])


def test_a_folder_with_nothing_but_broken_runs_is_reported(tmp_path: Path) -> None:
    path = write_run(tmp_path, config("vanilla", 0), [0.5])
    (path / "result.json").write_text("no JSON")
    (comparison,) = read_folders([tmp_path])
    assert comparison.contenders == ()
    assert [broken.path for broken in comparison.broken] == [path]


def test_runs_at_hand_are_compared_by_their_setting(tmp_path: Path) -> None:
    write_results(tmp_path, {"vanilla": [0.5], "L2": [0.6]})
    write_results(tmp_path / "other", {"vanilla": [0.5]}, model=Part("cnn"))
    runs = [*load_runs(tmp_path), *load_runs(tmp_path / "other")]
    assert [len(comparison.runs) for comparison in read_runs(runs)] == [2, 1]


def test_a_folder_that_vanishes_while_it_is_read_does_not_stop_the_rest(tmp_path: Path) -> None:
    write_results(tmp_path, {"vanilla": [0.5], "L2": [0.6]})
    runs = load_runs(tmp_path)
    shutil.rmtree(runs[0].path)
    (comparison,) = read_folders([tmp_path])
    assert len(comparison.runs) == 1
