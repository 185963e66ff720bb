"""Files of weights that run code, swell, hold themselves, or hold an optimizer that is none."""

import collections
import io
import pickle
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pliant.diagnostics.checkpoints import load_optimizer_into, load_weights, read_checkpoint


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
    with pytest.raises(ValueError, match="is compressed"):
        load_weights(packed)


def test_readers_of_zip_files_that_differ_hide_no_compression(tmp_path: Path) -> None:
    """Python's reader refuses files that ask for version 10.0; the one of torch.load reads them."""
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.zeros(1_000_000)}, plain)
    with zipfile.ZipFile(plain) as whole, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for member in whole.infolist():
            file.writestr(member.filename, whole.read(member))
    content = packed.getvalue().replace(b"PK\x01\x02\x14\x03\x14\x00", b"PK\x01\x02\x14\x03" + struct.pack("<H", 100))
    assert content != packed.getvalue()
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(ValueError, match="is compressed"):
        load_weights(tmp_path / "a.pt")


class Made:
    """Is made of a call when it is unpickled."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


REPEATED = torch.zeros(1).expand(50_000)
"""A view of four bytes. A billion elements would take no more of a file, and fill memory one by one."""
BOMBS: dict[str, Made] = {
    "bytes by their number": Made(bytearray, (2_000_000,)),
    "set of a view": Made(set, (REPEATED,)),
    "table of a view": Made(collections.OrderedDict, (REPEATED,)),
    "count of a view": Made(collections.Counter, (REPEATED,)),
    "shape of a view": Made(torch.Size, (REPEATED,)),
    "conversion of a view": Made(
        torch._utils._rebuild_device_tensor_from_cpu_tensor, (REPEATED, torch.float64, "cpu", False)
    ),
    "bytes of another maker": Made(torch._tensor._rebuild_from_type_v2, (bytearray, torch.Tensor, (2_000_000,), {})),
    "sets of one list": Made(set, (list(range(300)),)),
}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_that_swells_is_refused_before_it_does(tmp_path: Path, name: str, old: bool) -> None:
    made, shared = BOMBS[name], BOMBS[name].call[1]
    many = [Made(made.call[0], shared) for _ in range(1000)] if name == "sets of one list" else [made]
    torch.save({"w": torch.zeros(2), "rest": many}, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
    with pytest.raises(ValueError, match=r"a\.pt' (makes|holds|encodes) "):
        load_weights(tmp_path / "a.pt")


def test_one_record_is_not_read_under_many_names(tmp_path: Path) -> None:
    """torch.load finds the record "data/a" by the names a and A, and reads it for each."""
    plain = io.BytesIO()
    torch.save({"lower": torch.zeros(5), "upper": torch.ones(5)}, plain)
    with zipfile.ZipFile(plain) as whole, zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
        for member in whole.infolist():
            content = whole.read(member)
            if member.filename.endswith("data.pkl"):
                content = content.replace(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x00a")
                content = content.replace(b"X\x01\x00\x00\x001", b"X\x01\x00\x00\x00A")
            file.writestr(member.filename.replace("data/0", "data/a"), content)
    both = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(both["upper"], both["lower"])  # It would.
    with pytest.raises(ValueError, match="names a storage 'a'"):
        load_weights(tmp_path / "a.pt")


def test_tensors_without_content_are_not_what_was_in_memory(tmp_path: Path) -> None:
    """In the form of torch before 1.6, a list at the end says which tensors follow: without it they hold anything."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.zeros(2)}, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    start = content.rindex(b"\x80\x02]")  # The list of names.
    path.write_bytes(content[:start] + pickle.dumps([], protocol=2))
    with pytest.raises(ValueError, match="holds tensors without content"):
        load_weights(path)


@pytest.mark.parametrize("attribute", ["items", "keys", "get"])
@pytest.mark.parametrize("deep", [False, True])
def test_a_table_whose_methods_are_texts_is_refused(tmp_path: Path, attribute: str, deep: bool) -> None:
    weights = nn.Linear(3, 2).state_dict()
    evil = Made(collections.OrderedDict, (), {attribute: "x"}, None, iter(weights.items()))
    torch.save({"model": evil} if deep else evil, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=f"holds a table with attributes of its own: '{attribute}'"):
        load_weights(tmp_path / "a.pt")


def test_what_checkpoints_hold_is_read(tmp_path: Path) -> None:
    """Everything that `torch.load` reads of its own kinds, in both forms."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    parameter = nn.Parameter(torch.ones(2))
    parameter.note = "mine"  # type: ignore[attr-defined]
    content = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]).state_dict(),
        "generator": torch.get_rng_state(),
        "plain": [1, 2.5, 2**80, True, None, 1j, "ö", b"\xff", bytearray(b"\xff"), {1, 2}, (torch.Size([2, 3]),)],
        "torch": [torch.float16, torch.strided, torch.device("cpu"), parameter, torch.eye(2).to_sparse()],
        "types": [torch.zeros(2, dtype=kind) for kind in (torch.bfloat16, torch.uint8, torch.bool, torch.complex64)],
    }
    for old in (False, True):
        torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
        found = read_checkpoint(tmp_path / "a.pt")
        assert found["plain"] == content["plain"]
        assert torch.equal(load_weights(tmp_path / "a.pt")["0.weight"], model[0].weight)
        assert found["optimizer"]["state"].keys() == optimizer.state_dict()["state"].keys()


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
