"""Faults of the machine, and of files that several runs share: memory, clocks, huge, deep and corrupt recipes."""

import itertools
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from pliant.experiments.engines import ProcessEngine
from pliant.experiments.experiment import run_experiment
from pliant.experiments.recipe import RecipeError, make_recipe
from pliant.experiments.recipe_files import load_recipe
from pliant.experiments.run import execute
from pliant.experiments.scheduler import run_all
from pliant.experiments.store import environment, load_recipe_values, load_runs, load_selection
from pliant.training import Settings
from tests.experiments.helpers import outputs, small
from tests.experiments.test_scheduler import Notebook, write_network
from tests.hostile.attacks import assert_refused, flip_bit, pliant

RECIPE: dict[str, Any] = {
    "data": {"name": "digits", "first": 60},
    "model": {"name": "mlp", "widths": [4]},
    "stream": {"name": "single", "epochs": 1},
    "methods": [{"name": "l2", "grid": {"lam": [0.1, 0.2]}}],
    "selection": {"seeds": 1, "fraction": 0.5},
    "seeds": 1,
}


@pytest.mark.long
def test_a_worker_that_runs_out_of_memory_costs_no_other_run(tmp_path: Path) -> None:
    """The first attempt takes all memory that its process may have, and is killed for it; the second does not."""
    greedy = (
        f"p = Path({str(tmp_path / 'mark')!r}); first = not p.exists(); p.touch(); "
        "first and (__import__('resource').setrlimit(__import__('resource').RLIMIT_AS, (6 << 30, 6 << 30)), "
        "_grow())"
    )
    part = write_network(tmp_path / "own.py", greedy)
    own = tmp_path / "own.py"
    own.write_text(
        own.read_text()
        + "def _grow():\n"
        + "    held = []\n"
        + "    try:\n        while True: held.append(bytearray(1 << 30))\n"
        + "    except MemoryError:\n        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does\n"
    )
    engine = ProcessEngine(1)
    try:
        configs = [small(model=part), small(seed=1)]
        assert set(run_all(configs, tmp_path / "runs", engine, Notebook()).values()) == {"finished"}
    finally:
        engine.close()


def test_a_loss_of_nan_ends_the_run_and_is_never_the_best(tmp_path: Path) -> None:
    wild = small(label="wild", training=Settings(optimizer="sgd", lr=1e30, batch_size=16))
    assert execute(wild, tmp_path, checkpoint_seconds=0).status == "diverged"
    (run,) = load_runs(tmp_path)
    assert (run.status, run.result) == ("diverged", {})
    assert execute(wild, tmp_path).status == "diverged"


def test_a_clock_that_is_set_back_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results hold no times, and time between checkpoints is measured by a clock that nobody sets."""
    execute(small(), tmp_path / "now")
    ticks = itertools.count()
    monkeypatch.setattr(time, "time", lambda: 1e9 - 3600.0 * next(ticks))  # It goes back an hour at each look.
    assert execute(small(), tmp_path / "then", checkpoint_seconds=0).status == "finished"
    assert outputs(tmp_path / "then", small()) == outputs(tmp_path / "now", small())
    for path in (tmp_path / "now").rglob("*"):
        os.utime(path, (0, 0))  # Files from before their time.
    before = outputs(tmp_path / "now", small())
    assert execute(small(), tmp_path / "now").status == "finished"
    assert outputs(tmp_path / "now", small()) == before


@pytest.mark.parametrize("ending", ["toml", "json"])
def test_deep_nesting_is_one_line(tmp_path: Path, ending: str) -> None:
    deep = "[" * 30_000 + "]" * 30_000
    (tmp_path / f"r.{ending}").write_text(f"title = {deep}" if ending == "toml" else f'{{"title": {deep}}}')
    with pytest.raises(RecipeError, match="nested"):
        load_recipe(tmp_path / f"r.{ending}")


def test_hostile_names_are_one_line(tmp_path: Path) -> None:
    long = "x" * 100_000
    for name in (long, "a/" * 5000, "bad\x00name"):
        (tmp_path / "r.json").write_text(json.dumps(RECIPE | {"data": name}))
        with pytest.raises((RecipeError, OSError)) as told:
            load_recipe(tmp_path / "r.json")
        assert str(told.value)
    (tmp_path / "r.json").write_text(json.dumps(RECIPE | {"data": long}))
    assert_refused(pliant("run", "r.json", cwd=tmp_path))


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "swr", "grid": {key: list(range(1, 100)) for key in ("lam", "lam_classifier", "every")}},
        {"parts": [{"name": name, "grid": {"lam": [n / 100 for n in range(100)]}} for name in ("l2", "l2_init")]},
    ],
)
def test_grids_that_multiply_are_refused_before_they_fill_memory(tmp_path: Path, entry: dict[str, Any]) -> None:
    (tmp_path / "r.json").write_text(json.dumps(RECIPE | {"methods": [entry]}))
    with pytest.raises(RecipeError, match=r"combinations of values; it must have at most 1000"):
        load_recipe(tmp_path / "r.json")


def test_entries_and_seeds_that_multiply_are_refused(tmp_path: Path) -> None:
    values = [number / 1000 for number in range(1000)]
    entries = [{"name": "l2", "label": f"l2 {number}", "grid": {"lam": values}} for number in range(50)]
    (tmp_path / "r.json").write_text(json.dumps(RECIPE | {"methods": entries, "seeds": 10_000}))
    with pytest.raises(RecipeError, match="the recipe has 500050000 runs; it must have at most 100000"):
        load_recipe(tmp_path / "r.json")


def test_ten_thousand_errors_are_counted(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(RECIPE | {"methods": [5] * 10_000}))
    with pytest.raises(RecipeError) as error:
        load_recipe(tmp_path / "r.json")
    assert len(str(error.value)) < 2000
    assert str(error.value).endswith("and 9990 more")


def test_seeds_that_fill_memory_are_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(RECIPE | {"selection": {"seeds": 10**12}}))
    with pytest.raises(RecipeError, match=r"selection\.seeds is 1000000000000"):
        load_recipe(tmp_path / "r.json")


def test_a_repository_with_commands_in_its_settings_runs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run notes the commit of the current folder. Git would run what the folder's own settings name."""

    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y", *arguments], check=True
        )

    git("init", "--quiet")
    (tmp_path / "file").write_text("content")
    (tmp_path / ".gitattributes").write_text("file filter=evil\n")
    git("add", "file", ".gitattributes")
    git("commit", "--quiet", "--message", "A file")
    monkeypatch.chdir(tmp_path)
    environment.cache_clear()
    before = environment()["git"]
    assert len(before) == 40
    for name in ("core.fsmonitor", "filter.evil.clean", "filter.evil.process"):
        git("config", name, f"touch '{tmp_path / 'it ran'}'; cat")
    os.utime(tmp_path / "file", (0, 0))
    environment.cache_clear()
    assert environment()["git"] == f"{before}-dirty"
    assert not (tmp_path / "it ran").exists()
    environment.cache_clear()


def test_a_recipe_of_a_hundred_megabytes_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "r.toml").open("w") as file:
        file.write('title = "')
        for _ in range(100):
            file.write("x" * 1_000_000)
        file.write('"\n')
    with pytest.raises(RecipeError, match="has 100 MB; a recipe has at most 10 MB"):
        load_recipe(tmp_path / "r.toml")


@pytest.mark.parametrize("name", ["recipe.json", "selection.json"])
def test_a_corrupt_recipe_or_choice_is_named_and_written_again(tmp_path: Path, name: str) -> None:
    recipe = make_recipe(RECIPE)

    def run() -> None:
        run_experiment(recipe, tmp_path, lambda configs: {each.id: execute(each, tmp_path).status for each in configs})

    run()
    sound = {each: (tmp_path / each).read_bytes() for each in ("recipe.json", "selection.json")}
    read = load_recipe_values if name == "recipe.json" else load_selection
    flip_bit(tmp_path / name, place=40)
    with pytest.raises(ValueError, match=rf"{name} is damaged .*run"):
        read(tmp_path)
    run()
    assert {each: (tmp_path / each).read_bytes() for each in sound} == sound
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    run()
    assert {each: (tmp_path / each).read_bytes() for each in sound} == sound


def test_a_lock_that_is_a_folder_holds_no_run(tmp_path: Path) -> None:
    (tmp_path / "runs" / small().id / "lock").mkdir(parents=True)
    outcome = execute(small(), tmp_path)
    assert outcome.status == "finished"
    assert "lock is not a file; it is set aside as lock.bad" in outcome.notes[0]
    assert len(outcome.notes) == 1, outcome.notes
