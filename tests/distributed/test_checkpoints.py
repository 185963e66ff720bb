"""State that was saved on some ranks is loaded on another number of ranks."""

from pathlib import Path

import pytest

from tests.distributed.checkpoints import METHODS
from tests.distributed.launching import launch
from tests.distributed.test_cells import distance


@pytest.mark.parametrize("saved_on", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_run_continues_on_another_number_of_ranks(saved_on: int, tmp_path: Path) -> None:
    continued = launch(["checkpoints", "save"], saved_on, tmp_path)[0]
    for rank in launch(["checkpoints", "load"], saved_on + 1, tmp_path):
        for name in METHODS:
            assert distance(rank[name], continued[name]) <= 1e-6, name
