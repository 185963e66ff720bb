"""The methods that add most to a step of a small MLP, beside the goals for them: 3×100, batch 256."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam

from benchmarks.timing import added, over_builds, row
from pliant import models
from pliant.methods import create

GOALS = {
    SGD: {"upgd": "≤ 1.35"},
    Adam: {
        "wasserstein": "≤ 1.35",
        "continual_backprop": "≤ 1.10",
        "spectral": "≤ 1.10",
        "parseval": "≤ 1.15",
        "l2_init": "",
        "weight_clipping": "",
        "hare_tortoise": "",
    },
}


def stepper(kind: type[SGD] | type[Adam], name: str | None) -> Callable[[], None]:
    """Return a training step with a method, or without one."""
    model: nn.Module = models.create("mlp", (1, 28, 28), 10, widths=[100, 100, 100])
    x, y = torch.randn(256, 1, 28, 28), torch.randint(0, 10, (256,))
    optimizer = kind(model.parameters(), lr=1e-3)
    if name is not None:
        create(name, model, example=x[:2], seed=0).attach(optimizer)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def main() -> None:
    """Print the ratios of a step with a method and a step without it."""
    torch.manual_seed(0)
    for kind, goals in GOALS.items():

        def measure(kind: type[SGD] | type[Adam] = kind, names: tuple[str, ...] = tuple(goals)) -> dict[str, float]:
            contestants = {"plain": stepper(kind, None)} | {name: stepper(kind, name) for name in names}
            return added(contestants, base="plain", rounds=60)

        for name, extra in over_builds(measure, builds=5).items():
            row(f"MLP 3×100, batch 256: step of {kind.__name__} with {name} / without", 1 + extra, goals[name])
