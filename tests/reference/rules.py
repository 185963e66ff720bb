"""Rules that rewrite weights, as in the papers: one entry or tensor at a time."""

import math
from collections.abc import Callable, Iterator

import torch
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

    def __init__(self, model: nn.Module, lr: float, sigma: float, beta: float, weight_decay: float) -> None:
        self.parameters = list(model.parameters())
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
        largest = max(float(u.max()) for u in corrected)
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
