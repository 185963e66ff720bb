"""Two checkpoints around a resume, of which one lies about its optimizer or holds itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pliant.diagnosis.resume_check import check_resume
from tests.hostile.attacks import ESCAPE, assert_refused, pliant


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def checkpoint(step: Any = 5, lr: Any = 0.1, **more: Any) -> dict[str, Any]:
    optimizer = {"state": {0: {"step": step}}, "param_groups": [{"lr": lr}]}
    return {"model": build().state_dict(), "optimizer": optimizer, **more}


@pytest.mark.parametrize(
    "forged",
    [
        checkpoint(step=float("inf")),
        checkpoint(step=torch.zeros(3)),
        checkpoint(step=ESCAPE),
        checkpoint(lr="x"),
        checkpoint(lr=torch.zeros(3)),
        checkpoint(optimizer={"state": 5, "param_groups": []}),
        checkpoint(optimizer={"state": [1], "param_groups": [{}]}),
        checkpoint(optimizer={"state": {}, "param_groups": 5}),
        checkpoint(optimizer={"state": {}, "param_groups": [5]}),
        *(checkpoint(schedule={"last_epoch": value}) for value in (None, "5", torch.zeros(2), float("nan"))),
    ],
    ids=lambda forged: str({**forged, "model": ""})[:60],
)
def test_a_forged_state_is_named(tmp_path: Path, forged: dict[str, Any]) -> None:
    torch.save(forged, tmp_path / "forged.pt")
    torch.save(checkpoint(schedule={"last_epoch": 3}), tmp_path / "sound.pt")
    for pair in (("forged.pt", "sound.pt"), ("sound.pt", "forged.pt")):
        with pytest.raises(ValueError, match=r"forged\.pt.*holds a malformed state of an optimizer or schedule"):
            check_resume(*(tmp_path / name for name in pair), build)


def test_tables_that_hold_themselves_are_walked_once(tmp_path: Path) -> None:
    many: dict[str, Any] = {"x": 1}
    for _ in range(40):
        many = {"a": many, "b": [many, many]}
    own: list[Any] = []
    own.append(own)
    torch.save(checkpoint(more=many, own=own), tmp_path / "a.pt")
    assert check_resume(tmp_path / "a.pt", tmp_path / "a.pt", build).evidence == (
        "the optimizer continued: 5 steps before, 5 after, unless all 5 were made after the resume",
    )


def test_the_command_says_it_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from torch import nn\ndef build():\n    return nn.Linear(2, 2)\n")
    torch.save(checkpoint(schedule={"last_epoch": ESCAPE}), tmp_path / "a.pt")
    refused = pliant("diagnose", "--before", "a.pt", "--after", "a.pt", "--model", "own.py:build", cwd=tmp_path)
    assert_refused(refused, "last_epoch", r"\x1b[2J")
