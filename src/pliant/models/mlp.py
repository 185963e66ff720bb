"""The MLPs of the soft weight rescaling, spectral regularization and curvature papers."""

from collections.abc import Sequence
from math import prod
from typing import cast

from torch import Tensor, nn

from pliant.models.building_blocks import Linear, initialize_
from pliant.models.building_blocks import activation as make_activation


class Shortcut(nn.Module):
    """Adds its input to the output of its layers.

    Args:
        layers: The layers, which keep the width.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers and add the input."""
        return x + cast(Tensor, self.layers(x))


def mlp(
    shape: tuple[int, ...],
    classes: int,
    *,
    widths: Sequence[int] = (100, 100),
    activation: str = "relu",
    layer_norm: bool = False,
    residual: bool = False,
    initial: str = "torch",
) -> nn.Sequential:
    """Build a multilayer perceptron.

    The default is the network of the soft weight rescaling paper, appendix D.1: "3-layer MLP with 100 hidden units",
    read as three weight layers.

    Args:
        shape: Shape of one input, which is flattened.
        classes: Number of outputs.
        widths: Width of each hidden layer.
        activation: relu, leaky_relu, tanh, gelu or identity.
        layer_norm: Whether a LayerNorm precedes every activation.
        residual: Whether a shortcut goes around every hidden layer that keeps the width.
        initial: Initialization: PyTorch's ("torch"), or "he" or "xavier" with biases of zero. Methods that reinitialize
            weights use it too.

    Returns:
        The network.

    Example:
        >>> sum(p.numel() for p in mlp((1, 28, 28), 10).parameters())
        89610
    """
    layers: list[nn.Module] = [nn.Flatten()]
    inputs = prod(shape)
    linear = nn.Linear if initial == "torch" else Linear
    for width in widths:
        hidden = [linear(inputs, width), *([nn.LayerNorm(width)] if layer_norm else []), make_activation(activation)]
        layers += [Shortcut(*hidden)] if residual and inputs == width else hidden
        inputs = width
    model = nn.Sequential(*layers, linear(inputs, classes))
    initialize_(model, initial)
    return model
