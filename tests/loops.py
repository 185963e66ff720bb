"""The plain training loop that the tests attach methods to."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam, Optimizer

from pliant import Method
from tests import zoo


def train(
    model: nn.Module,
    optimizer: Optimizer,
    name: str,
    steps: Sequence[int],
    *,
    methods: Sequence[Method] = (),
    new_data_at: int | None = None,
) -> None:
    """Train on one seeded batch a step; reinitializers among the methods act before the step `new_data_at`."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        inputs, labels = zoo.batch(name, seed=100 + step, dtype=dtype)
        if step == new_data_at:
            for method in methods:
                if method.acts_on_new_data:
                    method.apply(optimizer, batches=[(inputs, labels)], loss_fn=cross_entropy)
        training_step(model, optimizer, (inputs, labels))


def training_step(model: nn.Module, optimizer: Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Train on one batch."""
    optimizer.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def steady_adam(model: nn.Module, lr: float = 1e-2) -> Adam:
    """Return an Adam whose steps do not depend on rounding, for runs that are compared with a tolerance.

    The gradient of a bias before BatchNorm, and of the bias of attention's keys, is zero up to rounding, which
    differs between processors. With Adam's default `eps` of 1e-8 it would become steps above the tolerance.
    """
    return Adam(model.parameters(), lr=lr, eps=1e-4)


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters and buffers."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Assert that two snapshots are equal to the last bit."""
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def differs(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Return whether two snapshots differ in a tensor that both have."""
    return any(not torch.equal(left[name], right[name]) for name in left if name in right)
