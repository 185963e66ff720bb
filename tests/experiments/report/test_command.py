"""The options of the command `report`."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pliant
from pliant import cli


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


def test_the_version() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"{pliant.__version__}\n")
