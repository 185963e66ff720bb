"""Runs with different versions of the same data or network are not pooled."""

from dataclasses import replace
from pathlib import Path

import pytest

import pliant
from pliant.experiments.report.comparison import Comparison
from pliant.experiments.report.grouping import compare_folders, compare_runs
from pliant.experiments.run_config import Part, RunConfig
from pliant.experiments.store import load_runs
from tests.experiments.report.stores import config, write_recipe, write_run


def own(label: str, seed: int) -> RunConfig:
    return config(label, seed, data=Part("n.npz"), model=Part("own.py:build"))


def write_night(root: Path, values: dict[str, float], digest: str | None, **more: str) -> Path:
    """An experiment's folder; its methods' results are the same for all seeds."""
    sources = {} if digest is None else {"data": digest}
    for label, value in values.items():
        for seed in range(3):
            write_run(root, own(label, seed), [value + 0.01 * seed], sources=sources | more)
    return root


def means(comparison: Comparison) -> dict[str, float]:
    return {each.name: each.values(comparison.headline)[0] for each in comparison.contenders}


@pytest.mark.parametrize("changed", ["data", "model"])
@pytest.mark.parametrize("by", ["folders", "runs"])
def test_folders_with_different_versions_are_separate_comparisons(tmp_path: Path, changed: str, by: str) -> None:
    nights = [tmp_path / "first", tmp_path / "second"]
    for night, digest, value in zip(nights, "ab", (0.5, 0.8), strict=True):
        digests = {"data": "same", "model": "same"} | {changed: digest}
        write_night(night, {"vanilla": value, "L2": value + 0.1}, digests["data"], model=digests["model"])
    read = (
        compare_folders(nights)
        if by == "folders"
        else compare_runs(run for night in nights for run in load_runs(night))
    )
    first, second = read
    assert means(first) == pytest.approx({"vanilla": 0.5, "L2": 0.6})
    assert means(second) == pytest.approx({"vanilla": 0.8, "L2": 0.9})
    assert [comparison.title for comparison in read] == [
        f"label flip on n.npz with own.py:build ({night})" for night in nights
    ]
    assert first.mixed == second.mixed == ()


def test_folders_of_one_recipe_with_different_versions_are_separate_comparisons(tmp_path: Path) -> None:
    nights = [tmp_path / "first", tmp_path / "second"]
    for night, digest in zip(nights, "ab", strict=True):
        (tmp_path / "n.npz").touch()
        write_recipe(night, data=str(tmp_path / "n.npz"))
        run = config("L2", 0, data=Part(str(tmp_path / "n.npz")))
        write_run(night, run, [0.5], sources={"data": digest})
    assert [comparison.title for comparison in compare_folders(nights)] == [f"Planted ({night})" for night in nights]


@pytest.mark.parametrize(("first", "second"), [("a", "a"), ("a", None), (None, "a"), (None, None)])
def test_equal_or_unknown_versions_are_pooled(tmp_path: Path, first: str | None, second: str | None) -> None:
    write_night(tmp_path / "first", {"vanilla": 0.5}, first)
    write_night(tmp_path / "second", {"L2": 0.6}, second)
    (comparison,) = compare_folders([tmp_path / "first", tmp_path / "second"])
    assert means(comparison) == pytest.approx({"vanilla": 0.5, "L2": 0.6})
    assert comparison.title == "label flip on n.npz with own.py:build"


def test_mixed_versions_in_one_folder_are_reported(tmp_path: Path) -> None:
    write_night(tmp_path, {"vanilla": 0.5}, "a")
    write_night(tmp_path, {"L2": 0.9}, "b")
    (section,) = pliant.report(tmp_path).sections
    assert "The runs used 2 versions of data n.npz, which changed in between." in section.answer.reasons


def test_runs_that_do_not_count_do_not_mix_versions(tmp_path: Path) -> None:
    write_night(tmp_path, {"vanilla": 0.5}, "a")
    measured = replace(own("vanilla", 0), measures=("loss",))
    write_run(tmp_path, measured, [0.5], status="unfinished", sources={"data": "b"})
    write_run(tmp_path, own("vanilla", 3), [0.5], status="failed", sources={"data": "c"})
    (comparison,) = compare_folders([tmp_path])
    assert means(comparison) == pytest.approx({"vanilla": 0.5})
    assert comparison.mixed == ()


def test_a_damaged_log_is_ignored(tmp_path: Path) -> None:
    write_night(tmp_path, {"vanilla": 0.5}, "a")
    for events in tmp_path.glob("runs/*/events.jsonl"):
        events.write_text("{\n")
    (comparison,) = compare_folders([tmp_path])
    assert comparison.mixed == ()
