"""Every example runs, and shows what its page says."""

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(ROOT / "docs"))

import site_parts  # noqa: E402

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    """Run an example as a script, with some of its text replaced; return its variables."""
    matplotlib.use("agg")

    def run_it(name: str, **replaced: str) -> dict[str, Any]:
        text = (EXAMPLES / name).read_text()
        for constant, value in replaced.items():
            assert constant in text
            text = text.replace(constant, value)
        script = tmp_path / name
        script.write_text(text)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(script)])
        return runpy.run_path(str(script), run_name="__main__")

    yield run_it
    plt.close("all")


def test_gallery_has_every_example_and_each_fits_on_a_page() -> None:
    scripts = {path.name: path for path in EXAMPLES.glob("*.py") if path.name != "__init__.py"}
    assert set(site_parts.EXAMPLES) == set(scripts)
    for name, path in scripts.items():
        lines = path.read_text().splitlines()
        assert len(lines) <= 115, name
        assert lines[2] == "=" * len(lines[1]), f"{name}: the gallery reads the title from the first lines"


def test_attach(run: Run) -> None:
    found = run("attach.py")
    assert found["plain"][0] > found["plain"][-1] + 0.3
    assert found["treated"][-1] > 0.8
    assert len(found["axes"].lines) == 2


def test_diagnose(run: Run) -> None:
    assert run("diagnose_network.py")["found"].trial.verdict == "lost"


def test_nightly_retraining(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    found = run("nightly_retraining.py")["found"]
    assert found.action in ("apply", "scratch", "continue")
    assert len(found.tried) == 2
    assert "def prepare(batches):" in capsys.readouterr().out


def test_trainer(run: Run) -> None:
    found = run("hugging_face_trainer.py")
    assert [step for step, _ in found["callback"].receipts] == [30]
    losses = [float(entry["loss"]) for entry in found["log"]]
    assert losses[-1] < 0.5 < max(losses[15:])


def test_lightning(run: Run) -> None:
    found = run("lightning_trainer.py")
    assert len(found["callback"].receipts) == 1
    seen = found["module"].seen
    assert seen[len(seen) // 2] < 0.5, "the pixels have changed"
    assert min(seen[-5:]) > 0.8


def test_agent(run: Run) -> None:
    """In small: what the whole run shows is in the gallery."""
    found = run("agent_learns_again.py", **{"range(100)": "range(2)", "4_000": "600"})
    assert found["late"].keys() == {"as it is", "after FIRE"}
    assert len(found["axes"].lines) == 2


def test_two_processes(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("two_processes.py")
    printed = capsys.readouterr().out
    assert "replicas are bit-equal: True" in printed
    assert printed.startswith("redo: ")


def test_own_method(run: Run) -> None:
    found = run("own_method.py")
    assert found["sparse"].weight.abs().sum() < 0.5 * found["plain"].weight.abs().sum()
