"""Many runs at once: failures stay alone, dead workers are replaced, two commands share the work."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from pliant.experiments.engines import Job, ProcessEngine, RayEngine, WorkerDiedError
from pliant.experiments.run import Outcome, execute
from pliant.experiments.run_config import Part, RunConfig
from pliant.experiments.scheduler import run_all
from pliant.experiments.store import RunFolder, load_runs
from tests.experiments.helpers import (
    descendants,
    is_running,
    outputs,
    small,
    wait_until,
    write_waiting_network,
)


class Notebook:
    """Remembers what it is told, and may act on it."""

    def __init__(self) -> None:
        self.waiting = self.done = 0
        self.outcomes: dict[str, Outcome] = {}

    def begin(self, waiting: Sequence[RunConfig], done: Sequence[RunConfig]) -> None:
        self.waiting, self.done = len(waiting), len(done)

    def tick(self, active: Iterable[RunConfig]) -> None:
        pass

    def ended(self, config: RunConfig, outcome: Outcome) -> None:
        self.outcomes[config.id] = outcome


@pytest.fixture(scope="module")
def engine() -> Iterator[ProcessEngine]:
    engine = ProcessEngine(2)
    yield engine
    engine.close()


def write_network(path: Path, body: str) -> Part:
    """A network of the user's own whose making has a side effect."""
    path.write_text(
        "import os, signal, time\n"
        "from pathlib import Path\n"
        "from torch import nn\n"
        "def build(shape, classes):\n"
        f"    {body}\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    return Part(f"{path}:build")


def test_results_do_not_depend_on_processes_or_on_failed_runs(tmp_path: Path, engine: ProcessEngine) -> None:
    bad = small(model=write_network(tmp_path / "bad.py", "raise RuntimeError('no such luck')"))
    configs = [small(seed=0), bad, small(seed=1)]
    notebook = Notebook()
    statuses = run_all(configs, tmp_path / "many", engine, notebook)
    assert [statuses[config.id] for config in configs] == ["finished", "failed", "finished"]
    assert "RuntimeError: no such luck" in notebook.outcomes[bad.id].error
    for config in (configs[0], configs[2]):
        execute(config, tmp_path / "one")
        assert outputs(tmp_path / "many", config) == outputs(tmp_path / "one", config)
    again = Notebook()
    run_all(configs, tmp_path / "many", engine, again)
    assert (again.waiting, again.done, list(again.outcomes)) == (1, 2, [bad.id])


def test_workers_keep_their_memory_and_the_user_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    names = "os.environ['MALLOC_MMAP_THRESHOLD_'], os.environ['MALLOC_TRIM_THRESHOLD_']"
    engine = ProcessEngine(1)
    try:
        model = write_network(tmp_path / "own.py", f"Path({str(tmp_path / 'seen')!r}).write_text(' '.join(({names})))")
        run_all([small(model=model)], tmp_path, engine, Notebook())
    finally:
        engine.close()
    assert (tmp_path / "seen").read_text() == f"{2**30} 1000"
    assert "MALLOC_MMAP_THRESHOLD_" not in os.environ


def test_a_killed_worker_is_replaced_and_its_run_goes_on(tmp_path: Path, engine: ProcessEngine) -> None:
    once = f"p = Path({str(tmp_path / 'mark')!r}); p.exists() or (p.touch(), os.kill(os.getpid(), signal.SIGKILL))"
    victim = small(model=write_network(tmp_path / "own.py", once))
    configs = [victim, small(seed=1), small(seed=2)]
    statuses = run_all(configs, tmp_path / "runs", engine, Notebook(), checkpoint_seconds=0)
    assert set(statuses.values()) == {"finished"}
    (run,) = (run for run in load_runs(tmp_path / "runs") if run.id == victim.id)
    assert [event["event"] for event in run.events] == ["start", "start", "end"]


def test_a_worker_that_is_killed_while_idle_is_replaced(tmp_path: Path) -> None:
    engine = ProcessEngine(1)
    try:
        run_all([small(seed=0)], tmp_path, engine, Notebook())
        (worker,) = engine._workers
        os.kill(next(iter(worker.pool._processes)), signal.SIGKILL)
        wait_until(lambda: worker.pool._broken)  # It takes the pool a moment to see.
        statuses = run_all([small(seed=1)], tmp_path, engine, Notebook())
    finally:
        engine.close()
    assert statuses == {small(seed=1).id: "finished"}


def test_close_ends_a_worker_that_is_starting(tmp_path: Path) -> None:
    engine = ProcessEngine(1)
    future = engine.submit(Job(small(model=write_waiting_network(tmp_path, step=1)), tmp_path / "runs"))
    engine.close()
    with pytest.raises(WorkerDiedError):
        future.result(timeout=60)
    assert not list(tmp_path.glob("*.waits"))


def test_a_run_that_always_kills_its_worker_is_given_up(tmp_path: Path, engine: ProcessEngine) -> None:
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x'); os.kill(os.getpid(), signal.SIGKILL)"
    deadly = small(model=write_network(tmp_path / "own.py", count))
    statuses = run_all([deadly, small(seed=1)], tmp_path / "runs", engine, Notebook(), retries=1)
    assert statuses == {deadly.id: "failed", small(seed=1).id: "finished"}
    assert (tmp_path / "count").read_text() == "xx"
    (run,) = (run for run in load_runs(tmp_path / "runs") if run.id == deadly.id)
    assert "died 2 times: the process was killed, or ran out of memory" in run.error


def test_a_run_that_was_finished_before_its_worker_died_stays_finished(tmp_path: Path) -> None:
    class Dying:
        """Finishes a run, and dies before it says so."""

        def capacity(self) -> int:
            return 1

        def submit(self, job: Job) -> Future[Outcome]:
            execute(job.config, job.root)
            future: Future[Outcome] = Future()
            future.set_exception(WorkerDiedError("killed"))
            return future

        def close(self) -> None:
            pass

    notes = Notebook()
    assert run_all([small()], tmp_path, Dying(), notes, retries=0) == {small().id: "finished"}
    assert load_runs(tmp_path)[0].status == "finished"


def test_a_second_command_shares_the_work_and_finishes_it(tmp_path: Path, engine: ProcessEngine) -> None:
    """Another process holds one of the runs for a while, then dies; this one does the rest and then that one."""
    configs = [small(seed=seed) for seed in range(3)]
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path; from tests.experiments.helpers import small\n"
            "from pliant.experiments.store import RunFolder\n"
            "with RunFolder(Path(sys.argv[1]), small(seed=0)).open():\n"
            "    print('held', flush=True); time.sleep(600)",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"held\n"

    class Killer(Notebook):
        def ended(self, config: RunConfig, outcome: Outcome) -> None:
            super().ended(config, outcome)
            if len(self.outcomes) == 2:
                assert RunFolder(tmp_path, configs[0]).records() == []
                holder.kill()

    notebook = Killer()
    statuses = run_all(configs, tmp_path, engine, notebook)
    assert set(statuses.values()) == {"finished"}
    assert list(notebook.outcomes)[-1] == configs[0].id
    holder.wait()


def test_workers_do_not_outlive_a_parent_that_was_killed(tmp_path: Path) -> None:
    sleeper = write_network(tmp_path / "own.py", f"Path({str(tmp_path / 'up')!r}).touch(); time.sleep(600)")
    script = (
        "import sys; from pathlib import Path; from tests.experiments.helpers import small\n"
        "from tests.experiments.test_scheduler import Notebook\n"
        "from pliant.experiments.run_config import Part; from pliant.experiments.engines import ProcessEngine\n"
        "from pliant.experiments.scheduler import run_all\n"
        "if __name__ == '__main__':\n"
        f"    run_all([small(model=Part({sleeper.name!r}))], Path(sys.argv[1]), ProcessEngine(1), Notebook())\n"
    )
    (tmp_path / "main.py").write_text(script)
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "main.py"), str(tmp_path)], env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    wait_until(lambda: (tmp_path / "up").exists() or parent.poll() is not None)
    workers = descendants(parent.pid)
    assert workers
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not any(map(is_running, workers)), seconds=60)
    # What they would hold for ten minutes is free again.
    with RunFolder(tmp_path, small(model=sleeper)).open(patience=60):
        pass


def test_wrong_numbers_of_workers_are_named() -> None:
    with pytest.raises(ValueError, match="workers: 0 is not allowed; it must be an integer ≥ 1"):
        ProcessEngine(0)
    with pytest.raises(ValueError, match="threads: -1 is not allowed; it must be an integer ≥ 1"):
        ProcessEngine(1, -1)
    with pytest.raises(ValueError, match="threads: 0 is not allowed; it must be an integer ≥ 1"):
        ProcessEngine(threads=0)
    with pytest.raises(ValueError, match="threads: 0 is not allowed; it must be an integer ≥ 1"):
        RayEngine(threads=0)
    with pytest.raises(ValueError, match="gpus: -1 is not allowed; it must be a number"):
        RayEngine(gpus=-1)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_wrong_times_between_checkpoints_are_named(tmp_path: Path, engine: ProcessEngine, seconds: float) -> None:
    with pytest.raises(ValueError, match=f"checkpoint_seconds: {seconds} is not allowed; it must be a number"):
        run_all([small()], tmp_path, engine, Notebook(), checkpoint_seconds=seconds)
