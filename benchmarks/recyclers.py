"""What watching units adds to a training step: ReDo between two renewals, and continual backprop at every step."""

import torch
from torch import Tensor

from benchmarks.steps import added_by_methods
from benchmarks.timing import row

METHODS = {
    "ReDo, between two renewals": ("redo", {"every": 10**9}),
    "ReDo, renewing at every step": ("redo", {"every": 1}),
    "continual backprop": ("continual_backprop", {}),
}
LIMITS = {"ReDo, between two renewals": "≤ 1.05"}


def overhead(name: str, batch: Tensor, rounds: int) -> None:
    for label, extra in added_by_methods(name, batch, METHODS, rounds).items():
        row(f"{name}, batch {len(batch)}: training step with {label} / without", 1 + extra, LIMITS.get(label, ""))


def main() -> None:
    """Print the ratios that the design promises."""
    torch.manual_seed(0)
    overhead("mlp", torch.randn(256, 1, 28, 28), rounds=150)
    overhead("mlp_4x256", torch.randn(256, 1, 28, 28), rounds=60)
    overhead("cnn_bn", torch.randn(64, 3, 32, 32), rounds=10)
