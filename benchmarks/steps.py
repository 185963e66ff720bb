"""A training step to time, and the cost of methods in it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from benchmarks.timing import added, over_builds, row
from pliant import models
from pliant.methods import create


def training_step(
    model: nn.Module, batch: Tensor, term: Callable[[], Tensor] | None = None, *, fused: bool = False
) -> tuple[Callable[[], None], Adam]:
    """Make a step of Adam on ten classes.

    Args:
        model: The network.
        batch: The inputs of every step.
        term: A term to add to the loss.
        fused: Whether Adam is fused.

    Returns:
        The function that does a step, and the optimizer.
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


def print_overheads(
    model_name: str,
    batch: Tensor,
    methods: Mapping[str, tuple[str, Mapping[str, Any]]],
    rounds: int,
    limits: Mapping[str, str] = MappingProxyType({}),
    builds: int = 9,
) -> None:
    """Print the time of a training step with each method, relative to the step without it.

    Args:
        model_name: The network, one of `models.names()`.
        batch: The inputs of every step.
        methods: The method and its settings for each label.
        rounds: Timed steps for every build of the networks.
        limits: The limit of a label's ratio.
        builds: How often the networks are built anew.
    """
    shape = tuple(batch.shape[1:])

    def measure() -> dict[str, float]:
        plain, _ = training_step(models.create(model_name, shape, 10), batch)
        contestants = {"plain": plain}
        for label, (method, settings) in methods.items():
            model = models.create(model_name, shape, 10)
            made = create(method, model, example=batch[:2], seed=0, **settings)  # it may change the architecture
            contestants[label], optimizer = training_step(model, batch)
            made.attach(optimizer)
        return added(contestants, base="plain", rounds=rounds)

    for label, extra in over_builds(measure, builds).items():
        what = f"{model_name}, batch {len(batch)}: training step with {label} / without"
        row(what, 1 + extra, limits.get(label, ""))
