"""The data set that needs no download: scikit-learn's 8 x 8 digits."""

import functools

import torch

from pliant.data.dataset import Dataset, from_tensors
from pliant.seeding import permutation


@functools.cache
def digits() -> Dataset:
    """Load 1 797 handwritten digits, a fixed fifth of them for testing.

    The split is drawn once and for all, over shuffled examples: the file goes writer by writer, and its
    tail is not like its head.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits are part of scikit-learn: pip install 'pliant[data]'") from error
    bunch = load_digits()
    x = torch.from_numpy(bunch.images).mul(255 / 16).round().to(torch.uint8).unsqueeze(1)
    y = torch.from_numpy(bunch.target).to(torch.int64)
    order = permutation(len(y), "digits")
    test, train = order[:360], order[360:]
    return from_tensors("digits", (x[train], y[train]), (x[test], y[test]))
