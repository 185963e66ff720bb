"""A recipe runs no code unless its user says so."""

import json
from pathlib import Path
from typing import Any

import pytest

from pliant.experiments.archive import pack, unpack
from pliant.experiments.experiment import run_experiment
from pliant.experiments.recipe import Recipe, RecipeError, make_recipe
from pliant.experiments.recipe_files import PARTS, find_code, load_recipe
from pliant.experiments.run import execute
from pliant.experiments.run_config import Part
from tests.hostile.attacks import assert_refused, pliant

RECIPE: dict[str, Any] = {
    "data": {"name": "digits", "first": 60},
    "model": {"name": "mlp", "widths": [4]},
    "stream": {"name": "single", "epochs": 1},
    "methods": ["vanilla"],
    "seeds": 1,
}


def write_code(folder: Path) -> Path:
    """A module that leaves a mark when it is imported, and another when its network is built."""
    own = folder / "own.py"
    own.write_text(
        "from pathlib import Path\n"
        "from pliant.models import mlp\n"
        f"Path({str(folder / 'it ran')!r}).touch()\n"
        "def build(shape, classes):\n"
        "    return mlp(shape, classes, widths=[4])\n"
        "def load():\n"
        "    raise ValueError('the data was loaded')\n"
    )
    return own


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"name": "os:system", "command": "touch 'it ran'"}},
        {"data": "own.py:load"},
        {"model": "own.py:build"},
        {"model": {"name": "own:build"}},
        {"old_data": {"name": "own:load"}},
        {"methods": [{"name": "vanilla", "model": {"name": "own.py:build"}}]},
        {"methods": [{"label": "x", "parts": [], "data": {"name": "own:load"}}]},
        {"quick": {"model": {"name": "own.py:build"}}},
    ],
)
def test_a_recipe_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    monkeypatch.chdir(tmp_path)
    write_code(tmp_path)
    (tmp_path / "r.json").write_text(json.dumps(RECIPE | changes))
    with pytest.raises(RecipeError, match=r"r\.json names code that would run here: '(own|os).*--trust"):
        load_recipe(tmp_path / "r.json", scale="quick" if "quick" in changes else "paper")
    assert not (tmp_path / "it ran").exists()


AGENT: dict[str, Any] = {
    "domain": "rl",
    "env": "CartPole-v1",
    "agent": "dqn",
    "stream": "environment",
    "methods": ["vanilla"],
    "seeds": 1,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"env": "own:Env-v0"},
        {"env": {"name": "own:Env-v0"}},
        {"agent": "own:Agent"},
        # Gymnasium makes this environment by importing what an option names.
        {"env": {"name": "GymV26Environment-v0", "env_id": "own:Env-v0"}},
        {"env": {"name": "x", "options": {"model": {"inner": "own:Env-v0"}}}},
        {"env": {"name": "x", "wrappers": [["own:Wrapper"]]}},
        {"env": None, "data": {"name": "GymV26Environment-v0", "options": {"env_id": "own:Env-v0"}}},
        {"methods": [{"name": "vanilla", "env": {"env_id": "own:Env-v0"}}]},
    ],
)
def test_a_recipe_of_an_agent_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_code(tmp_path)
    values = {key: value for key, value in (AGENT | changes).items() if value is not None}
    (tmp_path / "r.json").write_text(json.dumps(values))
    with pytest.raises(RecipeError, match=r"r\.json names code that would run here: 'own:.*--trust"):
        load_recipe(tmp_path / "r.json")
    assert not (tmp_path / "it ran").exists()


def test_data_on_the_hub_is_not_code_but_a_network_of_that_name_is() -> None:
    name = "hub:owner/name/file.parquet"
    assert not list(find_code({"data": name, "old_data": {"name": name}, "methods": [{"data": {"name": name}}]}))
    assert list(find_code({"model": name, "methods": [{"name": name}]})) == [name, name]


def test_a_file_named_like_code_does_not_make_it_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_code(tmp_path)
    (tmp_path / "own.py:build").touch()
    (tmp_path / "r.json").write_text(json.dumps(RECIPE | {"model": "own.py:build"}))
    with pytest.raises(RecipeError, match="names code"):
        load_recipe(tmp_path / "r.json")


def test_trust_and_the_command_line_allow_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = write_code(tmp_path)
    (tmp_path / "r.json").write_text(json.dumps(RECIPE | {"model": "own.py:build"}))
    told: list[str] = []

    def tell(line: str) -> None:
        assert not (tmp_path / "it ran").exists()  # It is shown first.
        told.append(line)

    assert load_recipe(tmp_path / "r.json", trust=True, tell=tell).model == Part("own.py:build")
    assert told == [f"trusted code: own.py:build in {own}"]
    assert load_recipe(tmp_path / "r.json", ["model=own.py:build"]).model.name == "own.py:build"
    assert make_recipe(RECIPE | {"model": "own.py:build"}).model.name == "own.py:build"
    with pytest.raises(RecipeError, match=r"names code that would run here: 'own\.py:build'"):
        load_recipe(tmp_path / "r.json", ["data=os:getcwd"])


def test_the_recipe_of_an_archive_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_code(tmp_path)
    recipe, root = make_recipe(RECIPE | {"model": "own.py:build"}), tmp_path / "runs"
    run_experiment(recipe, root, lambda configs: {each.id: execute(each, root).status for each in configs})
    pack(root, tmp_path / "sent.gz")
    (tmp_path / "it ran").unlink()
    assert unpack(tmp_path / "sent.gz", tmp_path / "got") == 1
    report = pliant("report", "got", "--format", "md", cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    assert_refused(pliant("run", "got/recipe.json", cwd=tmp_path), "got/recipe.json names code", "'own.py:build'")
    assert not (tmp_path / "it ran").exists()
    trusted = pliant("run", "got/recipe.json", "--trust", "--out", "again", "--workers", "1", cwd=tmp_path)
    assert trusted.returncode == 0, trusted.stderr
    assert "trusted code: own.py:build in" in trusted.stdout
    assert (tmp_path / "it ran").exists()


def test_every_part_of_a_recipe_is_looked_at() -> None:
    parts = {name for name, field in Recipe.model_fields.items() if "Part" in str(field.annotation)}
    assert parts <= set(PARTS)
