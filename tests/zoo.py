"""Small models of every shape that a method must cope with, and one batch of data for each."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pliant import models

REQUIRED = {"feature_rank": {"lam": 1e-4}}
"""Settings of methods that have no default."""


class TiedMLP(nn.Module):
    """The output layer reads with the transpose of what the input layer writes with: one weight, two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(12, 12)
        self.middle = nn.Linear(12, 12)
        self.decode = nn.Linear(12, 12)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.relu(self.middle(torch.relu(self.encode(x)))))


class TwinCritics(nn.Module):
    """Two networks side by side, as in SAC."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


class SharedActor(nn.Module):
    """An actor whose mean and deviation read the same features, detached."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        self.mean, self.deviation = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.relu_(self.body(x)).detach()
        return self.mean(features), self.deviation(features)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3), nn.LeakyReLU(0.1), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5),
    )  # fmt: skip


def cnn_bn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5),
    )  # fmt: skip


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 1
    for width in (4, 4, "pool", 6, 6, "pool", 8, "pool"):
        if width == "pool":
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        else:
            assert isinstance(width, int)
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.0)]
    return nn.Sequential(*layers, nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))


def resnet18() -> nn.Module:
    return models.resnet18((1, 12, 12), 5, width=4)


def vit_tiny() -> nn.Module:
    return models.vit_tiny((1, 12, 12), 5, patch=4, width=12, depth=2, heads=3)


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn, "cnn_bn": cnn_bn, "vgg": vgg, "tied": TiedMLP}
PAPER_MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp, "cnn_bn": cnn_bn, "resnet18": resnet18, "vit_tiny": vit_tiny,
}  # fmt: skip
"""The four families that each method is compared with its reference on; the larger two are narrow."""


def build(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a seeded model; the same seed gives the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return (MODELS | PAPER_MODELS)[name]().to(dtype)


def batch(name: str, *, seed: int = 1, size: int = 8, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return inputs and class labels that fit the model."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size, 12) if name in ("mlp", "tied") else (size, 1, 12, 12)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(0, 5, (size,), generator=generator)
