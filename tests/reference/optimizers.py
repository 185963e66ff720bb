"""Optimizers written out, one parameter at a time."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests import zoo


class SlowAdam:
    """Adam: m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g², θ ← θ − η·m̂/(√v̂ + ε), with a reset of m and v, of t, or both."""

    def __init__(self, model: nn.Module, lr: float, eps: float, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.model, self.lr, self.eps, self.betas = model, lr, eps, betas
        self.m: list[Tensor] = [torch.zeros_like(p) for p in model.parameters()]
        self.v: list[Tensor] = [torch.zeros_like(p) for p in model.parameters()]
        self.t = 0

    def reset(self, moments: bool, step: bool) -> None:
        for tensor in (*self.m, *self.v) if moments else ():
            tensor.zero_()
        self.t = 0 if step else self.t

    def train(self, name: str, step: int) -> None:
        """Train on the batch of a step of `tests.loops.train`."""
        inputs, labels = zoo.batch(name, seed=100 + step)
        gradients = torch.autograd.grad(cross_entropy(self.model(inputs), labels), list(self.model.parameters()))
        self.t += 1
        first, second = self.betas
        with torch.no_grad():
            for i, (p, g) in enumerate(zip(self.model.parameters(), gradients, strict=True)):
                self.m[i] = first * self.m[i] + (1 - first) * g
                self.v[i] = second * self.v[i] + (1 - second) * g * g
                corrected = self.m[i] / (1 - first**self.t), self.v[i] / (1 - second**self.t)
                p -= self.lr * corrected[0] / (corrected[1].sqrt() + self.eps)
