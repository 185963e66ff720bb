"""A run's folder with flipped bits, forged checkpoints and things in the way of its files."""

import atexit
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pliant._files import write_atomically
from pliant.experiments.report.grouping import compare_folders
from pliant.experiments.report.histories import read_histories
from pliant.experiments.run import execute
from pliant.experiments.run_config import Part
from pliant.experiments.store import load_runs
from pliant.training import Settings
from tests.experiments.helpers import interrupt, outputs, small, write_waiting_network
from tests.hostile.attacks import change_digit, flip_bit

NETWORK = Path(tempfile.mkdtemp(prefix="pliant-network-"))
"""The folder of a network that waits at step 8 until it is killed."""
atexit.register(shutil.rmtree, NETWORK)
# One step an epoch, so that each checkpoint follows a line of its own.
REFERENCE = small(model=write_waiting_network(NETWORK, step=8), training=Settings(batch_size=160))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("undisturbed")
    (NETWORK / "go").touch()
    assert execute(REFERENCE, root).status == "finished"
    return outputs(root, REFERENCE)


@pytest.fixture
def interrupted(tmp_path: Path, undisturbed: dict[str, bytes]) -> Path:
    """The folder of the reference run, killed after seven epochs with two checkpoints in it."""
    (NETWORK / "go").unlink()
    return interrupt(REFERENCE, tmp_path)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints, newest first."""
    return sorted(folder.glob("checkpoint-*.pt"), reverse=True)


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the newest checkpoint, and name it by its new content."""
    path = checkpoints(folder)[0]
    saved = torch.load(path, weights_only=True)
    change(saved)
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()[:32]
    path.unlink()
    path.with_name(f"{path.name[:24]}{digest}.pt").write_bytes(buffer.getvalue())


def first_moments(saved: dict[str, Any]) -> dict[str, Any]:
    moments: dict[str, Any] = saved["state"]["optimizer"]["state"][0]
    return moments


def lines_of(folder: Path) -> list[bytes]:
    return (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)


def test_a_flipped_digit_in_the_metrics_of_an_interrupted_run(
    interrupted: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """The first line is older than every checkpoint: the run starts over."""
    change_digit(interrupted / "metrics.jsonl", b'"loss": ')
    outcome = execute(REFERENCE, tmp_path)
    assert outcome.status == "finished"
    assert "metrics.jsonl is damaged (line 1: the content does not match its digest)" in outcome.notes[0]
    assert outcome.notes[-1] == "no checkpoint is left: the run starts over"
    assert outputs(tmp_path, REFERENCE) == undisturbed


def test_damage_after_a_checkpoint_costs_only_the_lines_after_it(
    interrupted: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    older = torch.load(checkpoints(interrupted)[1], weights_only=True)["metrics"].encode()
    lines = lines_of(interrupted)
    behind = 1 + next(number for number, line in enumerate(lines) if older in line)
    damaged = lines[behind].replace(b'"loss": 0', b'"loss": 1').replace(b'"loss": 2', b'"loss": 3')
    assert damaged != lines[behind]
    (interrupted / "metrics.jsonl").write_bytes(b"".join([*lines[:behind], damaged, *lines[behind + 1 :]]))
    outcome = execute(REFERENCE, tmp_path)
    assert outcome.status == "finished"
    assert f"is damaged (line {behind + 1}:" in outcome.notes[0]
    assert "does not hold what it held" in outcome.notes[1]
    assert len(outcome.notes) == 2  # The older checkpoint was used.
    assert outputs(tmp_path, REFERENCE) == undisturbed


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json"])
def test_a_flipped_bit_in_a_finished_run_is_named_and_the_run_done_again(
    tmp_path: Path, name: str, undisturbed: dict[str, bytes]
) -> None:
    execute(REFERENCE, tmp_path)
    folder = tmp_path / "runs" / REFERENCE.id
    change_digit(folder / name, b'accuracy": ')
    (comparison,) = compare_folders([tmp_path])
    broken = [*comparison.broken, *read_histories(comparison).broken]
    assert len(broken) == 1
    assert "digest" in broken[0].reason
    outcome = execute(REFERENCE, tmp_path)
    assert outcome.status == "finished"
    assert f"{name} is damaged" in outcome.notes[0]
    assert "the run is done again" in outcome.notes[0]
    assert outputs(tmp_path, REFERENCE) == undisturbed


def test_a_damaged_configuration_of_a_finished_run_is_written_again(
    tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    execute(REFERENCE, tmp_path)
    folder = tmp_path / "runs" / REFERENCE.id
    finished = (folder / "result.json").stat().st_mtime_ns
    flip_bit(folder / "config.json")
    outcome = execute(REFERENCE, tmp_path)
    assert outcome.status == "finished"
    assert "config.json is damaged; it is written again" in outcome.notes[0]
    assert outputs(tmp_path, REFERENCE) == undisturbed
    assert (folder / "result.json").stat().st_mtime_ns == finished  # The run itself is not done again.


def test_lost_lines_at_the_end_of_a_finished_run_are_noticed(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    execute(REFERENCE, tmp_path)
    folder = tmp_path / "runs" / REFERENCE.id
    (folder / "metrics.jsonl").write_bytes(b"".join(lines_of(folder)[:-1]))
    (run,) = load_runs(tmp_path)
    with pytest.raises(ValueError, match="does not hold the lines that it held when the run ended"):
        _ = run.records
    assert execute(REFERENCE, tmp_path).status == "finished"
    assert outputs(tmp_path, REFERENCE) == undisturbed


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("no sources", lambda saved: saved.update(sources=None)),
        ("negative size", lambda saved: saved.update(metrics=-5)),
        ("other metrics", lambda saved: saved.update(metrics="0" * 16)),
        ("no state", lambda saved: saved.pop("state")),
        ("state of nothing", lambda saved: saved.update(state={})),
        ("position as text", lambda saved: saved["state"].update(position="nowhere")),
        ("task that is not there", lambda saved: saved["state"]["position"].update(task=99)),
        ("epoch as text", lambda saved: saved["state"]["position"].update(epoch="2")),
        ("step before the first", lambda saved: saved["state"]["position"].update(step=-1)),
        ("sum as text", lambda saved: saved["state"]["position"].update(online_loss="0.5")),
        ("record as list", lambda saved: saved["state"]["position"].update(start=[])),
        ("methods as number", lambda saved: saved["state"].update(methods=7)),
        ("no generators", lambda saved: saved["state"].update(random=None)),
        ("step that is not there", lambda saved: saved["state"]["position"].update(step=10**12)),
        ("batch that is not there", lambda saved: saved["state"]["position"].update(batch=10**12)),
        ("sum that is not finite", lambda saved: saved["state"]["position"].update(online_loss=float("nan"))),
        ("loss that is not finite", lambda saved: saved["state"]["position"]["loss_sum"].fill_(torch.nan)),
        ("answers as tensor", lambda saved: saved["state"]["position"].update(online_correct=torch.zeros(()))),
        ("less than no answers", lambda saved: saved["state"]["position"].update(online_correct=-1)),
        ("tensor in a record", lambda saved: saved["state"]["position"]["start"].update(receipts=torch.zeros(3))),
        ("infinity in a record", lambda saved: saved["state"]["position"]["start"].update(receipts=float("inf"))),
        ("moment without a shape", lambda saved: first_moments(saved).update(exp_avg=torch.zeros(()))),
        ("moment of another shape", lambda saved: first_moments(saved).update(exp_avg=torch.zeros(3))),
        ("moment as text", lambda saved: first_moments(saved).update(exp_avg_sq="x")),
        ("moment missing", lambda saved: first_moments(saved).pop("exp_avg_sq")),
        ("steps of another shape", lambda saved: first_moments(saved).update(step=torch.zeros(7))),
        ("rate as text", lambda saved: saved["state"]["optimizer"]["param_groups"][0].update(lr="x")),
        ("draws as text", lambda saved: saved["state"]["methods"][1]["state"].update(draws="x")),
        ("weights of another shape", lambda saved: saved["state"].update(model={"x": torch.zeros(3)})),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_forged_checkpoint_costs_only_itself(
    interrupted: Path, tmp_path: Path, undisturbed: dict[str, bytes], name: str, change: Callable[..., object]
) -> None:
    forge(interrupted, change)
    outcome = execute(REFERENCE, tmp_path)
    assert outcome.status == "finished", outcome.error
    (note,) = outcome.notes
    assert "is rejected (" in note
    assert outputs(tmp_path, REFERENCE) == undisturbed


def put_folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").touch()


def put_dead_link(path: Path) -> None:
    path.symlink_to("/nowhere/at/all")


def put_link(path: Path) -> None:
    path.symlink_to(path.parents[2] / "precious")


IN_THE_WAY = [put_folder, put_dead_link, put_link, os.mkfifo]


def test_settings_of_a_forged_optimizer_are_not_loaded(
    interrupted: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """They are those of the configuration; as text they would fail at every attempt."""
    forge(interrupted, lambda saved: saved["state"]["optimizer"]["param_groups"][0].update(betas="x", weight_decay=9.0))
    outcome = execute(REFERENCE, tmp_path)
    assert (outcome.status, outcome.notes) == ("finished", ())
    assert outputs(tmp_path, REFERENCE) == undisturbed


@pytest.mark.parametrize("put", IN_THE_WAY)
def test_something_else_in_place_of_files_is_set_aside(
    interrupted: Path, tmp_path: Path, undisturbed: dict[str, bytes], put: Callable[[Path], None]
) -> None:
    (tmp_path / "precious").write_text("of the user")
    put(interrupted / ".config.json.1.tmp")
    newest = checkpoints(interrupted)[0]
    for path in (newest, interrupted / "lock", interrupted / "config.json", interrupted / "events.jsonl"):
        path.unlink()
        put(path)
    outcome = execute(REFERENCE, tmp_path)
    assert outcome.status == "finished", outcome.error
    for name in ("lock", "config.json", "events.jsonl"):
        assert any(f"{name} is not a file; it is set aside as {name}.bad" in note for note in outcome.notes)
    assert any(f"{newest.name} is rejected (ValueError: it is not a file)" in note for note in outcome.notes)
    assert outputs(tmp_path, REFERENCE) == undisturbed
    assert (tmp_path / "precious").read_text() == "of the user"


@pytest.mark.parametrize("put", IN_THE_WAY)
def test_metrics_that_are_not_a_file_start_the_run_over(
    interrupted: Path, tmp_path: Path, undisturbed: dict[str, bytes], put: Callable[[Path], None]
) -> None:
    (tmp_path / "precious").write_text("of the user")
    (interrupted / "metrics.jsonl").unlink()
    put(interrupted / "metrics.jsonl")
    assert execute(REFERENCE, tmp_path).status == "finished"
    assert outputs(tmp_path, REFERENCE) == undisturbed
    assert (tmp_path / "precious").read_text() == "of the user"


def test_a_link_in_place_of_a_run_is_not_followed(tmp_path: Path) -> None:
    """A folder of runs that somebody sent may lead into the home folder, where other programs keep a config.json."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.json").write_text("of the user")
    (tmp_path / "home" / ".mine.tmp").write_text("of the user")
    (tmp_path / "runs").mkdir()
    folder = tmp_path / "runs" / small().id
    folder.symlink_to(tmp_path / "home")
    outcome = execute(small(), tmp_path)
    assert outcome.status == "finished"
    assert "was a link to another folder; it is removed" in outcome.notes[0]
    assert {path.name: path.read_text() for path in (tmp_path / "home").iterdir()} == {
        "config.json": "of the user",
        ".mine.tmp": "of the user",
    }
    shutil.rmtree(folder)
    folder.write_text("a file")
    outcome = execute(small(), tmp_path)
    assert outcome.status == "finished"
    assert "is not a folder; it is set aside as" in outcome.notes[0]


def test_a_link_in_place_of_a_temporary_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("of the user")
    (tmp_path / f".recipe.json.{os.getpid()}.tmp").symlink_to(tmp_path / "precious")
    write_atomically(tmp_path / "recipe.json", b"{}")
    assert (tmp_path / "precious").read_text() == "of the user"
    assert (tmp_path / "recipe.json").read_text() == "{}"


def test_a_damaged_log_costs_only_the_log(interrupted: Path, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    flip_bit(interrupted / "events.jsonl", place=5)
    outcome = execute(REFERENCE, tmp_path)
    assert "events.jsonl is damaged (line 1" in outcome.notes[0]
    assert outputs(tmp_path, REFERENCE) == undisturbed
    (run,) = load_runs(tmp_path)
    assert run.events[0]["event"] == "damaged log"


def test_a_model_that_raises_at_a_step_fails_alone_and_resumes(tmp_path: Path) -> None:
    config = small(model=write_waiting_network(tmp_path, step=45))
    own = tmp_path / "own.py"
    waiting = own.read_text()
    own.write_text(waiting.replace("(FOLDER / f'{os.getpid()}.waits').touch()", "raise RuntimeError('at step 45')"))
    outcome = execute(config, tmp_path, checkpoint_seconds=0)
    assert outcome.status == "failed"
    assert "at step 45" in outcome.error
    (run,) = load_runs(tmp_path)
    assert (run.status, run.result) == ("failed", {})
    assert "RuntimeError: at step 45" in run.error


def test_a_run_that_is_killed_within_an_epoch_goes_on_there(tmp_path: Path) -> None:
    """Two epochs of 80 steps, with dropout, a method that acts at boundaries, and measures at its first step."""
    network = "__import__('torch').nn.Sequential(cnn(shape, classes), __import__('torch').nn.Dropout(0.3))"
    config = small(
        model=write_waiting_network(tmp_path, step=130, network=network),
        stream=Part("label_flip", {"tasks": 2, "epochs": 1}),
        training=Settings(batch_size=2),
        measures=("loss", "weight_l2"),
    )
    interrupt(config, tmp_path / "cut")
    outcome = execute(config, tmp_path / "cut")
    assert (outcome.status, outcome.notes) == ("finished", ())
    (run,) = load_runs(tmp_path / "cut")
    (resumed,) = (event for event in run.events if event["event"] == "resume")
    assert (resumed["task"], resumed["epoch"], resumed["step"]) == (1, 0, 129)
    assert run.events[-1]["steps"] == 160 - 129
    execute(config, tmp_path / "whole")
    assert outputs(tmp_path / "cut", config) == outputs(tmp_path / "whole", config)
