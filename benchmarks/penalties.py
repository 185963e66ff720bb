"""Cost of each penalty in a training step: its closed form against the same term in the loss by autograd."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from benchmarks.steps import training_step
from benchmarks.timing import added, medians, over_builds, row
from pliant import methods, models
from pliant.anatomy.parameters import role_of
from pliant.methods._core.sorting import rank_order

Term = Callable[[], Tensor]


def having_role(model: nn.Module, role: str) -> list[Tensor]:
    return [p for name, p in model.named_parameters() if role_of(model, name, p) == role]


def weights_of(model: nn.Module) -> list[Tensor]:
    return having_role(model, "matrix")


def largest_singular_values(model: nn.Module) -> Callable[[], list[Tensor]]:
    weights = weights_of(model)
    lefts = [normalize(torch.randn(len(weight)), dim=0) for weight in weights]

    def values() -> list[Tensor]:
        found = []
        for i, weight in enumerate(weights):
            matrix = weight.flatten(1)
            with torch.no_grad():
                v = normalize(lefts[i] @ matrix, dim=0)
                lefts[i] = u = normalize(matrix @ v, dim=0)
            found.append(u @ (matrix @ v))
        return found

    return values


def spectral(model: nn.Module) -> Term:
    values = largest_singular_values(model)
    scales, shifts = having_role(model, "scale"), having_role(model, "shift")

    def term() -> Tensor:
        total = sum((sigma**2 - 1) ** 2 for sigma in values())
        total = total + sum(((scale**2 - 1) ** 2).sum() for scale in scales)
        return 1e-4 * (total + sum((shift**2).sum() ** 2 for shift in shifts))

    return term


def spectral_norm(model: nn.Module) -> Term:
    values = largest_singular_values(model)
    return lambda: 0.5e-4 * sum(sigma**2 for sigma in values())


def wasserstein(model: nn.Module) -> Term:
    parameters = list(model.parameters())
    ordered = [p.detach().flatten().sort().values for p in parameters]

    def term() -> Tensor:
        pairs = zip(parameters, ordered, strict=True)
        return 1e-3 * sum(((p.flatten().sort().values - q) ** 2).sum() for p, q in pairs)

    return term


def parseval(model: nn.Module) -> Term:
    weights = weights_of(model)

    def term() -> Tensor:
        total = torch.zeros(())
        for weight in weights:
            matrix = weight.flatten(1)
            product = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
            total = total + ((product - torch.eye(len(product))) ** 2).sum()
        return 1e-4 * total

    return term


def streaming_ewc(model: nn.Module) -> Term:
    """Use zeros for the gradient, which is unknown when the loss is computed; the cost is the same."""
    parameters = list(model.parameters())
    averages, importances, gradients = ([torch.zeros_like(p) for p in parameters] for _ in range(3))
    steps = 0

    def term() -> Tensor:
        nonlocal steps
        steps += 1
        with torch.no_grad():
            torch._foreach_lerp_(averages, parameters, 1e-3)
            torch._foreach_mul_(importances, 0.999)
            torch._foreach_addcmul_(importances, gradients, gradients, 1e-3)
        correction = 1 - 0.999**steps
        terms = zip(parameters, averages, importances, strict=True)
        return 0.5 * sum((f / correction * (p - a / correction) ** 2).sum() for p, a, f in terms)

    return term


def feature_rank(model: nn.Module) -> Term:
    seen: list[Tensor] = []
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    last.register_forward_pre_hook(lambda _, args: seen.append(args[0]))

    def term() -> Tensor:
        values = torch.linalg.svdvals(seen.pop())
        seen.clear()
        return 1e-4 * (values[0] ** 2 - values[-1] ** 2)

    return term


TERMS = {f.__name__: f for f in (spectral, spectral_norm, wasserstein, parseval, streaming_ewc, feature_rank)}


def compare(method: str, what: str, build: Callable[[], nn.Module], batch: Tensor, rounds: int) -> None:
    def measure() -> dict[str, float]:
        plain, _ = training_step(build(), batch, fused=True)
        model = build()
        closed, optimizer = training_step(model, batch, fused=True)
        methods.create(method, model, example=batch[:2], lam=1e-4).attach(optimizer)
        other = build()
        in_loss, _ = training_step(other, batch, TERMS[method](other), fused=True)
        extra = added({"plain": plain, "closed": closed, "in_loss": in_loss}, base="plain", rounds=rounds)
        return {**extra, "ratio": extra["closed"] / extra["in_loss"]}

    found = over_builds(measure)
    row(f"{method}, {what}: closed form / term in the loss", found["ratio"], "≤ 0.5")
    row("    step with the closed form / without", 1 + found["closed"], "")
    row("    step with the term in the loss / without", 1 + found["in_loss"], "")


def sorting() -> None:
    """The sort that Wasserstein rests on, of 784 × 256 values after a step of training."""
    values = torch.randn(784 * 256) * 0.03
    moved = values + torch.randn_like(values) * 1e-3
    order = values.argsort()
    times = medians(
        {
            "float": lambda: torch.sort(moved),
            "bits": lambda: rank_order(moved),
            "bits, in the last step's order": lambda: rank_order(moved[order]),
        },
        rounds=60,
    )
    row("sort of 200 704 floats by their bits / as floats", times["bits"] / times["float"], "")
    presorted = times["bits, in the last step's order"] / times["bits"]
    row("    the same put in the order of the step before first / as it is", presorted, "")


def main() -> None:
    """Print what each penalty adds, on an MLP of 4 × 256 and on ResNet-18."""
    torch.manual_seed(0)
    sorting()
    images = torch.randn(256, 1, 28, 28)
    for method in TERMS:
        compare(method, "MLP 4×256, batch 256", lambda: models.create("mlp_4x256", (1, 28, 28), 10), images, 60)
    # What a penalty on weights adds does not depend on the data; beside a small batch it is seen best.
    photos = torch.randn(2, 3, 16, 16)
    for method in TERMS:
        if method != "feature_rank":
            compare(method, "ResNet-18, batch 2", lambda: models.create("resnet18", (3, 16, 16), 10), photos, 6)
    # What this one adds depends on the batch and the last width alone.
    features = torch.randn(256, 512)
    compare("feature_rank", "256×512 features as ResNet-18's", last_layers, features, 30)


def last_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
