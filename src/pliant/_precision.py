"""Precision for sums and averages: at least float32, and no autocast."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_DEVICES = ("cpu", "cuda", "xpu", "mps")


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for floats of fewer bits, and any other dtype unchanged.

    Example:
        >>> wide_dtype(torch.bfloat16), wide_dtype(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def widen(tensor: Tensor) -> Tensor:
    """Return a tensor in its `wide_dtype`, without a copy if it has that dtype."""
    return tensor.to(wide_dtype(tensor.dtype))


def widen_all(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors in their `wide_dtype`; the same list if all of them have it, as nearly always."""
    if all(tensor.dtype.itemsize >= 4 for tensor in tensors):
        return tensors
    return [widen(tensor) for tensor in tensors]


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function compute in the precision of its arguments even if its caller has autocast enabled.

    Autocast would compute matrix products in half precision.

    Example:
        >>> @without_autocast
        ... def product(x):
        ...     return (x @ x).dtype
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     product(torch.ones(2, 2))
        torch.float32
    """

    @functools.wraps(function)
    def computed(*args: P.args, **kwargs: P.kwargs) -> R:
        if not any(map(torch.is_autocast_enabled, _DEVICES)):
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for device in filter(torch.is_autocast_enabled, _DEVICES):
                stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return computed
