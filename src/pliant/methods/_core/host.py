"""Where a tensor lives: reading one number costs nothing on the host, and makes an accelerator wait."""

from torch import Tensor


def is_on_host(tensor: Tensor) -> bool:
    """Say whether a tensor's values can be read without waiting for a device.

    The methods ask nothing else about devices, so a test that replaces this function runs what a GPU would run.
    """
    return tensor.is_cpu
