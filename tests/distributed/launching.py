"""Launch the ranks of a test as processes."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


def launch(command: Sequence[str], world: int, folder: Path, *arguments: str) -> list[Any]:
    """Run a module of this folder on some ranks, and return what each rank has saved.

    Args:
        command: The module's name and its first arguments; the rank, the number of ranks and the folder follow.
        world: The number of ranks.
        folder: Where the ranks meet and save.
        arguments: The last arguments.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", f"tests.distributed.{command[0]}", *command[1:]]
    ranks = [
        subprocess.Popen(
            [*start, str(rank), str(world), str(folder), *arguments],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    errors = [rank.communicate()[1] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "\n".join(errors)
    files = [folder / f"{command[-1]}.{world}.{rank}.pt" for rank in range(world)]
    return [torch.load(file, weights_only=True) for file in files]
