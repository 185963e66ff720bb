"""Progress in a terminal: names are shown as they are."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pliant.experiments.progress import LiveProgress
from pliant.experiments.run import Outcome
from pliant.experiments.run_config import SELECTION_SEEDS
from tests.experiments.report.stores import config


@pytest.mark.parametrize("label", ["l2[bold]", "l2[/b]", "a_b * `c`"])
def test_a_label_with_markup_is_printed_literally(tmp_path: Path, label: str) -> None:
    run = config(label, 0)
    folder = tmp_path / "runs" / run.id
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"progress": 0.5}) + "\n")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=100)
    with LiveProgress(tmp_path, console) as progress:
        progress.begin([run], [])
        progress.tick([run])
    assert f"{label}, seed 0" in out.getvalue()


@pytest.mark.parametrize(
    ("label", "name"), [("l2", "l2(lam=0.1)"), ("mine", "mine: l2(lam=0.1)"), ("vanilla", "vanilla")]
)
def test_runs_that_choose_are_told_apart(tmp_path: Path, label: str, name: str) -> None:
    run = config(label, SELECTION_SEEDS + 2, purpose="selection")
    out = io.StringIO()
    with LiveProgress(tmp_path, Console(file=out, width=100)) as progress:
        progress.begin([run], [])
        progress.ended(run, Outcome("finished"))
    assert out.getvalue() == f"[1/1] choosing: {name}, selection seed 2: finished\n"
