"""Cost of SWR, L2 and L2 Init in a training step."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import pliant
from benchmarks.steps import training_step
from benchmarks.timing import added, medians, over_builds, row


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 100), nn.ReLU(), nn.Linear(100, 10),
    )  # fmt: skip


def vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 200)]
    return nn.Sequential(*layers, *head)


def swr_overhead(what: str, build: Callable[[], nn.Module], batch: Tensor, rounds: int, limit: str) -> None:
    def extra() -> dict[str, float]:
        plain, _ = training_step(build(), batch)
        model = build()
        with_swr, optimizer = training_step(model, batch)
        pliant.SWR(model, batch[:1], lam=1e-3).attach(optimizer)
        return added({"plain": plain, "swr": with_swr}, base="plain", rounds=rounds)

    row(f"training step with SWR / without, {what}", 1 + over_builds(extra)["swr"], limit)


def swr_against_memory_passes() -> None:
    model = vgg16()
    parameters = list(model.parameters())
    swr = pliant.SWR(model, torch.zeros(1, 3, 64, 64), lam=1e-3)

    @torch.no_grad()
    def passes() -> None:
        torch._foreach_norm(parameters)
        torch._foreach_mul_(parameters, 0.999999)

    times = medians({"swr": swr.step, "passes": passes}, rounds=15)
    count = sum(p.numel() for p in parameters) / 1e6
    row(f"SWR / one norm pass + one mul_ pass, VGG-16, {count:.1f} M", times["swr"] / times["passes"], "≤ 1.3")


def penalty_against_autograd(name: str, batch: Tensor) -> None:
    def ratio() -> dict[str, float]:
        plain, _ = training_step(mlp(), batch)
        model = mlp()
        closed, optimizer = training_step(model, batch)
        pliant.methods.create(name, model, lam=1e-4).attach(optimizer)
        other = mlp()
        initial = [p.detach().clone() if name == "l2_init" else torch.zeros_like(p) for p in other.parameters()]

        def term() -> Tensor:
            if name == "l2":
                return 0.5e-4 * sum((p**2).sum() for p in other.parameters())
            return 0.5e-4 * sum(((p - q) ** 2).sum() for p, q in zip(other.parameters(), initial, strict=True))

        in_loss, _ = training_step(other, batch, term)
        extra = added({"plain": plain, "closed": closed, "autograd": in_loss}, base="plain", rounds=150)
        return {"ratio": extra["closed"] / extra["autograd"]}

    what = f"{name}: added cost, closed form / term in the loss, MLP-3×100 batch 256"
    row(what, over_builds(ratio)["ratio"], "≤ 0.25")


def main() -> None:
    """Print the ratios of the design's limits."""
    torch.manual_seed(0)
    images = torch.randn(256, 784)
    swr_overhead("MLP-3×100, batch 256", mlp, images, 150, "≤ 1.05, aim 1.03")
    swr_overhead("CNN, batch 256", cnn, torch.randn(256, 3, 32, 32), 20, "≤ 1.01")
    swr_against_memory_passes()
    for name in ("l2", "l2_init"):
        penalty_against_autograd(name, images)
