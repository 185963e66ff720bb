"""Cost of the diagnostics: time and memory against `torch.func.vmap(grad)`, and training with a monitor."""

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
from pliant.diagnostics.per_sample.gradient_gram import gradient_gram
from pliant.models import create, mlp


def by_vmap(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the inner products of per-sample gradients by holding all gradients in memory."""
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
    """Return the peak GiB of the inner products of a ResNet-18, without model and data, in a separate process."""
    code = f"from benchmarks import diagnostics; print(diagnostics.resnet_peak({samples}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def resnet_peak(samples: int) -> float:
    torch.set_num_threads(1)
    model = create("resnet18", (3, 32, 32), 10).eval()
    batch = Batch.of((torch.randn(samples, 3, 32, 32), torch.randint(0, 10, (samples,))))
    with torch.no_grad():
        batch.select(slice(0, 2)).forward(model)  # Libraries allocate memory at the first call.
    before = high_water()
    gradient_gram(model, batch, cross_entropy)
    return high_water() - before


def high_water() -> float:
    """Return the peak GiB of this process; `getrusage` would return the parent's peak if that was higher."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**20


def monitored(what: str, name: str, shape: tuple[int, ...], turns: int, measures: list[str] | None) -> None:
    """Compare training with and without a monitor: one network, in turns of 100 steps, the monitor attached or not.

    It is the same network because the memory layout changes the time of a step by some percent. Measurements are rare,
    so their cost is summed and added to the median step without one. Times are processor times. There are enough turns
    to amortize the first measurement, which is taken at once.
    """
    x, y = torch.randn(256, *shape), torch.randint(0, 10, (256,))
    network = create(name, shape, 10)
    optimizer = Adam(network.parameters())
    monitor = Monitor(network, optimizer, every=10, measures=measures, probe=(x, y), loss_fn=cross_entropy)

    def train() -> list[float]:
        seconds = []
        for _ in range(100):
            start = time.process_time()
            optimizer.zero_grad()
            cross_entropy(network(x), y).backward()
            optimizer.step()
            seconds.append(time.process_time() - start)
        return seconds

    watched: list[float] = []
    plain: list[float] = []
    twin: list[float] = []
    for _ in range(turns):
        watched += train()
        monitor.detach()
        plain += train()
        twin += train()
        monitor.attach(optimizer)
    measured = {record.step for record in monitor.records}
    idle = statistics.median(seconds for step, seconds in enumerate(watched) if step not in measured)
    extra = sum(watched[step] - idle for step in measured) / len(watched)
    usual = statistics.median(plain)
    row(f"training with a monitor / without its measurements, {what}", (idle + extra) / idle, "≤ 1.03")
    row("    steps between two measurements / without a monitor", idle / usual, "")
    row("    steps without a monitor / other steps without one (noise)", statistics.median(twin) / usual, "")
    row("    the share of time that it reports", monitor.share, "≤ 0.03")
    row("    measurements in 100 steps (10 requested)", len(measured) / turns, "")


def main() -> None:
    """Print the ratios of the design's limits."""
    torch.manual_seed(0)
    against_vmap("MLP of width 1 000", mlp((784,), 10, widths=(1000, 1000, 1000)), (784,), 3, "≥ 3", 256)
    against_vmap("CNN, 2 convolutions", create("cnn", (3, 32, 32), 10), (3, 32, 32), 9, "≥ 1", 256)
    against_vmap("CNN, 4 strided convolutions", create("cnn_strided", (3, 32, 32), 10), (3, 32, 32), 9, "≥ 1", 256)
    against_vmap("ResNet-18", create("resnet18", (3, 32, 32), 10), (3, 32, 32), 3, "≥ 1", 16)
    row("ResNet-18, 256 samples: peak memory above the model, GiB", peak_of_resnet(256), "≤ 2")
    monitored("MLP-3×256, cheap measures", "mlp_3x256", (1, 28, 28), 24, None)
    costly = ["weight_l2", "spectral_norm", "feature_rank", "dormant_fraction", "hessian_rank", "sharpness"]
    monitored("MLP-3×256, with Hessian rank and sharpness", "mlp_3x256", (1, 28, 28), 24, costly)
