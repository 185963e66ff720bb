"""Every method on several ranks: replicas are bit-equal, and equal to one process that sees the whole batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launching import launch

Cell = tuple[str, str, str]

REFUSED = {("tp", "crelu"), ("tp", "layer_norm")}
"""Methods that a setting rules out: they act on all units of a layer together, which tensor parallelism splits."""


def wrong(
    setting: str, ranks: Sequence[dict[Cell, dict[str, Any]]], reference: dict[Cell, dict[str, Any]]
) -> list[str]:
    """Return what is wrong with the cells, a line each."""
    lines = []
    for cell, expected in reference.items():
        found = [rank[cell] for rank in ranks]
        if (setting, cell[0]) in REFUSED and "error" not in expected:
            if not all("parallelize_module splits the units of" in each.get("error", "") for each in found):
                lines.append(f"{cell}: not refused")
            continue
        if "error" in expected or any("error" in each for each in found):
            if any(each.get("error") != expected.get("error") for each in found):
                lines.append(f"{cell}: {[each.get('traceback') for each in found]}")
            continue
        if not all(each["acted"] for each in found):
            lines.append(f"{cell}: nothing happened")
        for each in found:
            if any(not torch.equal(each["final"][name], found[0]["final"][name]) for name in each["final"]):
                lines.append(f"{cell}: replicas differ by {distance(each['final'], found[0]['final']):.1e}")
            if any(not torch.equal(each["final"][name], each["resumed"][name]) for name in each["final"]):
                lines.append(f"{cell}: the resumed run differs by {distance(each['final'], each['resumed']):.1e}")
        if not distance(found[0]["final"], expected["final"]) <= 1e-6:
            lines.append(f"{cell}: {distance(found[0]['final'], expected['final']):.1e} from one process")
    return lines


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Return the largest relative distance between tensors of the same name."""
    assert left.keys() == right.keys()
    pairs = [(left[name].double(), right[name].double()) for name in left]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)


@pytest.mark.parametrize(("setting", "world"), [("ddp", 2), ("fsdp", 3), ("tp", 2)])
def test_one_cell_of_each_method(setting: str, world: int, tmp_path: Path) -> None:
    (reference,) = launch(["cells", "single"], 1, tmp_path, "few")
    assert not wrong(setting, launch(["cells", setting], world, tmp_path, "few"), reference)


@pytest.mark.long
@pytest.mark.parametrize(("setting", "world"), [("ddp", 2), ("ddp", 3), ("fsdp", 2), ("fsdp", 3), ("tp", 2)])
def test_all_cells(setting: str, world: int, tmp_path: Path) -> None:
    (reference,) = launch(["cells", "single"], 1, tmp_path)
    assert not wrong(setting, launch(["cells", setting], world, tmp_path), reference)
