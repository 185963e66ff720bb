"""The ResNet-18 for small images of the spectral regularization, curvature and FIRE papers."""

from typing import cast

from torch import Tensor, nn

from pliant.models.building_blocks import require_image


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut around them.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        stride: Stride of the first convolution and of the shortcut.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        # Modules, not functions, so that CReLU can replace them.
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y = self.relu1(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y)) + self.shortcut(x)
        return cast(Tensor, self.relu2(y))


def resnet18(shape: tuple[int, ...], classes: int, *, width: int = 64) -> nn.Sequential:
    """Build ResNet-18 for small images: the stem is a 3 x 3 convolution with stride 1, without pooling.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of outputs.
        width: Channels of the first stage; each later stage doubles them.

    Returns:
        The network.

    Example:
        >>> sum(p.numel() for p in resnet18((3, 32, 32), 10).parameters())
        11173962
    """
    inputs, _, _ = require_image(shape, "ResNet-18")
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    channels = width
    for stage in range(4):
        outputs = width * 2**stage
        layers.append(BasicBlock(channels, outputs, stride=1 if stage == 0 else 2))
        layers.append(BasicBlock(outputs, outputs, stride=1))
        channels = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)
