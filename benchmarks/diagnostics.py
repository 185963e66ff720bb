"""What the diagnostics cost: against `torch.func.vmap(grad)` in time and memory, and in training as a monitor."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from benchmarks.timing import rounds_of, row
from pliant import Monitor
from pliant.diagnostics.batches import Batch
from pliant.diagnostics.gram import gradient_gram
from pliant.models import create, mlp

BUILDS = 3
"""How many times the networks of a comparison are made anew."""


def by_vmap(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the inner products of per-sample gradients the way that holds all of them."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def loss(p: dict[str, Tensor], xi: Tensor, yi: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, (p, buffers), (xi[None],)), yi[None])

    gradients = vmap(grad(loss), (None, 0, 0))(parameters, x, y)
    return torch.stack([g.flatten(1) @ g.flatten(1).T for g in gradients.values()]).sum(0)


def against_vmap(what: str, model: nn.Module, shape: tuple[int, ...], rounds: int, limit: str, samples: int) -> None:
    model.eval()
    x, y = torch.randn(samples, *shape), torch.randint(0, 10, (samples,))
    ours, theirs = gradient_gram(model, Batch.of((x, y)), cross_entropy).total, by_vmap(model, x, y).detach()
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-4
    contestants: dict[str, Callable[[], object]] = {
        "gram": lambda: gradient_gram(model, Batch.of((x, y)), cross_entropy),
        "vmap": lambda: by_vmap(model, x, y),
    }
    seconds = rounds_of(contestants, rounds, warmup=1)
    ratio = statistics.median(v / g for v, g in zip(seconds["vmap"], seconds["gram"], strict=True))
    row(f"vmap(grad) / Gram by layers, {what}, {samples} samples", ratio, limit)


def peak_of_resnet(samples: int) -> float:
    """Return the GiB that the inner products of a ResNet-18 take above model and data, in a process of their own."""
    code = f"from benchmarks import diagnostics; print(diagnostics.resnet_peak({samples}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def resnet_peak(samples: int) -> float:
    torch.set_num_threads(1)
    model = create("resnet18", (3, 32, 32), 10).eval()
    batch = Batch.of((torch.randn(samples, 3, 32, 32), torch.randint(0, 10, (samples,))))
    with torch.no_grad():
        batch.select(slice(0, 2)).forward(model)  # libraries allocate their own at the first call
    before = high_water()
    gradient_gram(model, batch, cross_entropy)
    return high_water() - before


def high_water() -> float:
    """Return the most GiB that this process has held; `getrusage` would tell its parent's, if that held more."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**20


def monitored(what: str, name: str, shape: tuple[int, ...], turns: int, measures: list[str] | None) -> None:
    """Compare training with a monitor and without, in turns of 100 steps.

    Of the steps at which nothing is measured the median counts, of the others, which are rare, the sum; all in
    processor time. There are several builds, since where the allocator puts a network moves its steps by some per cent,
    and in each enough turns for the first measurement, which is taken at once, to be paid for.
    """
    x, y = torch.randn(256, *shape), torch.randint(0, 10, (256,))
    ratios, chances, shares, counts = [], [], [], []
    for _ in range(BUILDS):
        networks = {which: create(name, shape, 10) for which in ("plain", "twin", "watched")}
        optimizers = {which: Adam(network.parameters()) for which, network in networks.items()}
        monitor = Monitor(
            networks["watched"],
            optimizers["watched"],
            every=10,
            measures=measures,
            probe=(x, y),
            loss_fn=cross_entropy,
        )
        spent: dict[str, list[float]] = {which: [] for which in networks}
        for _ in range(turns):
            for which, network in networks.items():
                for _ in range(100):
                    start = time.process_time()
                    optimizers[which].zero_grad()
                    cross_entropy(network(x), y).backward()
                    optimizers[which].step()
                    spent[which].append(time.process_time() - start)
        measured = {record.step for record in monitor.records}
        idle = statistics.median(t for step, t in enumerate(spent["watched"]) if step not in measured)
        extra = sum(spent["watched"][step] - idle for step in measured) / (100 * turns)
        plain = statistics.median(spent["plain"])
        ratios.append((idle + extra) / plain)
        chances.append(statistics.median(spent["twin"]) / plain)
        shares.append(monitor.share)
        counts.append(len(measured) / turns)
    row(f"training with a monitor / without, {what}", statistics.median(ratios), "≤ 1.03")
    row("    the same without a monitor in either: what chance does", statistics.median(chances), "")
    row("    the share that it says it spent", statistics.median(shares), "≤ 0.03")
    row("    measurements in 100 steps (10 asked for)", statistics.median(counts), "")


def main() -> None:
    """Print the ratios that the design promises."""
    torch.manual_seed(0)
    against_vmap("MLP of width 1 000", mlp((784,), 10, widths=(1000, 1000, 1000)), (784,), 3, "≥ 3", 256)
    against_vmap("CNN, 2 convolutions", create("cnn", (3, 32, 32), 10), (3, 32, 32), 9, "≥ 1", 256)
    against_vmap("CNN, 4 strided convolutions", create("cnn_strided", (3, 32, 32), 10), (3, 32, 32), 9, "≥ 1", 256)
    against_vmap("ResNet-18", create("resnet18", (3, 32, 32), 10), (3, 32, 32), 3, "≥ 1", 16)
    row("ResNet-18, 256 samples: peak memory above the model, GiB", peak_of_resnet(256), "≤ 2")
    monitored("MLP-3×256, cheap measures", "mlp_3x256", (1, 28, 28), 6, None)
    costly = ["weight_l2", "spectral_norm", "feature_rank", "dormant_fraction", "hessian_rank", "sharpness"]
    monitored("MLP-3×256, with Hessian rank and sharpness", "mlp_3x256", (1, 28, 28), 24, costly)
