"""The data set that needs no download: scikit-learn's 8 x 8 digits."""

import functools
from importlib.metadata import version

import torch

from pliant._importing import naming_extra
from pliant._seeding import permutation
from pliant.data.cache import Decoded, cached
from pliant.data.dataset import Dataset

_DECODER = "1"
"""Part of the cache key. Increase it when decoding or splitting changes."""


@functools.cache
def load_digits() -> Dataset:
    """Load 1 797 handwritten digits; a fixed fifth of them is the test set.

    The split is over shuffled examples, because the file is sorted by writer.
    """
    with naming_extra("the data set digits", "data"):
        release = version("scikit-learn")
    # The cache also saves the import of scikit-learn, which takes longer than a short run.
    return cached("digits", f"{_DECODER}|scikit-learn {release}", _decode)


def _decode() -> Decoded:
    from sklearn import datasets

    bunch = datasets.load_digits()
    x = torch.from_numpy(bunch.images).mul(255 / 16).round().to(torch.uint8).unsqueeze(1)
    y = torch.from_numpy(bunch.target).to(torch.int64)
    order = permutation(len(y), "digits")
    test, train = order[:360], order[360:]
    return (x[train], y[train]), (x[test], y[test]), tuple(map(str, range(10)))
