"""Find recipe files, and read them at a scale and with overrides."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pliant._key_values import override
from pliant._names import suggest
from pliant.experiments.recipe import Recipe, RecipeError, label_of, make_recipe
from pliant.experiments.run_config import SETTING

Scale = Literal["paper", "quick"]
"""The size of an experiment: as published, or a smaller one that takes minutes."""


def recipe_folder() -> Path:
    """Return the folder of Pliant's recipes: in the package, or beside its sources."""
    package = Path(__file__).parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def find_recipe(name: str) -> Path:
    """Find a recipe by its name or path."""
    path = Path(name)
    if path.suffix in (".toml", ".json"):
        return path
    found = {file.stem: file for file in sorted(recipe_folder().glob("*.toml"))}
    if name not in found:
        raise RecipeError(f"there is no recipe {name!r}; {suggest(name, found)}, or the path of a .toml file")
    return found[name]


def load_recipe(path: Path, overrides: Iterable[str] = (), scale: Scale = "paper") -> Recipe:
    """Read a recipe.

    Args:
        path: A TOML file, or the `recipe.json` of an experiment. Its table `quick` holds the changes for that scale;
            changes of single methods stand under their labels: `methods = { ReDo = { every = 9 } }`.
        overrides: Changes `key=value`, or `stream.epochs=5` inside a table. `methods=vanilla,SWR` picks methods of
            the file by their labels, and accepts other methods as `pliant compare --methods` does.
        scale: "paper": as published. "quick": a smaller version that takes minutes.

    Returns:
        The recipe, checked. If it differs from the published setting, its title says so and the published numbers are
        dropped.

    Raises:
        RecipeError: If it is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values: dict[str, Any] = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError as error:
        raise RecipeError(f"there is no recipe {str(path)!r}") from error
    except ValueError as error:
        raise RecipeError(f"{path} is not {path.suffix.removeprefix('.').upper()}: {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds a {type(values).__name__}; a recipe is a table of keys and values")
    quick = values.pop("quick", None)
    if scale == "quick":
        if quick is None:
            raise RecipeError(f"{path} has no table 'quick'; it runs at scale 'paper' only")
        if not isinstance(quick, Mapping):
            raise RecipeError(f"quick is {quick!r}; it must be a table of what changes")
        values = _merge(values, quick)
    overrides, entries = list(overrides), values.get("methods")
    values = override(values, overrides)
    _check_reach(values, overrides)
    if any(text.startswith("methods=") for text in overrides):
        values["methods"] = _pick_methods(entries, values["methods"])
        if isinstance(values.get("published"), dict) and isinstance(values["methods"], list):
            labels = {label_of(entry) for entry in values["methods"]}
            values["published"] = {key: number for key, number in values["published"].items() if key in labels}
    changes = ["quick scale"] if scale == "quick" else []
    changes += [text for text in overrides if text.startswith(SETTING)]
    if changes:
        values["published"] = {}
        values["title"] = f"{values.get('title') or path.stem} ({', '.join(changes)})"
    return make_recipe(values)


def _pick_methods(entries: Any, wanted: Any) -> Any:
    """Pick entries of a recipe by their labels; other texts are methods."""
    known = {label_of(entry): entry for entry in entries} if isinstance(entries, list) else {}
    if isinstance(wanted, str):
        wanted, pieces = [], wanted.split(",")
        while pieces:
            # A label may hold a comma: take the longest label that fits.
            ends = range(len(pieces), 0, -1)
            end = next((end for end in ends if ",".join(pieces[:end]).strip() in known), 1)
            wanted.append(",".join(pieces[:end]).strip())
            pieces = pieces[end:]
    if not isinstance(wanted, list):
        return wanted
    return [known.get(each, each) if isinstance(each, str) else each for each in wanted]


def _check_reach(values: Mapping[str, Any], overrides: Iterable[str]) -> None:
    """Raise a RecipeError if an override changes nothing because every method has its own value."""
    entries = values.get("methods")
    own = [entry if isinstance(entry, dict) else {} for entry in (entries if isinstance(entries, list) else ())]
    for text in overrides:
        table, _, key = text.partition("=")[0].partition(".")
        if own and key and all(isinstance(entry.get(table), dict) and key in entry[table] for entry in own):
            raise RecipeError(f"{text} would change nothing: every method has its own {table}.{key}")


def _merge(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge changes into values, table by table; a table of methods is merged by label."""
    merged = dict(values)
    for key, change in changes.items():
        old = merged.get(key)
        if isinstance(change, Mapping) and isinstance(old, dict):
            change = _merge(old, change)
        elif isinstance(change, Mapping) and isinstance(old, str) and key in ("data", "model", "stream"):
            change = _merge({"name": old}, change)
        elif key == "methods" and isinstance(change, Mapping) and isinstance(old, list):
            change = _merge_methods(old, change)
        merged[key] = change
    return merged


def _merge_methods(entries: list[Any], changes: Mapping[str, Any]) -> list[Any]:
    labels = [label_of(entry) for entry in entries]
    for label, change in changes.items():
        if label not in labels:
            raise RecipeError(f"quick.methods: there is no {label!r}; {suggest(label, filter(None, labels))}")
        if not isinstance(change, Mapping):
            raise RecipeError(f"quick.methods.{label} is {change!r}; it must be a table of what changes")
    merged = []
    for entry, own in zip(entries, labels, strict=True):
        if own is None or own not in changes:
            merged.append(entry)
        elif isinstance(entry, str) and entry != own:
            raise RecipeError(f"quick.methods.{own}: {entry!r} must be written as a table too, to change it")
        else:
            merged.append(_merge({"name": entry} if isinstance(entry, str) else entry, changes[own]))
    return merged
