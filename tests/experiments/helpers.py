"""Small runs, and processes to kill them in, at a known place."""

import contextlib
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pliant.experiments.engines import Job, ProcessEngine, perform
from pliant.experiments.run import Outcome, execute
from pliant.experiments.run_config import Part, RunConfig
from pliant.experiments.store import RunFolder, load_runs
from pliant.training import Settings


class EngineHere(ProcessEngine):
    """Executes jobs in this process, which has imported torch already."""

    def submit(self, job: Job) -> "Future[Outcome]":
        outcome: Future[Outcome] = Future()
        outcome.set_result(perform(job, 1))
        return outcome


def small(**changes: Any) -> RunConfig:
    """A run of a second: 6 tasks, 2 epochs each, with a method at every step and one at boundaries."""
    config = RunConfig(
        label="both",
        methods=(Part("l2_init", {"lam": 0.01}), Part("shrink_perturb", {"lam": 0.5})),
        fresh=False,
        data=Part("digits", {"first": 160}),
        model=Part("mlp", {"widths": [16]}),
        stream=Part("label_flip", {"tasks": 6, "epochs": 2}),
        training=Settings(batch_size=16),
        measures=(),
        seed=0,
        purpose="result",
        holdout=0.0,
        device="cpu",
    )
    return replace(config, **changes)


def outputs(root: Path, config: RunConfig) -> dict[str, bytes]:
    """What must be equal, bit for bit, however often a run was interrupted."""
    folder = root / "runs" / config.id
    return {name: (folder / name).read_bytes() for name in ("config.json", "metrics.jsonl", "result.json")}


def events(root: Path, config: RunConfig) -> list[str]:
    """What happened to a run."""
    (run,) = (run for run in load_runs(root) if run.id == config.id)
    return [event["event"] for event in run.events]


def count_records(root: Path, config: RunConfig | None = None) -> int:
    """How many epochs a run has behind it; the small one by default."""
    return len(RunFolder(root, config or small()).records())


def in_process(config: RunConfig, root: Path, checkpoint_seconds: float = 0.0) -> BaseProcess:
    """Start a run in a process of its own, forked from one that has torch loaded and nothing else done."""
    context = multiprocessing.get_context("forkserver")
    # torch._dynamo is what the first step of an optimizer would import.
    context.set_forkserver_preload(["pliant.experiments.run", "torch._dynamo"])
    process = context.Process(target=execute, args=(config, root, checkpoint_seconds))
    process.start()
    return process


def wait_until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    """Wait for what comes soon unless something is broken; a machine with much else to do gets its time."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"it did not happen in {seconds:g} seconds"
        time.sleep(0.01)


def write_waiting_network(folder: Path, step: int, network: str = "mlp(shape, classes, widths=[16])") -> Part:
    """A network that stops at a step of its training until the folder holds "go", or for ten minutes.

    While it does, the folder holds a file PID.waits. Every attempt at a run counts its own steps.
    """
    (folder / "own.py").write_text(
        "import itertools, os, time\n"
        "from pathlib import Path\n"
        "from pliant.models import cnn, mlp\n"
        f"FOLDER = Path({str(folder)!r})\n"
        "def build(shape, classes):\n"
        f"    network, steps = {network}, itertools.count(1)\n"
        "    def wait(module, inputs):\n"
        f"        if module.training and next(steps) == {step}:\n"
        "            (FOLDER / f'{os.getpid()}.waits').touch()\n"
        "            until = time.monotonic() + 600\n"
        "            while not (FOLDER / 'go').exists() and time.monotonic() < until:\n"
        "                time.sleep(0.05)\n"
        "    network.register_forward_pre_hook(wait)\n"
        "    return network\n"
    )
    return Part(f"{folder / 'own.py'}:build")


def interrupt(config: RunConfig, root: Path) -> Path:
    """Begin a run whose network waits, kill it there, and let the next attempt pass; its folder."""
    network = Path(config.model.name).parent
    process = in_process(config, root)
    wait_until(lambda: (network / f"{process.pid}.waits").exists() or not process.is_alive())
    assert process.is_alive()
    process.kill()
    process.join()
    (network / "go").touch()
    return root / "runs" / config.id


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and those that they have."""
    children = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # The name in parentheses may hold anything; the parent is the second field after it.
            if (process / "stat").read_text().rpartition(")")[2].split()[1] == str(pid):
                children.add(int(process.name))
    return children.union(*(descendants(child) for child in children))


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # The latter if it goes between the opening and the reading.
        return False
