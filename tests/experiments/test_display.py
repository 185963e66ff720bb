"""Progress in a terminal: names are shown as they are."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pliant.experiments.display import LiveProgress
from tests.experiments.report.stores import config


@pytest.mark.parametrize("label", ["l2[bold]", "l2[/b]", "a_b * `c`"])
def test_a_label_is_no_markup(tmp_path: Path, label: str) -> None:
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
