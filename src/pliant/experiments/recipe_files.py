"""Find recipe files, and read them at a scale and with overrides."""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pliant._files import read_regular
from pliant._json import check_depth, parse_json
from pliant._key_values import override
from pliant._names import suggest
from pliant.experiments.recipe import Recipe, RecipeError, label_of, make_recipe
from pliant.experiments.run_config import SETTING

Scale = Literal["paper", "quick"]
"""The size of an experiment: as published, or a smaller version that takes minutes."""


_MOST_BYTES = 10_000_000
PARTS = ("data", "model", "stream", "old_data", "env", "agent")
"""The keys of a recipe whose value may be a bare name."""


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


def load_recipe(
    path: Path,
    overrides: Iterable[str] = (),
    scale: Scale = "paper",
    *,
    trust: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Recipe:
    """Read a recipe.

    Args:
        path: A TOML file, or the `recipe.json` of an experiment. Its table `quick` holds the changes for that scale;
            changes of single methods stand under their labels: `methods = { ReDo = { every = 9 } }`.
        overrides: Changes `key=value`, or `stream.epochs=5` inside a table. `methods=vanilla,SWR` picks methods of
            the file by their labels, and accepts other methods as `pliant compare --methods` does.
        scale: "paper": as published. "quick": a smaller version that takes minutes.
        trust: Whether the file may name code: `module:function` or `file.py:function`. Overrides always may.
        tell: Gets one line for each piece of code that is trusted, before it runs.

    Returns:
        The recipe, checked. If it differs from the published setting, its title says so and the published numbers are
        dropped.

    Raises:
        RecipeError: If it is wrong.
    """
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise RecipeError(f"{path} has {size // 10**6} MB; a recipe has at most {_MOST_BYTES // 10**6} MB")
        text = read_regular(path).decode()
        values: dict[str, Any] = parse_json(text) if path.suffix == ".json" else _parse_toml(text)
    except FileNotFoundError as error:
        raise RecipeError(f"there is no recipe {str(path)!r}") from error
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(f"{path} is not {path.suffix.removeprefix('.').upper()}: {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds a {type(values).__name__}; a recipe is a table of keys and values")
    values.pop("digest", None)  # A recipe.json may be edited.
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
    _check_trust(path, values, overrides, trust, tell)
    return make_recipe(values)


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_depth(values)
    return values


def _check_trust(
    path: Path, values: Mapping[str, Any], overrides: list[str], trust: bool, tell: Callable[[str], None]
) -> None:
    """Raise a RecipeError if the file itself names code, unless it is trusted."""
    typed = set(find_code(override({}, overrides)))
    # Gymnasium imports the module of an environment's name, and some of its environments take such a name as an option.
    is_rl = values.get("domain") in ("rl", {"name": "rl"})
    found = [name for name in dict.fromkeys(find_code(values, ("env", "data") if is_rl else ())) if name not in typed]
    if found and not trust:
        raise RecipeError(
            f"{path} names code that would run here: {', '.join(map(repr, found))}. Read that code, then allow it "
            "with --trust (trust=True in Python), or name it on the command line"
        )
    for name in found:
        file = name.rpartition(":")[0]
        tell(f"trusted code: {name}" + (f" in {Path(file).resolve()}" if file.endswith(".py") else ""))


def find_code(value: Any, whole: Sequence[str] = (), key: str = "", part: str = "") -> Iterator[str]:
    """Find the names in a recipe that lead to code outside Pliant: those with a colon, except data on the hub.

    Args:
        value: The recipe, or a value in it.
        whole: The parts whose options may name code too.
        key: The key of the value.
        part: The part that the value belongs to.

    Example:
        >>> list(find_code({"data": "os:system", "methods": ["l2:lam=0.1", {"model": {"name": "net.py:build"}}]}))
        ['os:system', 'net.py:build']
    """
    if isinstance(value, Mapping):
        for inner, each in value.items():
            yield from find_code(each, whole, str(inner), inner if inner in PARTS and part not in whole else part)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from find_code(each, whole, "", part)
    elif isinstance(value, str) and ":" in value and (part in whole or _names_code(value, key, part)):
        yield value


def _names_code(value: str, key: str, part: str) -> bool:
    return key in ("name", *PARTS) and not (value.startswith("hub:") and part in ("data", "old_data"))


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
