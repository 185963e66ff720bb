"""Every method on several ranks: replicas are bit-equal, and equal to one process that sees the whole batch."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.cells import cells
from tests.distributed.launching import launch

Cell = tuple[str, str, str]
Results = dict[Cell, dict[str, Any]]
"""What a rank ends with in each cell."""

HOUR = 3600.0
SETTINGS = [("ddp", 2), ("ddp", 3), ("fsdp", 2), ("fsdp", 3), ("tp", 2)]

UNITS = "parallelize_module splits the units of"
REFUSED = {
    "crelu": UNITS,
    "layer_norm": UNITS,
    "adalin": UNITS,
    "fourier": UNITS,
    "plasticity_injection": "parallelize_module splits the inputs of",
    "spectral_normalization": "parallelize_module cannot split the weight of",
}
"""What the errors of methods say that cannot be had where tensor parallelism splits the units of a layer."""


def refusal(setting: str, cell: Cell) -> str | None:
    """Return what the error of a cell says, or None if the method works there."""
    method, _, network = cell
    if setting != "tp" or (method == "plasticity_injection" and network != "mlp"):
        return None
    return REFUSED.get(method)


def wrong(setting: str, ranks: Sequence[Results], reference: Results) -> list[str]:
    """Return what is wrong with the cells, a line each."""
    lines = []
    for cell, expected in reference.items():
        found = [rank[cell] for rank in ranks]
        if "error" in expected:
            lines.append(f"{cell}: one process raises {expected['traceback']}")
            continue
        if message := refusal(setting, cell):
            if not all(message in each.get("error", "") for each in found):
                lines.append(f"{cell}: not refused, but {[each.get('error') for each in found]}")
            continue
        if any("error" in each for each in found):
            lines.append(f"{cell}: {[each.get('traceback') for each in found]}")
            continue
        if not all(each["acted"] for each in found):
            lines.append(f"{cell}: nothing happened")
        for each in found:
            if any(not torch.equal(each["final"][name], found[0]["final"][name]) for name in each["final"]):
                lines.append(f"{cell}: replicas differ by {distance(each['final'], found[0]['final']):.1e}")
            if not each["resumed"]:
                lines.append(f"{cell}: the resumed run differs")
        if not distance(found[0]["final"], expected["final"]) <= 1e-6:
            lines.append(f"{cell}: {distance(found[0]['final'], expected['final']):.1e} from one process")
    return lines


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Return the largest relative distance between tensors of the same name."""
    assert left.keys() == right.keys()
    pairs = [(left[name].double(), right[name].double()) for name in left]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)


def test_the_page_counts_the_cells_that_raise() -> None:
    every = [(setting, cell) for setting, _ in SETTINGS for cell in cells()]
    refused = [cell for setting, cell in every if refusal(setting, cell)]
    root = Path(__file__).parents[2]
    kept = (root / "benchmarks" / "results" / "cells.txt").read_text()
    total = re.search(rf"^{len(refused)} of the (\d+) cells raise, 0 are wrong$", kept, re.MULTILINE)
    assert total
    assert {line.split()[0] for line in kept.splitlines() if line} >= {method for method, _, _ in cells()}
    page = (root / "docs" / "howto-many-gpus.md").read_text()
    assert f"of {total[1]} cells" in page
    assert f"{len(refused)} raise" in page
    assert len(refused) <= 0.05 * len(every)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return launch(["cells", "single"], 1, tmp_path_factory.mktemp("few"), "few")[0]


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return launch(["cells", "single"], 1, tmp_path_factory.mktemp("every"), limit=HOUR)[0]


@pytest.mark.parametrize(("setting", "world"), [("ddp", 2), ("fsdp", 3), ("tp", 2)])
def test_one_cell_of_each_method(setting: str, world: int, few: Any, tmp_path: Path) -> None:
    assert not wrong(setting, launch(["cells", setting], world, tmp_path, "few"), few)


@pytest.mark.long
@pytest.mark.parametrize(("setting", "world"), SETTINGS)
def test_all_cells(setting: str, world: int, every: Any, tmp_path: Path) -> None:
    assert not wrong(setting, launch(["cells", setting], world, tmp_path, limit=HOUR), every)
