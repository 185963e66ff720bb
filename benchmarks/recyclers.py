"""What watching units adds to a training step: ReDo between two renewals, and continual backprop at every step."""

import torch
from torch import Tensor

from benchmarks.steps import training_step
from benchmarks.timing import added, over_builds, row
from pliant import models
from pliant.methods import create


def overhead(name: str, batch: Tensor, rounds: int) -> None:
    shape = tuple(batch.shape[1:])
    settings = {
        "redo": {"every": 10**9},
        "redo at work": {"every": 1},
        "continual_backprop": {},
    }

    def measure() -> dict[str, float]:
        plain, _ = training_step(models.create(name, shape, 10), batch)
        contestants = {"plain": plain}
        for label, chosen in settings.items():
            model = models.create(name, shape, 10)
            contestants[label], optimizer = training_step(model, batch)
            create(label.split()[0], model, example=batch[:2], seed=0, **chosen).attach(optimizer)
        return added(contestants, base="plain", rounds=rounds)

    extra = over_builds(measure)
    what = f"{name}, batch {len(batch)}: training step with"
    row(f"{what} ReDo, between two renewals / without", 1 + extra["redo"], "≤ 1.05")
    row(f"{what} ReDo, renewing at every step / without", 1 + extra["redo at work"], "")
    row(f"{what} continual backprop / without", 1 + extra["continual_backprop"], "")


def main() -> None:
    """Print the ratios that the design promises."""
    torch.manual_seed(0)
    overhead("mlp", torch.randn(256, 1, 28, 28), rounds=150)
    overhead("mlp_4x256", torch.randn(256, 1, 28, 28), rounds=60)
    overhead("cnn_bn", torch.randn(64, 3, 32, 32), rounds=10)
