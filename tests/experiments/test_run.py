"""One run: done once, resumed bit for bit after any death, and honest about how it failed."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pliant.experiments.run import execute, make_methods, make_model, make_stream
from pliant.experiments.run_config import Part, RunConfig
from pliant.experiments.store import RunFolder, last_progress, load_runs
from pliant.training import Settings
from tests.experiments.helpers import count_records, events, in_process, outputs, small


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the small run writes when nothing disturbs it."""
    root = tmp_path_factory.mktemp("reference")
    assert execute(small(), root).status == "finished"
    return outputs(root, small())


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


def test_the_layout_changes_the_memory_and_not_the_results(tmp_path: Path) -> None:
    default = small(model=Part("cnn", {}), measures=("dormant_fraction",))
    other = replace(default, training=replace(default.training, layout="channels_last"))
    model = make_model(other, make_stream(other))
    weight = model[3].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    results = []
    for config in (default, other):
        assert execute(config, tmp_path).status == "finished"
        results.append(RunFolder(tmp_path, config).records())
    for one, two in zip(*results, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)


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


@pytest.mark.parametrize(("name", "content"), [("config.json", b""), ("result.json", b'{"status": 1}')])
def test_damaged_files_are_named_and_written_again(
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
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged \(ValueError: line 2: it is cut off"):
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


def test_a_module_that_seeds_torch_does_not_change_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.needs_namespace
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
