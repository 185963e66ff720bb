"""Multilayer perceptrons of the soft weight rescaling, spectral regularization and curvature papers."""

from collections.abc import Sequence
from math import prod

from torch import nn

from pliant.models.layers import activation as make_activation
from pliant.models.layers import initialise_


def mlp(
    shape: tuple[int, ...],
    classes: int,
    *,
    widths: Sequence[int] = (100, 100),
    activation: str = "relu",
    layer_norm: bool = False,
    initial: str = "torch",
) -> nn.Sequential:
    """Build a multilayer perceptron.

    The default is the one of the soft weight rescaling paper, appendix D.1: "3-layer MLP with 100 hidden
    units", read as three weight layers.

    Args:
        shape: Shape of one input, which is flattened.
        classes: Number of outputs.
        widths: Width of each hidden layer.
        activation: relu, leaky_relu, tanh, gelu or identity.
        layer_norm: Whether a LayerNorm stands between every hidden linear map and its activation.
        initial: How weights are drawn: as PyTorch does it, or "he" or "xavier" with biases of zero. Methods that
            re-draw weights do it as PyTorch does, unless they are given an `init`.

    Returns:
        The network.

    Example:
        >>> sum(p.numel() for p in mlp((1, 28, 28), 10).parameters())
        89610
    """
    layers: list[nn.Module] = [nn.Flatten()]
    inputs = prod(shape)
    for width in widths:
        layers.append(nn.Linear(inputs, width))
        if layer_norm:
            layers.append(nn.LayerNorm(width))
        layers.append(make_activation(activation))
        inputs = width
    model = nn.Sequential(*layers, nn.Linear(inputs, classes))
    initialise_(model, initial)
    return model
