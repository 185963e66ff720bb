"""A packed experiment holds what the folder held."""

from pathlib import Path

import pytest

from pliant.experiments.archive import pack, unpack
from pliant.experiments.experiment import run_experiment
from pliant.experiments.recipe import make_recipe
from pliant.experiments.run import execute
from pliant.experiments.store import load_recipe, load_runs, load_selection


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    recipe = make_recipe(
        {
            "data": {"name": "digits", "first": 200},
            "model": {"name": "mlp", "widths": [8]},
            "stream": {"name": "continual_full", "chunks": 2, "epochs": 3},
            "training": {"evaluate_every": 2},
            "methods": ["vanilla", {"name": "l2", "grid": {"lam": [0.1, 0.2]}}],
            "selection": {"seeds": 1},
            "seeds": 2,
        }
    )
    root = tmp_path / "experiment"
    run_experiment(recipe, root, lambda configs: {config.id: execute(config, root).status for config in configs})
    return root


def test_packed_experiment_comes_back(experiment: Path, tmp_path: Path) -> None:
    before = load_runs(experiment)
    assert pack(experiment, tmp_path / "kept.jsonl.gz") == len(before) == 6
    assert unpack(tmp_path / "kept.jsonl.gz", tmp_path / "again") == 6
    after = load_runs(tmp_path / "again")
    assert load_recipe(tmp_path / "again") == load_recipe(experiment)
    assert load_selection(tmp_path / "again") == load_selection(experiment)
    for old, new in zip(before, after, strict=True):
        assert (new.id, new.config, new.status, new.error) == (old.id, old.config, old.status, old.error)
        assert new.result == pytest.approx(old.result, rel=1e-5)
        assert len(new.records) == len(old.records) == 6
        for kept, record in zip(new.records, old.records, strict=True):
            expected = {key: value for key, value in record.items() if key not in ("progress", "receipts")}
            assert kept.pop("receipts") == []
            assert kept.keys() == expected.keys()
            assert kept == pytest.approx(expected, rel=1e-5)


def test_packing_is_repeatable_and_leaves_unfinished_runs_out(experiment: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.gz", tmp_path / "two.gz"
    pack(experiment, one)
    pack(experiment, two)
    assert one.read_bytes() == two.read_bytes()
    (load_runs(experiment)[0].path / "result.json").unlink()
    assert pack(experiment, two) == 5


def test_unpacking_over_runs_is_refused(experiment: Path, tmp_path: Path) -> None:
    pack(experiment, tmp_path / "kept.gz")
    with pytest.raises(ValueError, match="holds runs already"):
        unpack(tmp_path / "kept.gz", experiment)
