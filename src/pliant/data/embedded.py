"""The data set that needs no download: scikit-learn's 8 x 8 digits."""

import functools
from importlib.metadata import version

import torch

from pliant._importing import naming_extra
from pliant._seeding import permutation
from pliant.data.cache import Decoded, cached
from pliant.data.dataset import Dataset

_DECODER = "1"
"""Changes whenever the same images are decoded or split in another way."""


@functools.cache
def digits() -> Dataset:
    """Load 1 797 handwritten digits, a fixed fifth of them for testing.

    The split is drawn once and for all, over shuffled examples: the file goes writer by writer, and its tail
    is not like its head.
    """
    with naming_extra("the data set digits", "data"):
        release = version("scikit-learn")
    # From the cache after the first time: scikit-learn takes longer to import than a short run takes.
    return cached("digits", f"{_DECODER}|scikit-learn {release}", _decode)


def _decode() -> Decoded:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.from_numpy(bunch.images).mul(255 / 16).round().to(torch.uint8).unsqueeze(1)
    y = torch.from_numpy(bunch.target).to(torch.int64)
    order = permutation(len(y), "digits")
    test, train = order[:360], order[360:]
    return (x[train], y[train]), (x[test], y[test]), tuple(map(str, range(10)))
