"""`pliant.compare`: one call from methods, data, a network and a stream to a table, an answer and figures."""

import importlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import altair
import numpy
import pytest
from rich.console import Console

import pliant
from pliant._command_options import METHODS_EXAMPLES
from pliant.experiments.engines import ProcessEngine
from pliant.experiments.recipe import Recipe, RecipeError
from pliant.experiments.store import load_runs
from pliant.models import mlp

module = importlib.import_module("pliant.compare")
SMALL: dict[str, Any] = {
    "data": {"name": "digits", "first": 120},
    "model": {"name": "mlp", "widths": [16]},
    "stream": {"name": "random_labels", "tasks": 2, "epochs": 2},
    "training": {"batch_size": 16, "lr": 1e-2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def result(folder: Path) -> pliant.ComparisonResult:
    methods = ["vanilla", "fresh", "swr", "l2_init:lam=1e-3"]
    return pliant.compare(methods, **SMALL, seeds=2, measures=["weight_l2"], out=folder, workers=2, progress=False)


def test_table_has_one_row_a_method_with_its_statistics(result: pliant.ComparisonResult) -> None:
    table = result.table
    assert sorted(table.index) == ["fresh", "l2_init", "swr", "vanilla"]
    assert table["mean"].is_monotonic_decreasing
    assert set(table["metric"]) == {"mean_train_accuracy"}
    assert table["seeds"].to_list() == [2] * 4
    assert table["failed"].to_list() == table["diverged"].to_list() == [0] * 4
    for label in table.index:
        values = [run.result["mean_train_accuracy"] for run in result.runs if run.config.label == label]
        assert table.loc[label, "mean"] == pytest.approx(numpy.mean(values))
    assert numpy.isnan(table[["low", "high"]]).all(axis=None)  # Two seeds give no interval.
    gaps = table["mean"] - table.loc["vanilla", "mean"]
    others = table.index != "vanilla"
    assert table["difference_to_vanilla"][others].to_numpy() == pytest.approx(gaps[others].to_numpy())
    assert table["p_value"][others].between(0, 1).all()
    assert numpy.isnan(table.loc["vanilla", "difference_to_vanilla"])
    assert table.loc["l2_init", "settings"] == "l2_init(lam=0.001)"
    assert (table["seconds_per_step"] > 0).all()


def test_answer_and_terminal_table_are_those_of_the_report(result: pliant.ComparisonResult) -> None:
    (section,) = pliant.report(result.folder).sections
    assert result.answer == str(section.answer)
    assert section.answer.verdict.split()[:4] == str(result).partition("└")[2].split("\n")[1].split()[:4]
    for name in result.table.index:
        assert f"│ {name} " in str(result)


def test_figures_are_charts_by_name(result: pliant.ComparisonResult) -> None:
    figures = result.figures
    assert list(figures) == [figure.name for figure in pliant.report(result.folder).sections[0].figures]
    for chart in figures.values():
        assert isinstance(chart, altair.TopLevelMixin)
        assert chart.to_dict()["width"]


def test_notebook_shows_the_page(result: pliant.ComparisonResult) -> None:
    assert result._repr_html_().startswith("<iframe")
    assert "random labels on digits with mlp" in result._repr_html_()
    assert repr(result) == f"ComparisonResult({str(result.folder)!r}, 8 runs)"


@pytest.mark.parametrize(("name", "start"), [("a.html", "<!doctype html>"), ("a.csv", "comparison,method")])
def test_save_writes_the_formats_of_the_report(
    result: pliant.ComparisonResult, tmp_path: Path, name: str, start: str
) -> None:
    assert result.save(tmp_path / name) == [tmp_path / name]
    assert (tmp_path / name).read_text().startswith(start)


def test_measures_are_recorded(result: pliant.ComparisonResult) -> None:
    assert all("weight_l2" in run.records[0]["measures"] for run in result.runs)


def test_same_folder_trains_only_what_is_new(result: pliant.ComparisonResult, folder: Path) -> None:
    before = {run.id for run in load_runs(folder)}
    shown = io.StringIO()
    more = pliant.compare(
        ["vanilla", "fresh", "swr", "l2_init:lam=1e-3", "l2"], **SMALL, seeds=2, measures=["weight_l2"], out=folder,
        workers=1, progress=Console(file=shown, width=120),
    )  # fmt: skip
    assert "8 of 10 runs are done already" in shown.getvalue()
    assert before < {run.id for run in load_runs(folder)}
    assert len(more.table) == 5


def test_grid_is_chosen_on_held_out_data_and_told(tmp_path: Path) -> None:
    shown = io.StringIO()
    result = pliant.compare(
        "vanilla, l2:lam=1e-4|30", **SMALL | {"stream": {"name": "single", "epochs": 2}}, seeds=1, out=tmp_path,
        workers=2, selection={"seeds": 1, "fraction": 0.25}, progress=Console(file=shown, width=200),
    )  # fmt: skip
    assert "chosen: l2(lam=0.0001) (" in shown.getvalue()
    assert result.table.loc["l2", "settings"] == "l2(lam=0.0001)"


def test_network_may_be_a_function_of_a_module(tmp_path: Path) -> None:
    result = pliant.compare(
        ["vanilla"], data=SMALL["data"], model=mlp, stream={"name": "single", "epochs": 1}, seeds=1, out=tmp_path,
        workers=1, progress=False,
    )  # fmt: skip
    assert result.runs[0].config.model.name == "pliant.models.mlp:mlp"
    assert result.table["seeds"].to_list() == [1]


def test_script_needs_no_main_guard(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import pliant\n"
        "print('started')\n"
        "stream = {'name': 'single', 'epochs': 1}\n"
        "result = pliant.compare(['vanilla'], stream=stream, seeds=1, out='out', workers=1, progress=False)\n"
        "print(result.table['seeds'].to_list())\n"
    )
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "started\n[1]\n", done.stderr


def test_diverged_method_keeps_its_row(tmp_path: Path) -> None:
    result = pliant.compare(
        ["vanilla"], **SMALL | {"training": {"optimizer": "sgd", "lr": 1e38}}, seeds=1, out=tmp_path, workers=1,
        progress=False,
    )  # fmt: skip
    assert result.table.loc["vanilla", ["seeds", "diverged"]].to_list() == [0, 1]
    assert numpy.isnan(result.table.loc["vanilla", "mean"])
    assert set(result.statuses.values()) == {"diverged"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": lambda shape, classes: None}, "model is <function .*, which other processes cannot import"),
        ({"data": {"name": lambda: None}}, "data is <function .*pass data='FILE.py:FUNCTION'"),
        ({"methods": ["swt"]}, "there is no method 'swt'; did you mean 'swr'"),
        ({"sedes": 3}, "sedes: there is no such key; did you mean 'seeds'"),
        ({"workers": 0}, "workers: 0 is not allowed"),
        ({"training": {"lr": -1}}, "lr: -1.0 is not allowed"),
    ],
)
def test_wrong_arguments_are_named_before_anything_runs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pliant.compare(**{"methods": ["vanilla"], "out": tmp_path / "out", **SMALL, **changes})
    assert not (tmp_path / "out").exists()


def test_engine_and_workers_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="workers is 2, but an engine is given"):
        pliant.compare(["vanilla"], workers=2, engine=ProcessEngine(1))


@pytest.mark.parametrize("missing", ["pydantic", "rich", "scipy"])
def test_missing_extra_is_named_before_training(missing: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import pliant; pliant.compare(['vanilla'], out='out')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert "ImportError: a comparison needs a package" in done.stderr
    assert "pip install 'pliant[report]'" in done.stderr
    assert not (tmp_path / "out").exists()


class AskedError(Exception):
    """Ends a comparison where its runs would begin."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Recipe, Path]]:
    """The recipes that would have run, and their folders."""
    recipes: list[tuple[Recipe, Path]] = []

    def record(recipe: Recipe, folder: Path, *rest: Any, **settings: Any) -> None:
        recipes.append((recipe, folder))
        raise AskedError

    monkeypatch.setattr(module, "run_recipe", record)
    return recipes


def test_examples_of_the_help_are_accepted(asked: list[tuple[Recipe, Path]]) -> None:
    with pytest.raises(AskedError):
        pliant.compare(",".join(METHODS_EXAMPLES))
    ((recipe, folder),) = asked
    assert folder == Path("runs/warm_start-digits-mlp")
    assert [entry.label for entry in recipe.methods] == [
        "vanilla",
        "fresh",
        "l2:lam=1e-3",
        "redo",
        "l2:lam=1e-2|1e-4",
        "swr+l2",
    ]
    assert [len(entry.variants()) for entry in recipe.methods] == [1, 1, 1, 1, 2, 1]
    assert recipe.methods[3].parts[0].settings == {"tau": 0.1, "every": 97}


def test_a_comparison_from_a_checkpoint_names_it(asked: list[tuple[Recipe, Path]], tmp_path: Path) -> None:
    path = tmp_path / "tuesday.pt"
    path.touch()
    for start in (str(path), path, {"path": str(path)}):
        with pytest.raises(AskedError):
            pliant.compare("vanilla", start=start)
    assert {folder for _, folder in asked} == {Path("runs/single-digits-mlp-tuesday")}
    assert {recipe.title for recipe, _ in asked} == {"single on digits with mlp, from tuesday.pt"}


def test_same_method_twice_is_rejected() -> None:
    with pytest.raises(RecipeError, match=r"'l2:lam=0.1' occurs 2 times"):
        pliant.compare("l2:lam=0.1,l2:lam=0.1")


def test_method_with_and_without_settings_get_two_labels(asked: list[tuple[Recipe, Path]]) -> None:
    with pytest.raises(AskedError):
        pliant.compare(["l2", "l2:lam=0.1", {"name": "swr", "label": "mine", "lam": 0.1}])
    assert [entry.label for entry in asked[0][0].methods] == ["l2", "l2:lam=0.1", "mine"]


def test_tuning_names_what_it_leaves(asked: list[tuple[Recipe, Path]]) -> None:
    shown = io.StringIO()
    with pytest.raises(AskedError):
        pliant.compare(
            "vanilla,fresh,l2,swr:lam=0.1,swr+l2,layerwise", tune=True, progress=Console(file=shown, width=120)
        )
    assert shown.getvalue() == "not tuned: swr, swr+l2, layerwise\n"
    assert [entry.label for entry in asked[0][0].methods if len(entry.variants()) > 1] == ["l2"]
