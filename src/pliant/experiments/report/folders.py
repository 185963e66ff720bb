"""Read experiment folders, whether their runs are finished, in progress, interrupted or damaged.

A recipe is read as written: its data, network and methods need not exist here, and none of its code runs.
"""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter

from pliant.experiments.recipe import Entry, GridPart, Recipe, Selection
from pliant.experiments.report.comparison import Broken
from pliant.experiments.run_config import Part, Start, describe, read_settings
from pliant.experiments.selection import tell_choice
from pliant.experiments.store import Run, Status, load_recipe_values, load_run, load_selection

PROGRESS: dict[Status, int] = {"unfinished": 0, "failed": 1, "diverged": 2, "finished": 2}
"""How far a run got. A failed run may finish when it is run again."""

_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OSError)
"""The errors that reading a malformed file may raise."""


@dataclass(frozen=True)
class WrittenRecipe:
    """The recipe of a folder.

    Args:
        values: The content of `recipe.json`.
        recipe: The same as an object.
    """

    values: dict[str, Any]
    recipe: Recipe


@dataclass(frozen=True)
class Folder:
    """The content of an experiment's folder.

    Args:
        path: The folder.
        runs: Its runs.
        recipe: Its recipe; None if it is missing or unreadable.
        selection: The chosen settings; empty if there was no choice.
        broken: Files and folders that cannot be read.
    """

    path: Path
    runs: Sequence[Run]
    recipe: WrittenRecipe | None = None
    selection: dict[str, Any] = field(default_factory=dict)
    broken: Sequence[Broken] = ()


def read_folder(path: Path) -> Folder:
    """Read an experiment's folder.

    Raises:
        ValueError: If it is not an experiment's folder.
    """
    broken: list[Broken] = []
    runs = _read_runs(path, broken)
    recipe = _read_recipe(path, broken)
    return Folder(path, runs, recipe, _read_selection(path, recipe, broken), broken)


def find_experiments(folder: Path) -> list[Path]:
    """Return a folder; if it is not an experiment's but holds some, such as `demo` or `runs`, return these."""
    if (folder / "runs").is_dir():
        return [folder]
    return sorted(inside for inside in folder.glob("*") if (inside / "runs").is_dir()) or [folder]


def _read_runs(folder: Path, broken: list[Broken]) -> list[Run]:
    if not (folder / "runs").is_dir():
        raise ValueError(f"{folder} is not an experiment's folder: neither it nor a folder in it has a folder 'runs'")
    runs = []
    for entry in sorted(os.scandir(folder / "runs"), key=lambda entry: entry.name):
        path = Path(entry.path)
        if not entry.is_dir():
            continue
        try:
            run = load_run(path)
            if run is not None:
                runs.append(run)
            elif any(path.iterdir()):
                broken.append(Broken(path, "has neither config.json nor result.json"))
        except _MALFORMED as error:
            broken.append(Broken(path, f"{type(error).__name__}: {error}"))
    return runs


def _read_recipe(folder: Path, broken: list[Broken]) -> WrittenRecipe | None:
    path = folder / "recipe.json"
    if not path.exists():
        return None
    try:
        values = load_recipe_values(folder)
        recipe = _construct(values)
        for entry in recipe.methods:
            recipe.config(entry, (), 0, "result")
        return WrittenRecipe(values, recipe)
    except _MALFORMED as error:
        broken.append(Broken(path, f"{type(error).__name__}: {error}"))
        return None


def _construct(values: dict[str, Any]) -> Recipe:
    """Build a recipe from `recipe.json`, of which only the types are checked: what it names need not exist here."""
    entries = [
        _typed(Entry, entry | {"parts": tuple(_typed(GridPart, part) for part in entry["parts"])})
        for entry in values["methods"]
    ]
    parts = {name: Part(**values[name]) for name in ("data", "model", "stream", "old_data") if values.get(name)}
    return _typed(
        Recipe,
        values
        | parts
        | {
            "training": read_settings(values["training"]),
            "start": Start(**values["start"]) if values.get("start") else None,
            "methods": tuple(entries),
            "seeds": tuple(values["seeds"]),
            "selection": _typed(Selection, values["selection"]),
        },
    )


_Model = TypeVar("_Model", bound=BaseModel)


def _typed(model: type[_Model], values: dict[str, Any]) -> _Model:
    """Construct a model of which each value has the type of its field; its own checks are not made."""
    given = {name: values[name] for name in model.model_fields if name in values}
    checked = {name: adapter.validate_python(given[name]) for name, adapter in _adapters(model) if name in given}
    return model.model_construct(**given | checked)


@functools.cache
def _adapters(model: type[BaseModel]) -> list[tuple[str, TypeAdapter[Any]]]:
    """Return what checks the fields of a model that hold plain values."""
    fields = {name: field for name, field in model.model_fields.items() if name not in _CONSTRUCTED}
    return [(name, TypeAdapter(field.rebuild_annotation())) for name, field in fields.items()]


_CONSTRUCTED = ("data", "model", "stream", "old_data", "start", "training", "methods", "parts")
"""Fields that hold objects, whose constructors check their types."""


def _read_selection(folder: Path, written: WrittenRecipe | None, broken: list[Broken]) -> dict[str, Any]:
    """Read the chosen settings that are still among the recipe's choices."""
    try:
        selection = load_selection(folder)
        if not selection:
            return {}
        chosen = {label: report["chosen"] for label, report in selection["labels"].items()}
        if written is not None:
            choices = {entry.label: entry.variants() for entry in written.recipe.methods if entry.label in chosen}
            offered = {
                label: {describe(parts) for parts in variants}
                for label, variants in choices.items()
                if len(variants) > 1
            }
            chosen = {label: setting for label, setting in chosen.items() if setting in offered.get(label, ())}
        if not chosen:
            return {}
        kept: dict[str, dict[str, Any]] = {label: dict(selection["labels"][label]) for label in chosen}
        for label, choice in kept.items():
            choice["told"] = tell_choice(label, choice, selection["on"])
        return {"on": selection["on"], "labels": kept}
    except _MALFORMED as error:
        broken.append(Broken(folder / "selection.json", f"cannot be read: {error}"))
        return {}
