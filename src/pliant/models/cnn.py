"""The CNNs of the soft weight rescaling and curvature papers."""

from collections.abc import Sequence

from torch import nn

from pliant.models.building_blocks import activation as make_activation
from pliant.models.building_blocks import require_image


def cnn(
    shape: tuple[int, ...],
    classes: int,
    *,
    channels: Sequence[int] = (16, 16),
    width: int = 100,
    batch_norm: bool = False,
) -> nn.Sequential:
    """Build the CNN of the soft weight rescaling paper, appendix D.1.

    Two 5 x 5 convolutions with 16 channels, then a fully connected layer with 100 units and the output. The paper
    gives neither padding nor pooling. Here convolutions keep the size and 2 x 2 max pooling halves it, which allows
    images down to 4 x 4.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of outputs.
        channels: Channels of each convolution.
        width: Units of the hidden fully connected layer.
        batch_norm: Whether a BatchNorm follows every convolution (the paper's CNN-BN).

    Returns:
        The network.

    Example:
        >>> sum(p.numel() for p in cnn((3, 32, 32), 10).parameters())
        111142
    """
    inputs, height, wide = require_image(shape, "a CNN")
    layers: list[nn.Module] = []
    for outputs in channels:
        layers.append(nn.Conv2d(inputs, outputs, 5, padding=2))
        if batch_norm:
            layers.append(nn.BatchNorm2d(outputs))
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        inputs, height, wide = outputs, height // 2, wide // 2
    if not height * wide:
        raise ValueError(
            f"shape is {shape}; {len(channels)} poolings need images of at least {2 ** len(channels)} pixels"
        )
    layers += [nn.Flatten(), nn.Linear(inputs * height * wide, width), nn.ReLU(), nn.Linear(width, classes)]
    return nn.Sequential(*layers)


def strided_cnn(
    shape: tuple[int, ...],
    classes: int,
    *,
    channels: Sequence[int] = (16, 32, 64, 128),
    width: int = 512,
    activation: str = "leaky_relu",
) -> nn.Sequential:
    """Build the CNN of the curvature paper, appendix B.3: four convolutions with stride 2, then 512 units.

    The paper gives no kernel size. Here it is 3 x 3 with padding 1, which halves the size exactly.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of outputs.
        channels: Channels of each convolution.
        width: Units of the hidden fully connected layer.
        activation: relu, leaky_relu, tanh, gelu or identity.

    Returns:
        The network.
    """
    inputs, height, wide = require_image(shape, "a CNN")
    layers: list[nn.Module] = []
    for outputs in channels:
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), make_activation(activation)]
        inputs, height, wide = outputs, (height + 1) // 2, (wide + 1) // 2
    layers += [nn.Flatten(), nn.Linear(inputs * height * wide, width), make_activation(activation)]
    return nn.Sequential(*layers, nn.Linear(width, classes))
