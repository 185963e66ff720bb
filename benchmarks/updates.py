"""What the methods add to a step that rewrite weights around it: clipping, rescaling, UPGD, averaging."""

import torch
from torch import Tensor

from benchmarks.steps import added_by_methods
from benchmarks.timing import row

METHODS = {
    "weight clipping": ("weight_clipping", {}),
    "weight rescaling, at every step": ("weight_rescaling", {"every": 1}),
    "UPGD": ("upgd", {}),
    "Hare & Tortoise": ("hare_tortoise", {}),
}


def overhead(name: str, batch: Tensor, rounds: int) -> None:
    for label, extra in added_by_methods(name, batch, METHODS, rounds).items():
        row(f"{name}, batch {len(batch)}: training step with {label} / without", 1 + extra, "")


def main() -> None:
    """Print a table for small networks, where whatever is done per weight counts most."""
    torch.manual_seed(0)
    overhead("mlp", torch.randn(256, 1, 28, 28), rounds=100)
    overhead("mlp_4x256", torch.randn(256, 1, 28, 28), rounds=40)
    overhead("cnn_bn", torch.randn(64, 3, 32, 32), rounds=10)
