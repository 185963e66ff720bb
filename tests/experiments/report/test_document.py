"""Every format holds the same numbers, and no name breaks one."""

import csv
import html
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import altair as alt
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

import pliant
from pliant.cli import app
from pliant.experiments.recipe_files import load_recipe
from pliant.experiments.report.document import FIGURES, FORMATS, Report
from pliant.experiments.run_config import Part
from pliant.experiments.store import load_runs
from tests.experiments.report.stores import NASTY, config, write_recipe, write_results, write_run


def test_figures_are_in_the_order_of_the_report(report: Report) -> None:
    (section,) = report.sections
    assert [group.name for group in section.groups] == [
        "differences",
        "curves",
        "tasks",
        "sensitivity",
        "measures",
        "associations",
        "growth",
    ]
    assert [figure.name for figure in section.figures] == [
        "differences",
        "curve_test_accuracy",
        "curve_online_accuracy",
        "curve_loss",
        "task_ends",
        "fresh_gap",
        "sensitivity_L2_lam",
        "measure_weight_growth",
        "measure_feature_rank",
        "associations",
        "growth_c0",
        "growth_c1",
        "growth_c2",
    ]


def test_charts_are_valid_vega_lite(report: Report) -> None:
    for figure in report.sections[0].figures:
        assert figure.chart.to_dict(validate=True)["$schema"] == alt.SCHEMA_URL


def test_settings_that_differ_are_listed_per_contender(tmp_path: Path) -> None:
    for activation in ("relu", "tanh"):
        run = config(activation, 0, methods=(), model=Part("mlp", {"activation": activation}))
        write_run(tmp_path, run, [0.5, 0.6])
    write_recipe(
        tmp_path,
        methods=[{"name": "vanilla", "label": name, "model": {"activation": name}} for name in ("relu", "tanh")],
    )
    (section,) = pliant.report(tmp_path).sections
    assert section.setting["network"] == "differs, see the methods' settings"
    assert section.setting["data"] == "digits"
    assert [section.settings_of(contender) for contender in section.comparison.contenders] == [
        "nothing attached; network mlp(activation=relu)",
        "nothing attached; network mlp(activation=tanh)",
    ]
    assert section.facts[:2] == ["2 methods", "1 seed"]
    (ends,) = (figure for figure in section.figures if figure.name == "task_ends")
    assert "dashed" not in ends.note


def test_every_figure_has_a_table(report: Report) -> None:
    tables = {figure.name: figure.table for figure in report.sections[0].figures}
    assert all(table.rows for table in tables.values())
    ends = tables["task_ends"]
    assert ends.columns == ["task", "L2", "fresh", "vanilla"]
    assert ends.rows[0] == ["1", "19.00 %", "29.00 %", "49.00 %"]
    assert ends.rows[-1] == ["6", "19.00 %", "29.00 %", "74.00 %"]
    assert tables["fresh_gap"].rows[-1] == ["6", "-10.00 %", "45.00 %"]
    assert tables["sensitivity_L2_lam"].rows == [
        ["0.01", "11.00 %", "0.00 to 35.84", ""],  # Student's, and an accuracy is not negative
        ["0.1", "20.00 %", "0.00 to 44.84", "chosen"],
    ]
    # Vanilla's errors rise with its weights in every run; the others vary in neither.
    assert tables["associations"].rows == [["weight growth", "-1.00", "-1.00 to -1.00", "3"]]
    assert tables["growth_c2"].rows == [["0", "1", "11", "11"]]


def test_csv_has_full_precision(report: Report, tmp_path: Path) -> None:
    (path,) = report.save(tmp_path / "table.csv")
    lines = list(csv.DictReader(io.StringIO(path.read_text())))
    (l2,) = [line for line in lines if line["method"] == "L2" and line["metric"] == "mean_test_accuracy"]
    assert float(l2["mean"]) == pytest.approx(0.81)
    assert (float(l2["low"]), float(l2["high"])) == (pytest.approx(0.785159), pytest.approx(0.834841))
    assert float(l2["difference_to_vanilla"]) == pytest.approx(0.425)
    assert (l2["published"], l2["published_spread"]) == ("0.81", "0.02")
    assert (l2["settings"], l2["role"], l2["seeds"]) == ("l2(lam=0.1)", "method", "3")
    assert float(l2["bytes"]) == 330


def test_markdown_has_answer_table_failures_and_settings(report: Report, tmp_path: Path) -> None:
    (path,) = report.save(tmp_path / "report.md")
    text = path.read_text()
    assert "**Use L2 with lam=0.1: 81.0 % mean test accuracy over tasks" in text
    settings = text.partition("## Settings\n\n")[2].splitlines()
    assert settings[:3] == [
        "- vanilla: nothing attached",
        "- fresh: an untrained network at every task",
        "- L2: l2(lam=0.1)",
    ]
    assert settings[4] == "Chosen: L2: l2(lam=0.1)."
    assert "Chosen: L2: l2(lam=0.1)." in report.to_html()
    assert re.search(r"\| L2 \(lam=0\.1\) \| .*81\.00.* \| \+42\.50 .* \| 81\.00 ± 2\.00 \|", text)
    assert r"ValueError: \<b\>boom\</b\>" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace(r"\|", "").count("|") for line in table if "final" not in line}) <= 2


def test_latex_escapes_special_characters(report: Report, tmp_path: Path) -> None:
    (path,) = report.save(tmp_path / "table.tex")
    text = path.read_text()
    columns = len(report.sections[0].table.columns)
    assert rf"\begin{{tabular}}{{l{'r' * (columns - 1)}}}" in text
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {row.count("&") - row.count(r"\&") for row in rows} == {columns - 1}
    assert r"81.00 $\pm$ 2.00" in text
    assert not re.search(r"(?<!\\)[%_#]", text)


def test_marks_appear_with_an_explanation(tmp_path: Path) -> None:
    results = {"vanilla": [0.50, 0.51, 0.52, 0.54], "a": [0.90, 0.91, 0.92, 0.93], "b": [0.91, 0.90, 0.93, 0.91]}
    write_results(tmp_path / "tied", results)
    write_results(tmp_path / "best", {name: results[name] for name in ("vanilla", "a")})
    for name, in_markdown, in_latex, meaning in (
        ("tied", "91.50 *tied* (", r"\underline{91.50}", "Underlined: tied."),
        ("best", "**91.50** *best* (", r"\textbf{91.50}", "Bold: best."),
    ):
        report = pliant.report(tmp_path / name)
        assert in_markdown in report.save(tmp_path / "out.md")[0].read_text()
        latex = report.save(tmp_path / "out.tex")[0].read_text()
        assert in_latex in latex
        assert meaning in latex


@pytest.mark.parametrize("format", FIGURES)
def test_figures_are_saved_as_png_svg_and_pdf(report: Report, tmp_path: Path, format: str) -> None:
    files = report.save(tmp_path / "figures", format)
    assert len(files) == len(report.sections[0].figures)
    for file in files:
        content = file.read_bytes()
        if format == "png":
            image = Image.open(io.BytesIO(content)).convert("RGB")
            assert image.width >= 900
            colors = image.getcolors(10**7)
            assert colors is not None
            assert len(colors) > 20, f"{file.name} is blank"
        elif format == "svg":
            assert content.count(b"<path") > 3
            assert b"var(--" not in content
        else:
            assert content.startswith(b"%PDF")


def test_an_unknown_format_is_rejected(report: Report, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="format: 'docx' is not allowed; it must be one of 'html', 'md', 'csv', 'tex', 'png'",
    ):
        report.save(tmp_path / "report.docx")


def test_the_terminal_shows_answer_and_table(report: Report) -> None:
    out = Console(record=True, width=100, file=io.StringIO())
    report.print(out)
    text = out.export_text()
    assert "Use L2 with lam=0.1: 81.0 % mean test accuracy over tasks" in text
    assert "81.00 (78.52 to 83.48)" in text
    assert "L2-s9" in text.replace("l2-s9", "L2-s9")
    assert "ValueError: <b>boom</b>" in text


@pytest.mark.parametrize("format", ["html", "md", "csv", "tex"])
def test_special_characters_in_names_break_no_format(tmp_path: Path, format: str) -> None:
    write_results(tmp_path, {NASTY: [0.5, 0.6], "vanilla": [0.4, 0.5]}, tasks=2)
    (path,) = pliant.report(tmp_path).save(tmp_path / f"report.{format}")
    text = path.read_text()
    if format == "html":
        assert "<script>alert" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    elif format == "md":
        assert "<script>" not in text.replace(r"\<script\>", "")
    elif format == "csv":
        assert {line["method"] for line in csv.DictReader(io.StringIO(text))} == {NASTY, "vanilla"}
    else:
        assert r"\textbackslash{}" in text
        assert r"100\%" in text


@pytest.mark.parametrize("runs", ["one", "unfinished", "failed", "broken"])
def test_reports_of_very_few_runs(tmp_path: Path, runs: str) -> None:
    if runs == "one":
        write_results(tmp_path, {"swr": [0.5]}, tasks=1)
    elif runs == "unfinished":
        write_run(tmp_path, config("swr", 0), [0.5], status="unfinished")
        write_run(tmp_path, config("vanilla", 0), [], status="unfinished")
    elif runs == "failed":
        write_run(tmp_path, config("swr", 0), [0.5], status="failed", error="boom")
    else:
        path = write_run(tmp_path, config("swr", 0), [0.5])
        (path / "result.json").write_text("{")
    report = pliant.report(tmp_path)
    for format in FORMATS:
        report.save(tmp_path / f"out.{format}", format)
    expected = {"one": "no other method", "unfinished": "No run has finished yet", "failed": "no finished run"}
    assert expected.get(runs, "") in str(report)
    page = (tmp_path / "out.html").read_text()
    assert ("boom" in page) == (runs == "failed")
    assert ("unreadable" in page) == (runs == "broken")


def test_runs_and_folders_give_the_same_report(root: Path) -> None:
    from_runs = pliant.report(load_runs(root))
    of_folder = str(pliant.report([root]))  # where a recipe says what else there is to run
    assert of_folder == f"{from_runs} 6 runs of the recipe have not started."
    shown = from_runs._repr_html_()
    assert shown.startswith('<iframe srcdoc="')
    assert "<" not in shown[len("<iframe ") : -len("></iframe>")]


def test_folders_and_runs_cannot_be_mixed(root: Path) -> None:
    with pytest.raises(ValueError, match="both folders and runs"):
        pliant.report([root, *load_runs(root)])


def test_the_command_writes_every_format(root: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(root), "--format", "tex", "--to", str(tmp_path / "out.tex")])
    assert result.exit_code == 0, result.output
    assert "Use L2" in result.output
    assert (tmp_path / "out.tex").read_text().startswith(r"\begin{table}")


def test_the_recipe_in_the_page_can_be_loaded(root: Path, tmp_path: Path, report: Report) -> None:
    page = report.to_html()
    assert "pliant run recipe.json --out again" in page
    shown = html.unescape(page.split('<summary>recipe.json</summary><pre tabindex="0">')[1].split("</pre>")[0])
    (tmp_path / "recipe.json").write_text(shown)
    assert load_recipe(tmp_path / "recipe.json") == load_recipe(root / "recipe.json")


def test_an_empty_folder_gives_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    command = [sys.executable, "-c", "from pliant.cli import main; main()", "report", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.replace("\n", "").startswith("error: there are no runs in ")


def test_no_module_shadows_the_report_function() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        pliant.report("nowhere")
    assert callable(pliant.experiments.report.report)


def test_importing_pliant_needs_only_torch() -> None:
    program = """
import sys
for name in ("altair", "jinja2", "pydantic", "rich", "scipy", "vl_convert"):
    sys.modules[name] = None
import pliant
try:
    pliant.report("nowhere")
except ImportError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'pliant[report]'" in result.stdout


def test_growth_of_a_layer_that_starts_at_zero(tmp_path: Path) -> None:
    for seed in range(2):
        norms = {"weight_l2/0": [1.0, 2.0, 3.0], "weight_l2/1": [0.0, 2.0, 3.0], "weight_l2/2": [0.0, 0.0, 0.0]}
        write_run(tmp_path, config("vanilla", seed), [0.5, 0.6, 0.7], measures=norms)
    (section,) = pliant.report(tmp_path).sections
    (table,) = (figure.table for figure in section.figures if figure.name.startswith("growth"))
    assert [row[0] for row in table.rows] == ["0", "1"]


def test_figures_with_similar_names_get_separate_files(tmp_path: Path) -> None:
    grids = [{"name": "l2", "label": label, "grid": {"lam": [0.1, 0.01]}} for label in ("α", "β", "a/b", "a?b")]
    write_recipe(tmp_path, methods=["vanilla", *grids], selection={"on": "test"})
    for entry in grids:
        for lam in (0.1, 0.01):
            write_run(tmp_path, config(entry["label"], 0, methods=(Part("l2", {"lam": lam}),)), [lam])
    files = pliant.report(tmp_path).save(tmp_path / "figures", "svg")
    assert len(set(files)) == len(files) == len(list((tmp_path / "figures").iterdir()))
    assert sum("sensitivity" in file.name for file in files) == 4


def test_an_ascii_terminal_still_gets_the_page(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from pliant.cli import main; main()", "report", str(root), "--to", "page.html"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Use L2" in done.stdout
    assert (tmp_path / "page.html").exists()
