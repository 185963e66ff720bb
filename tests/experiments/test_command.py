"""What the command line makes of trouble with files and with what was asked for."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pliant.experiments import recipe_files
from pliant.experiments.recipe_files import load_recipe
from pliant.experiments.run import execute
from pliant.experiments.store import load_runs
from pliant.experiments.tensorboard import export
from tests import test_cli
from tests.data.pictures import write_folder
from tests.experiments.helpers import small

pliant = test_cli.pliant
Command = Callable[..., tuple[int, str]]
TINY = ("--seeds", "1", "--workers", "1", "--set", "data.first=40", "--set", "stream.epochs=1", "--stream", "single")


def test_runs_are_told_of_even_if_no_report_can_be_written(pliant: Command, tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    diverging = ("--set", "training.optimizer=sgd", "--set", "training.lr=1e38")
    code, printed = pliant("compare", "--methods", "vanilla", *TINY, *diverging, "--out", str(tmp_path))
    assert code == 1
    assert "the report could not be made: [Errno" in printed
    assert "1 of 1 runs did not finish" in printed


def test_a_recipe_runs_at_its_quick_scale_is_packed_and_comes_back(
    pliant: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(
        'model = "mlp"\nseeds = 2\nmethods = ["vanilla", "l2"]\n'
        'data = { name = "digits", first = 40 }\nstream = { name = "single", epochs = 2 }\n'
        "[quick]\nstream = { epochs = 1 }\n"
    )
    code, printed = pliant("run", "mine.toml", "seeds=1", "--scale", "quick", "--threads", "2", "--workers", "1")
    assert code == 0, printed
    runs = load_runs(tmp_path / "runs" / "mine-quick")
    assert [(run.config.label, run.config.seed, run.config.stream.options["epochs"]) for run in runs] == [
        ("l2", 0, 1),
        ("vanilla", 0, 1),
    ]
    assert {run.events[0]["environment"]["threads"] for run in runs} == {2}
    assert pliant("pack", "runs/mine-quick", "kept.gz") == (
        0,
        "2 runs in kept.gz\nnext: pliant unpack kept.gz FOLDER, on any machine\n",
    )
    assert pliant("unpack", "kept.gz", "again") == (0, "2 runs in again\nnext: pliant report again\n")
    assert [run.id for run in load_runs(tmp_path / "again")] == [run.id for run in runs]


def test_the_demo_plays_both_acts(pliant: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command as it is, on recipes cut down to seconds."""
    monkeypatch.chdir(tmp_path)
    less = {
        "demo": ("seeds=1", "data.first=40", "stream.first_epochs=1", "stream.epochs=1"),
        "demo_random_labels": ("seeds=1", "data.first=40", "stream.tasks=2", "stream.epochs=1"),
    }
    monkeypatch.setattr(recipe_files, "load_recipe", lambda path: load_recipe(path, less[path.stem]))
    code, printed = pliant("demo", "--workers", "1")
    assert code == 0, printed
    for name, metric in (("demo", "final test accuracy"), ("demo_random_labels", "mean training accuracy over tasks")):
        runs = load_runs(tmp_path / "demo" / name)
        assert len({run.config.label for run in runs}) == len(runs) == 4
        assert {run.status for run in runs} == {"finished"}
        assert metric in printed
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "2 comparisons" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--out", "/proc/nope"], "'/proc/nope'"),
        (["compare", "--out", __file__], __file__),
        (["unpack", "absent.gz", "there"], "'absent.gz'"),
    ],
)
def test_trouble_with_files_ends_in_a_line(pliant: Command, arguments: list[str], message: str) -> None:
    code, printed = pliant(*arguments)
    assert code == 2
    assert printed.removeprefix("preparing …\n").startswith("error: ")
    assert message in printed


def test_an_export_holds_the_measures_and_replaces_an_earlier_one(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = small(measures=("weight_l2",))
    execute(config, tmp_path)
    (run,) = load_runs(tmp_path)
    for _ in range(2):
        assert export(tmp_path, tmp_path / "board") == 1
    events = EventAccumulator(str(tmp_path / "board" / config.id))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("measures/weight_l2")]
    expected = [(record["step"], record["measures"]["weight_l2"]) for record in run.records if "measures" in record]
    assert shown == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]
    assert len(events.Scalars("loss")) == len(run.records)


def test_data_is_fetched_as_runs_load_it(pliant: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    root = write_folder(tmp_path / "zoo", per_class=10)
    code, printed = pliant("data", "get", str(root), "--set", "data.size=4", "--set", "data.first=5")
    assert (code, "5 training examples" in printed, "shape (3, 4, 4)" in printed) == (0, True, True)
    code, printed = pliant("data", "get", str(root), "--set", "training.lr=4")
    assert (code, "the key must begin with 'data.' here" in printed) == (2, True)
