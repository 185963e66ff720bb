"""Data sets by name, from a folder, from a file or from a function."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pliant._names import check_names, keyword_options, suggest
from pliant._validation import check_choice
from pliant.data.dataset import Dataset, Examples, from_tensors
from pliant.data.embedded import digits
from pliant.data.hub import SOURCES, load_from_hub
from pliant.data.local import load_folder, load_function, load_npz

__all__ = ["Dataset", "Examples", "from_tensors", "load", "names", "options", "summary"]


def names() -> tuple[str, ...]:
    """Names that `load` knows; it takes paths and functions too."""
    return ("digits", *SOURCES)


def summary(name: str) -> str:
    """Describe a data set by its name, in a line."""
    return (
        "handwritten digits, 1 437 + 360, 8 x 8 gray; needs no download" if name == "digits" else SOURCES[name].summary
    )


def options(name: str) -> dict[str, Any] | None:
    """Return what a data set can be asked for, with the defaults; None for a function, which takes what it takes.

    Raises:
        ValueError: If there is no such data set.
    """
    loader = find_loader(name)
    return None if is_function(name) else keyword_options(load) | keyword_options(loader)


def is_function(name: str) -> bool:
    """Say whether a name is that of a function; paths may have colons too."""
    return ":" in name and not Path(name).exists()


def load(
    name: str,
    /,
    *,
    first: int | None = None,
    pixels: Literal["standard", "unit"] = "standard",
    project: int | None = None,
    **settings: Any,
) -> Dataset:
    """Load a data set.

    Args:
        name: One of `names()`; a folder of images; an `.npz` file; `module:function` or `file.py:function`.
        first: How many training examples to keep; all by default.
        pixels: How images are scaled: "standard" to mean 0 and deviation 1 per channel, "unit" to [0, 1].
        project: To how many features inputs are reduced, by one fixed random projection; not at all by default.
        settings: For a folder `size` and `skip_corrupt`; for a function whatever it takes, but not under the names
            above.

    Returns:
        The data set, its inputs in memory or memory-mapped.

    Raises:
        ValueError: If there is no such data set, or something is wrong with it.
    """
    allowed = options(name)
    if allowed is not None:
        check_names(f"data {name!r}", settings, allowed)
    check_choice("pixels", pixels, ("standard", "unit"))
    dataset = find_loader(name)(**settings)
    if pixels == "unit":
        dataset = dataset.in_unit_range()
    if first is not None:
        dataset = dataset.first(first)
    return dataset if project is None else dataset.project(project)


def tell_namesake(name: str) -> str | None:
    """Say that a name is a data set's, and not that of the folder here; nothing if that is an experiment's."""
    path = Path(name)
    if name not in names() or not path.is_dir() or (path / "recipe.json").exists():
        return None
    return f"data {name!r} is the data set that Pliant knows; write './{name}' for the folder that is here"


def find_loader(name: str) -> Callable[..., Dataset]:
    """Find out what loads a data set, without loading it.

    Raises:
        ValueError: If there is no such data set.
    """
    path = Path(name)
    if name == "digits":
        return digits
    if name in SOURCES:
        return partial(load_from_hub, name)
    if is_function(name):
        return partial(load_function, name)
    if path.is_dir():
        return partial(load_folder, path)
    if path.suffix == ".npz" and path.is_file():
        return partial(load_npz, path)
    if path.suffix == ".py":
        raise ValueError(f"data is {name!r}; it must name a function in that file too: {name}:function")
    kind = "is neither a folder nor an .npz file" if path.exists() else "is no data set, and nothing is at that path"
    raise ValueError(f"data {name!r} {kind}; {suggest(name, names())}")
