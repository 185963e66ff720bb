"""A run that was interrupted goes on bit for bit, from a checkpoint that is sound and fits, or starts over."""

import errno
import hashlib
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from pliant.experiments import store
from pliant.experiments.run import execute
from pliant.experiments.run_config import Part, RunConfig
from pliant.training import Learner, Settings
from tests.experiments.helpers import count_records, events, interrupt, outputs, small, write_waiting_network


@pytest.mark.parametrize(
    "methods",
    [
        (Part("swr", {"lam": 0.01}), Part("l2", {"lam": 1e-4})),
        (Part("head_reset"),),
        (Part("full_reset"),),
    ],
    ids=lambda parts: "+".join(part.name for part in parts),
)
def test_every_kind_of_method_resumes(tmp_path: Path, methods: tuple[Part, ...]) -> None:
    config = small(
        methods=methods,
        model=write_waiting_network(tmp_path, step=75, network="cnn(shape, classes, batch_norm=True)"),
    )
    interrupt(config, tmp_path)
    assert count_records(tmp_path, config) == 7
    assert execute(config, tmp_path).status == "finished"
    assert events(tmp_path, config) == ["start", "start", "resume", "end"]
    assert_nothing_shows(tmp_path, config)


def test_a_run_in_the_channels_last_layout_resumes(tmp_path: Path) -> None:
    config = small(
        model=write_waiting_network(tmp_path, step=75, network="cnn(shape, classes, batch_norm=True)"),
        training=Settings(batch_size=16, layout="channels_last"),
    )
    interrupt(config, tmp_path)
    assert execute(config, tmp_path).status == "finished"
    assert_nothing_shows(tmp_path, config)


def assert_nothing_shows(root: Path, config: RunConfig) -> None:
    """A run that was interrupted has written what it writes when nothing disturbs it."""
    assert execute(config, root / "whole").status == "finished"
    assert outputs(root, config) == outputs(root / "whole", config)


def interrupted(root: Path) -> tuple[RunConfig, Path]:
    """A run that was killed in the middle of its eighth epoch, and its folder."""
    config = small(model=write_waiting_network(root, step=75))
    folder = interrupt(config, root)
    assert count_records(root, config) == 7
    assert len(list(folder.glob("checkpoint-*.pt"))) == 2
    return config, folder


def newest(folder: Path) -> Path:
    return max(folder.glob("checkpoint-*.pt"))


def test_a_truncated_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    config, folder = interrupted(tmp_path)
    checkpoint = newest(folder)
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    outcome = execute(config, tmp_path)
    assert outcome.status == "finished"
    (note,) = outcome.notes
    assert f"{checkpoint} is rejected (ValueError: the content is not what was saved)" in note
    assert events(tmp_path, config)[-4:] == ["start", "bad checkpoint", "resume", "end"]
    assert not list(tmp_path.rglob("checkpoint-*")), "nothing is left of them when a run has ended"
    assert_nothing_shows(tmp_path, config)


def test_without_any_sound_checkpoint_the_run_starts_over(tmp_path: Path) -> None:
    config, folder = interrupted(tmp_path)
    for checkpoint in folder.glob("checkpoint-*.pt"):
        content = bytearray(checkpoint.read_bytes())
        content[len(content) // 2] ^= 255
        checkpoint.write_bytes(content)
    outcome = execute(config, tmp_path)
    assert len(outcome.notes) == 3
    assert outcome.notes[2] == "no checkpoint is left: the run starts over"
    assert_nothing_shows(tmp_path, config)


def change_checkpoints(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what checkpoints hold, and name them by it."""
    for checkpoint in folder.glob("checkpoint-*.pt"):
        saved = torch.load(checkpoint, weights_only=True)
        change(saved)
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        digest = hashlib.sha256(buffer.getvalue()).hexdigest()[:32]
        checkpoint.unlink()
        number = checkpoint.name.split("-")[1]
        (folder / f"checkpoint-{number}-{digest}.pt").write_bytes(buffer.getvalue())


def test_a_state_that_another_version_saved_is_not_taken(tmp_path: Path) -> None:
    """It is sound, and loads in part: the model fits, a method's state does not."""
    config, folder = interrupted(tmp_path)
    change_checkpoints(folder, lambda saved: saved["state"]["methods"][0]["state"].pop("initial"))
    outcome = execute(config, tmp_path)
    assert outcome.status == "finished"
    *bad, over = outcome.notes
    assert len(bad) == 2
    assert all("'initial' is missing in the given state" in note for note in bad)
    assert over == "no checkpoint is left: the run starts over"
    assert_nothing_shows(tmp_path, config)


def test_a_short_lack_of_memory_loses_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, folder = interrupted(tmp_path)
    before = sorted(folder.glob("checkpoint-*"))
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "load_state_dict", lambda *_: torch.empty(2**60))
        assert "can't allocate memory" in execute(config, tmp_path).error
    assert sorted(folder.glob("checkpoint-*")) == before
    assert execute(config, tmp_path).status == "finished"
    assert events(tmp_path, config)[-3:] == ["start", "resume", "end"]
    assert_nothing_shows(tmp_path, config)


def silence(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the disk not answer when the newest checkpoint is read."""
    silent = newest(folder)

    def read(path: Path) -> bytes:
        if path == silent:
            raise OSError(errno.EIO, "Input/output error")
        return path.read_bytes()

    monkeypatch.setattr(store, "read_regular", read)


def test_a_disk_that_does_not_answer_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, folder = interrupted(tmp_path)
    with monkeypatch.context() as patch:
        silence(patch, folder)
        assert "Input/output error" in execute(config, tmp_path).error
    assert execute(config, tmp_path).notes == ()
    assert events(tmp_path, config)[-3:] == ["start", "resume", "end"]
    assert_nothing_shows(tmp_path, config)


def test_a_disk_that_never_answers_costs_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, folder = interrupted(tmp_path)
    silence(monkeypatch, folder)
    assert execute(config, tmp_path).status == "failed"
    outcome = execute(config, tmp_path)
    assert outcome.status == "finished"
    (note,) = outcome.notes
    assert "Input/output error) and set aside" in note
    assert events(tmp_path, config)[-4:] == ["start", "bad checkpoint", "resume", "end"]
    assert_nothing_shows(tmp_path, config)


def write_npz(path: Path, seed: int) -> Part:
    x = numpy.random.default_rng(seed).normal(size=(200, 5))
    numpy.savez(path, x=x, y=numpy.arange(200) % 3)
    return Part(str(path))


@pytest.mark.parametrize("changed", ["data", "model"])
def test_a_run_does_not_go_on_with_other_data_or_another_network(tmp_path: Path, changed: str) -> None:
    config = small(data=write_npz(tmp_path / "own.npz", 0), model=write_waiting_network(tmp_path, step=75))
    folder = interrupt(config, tmp_path)
    assert len(list(folder.glob("checkpoint-*.pt"))) == 2
    if changed == "data":
        write_npz(tmp_path / "own.npz", 1)
    else:
        own = tmp_path / "own.py"
        own.write_text(own.read_text().replace("widths=[16]", "widths=[16], layer_norm=True"))
    outcome = execute(config, tmp_path)
    assert outcome.status == "finished"
    *bad, over = outcome.notes
    assert len(bad) == 2
    assert all(f"is rejected (ValueError: the {changed} changed since it was saved)" in note for note in bad)
    assert over == "no checkpoint is left: the run starts over"
    assert_nothing_shows(tmp_path, config)


def test_a_network_of_another_shape_starts_over(tmp_path: Path) -> None:
    """Its file is the same, what that reads is not."""
    (tmp_path / "width").write_text("16")
    network = f"mlp(shape, classes, widths=[int(Path({str(tmp_path / 'width')!r}).read_text())])"
    config = small(model=write_waiting_network(tmp_path, step=75, network=network))
    interrupt(config, tmp_path)
    (tmp_path / "width").write_text("17")
    outcome = execute(config, tmp_path)
    assert outcome.status == "finished"
    *bad, over = outcome.notes
    assert all("size mismatch for" in note for note in bad)
    assert over == "no checkpoint is left: the run starts over"
    assert_nothing_shows(tmp_path, config)


class Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.mark,))


def test_a_hostile_checkpoint_runs_no_code(tmp_path: Path) -> None:
    config, folder = interrupted(tmp_path)
    mark = tmp_path / "it ran"
    buffer = io.BytesIO()
    torch.save({"state": Hostile(mark), "metrics_bytes": 0}, buffer, pickle_module=pickle)
    content = buffer.getvalue()
    digest = hashlib.sha256(content).hexdigest()[:32]
    (folder / f"checkpoint-999999999999-{digest}.pt").write_bytes(content)
    (note,) = execute(config, tmp_path).notes
    assert "would run code" in note
    assert not mark.exists()
    assert_nothing_shows(tmp_path, config)


def test_torn_lines_are_cut_off(tmp_path: Path) -> None:
    config, folder = interrupted(tmp_path)
    for name in ("metrics.jsonl", "events.jsonl"):
        with (folder / name).open("ab") as file:
            file.write(b'{"half": ')
    assert count_records(tmp_path, config) == 7
    execute(config, tmp_path)
    assert_nothing_shows(tmp_path, config)
    assert events(tmp_path, config)[-3:] == ["start", "resume", "end"]


def test_metrics_lost_by_a_power_cut_invalidate_the_checkpoint(tmp_path: Path) -> None:
    config, folder = interrupted(tmp_path)
    metrics = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(metrics[: len(metrics) // 4])
    outcome = execute(config, tmp_path)
    *bad, over = outcome.notes
    assert len(bad) == 2
    assert all("metrics.jsonl does not hold what it held when the checkpoint was saved" in note for note in bad)
    assert over == "no checkpoint is left: the run starts over"
    assert_nothing_shows(tmp_path, config)
