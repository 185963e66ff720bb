"""Pliant beside the statements of other public projects, re-written here: a training step of an MLP 3×100, batch 256.

Each function below does what those projects do in their training loops, parameter by parameter. A row shows the time
of the step with Pliant relative to the step with that statement, then both relative to the step without either.
Networks take turns of four steps.
"""

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

from benchmarks.penalties import TERMS
from benchmarks.timing import added, in_a_row, over_builds, row
from pliant import models
from pliant.methods import create

Term = Callable[[], Tensor]
Action = Callable[[], None]


def l2(model: nn.Module) -> Term:
    return lambda: 0.5e-4 * sum(p.square().sum() for p in model.parameters())


def l2_init(model: nn.Module) -> Term:
    initial = [p.detach().clone() for p in model.parameters()]
    return lambda: 0.5e-4 * sum(((p - q) ** 2).sum() for p, q in zip(model.parameters(), initial, strict=True))


def weight_clipping(model: nn.Module, optimizer: Optimizer) -> Action:
    """Clamp each parameter to a multiple of its initial bound."""
    bounds = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            bounds |= {f"{name}.weight": module.in_features**-0.5, f"{name}.bias": module.in_features**-0.5}

    def act() -> None:
        for name, p in model.named_parameters():
            p.data.clamp_(-bounds[name], bounds[name])

    return act


def hare_tortoise(model: nn.Module, optimizer: Optimizer) -> Action:
    """Average parameters and buffers in a copy of the model."""
    tortoise = deepcopy(model)

    def act() -> None:
        for slow, fast in zip(tortoise.parameters(), model.parameters(), strict=True):
            slow.data.copy_(0.999 * slow.data + 0.001 * fast.data)

    return act


def upgd(model: nn.Module, optimizer: Optimizer) -> Action:
    """Take the optimizer's place: its learning rate is 0."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    state: dict[Tensor, Tensor] = {p: torch.zeros_like(p) for p in model.parameters()}
    steps = 0

    @torch.no_grad()
    def act() -> None:
        nonlocal steps
        steps += 1
        largest = torch.tensor(-torch.inf)
        for p, utility in state.items():
            assert p.grad is not None
            utility.mul_(0.999).add_(-p.grad * p, alpha=1 - 0.999)
            largest = torch.maximum(largest, utility.max())
        for p, utility in state.items():
            assert p.grad is not None
            noise = torch.randn_like(p.grad) * 1e-3
            scaled = torch.sigmoid((utility / (1 - 0.999**steps)) / largest)
            p.mul_(1.0).add_((p.grad + noise) * (1 - scaled), alpha=-1e-3)

    return act


def continual_backprop(model: nn.Module, optimizer: Optimizer) -> Action:
    """Watch the units, update utilities and ages, and renew units of least utility where one is due."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    seen: dict[int, Tensor] = {}
    for i, reader in enumerate(layers[1:]):
        reader.register_forward_pre_hook(lambda _, args, i=i: seen.__setitem__(i, args[0].detach()))
    widths = [layer.out_features for layer in layers[:-1]]
    utilities, means, ages = ([torch.zeros(width) for width in widths] for _ in range(3))
    owed = [0.0] * len(widths)

    @torch.no_grad()
    def act() -> None:
        for i, (layer, reader) in enumerate(pairwise(layers)):
            ages[i] += 1
            correction = 1 - 0.99 ** ages[i]
            means[i] *= 0.99
            means[i] += 0.01 * seen[i].mean(0)
            contribution = reader.weight.abs().mean(0) * seen[i].abs().mean(0)
            utilities[i] *= 0.99
            utilities[i] += 0.01 * contribution
            eligible = torch.where(ages[i] > 100)[0]
            owed[i] += 1e-3 * len(eligible)
            count = int(owed[i])
            owed[i] -= count
            if count:
                worst = eligible[torch.topk(-(utilities[i] / correction)[eligible], count)[1]]
                bound = 6**0.5 / layer.in_features**0.5
                reader.bias += (reader.weight[:, worst] * (means[i] / correction)[worst]).sum(1)
                layer.weight[worst] = torch.empty(count, layer.in_features).uniform_(-bound, bound)
                layer.bias[worst] = 0.0
                reader.weight[:, worst] = 0.0
                for tensor in (utilities[i], means[i], ages[i]):
                    tensor[worst] = 0.0
                for p, chosen in ((layer.weight, worst), (layer.bias, worst), (reader.weight, (slice(None), worst))):
                    for key in ("exp_avg", "exp_avg_sq"):
                        optimizer.state[p][key][chosen] = 0.0

    return act


PENALTIES: dict[str, Callable[[nn.Module], Term]] = {
    "l2": l2,
    "l2_init": l2_init,
    **{name: TERMS[name] for name in ("spectral", "spectral_norm", "wasserstein", "parseval", "streaming_ewc")},
}
ACTIONS = {f.__name__: f for f in (weight_clipping, hare_tortoise, continual_backprop, upgd)}


def stepper(name: str, whose: str | None) -> Callable[[], None]:
    """Return a training step with a method of Pliant ("ours"), with the statement above ("theirs"), or without."""
    model: nn.Module = models.create("mlp", (1, 28, 28), 10, widths=[100, 100, 100])
    x, y = torch.randn(256, 1, 28, 28), torch.randint(0, 10, (256,))
    optimizer = (SGD if name == "upgd" else Adam)(model.parameters(), lr=1e-3)
    term = PENALTIES[name](model) if whose == "theirs" and name in PENALTIES else None
    act = ACTIONS[name](model, optimizer) if whose == "theirs" and name in ACTIONS else None
    if whose == "ours":
        settings = {"lam": 1e-4} if name in PENALTIES else {}
        create(name, model, example=x[:2], **settings).attach(optimizer)

    def step() -> None:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        if term is not None:
            loss = loss + term()
        loss.backward()
        optimizer.step()
        if act is not None:
            act()

    return step


def main() -> None:
    """Print the ratios; below 1, Pliant is faster."""
    torch.manual_seed(0)
    for name in (*PENALTIES, *ACTIONS):

        def measure(name: str = name) -> dict[str, float]:
            contestants = {str(whose): in_a_row(stepper(name, whose)) for whose in (None, "ours", "theirs")}
            return added(contestants, base="None", rounds=20)

        extra = over_builds(measure, builds=3)
        row(f"{name}: step with Pliant / step with the statement", (1 + extra["ours"]) / (1 + extra["theirs"]), "< 1")
        row("    step with Pliant / without", 1 + extra["ours"], "")
        row("    step with the statement / without", 1 + extra["theirs"], "")
