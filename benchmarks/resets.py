"""Cost of methods that act when data is new, in training steps; for FIRE see `fire.py`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.steps import training_step
from benchmarks.timing import medians, row
from pliant import models
from pliant.methods import create

METHODS: dict[str, dict[str, Any]] = {
    "shrink": {},
    "shrink_perturb": {"toward": "fresh"},  # Toward the initial weights, repeated calls would soon change nothing.
    "layerwise": {},
    "head_reset": {},
    "full_reset": {},
    "dash": {},
}


def cost(name: str, batch: Tensor, rounds: int, methods: Mapping[str, Mapping[str, Any]] = METHODS) -> None:
    shape = tuple(batch.shape[1:])
    data = [(batch, torch.arange(len(batch)) % 10)]
    contestants = {"step": training_step(models.create(name, shape, 10), batch)[0]}
    steps = {}
    for method, settings in methods.items():
        model = models.create(name, shape, 10)
        # A step before every action gives the optimizer moments, which resets must clear.
        steps[method], optimizer = training_step(model, batch)
        made = create(method, model, example=batch[:2], seed=0, **settings)
        contestants[method] = lambda made=made, optimizer=optimizer: made.apply(
            optimizer, batches=data, loss_fn=cross_entropy
        )
    times = medians(contestants, rounds=rounds, prepare=steps)
    for method in methods:
        given = " with one batch" if method == "dash" else ""
        row(f"{name}, batch {len(batch)}: {method}{given} / a training step", times[method] / times["step"], "")


def main() -> None:
    """Print a table: an MLP, where a step is short, and a ResNet-18."""
    torch.manual_seed(0)
    cost("mlp_4x256", torch.randn(256, 1, 28, 28), rounds=40)
    cost("resnet18", torch.randn(64, 3, 32, 32), rounds=3)
