"""VGG-16 of the soft weight rescaling and FIRE papers."""

from torch import nn

from pliant.models.building_blocks import require_image

_STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""Of each: how many times as many channels as the first stage, and how many convolutions."""


def vgg16(
    shape: tuple[int, ...], classes: int, *, width: int = 4096, channels: int = 64, batch_norm: bool = True
) -> nn.Sequential:
    """Build VGG-16 with a classifier of 4096 units and no dropout.

    The soft weight rescaling paper sweeps its two strengths apart only for networks with norm layers, and
    does so for VGG-16: so BatchNorm is on. The classifier takes what five poolings leave of the image, 2 x
    2 of 64 x 64.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of outputs.
        width: Units of the two hidden fully connected layers.
        channels: Channels of the first stage; the later ones have 2, 4, 8 and 8 times as many.
        batch_norm: Whether a BatchNorm follows every convolution.

    Returns:
        The network.
    """
    inputs, height, wide = require_image(shape, "VGG-16")
    layers: list[nn.Module] = []
    for times, convolutions in _STAGES:
        outputs = times * channels
        for _ in range(convolutions):
            layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(outputs))
            layers.append(nn.ReLU())
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
        height, wide = height // 2, wide // 2
    if not height * wide:
        raise ValueError(f"shape is {shape}; VGG-16 needs images of at least 32 x 32 pixels")
    layers += [nn.Flatten(), nn.Linear(inputs * height * wide, width), nn.ReLU()]
    layers += [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)]
    return nn.Sequential(*layers)
