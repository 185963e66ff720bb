"""State that was saved on some ranks is loaded on another number of ranks."""

from pathlib import Path

import pytest

from tests.distributed.checkpoints import METHODS
from tests.distributed.launching import launch
from tests.distributed.test_cells import distance


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 3), (1, 2)])
def test_a_run_continues_on_another_number_of_ranks(saved_on: int, loaded_on: int, tmp_path: Path) -> None:
    (reference,) = launch(["cells", "single"], 1, tmp_path, *METHODS)
    launch(["checkpoints", "save"], saved_on, tmp_path)
    for rank in launch(["checkpoints", "load"], loaded_on, tmp_path):
        for name in METHODS:
            assert distance(rank[name]["final"], reference[name, "adamw", "mlp"]["final"]) <= 1e-6, name
