"""What cannot work is found before anything runs."""

from pathlib import Path
from typing import Any

import numpy
import pytest

from pliant._seeding import permutation
from pliant.experiments.experiment import check_device, rehearse
from pliant.experiments.recipe import make_recipe

GOOD: dict[str, Any] = {
    "data": {"name": "digits", "first": 100},
    "model": {"name": "mlp", "widths": [8]},
    "stream": "warm_start",
    "methods": ["vanilla", "fresh", "l2:lam=1|2", "swr+crelu"],
}
OWN = """
from torch import nn
def one(x): return nn.Identity()
def three(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
def broken(shape, classes): raise RuntimeError("out of luck")
def own(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


def test_valid_combinations_pass() -> None:
    recipe = make_recipe(GOOD)
    assert [config.label for config, _ in rehearse(recipe)] == [entry.label for entry in recipe.methods]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["l2:lam=-1"]}, "l2: lam: -1 is not allowed"),
        ({"methods": ["vanilla", "l2:lam=1|-1"]}, "l2: lam: -1 is not allowed"),
        ({"stream": {"name": "warm_start", "fraction": 0}}, "fraction: 0 is not allowed; it must be a number"),
        ({"stream": "class_incremental"}, "phases is 20; it must be 1 … 10"),
        ({"data": {"name": "digits", "first": 101}, "stream": {"name": "continual_full", "chunks": 100},
          "methods": ["l2:lam=1|2"]}, "chunks is 100; it must be 1 … 91"),
        ({"stream": "random_labels", "headline": "final_test_accuracy"}, "random_labels has no test examples"),
        ({"data": {"name": "digits", "first": 3}, "stream": {"name": "class_incremental", "phases": 10}},
         "has no training examples"),
    ],
)  # fmt: skip
def test_invalid_combinations_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rehearse(make_recipe(GOOD | changes))


def test_networks_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)

    def attempt(name: str, device: str = "cpu") -> None:
        own = {"model": f"{tmp_path / 'own.py'}:{name}", "methods": ["vanilla", "swr"], "device": device}
        rehearse(make_recipe(GOOD | own))

    attempt("own")
    with pytest.raises(
        ValueError, match=r"vanilla: model .*:broken' fails: RuntimeError: out of luck \(.*own.py, line"
    ):
        attempt("broken")
    attempt("broken", device="cuda")  # Not for the rehearsal to judge, which is on the CPU.
    with pytest.raises(ValueError, match=r"vanilla: model .* takes \(x\)"):
        attempt("one")
    with pytest.raises(ValueError, match=r"outputs of shape \(2, 3\); .* the stream needs 10 outputs"):
        attempt("three")


def test_every_draw_that_chooses_settings_is_tried(tmp_path: Path) -> None:
    # A class with a single example, which the third of the trials' seeds alone holds out.
    held = [set(permutation(40, "holdout", seed)[:20].tolist()) for seed in (0, 10**6, 10**6 + 1, 10**6 + 2)]
    rare = min(held[3] - held[0] - held[1] - held[2])
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def load():\n"
        f"    open({str(tmp_path / 'calls')!r}, 'a').write('.')\n"
        f"    x, y = torch.zeros(40, 3), torch.arange(40) % 2\n    y[{rare}] = 2\n"
        "    return (x, y), (x, y)\n"
    )
    values = GOOD | {
        "data": f"{tmp_path / 'own.py'}:load",
        "stream": {"name": "class_incremental", "phases": 3, "accumulate": False},
        "methods": ["l2:lam=1|2"],
    }
    rehearse(make_recipe(values | {"selection": {"fraction": 0.5, "seeds": 2}}))
    assert (tmp_path / "calls").read_text() == ".", "loaded once"
    with pytest.raises(ValueError, match="has no training examples"):
        rehearse(make_recipe(values | {"selection": {"fraction": 0.5, "seeds": 3}}))


def test_a_first_task_of_one_example_is_enough() -> None:
    stream = {"name": "continual_limited", "chunks": 100}
    used = rehearse(make_recipe(GOOD | {"stream": stream, "methods": ["vanilla", "swr"]}))
    assert [config.label for config, _ in used] == ["vanilla", "swr"]


def test_a_stream_may_begin_with_a_task_that_cannot_be_tested(tmp_path: Path) -> None:
    arrays = {"x_train": numpy.zeros((8, 3)), "y_train": numpy.arange(8) % 2}
    for tested in (0, 1):  # One of the two arrives first.
        numpy.savez(tmp_path / "own.npz", **arrays, x_test=numpy.zeros((2, 3)), y_test=numpy.full(2, tested))
        stream = {"name": "class_incremental", "phases": 2, "epochs": 1}
        recipe = make_recipe(GOOD | {"data": str(tmp_path / "own.npz"), "stream": stream, "methods": ["vanilla"]})
        ((config, sources),) = rehearse(recipe)
        assert (config.label, set(sources)) == ("vanilla", {"data"})


def test_devices() -> None:
    check_device("cpu")
    with pytest.raises(ValueError, match="device is 'cuda:77', which cannot be used on this machine: "):
        check_device("cuda:77")
