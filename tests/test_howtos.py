"""The commands of the how-tos run as they stand there, from top to bottom, beside the files that they name."""

import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from pliant import cli
from pliant._key_values import override
from pliant.experiments import engines
from pliant.experiments.recipe import make_recipe
from pliant.experiments.store import load_runs, load_selection
from tests.experiments.helpers import EngineHere

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(python|console|toml)(?: file=(\S+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[list[str], Path], str]]:
    """Run a command in this process, which has imported torch already; return what it prints."""
    handler = signal.getsignal(signal.SIGTERM)

    def run(command: list[str], folder: Path) -> str:
        if command[0] == sys.executable:
            exec(command[2], {"__name__": "__main__"})
            return ""
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        assert end.value.code == 0, printed.out + printed.err
        return printed.out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / ".cache"))
    monkeypatch.setattr(cli, "console", Console(width=120))
    monkeypatch.setenv("COLUMNS", "200")  # the width of every other console: pages show answers as one line
    monkeypatch.setattr(engines, "ProcessEngine", EngineHere)
    yield run
    signal.signal(signal.SIGTERM, handler)


def outputs(page: str, folder: Path, run: Callable[[list[str], Path], str]) -> list[str]:
    """Do what a page says; return what its commands print."""
    printed = []
    for kind, name, content in BLOCK.findall((ROOT / "docs" / page).read_text()):
        if name:
            (folder / name).write_text(content)
        elif kind == "python":
            run([sys.executable, "-c", content], folder)
        else:
            for line in content.splitlines():
                assert line.startswith("$ ")
                printed.append(run(shlex.split(line[2:]), folder))
    return printed


def test_start(tmp_path: Path, run_here: Callable[[list[str], Path], str]) -> None:
    """The page shows what its commands print, up to rounding, the order of the layers and the time that they take."""
    printed = "\n".join(outputs("start.md", tmp_path, only_commands(run_here)))
    text = (ROOT / "docs" / "start.md").read_text().partition("## 4.")[2]
    shown = [line for block in re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL) for line in
             block.splitlines() if "…" not in line]  # fmt: skip
    assert len(shown) > 10

    def without_numbers(line: str) -> str:
        timeless = re.sub(r" at (about the same|\d+ % of its|[\d.]+ times its) cost", "", line)
        return re.sub(r"[+−-]?\d[\d.]*(, \d)*", "N", timeless)

    found = set(map(without_numbers, printed.splitlines()))
    assert [line for line in shown if without_numbers(line) not in found] == []


def test_own_data(tmp_path: Path, run_here: Callable[[list[str], Path], str]) -> None:
    got, compared, tuned, table = outputs("howto-own-data.md", tmp_path, run_here)
    assert "144 training examples, 36 test examples, 3 classes, shape (3, 16, 16)" in got
    for method in ("vanilla", "fresh", "l2", "swr"):
        assert re.search(rf"│ {method}\s+│", compared), compared
    assert report_of(compared, tmp_path).exists()
    labels = load_selection(report_of(tuned, tmp_path).parent)["labels"]
    chosen = labels["shrink_perturb"]["chosen"]
    assert re.fullmatch(r"shrink_perturb\(lam=0\.\d\)", chosen)
    assert re.search(rf"^chosen: {re.escape(chosen)}.*, by 1 seed on 14 held-out examples", tuned, re.MULTILINE)
    assert "choosing: shrink_perturb(lam=0.8), selection seed 0: finished" in tuned
    assert "no other method to compare it with" not in tuned
    assert {run.status for run in load_runs(report_of(table, tmp_path).parent)} == {"finished"}


def test_nightly_retraining(
    tmp_path: Path, run_here: Callable[[list[str], Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "ProcessEngine", EngineHere)
    (printed,) = outputs("howto-nightly-retraining.md", tmp_path, only_commands(run_here))
    assert "4 of 4 settings to try" in printed
    assert "Accuracy on the old data: " in printed
    assert "def prepare(batches):" in printed
    assert (tmp_path / re.findall(r"^page: (.+)$", printed, re.MULTILINE)[-1]).exists()
    assert printed.splitlines()[-1].startswith("next: ")


def test_language(tmp_path: Path, run_here: Callable[[list[str], Path], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of the page, on short texts and a small network."""
    monkeypatch.setattr(engines, "ProcessEngine", EngineHere)
    for name in ("old", "new"):
        (tmp_path / f"{name}.txt").write_text(f"{name} words and letters, " * 40)
    page = (ROOT / "docs" / "howto-language.md").read_text()
    command = re.findall(r"^\$ (pliant compare .*)$", page, re.MULTILINE)
    small = "--seeds 1 --set stream.first_epochs=1 --set stream.epochs=1 --set model.depth=1 --set model.width=8"
    printed = run_here(shlex.split(f"{command[0]} {small}"), tmp_path)
    assert "test loss" in printed
    (run, *_) = load_runs(report_of(printed, tmp_path).parent)
    assert {"final_first_test_loss", "final_second_test_loss", "final_test_loss"} <= run.result.keys()


def only_commands(run: Callable[[list[str], Path], str]) -> Callable[[list[str], Path], str]:
    """Run the commands of a page and its first code; test_docs.py runs all of its code."""
    codes = iter([True])
    return lambda command, folder: run(command, folder) if command[0] == "pliant" or next(codes, False) else ""


def report_of(printed: str, folder: Path) -> Path:
    return folder / re.findall(r"^report: (.+)$", printed, re.MULTILINE)[-1]


def test_experiments(tmp_path: Path, run_here: Callable[[list[str], Path], str]) -> None:
    (printed,) = outputs("howto-experiments.md", tmp_path, run_here)
    root = report_of(printed, tmp_path).parent
    runs = load_runs(root)
    assert {run.status for run in runs} == {"finished"}
    assert len([run for run in runs if run.config.purpose == "selection"]) == 2
    results = [run for run in runs if run.config.purpose == "result"]
    assert sorted(run.config.label for run in results) == sorted(["vanilla", "fresh", "l2_init", "both"] * 2)
    assert all(len(run.records) == 6 and "weight_l2" in run.records[0]["measures"] for run in results)


def test_flags_in_the_text_of_own_data_are_right() -> None:
    text = (ROOT / "docs" / "howto-own-data.md").read_text().partition("### Which stream")[2].partition("## Every")[0]
    values = {"data": "digits", "model": "mlp", "stream": "warm_start"}
    strengths = text.partition("### Strengths")[2]
    methods = [method.replace("\\|", "|") for method in re.findall(r"^\| `(\S+)` \| ", strengths, re.MULTILINE)]
    assert [len(make_recipe(values | {"methods": [method]}).methods[0].variants()) for method in methods] == [
        1,
        1,
        2,
        1,
    ]
    flags = [shlex.split(each) for each in re.findall(r"`(--(?:stream|set) [^`]+)`", text)]
    assert len(flags) == 12
    for each in flags:
        given = dict(zip(each[::2], each[1::2], strict=True))
        settings = [value for flag, value in zip(each[::2], each[1::2], strict=True) if flag == "--set"]
        stream = given.get("--stream", "warm_start")
        make_recipe(override(values | {"stream": stream, "methods": ["vanilla"]}, settings))


@pytest.mark.parametrize(
    "page", ["start.md", "howto-experiments.md", "howto-own-data.md", "howto-nightly-retraining.md"]
)
def test_every_command_names_pliant(page: str) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / page).read_text())
    commands = [line for kind, _, content in blocks if kind == "console" for line in content.splitlines()]
    assert commands
    assert all(line.startswith("$ pliant ") for line in commands)
