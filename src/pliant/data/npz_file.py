"""Load a NumPy `.npz` file."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pliant._files import check_expansion, open_regular
from pliant._importing import naming_extra
from pliant.data.cache import digest_file
from pliant.data.dataset import Dataset, from_tensors, split_off_test

_SPLIT_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_ARRAYS = ("x", "y")
_MOST_CHANNELS = 4
"""Color and transparency. A larger dimension counts pixels if another one can be the channels. If all dimensions are
larger, the two equal ones count pixels."""


def load_npz(path: Path) -> Dataset:
    """Load a NumPy file with `x_train, y_train, x_test, y_test`, or with `x, y`, a fifth of which becomes the test set.

    Training examples come in a fixed random order.

    Args:
        path: The file. Labels are whole numbers from 0 without gaps. Images are uint8 [N, H, W], [N, H, W, C] or
            [N, C, H, W]; an ambiguous shape is an error. Other inputs are floating-point. If they have four dimensions,
            the last one holds channels if it is at most 4 and the two before it are larger.

    Returns:
        The data set.
    """
    with naming_extra("reading .npz files", "data"):
        import numpy

    try:
        with open_regular(path) as source, numpy.load(source, allow_pickle=False) as file:
            check_expansion(path, sum(member.file_size for member in file.zip.infolist()))
            names = set(file.files)
            wanted = next((each for each in (_SPLIT_ARRAYS, _ARRAYS) if names >= set(each)), ())
            arrays = {name: torch.from_numpy(file[name]) for name in wanted}
    except Exception as error:  # A damaged file may raise many types of errors.
        raise ValueError(f"{path} cannot be read as a NumPy file of plain arrays: {error}") from error
    if wanted == _SPLIT_ARRAYS:
        train, test = _pair(path, arrays, "_train"), _pair(path, arrays, "_test")
    elif wanted == _ARRAYS:
        train, test = split_off_test(*_pair(path, arrays, ""), str(path))
    else:
        expected = f"{' and '.join(_ARRAYS)}, or {', '.join(_SPLIT_ARRAYS)}"
        raise ValueError(f"{path} holds {sorted(names)}; it must hold {expected}")
    labels = torch.unique(torch.cat([train[1], test[1]]))
    if len(labels) < 2 or not torch.equal(labels, torch.arange(len(labels))):
        low, high = int(labels.min()), int(labels.max())
        raise ValueError(
            f"{path}: labels are {len(labels)} different numbers from {low} to {high}; "
            "they must be 0, 1, … without gaps, and at least 2"
        )
    return replace(from_tensors(path.stem, train, test).shuffled(), fingerprint=digest_file(path))


def _pair(path: Path, arrays: dict[str, Tensor], part: str) -> tuple[Tensor, Tensor]:
    """Check the inputs and labels of one split."""
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
        return _channels_first(x), whole
    except ValueError as error:
        raise ValueError(f"{path}: x{part} {error}") from error


def _channels_first(x: Tensor) -> Tensor:
    """Return images as [N, C, H, W], and other inputs in single precision."""
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
                f"has shape {tuple(x.shape)}; whether channels come first or last is ambiguous. "
                "Load the data with a function that returns a tensor [N, C, H, W]"
            )
        if last <= _MOST_CHANNELS or first == middle:
            return x.permute(0, 3, 1, 2).contiguous()
    return x
