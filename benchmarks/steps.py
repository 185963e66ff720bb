"""A training step to be timed."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam


def training_step(
    model: nn.Module, batch: Tensor, term: Callable[[], Tensor] | None = None, *, fused: bool = False
) -> tuple[Callable[[], None], Adam]:
    """Make a step of Adam on ten classes.

    Args:
        model: The network.
        batch: The inputs of every step.
        term: What is added to the loss; nothing if None.
        fused: Whether Adam is the fused one.

    Returns:
        What does a step, and the optimizer.
    """
    labels = torch.randint(0, 10, (len(batch),), generator=torch.Generator().manual_seed(0))
    optimizer = Adam(model.parameters(), lr=1e-3, fused=fused)

    def step() -> None:
        optimizer.zero_grad()
        loss = cross_entropy(model(batch), labels)
        if term is not None:
            loss = loss + term()
        loss.backward()
        optimizer.step()

    return step, optimizer
