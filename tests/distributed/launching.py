"""Launch the ranks of a test as processes, and let them begin and end together."""

import contextlib
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]


def launch(command: Sequence[str], world: int, folder: Path, *arguments: str, limit: float = 900) -> list[Any]:
    """Run a module of this folder on some ranks, and return what each rank has saved. No rank outlives the call.

    On a busy machine one launch of many ended with a segmentation fault in a rank, whose cause is not known. If a
    signal ends a rank, all ranks start once more. A warning shows the logs, which name the place of the fault.

    Args:
        command: The module's name and its first arguments; the rank, the number of ranks and the folder follow.
        world: The number of ranks.
        folder: Where the ranks meet and save.
        arguments: The last arguments.
        limit: The seconds that the ranks may take together.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    start = [sys.executable, "-m", f"tests.distributed.{command[0]}", *command[1:]]
    logs = [folder / f"{command[-1]}.{world}.{rank}.log" for rank in range(world)]
    codes = run_ranks(start, folder, logs, environment, arguments, limit)
    if min(codes) < 0:
        crashes = "\n".join(log.read_text() for log in logs)
        warnings.warn(f"the ranks ended with {codes} and start once more\n{crashes}", stacklevel=2)
        for meeting in folder.glob("*.rendezvous"):
            meeting.unlink()
        codes = run_ranks(start, folder, logs, environment, arguments, limit)
    assert not any(codes), f"the ranks ended with {codes}\n" + "\n".join(log.read_text() for log in logs)
    files = [folder / f"{command[-1]}.{world}.{rank}.pt" for rank in range(world)]
    return [torch.load(file, weights_only=True) for file in files]


def run_ranks(
    start: Sequence[str],
    folder: Path,
    logs: Sequence[Path],
    environment: Mapping[str, str],
    arguments: Sequence[str],
    limit: float,
) -> list[int]:
    """Run one process a log, and return their exit codes."""
    ranks = [
        subprocess.Popen(
            [*start, str(rank), str(len(logs)), str(folder), *arguments],
            cwd=ROOT,
            env=environment,
            stderr=log.open("w"),
        )
        for rank, log in enumerate(logs)
    ]
    end = time.monotonic() + limit
    try:
        return [rank.wait(max(0, end - time.monotonic())) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@contextlib.contextmanager
def joined(rank: int, world: int, meeting: Path) -> Iterator[None]:
    """Join the ranks; at the end leave together, without the shutdown of the interpreter.

    A gloo thread may still hold the last tensors when a rank is done. It needs Python's lock to free them. If the
    interpreter is shutting down by then, Python ends the thread inside C++ code that must not be left, and the process
    aborts with "terminate called without an active exception". A rank that leaves early also breaks the connections of
    the others. So nobody leaves before all are done, and a rank that is done exits at once, with code 0. An error is
    raised as usual.

    Args:
        rank: This rank.
        world: The number of ranks; one rank joins nothing.
        meeting: A file that does not exist yet.
    """
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
        )
    yield
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
