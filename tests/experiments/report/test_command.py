"""What the commands `compare` and `report` make of their options."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pliant
from pliant import cli
from pliant.experiments.recipe import Recipe


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """The recipes that `compare` would have run."""
    recipes: list[Recipe] = []
    monkeypatch.setattr(cli, "_run", lambda recipe, *rest: recipes.append(recipe))
    return recipes


def test_the_examples_of_the_help_are_accepted(asked: list[Recipe]) -> None:
    result = CliRunner().invoke(cli.app, ["compare", "--methods", ",".join(cli.METHODS_EXAMPLES)])
    assert result.exit_code == 0, result.output
    assert [entry.label for entry in asked[0].methods] == [
        "vanilla",
        "fresh",
        "l2:lam=1e-3",
        "redo",
        "l2:lam=1e-2|1e-4",
        "swr+l2",
    ]
    assert [len(entry.variants()) for entry in asked[0].methods] == [1, 1, 1, 1, 2, 1]
    assert asked[0].methods[3].parts[0].settings == {"tau": 0.1, "every": 97}


def test_the_same_method_twice_is_still_a_mistake(asked: list[Recipe]) -> None:
    result = CliRunner().invoke(cli.app, ["compare", "--methods", "l2:lam=0.1,l2:lam=0.1"])
    assert "'l2:lam=0.1' stands there 2 times" in str(result.exception)
    assert asked == []


def test_a_method_with_and_without_settings_stand_beside_each_other(asked: list[Recipe]) -> None:
    CliRunner().invoke(cli.app, ["compare", "--methods", "l2, l2:lam=0.1"])
    assert [entry.label for entry in asked[0].methods] == ["l2", "l2:lam=0.1"]


def test_tuning_says_what_it_leaves(asked: list[Recipe]) -> None:
    methods = "vanilla,fresh,l2,swr:lam=0.1,swr+l2,layerwise"
    result = CliRunner().invoke(cli.app, ["compare", "--tune", "--methods", methods])
    assert result.exit_code == 0, result.output
    assert "--tune leaves as they are: swr, swr+l2, layerwise\n" in result.output
    assert [entry.label for entry in asked[0].methods if len(entry.variants()) > 1] == ["l2"]


def test_the_ending_tells_the_format(root: Path, tmp_path: Path) -> None:
    for name, start in (("out.md", "# Planted"), ("out.tex", r"\begin{table}"), ("out", "<!doctype html>")):
        result = CliRunner().invoke(cli.app, ["report", str(root), "--to", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        assert (tmp_path / name).read_text().startswith(start)


def test_an_ending_that_tells_no_format_is_answered_before_the_work(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["report", "nowhere", "--to", str(tmp_path / "out.docx")])
    assert "does not tell the format" in str(result.exception)
    assert "html, md, csv, tex, png, svg, pdf" in str(result.exception)


@pytest.mark.parametrize("name", ["exp[v2]", "exp[/v2]"])
def test_a_folder_is_named_as_it_is(root: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(root, tmp_path / name)
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path / name), "--format", "csv"])
    assert result.exit_code == 0, result.output
    assert f"{name}/report.csv" in result.output


def test_the_version() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"{pliant.__version__}\n")
