"""Check the trial on networks whose condition is known: `python -m benchmarks.trial_zoo [--seeds 20]`.

Four architectures in up to eight conditions, from fresh to unable to learn, meet new digits. The truth is how they
learn with pairs that the trial does not see. Each line of `results/trial_zoo.jsonl` is one trial; lines that exist are
not made again. `results/trial_zoo.txt` is the summary: how trials order the networks, and how often they err.
"""

import argparse
import copy
import functools
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

import pliant

RESULTS = Path(__file__).parent / "results"
STEPS = 300
TRUTH_SEED = 10_000
HEALTHY = ("fresh", "trained briefly", "trained long")
Pair = tuple[Tensor, Tensor]


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Add the input to the output."""
        return x + self.inner(x)


class Tokens(nn.Module):
    """Rows of an 8 x 8 image as tokens, with a position embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.positions = nn.Embedding(8, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, 8, width]."""
        return self.embed(x.view(-1, 8, 8)) + self.positions(torch.arange(8))


class Mean(nn.Module):
    """Mean over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, width]."""
        return x.mean(1)


def mlp(activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), activation(), nn.Linear(96, 96), activation(), nn.Linear(96, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def resnet() -> nn.Module:
    def block() -> nn.Module:
        return Residual(
            nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1),
                          nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
        )  # fmt: skip

    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), block(), block(), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(Tokens(32), encoder, Mean(), nn.Linear(32, 10))


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet": resnet,
    "transformer": transformer,
}


@functools.cache
def digits() -> tuple[Pair, Pair]:
    """Return old and new data."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return (x[:900], y[:900]), (x[900:], y[900:])


def fit(model: nn.Module, data: Pair, epochs: int) -> nn.Module:
    optimizer = Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for index in torch.randperm(len(data[0])).split(64):
            optimizer.zero_grad()
            cross_entropy(model(data[0][index]), data[1][index]).backward()
            optimizer.step()
    return model


@torch.no_grad()
def change_matrices(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.copy_(change(parameter.flatten(1)).view_as(parameter))
    return model


def collapse(weight: Tensor) -> Tensor:
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    return u[:, :1] * s[:1] @ v[:1]


@torch.no_grad()
def kill_units(model: nn.Module, fraction: float) -> nn.Module:
    """Kill most units of every hidden linear and convolution layer by a large negative bias."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)][:-1]
    for layer in layers:
        layer.bias[: int(fraction * len(layer.bias))] = -1e3
    return model


def wear(model: nn.Module, old: Pair, tasks: int) -> nn.Module:
    for _ in range(tasks):
        fit(model, (old[0], torch.randint(10, (len(old[0]),))), 30)
    return model


def conditions(build: Callable[[], nn.Module], name: str) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    old, _ = digits()
    yield "fresh", build
    yield "trained briefly", lambda: fit(build(), old, 3)
    yield "trained long", lambda: fit(build(), old, 100)
    yield "weights x10", lambda: change_matrices(fit(build(), old, 10), lambda weight: 10 * weight)
    yield "rank 1", lambda: change_matrices(fit(build(), old, 10), collapse)
    yield "random labels", lambda: wear(build(), old, 12)
    if name in ("mlp", "cnn"):
        yield "95 % of units dead", lambda: kill_units(fit(build(), old, 10), 0.95)
    if name == "mlp":
        tanh = functools.partial(mlp, nn.Tanh)
        yield "saturated tanh", lambda: change_matrices(fit(tanh(), old, 10), lambda weight: 30 * weight)


def networks() -> Iterator[tuple[str, str, nn.Module, Callable[[], nn.Module]]]:
    for name, build in ARCHITECTURES.items():
        for condition, make in conditions(build, name):
            torch.manual_seed(0)
            twin = functools.partial(mlp, nn.Tanh) if condition == "saturated tanh" else build
            yield name, condition, make(), twin


def run(path: Path, seeds: int) -> None:
    """Do the trials that are not in the file yet."""
    done = {(row["network"], row["condition"], row["seed"]) for row in read(path)}
    versions = {"torch": torch.__version__, "pliant": pliant.__version__, "python": platform.python_version()}
    for name, condition, model, twin in networks():
        count = seeds if condition in HEALTHY else min(seeds, 3)
        for seed in (TRUTH_SEED, *range(count)):
            if (name, condition, seed) in done:
                continue
            pairs = {"seeds": 10} if seed == TRUTH_SEED else {}
            begun = time.process_time()
            found = pliant.trial(copy.deepcopy(model), digits()[1], fresh=twin, steps=STEPS, seed=seed, **pairs)
            row: dict[str, Any] = {
                "network": name, "condition": condition, "seed": seed, "verdict": found.verdict,
                "gap": found.gap.mean, "best_gap": found.best_gap.mean, "pairs": len(found.pairs),
                "stress_gap": found.stress["fresh"] - found.stress["aged"],
                "cpu_seconds": round(time.process_time() - begun, 1), **versions,
            }  # fmt: skip
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summarize(rows: list[dict[str, Any]]) -> None:
    """Print how the trials order the networks, and every verdict."""
    from scipy.stats import spearmanr

    truth = {(row["network"], row["condition"]): row for row in rows if row["seed"] == TRUTH_SEED}
    print(f"{'network':<12} {'condition':<20} {'true gap':>9} {'true best gap':>14}   verdicts of trials")
    for key, true in truth.items():
        found = [row["verdict"] for row in rows if (row["network"], row["condition"]) == key and row is not true]
        counts = ", ".join(f"{found.count(v)} {v}" for v in ("plastic", "undecided", "lost") if v in found)
        print(f"{key[0]:<12} {key[1]:<20} {true['gap']:>+9.1%} {true['best_gap']:>+14.1%}   {counts}")
    for name in (*ARCHITECTURES, "all"):
        trials = [r for r in rows if r["seed"] != TRUTH_SEED and name in (r["network"], "all")]
        for measure in ("gap", "stress_gap"):
            known = [truth[r["network"], r["condition"]]["gap"] for r in trials]
            rank = spearmanr([r[measure] for r in trials], known).statistic
            what = "area gap" if measure == "gap" else "random labels alone"
            print(f"rank correlation with the truth, {name}, {what}: {rank:.3f}")


def command() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trial_zoo", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="trials of each healthy network")
    torch.set_num_threads(1)
    run(RESULTS / "trial_zoo.jsonl", parser.parse_args().seeds)
    summarize(read(RESULTS / "trial_zoo.jsonl"))


if __name__ == "__main__":
    command()
