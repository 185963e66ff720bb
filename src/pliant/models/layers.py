"""Pieces that several of the networks share."""

from collections.abc import Callable

from torch import nn

from pliant.spelling import suggest

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "identity": nn.Identity,
}


def activation(name: str) -> nn.Module:
    """Make an activation module by name."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation is {name!r}; {suggest(name, _ACTIVATIONS)}")
    return _ACTIVATIONS[name]()


def require_image(shape: tuple[int, ...], network: str) -> tuple[int, int, int]:
    """Check that inputs are images and return channels, height and width."""
    if len(shape) != 3:
        raise ValueError(f"shape is {shape}; {network} takes images [channels, height, width]")
    channels, height, width = shape
    return channels, height, width
