"""Cache of decoded images and encoded texts on disk, memory-mapped when used.

    CACHE/NAME-FINGERPRINT/meta.json   shapes, class names, checksums
                          /train.x     uint8 images [N, C, H, W], or int64 windows of tokens; nothing else
                          /train.y     int64 labels, or what else is known of each window
                          /test.x, test.y

The first process that needs a data set decodes it. Processes that map the same file share its memory pages. Each
process compares a data set with its checksums when it first uses it; a damaged one is decoded again.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import torch
from torch import Tensor

from pliant._files import open_regular, read_regular, sync, write_atomically
from pliant._json import seal, unseal
from pliant._terminal import printable
from pliant.data.dataset import Dataset, from_tensors

Decoded = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[str, ...]]
"""Training images and labels, test images and labels, class names; for a text, see `pliant.data.text`."""
Make = Callable[[str, tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[str, ...]], Dataset]

_FILES = ("train.x", "train.y", "test.x", "test.y")


def cache_folder() -> Path:
    """Return the cache folder: `PLIANT_CACHE`, or `pliant` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PLIANT_CACHE") or Path(base) / "pliant")


def cached(
    name: str,
    fingerprint: str,
    decode: Callable[[], Decoded],
    inputs: torch.dtype = torch.uint8,
    make: Make = from_tensors,
) -> Dataset:
    """Map a data set from the cache; decode it first if it is missing.

    Args:
        name: The name of the data set.
        fingerprint: Identifies the content of the source.
        decode: Reads the source.
        inputs: The type of the inputs.
        make: Makes the data set from its name and from what was decoded.

    Returns:
        The data set; its inputs are memory-mapped.
    """
    folder = entry_folder(name, fingerprint)
    if _find_problems(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # If many runs start on an empty cache, one of them decodes and the others wait.
        with filelock.FileLock(folder.with_suffix(".lock")):
            if problems := _find_problems(folder):
                if (folder / "meta.json").exists():
                    warnings.warn(printable(f"{problems[0]}; the data is decoded again"), stacklevel=2)
                _write(folder, decode())
    return _map(name, folder, inputs, make)


_INTACT: set[tuple[Any, ...]] = set()
"""The files that this process has compared with their checksums: names, inodes, times and sizes."""


def _find_problems(folder: Path) -> list[str]:
    """Check a data set, unless this process has done so and the files are still the same."""
    try:
        stats = [os.stat(folder / name) for name in (*_FILES, "meta.json")]
    except OSError as error:
        return [f"{error.filename} cannot be read"]
    files = (folder, *((each.st_dev, each.st_ino, each.st_mtime_ns, each.st_size) for each in stats))
    if files in _INTACT:
        return []
    problems = check(folder)
    if not problems:
        _INTACT.add(files)
    return problems


def entry_folder(name: str, fingerprint: str) -> Path:
    """Return the folder of one data set in the cache."""
    digest = hashlib.blake2b(fingerprint.encode(errors="backslashreplace"), digest_size=8).hexdigest()
    safe = "".join(letter if letter.isalnum() else "_" for letter in Path(name).name)
    return cache_folder() / f"{safe}-{digest}"


def entries() -> list[Path]:
    """List the folders of the data sets in the cache."""
    return sorted(meta.parent for meta in cache_folder().glob("*/meta.json"))


def check(folder: Path) -> list[str]:
    """Compare the files of a cached data set with their checksums.

    Args:
        folder: The data set's folder in the cache.

    Returns:
        One message per damaged file.
    """
    try:
        digests = _read_meta(folder)["sha256"]
    except ValueError as error:
        return [str(error)]
    return [
        f"{folder / name}: the content does not match its checksum"
        for name, digest in digests.items()
        if not (folder / name).is_file() or digest_file(folder / name) != digest
    ]


def _write(folder: Path, decoded: Decoded) -> None:
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    train, test, classes = decoded
    meta: dict[str, Any] = {"classes": classes, "shapes": {}, "sha256": {}}
    for part, pair in {"train": train, "test": test}.items():
        for kind, tensor in zip("xy", pair, strict=True):
            path = temporary / f"{part}.{kind}"
            tensor.contiguous().numpy().tofile(path)
            sync(path)
            meta["shapes"][path.name] = list(tensor.shape)
            meta["sha256"][path.name] = digest_file(path)
    write_atomically(temporary / "meta.json", seal(meta))
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)  # A damaged data set, or what a crash left of one.
    temporary.rename(folder)
    sync(folder.parent)


def _read_meta(folder: Path) -> dict[str, Any]:
    file = folder / "meta.json"
    try:
        meta = unseal(read_regular(file))
        if meta["shapes"].keys() == meta["sha256"].keys() == set(_FILES) and list(meta["classes"]):
            return meta
        reason = "keys are missing"
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        reason = str(error)
    raise ValueError(f"{file} is damaged ({reason})")


def _map(name: str, folder: Path, inputs: torch.dtype, make: Make) -> Dataset:
    meta = _read_meta(folder)
    tensors: dict[str, Tensor] = {}
    for file, shape in meta["shapes"].items():
        dtype, size = inputs if file.endswith(".x") else torch.int64, torch.Size(shape).numel()
        if not (folder / file).exists() or (folder / file).stat().st_size != size * dtype.itemsize:
            raise ValueError(f"{folder / file} has the wrong size")
        # A private mapping: writes to the tensor do not change the file.
        tensors[file] = torch.from_file(str(folder / file), shared=False, size=size, dtype=dtype).view(shape)
    dataset = make(
        name,
        (tensors["train.x"], tensors["train.y"]),
        (tensors["test.x"], tensors["test.y"]),
        tuple(meta["classes"]),
    )
    content = json.dumps([meta["classes"], meta["sha256"]], sort_keys=True)
    return replace(dataset, fingerprint=hashlib.sha256(content.encode()).hexdigest())


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
