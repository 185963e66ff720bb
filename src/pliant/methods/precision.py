"""Numbers in which sums and averages are not lost to rounding."""

from torch import Tensor


def widen(tensor: Tensor) -> Tensor:
    """Return 16-bit floats as float32, in which sums and averages are not lost to rounding; anything else as it is."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor
