"""Training with a penalty as a term of the loss: the trajectory that its closed form must reproduce."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from tests import zoo
from tests.loops import steady_adam

STEPS = {"mlp": 110, "cnn": 110, "cnn_bn": 110, "vgg": 110, "tied": 110, "resnet18": 25, "vit_tiny": 25}
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.02),
    "adam": lambda model: steady_adam(model, lr=1e-3),
}


def train_with_term(model: nn.Module, name: str, optimizer: Optimizer, term: Callable[[nn.Module], Tensor]) -> None:
    """Train for STEPS[name] steps as `tests.loops.train` does, with a term added to the loss."""
    for step in range(STEPS[name]):
        inputs, labels = zoo.batch(name, seed=100 + step)
        optimizer.zero_grad()
        (cross_entropy(model(inputs), labels) + term(model)).backward()
        optimizer.step()


def assert_close(left: nn.Module, right: nn.Module, *, rtol: float = 1e-8, atol: float = 1e-10) -> None:
    """Assert that two models have the same parameters and buffers up to the rounding of float64."""
    for (key, mine), other in zip(left.state_dict().items(), right.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=atol, msg=lambda text, key=key: f"{key}: {text}")
