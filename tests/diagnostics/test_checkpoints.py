import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

from pliant.diagnostics.checkpoints import load_into, load_weights
from pliant.experiments.run import make_learner, make_stream
from pliant.experiments.store import RunFolder
from tests.experiments.helpers import small


class Evil:
    """Something that runs code when it is unpickled: it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_code_in_a_file_is_never_run(tmp_path: Path) -> None:
    torch.save({"model": Evil(tmp_path / "made")}, tmp_path / "evil.pt")
    with pytest.raises(
        ValueError, match=r"holds a pickled posix.mkdir, and reading it would run code. Save model.state_dict\(\)"
    ):
        load_weights(tmp_path / "evil.pt")
    assert not (tmp_path / "made").exists()


def test_pickled_models_are_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for save in (
        lambda: torch.save(nn.Linear(2, 2), path),
        lambda: torch.save({"model": nn.Linear(2, 2), "step": 3}, path),
        lambda: torch.save(nn.Linear(2, 2), path, _use_new_zipfile_serialization=False),
        lambda: path.write_bytes(pickle.dumps(nn.Linear(2, 2))),
    ):
        save()
        with pytest.raises(ValueError, match=r"model\.pt' holds a pickled .*, and reading it would run code") as error:
            load_weights(path)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 300


def test_state_dicts_are_found_where_loops_and_wrappers_put_them(tmp_path: Path) -> None:
    state = nn.Linear(3, 2).state_dict()
    forms: list[Any] = [
        state,
        {"model": state, "epoch": 1},
        {"state_dict": state, "hyper": {"lr": 0.1}},
        {"model": {"module": state}},
        {"model": {"arch": "small"}, "state_dict": state},
        {f"module.{k}": v for k, v in state.items()},
        {f"module.module.{k}": v for k, v in state.items()},
        {f"_orig_mod.module.{k}": v for k, v in state.items()},
        {f"module._orig_mod.{k}": v for k, v in state.items()},
    ]
    for form in forms:
        torch.save(form, tmp_path / "saved.pt")
        assert load_into(nn.Linear(3, 2), tmp_path / "saved.pt").weight.equal(state["weight"])


def test_names_of_the_models_own_are_kept_and_wrappers_on_either_side_do_not_matter(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(3, 2)

    net, path = Net(), tmp_path / "saved.pt"
    for wrapped in (net, torch.compile(net), nn.DataParallel(net)):
        torch.save(wrapped.state_dict(), path)
        assert list(load_weights(path)) == list(wrapped.state_dict())
        assert load_into(Net(), path).module.weight.equal(net.module.weight)
    torch.save(net.state_dict(), path)
    inner = Net()
    load_into(torch.compile(inner), path)
    assert inner.module.weight.equal(net.module.weight)
    inside = nn.Sequential(torch.compile(nn.Linear(3, 2)), nn.ReLU())
    torch.save(inside.state_dict(), path)
    assert load_into(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), path)[0].weight.equal(inside[0].weight)
    with pytest.raises(ValueError, match=r"Missing key.*\"module.weight\".*Unexpected key.*\"0._orig_mod.weight\""):
        load_into(Net(), path)


def test_wrappers_anywhere_in_the_model_do_not_matter(tmp_path: Path) -> None:
    path, plain = tmp_path / "saved.pt", nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    torch.save(plain.state_dict(), path)
    assert (
        load_into(nn.DataParallel(nn.Sequential(nn.Linear(3, 2), nn.ReLU())), path)
        .module[0]
        .weight.equal(plain[0].weight)
    )
    inside = nn.Sequential(nn.DataParallel(nn.Linear(3, 2)), nn.ReLU())
    assert load_into(inside, path)[0].module.weight.equal(plain[0].weight)
    nn.init.zeros_(inside[0].module.weight)
    torch.save(inside.state_dict(), path)
    assert not load_into(plain, path)[0].weight.any()


def test_names_that_only_wrappers_would_tell_apart_are_kept(tmp_path: Path) -> None:
    class Both(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.module = nn.Linear(3, 2)

    saved = Both()
    for wrapped in (saved, nn.DataParallel(saved), torch.compile(saved), nn.DataParallel(torch.compile(saved))):
        torch.save(wrapped.state_dict(), tmp_path / "saved.pt")
        loaded = load_into(Both(), tmp_path / "saved.pt")
        assert loaded.weight.equal(saved.weight)
        assert loaded.module.weight.equal(saved.module.weight)


def test_a_shared_tensor_that_is_stored_once_is_loaded(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
            self.head.weight = self.embed.weight

    saved, path = Tied(), tmp_path / "saved.safetensors"
    save_model(saved, str(path))
    assert len(load_weights(path)) == len(saved.state_dict()) - 1
    assert load_into(Tied(), path).head.weight.equal(saved.head.weight)


def test_extra_state_of_modules_is_loaded(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        steps = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"steps": self.steps}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.steps = state["steps"]

    saved = Counting(3, 2)
    saved.steps = 7
    torch.save({"model": nn.Sequential(saved).state_dict()}, tmp_path / "saved.pt")
    (loaded,) = load_into(nn.Sequential(Counting(3, 2)), tmp_path / "saved.pt")
    assert loaded.steps == 7
    assert loaded.weight.equal(saved.weight)


def test_a_checkpoint_of_a_run_is_read(tmp_path: Path) -> None:
    config = small()
    learner = make_learner(config, make_stream(config))
    folder = RunFolder(tmp_path, config)
    with folder.open():
        folder.append({"epoch": 0})
        folder.save_checkpoint(learner.state_dict(), 1, {})
    (path,) = folder.path.glob("checkpoint-*.pt")
    found = load_weights(path)
    assert all(tensor.equal(found[name]) for name, tensor in learner.model.state_dict().items())


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        load_weights(tmp_path / "none.pt")
    torch.save({"a": 1}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="holds no state dict"):
        load_weights(tmp_path / "a.pt")
    torch.save([1, 2], tmp_path / "b.pt")
    with pytest.raises(ValueError, match="must hold a state dict, got list"):
        load_weights(tmp_path / "b.pt")
    torch.save(nn.Linear(4, 2).state_dict(), tmp_path / "d.pt")
    with pytest.raises(ValueError, match=r"does not fit the model: .*\s+size mismatch") as error:
        load_into(nn.Linear(3, 2), tmp_path / "d.pt")
    assert "\n" not in str(error.value)


def test_files_that_are_damaged_are_named(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    torch.save(nn.Linear(3, 2).state_dict(), whole)
    content = whole.read_bytes()
    renamed = content.replace(b"_rebuild_tensor_v2", b"\xff" * 18)
    for damaged in (content[: len(content) // 2], renamed):
        (tmp_path / "c.pt").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"c\.pt' is damaged and cannot be read as a checkpoint") as error:
            load_weights(tmp_path / "c.pt")
        assert "\n" not in str(error.value)
    for other, begins in ((b"some words", "it begins with b'some words'"), (b"", "it is empty")):
        (tmp_path / "c.pt").write_bytes(other)
        with pytest.raises(ValueError, match=rf"c\.pt' is not a checkpoint: {begins}. Pass a file written by torch"):
            load_weights(tmp_path / "c.pt")
    (tmp_path / "c.safetensors").write_bytes(b"hello world, not safetensors")
    with pytest.raises(ValueError, match=r"c\.safetensors' cannot be read as a safetensors file .*header"):
        load_weights(tmp_path / "c.safetensors")
