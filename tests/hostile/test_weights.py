"""Files of weights that run code, swell, hold themselves, or hold an optimizer that is none."""

import io
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pliant.diagnostics.checkpoints import load_optimizer_into, load_weights


class Evil:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("old", [False, True])
def test_a_pickle_runs_no_code(tmp_path: Path, old: bool) -> None:
    evil = {"model": {"w": torch.zeros(2)}, "rest": Evil(tmp_path / "it ran")}
    torch.save(evil, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
    (tmp_path / "b.pt").write_bytes(pickle.dumps(evil["rest"], protocol=2))
    for name in ("a.pt", "b.pt"):
        with pytest.raises(ValueError, match=r"holds a pickled .*, and reading it would run code"):
            load_weights(tmp_path / name)
    assert not (tmp_path / "it ran").exists()


def test_a_checkpoint_that_swells_is_refused_before_it_does(tmp_path: Path) -> None:
    plain = io.BytesIO()
    torch.save({"w": torch.zeros(1_000_000)}, plain)
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(plain) as whole, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for member in whole.infolist():
            file.writestr(member.filename, whole.read(member))
    assert packed.stat().st_size < 10_000
    with pytest.raises(ValueError, match="it is compressed"):
        load_weights(packed)


def test_tables_that_hold_themselves_are_walked_once(tmp_path: Path) -> None:
    """Forty levels that each hold the next one three times would take 3⁴⁰ steps."""
    many: dict[str, Any] = {"x": 1}
    for _ in range(40):
        many = {"model": many, "state_dict": many, "other": many}
    own: dict[str, Any] = {}
    own["model"] = own
    for content in (many, own):
        torch.save(content, tmp_path / "a.pt")
        with pytest.raises(ValueError, match="holds no state dict"):
            load_weights(tmp_path / "a.pt")


def test_weights_under_two_keys_are_found_by_both(tmp_path: Path) -> None:
    weights = {"w": torch.ones(2)}
    torch.save({"first": weights, "second": weights}, tmp_path / "a.pt")
    for key in ("first", "second"):
        assert torch.equal(load_weights(tmp_path / "a.pt", key)["w"], weights["w"])


@pytest.mark.parametrize(
    "state",
    [
        {"state": {}, "param_groups": 5},
        {"state": 5, "param_groups": []},
        {"state": {0: 5}, "param_groups": [{"params": [0, 1]}]},
        {"state": {}, "param_groups": [{}]},
        {"state": {}, "param_groups": [5]},
        {"state": {"a": {}}, "param_groups": [{"params": [0, 1]}]},
        {"state": {0: {"step": "x"}}, "param_groups": [{"params": [0, 1]}]},
    ],
)
def test_a_forged_optimizer_is_named(tmp_path: Path, state: dict[str, Any]) -> None:
    model = nn.Linear(2, 2)
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "a.pt")
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"a\.pt|is not in list"):
        load_optimizer_into(optimizer, tmp_path / "a.pt", "optimizer")
    assert not optimizer.state


@pytest.mark.parametrize(("name", "value"), [("exp_avg", torch.zeros(())), ("step", torch.zeros(4)), ("exp_avg", "x")])
def test_a_moment_of_another_shape_reaches_no_fused_optimizer(tmp_path: Path, name: str, value: Any) -> None:
    """It would read and write beyond the end of that moment."""
    model = nn.Linear(50, 50)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    model(torch.ones(1, 50)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0][name] = value
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "a.pt")
    again = torch.optim.Adam(model.parameters(), fused=True)
    with pytest.raises(ValueError, match=f"belongs to another network: {name} does not fit parameter 0"):
        load_optimizer_into(again, tmp_path / "a.pt", "optimizer")
    assert not again.state


def test_depth_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    opening = b"}X\x01\x00\x00\x00a"  # an empty dictionary and the key "a"
    depth = 20_000
    (tmp_path / "a.pt").write_bytes(b"\x80\x02" + opening * depth + b"}" + b"s" * depth + b".")
    limit = sys.getrecursionlimit()
    with pytest.raises((ValueError, RecursionError)):
        load_weights(tmp_path / "a.pt")
    assert sys.getrecursionlimit() == limit
