"""Cost of every method with its default settings, as a ratio of a training step: one network, one table."""

from typing import Any

import torch

from benchmarks.resets import METHODS as SETTINGS
from benchmarks.resets import cost
from benchmarks.steps import print_overheads
from pliant.methods import info, names

NETWORK = "mlp_4x256"


def main() -> None:
    """Print what a step with each method costs, then what each method on new data costs, in steps."""
    torch.manual_seed(0)
    batch = torch.randn(256, 1, 28, 28)
    told = [name for name in names() if info(name).needs_telling]
    at_steps: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in names() if name not in told}
    print_overheads(NETWORK, batch, at_steps, rounds=12, builds=5)
    cost(NETWORK, batch, rounds=12, methods={name: SETTINGS.get(name, {}) for name in told})
