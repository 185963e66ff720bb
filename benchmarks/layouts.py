"""One training step of the papers' convolutional networks on a CPU: memory layout, and memory that is kept.

`python -m benchmarks.layouts CASE` prints the seconds of a step in the channels_last layout. A child process does so
with the allocator's variables that workers have.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping

import torch
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from benchmarks.timing import rounds_of, row
from pliant.experiments.engines import ALLOCATOR
from pliant.models import create

CASES = (
    ("cnn", (3, 32, 32), 128),
    ("cnn", (1, 28, 28), 128),
    ("cnn_bn", (3, 32, 32), 128),
    ("cnn_strided", (3, 32, 32), 128),
    ("resnet18", (3, 32, 32), 16),
)


def stepper(name: str, shape: tuple[int, ...], samples: int, layout: torch.memory_format) -> Callable[[], None]:
    """Return a training step: forward, backward, Adam. It starts from the same weights and data in each layout."""
    torch.manual_seed(0)
    x, y = torch.randn(samples, *shape), torch.randint(0, 10, (samples,))
    model = create(name, shape, 10).to(memory_format=layout)
    optimizer = Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        # A sweep's batches arrive in the default layout, so the conversion is part of the step.
        cross_entropy(model(x.contiguous(memory_format=layout)), y).backward()
        optimizer.step()

    return step


def main() -> None:
    """Print the ratios; above 1, channels_last is faster."""
    for name, shape, samples in CASES:
        ratios = []
        for _ in range(3):  # the memory layout changes the time of a step until the network is rebuilt
            contestants = {
                "default": stepper(name, shape, samples, torch.contiguous_format),
                "channels_last": stepper(name, shape, samples, torch.channels_last),
            }
            seconds = rounds_of(contestants, 3 if name == "resnet18" else 25, warmup=2)
            ratios.append(
                statistics.median(a / b for a, b in zip(seconds["default"], seconds["channels_last"], strict=True))
            )
        size = "x".join(map(str, shape))
        row(f"default / channels_last, {name} on {size}, {samples} samples", statistics.median(ratios), "")
        row("  the same, smallest and largest of 3 builds", min(ratios), f"to {max(ratios):.3f}")
    for case, (name, shape, samples) in enumerate(CASES):
        ratios = [seconds_in_child(case, {}) / seconds_in_child(case, ALLOCATOR) for _ in range(3)]
        size = "x".join(map(str, shape))
        row(f"memory returned / kept, {name} on {size}, {samples} samples", statistics.median(ratios), "")
        row("  the same, smallest and largest of 3 pairs", min(ratios), f"to {max(ratios):.3f}")


def seconds_in_child(case: int, variables: Mapping[str, str]) -> float:
    """Return the median seconds of a step in a process that starts with these variables."""
    command = [sys.executable, "-m", "benchmarks.layouts", str(case)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    return float(done.stdout)


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, shape, samples = CASES[int(sys.argv[1])]
    step = stepper(name, shape, samples, torch.channels_last)
    print(statistics.median(rounds_of({"step": step}, 5 if name == "resnet18" else 25)["step"]))
