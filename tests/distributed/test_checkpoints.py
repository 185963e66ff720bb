"""State that was saved on some ranks is loaded on another number of ranks."""

from pathlib import Path

import pytest

from pliant import methods
from tests.distributed.launching import launch
from tests.distributed.test_cells import distance

SOME = ("l2_init", "swr", "upgd", "hare_tortoise", "streaming_ewc", "continual_backprop", "wasserstein", "spectral")


@pytest.mark.parametrize(("saved_on", "names"), [(1, SOME), (2, ())], ids=["1", "2"])
def test_a_run_continues_on_another_number_of_ranks(saved_on: int, names: tuple[str, ...], tmp_path: Path) -> None:
    given = str(saved_on), *names
    continued = launch(["checkpoints", "save"], saved_on, tmp_path, *given)[0]
    assert continued.keys() == set(names or methods.names())
    for world in {1, saved_on + 1} - {saved_on}:
        for rank in launch(["checkpoints", "load"], world, tmp_path, *given):
            for name, values in continued.items():
                assert distance(rank[name], values) <= 1e-6, (world, name)
