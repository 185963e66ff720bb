"""Load a folder of images."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pliant._files import is_regular, open_regular
from pliant._terminal import printable
from pliant._validation import check_choice
from pliant.data.cache import Decoded, cached
from pliant.data.dataset import Dataset, split_off_test
from pliant.data.images import CorruptImageError, Mode, decode_all, flatten, is_gray, open_image

if TYPE_CHECKING:
    from PIL.Image import Image

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".pgm", ".ppm"})
_TEST_FOLDERS = ("test", "val", "valid", "validation")
_SPLIT_PREFIXES = ("train", "test", "val", "dev", "eval")
"""A folder whose subfolders all start like this holds splits, not classes."""
_LARGEST = 4096
_DECODER = "3"
"""Part of the cache key. Increase it when decoding changes."""


def load_folder(path: Path, *, size: int | None = None, skip_corrupt: bool = False) -> Dataset:
    """Load a folder of images: `class/image.png`, or `train/class/image.png` and `test/class/image.png`.

    Without a test folder, a fixed fifth of each class becomes the test set. Training examples come in a fixed random
    order, so the first few hundred cover all classes.

    Args:
        path: The folder.
        size: Crop and resize every image to this height and width. Required if image sizes differ.
        skip_corrupt: Skip files that cannot be read, instead of raising an error that names the first one.

    Returns:
        The data set; grayscale if all images are.
    """
    if size is not None and (not isinstance(size, int) or not 1 <= size <= _LARGEST):
        raise ValueError(f"size is {size!r}; it must be a whole number, 1 … {_LARGEST}")
    check_choice("skip_corrupt", skip_corrupt, (True, False))
    train_root, test_root = _find_splits(path)
    train = _list_images(train_root)
    if len(train) < 2:
        raise ValueError(f"{train_root} has only one class, {min(train)!r}; it must have at least 2 class folders")
    test = _list_images(test_root) if test_root else {}
    if unknown := test.keys() - train.keys():
        raise ValueError(f"{test_root} has a class {min(unknown)!r} that {train_root} does not have")
    files = [file for part in (train, test) for each in part.values() for file in each]
    stats = [(str(file.relative_to(path)), _stat(file)) for file in files]
    identity = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    fingerprint = f"{_DECODER}|{path.resolve()}|{size}|{skip_corrupt}|{identity}"
    decode = partial(_decode_folder, str(path), train, test, size, skip_corrupt)
    return cached(str(path), fingerprint, decode).shuffled()


def _find_splits(path: Path) -> tuple[Path, Path | None]:
    """Return the folders with the training and the test classes."""
    folders = {entry.name.lower(): entry for entry in _list_folders(path)}
    if "train" not in folders:
        splits = [name for name in folders if name.startswith(_SPLIT_PREFIXES)]
        if len(splits) == len(folders) > 1 and any(name.startswith("train") for name in splits):
            raise ValueError(
                f"{path} has the folders {', '.join(repr(entry.name) for entry in folders.values())}, which look like "
                "splits of one data set; rename them to 'train' and 'test', or give classes other names"
            )
        return path, None
    test = next((folders[name] for name in _TEST_FOLDERS if name in folders), None)
    if test is None:
        raise ValueError(
            f"{path} has a folder {folders['train'].name!r} but none of {', '.join(_TEST_FOLDERS)}; add one, or rename "
            "the folder if it is a class"
        )
    return folders["train"], test


def _stat(file: Path) -> os.stat_result:
    """Return the status of a file, or of the link itself if the link is dead."""
    try:
        return file.stat()
    except OSError:
        return file.lstat()


def _list_folders(root: Path) -> list[Path]:
    return sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _list_images(root: Path) -> dict[str, list[Path]]:
    """Find the images of each class; classes and files are sorted by name."""
    classes = _list_folders(root)
    if not classes:
        raise ValueError(f"{root} has no folders; every class must be a folder of images")
    found = {}
    for folder in classes:
        images = sorted(_walk(folder))
        if not images:
            raise ValueError(f"class {folder.name!r} is empty: there are no images in {folder}")
        found[folder.name] = images
    return found


def _walk(folder: Path) -> Iterator[Path]:
    """Find the images in a folder and its subfolders; follow links, skip hidden files."""
    seen = {os.path.realpath(parent) for parent in folder.absolute().parents}
    for place, folders, files in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:  # A link may point to a parent folder.
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in (Path(place, name) for name in files if not name.startswith(".")):
            if file.suffix.lower() not in _SUFFIXES:
                continue
            if file.exists() and not is_regular(file):
                warnings.warn(printable(f"{file} is skipped: it is not a regular file"), stacklevel=2)
                continue
            yield file


def _decode_folder(
    source: str, train: dict[str, list[Path]], test: dict[str, list[Path]], size: int | None, skip_corrupt: bool
) -> Decoded:
    classes = tuple(train)
    parts = []
    sizes: dict[tuple[int, int], Path] = {}
    gray = True
    for listing in (train, test):
        kept: list[tuple[Path, int]] = []
        for label, name in enumerate(classes):
            before = len(kept)
            for file in listing.get(name, ()):
                try:
                    image = _open(file, size)
                except CorruptImageError:
                    if not skip_corrupt:
                        raise
                    continue
                sizes.setdefault((image.height, image.width), file)
                gray = gray and is_gray(image)
                kept.append((file, label))
            if listing.get(name) and len(kept) == before:
                raise ValueError(f"class {name!r} is empty: none of its {len(listing[name])} files can be read")
        parts.append(kept)
    if len(sizes) > 1:
        (one, first), (other, second) = list(sizes.items())[:2]
        raise ValueError(
            f"images differ in size: {first} has {one[0]} x {one[1]} pixels, {second} has {other[0]} x {other[1]}; "
            "choose a common size (size=32; on the command line --set data.size=32)"
        )
    (height, width) = next(iter(sizes))
    mode: Mode = "L" if gray else "RGB"

    def decode(kept: list[tuple[Path, int]]) -> tuple[Tensor, Tensor]:
        sources = ((str(file), partial(_open, file, size)) for file, _ in kept)
        images = decode_all(sources, len(kept), (len(mode), height, width), mode)
        return images, torch.tensor([label for _, label in kept], dtype=torch.int64)

    everything = decode(parts[0])
    if parts[1]:
        return everything, decode(parts[1]), classes
    return *split_off_test(*everything, source, classes), classes


def _open(file: Path, size: int | None) -> "Image":
    try:
        with open_regular(file) as content:
            image = open_image(content, str(file))
    except OSError as error:
        raise CorruptImageError(f"{file} cannot be read: {error.strerror}") from error
    from PIL import ImageOps

    try:
        image = flatten(_turn_upright(image))
        if size is None or image.size == (size, size):
            return image
        return ImageOps.fit(image, (size, size))  # Crops, which keeps proportions.
    except Exception as error:  # Decoders may raise anything on bad input.
        raise CorruptImageError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


_ORIENTATION = 274
"""The EXIF tag with the orientation of the camera."""


def _turn_upright(image: "Image") -> "Image":
    """Rotate a photo by its EXIF orientation.

    Pillow's `exif_transpose` also rewrites all other tags, and fails if one of them is malformed.
    """
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    orientation = None
    with contextlib.suppress(Exception):  # Malformed tags do not affect the pixels.
        orientation = image.getexif().get(_ORIENTATION)
    return image.transpose(turns[orientation]) if orientation in turns else image
