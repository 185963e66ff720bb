"""Engines execute runs: in processes of this machine, or on a Ray cluster.

An engine turns a job into a future; the scheduler does the rest (order, retries, progress). Every run has the same
number of threads, one by default, so its numbers do not depend on the engine or on the number of parallel runs.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Protocol

from pliant._importing import naming_extra
from pliant._validation import check_number, require_positive
from pliant.experiments.run import Outcome, execute
from pliant.experiments.run_config import RunConfig


@dataclass(frozen=True)
class Job:
    """A run to execute.

    Args:
        config: The run.
        root: The folder of the experiment.
        checkpoint_seconds: The least time between two checkpoints.
        folder: The current folder, for relative paths of data and modules.
        paths: The import path.
    """

    config: RunConfig
    root: Path
    checkpoint_seconds: float = 30.0
    folder: str = field(default_factory=os.getcwd)
    paths: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))


class WorkerDiedError(RuntimeError):
    """The process of a job died: it was killed, ran out of memory, or its machine failed."""


class Engine(Protocol):
    """Executes jobs."""

    def capacity(self) -> int:
        """Return the number of jobs to submit at a time."""

    def submit(self, job: Job) -> "Future[Outcome]":
        """Start a job; its future raises a WorkerDiedError if the process dies."""

    def close(self) -> None:
        """Stop all jobs and processes."""


def perform(job: Job, threads: int) -> Outcome:
    """Execute a job in this process.

    Args:
        job: The run.
        threads: The number of threads.

    Returns:
        How the run ended.
    """
    import torch

    os.chdir(job.folder)
    sys.path.extend(path for path in job.paths if path not in sys.path)
    torch.set_num_threads(threads)
    return execute(job.config, job.root, job.checkpoint_seconds)


class ProcessEngine:
    """Executes jobs in processes of this machine.

    Every process is its own pool: if it is killed, its run is known, and no other run fails.

    Args:
        workers: The number of processes; by default as many as the cores allow.
        threads: Threads of each process.
    """

    def __init__(self, workers: int | None = None, threads: int = 1) -> None:
        require_positive(threads=threads)
        if workers is None:
            workers = max(1, usable_cores() // threads)
        require_positive(workers=workers)
        self._threads = threads
        self._capacity = workers
        self._idle: deque[_Worker] = deque()
        self._workers: set[_Worker] = set()

    def capacity(self) -> int:
        """Return the number of jobs to submit at a time."""
        return self._capacity

    def submit(self, job: Job) -> "Future[Outcome]":
        """Start a job in an idle process, or in a new one."""
        worker = self._idle.popleft() if self._idle else _Worker()
        self._workers.add(worker)
        outcome: Future[Outcome] = Future()
        outcome.set_running_or_notify_cancel()
        try:
            with _hidden_main(), _blocked_interrupts(), _kept_memory():
                future = worker.pool.submit(perform, job, self._threads)
        except BrokenProcessPool:  # It was killed while idle.
            self._lose(worker, outcome)
        else:
            future.add_done_callback(lambda done: self._pass_on(worker, done, outcome))
        return outcome

    def close(self) -> None:
        """Stop all jobs and processes."""
        workers = set(self._workers)  # A copy: another thread removes killed workers from the set.
        for worker in workers - set(self._idle):
            worker.kill()
        for worker in workers:
            worker.pool.shutdown(cancel_futures=True)
        self._workers.clear()
        self._idle.clear()

    def _pass_on(self, worker: "_Worker", done: "Future[Outcome]", outcome: "Future[Outcome]") -> None:
        error = None if done.cancelled() else done.exception()
        if done.cancelled() or isinstance(error, BrokenProcessPool):
            self._lose(worker, outcome)
            return
        self._idle.append(worker)
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(done.result())

    def _lose(self, worker: "_Worker", outcome: "Future[Outcome]") -> None:
        self._workers.discard(worker)
        outcome.set_exception(WorkerDiedError("the process was killed, or ran out of memory"))


class _Worker:
    """A pool of one process, which can be killed."""

    def __init__(self) -> None:
        # Not fork: torch's threads do not survive it.
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, context, initializer=_prepare)

    def kill(self) -> None:
        """Kill the process, even while it starts: its queued job cannot be canceled."""
        for process in list((self.pool._processes or {}).values()):
            process.terminate()


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep a new process from importing the user's script, which would start its comparison again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C. If it is pressed meanwhile, this process receives it afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it would unblock the signal as it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _kept_memory() -> Iterator[None]:
    """Start processes whose allocator keeps freed memory for the next step; variables that the user set stay.

    By default glibc gives large blocks back to the kernel, which fills them with zeros again in every training step.
    Other allocators ignore the variables.
    """
    missing = {name: value for name, value in ALLOCATOR.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
"""Blocks below 1 GiB come from the heap, and up to 4 GiB of free heap stay with the process."""


def _prepare() -> None:
    """Leave Ctrl-C to the parent, and exit with it: an orphan would keep its run locked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def usable_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Let a Ray that starts listen on the loopback interface alone; by default it listens on all of them.

    Ray's only switch for this is on by default on macOS and Windows. It is read when Ray is imported.
    """
    from ray._private import ray_constants

    before, variable = ray_constants.ENABLE_RAY_CLUSTER, ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    outside = os.environ.get(variable)
    ray_constants.ENABLE_RAY_CLUSTER, os.environ[variable] = False, "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        os.environ.pop(variable)
        if outside is not None:
            os.environ[variable] = outside


class RayEngine:
    """Executes jobs on a Ray cluster, or on a local Ray.

    All nodes must see the folder of the experiment under the same path. A local Ray listens on the loopback interface
    alone, and asks for a token. Whoever reaches a cluster without tokens can run code on it: see `docs/security.md`.

    Args:
        address: The address of the cluster; by default a local Ray is started.
        threads: CPUs and threads of every run.
        gpus: GPUs of every run; may be a fraction.
    """

    def __init__(self, address: str | None = None, threads: int = 1, gpus: float = 0.0) -> None:
        require_positive(threads=threads)
        check_number("gpus", gpus)
        with naming_extra("the Ray engine", "ray"):
            import ray
        self._ray: Any = ray
        self._address = address
        self._threads = threads
        self._gpus = gpus
        self._perform: Any = None
        self._started = False

    def _start(self) -> None:
        """Join the cluster, or start a local Ray."""
        self._started = not self._ray.is_initialized()
        if self._started and self._address is not None:
            self._ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
        elif self._started:
            with _on_loopback():
                self._ray.init(
                    address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
                )
        # No retries by Ray: the scheduler retries, in the same way for every engine.
        options: dict[str, Any] = {"num_cpus": self._threads, "num_gpus": self._gpus, "max_retries": 0}
        self._perform = self._ray.remote(**options)(perform)

    def capacity(self) -> int:
        """Return twice the number of runs that fit, so that no node waits."""
        if self._perform is None:
            self._start()
        cpus = self._ray.cluster_resources().get("CPU", 1)
        return max(1, 2 * int(cpus // self._threads))

    def submit(self, job: Job) -> "Future[Outcome]":
        """Start a job on some node."""
        outcome: Future[Outcome] = Future()
        outcome.set_running_or_notify_cancel()
        future = self._perform.remote(job, self._threads).future()
        future.add_done_callback(lambda done: self._pass_on(done, outcome))
        return outcome

    def close(self) -> None:
        """Leave the cluster; a local Ray that this engine started ends, with all that runs in it."""
        self._perform = None
        if self._started:
            self._started = False
            self._ray.shutdown()

    def _pass_on(self, done: "Future[Outcome]", outcome: "Future[Outcome]") -> None:
        error = done.exception()
        if error is None:
            outcome.set_result(done.result())
        elif isinstance(error, self._ray.exceptions.RayTaskError):
            outcome.set_exception(error)
        else:
            outcome.set_exception(WorkerDiedError(f"{type(error).__name__}: {error}"))
