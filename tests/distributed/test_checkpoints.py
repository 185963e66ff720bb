"""State that was saved on some ranks is loaded on another number of ranks."""

from pathlib import Path

from tests.distributed.checkpoints import METHODS
from tests.distributed.launching import launch
from tests.distributed.test_cells import distance


def test_a_run_continues_on_another_number_of_ranks(tmp_path: Path) -> None:
    (reference,) = launch(["checkpoints", "save"], 1, tmp_path)
    launch(["checkpoints", "save"], 2, tmp_path)
    for loaded_on in (2, 3):
        for rank in launch(["checkpoints", "load"], loaded_on, tmp_path):
            for name in METHODS:
                assert distance(rank[name], reference[name]) <= 1e-6, (loaded_on, name)
