"""VGG-16 of the soft weight rescaling and FIRE papers."""

from torch import nn

from pliant.models.layers import require_image

_CHANNELS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(shape: tuple[int, ...], classes: int, *, width: int = 4096, batch_norm: bool = True) -> nn.Sequential:
    """Build VGG-16 with a classifier of 4096 units and no dropout.

    The soft weight rescaling paper sweeps its two strengths apart only for networks with norm layers, and
    does so for VGG-16: so BatchNorm is on. The classifier takes what five poolings leave of the image, 2 x
    2 of 64 x 64.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of outputs.
        width: Units of the two hidden fully connected layers.
        batch_norm: Whether a BatchNorm follows every convolution.

    Returns:
        The network.
    """
    inputs, height, wide = require_image(shape, "VGG-16")
    layers: list[nn.Module] = []
    for stage in _CHANNELS:
        for outputs in stage:
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
