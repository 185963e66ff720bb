"""The VGG-16 of the soft weight rescaling and FIRE papers."""

from torch import nn

from pliant.models.building_blocks import require_image

_STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""Channels relative to the first stage and number of convolutions of each stage."""


def vgg16(
    shape: tuple[int, ...], classes: int, *, width: int = 4096, channels: int = 64, batch_norm: bool = True
) -> nn.Sequential:
    """Build VGG-16 with a classifier of 4096 units and no dropout.

    BatchNorm is on because the soft weight rescaling paper tunes two strengths for VGG-16, as it does only for networks
    with norm layers. Five poolings reduce 64 x 64 images to 2 x 2 before the classifier.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of outputs.
        width: Units of the two hidden fully connected layers.
        channels: Channels of the first stage; later stages have 2, 4, 8 and 8 times as many.
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
