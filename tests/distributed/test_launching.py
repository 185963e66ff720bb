"""Ranks that a signal ends start once more; ranks that fail by themselves do not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed import launching


@pytest.fixture
def codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The exit codes of the next starts."""
    for rank in range(2):
        (tmp_path / f"cells.2.{rank}.log").write_text(f"log of rank {rank}")
        torch.save(rank, tmp_path / f"cells.2.{rank}.pt")
    (tmp_path / "cells.2.rendezvous").touch()
    ahead: list[list[int]] = []
    monkeypatch.setattr(launching, "run_ranks", lambda *_: ahead.pop(0))
    yield ahead
    assert not ahead


def test_ranks_start_once_more_after_a_signal(tmp_path: Path, codes: list[list[int]]) -> None:
    codes += [[1, -11], [0, 0]]
    with pytest.warns(UserWarning, match=r"\[1, -11\] and start once more\nlog of rank 0\nlog of rank 1"):
        assert launching.launch(["cells"], 2, tmp_path) == [0, 1]
    assert not (tmp_path / "cells.2.rendezvous").exists()


@pytest.mark.parametrize("ends", [[[0, 1]], [[1, -11], [-11, 1]]])
@pytest.mark.filterwarnings("ignore:the ranks ended")
def test_an_error_or_a_second_signal_fails(tmp_path: Path, codes: list[list[int]], ends: list[list[int]]) -> None:
    codes += ends
    with pytest.raises(AssertionError, match="log of rank 1"):
        launching.launch(["cells"], 2, tmp_path)
