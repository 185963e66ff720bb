"""Networks whose condition is known, from fresh to unable to learn: the zoo that calibrates the trial and the signs.

Five architectures in up to eight conditions. The data are the digits: old ones that made the condition, new ones to be
learned, and two held-out parts: one for trials, one for the long runs that tell the truth.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

Pair = tuple[Tensor, Tensor]


class Digits(NamedTuple):
    """Four disjoint parts of the digits."""

    old: Pair
    new: Pair
    trial_test: Pair
    truth_test: Pair


@functools.cache
def digits() -> Digits:
    """Split the digits into 500 old, 500 new, 400 for the trials' tests and 397 for the truth's."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    parts = order.split([500, 500, 400, 397])
    return Digits(*((x[part], y[part]) for part in parts))


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Add the input to the output."""
        return x + self.inner(x)


class Tokens(nn.Module):
    """Rows of an 8 x 8 image as tokens, with a position embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.positions = nn.Embedding(8, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, 8, width]."""
        return self.embed(x.view(-1, 8, 8)) + self.positions(torch.arange(8))


class Mean(nn.Module):
    """Mean over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, width]."""
        return x.mean(1)


def mlp(activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    """Return 64-96-96-10."""
    return nn.Sequential(nn.Linear(64, 96), activation(), nn.Linear(96, 96), activation(), nn.Linear(96, 10))


def cnn() -> nn.Module:
    """Return two convolutions and two linear layers."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 48), nn.ReLU(), nn.Linear(48, 10),
    )  # fmt: skip


def resnet() -> nn.Module:
    """Return a residual block with BatchNorm between a convolution and a linear layer."""
    block = nn.Sequential(nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1),
                          nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1))  # fmt: skip
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 12, 3, padding=1), Residual(block), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(192, 10),
    )  # fmt: skip


def transformer() -> nn.Module:
    """Return an encoder layer over the rows of an image."""
    layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return nn.Sequential(Tokens(24), encoder, Mean(), nn.Linear(24, 10))


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "mlp tanh": functools.partial(mlp, nn.Tanh),
    "cnn": cnn,
    "resnet": resnet,
    "transformer": transformer,
}


def fit(model: nn.Module, data: Pair, epochs: int, lr: float = 1e-3) -> nn.Module:
    """Train with Adam."""
    optimizer = Adam(model.parameters(), lr)
    for _ in range(epochs):
        for index in torch.randperm(len(data[0])).split(64):
            optimizer.zero_grad()
            cross_entropy(model(data[0][index]), data[1][index]).backward()
            optimizer.step()
    return model


def wear(model: nn.Module, old: Pair) -> nn.Module:
    """Train on ten tasks of random labels, one after the other, at a large learning rate."""
    for _ in range(10):
        fit(model, (old[0], torch.randint(10, (len(old[0]),))), 30, lr=1e-2)
    return model


@torch.no_grad()
def change_matrices(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Change every weight as a matrix."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.copy_(change(parameter.flatten(1)).view_as(parameter))
    return model


def collapse(weight: Tensor) -> Tensor:
    """Keep the first singular direction."""
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    return u[:, :1] * s[:1] @ v[:1]


@torch.no_grad()
def kill_units(model: nn.Module, fraction: float) -> nn.Module:
    """Kill most units in front of every ReLU by a large negative bias."""
    found = dict(model.named_modules())
    before = [m for m in found.values() if isinstance(m, nn.BatchNorm2d)]
    before = before or [m for name, m in found.items() if name.endswith("linear1")]
    before = before or [m for m in found.values() if isinstance(m, nn.Linear | nn.Conv2d)][:-1]
    for layer in before:
        layer.bias[: int(fraction * len(layer.bias))] = -1e3
    return model


Condition = Callable[[nn.Module, Pair], nn.Module]

HEALTHY: dict[str, Condition] = {
    "fresh": lambda model, old: model,
    "trained briefly": lambda model, old: fit(model, old, 5),
    "trained long": lambda model, old: fit(model, old, 100),
}
DAMAGED: dict[str, Condition] = {
    "weights x10": lambda model, old: change_matrices(fit(model, old, 20), lambda weight: 10 * weight),
    "rank 1": lambda model, old: change_matrices(fit(model, old, 20), collapse),
    "random labels": wear,
    "95 % of units dead": lambda model, old: kill_units(fit(model, old, 20), 0.95),
}
SATURATED: dict[str, Condition] = {
    "saturated tanh": lambda model, old: change_matrices(fit(model, old, 20), lambda weight: 30 * weight)
}


def conditions(architecture: str) -> dict[str, Condition]:
    """Return the conditions in which an architecture is in the zoo, healthy ones first."""
    if architecture == "mlp tanh":  # tanh units do not die
        return HEALTHY | {name: make for name, make in DAMAGED.items() if "dead" not in name} | SATURATED
    return HEALTHY | DAMAGED


def make_network(architecture: str, condition: str, seed: int) -> nn.Module:
    """Return a network of the zoo."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return conditions(architecture)[condition](ARCHITECTURES[architecture](), digits().old)
