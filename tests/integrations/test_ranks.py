"""Trainer and Lightning on two ranks: bit-equal replicas, equal to one process that sees the whole batch."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def launch(framework: str, world: int, folder: Path) -> list[list[dict[str, Any]]]:
    folder.mkdir()
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"] if world > 1 else []
    command = [sys.executable, *ranks, "-m", "tests.integrations.ranks", framework, str(folder)]
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=file, stderr=file
        )
    try:
        process.wait(900)
    finally:
        process.terminate()  # on this signal, the launcher ends its ranks
        process.wait()
    assert process.returncode == 0, log.read_text()
    return [torch.load(folder / f"{framework}.{world}.{rank}.pt") for rank in range(world)]


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_replicas_are_bit_equal_and_go_on_from_a_checkpoint(framework: str, tmp_path: Path) -> None:
    ranks = launch(framework, 2, tmp_path / "ranks")
    for whole, resumed in ranks:
        assert len(whole["acted"]) == 2
        assert len(resumed["acted"]) == 1
        assert whole["renewed"] == resumed["renewed"] > 0
        for name, tensor in ranks[0][0]["weights"].items():
            assert torch.equal(whole["weights"][name], tensor), name
            assert torch.equal(resumed["weights"][name], tensor), name
    ((single, _),) = launch(framework, 1, tmp_path / "single")
    assert single["renewed"] == ranks[0][0]["renewed"]
    for name, tensor in single["weights"].items():
        torch.testing.assert_close(ranks[0][0]["weights"][name], tensor, rtol=1e-4, atol=1e-5, msg=name)
