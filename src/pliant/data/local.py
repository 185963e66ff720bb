"""Data of the user's own: a folder of images, a NumPy file, a function."""

import contextlib
import hashlib
import inspect
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pliant._importing import import_object, naming_extra, tell_failure
from pliant._seeding import permutation, seed_everything, undrawn
from pliant._validation import check_choice
from pliant.data.cache import Decoded, cached, digest_file
from pliant.data.dataset import Dataset, Examples, from_tensors
from pliant.data.images import CorruptImageError, Mode, decode_all, flatten, is_gray, open_image

if TYPE_CHECKING:
    from PIL.Image import Image

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".pgm", ".ppm"})
_TEST_FOLDERS = ("test", "val", "valid", "validation")
_PARTS = ("train", "test", "val", "dev", "eval")
"""What names of parts begin with, where they are not those above."""
TEST_FRACTION = 0.2
"""Part of the examples of each class to test on, where the data has no test part of its own."""
_LARGEST = 4096
_MOST_CHANNELS = 4
"""Colors and transparency. A dimension that is larger counts pixels, if the other could count channels; if both are
larger, the two that are equal count pixels."""
_DECODER = "3"
"""Changes whenever the same file is decoded in another way."""


def load_folder(path: Path, *, size: int | None = None, skip_corrupt: bool = False) -> Dataset:
    """Load a folder of images: `class/image.png`, or `train/class/image.png` and `test/class/image.png`.

    Without a test folder, a fixed fifth of each class is kept for testing. Training examples come in one fixed random
    order: the first few hundred are of all classes.

    Args:
        path: The folder.
        size: Crop and resize every image to this height and width. Needed if they differ in size.
        skip_corrupt: Leave out files that cannot be read, instead of raising an error that names the first.

    Returns:
        The data set; gray if all images are.
    """
    if size is not None and (not isinstance(size, int) or not 1 <= size <= _LARGEST):
        raise ValueError(f"size is {size!r}; it must be a whole number, 1 … {_LARGEST}")
    check_choice("skip_corrupt", skip_corrupt, (True, False))
    folders = {entry.name.lower(): entry for entry in _list_folders(path)}
    train_root = folders.get("train", path)
    test_root = next((folders[name] for name in _TEST_FOLDERS if name in folders), None)
    if train_root is path:
        test_root = None
        parts = [name for name in folders if name.startswith(_PARTS)]
        if len(parts) == len(folders) > 1 and any(name.startswith("train") for name in parts):
            raise ValueError(
                f"{path} has the folders {', '.join(repr(entry.name) for entry in folders.values())}, which look like "
                "parts of one data set; call them 'train' and 'test', or if they are classes, call these otherwise"
            )
    elif test_root is None:
        raise ValueError(
            f"{path} has a folder {train_root.name!r} but none of {', '.join(_TEST_FOLDERS)}; if it is a class, call "
            "it otherwise"
        )
    train = _list_images(train_root)
    if len(train) < 2:
        raise ValueError(
            f"{train_root} has one class alone, {min(train)!r}; every class is a folder, and there must be 2"
        )
    test = _list_images(test_root) if test_root else {}
    if unknown := test.keys() - train.keys():
        raise ValueError(f"{test_root} has a class {min(unknown)!r} that {train_root} has not")
    files = [file for part in (train, test) for each in part.values() for file in each]
    stats = [(str(file.relative_to(path)), _stat(file)) for file in files]
    identity = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    fingerprint = f"{_DECODER}|{path.resolve()}|{size}|{skip_corrupt}|{identity}"
    return _shuffled(
        cached(str(path), fingerprint, partial(_decode_folder, str(path), train, test, size, skip_corrupt))
    )


def _stat(file: Path) -> os.stat_result:
    """What says whether a file has changed; of a link that leads nowhere, the link itself."""
    try:
        return file.stat()
    except OSError:
        return file.lstat()


def _shuffled(dataset: Dataset) -> Dataset:
    """Bring training examples, which often come class by class, into a fixed random order."""
    return replace(dataset, train=dataset.train.select(permutation(len(dataset.train), "shuffle")))


def _list_folders(root: Path) -> list[Path]:
    return sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _list_images(root: Path) -> dict[str, list[Path]]:
    """Find the images of each class, classes and files in order of their names."""
    classes = _list_folders(root)
    if not classes:
        raise ValueError(f"{root} has no folders; every class is a folder of images")
    found = {}
    for folder in classes:
        images = sorted(_walk(folder))
        if not images:
            raise ValueError(f"class {folder.name!r} is empty: there are no images in {folder}")
        found[folder.name] = images
    return found


def _walk(folder: Path) -> Iterator[Path]:
    """Find the images in a folder and the folders in it, be they links; not what is hidden."""
    seen = {os.path.realpath(parent) for parent in folder.absolute().parents}
    for place, folders, files in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:  # A link may lead back to where it is, and to other classes.
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in (Path(place, name) for name in files if not name.startswith(".")):
            if file.suffix.lower() in _SUFFIXES:
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
            "say which size they shall have (size=32; on the command line --set data.size=32)"
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
    return *split(*everything, source, classes), classes


def _open(file: Path, size: int | None) -> "Image":
    try:
        with file.open("rb") as content:
            image = open_image(content, str(file))
    except OSError as error:
        raise CorruptImageError(f"{file} cannot be read: {error.strerror}") from error
    from PIL import ImageOps

    try:
        image = flatten(_turn_upright(image))
        if size is None or image.size == (size, size):
            return image
        # Cropping keeps proportions, which squeezing would not.
        return ImageOps.fit(image, (size, size))
    except Exception as error:  # decoders raise whatever their code raises on what they did not expect
        raise CorruptImageError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


_ORIENTATION = 274
"""The tag by which cameras, that save what they see, say how they were held."""


def _turn_upright(image: "Image") -> "Image":
    """Do what Pillow's `exif_transpose` does, which writes all other tags anew and fails if one is wrong."""
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
    with contextlib.suppress(Exception):  # what else is said of a photo, however wrongly, leaves its pixels as they are
        orientation = image.getexif().get(_ORIENTATION)
    return image.transpose(turns[orientation]) if orientation in turns else image


def split(
    x: Tensor, y: Tensor, source: str, classes: Sequence[str] | None = None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Keep a fixed part of every class for testing, one example at least.

    Args:
        x: Inputs.
        y: Labels.
        source: Where they come from, for the error that a class is too small.
        classes: What classes are called; their numbers by default.

    Returns:
        Inputs and labels to learn from, and to be tested on.
    """
    chosen = []
    for label in torch.unique(y).tolist():
        members = (y == label).nonzero().flatten()
        if len(members) < 2:
            name = repr(classes[label]) if classes else label
            raise ValueError(f"{source}: class {name} has {len(members)} example; to test on some, it needs 2")
        order = permutation(len(members), "split", label)
        chosen.append(members[order[: max(1, round(TEST_FRACTION * len(members)))]])
    is_test = torch.zeros(len(y), dtype=torch.bool)
    is_test[torch.cat(chosen)] = True
    return (x[~is_test], y[~is_test]), (x[is_test], y[is_test])


_FOUR = ("x_train", "y_train", "x_test", "y_test")
_TWO = ("x", "y")


def load_npz(path: Path) -> Dataset:
    """Load a NumPy file with `x_train, y_train, x_test, y_test`, or with `x, y`, of which a fifth is for testing.

    Training examples come in one fixed random order.

    Args:
        path: The file. Labels are whole numbers from 0 on, without a gap. Images are uint8 [N, H, W], [N, H, W, C] or
            [N, C, H, W]; where it is not clear which, an error says so. Other inputs are floating-point; of four
            dimensions the last holds channels if it has at most 4 and the others more.

    Returns:
        The data set.
    """
    with naming_extra("reading .npz files", "data"):
        import numpy

    try:
        with numpy.load(path, allow_pickle=False) as file:
            names = set(file.files)
            wanted = next((each for each in (_FOUR, _TWO) if names >= set(each)), ())
            arrays = {name: torch.from_numpy(file[name]) for name in wanted}
    except Exception as error:  # Damage shows in many ways.
        raise ValueError(f"{path} cannot be read as a NumPy file of plain arrays: {error}") from error
    if wanted == _FOUR:
        train, test = _pair(path, arrays, "_train"), _pair(path, arrays, "_test")
    elif wanted == _TWO:
        train, test = split(*_pair(path, arrays, ""), str(path))
    else:
        raise ValueError(f"{path} holds {sorted(names)}; it must hold {' and '.join(_TWO)}, or {', '.join(_FOUR)}")
    labels = torch.unique(torch.cat([train[1], test[1]]))
    if len(labels) < 2 or not torch.equal(labels, torch.arange(len(labels))):
        low, high = int(labels.min()), int(labels.max())
        raise ValueError(
            f"{path}: labels are {len(labels)} different numbers from {low} to {high}; "
            "they must be 0, 1, … without a gap, and at least 2"
        )
    return replace(_shuffled(from_tensors(path.stem, train, test)), fingerprint=digest_file(path))


def _pair(path: Path, arrays: dict[str, Tensor], part: str) -> tuple[Tensor, Tensor]:
    """Check the inputs and labels of one part of a NumPy file."""
    x, y = arrays[f"x{part}"], arrays[f"y{part}"]
    if y.ndim != 1 or x.ndim < 2 or len(x) != len(y):
        raise ValueError(
            f"{path}: x{part} has shape {tuple(x.shape)} and y{part} {tuple(y.shape)}; "
            "they must be (examples, …) and (examples,)"
        )
    if len(y) == 0:
        raise ValueError(f"{path}: y{part} is empty")
    whole = y.to(torch.int64)
    if not torch.equal(whole.to(y.dtype), y):
        raise ValueError(f"{path}: y{part} holds {float(y[whole != y][0])}; labels must be whole numbers")
    try:
        return _shape_images(x), whole
    except ValueError as error:
        raise ValueError(f"{path}: x{part} {error}") from error


def _shape_images(x: Tensor) -> Tensor:
    """Bring images into [N, C, H, W]; leave other floating-point features as they are, in single precision."""
    if x.is_complex():
        raise ValueError(f"has dtype {x.dtype}; inputs must be real")
    if x.dtype != torch.uint8:
        if x.ndim > 2 and not x.is_floating_point():
            raise ValueError(f"has dtype {x.dtype}; images must be uint8, 0 … 255, and other inputs floating-point")
        if x.ndim == 4 and x.shape[3] <= _MOST_CHANNELS < min(x.shape[1:3]):
            x = x.permute(0, 3, 1, 2).contiguous()
        return x.to(torch.float32)
    if x.ndim == 3:
        return x.unsqueeze(1)
    if x.ndim == 4 and x.shape[1] > _MOST_CHANNELS:
        first, middle, last = x.shape[1:]
        if last > _MOST_CHANNELS and (first == middle) == (middle == last):
            raise ValueError(
                f"has shape {tuple(x.shape)}, which does not tell whether channels come first or last; "
                "have a function return it as a tensor [N, C, H, W]"
            )
        if last <= _MOST_CHANNELS or first == middle:
            return x.permute(0, 3, 1, 2).contiguous()
    return x


RESERVED = ("first", "pixels", "project")
"""What `pliant.data.load` does with any data set."""


def load_function(reference: str, /, **options: Any) -> Dataset:
    """Load what a function of the user's own returns.

    Args:
        reference: `module:function` or `path/to/file.py:function`. It has no arguments called as in `RESERVED`.
        options: Passed on to the function.

    Returns:
        The data set that the function returned, or one made of the two pairs of tensors that it returned.
    """
    function = import_object(reference)
    if not callable(function):
        raise ValueError(f"{reference} is a {type(function).__name__}; it must be a function")
    signature = inspect.signature(function)
    if taken := [name for name in RESERVED if name in signature.parameters]:
        raise ValueError(f"{reference} has an argument {taken[0]!r}, which pliant.data.load takes itself; rename it")
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ValueError(f"{reference} cannot be called with ({', '.join(options)}): {error}") from error
    with undrawn():
        seed_everything(0)  # What it draws is the same in every run, whatever the seed of that is.
        try:
            result = function(**options)
        except (ValueError, ImportError, OSError):
            raise
        except Exception as error:
            raise ValueError(f"data {reference!r} fails: {tell_failure(error)}") from error
    try:
        dataset = _in_single(result) if isinstance(result, Dataset) else _from_pairs(reference, result)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{reference} returned {type(result).__name__}; it must return a pliant.data.Dataset, or "
            f"(x_train, y_train), (x_test, y_test) as tensors: {error}"
        ) from error
    if len(dataset.classes) < 2:
        raise ValueError(f"{reference} returned data of {len(dataset.classes)} class; there must be 2 at least")
    return replace(dataset, fingerprint=_digest(dataset))


def _from_pairs(name: str, pairs: Sequence[Sequence[Tensor]]) -> Dataset:
    (x_train, y_train), (x_test, y_test) = pairs
    return _in_single(from_tensors(name, (x_train, y_train), (x_test, y_test)))


def _in_single(dataset: Dataset) -> Dataset:
    """Bring floating-point features, which NumPy has in double precision, into what networks compute in."""

    def single(examples: Examples) -> Examples:
        return replace(examples, x=examples.x.to(torch.float32)) if examples.x.is_floating_point() else examples

    return replace(dataset, train=single(dataset.train), test=single(dataset.test))


def _digest(dataset: Dataset) -> str:
    """Return the SHA-256 of all that a data set in memory holds."""
    with naming_extra("data of your own", "data"):
        import numpy  # noqa: F401  # what a tensor's bytes go through
    found = hashlib.sha256(repr(dataset.classes).encode())
    for examples in (dataset.train, dataset.test):
        for name, value in vars(examples).items():
            if isinstance(value, Tensor):
                found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
