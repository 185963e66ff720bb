"""One run: done once, resumed bit for bit after any death, and honest about how it failed."""

import hashlib
import io
import itertools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from pliant.experiments.config import Part, RunConfig
from pliant.experiments.run import execute, make_methods, make_model, make_stream
from pliant.experiments.store import RunFolder, last_progress, load_runs
from pliant.training import Learner, Settings
from tests.experiments.helpers import in_process, interrupt, outputs, small, write_waiting_network


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the small run writes when nothing disturbs it."""
    root = tmp_path_factory.mktemp("reference")
    assert execute(small(), root).status == "finished"
    return outputs(root, small())


def events(root: Path, config: RunConfig) -> list[str]:
    (run,) = (run for run in load_runs(root) if run.id == config.id)
    return [event["event"] for event in run.events]


def count_records(root: Path, config: RunConfig | None = None) -> int:
    return len(RunFolder(root, config or small()).records())


def test_a_run_leaves_its_result_and_no_checkpoints(tmp_path: Path) -> None:
    assert execute(small(), tmp_path, checkpoint_seconds=0).status == "finished"
    (run,) = load_runs(tmp_path)
    assert (run.config, run.status, run.progress) == (small(), "finished", 1.0)
    assert len(run.records) == 12
    assert run.result["final_test_accuracy"] == run.records[-1]["test_accuracy"]
    files = {path.name for path in run.path.iterdir()}
    assert files == {"config.json", "metrics.jsonl", "result.json", "events.jsonl", "lock"}
    start, end = run.events
    assert start["environment"]["torch"] == torch.__version__
    assert (end["event"], end["status"], end["steps"]) == ("end", "finished", 120)
    assert end["bytes"]["methods"] > 0


def test_a_finished_run_is_never_redone(tmp_path: Path) -> None:
    execute(small(), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json*")}
    assert execute(small(), tmp_path).status == "finished"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json*")} == before


def test_names_depend_on_the_configuration_alone() -> None:
    assert small().id == small().id
    changed = [
        small(seed=1),
        small(training=Settings(batch_size=32)),
        small(methods=(Part("l2_init", {"lam": 0.1}),)),
        small(purpose="selection"),
    ]
    assert len({config.id for config in (small(), *changed)}) == 5
    for config in (small(), *changed):
        assert RunConfig.from_dict(json.loads(config.to_json())) == config


def test_sigkill_at_twenty_random_moments_changes_nothing(tmp_path: Path, reference: dict[str, bytes]) -> None:
    moments = random.Random(1)
    kills = resumes = 0
    for attempt in itertools.count():
        root = tmp_path / str(attempt)
        while True:
            # Some epochs further, so that it ends on a slow machine too, and then anywhere in an epoch.
            target = count_records(root) + moments.randint(0, 3)
            process = in_process(small(), root)
            while process.is_alive() and count_records(root) < target:
                process.join(0.002)
            process.join(moments.uniform(0, 0.05))
            if not process.is_alive():
                break
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            kills += 1
        assert outputs(root, small()) == reference
        resumes += events(root, small()).count("resume")
        if kills >= 20:
            break
    assert resumes > 0


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
    assert f"{checkpoint} is no good (ValueError: the content is not what was saved)" in note
    assert events(tmp_path, config)[-4:] == ["start", "bad checkpoint", "resume", "end"]
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


def test_memory_that_is_full_for_a_moment_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, folder = interrupted(tmp_path)
    before = sorted(folder.glob("checkpoint-*"))
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "load_state_dict", lambda *_: torch.empty(2**60))
        assert "can't allocate memory" in execute(config, tmp_path).error
    assert sorted(folder.glob("checkpoint-*")) == before
    assert execute(config, tmp_path).status == "finished"
    assert events(tmp_path, config)[-3:] == ["start", "resume", "end"]
    assert_nothing_shows(tmp_path, config)


def test_a_disk_that_does_not_answer_costs_no_checkpoint(tmp_path: Path) -> None:
    config, folder = interrupted(tmp_path)
    checkpoint = newest(folder)
    checkpoint.rename(tmp_path / "kept")
    checkpoint.mkdir()  # What cannot be read as a file, for now.
    assert "IsADirectoryError" in execute(config, tmp_path).error
    checkpoint.rmdir()
    (tmp_path / "kept").rename(checkpoint)
    assert execute(config, tmp_path).notes == ()
    assert events(tmp_path, config)[-3:] == ["start", "resume", "end"]
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
    assert all(f"is no good (ValueError: the {changed} changed since it was saved)" in note for note in bad)
    assert over == "no checkpoint is left: the run starts over"
    assert_nothing_shows(tmp_path, config)


def test_a_checkpoint_that_does_not_tell_what_it_is_made_of_is_taken(tmp_path: Path) -> None:
    """As those of older versions."""
    config, folder = interrupted(tmp_path)
    change_checkpoints(folder, lambda saved: saved.pop("sources"))
    assert execute(config, tmp_path).notes == ()
    assert events(tmp_path, config)[-3:] == ["start", "resume", "end"]


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
    assert "UnpicklingError" in note
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
    assert all("metrics.jsonl is shorter than when the checkpoint was saved" in note for note in bad)
    assert over == "no checkpoint is left: the run starts over"
    assert_nothing_shows(tmp_path, config)


@pytest.mark.parametrize(("name", "content"), [("config.json", b""), ("result.json", b'{"status": 1}')])
def test_damaged_files_are_named_and_written_anew(
    tmp_path: Path, reference: dict[str, bytes], name: str, content: bytes
) -> None:
    folder = RunFolder(tmp_path, small())
    with folder.open():
        pass
    (folder.path / name).write_bytes(content)
    assert folder.status == "unfinished"
    with pytest.raises(ValueError, match=rf"{small().id}.{name} is damaged \("):
        load_runs(tmp_path)
    assert execute(small(), tmp_path).status == "finished"
    assert outputs(tmp_path, small()) == reference


def test_a_torn_line_among_others_is_named(tmp_path: Path) -> None:
    execute(small(), tmp_path)
    (run,) = load_runs(tmp_path)
    metrics = run.path / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join([lines[0], lines[1][:20] + b"\n", *lines[2:]]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged \(JSONDecodeError"):
        _ = run.records


@pytest.mark.parametrize("sizes", [[], [10], [10, 20], [70_000], [10, 70_000], [70_000, 300_000], [65536, 65536, 9]])
def test_progress_is_read_from_the_end_however_long_lines_are(tmp_path: Path, sizes: list[int]) -> None:
    content = "".join(json.dumps({"progress": size / 1e6, "pad": "x" * size}) + "\n" for size in sizes)
    (tmp_path / "metrics.jsonl").write_text(content)
    assert last_progress(tmp_path) == (sizes[-1] / 1e6 if sizes else 0.0)
    (tmp_path / "metrics.jsonl").write_text(content + '{"progr')
    assert last_progress(tmp_path) == (sizes[-1] / 1e6 if sizes else 0.0)


def test_a_diverging_run_is_a_result(tmp_path: Path) -> None:
    config = small(training=Settings(optimizer="sgd", lr=1e30, batch_size=16))
    outcome = execute(config, tmp_path)
    assert outcome.status == "diverged"
    (run,) = load_runs(tmp_path)
    assert (run.status, run.result) == ("diverged", {})
    assert "the training loss is nan" in run.error
    assert run.events[-1]["sources"]["data"]
    assert execute(config, tmp_path).status == "diverged"
    assert len(run.events) == 2


def test_a_run_that_diverges_late_leaves_no_checkpoints(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import itertools\n"
        "from pliant.models import mlp\n"
        "def build(shape, classes):\n"
        "    network, steps = mlp(shape, classes, widths=[16]), itertools.count()\n"
        "    def spoil(module, inputs, output):\n"
        "        return output * float('nan') if module.training and next(steps) > 50 else output\n"
        "    network.register_forward_hook(spoil)\n"
        "    return network\n"
    )
    config = small(model=Part(f"{own}:build"), methods=())
    assert execute(config, tmp_path, checkpoint_seconds=0).status == "diverged"
    (run,) = load_runs(tmp_path)
    assert len(run.records) == 5
    assert list(run.path.glob("checkpoint-*")) == []


def test_a_result_stands_though_a_checkpoint_cannot_be_removed(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from pathlib import Path\n"
        "from pliant.models import mlp\n"
        "def build(shape, classes):\n"
        "    network = mlp(shape, classes, widths=[16])\n"
        "    def hinder(module, inputs):\n"
        "        if module.training:\n"
        f"            (run,) = Path({str(tmp_path / 'runs')!r}).iterdir()\n"
        f"            (run / 'checkpoint-000000000001-{'0' * 32}.pt').mkdir(exist_ok=True)\n"
        "    network.register_forward_pre_hook(hinder)\n"
        "    return network\n"
    )
    config = small(model=Part(f"{own}:build"))
    assert execute(config, tmp_path).status == "finished"
    (run,) = load_runs(tmp_path)
    assert run.status == "finished"
    assert list(run.path.glob("checkpoint-*"))


@pytest.mark.parametrize("changes", [{"methods": (Part("swr"), Part("l2"))}, {"methods": (), "fresh": True}])
def test_layers_that_wait_for_an_input_get_their_weights_first(tmp_path: Path, changes: dict[str, Any]) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from torch import nn\n"
        "def build(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(classes))\n"
    )
    config = small(model=Part(f"{own}:build"), **changes)
    assert execute(config, tmp_path).error == ""
    first, second = (dict(make_model(config, make_stream(config)).named_parameters()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = make_model(replace(config, seed=1), make_stream(config))
    assert not torch.equal(first["1.weight"], other[1].weight)


def test_a_module_that_seeds_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is imported by the first run of a process alone; the second run would differ."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "seeding_module.py").write_text(
        "import numpy, random, torch\n"
        "torch.manual_seed(1), random.seed(1), numpy.random.seed(1)\n"
        "def load():\n"
        "    torch.manual_seed(2)\n"
        "    x, y = torch.randn(64, 5), torch.arange(64) % 2\n"
        "    return (x, y), (x, y)\n"
        "def build(shape, classes):\n"
        "    width = 8 + numpy.random.randint(8)\n"
        "    layers = torch.nn.Linear(5, width), torch.nn.Dropout(0.5), torch.nn.Linear(width, classes)\n"
        "    return torch.nn.Sequential(*layers)\n"
    )
    config = small(data=Part("seeding_module:load"), model=Part("seeding_module:build"), methods=())
    for root in ("first", "second"):
        assert execute(config, tmp_path / root).status == "finished"
    assert outputs(tmp_path / "first", config) == outputs(tmp_path / "second", config)
    states = []
    for seed in (0, 1):
        execute(replace(config, seed=seed), tmp_path / "other")
        states.append(torch.get_rng_state())
    assert not torch.equal(*states)


def test_a_fresh_network_for_every_task_is_another_one(tmp_path: Path) -> None:
    """The tasks are the same, and steps too small to change anything: only the networks may differ."""
    config = small(
        methods=(),
        fresh=True,
        stream=Part("warm_start", {"fraction": 1.0, "first_epochs": 1, "epochs": 1}),
        training=Settings(optimizer="sgd", lr=1e-30, batch_size=16),
    )
    for each in (config, replace(config, fresh=False)):
        assert execute(each, tmp_path).status == "finished"
    losses = {run.config.fresh: [record["train_loss"] for record in run.records] for run in load_runs(tmp_path)}
    assert losses[False] == pytest.approx([losses[True][0]] * 2)
    assert losses[True][1] != pytest.approx(losses[True][0])


def test_a_failing_run_is_recorded_with_its_traceback_and_tried_again(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from pathlib import Path\n"
        "from torch import nn\n"
        "def build(shape, classes):\n"
        f"    if not Path({str(tmp_path / 'mended')!r}).exists():\n"
        "        raise MemoryError('too large a network')\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    config = small(model=Part(f"{own}:build"))
    assert execute(config, tmp_path).status == "failed"
    (run,) = load_runs(tmp_path)
    assert run.status == "failed"
    assert "MemoryError: too large a network" in run.error
    assert "Traceback" in run.error
    (tmp_path / "mended").touch()
    assert execute(config, tmp_path).status == "finished"
    assert load_runs(tmp_path)[0].status == "finished"


def test_a_run_that_another_process_does_is_left_alone(tmp_path: Path) -> None:
    with RunFolder(tmp_path, small()).open():
        context_free = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys; from pathlib import Path; from tests.experiments.helpers import small\n"
                "from pliant.experiments.run import execute\n"
                "print(execute(small(), Path(sys.argv[1])).status)",
                str(tmp_path),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
    assert context_free.stdout.strip() == "None"
    assert not (tmp_path / "runs" / small().id / "metrics.jsonl").exists()


FULL = """
import sys
from pathlib import Path
from pliant.experiments.run import execute, make_methods
from tests.experiments.helpers import small
disk, size, result = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
for free in (1, 12, 40, 70):
    root = disk / str(free)
    root.mkdir()
    filler = disk / "filler"
    used = sum(path.stat().st_size // 4096 + 1 for path in disk.rglob("*") if path.is_file()) * 4096
    filler.write_bytes(bytes(size - used - free * 1024))
    outcome = execute(small(), root, 0)
    print(outcome.status, outcome.error.strip().splitlines()[-1])
    filler.unlink()
    print(execute(small(), root, 0).status)
    for name in ("config.json", "metrics.jsonl", "result.json"):
        (result / f"{free}.{name}").write_bytes((root / "runs" / small().id / name).read_bytes())
"""


def test_a_full_disk_fails_the_run_and_room_lets_it_go_on(tmp_path: Path, reference: dict[str, bytes]) -> None:
    disk, result = tmp_path / "disk", tmp_path / "result"
    disk.mkdir()
    result.mkdir()
    size = 400 * 1024
    command = (
        f'mount -t tmpfs -o size={size} tmpfs {disk} && exec "{sys.executable}" -c "$SCRIPT" {disk} {size} {result}'
    )
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", command],
        env=os.environ | {"SCRIPT": FULL},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith("failed OSError: [Errno 28] No space left on device") for line in lines[::2])
    assert lines[1::2] == ["finished"] * 4
    for name, content in reference.items():
        assert [path.read_bytes() for path in result.glob(f"*.{name}")] == [content] * 4


def test_methods_at_once_have_random_numbers_of_their_own_and_the_first_those_it_has_alone() -> None:
    noise = Part("shrink_perturb", {"toward": "noise"})
    seeds = [
        [method.seed for method in make_methods(small(methods=parts), nn.Linear(64, 10), torch.zeros(1, 64))]  # type: ignore[attr-defined]
        for parts in ((noise,), (noise, noise))
    ]
    assert seeds[1][0] == seeds[0][0] != seeds[1][1]
