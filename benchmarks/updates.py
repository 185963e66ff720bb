"""Cost of methods that rewrite weights at every step: clipping, rescaling, UPGD, averaging."""

import torch

from benchmarks.steps import print_overheads

METHODS = {
    "weight clipping": ("weight_clipping", {}),
    "weight rescaling, at every step": ("weight_rescaling", {"every": 1}),
    "UPGD": ("upgd", {}),
    "Hare & Tortoise": ("hare_tortoise", {}),
}


def main() -> None:
    """Print a table for small networks, where work per weight matters most."""
    torch.manual_seed(0)
    print_overheads("mlp", torch.randn(256, 1, 28, 28), METHODS, rounds=100)
    print_overheads("mlp_4x256", torch.randn(256, 1, 28, 28), METHODS, rounds=40)
    print_overheads("cnn_bn", torch.randn(64, 3, 32, 32), METHODS, rounds=10)
