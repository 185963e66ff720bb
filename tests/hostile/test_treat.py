"""A folder of a treatment with a forged plan, damaged logs and things in the way of its files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pliant
from pliant import models
from pliant._json import seal
from tests.experiments.helpers import EngineHere
from tests.hostile.attacks import flip_bit

ASKED: dict[str, Any] = {
    "model": {"name": "mlp", "widths": [4]},
    "data": {"name": "digits", "first": 60},
    "methods": "shrink_perturb:lam=0.4|0.8,head_reset",
    "seeds": 3,
    "epochs": 1,
    "progress": False,
}


def treat(root: Path) -> pliant.Treatment:
    return pliant.treat(root / "a.pt", **ASKED, out=root / "out", engine=EngineHere(1))


@pytest.fixture(scope="module")
def treated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    root = tmp_path_factory.mktemp("treated")
    torch.save(models.create("mlp", (1, 8, 8), 10, seed=0, widths=[4]).state_dict(), root / "a.pt")
    return root, treat(root).remedy


@pytest.fixture
def mine(treated: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of the treated folder, for one attack."""
    shutil.copytree(treated[0] / "out", tmp_path / "out")
    shutil.copy2(treated[0] / "a.pt", tmp_path / "a.pt")
    plan = json.loads((tmp_path / "out" / "treatment.json").read_bytes())
    plan["asked"]["start"]["path"] = str(tmp_path / "a.pt")
    del plan["digest"]
    (tmp_path / "out" / "treatment.json").write_bytes(seal(plan, indent=1))
    return tmp_path


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "settings as text": lambda plan: plan.update(settings="x"),
    "no settings": lambda plan: plan.update(settings=0),
    "fewer than none": lambda plan: plan.update(settings=-5),
    "more than there are": lambda plan: plan.update(settings=10**9),
    "settings missing": lambda plan: plan.pop("settings"),
    "seconds as number": lambda plan: plan.update(seconds=5),
    "seconds as texts": lambda plan: plan.update(seconds=["x", "y"]),
    "seconds before the start": lambda plan: plan.update(seconds=[-1.0, 1.0]),
    "stopped as text": lambda plan: plan.update(stopped="x"),
    "stopped before the first": lambda plan: plan.update(stopped=-1),
    "begun as number": lambda plan: plan.update(begun=5),
    "times as list": lambda plan: plan.update(times=[1]),
    "times as texts": lambda plan: plan.update(times={"shrink_perturb(lam=0.8)": "fast"}),
    "times of nothing": lambda plan: plan.update(times={"head_reset": 0.0, "shrink_perturb(lam=0.8)": -1.0}),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_plan_is_made_again(treated: tuple[Path, str], mine: Path, name: str) -> None:
    path = mine / "out" / "treatment.json"
    plan = json.loads(path.read_bytes())
    del plan["digest"]
    FORGERIES[name](plan)
    path.write_bytes(seal(plan, indent=1))
    found = treat(mine)
    assert len(found.tried) == 3
    assert found.remedy == treated[1]
    again = json.loads(path.read_bytes())
    assert again["settings"] == 3
    assert all(seconds > 0 for seconds in (*again["seconds"], *again["times"].values()))


def test_something_else_in_place_of_the_plan_is_set_aside(treated: tuple[Path, str], mine: Path) -> None:
    path = mine / "out" / "treatment.json"
    path.unlink()
    path.mkdir()
    assert treat(mine).remedy == treated[1]
    assert path.is_file()
    assert path.with_name("treatment.json.bad").is_dir()


def test_damaged_logs_and_results_do_not_stop_it(treated: tuple[Path, str], mine: Path) -> None:
    """The logs say how long runs took; a result that no round needs may belong to an earlier winner."""
    runs = sorted((mine / "out" / "runs").iterdir())
    for run in runs[::2]:
        flip_bit(run / "events.jsonl", place=20)
    shutil.copytree(runs[0], mine / "out" / "runs" / "earlier")
    flip_bit(mine / "out" / "runs" / "earlier" / "result.json", place=20)
    (mine / "out" / "runs" / "a file").write_text("x")
    plan = json.loads((mine / "out" / "treatment.json").read_bytes())
    del plan["begun"], plan["digest"]  # So that the times are asked for again.
    (mine / "out" / "treatment.json").write_bytes(seal(plan, indent=1))
    assert treat(mine).remedy == treated[1]
