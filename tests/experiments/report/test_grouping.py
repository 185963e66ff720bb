"""Which runs belong together, what they are called, and what is said of folders that are broken."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import pliant
from pliant._files import write_atomically
from pliant._json import seal, unseal
from pliant.experiments.report.grouping import compare_folders, compare_runs
from pliant.experiments.report.histories import read_histories
from pliant.experiments.report.measure_charts import associations
from pliant.experiments.run_config import Part
from pliant.experiments.store import Status, load_runs
from pliant.training import Settings
from tests.experiments.report.stores import config, write_recipe, write_results, write_run


def test_runs_of_a_recipe_are_one_comparison_in_its_order(tmp_path: Path) -> None:
    write_recipe(tmp_path, published={"L2": [0.9, 0.01]})
    write_results(tmp_path, {"L2": [0.8, 0.9], "fresh": [0.9, 0.9], "vanilla": [0.5, 0.6]})
    (comparison,) = compare_folders([tmp_path])
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


def test_runs_of_two_folders_are_pooled_without_duplicates(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for root, seeds in ((here, (0, 1)), (there, (1, 2))):
        write_recipe(root)
        for seed in seeds:
            # The run that both have is only finished in the second folder.
            status = "unfinished" if root == here and seed == 1 else "finished"
            write_run(root, config("L2", seed), [0.5, 0.6, 0.7], status=status)
    (comparison,) = compare_folders([here, there])
    (contender,) = comparison.contenders
    assert [(run.config.seed, run.status) for run in contender.runs] == [
        (0, "finished"),
        (1, "finished"),
        (2, "finished"),
    ]
    assert comparison.folders == (here, there)


def test_runs_with_different_settings_are_not_pooled(tmp_path: Path) -> None:
    for root, lr, seeds in ((tmp_path / "a", 0.1, (0, 1)), (tmp_path / "b", 0.001, (1, 2))):
        write_recipe(root, methods=["vanilla", {"name": "l2", "label": "L2", "lam": 0.1, "training": {"lr": lr}}])
        for seed in seeds:
            write_run(root, config("vanilla", seed), [0.5])
            write_run(root, config("L2", seed, training=Settings(lr=lr)), [lr])
    comparisons = compare_folders([tmp_path / "a", tmp_path / "b"])
    rates = [{run.config.training.lr for run in one.runs if run.config.label == "L2"} for one in comparisons]
    assert rates == [{0.1}, {0.001}]
    assert [len(one.runs) for one in comparisons] == [4, 4]
    assert [str(tmp_path / name) in one.title for name, one in zip("ab", comparisons, strict=True)] == [True, True]


def test_an_unknown_stream_is_reported(tmp_path: Path) -> None:
    for label in ("vanilla", "l2"):
        write_run(tmp_path, config(label, 0, stream=Part("newstream")), [0.5, 0.6])
    assert "newstream" in pliant.report(tmp_path).to_html()


def test_a_recipe_without_title_or_source_is_read(tmp_path: Path) -> None:
    values = write_recipe(tmp_path)
    write_results(tmp_path, {"vanilla": [0.5], "L2": [0.6]})
    less = {key: value for key, value in values.items() if key not in ("title", "source", "choices")}
    write_atomically(tmp_path / "recipe.json", seal(less))
    assert "L2" in pliant.report(tmp_path).to_html()
    del less["seeds"]
    write_atomically(tmp_path / "recipe.json", seal(less))
    (comparison,) = compare_folders([tmp_path])
    assert [broken.reason for broken in comparison.broken] == ["KeyError: 'seeds'"]


def test_a_recipe_with_an_unknown_method_is_read(tmp_path: Path) -> None:
    values = write_recipe(tmp_path)
    write_results(tmp_path, {"vanilla": [0.5], "L2": [0.6]})
    values["methods"][2]["parts"][0]["name"] = "gone"
    write_atomically(tmp_path / "recipe.json", seal(values))
    assert not compare_folders([tmp_path])[0].broken


def test_runs_of_an_older_recipe_are_a_separate_comparison(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    write_results(tmp_path, {"vanilla": [0.5], "L2": [0.6]})
    write_results(tmp_path, {"vanilla": [0.1], "L2": [0.2]}, stream=Part("label_flip", {"tasks": 3, "epochs": 99}))
    by_title = {comparison.title: comparison for comparison in compare_folders([tmp_path])}
    assert len(by_title) == 2
    assert by_title["Planted"].contenders[1].values("mean_test_accuracy") == pytest.approx({0: 0.6})
    (other,) = (comparison for title, comparison in by_title.items() if title != "Planted")
    assert other.recipe is None
    assert other.title == "label flip on digits with mlp (stream.epochs=99)"


def test_methods_dropped_from_the_recipe_stay_in_its_comparison(tmp_path: Path) -> None:
    write_recipe(tmp_path, methods=["vanilla", "swr"], seeds=2)
    write_results(tmp_path, {"vanilla": [0.5, 0.5], "fresh": [0.4, 0.4], "L2": [0.6, 0.6]})
    (comparison,) = compare_folders([tmp_path])
    assert [(c.name, c.role) for c in comparison.contenders] == [
        ("vanilla", "vanilla"),
        ("fresh", "fresh"),
        ("L2", "method"),
    ]
    assert comparison.recipe is not None
    assert {label for label, _ in comparison.not_begun} == {"swr"}


def test_titles_list_differing_options(tmp_path: Path) -> None:
    write_recipe(tmp_path, title="label flip on digits with mlp")
    write_results(tmp_path, {"vanilla": [0.5]})
    write_results(tmp_path, {"vanilla": [0.1]}, stream=Part("label_flip", {"tasks": 3, "epochs": 99}))
    assert sorted(comparison.title for comparison in compare_folders([tmp_path])) == [
        "label flip on digits with mlp (stream.epochs=2)",
        "label flip on digits with mlp (stream.epochs=99)",
    ]


def test_only_the_current_recipe_is_printed_after_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(tmp_path)
    write_results(tmp_path, {"vanilla": [0.5], "L2": [0.6]})
    write_results(tmp_path, {"vanilla": [0.1]}, stream=Part("label_flip", {"tasks": 3, "epochs": 99}))
    pliant.report(tmp_path).print(asked=True)
    told = capsys.readouterr().out
    assert told.count("┏") == 1
    line = "runs with other settings: label flip on digits with mlp (stream.epochs=99) (1 run); see `pliant report"
    assert line in " ".join(told.split())
    pliant.report(tmp_path).print()
    assert "runs with other settings" not in capsys.readouterr().out


def test_an_entry_with_its_own_network_stays_in_its_recipe(tmp_path: Path) -> None:
    entries = [{"name": "vanilla", "label": "relu"}, {"name": "vanilla", "label": "wide", "model": {"widths": [7]}}]
    write_recipe(tmp_path, methods=entries)
    write_results(tmp_path, {"relu": [0.5, 0.6]}, methods=())
    write_results(tmp_path, {"wide": [0.6, 0.7]}, methods=(), model=Part("mlp", {"widths": [7]}))
    (comparison,) = compare_folders([tmp_path])
    # Both are plain training, so neither is what the other is measured against.
    assert [(c.name, c.role) for c in comparison.contenders] == [("relu", "method"), ("wide", "method")]


def test_without_a_choice_all_settings_are_contenders(tmp_path: Path) -> None:
    for lam in (0.1, 0.01):
        write_results(tmp_path, {"l2": [lam]}, methods=(Part("l2", {"lam": lam}),))
    (comparison,) = compare_folders([tmp_path])
    assert sorted(c.name for c in comparison.contenders) == ["l2(lam=0.01)", "l2(lam=0.1)"]
    assert len(comparison.trials) == 2


@pytest.mark.parametrize(("on", "trials"), [("validation", 2), ("test", 4)])
def test_the_chosen_setting_is_the_contender_and_all_are_trials(tmp_path: Path, on: str, trials: int) -> None:
    for lam in (0.1, 0.01):
        methods = (Part("l2", {"lam": lam}),)
        write_run(tmp_path, config("l2", 0, methods=methods), [lam])
        write_run(tmp_path, config("l2", 10**6, methods=methods, purpose="selection"), [lam])
    selection = {"on": on, "labels": {"l2": {"chosen": "l2(lam=0.1)", "scores": {}, "seeds": 1, "examples": None}}}
    write_atomically(tmp_path / "selection.json", seal(selection))
    (comparison,) = compare_folders([tmp_path])
    assert [(c.name, c.settings) for c in comparison.contenders] == [("l2", "l2(lam=0.1)")]
    assert len(comparison.trials) == trials


def test_the_recipe_may_set_the_headline(tmp_path: Path) -> None:
    write_recipe(tmp_path, headline="mean_train_accuracy")
    write_results(tmp_path, {"vanilla": [0.5, 0.6, 0.7]})
    (comparison,) = compare_folders([tmp_path])
    assert comparison.headline == "mean_train_accuracy"


def test_broken_runs_are_reported_and_the_rest_is_read(tmp_path: Path) -> None:
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
    (comparison,) = compare_folders([tmp_path])
    assert {broken.path for broken in comparison.broken} == {torn, wrong, empty}
    assert "config.json" in next(broken.reason for broken in comparison.broken if broken.path == empty)
    assert len(comparison.runs) == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"status": "done"}, "status is 'done'"),
        ({"result": {"final_test_accuracy": None}}, "final_test_accuracy is None"),
    ],
)
def test_an_unknown_status_is_reported(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    write_results(tmp_path, {"vanilla": [0.5, 0.6]})
    path = sorted((tmp_path / "runs").iterdir())[0] / "result.json"
    path.write_bytes(seal(unseal(path.read_bytes()) | change))
    (comparison,) = compare_folders([tmp_path])
    assert reason in comparison.broken[0].reason
    assert len(comparison.runs) == 1


def test_a_broken_recipe_loses_only_its_title(tmp_path: Path) -> None:
    write_results(tmp_path, {"vanilla": [0.5], "L2": [0.6]})
    (tmp_path / "recipe.json").write_text('{"methods": []}')
    (tmp_path / "selection.json").write_text("{")
    (comparison,) = compare_folders([tmp_path])
    assert len(comparison.contenders) == 2
    assert {broken.path.name for broken in comparison.broken} == {"recipe.json", "selection.json"}


def test_folders_without_runs_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has a folder 'runs'"):
        compare_folders([tmp_path])
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match="there are no runs in"):
        compare_folders([tmp_path])
    with pytest.raises(ValueError, match="runs is empty"):
        compare_runs([])


def test_a_folder_with_only_broken_runs_is_reported(tmp_path: Path) -> None:
    path = write_run(tmp_path, config("vanilla", 0), [0.5])
    (path / "result.json").write_text("no JSON")
    (comparison,) = compare_folders([tmp_path])
    assert comparison.contenders == ()
    assert [broken.path for broken in comparison.broken] == [path]


def test_loaded_runs_are_grouped_by_setting(tmp_path: Path) -> None:
    write_results(tmp_path, {"vanilla": [0.5], "L2": [0.6]})
    write_results(tmp_path / "other", {"vanilla": [0.5]}, model=Part("cnn"))
    runs = [*load_runs(tmp_path), *load_runs(tmp_path / "other")]
    assert [len(comparison.runs) for comparison in compare_runs(runs)] == [2, 1]


def test_a_folder_that_vanishes_while_it_is_read_does_not_stop_the_rest(tmp_path: Path) -> None:
    write_results(tmp_path, {"vanilla": [0.5], "L2": [0.6]})
    runs = load_runs(tmp_path)
    shutil.rmtree(runs[0].path)
    (comparison,) = compare_folders([tmp_path])
    assert len(comparison.runs) == 1


GRID = {"name": "l2", "grid": {"lam": [0.1, 0.01]}}


def write_choice(root: Path, chosen: str, label: str = "l2") -> None:
    selection = {"on": "validation", "labels": {label: {"chosen": chosen, "scores": {}, "seeds": 1, "examples": None}}}
    write_atomically(root / "selection.json", seal(selection))


@pytest.mark.parametrize(
    ("entry", "chosen", "applied"),
    [
        (GRID, "l2(lam=0.1)", True),
        (GRID, "l2(lam=0.5)", False),  # no longer in the grid
        ({"name": "l2", "lam": 0.01}, "l2(lam=0.1)", False),  # no longer a grid
        ("vanilla", "l2(lam=0.1)", False),
    ],
)
def test_a_choice_counts_while_the_recipe_offers_it(tmp_path: Path, entry: object, chosen: str, applied: bool) -> None:
    methods = ["fresh", entry] if entry == "vanilla" else ["vanilla", entry]
    write_recipe(tmp_path, methods=methods)
    for lam in (0.1, 0.01):
        write_run(tmp_path, config("l2", 0, methods=(Part("l2", {"lam": lam}),)), [lam])
    write_choice(tmp_path, chosen)
    (comparison,) = compare_folders([tmp_path])
    assert comparison.selection.get("on") == ("validation" if applied else None)
    assert {c.name for c in comparison.contenders} == ({"l2"} if applied else {"l2(lam=0.1)", "l2(lam=0.01)"})


def test_a_choice_belongs_to_its_recipe(tmp_path: Path) -> None:
    older = Part("label_flip", {"tasks": 3, "epochs": 99})
    write_recipe(tmp_path, methods=["vanilla", GRID])
    for lam in (0.1, 0.01):
        methods = (Part("l2", {"lam": lam}),)
        write_run(tmp_path, config("l2", 0, methods=methods, stream=older), [lam])
        write_run(tmp_path, config("l2", 0, methods=methods), [lam])
    write_choice(tmp_path, "l2(lam=0.01)")
    found = {comparison.title: comparison for comparison in compare_folders([tmp_path])}
    assert [c.settings for c in found.pop("Planted").contenders] == ["l2(lam=0.01)"]
    (other,) = found.values()
    assert other.selection == {}
    assert len(other.contenders) == 2


def test_a_choice_of_a_recipe_without_runs_is_ignored(tmp_path: Path) -> None:
    write_recipe(tmp_path, methods=["vanilla", GRID], stream={"name": "label_flip", "tasks": 7})
    write_run(tmp_path, config("l2", 0, methods=(Part("l2", {"lam": 0.01}),)), [0.5])
    write_choice(tmp_path, "l2(lam=0.1)")
    (comparison,) = compare_folders([tmp_path])
    assert [c.settings for c in comparison.contenders] == ["l2(lam=0.01)"]
    assert comparison.selection == {}


def test_choices_of_two_folders_are_both_kept(tmp_path: Path) -> None:
    for label, chosen in (("a", 0.1), ("b", 0.01)):
        root = tmp_path / label
        write_recipe(root, methods=["vanilla", {**GRID, "label": label}])
        for lam in (0.1, 0.01):
            write_run(root, config(label, 0, methods=(Part("l2", {"lam": lam}),)), [lam])
        write_choice(root, f"l2(lam={chosen})", label)
    (comparison,) = compare_folders([tmp_path / "a", tmp_path / "b"])
    assert {c.name: c.settings for c in comparison.contenders} == {"a": "l2(lam=0.1)", "b": "l2(lam=0.01)"}


def test_a_recipe_is_read_without_its_data_and_network(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, headline="final_test_accuracy")
    elsewhere = {"data": {"name": "gone/", "options": {}}, "model": {"name": "gone.py:build", "options": {}}}
    write_atomically(tmp_path / "recipe.json", seal(recipe | elsewhere))
    changes = {"data": Part("gone/"), "model": Part("gone.py:build")}
    write_results(tmp_path, {"L2": [0.8], "fresh": [0.9], "vanilla": [0.5]}, **changes)
    (comparison,) = compare_folders([tmp_path])
    assert comparison.broken == ()
    assert (comparison.title, comparison.headline) == ("Planted", "final_test_accuracy")
    assert [c.name for c in comparison.contenders] == ["vanilla", "fresh", "L2"]


@pytest.mark.parametrize("order", [("here", "there"), ("there", "here")])
@pytest.mark.parametrize(
    ("better", "worse"), [("finished", "failed"), ("diverged", "failed"), ("failed", "unfinished")]
)
def test_of_two_copies_the_one_that_got_further_counts(
    tmp_path: Path, order: tuple[str, str], better: Status, worse: Status
) -> None:
    write_run(tmp_path / "here", config("L2", 0), [0.5], status=better)
    write_run(tmp_path / "there", config("L2", 0), [0.5], status=worse)
    (comparison,) = compare_folders([tmp_path / name for name in order])
    assert [run.status for run in comparison.runs] == [better]


@pytest.mark.parametrize("change", [{"measures": ("weight_l2",)}, {"device": "cuda"}, {"reference": "boundary"}])
@pytest.mark.parametrize("with_recipe", [True, False])
def test_a_seed_counts_once_even_with_different_measures(
    tmp_path: Path, change: dict[str, Any], with_recipe: bool
) -> None:
    if with_recipe:
        write_recipe(tmp_path)
    write_results(tmp_path, {"L2": [0.6, 0.7]}, **change)
    write_results(tmp_path, {"L2": [0.8, 0.9]})
    (comparison,) = compare_folders([tmp_path])
    (contender,) = comparison.contenders
    assert [run.config.seed for run in contender.runs] == [0, 1]
    if with_recipe:  # which asks for the second
        assert contender.values("mean_test_accuracy") == pytest.approx({0: 0.8, 1: 0.9})


def test_a_damaged_line_of_an_unfinished_run_is_tolerated(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    folder = write_run(tmp_path, config("vanilla", 0), [0.5, 0.6], status="unfinished")
    with (folder / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b"\0\0\0\n")
    (run,) = load_runs(tmp_path)
    assert run.progress == 0
    assert "No run has finished yet." in str(pliant.report(tmp_path))


def test_the_recipe_comes_first_and_missing_runs_are_counted(tmp_path: Path) -> None:
    for lr in (0.1, 0.2, 0.3, 0.4):  # whatever the order of their names
        root = tmp_path / str(lr)
        write_recipe(root, training={"lr": lr}, seeds=2)
        write_results(root, {"vanilla": [0.5]}, training=Settings(lr=lr))
        write_results(root, {"vanilla": [0.5], "L2": [0.6]})
        first, second = compare_folders([root])
        assert first.title == "Planted"
        assert second.recipe is None
        assert set(first.not_begun) == {("vanilla", 1), ("fresh", 0), ("fresh", 1), ("L2", 0), ("L2", 1)}
        assert not second.not_begun
        told = str(pliant.report(root))
        assert "no run of another method has started yet" in told
        assert "5 runs of the recipe have not started." in told


@pytest.mark.parametrize(("stream", "alike"), [("label_flip", True), ("continual_full", False)])
def test_measures_are_correlated_with_the_gap_to_a_fresh_network(tmp_path: Path, stream: str, alike: bool) -> None:
    """Errors fall as data accumulates, with a fresh network too; what the past costs goes the other way."""
    past, fresh = [0.40, 0.50, 0.60, 0.70, 0.80], [0.40, 0.52, 0.64, 0.76, 0.88]
    changes = {"stream": Part(stream, {"epochs": 2})}
    for seed in range(2):
        write_run(tmp_path, config("vanilla", seed, **changes), past, measures={"weight_l2": [1.0, 2.0, 3.0, 4.0, 5.0]})
        write_run(tmp_path, config("fresh", seed, **changes), fresh)
    (comparison,) = compare_folders([tmp_path])
    (found,) = associations(comparison, read_histories(comparison))
    assert (found.within, found.estimate.mean) == (True, pytest.approx(1.0 if alike else -1.0))
    notes = [figure.note for figure in pliant.report(tmp_path).sections[0].figures if figure.name == "task_ends"]
    assert ("stays level" in notes[0]) == alike
    for path in (tmp_path / "runs").glob("fresh*"):
        shutil.rmtree(path)
    (comparison,) = compare_folders([tmp_path])
    assert [found.within for found in associations(comparison, read_histories(comparison))] == ([True] if alike else [])
