"""The methods that add most to a step of a small MLP, beside the goals for them: 3×100, batch 256.

For some methods a second row has the least that their formula takes: its operators alone, on vectors that hold all
parameters and are allocated once, without the checks, the saved state and the seeds of the method. Networks take turns
of four steps. Continual Backprop renews no unit so early.
"""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

from benchmarks.timing import added, in_a_row, over_builds, row
from pliant import models
from pliant.methods import create
from pliant.methods._core.sorting import rank_order

GOALS = {
    SGD: {"upgd": "≤ 1.35", "least of upgd": "", "noise of upgd": ""},
    Adam: {
        "wasserstein": "≤ 1.35",
        "least of wasserstein": "",
        "continual_backprop": "≤ 1.10",
        "least of continual_backprop": "",
        "spectral": "≤ 1.10",
        "least of spectral": "",
        "parseval": "≤ 1.15",
        "least of parseval": "",
        "l2_init": "",
        "weight_clipping": "",
        "hare_tortoise": "",
    },
}


def least_upgd(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """One pass for the product, the average, the maximum, the gate, the noise and the move."""
    old, products, noise, moved = (torch.cat([p.detach().flatten() for p in parameters]) for _ in range(4))
    utilities = torch.zeros_like(old)
    parts = [
        part.view(p.shape) for part, p in zip(moved.split([p.numel() for p in parameters]), parameters, strict=True)
    ]

    @torch.no_grad()
    def before(*_: object) -> None:
        torch.cat([p.flatten() for p in parameters], out=old)

    @torch.no_grad()
    def after(*_: object) -> None:
        torch.cat([p.grad.flatten() for p in parameters if p.grad is not None], out=products)
        products.mul_(old).neg_()
        utilities.lerp_(products, 0.5)
        torch.div(utilities, utilities.amax(), out=products).sigmoid_()
        torch.cat([p.flatten() for p in parameters], out=moved)
        moved.sub_(noise.normal_(), alpha=1e-6).lerp_(old, products)
        torch._foreach_copy_(parameters, parts)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def least_noise(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """UPGD's noise alone."""
    noise = torch.cat([p.detach().flatten() for p in parameters])

    def before(*_: object) -> None:
        noise.normal_()

    optimizer.register_step_pre_hook(before)


def least_wasserstein(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """One sort of all parameters, one scatter, and the gradient."""
    ordered = torch.cat([p.detach().flatten().sort().values for p in parameters])
    matched = torch.empty_like(ordered)

    @torch.no_grad()
    def before(*_: object) -> None:
        values = torch.cat([p.flatten() for p in parameters])
        matched.scatter_(0, rank_order(values), ordered)
        parts = values.sub_(matched).split([p.numel() for p in parameters])
        for p, part in zip(parameters, parts, strict=True):
            assert p.grad is not None
            p.grad.add_(part.view(p.shape), alpha=1e-2)

    optimizer.register_step_pre_hook(before)


def least_parseval(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """The two matrix products of each weight."""

    @torch.no_grad()
    def before(*_: object) -> None:
        for p in parameters:
            if p.ndim == 2:
                assert p.grad is not None
                p.grad.addmm_(p @ p.mT, p, alpha=4e-4)

    optimizer.register_step_pre_hook(before)


def least_spectral(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """One power iteration and one outer product for each weight, one norm and one sum for each bias."""
    pairs = [(p, torch.ones(len(p)), torch.ones(p.shape[1])) for p in parameters if p.ndim == 2]
    biases = [p for p in parameters if p.ndim == 1]

    @torch.no_grad()
    def before(*_: object) -> None:
        for p, u, v in pairs:
            assert p.grad is not None
            torch.mv(p.mT, u, out=v)
            v.div_(v.norm())
            torch.mv(p, v, out=u)
            u.div_(u.norm())
            p.grad.addr_(u, v, alpha=1e-3)
        gradients = [p.grad for p in biases if p.grad is not None]
        torch._foreach_add_(gradients, torch._foreach_mul(biases, torch._foreach_norm(biases)), alpha=1e-3)

    optimizer.register_step_pre_hook(before)


def least_continual_backprop(model: nn.Module, optimizer: Optimizer) -> None:
    """Two sums for each layer that reads units, one for its weight, and one average of all of them."""
    readers = [module for module in model.modules() if isinstance(module, nn.Linear)][1:]
    seen: list[tuple[Tensor, Tensor]] = []
    averages, ages = (torch.zeros(sum(2 * reader.in_features for reader in readers)) for _ in range(2))

    @torch.no_grad()
    def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append((args[0].mean(0), args[0].abs().mean(0)))

    @torch.no_grad()
    def after(*_: object) -> None:
        ages.add_(1)
        utilities = [reader.weight.abs().mean(0).mul_(size) for reader, (_, size) in zip(readers, seen, strict=True)]
        averages.lerp_(torch.cat([*utilities, *(mean for mean, _ in seen)]), 0.01)
        seen.clear()

    for reader in readers:
        reader.register_forward_pre_hook(see)
    optimizer.register_step_post_hook(after)


LEAST = {
    "noise of upgd": least_noise,
    "least of upgd": least_upgd,
    "least of wasserstein": least_wasserstein,
    "least of parseval": least_parseval,
    "least of spectral": least_spectral,
}


def stepper(kind: type[SGD] | type[Adam], name: str | None) -> Callable[[], None]:
    """Return a training step with a method or the least that it takes, or without one."""
    model: nn.Module = models.create("mlp", (1, 28, 28), 10, widths=[100, 100, 100])
    x, y = torch.randn(256, 1, 28, 28), torch.randint(0, 10, (256,))
    optimizer = kind(model.parameters(), lr=1e-3)
    if name == "least of continual_backprop":
        least_continual_backprop(model, optimizer)
    elif name in LEAST:
        LEAST[name](optimizer, list(model.parameters()))
    elif name is not None:
        create(name, model, example=x[:2], seed=0).attach(optimizer)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def ranks_passed(steps: int = 60) -> float:
    """Return how many others a weight of the first layer passes in a step of Adam on new data: the median weight."""
    model: nn.Module = models.create("mlp", (1, 28, 28), 10, widths=[100, 100, 100])
    optimizer = Adam(model.parameters(), lr=1e-3)
    weight = next(model.parameters()).detach()
    passed = []
    for _ in range(steps):
        before = weight.flatten().argsort().argsort()
        optimizer.zero_grad()
        cross_entropy(model(torch.randn(256, 1, 28, 28)), torch.randint(0, 10, (256,))).backward()
        optimizer.step()
        passed.append(float((weight.flatten().argsort().argsort() - before).abs().float().median()))
    return statistics.median(passed)


def main() -> None:
    """Print the ratios of a step with a method and a step without it."""
    torch.manual_seed(0)
    row("others that a weight of the first layer passes in a step of Adam, the median", ranks_passed(), "")
    for kind, goals in GOALS.items():

        def measure(kind: type[SGD] | type[Adam] = kind, names: tuple[str, ...] = tuple(goals)) -> dict[str, float]:
            contestants = {str(name): in_a_row(stepper(kind, name)) for name in (None, *names)}
            return added(contestants, base="None", rounds=20)

        for name, extra in over_builds(measure, builds=3).items():
            row(f"MLP 3×100, batch 256: step of {kind.__name__} with {name} / without", 1 + extra, goals[name])
