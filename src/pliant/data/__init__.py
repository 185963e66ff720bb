"""Data sets by name, from a folder, a file or a function."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pliant._names import check_names, keyword_options, suggest
from pliant._validation import check_choice
from pliant.data.bits import load_bits
from pliant.data.dataset import Dataset, Examples, from_tensors
from pliant.data.digits import load_digits
from pliant.data.hub import SOURCES, load_from_hub
from pliant.data.image_folder import load_folder
from pliant.data.npz_file import load_npz
from pliant.data.text import TEXTS, is_text, load_text
from pliant.data.user_function import load_function

__all__ = ["Dataset", "Examples", "from_tensors", "load", "names", "options", "summary"]


def names() -> tuple[str, ...]:
    """Return the names of the built-in data sets."""
    return ("digits", "bits", *TEXTS, *SOURCES)


def summary(name: str) -> str:
    """Describe a built-in data set in one line."""
    if name == "digits":
        return "handwritten digits, 1 437 + 360, 8 x 8 gray; needs no download"
    if name == "bits":
        return "random vectors of 20 bits, 1 000 + 250; for slow_regression"
    if name in TEXTS:
        return TEXTS[name][0]
    return SOURCES[name].summary


def options(name: str) -> dict[str, Any] | None:
    """Return the options of a data set with their defaults; None for a function, whose options are its own.

    Raises:
        ValueError: If the data set does not exist.
    """
    loader = find_loader(name)
    return None if is_function(name) else keyword_options(load) | keyword_options(loader)


def is_function(name: str) -> bool:
    """Return whether a name refers to a function; an existing path with a colon does not."""
    return ":" in name and not name.startswith("hub:") and not Path(name).exists()


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
        name: One of `names()`; a folder of images; an `.npz` file; a `.txt` file, a folder of them or a `.parquet`
            file of texts; `hub:OWNER/NAME/FILE.parquet`; `module:function` or `file.py:function`.
        first: The number of training examples to keep; all by default.
        pixels: How images are scaled: "standard" to mean 0 and deviation 1 per channel, "unit" to [0, 1].
        project: The number of features to reduce inputs to, by a fixed random projection; None keeps the inputs.
        settings: For a folder of images, `size` and `skip_corrupt`; for text, `window`, `characters`, `vocabulary`,
            `column` and `then`; for a function, its own arguments.

    Returns:
        The data set, in memory or memory-mapped.

    Raises:
        ValueError: If the data set does not exist or is invalid.
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
    """Return a warning if a name could mean a built-in data set or a local folder; None if it is unambiguous.

    The folder of an experiment does not count.
    """
    path = Path(name)
    if name not in names() or not path.is_dir() or (path / "recipe.json").exists():
        return None
    return f"data {name!r} is the built-in data set; write './{name}' for the local folder"


def find_loader(name: str) -> Callable[..., Dataset]:
    """Return the function that loads a data set.

    Raises:
        ValueError: If the data set does not exist.
    """
    path = Path(name)
    if name == "digits":
        return load_digits
    if name == "bits":
        return load_bits
    if name in SOURCES:
        return partial(load_from_hub, name)
    if is_text(name):
        return partial(load_text, name)
    if is_function(name):
        return partial(load_function, name)
    if path.is_dir():
        return partial(load_folder, path)
    if path.suffix == ".npz" and path.is_file():
        return partial(load_npz, path)
    if path.suffix == ".py":
        raise ValueError(f"data is {name!r}; it must name a function in the file: {name}:function")
    kind = "is neither a folder nor an .npz file" if path.exists() else "is neither a data set nor a path"
    raise ValueError(f"data {name!r} {kind}; {suggest(name, names())}")
