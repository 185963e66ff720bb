"""The options of the command `report`."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pliant
from pliant import cli
from pliant.experiments.report.folders import find_experiments


def test_the_suffix_sets_the_format(root: Path, tmp_path: Path) -> None:
    for name, start in (("out.md", "# Planted"), ("out.tex", r"\begin{table}"), ("out", "<!doctype html>")):
        result = CliRunner().invoke(cli.app, ["report", str(root), "--to", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        assert (tmp_path / name).read_text().startswith(start)


def test_an_unknown_suffix_is_rejected_first(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["report", "nowhere", "--to", str(tmp_path / "out.docx")])
    assert "does not tell the format" in str(result.exception)
    assert "html, md, csv, tex, png, svg, pdf" in str(result.exception)


@pytest.mark.parametrize("name", ["exp[v2]", "exp[/v2]"])
def test_folder_names_are_printed_unchanged(root: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(root, tmp_path / name)
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path / name), "--format", "csv"])
    assert result.exit_code == 0, result.output
    assert f"{name}/report.csv" in result.output


def test_a_folder_of_experiments_reports_each(root: Path, tmp_path: Path) -> None:
    """As `demo` and `runs` are: the command that `pliant demo` names must work."""
    for name in ("first", "second"):
        shutil.copytree(root, tmp_path / "demo" / name)
    (tmp_path / "demo" / "notes").mkdir()
    assert find_experiments(tmp_path / "demo") == [tmp_path / "demo" / "first", tmp_path / "demo" / "second"]
    assert find_experiments(root) == [root]
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path / "demo"), "--format", "csv"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "demo" / "report.csv").exists()


def test_a_folder_without_experiments_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty is not an experiment's folder: neither it nor a folder in it"):
        pliant.report(tmp_path / "empty")


def test_the_version() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"{pliant.__version__}\n")
