"""A packed experiment holds what the folder held."""

import gzip
import json
from pathlib import Path

import pytest

from pliant.experiments.archive import pack, unpack
from pliant.experiments.experiment import run_experiment
from pliant.experiments.recipe import make_recipe
from pliant.experiments.run import execute
from pliant.experiments.store import load_recipe_values, load_runs, load_selection


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    recipe = make_recipe(
        {
            "data": {"name": "digits", "first": 200},
            "model": {"name": "mlp", "widths": [8]},
            "stream": {"name": "continual_full", "chunks": 2, "epochs": 3},
            "training": {"evaluate_every": 2},
            "methods": [
                "vanilla",
                {"name": "l2", "grid": {"lam": [0.1, 0.2]}},
                {"label": "too fast", "parts": [], "training": {"optimizer": "sgd", "lr": 1e30}},
            ],
            "selection": {"seeds": 1},
            "seeds": 2,
        }
    )
    root = tmp_path / "experiment"
    run_experiment(recipe, root, lambda configs: {config.id: execute(config, root).status for config in configs})
    return root


def test_packed_experiment_comes_back(experiment: Path, tmp_path: Path) -> None:
    before = load_runs(experiment)
    assert pack(experiment, tmp_path / "kept.jsonl.gz") == len(before) == 8
    assert unpack(tmp_path / "kept.jsonl.gz", tmp_path / "again") == 8
    after = load_runs(tmp_path / "again")
    assert load_recipe_values(tmp_path / "again") == load_recipe_values(experiment)
    assert load_selection(tmp_path / "again") == load_selection(experiment)
    assert [run.status for run in before].count("diverged") == 2
    for old, new in zip(before, after, strict=True):
        assert (new.id, new.config, new.status, new.error) == (old.id, old.config, old.status, old.error)
        assert new.result == pytest.approx(old.result, rel=1e-5)
        assert len(new.records) == len(old.records) == (1 if old.status == "diverged" else 6)
        for kept, record in zip(new.records, old.records, strict=True):
            expected = {key: value for key, value in record.items() if key not in ("progress", "receipts")}
            assert kept.pop("receipts") == []
            assert kept.keys() == expected.keys()
            assert kept == pytest.approx(expected, rel=1e-5)


def test_archive_keeps_versions_dates_and_seconds_but_no_host(experiment: Path, tmp_path: Path) -> None:
    pack(experiment, tmp_path / "kept.gz")
    unpack(tmp_path / "kept.gz", tmp_path / "again")
    run = load_runs(tmp_path / "again")[0]
    start, end = run.events
    full_start, *_, full_end = load_runs(experiment)[0].events
    assert start["time"] == full_start["time"]
    assert end["seconds"] == pytest.approx(full_end["seconds"], rel=1e-5)
    assert full_start["environment"].keys() - start["environment"].keys() == {"host", "pid", "platform"}
    assert {"pliant", "torch", "git"} <= start["environment"].keys()
    pack(tmp_path / "again", tmp_path / "twice.gz")
    assert (tmp_path / "twice.gz").read_bytes() == (tmp_path / "kept.gz").read_bytes()


def test_packing_is_repeatable_and_leaves_unfinished_runs_out(experiment: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.gz", tmp_path / "two.gz"
    pack(experiment, one)
    pack(experiment, two)
    assert one.read_bytes() == two.read_bytes()
    (load_runs(experiment)[0].path / "result.json").unlink()
    assert pack(experiment, two) == 7


def test_unpacking_drops_a_selection_of_other_runs(experiment: Path, tmp_path: Path) -> None:
    (experiment / "selection.json").unlink(missing_ok=True)
    pack(experiment, tmp_path / "kept.gz")
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "selection.json").write_text('{"on": "test", "labels": {}}')
    unpack(tmp_path / "kept.gz", tmp_path / "again")
    assert not (tmp_path / "again" / "selection.json").exists()


@pytest.mark.parametrize("name", ["recipe.json", "selection.json"])
@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_file_of_an_experiment_is_named(name: str, content: str, experiment: Path, tmp_path: Path) -> None:
    (experiment / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name} is damaged \(.*run"):
        pack(experiment, tmp_path / "kept.gz")


def test_unpacking_over_runs_is_refused(experiment: Path, tmp_path: Path) -> None:
    pack(experiment, tmp_path / "kept.gz")
    with pytest.raises(ValueError, match="holds runs already"):
        unpack(tmp_path / "kept.gz", experiment)


def test_a_file_that_is_not_an_archive_is_refused_and_nothing_is_written(experiment: Path, tmp_path: Path) -> None:
    pack(experiment, tmp_path / "kept.gz")
    content = (tmp_path / "kept.gz").read_bytes()
    head, *runs = gzip.decompress(content).splitlines()
    escaping = json.dumps(json.loads(runs[0]) | {"id": "../../escaped"}).encode()
    bad = tmp_path / "bad.gz"
    for wrong in (
        b"no gzip",
        b"",
        content[:-200],
        gzip.compress(b'{"a": 1}\n'),
        gzip.compress(b"[]"),
        gzip.compress(b""),
        gzip.compress(b"\n".join([head, runs[0], escaping])),
        gzip.compress(b"\n".join([head, runs[0], b"{}"])),
    ):
        bad.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"bad\.gz' is not what pliant pack writes, or it is damaged: "):
            unpack(bad, tmp_path / "deep" / "er" / "again")
        assert not (tmp_path / "deep").exists()
    assert not list(tmp_path.rglob("escaped"))


def test_an_experiment_without_a_recipe_cannot_be_packed(experiment: Path, tmp_path: Path) -> None:
    (experiment / "recipe.json").unlink()
    with pytest.raises(ValueError, match=r"holds no recipe\.json"):
        pack(experiment, tmp_path / "kept.gz")
    assert not (tmp_path / "kept.gz").exists()


def test_files_that_others_leave_among_the_runs_are_passed_by(experiment: Path) -> None:
    before = len(load_runs(experiment))
    (experiment / "runs" / ".DS_Store").write_bytes(b"")
    assert len(load_runs(experiment)) == before
