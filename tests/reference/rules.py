"""Rules that rewrite weights, as in the papers: one entry or tensor at a time."""

import math
from collections.abc import Callable, Iterator

import torch
from scipy.special import erfi
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd


def weight_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | _ConvNd):
            yield name, module


@torch.no_grad()
def clip_weights(model: nn.Module, kappa: float) -> None:
    """Clamp the weight and bias of every layer to ±κ/√fan_in of the weight."""
    for _, layer in weight_layers(model):
        fan_in = math.prod(layer.weight.shape[1:])
        for tensor in (layer.weight, layer.bias):
            if tensor is not None:
                bound = kappa * fan_in**-0.5
                flat = [min(max(float(x), -bound), bound) for x in tensor.flatten()]
                tensor.copy_(torch.tensor(flat, dtype=tensor.dtype).view(tensor.shape))


@torch.no_grad()
def rescale_weights(model: nn.Module, deviations: dict[str, float]) -> None:
    """W ← W·std(W₀)/std(W)."""
    for name, layer in weight_layers(model):
        layer.weight.mul_(deviations[name] / deviation(layer.weight))


def deviation(weight: Tensor) -> float:
    """Return the standard deviation."""
    values = [float(x) for x in weight.detach().flatten()]
    mean = sum(values) / len(values)
    return math.sqrt(sum((x - mean) ** 2 for x in values) / len(values))


class UPGD:
    """The paper's optimizer: θ ← (1 − ηw)θ − η(g + σε)(1 − sigmoid(û / max û)), û bias-corrected.

    For UPGD around Adam, `direction` maps g to Adam's direction in the step, but not in u.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        sigma: float,
        beta: float,
        weight_decay: float,
        normalizer: str = "corrected",
    ) -> None:
        self.parameters = list(model.parameters())
        self.normalizer = normalizer
        self.lr, self.sigma, self.beta, self.weight_decay = lr, sigma, beta, weight_decay
        self.utilities = [torch.zeros_like(p) for p in self.parameters]
        self.steps = 0

    @torch.no_grad()
    def step(self, noise: list[Tensor], direction: Callable[[int, Tensor], Tensor] = lambda _, g: g) -> None:
        self.steps += 1
        corrected = []
        for i, p in enumerate(self.parameters):
            self.utilities[i] = self.beta * self.utilities[i] + (1 - self.beta) * (-p.grad * p)
            corrected.append(self.utilities[i] / (1 - self.beta**self.steps))
        largest = max(float(u.max()) for u in (self.utilities if self.normalizer == "authors" else corrected))
        for i, p in enumerate(self.parameters):
            gate = 1 - torch.sigmoid(corrected[i] / largest)
            moved = (1 - self.lr * self.weight_decay) * p
            p.copy_(moved - self.lr * (direction(i, p.grad) + self.sigma * noise[i]) * gate)


class AdamDirection:
    """Adam's direction m̂ / (√v̂ + ε)."""

    def __init__(self, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> None:
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.state: dict[int, tuple[int, Tensor, Tensor]] = {}

    def __call__(self, i: int, g: Tensor) -> Tensor:
        t, m, v = self.state.get(i, (0, torch.zeros_like(g), torch.zeros_like(g)))
        t, m, v = t + 1, self.beta1 * m + (1 - self.beta1) * g, self.beta2 * v + (1 - self.beta2) * g**2
        self.state[i] = (t, m, v)
        return m / (1 - self.beta1**t) / ((v / (1 - self.beta2**t)).sqrt() + self.eps)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers, tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class HareTortoise:
    """A second model with moving averages of parameters and float buffers, and copies of other buffers."""

    def __init__(self, model: nn.Module, slow: nn.Module, beta: float, every: int) -> None:
        self.model, self.slow, self.beta, self.every, self.steps = model, slow, beta, every, 0

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        fast = tensors_of(self.model)
        for name, tensor in tensors_of(self.slow).items():
            if tensor.is_floating_point():
                tensor.copy_(self.beta * tensor + (1 - self.beta) * fast[name])
            else:
                tensor.copy_(fast[name])
        if self.steps % self.every == 0:
            self.model.load_state_dict(self.slow.state_dict())


@torch.no_grad()
def project_weights(model: nn.Module, norms: dict[str, list[float]]) -> None:
    """Scale every row, or the whole weight if there is one norm, to its norm."""
    for name, layer in weight_layers(model):
        parts = [layer.weight] if len(norms[name]) == 1 else list(layer.weight)
        for part, norm in zip(parts, norms[name], strict=True):
            part.mul_(norm / math.sqrt(sum(float(x) ** 2 for x in part.flatten())))


class TRAC:
    """The paper's meta-optimizer with plain numbers; scipy has erfi."""

    def __init__(self, model: nn.Module, scale: float = 1e-8) -> None:
        self.parameters = list(model.parameters())
        self.reference = [p.detach().clone() for p in self.parameters]
        self.scale, self.betas = scale, (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)
        self.v, self.sigma, self.s = [0.0] * 6, [1e-8] * 6, [0.0] * 6

    @torch.no_grad()
    def step(self, before: list[Tensor], gradients: list[Tensor]) -> None:
        """Rewrite the optimizer's move from `before`."""
        eps = 1e-8
        directions = [(b - r) / (sum(self.s) + eps) for b, r in zip(before, self.reference, strict=True)]
        h = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
        for j, beta in enumerate(self.betas):
            self.v[j] = beta**2 * self.v[j] + h**2
            self.sigma[j] = beta * self.sigma[j] - h
            argument = self.sigma[j] / (math.sqrt(2) * math.sqrt(self.v[j]) + eps)
            self.s[j] = self.scale / float(erfi(1 / math.sqrt(2))) * float(erfi(argument))
        total = max(sum(self.s), 0.0)
        for p, b, r, d in zip(self.parameters, before, self.reference, directions, strict=True):
            p.copy_(r + total * (d + (p - b)))


@torch.no_grad()
def redraw_entries(weight: Tensor, utility: Tensor, count: int | None, bound: float | None, fresh: Tensor) -> list[int]:
    """Re-draw the `count` entries of least utility, or those of at most `bound` times the mean; return their places."""
    values = [float(u) for u in utility.flatten()]
    order = sorted(range(len(values)), key=lambda i: values[i])
    if count is None:
        mean = sum(values) / len(values)
        places = [i for i, value in enumerate(values) if value <= bound * mean]
    else:
        places = order[:count]
    for place in places:
        index = torch.unravel_index(torch.tensor(place), weight.shape)
        weight[index] = fresh[index]
    return sorted(places)
