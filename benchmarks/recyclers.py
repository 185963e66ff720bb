"""Cost of watching units in a training step: ReDo between two renewals, continual backprop at every step."""

import torch

from benchmarks.steps import print_overheads

METHODS = {
    "ReDo, between two renewals": ("redo", {"every": 10**9}),
    "ReDo, renewing at every step": ("redo", {"every": 1}),
    "continual backprop": ("continual_backprop", {}),
}
LIMITS = {"ReDo, between two renewals": "≤ 1.05"}


def main() -> None:
    """Print the ratios of the design's limits."""
    torch.manual_seed(0)
    print_overheads("mlp", torch.randn(256, 1, 28, 28), METHODS, rounds=150, limits=LIMITS)
    print_overheads("mlp_4x256", torch.randn(256, 1, 28, 28), METHODS, rounds=60, limits=LIMITS)
    print_overheads("cnn_bn", torch.randn(64, 3, 32, 32), METHODS, rounds=10, limits=LIMITS)
