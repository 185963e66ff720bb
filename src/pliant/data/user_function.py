"""Load data by calling a function that the user wrote."""

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pliant._importing import import_object, naming_extra, tell_failure
from pliant._seeding import seed_everything, undrawn
from pliant.data.dataset import Dataset, Examples, from_tensors

RESERVED = ("first", "pixels", "project")
"""The arguments of `pliant.data.load` itself."""


def load_function(reference: str, /, **options: Any) -> Dataset:
    """Call a user's function and return its data set.

    Args:
        reference: `module:function` or `path/to/file.py:function`. The function must not have an argument named in
            `RESERVED`.
        options: Arguments of the function.

    Returns:
        The data set, built from two pairs of tensors if the function returns these.
    """
    function = import_object(reference)
    if not callable(function):
        raise ValueError(f"{reference} is a {type(function).__name__}; it must be a function")
    signature = inspect.signature(function)
    if taken := [name for name in RESERVED if name in signature.parameters]:
        raise ValueError(f"{reference} has an argument {taken[0]!r}, which pliant.data.load reserves; rename it")
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ValueError(f"{reference} cannot be called with ({', '.join(options)}): {error}") from error
    with undrawn():
        seed_everything(0)  # The data do not depend on the seed of the run.
        try:
            result = function(**options)
        except (ValueError, ImportError, OSError):
            raise
        except Exception as error:
            raise ValueError(f"data {reference!r} fails: {tell_failure(error)}") from error
    try:
        dataset = _single_precision(result if isinstance(result, Dataset) else _from_pairs(reference, result))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{reference} returned {type(result).__name__}; it must return a pliant.data.Dataset, or "
            f"(x_train, y_train), (x_test, y_test) as tensors: {error}"
        ) from error
    if len(dataset.classes) < 2:
        raise ValueError(f"{reference} returned data with {len(dataset.classes)} class; it must have at least 2")
    return replace(dataset, fingerprint=_digest(dataset))


def _from_pairs(name: str, pairs: Sequence[Sequence[Tensor]]) -> Dataset:
    (x_train, y_train), (x_test, y_test) = pairs
    return from_tensors(name, (x_train, y_train), (x_test, y_test))


def _single_precision(dataset: Dataset) -> Dataset:
    """Convert floating-point inputs to float32; NumPy's default is float64."""

    def single(examples: Examples) -> Examples:
        return replace(examples, x=examples.x.to(torch.float32)) if examples.x.is_floating_point() else examples

    return replace(dataset, train=single(dataset.train), test=single(dataset.test))


def _digest(dataset: Dataset) -> str:
    """Return the SHA-256 of all classes and tensors."""
    with naming_extra("data of your own", "data"):
        import numpy  # noqa: F401  # Tensor.numpy() below needs it.
    found = hashlib.sha256(repr(dataset.classes).encode())
    for examples in (dataset.train, dataset.test):
        for name, value in vars(examples).items():
            if isinstance(value, Tensor):
                found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
