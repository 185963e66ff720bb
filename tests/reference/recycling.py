"""ReDo and continual backprop as in the papers: one unit at a time, on layers given by hand."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclass
class Wire:
    """The layers that produce, normalize and read units."""

    producer: nn.Module
    norm: nn.Module | None
    reader: nn.Module

    @property
    def count(self) -> int:
        return self.producer.weight.shape[0]

    @property
    def columns(self) -> int:
        """The number of the reader's inputs per unit, above 1 for a flattened channel."""
        return self.reader.weight.shape[1] // self.count

    def read_by(self, unit: int) -> slice:
        return slice(unit * self.columns, (unit + 1) * self.columns)


def watch(model: nn.Module, wires: list[Wire], inputs: Tensor) -> list[list[Tensor]]:
    """Run the model; return the activations of each wire's units at the reader's input."""
    seen: dict[int, Tensor] = {}
    handles = [
        w.reader.register_forward_pre_hook(lambda _, args, i=i: seen.update({i: args[0].detach()}))
        for i, w in enumerate(wires)
    ]
    training = {m: m.training for m in model.modules()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    model.train()
    with torch.no_grad():
        model(inputs)
    for m, mode in training.items():
        m.training = mode
    for n, b in model.named_buffers():
        b.copy_(buffers[n])
    for handle in handles:
        handle.remove()
    result = []
    for i, wire in enumerate(wires):
        dim = 1 if isinstance(wire.reader, nn.Conv2d) else -1
        values = seen[i].movedim(dim, 0)
        result.append([values[wire.read_by(unit)] for unit in range(wire.count)])
    return result


def clear(optimizer: Optimizer, parameter: Tensor, place: tuple) -> None:
    for key, moment in optimizer.state.get(parameter, {}).items():
        if key in MOMENTS:
            moment[place] = 0.0


@torch.no_grad()
def remake(wire: Wire, unit: int, incoming: Tensor, optimizer: Optimizer) -> None:
    """Re-initialize one unit and clear its moments."""
    producer, norm = wire.producer, wire.norm
    producer.weight[unit] = incoming
    clear(optimizer, producer.weight, (unit,))
    if producer.bias is not None:
        producer.bias[unit] = 0.0
        clear(optimizer, producer.bias, (unit,))
    if norm is not None:
        norm.weight[unit], norm.bias[unit] = 1.0, 0.0
        clear(optimizer, norm.weight, (unit,))
        clear(optimizer, norm.bias, (unit,))
        if getattr(norm, "running_mean", None) is not None:
            norm.running_mean[unit], norm.running_var[unit] = 0.0, 1.0


@torch.no_grad()
def unread(wire: Wire, unit: int, optimizer: Optimizer) -> None:
    """Set the outgoing weights of one unit to zero."""
    place = (slice(None), wire.read_by(unit))
    wire.reader.weight[place] = 0.0
    clear(optimizer, wire.reader.weight, place)


def redo(
    wires: list[Wire], seen: list[list[Tensor]], tau: float, fresh: Callable[[nn.Module], Tensor], optimizer: Optimizer
) -> list[list[int]]:
    """Renew units with mean |h| ≤ τ times the layer's average, drawing all layers first; return their indices."""
    renewed = []
    for wire, values in zip(wires, seen, strict=True):
        sizes = [float(v.abs().mean()) for v in values]
        average = sum(sizes) / len(sizes)
        dormant = [unit for unit, size in enumerate(sizes) if size / (average + 1e-9) <= tau]
        weights = fresh(wire.producer)
        for unit in dormant:
            remake(wire, unit, weights[unit], optimizer)
        renewed.append(dormant)
    for wire, dormant in zip(wires, renewed, strict=True):
        for unit in dormant:
            unread(wire, unit, optimizer)
    return renewed


class ContinualBackprop:
    """Utilities, ages and owed renewals as plain numbers."""

    def __init__(
        self, wires: list[Wire], rate: float, maturity: int, decay: float = 0.99, kind: str = "contribution"
    ) -> None:
        self.kind = kind
        self.wires, self.rate, self.maturity, self.decay = wires, rate, maturity, decay
        self.utility = [[0.0] * w.count for w in wires]
        self.mean = [[[0.0] * w.columns for _ in range(w.count)] for w in wires]  # one per column
        self.age = [[0] * w.count for w in wires]
        self.owed = [0.0] * len(wires)

    @torch.no_grad()
    def step(
        self, seen: list[list[Tensor]], fresh: Callable[[nn.Module], Tensor], optimizer: Optimizer
    ) -> list[list[int]]:
        chosen: list[list[int]] = []
        for i, wire in enumerate(self.wires):
            eta = self.decay
            for unit, values in enumerate(seen[i]):
                self.age[i][unit] += 1
                read = wire.reader.weight[:, wire.read_by(unit)]
                contributions = []
                for column, value in enumerate(values):
                    size = 1.0 if self.kind == "weight" else float(value.abs().mean())
                    contributions.append(size * float(read[:, column].abs().mean()))
                    mean = self.mean[i][unit][column]
                    self.mean[i][unit][column] = eta * mean + (1 - eta) * float(value.mean())
                contribution = sum(contributions) / len(contributions)
                incoming = float(wire.producer.weight[unit].abs().mean())
                if self.kind == "adaptation":
                    contribution = 1 / incoming
                if self.kind == "adaptable":
                    contribution /= incoming
                self.utility[i][unit] = eta * self.utility[i][unit] + (1 - eta) * contribution
            mature = [unit for unit in range(wire.count) if self.age[i][unit] > self.maturity]
            self.owed[i] += self.rate * len(mature)
            due = math.floor(self.owed[i])
            self.owed[i] -= due
            mature.sort(key=lambda unit, i=i: self.utility[i][unit] / (1 - self.decay ** self.age[i][unit]))
            chosen.append(mature[:due])
        for i, wire in enumerate(self.wires):
            if not chosen[i]:
                continue
            weights = fresh(wire.producer)
            for unit in chosen[i]:
                read = wire.reader.weight[:, wire.read_by(unit)]
                for column, mean in enumerate(self.mean[i][unit] if wire.reader.bias is not None else ()):
                    corrected = mean / (1 - self.decay ** self.age[i][unit])
                    wire.reader.bias += corrected * read[:, column].reshape(len(read), -1).sum(1)
                remake(wire, unit, weights[unit], optimizer)
                unread(wire, unit, optimizer)
                self.utility[i][unit], self.age[i][unit] = 0.0, 0
                self.mean[i][unit] = [0.0] * wire.columns
        return chosen


@torch.no_grad()
def regrama(
    wires: list[Wire], tau: float, fresh: Callable[[nn.Module], Tensor], optimizer: Optimizer
) -> list[list[int]]:
    """Renew units whose incoming weights have a mean |gradient| ≤ τ times the layer's; return their indices."""
    renewed = []
    for wire in wires:
        sizes = [float(row.abs().mean()) for row in wire.producer.weight.grad]
        average = sum(sizes) / len(sizes)
        chosen = [unit for unit, size in enumerate(sizes) if size / (average + 1e-9) <= tau]
        weights = fresh(wire.producer)
        for unit in chosen:
            remake(wire, unit, weights[unit], optimizer)
        renewed.append(chosen)
    return renewed


class SelfNormalizedResets:
    """Ages, silences and thresholds as plain numbers and lists."""

    def __init__(self, wires: list[Wire], quantile: float, longest: int, window: int) -> None:
        self.wires, self.quantile, self.window = wires, quantile, window
        self.edges = [1.0]
        while self.edges[-1] < longest:
            self.edges.append(2.0 ** (len(self.edges) / 8))
        self.age = [[0] * w.count for w in wires]
        self.threshold = [[max(longest / 2, 1.0)] * w.count for w in wires]
        self.silences: list[list[list[int]]] = [[[] for _ in range(w.count)] for w in wires]
        self.steps = 0

    def step(
        self, seen: list[list[Tensor]], fresh: Callable[[nn.Module], Tensor], optimizer: Optimizer
    ) -> list[list[int]]:
        self.steps += 1
        for i, wire in enumerate(self.wires):
            for unit in range(wire.count):
                if bool((seen[i][unit] > 0).any()):
                    if self.age[i][unit] > 0:
                        self.silences[i][unit].append(self.age[i][unit])
                    self.age[i][unit] = 0
                else:
                    self.age[i][unit] += 1
                if self.steps % self.window == 0:
                    found = self.find_quantile(self.silences[i][unit])
                    old = self.threshold[i][unit]
                    self.threshold[i][unit] = min(found if found < old else 2 * old, self.edges[-1])
                    self.silences[i][unit] = []
        due = [
            [unit for unit in range(wire.count) if self.age[i][unit] >= self.threshold[i][unit]]
            for i, wire in enumerate(self.wires)
        ]
        if any(due):
            for i, wire in enumerate(self.wires):
                weights = fresh(wire.producer)
                for unit in due[i]:
                    remake(wire, unit, weights[unit], optimizer)
                    self.silences[i][unit].append(self.age[i][unit])
                    self.age[i][unit] = 0
            for i, wire in enumerate(self.wires):
                for unit in due[i]:
                    unread(wire, unit, optimizer)
        return due

    def find_quantile(self, silences: list[int]) -> float:
        """Return the smallest edge that is not below the given fraction of the silences."""
        for edge in self.edges:
            if sum(age <= edge for age in silences) >= self.quantile * len(silences):
                return edge
        return self.edges[-1]
