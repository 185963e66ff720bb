"""Does the rank of the empirical Fisher follow that of the Hessian?

Curvature §4.2 and C.2, figures 3 and 10 to 12.

A network of 3 × 32 units learns random labels of 1 280 MNIST images that a random projection took to 36 dimensions,
task after task. At the first step of every task, on its first batch, the effective rank of the exact Hessian is
compared with those of three approximations. What was measured is kept in `results/hessian_rank.jsonl`, one line a
task; a run goes on after the last.

    python -m benchmarks.hessian_rank            # measure what is missing, then print the tables
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from pliant import data
from pliant.diagnostics import curvature
from pliant.diagnostics.batches import Batch
from pliant.diagnostics.spectra import srank
from pliant.models import create
from pliant.seeding import generator, permutation

RESULTS = Path(__file__).parent / "results" / "hessian_rank.jsonl"
ACTIVATIONS = ("relu", "leaky_relu")
APPROXIMATIONS = ("gauss_newton", "fisher", "empirical_fisher")
SEEDS, TASKS, EPOCHS, BATCH, INPUTS, CLASSES = 3, 15, 200, 256, 36, 10


def tasks(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Give the projected images with the labels of one task after the other."""
    images, _ = data.load("mnist", first=1280).train.batch(torch.arange(1280))
    projection = torch.randn(images[0].numel(), INPUTS, generator=generator("projection", seed))
    x = images.flatten(1) @ projection / images[0].numel() ** 0.5
    for task in range(TASKS):
        yield x, torch.randint(0, CLASSES, (len(x),), generator=generator("labels", seed, task))


def ranks(model: nn.Module, batch: Batch) -> dict[str, int]:
    """Return the effective ranks of the Hessian and of its approximations."""
    gradients = curvature.sample_gradients(model, batch, cross_entropy)
    matrices = {
        "hessian": curvature.hessian(model, batch, cross_entropy),
        "gauss_newton": curvature.gauss_newton(model, batch, cross_entropy),
        "fisher": curvature.fisher(model, batch),
        "empirical_fisher": gradients @ gradients.T,  # GᵀG has the eigenvalues of GGᵀ
    }
    return {name: srank(torch.linalg.eigvalsh(matrix).abs()) for name, matrix in matrices.items()}


def train(activation: str, seed: int, kept: dict[tuple[str, int, int], dict[str, float]]) -> None:
    """Learn all tasks, and measure at the start of those that were not measured before."""
    model = create("mlp", (INPUTS,), CLASSES, seed=seed, widths=(32, 32, 32), activation=activation)
    optimizer = Adam(model.parameters())
    for task, (x, y) in enumerate(tasks(seed)):
        for epoch in range(EPOCHS):
            for step, index in enumerate(permutation(len(x), "order", seed, task, epoch).split(BATCH)):
                if epoch == step == 0 and (activation, seed, task) not in kept:
                    found: dict[str, float] = dict(ranks(model, Batch.of((x[index], y[index]))))
                    kept[activation, seed, task] = found
                optimizer.zero_grad()
                cross_entropy(model(x[index]), y[index]).backward()
                optimizer.step()
        with torch.no_grad():
            error = float((model(x).argmax(1) != y).double().mean())
        if "error" not in kept[activation, seed, task]:
            kept[activation, seed, task]["error"] = error
            line = {"activation": activation, "seed": seed, "task": task, **kept[activation, seed, task]}
            with RESULTS.open("a") as file:
                file.write(json.dumps(line) + "\n")


def load() -> dict[tuple[str, int, int], dict[str, float]]:
    """Return what was measured before."""
    lines = map(json.loads, RESULTS.read_text().splitlines()) if RESULTS.exists() else ()
    return {(line.pop("activation"), line.pop("seed"), line.pop("task")): line for line in lines}


def correlation(a: list[float], b: list[float]) -> float:
    """Return Pearson's correlation; NaN if one of them does not vary."""
    x, y = torch.tensor(a).double(), torch.tensor(b).double()
    x, y = x - x.mean(), y - y.mean()
    return float(x @ y / (x.norm() * y.norm())) if x.norm() * y.norm() else math.nan


def report(kept: dict[tuple[str, int, int], dict[str, float]]) -> None:
    """Print the ranks over tasks, each divided by its largest possible value, and how the approximations follow."""
    size = sum(p.numel() for p in create("mlp", (INPUTS,), CLASSES, widths=(32, 32, 32)).parameters())
    most = {"hessian": size, "gauss_newton": min(size, BATCH * (CLASSES - 1)), "fisher": BATCH}
    most["empirical_fisher"] = BATCH
    for activation in ACTIVATIONS:
        runs = {seed for a, seed, _ in kept if a == activation}
        print(f"\n{activation}: mean over {len(runs)} seeds of rank / largest rank, {size} parameters, batch {BATCH}\n")
        print(f"{'task':>4} {'error':>7} " + " ".join(f"{name:>17}" for name in most))
        for task in range(TASKS):
            rows = [found for (a, _, t), found in kept.items() if (a, t) == (activation, task)]
            if rows:
                cells = " ".join(f"{mean(row[name] for row in rows) / most[name]:17.3f}" for name in most)
                print(f"{task:>4} {mean(row['error'] for row in rows):7.3f} {cells}")
        for name in APPROXIMATIONS:
            along = [
                correlation(*([found[n] for (a, s, _), found in kept.items() if (a, s) == (activation, seed)]
                              for n in ("hessian", name)))
                for seed in sorted(runs)
            ]  # fmt: skip
            gaps = [
                abs(found[name] / most[name] - found["hessian"] / most["hessian"])
                for (a, _, _), found in kept.items()
                if a == activation
            ]
            print(
                f"{name}: correlation with the Hessian's rank over tasks "
                f"{', '.join(f'{value:.2f}' for value in along)} (by seed); mean |difference| {mean(gaps):.3f}"
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    measured = load()
    for each in range(SEEDS):
        for name in ACTIVATIONS:
            train(name, each, measured)
    report(measured)
