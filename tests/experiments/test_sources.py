"""Data and code that change behind their names are noticed."""

from pathlib import Path
from typing import Any

import numpy
import pytest

from pliant.experiments.experiment import find_outdated, rehearse, run_experiment
from pliant.experiments.recipe import make_recipe
from pliant.experiments.run import execute
from tests.data.pictures import picture, write_folder

MODEL = "from torch import nn\ndef build(shape, classes): return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))\n"


READ = """
import numpy, torch
def load():
    with numpy.load({file!r}) as file:
        pair = torch.from_numpy(file["x"]).float(), torch.from_numpy(file["y"])
    return pair, pair
"""


def run(root: Path, **values: Any) -> list[str]:
    """Do an experiment, as the command line does it; return the warnings."""
    recipe = make_recipe(
        {"data": {"name": "digits", "first": 30}, "model": "mlp", "stream": {"name": "single", "epochs": 1}}
        | {"methods": ["vanilla"], "seeds": 2}
        | values
    )
    warnings = find_outdated(root, rehearse(recipe))
    run_experiment(recipe, root, lambda configs: {config.id: execute(config, root).status for config in configs})
    return warnings


def test_a_changed_network_is_noticed(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(MODEL)
    values = {"model": f"{own}:build"}
    assert run(tmp_path, **values) == run(tmp_path, **values) == []
    own.write_text(MODEL + "# another one\n")
    (warning,) = run(tmp_path, **values | {"seeds": 3})
    assert warning.startswith(f"model {own}:build has changed since 2 of the runs here ended (vanilla-s0-")
    assert run(tmp_path) == []


@pytest.mark.parametrize("form", ["folder", "npz", "function"])
def test_changed_data_is_noticed_but_a_copy_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    own = tmp_path / {"folder": "zoo", "npz": "zoo.npz", "function": "own.py:load"}[form]

    def write(seed: int) -> None:
        if form == "folder":
            picture(seed).save(own / "cat" / "0.png")
        else:
            x = numpy.random.default_rng(seed).normal(size=(30, 4))
            numpy.savez(tmp_path / "zoo.npz", x=x, y=numpy.arange(30) % 3)

    if form == "folder":
        write_folder(own)
    if form == "function":  # The same code all the time; what it reads changes.
        (tmp_path / "own.py").write_text(READ.format(file=str(tmp_path / "zoo.npz")))
    write(0)
    assert run(tmp_path, data=str(own)) == []
    write(0)
    assert run(tmp_path, data=str(own)) == []
    write(7)
    (warning,) = run(tmp_path, data=str(own))
    assert warning.startswith(f"data {own} has changed since 2 of the runs here ended")
