"""Where runs are executed: in processes of this machine, or on a Ray cluster.

An engine turns a job into a future; everything else (order, retries, progress) is done once, by the
scheduler. Every run has one thread, so its numbers do not depend on the engine or on how many runs share
the machine.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pliant.experiments.config import RunConfig
from pliant.experiments.store import Status


@dataclass(frozen=True)
class Job:
    """A run to execute.

    Args:
        config: The run.
        root: The experiment's folder.
        checkpoint_seconds: Time between two checkpoints, at least.
    """

    config: RunConfig
    root: Path
    checkpoint_seconds: float = 30.0


class Engine(Protocol):
    """Executes jobs somewhere."""

    def capacity(self) -> int:
        """How many jobs to have submitted at a time."""

    def submit(self, job: Job) -> "Future[Status | None]":
        """Start a job; the future fails if the process that does it dies."""

    def close(self) -> None:
        """Stop what is running and let go of the processes."""


def perform(job: Job, paths: list[str]) -> Status | None:
    """Do a job in this process, on one thread.

    Args:
        job: The run.
        paths: Where the submitting process imports from, for models and data of the user's own.

    Returns:
        How the run ended; None if another process is at work on it.
    """
    import torch

    from pliant.experiments.run import execute

    sys.path.extend(path for path in paths if path not in sys.path)
    torch.set_num_threads(1)
    return execute(job.config, job.root, job.checkpoint_seconds)


class ProcessEngine:
    """Executes jobs in processes of this machine.

    Every process is a pool of its own: when one is killed, it is known whose run it was, and no other run
    suffers.

    Args:
        workers: How many processes; as many as there are cores by default.
    """

    def __init__(self, workers: int | None = None) -> None:
        workers = workers or usable_cores()
        if workers < 1:
            raise ValueError(f"workers is {workers}; it must be at least 1")
        self._idle: deque[_Worker | None] = deque([None] * workers)
        self._workers: set[_Worker] = set()
        self._capacity = workers

    def capacity(self) -> int:
        """How many jobs to have submitted at a time."""
        return self._capacity

    def submit(self, job: Job) -> "Future[Status | None]":
        """Start a job in an idle process; there is one while fewer than `capacity()` jobs are at work."""
        worker = self._idle.popleft() or _Worker()
        self._workers.add(worker)
        future = worker.pool.submit(perform, job, list(sys.path))
        future.add_done_callback(lambda done: self._release(worker, done))
        return future

    def close(self) -> None:
        """Stop what is running and let go of the processes."""
        for worker in self._workers:
            worker.stop()
        self._workers.clear()

    def _release(self, worker: "_Worker", done: "Future[Status | None]") -> None:
        if not done.cancelled() and isinstance(done.exception(), BrokenProcessPool):
            self._workers.discard(worker)
            self._idle.append(None)
        else:
            self._idle.append(worker)


class _Worker:
    """A pool of one process, whose id is known."""

    def __init__(self) -> None:
        # Not fork: torch's threads do not survive it.
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, context, initializer=_prepare)
        self._pid = self.pool.submit(os.getpid)

    def stop(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        if self._pid.done() and not self._pid.cancelled() and self._pid.exception() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid.result(), signal.SIGTERM)


def _prepare() -> None:
    """Leave Ctrl-C to the parent, and do not outlive it: whoever comes next would find runs still locked."""
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
