"""Names in files may hold terminal escapes: no output passes them on."""

import csv
import io
import json
import os
import pty
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from rich.table import Table

from pliant import data, diagnose
from pliant._console import SafeConsole
from pliant._terminal import printable
from pliant.diagnostics.checkpoints import load_into, load_weights
from pliant.experiments.report.document import make_report
from tests.data.pictures import write_folder
from tests.experiments.report.stores import config, write_recipe, write_run
from tests.hostile.attacks import ESCAPE, assert_refused, pliant

OBEYED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal would obey; rich's own colors are off in these outputs."""


def assert_harmless(text: str) -> None:
    assert not OBEYED.search(text), repr(text)


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """An experiment with escapes in its title, a label, an error, a measure and a file name."""
    root = tmp_path / f"runs{ESCAPE}"
    write_recipe(root, title=f"Title{ESCAPE}", methods=["vanilla", {"name": "l2", "label": f"L2{ESCAPE}", "lam": 0.1}])
    for seed in range(3):
        write_run(root, config("vanilla", seed), [0.5], measures={f"m{ESCAPE}": [1.0]})
        write_run(root, config(f"L2{ESCAPE}", seed), [0.6 + seed / 100])
    write_run(root, config("vanilla", 9), [0.5], status="failed", error=f"RuntimeError: {ESCAPE}")
    (root / "runs" / f"x{ESCAPE}").mkdir()
    (root / "runs" / f"x{ESCAPE}" / "result.json").write_text("{")
    return root


def test_reports_hold_no_escapes(experiment: Path, tmp_path: Path) -> None:
    report = make_report([experiment])
    shown = io.StringIO()
    report.print(SafeConsole(file=shown, width=200))
    assert_harmless(shown.getvalue())
    assert r"\x1b[2J" in shown.getvalue()
    for ending in ("md", "csv", "tex", "html"):
        (file,) = report.save(tmp_path / f"report.{ending}")
        content = file.read_text(encoding="utf-8")
        assert ESCAPE not in content
        if ending != "html":  # A page also holds Vega's script.
            assert_harmless(content)


def test_the_command_line_prints_no_escapes(experiment: Path, tmp_path: Path) -> None:
    """In a real terminal, where rich colors its own output: the hostile sequence does not get through."""
    main, worker = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pliant", "report", str(experiment), "--format", "md", "--to", str(tmp_path / "r.md")],
        stdout=worker,
        stderr=worker,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TERM": "xterm-256color"},
    )
    os.close(worker)
    shown = b""
    with open(main, "rb", buffering=0) as terminal:
        while True:
            try:
                if not (part := terminal.read(4096)):
                    break
            except OSError:  # Its other end is closed.
                break
            shown += part
    assert process.wait() == 0
    text = shown.decode()
    assert "\x1b[" in text  # It is a terminal.
    assert "\x1b[2J" not in text
    assert "\x9b" not in text
    assert "\x07" not in text
    assert r"\x1b[2J" in text


def test_errors_and_warnings_print_no_escapes(tmp_path: Path) -> None:
    refused = pliant("report", f"nowhere{ESCAPE}", cwd=tmp_path)
    assert_refused(refused, r"nowhere\x1b[2J")
    assert_harmless(refused.stderr)
    (tmp_path / "r.json").write_text(json.dumps({"model": f"evil{ESCAPE}:f", f"key{ESCAPE}": 1}))
    assert_harmless(pliant("run", "r.json", cwd=tmp_path).stderr)


def test_an_unexpected_error_prints_no_escapes() -> None:
    script = (
        "from pliant import cli\n"
        "def fail():\n"
        f"    raise RuntimeError({f'a text of a file{ESCAPE}'!r})\n"
        "cli.app = fail\n"
        "cli.main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert r"RuntimeError: a text of a file\x1b[2J" in ended.stderr
    assert_harmless(ended.stderr)


def test_wrong_arguments_print_no_escapes(tmp_path: Path) -> None:
    for arguments in (
        ("run", "r.toml", f"--{ESCAPE}\u202e"),
        (f"run{ESCAPE}\u202e",),
        ("diagnose", f"--\u202e{ESCAPE}"),
    ):
        refused = pliant(*arguments, cwd=tmp_path)
        assert refused.returncode == 2
        assert r"\u202e" in refused.stderr
        assert_harmless(refused.stderr)


ODD = "half\ud800 line\u2028 right\u202e mark\u200f [link=https://evil.example]click[/link]"


def test_halves_of_characters_and_markup_are_shown_in_every_format(tmp_path: Path) -> None:
    """JSON may hold half a character, which no file can; rich would turn the markup into a link."""
    write_recipe(tmp_path, title=ODD, methods=["vanilla", {"name": "l2", "label": ODD, "lam": 0.1}])
    for seed in range(3):
        write_run(tmp_path, config("vanilla", seed), [0.5, 0.5], measures={ODD: [1.0, 2.0]})
        write_run(tmp_path, config(ODD, seed), [0.6 + seed / 100] * 2, measures={ODD: [1.0, 2.0]})
    report = make_report([tmp_path])
    shown = io.StringIO()
    report.print(SafeConsole(file=shown, width=300, force_terminal=True))
    assert "[link=https://evil.example]" in shown.getvalue()
    assert "\x1b]8" not in shown.getvalue()
    for ending in ("md", "csv", "tex", "html"):
        (file,) = report.save(tmp_path / f"report.{ending}")
        content = file.read_text(encoding="utf-8")
        assert "ud800" in content
        if ending != "html":
            assert_harmless(content)


@pytest.mark.parametrize("label", ["=cmd|' /C calc'!A0", "@SUM(1)", "+1+1", "-2+3", "\t=1"])
def test_a_spreadsheet_computes_no_label(tmp_path: Path, label: str) -> None:
    write_recipe(tmp_path, title=label, methods=["vanilla", {"name": "l2", "label": label, "lam": 0.1}])
    for seed in range(3):
        write_run(tmp_path, config("vanilla", seed), [0.5])
        write_run(tmp_path, config(label, seed), [0.6 + seed / 100])
    (file,) = make_report([tmp_path]).save(tmp_path / "report.csv")
    with file.open(newline="", encoding="utf-8") as table:
        lines = list(csv.DictReader(table))
    assert {line["comparison"] for line in lines} == {f"'{label}"}
    assert {line["method"] for line in lines} == {"vanilla", f"'{label}"}
    assert all(float(line["mean"]) > 0 for line in lines)


def test_progress_and_tables_pass_through_the_same_place() -> None:
    shown = io.StringIO()
    console = SafeConsole(file=shown, width=80)
    table = Table(f"head{ESCAPE}")
    table.add_row(f"cell{ESCAPE}\u202e")
    console.print(table)
    console.print(f"line{ESCAPE}", markup=False, soft_wrap=True)
    assert_harmless(shown.getvalue())


def test_tensor_names_in_a_diagnosis_are_harmless() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
    model.register_module("last\x1b[2J", torch.nn.Linear(8, 3))
    with warnings.catch_warnings(action="ignore"):
        found = diagnose(model, (torch.randn(16, 4), torch.arange(16) % 3), torch.nn.CrossEntropyLoss(), trial=False)
    assert_harmless(printable(str(found)))
    assert "\x1b" not in found.to_html()


def test_warnings_and_errors_of_the_library_are_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes and Python itself print them as they are."""
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    root = write_folder(tmp_path / "zoo")
    os.mkfifo(root / "cat" / f"{ESCAPE}.png")
    with pytest.warns(UserWarning, match="is skipped: it is not a regular file") as warned:
        data.load(str(root))
    torch.save({f"a{ESCAPE}": torch.zeros(1)}, tmp_path / "a.pt")
    torch.save({f"a{ESCAPE}": {f"b{ESCAPE}": torch.zeros(1)}}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match="does not fit the model") as unfit:
        load_into(torch.nn.Linear(1, 1), tmp_path / "a.pt")
    with pytest.raises(ValueError, match="holds no state dict") as unfound:
        load_weights(tmp_path / "b.pt")
    for text in (*(each.message for each in warned), unfit.value, unfound.value):
        assert r"\x1b[2J" in str(text)
        assert_harmless(str(text))
