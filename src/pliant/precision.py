"""Numbers in which sums and averages are not lost to rounding."""

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for floats of fewer bits, anything else as it is.

    Example:
        >>> wide_dtype(torch.bfloat16), wide_dtype(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def widen(tensor: Tensor) -> Tensor:
    """Return a tensor in its `wide_dtype`; the tensor itself if it is wide enough."""
    return tensor.to(wide_dtype(tensor.dtype))
