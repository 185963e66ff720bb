"""What a call of a torch function contributes to the per-sample gradients of its weights: one rule a function.

A rule keeps what it needs from the forward pass and says how that combines with the gradient at the output, δ. A linear
layer keeps its input, since the gradient of a sample is Σ δ aᵀ over positions; a norm layer its normalized input; an
embedding the indices. A weight that a rule does not yield is one that it cannot treat in this call.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pliant._precision import widen
from pliant.diagnostics.per_sample.inner_products import Convolution, Dense, Lookup, Outer, Use, Window

# From the gradient at a call's output to the contribution to a weight's gradients.
Contribution = Callable[[Tensor], Use]


@dataclass(frozen=True)
class Call:
    """A call whose output grows with the number of samples.

    Attributes:
        values: Its arguments by name.
        shape: The shape of its output.
        samples: The number of samples.
        axis: The dimension of the output that holds them, possibly merged with positions, samples first.
    """

    values: Mapping[str, Any]
    shape: torch.Size
    samples: int
    axis: int

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def options(self, *names: str) -> dict[str, Any]:
        """Return the named arguments that were given."""
        return {name: self.values[name] for name in names if name in self.values}

    def samples_first(self, tensor: Tensor) -> Tensor:
        """Return [samples, positions merged with them, …] of a tensor with the output's leading dimensions."""
        moved = widen(tensor.detach()).movedim(self.axis, 0)
        return moved.reshape(self.samples, -1, *moved.shape[1:])

    def positions(self, tensor: Tensor) -> Tensor:
        """Return [samples, positions, features] of a tensor whose features are last."""
        return self.samples_first(tensor).flatten(1, -2)


Rule = Callable[[Call], Iterator[tuple[Tensor, Contribution]]]


def matrix_shape(weight: Tensor) -> tuple[int, int]:
    """Return the shape [rows, columns] that a weight is seen in: its first dimension, and all the others."""
    rows = len(weight) if weight.ndim else 1
    return rows, weight.numel() // max(rows, 1)


def _linear(call: Call) -> Iterator[tuple[Tensor, Contribution]]:
    yield call["weight"], lambda delta: Outer(call.positions(delta), call.positions(call["input"]))
    if call["bias"] is not None:
        yield from _broadcast(call, call["bias"])


def _matmul(call: Call) -> Iterator[tuple[Tensor, Contribution]]:
    x, weight = call["input"], call["other"]
    if weight.ndim == 2 and x.ndim >= 2:
        yield weight, lambda delta: Outer(call.positions(x), call.positions(delta))


def _addmm(call: Call) -> Iterator[tuple[Tensor, Contribution]]:
    if call.options("alpha", "beta"):
        return
    yield from _broadcast(call, call["input"])
    yield call["mat2"], lambda delta: Outer(call.positions(call["mat1"]), call.positions(delta))


def _convolution(call: Call) -> Iterator[tuple[Tensor, Contribution]]:
    x, kernel = call["input"].detach(), tuple(call["weight"].shape[2:])
    if call.axis != 0:
        return

    def each(value: Any) -> tuple[int, ...]:
        return (value,) * len(kernel) if isinstance(value, int) else tuple(value) * (len(kernel) // len(value))

    dilation = each(call.values.get("dilation", 1))
    padding = call.values.get("padding", 0)
    if padding == "same":
        widths = [gap * (k - 1) for gap, k in zip(dilation, kernel, strict=True)]
        around = tuple((width // 2, width - width // 2) for width in widths)
    else:
        around = tuple((width, width) for width in each(0 if padding == "valid" else padding))
    window = Window(kernel, each(call.values.get("stride", 1)), around, dilation)
    yield (
        call["weight"],
        lambda delta: Convolution(widen(x), delta, window, call.values.get("groups", 1), call.samples),
    )
    if call["bias"] is not None:
        yield from _channels(call, call["bias"])


def _embedding(call: Call) -> Iterator[tuple[Tensor, Contribution]]:
    table, padding = call["weight"], call["padding_idx"]
    if call["scale_grad_by_freq"]:
        return

    def contribution(delta: Tensor) -> Use:
        deltas = call.positions(delta)
        index = call.samples_first(call["input"]).flatten(1)
        if padding is not None:
            deltas = deltas * (index != padding % len(table)).unsqueeze(2)
        return Lookup(index, deltas, len(table))

    yield table, contribution


def _trailing_norm(normalize: Callable[..., Tensor]) -> Rule:
    """Return the rule of a norm layer over the last dimensions."""

    def rule(call: Call) -> Iterator[tuple[Tensor, Contribution]]:
        x, shape = call["input"], call["normalized_shape"]
        if call["weight"] is not None:
            yield from _broadcast(call, call["weight"], lambda: normalize(x, shape, **call.options("eps")))
        if call["bias"] is not None:
            yield from _broadcast(call, call["bias"])

    return rule


def _channel_norm(normalize: Callable[..., Tensor], *names: str) -> Rule:
    """Return the rule of a norm layer with a scale and a shift a channel; `names` are what `normalize` needs."""

    def rule(call: Call) -> Iterator[tuple[Tensor, Contribution]]:
        if call["weight"] is not None:
            yield from _channels(call, call["weight"], lambda: normalize(call["input"], **call.options(*names, "eps")))
        if call["bias"] is not None:
            yield from _channels(call, call["bias"])

    return rule


def _batch_norm(call: Call) -> Iterator[tuple[Tensor, Contribution]]:
    if call["training"]:
        raise ValueError(
            "a BatchNorm layer takes its statistics from the batch, so that no sample has a gradient of its own: "
            "put the model in eval mode"
        )
    yield from _channel_norm(functional.batch_norm, "running_mean", "running_var")(call)


def _prelu(call: Call) -> Iterator[tuple[Tensor, Contribution]]:
    spread = _broadcast if call["weight"].numel() == 1 else _channels
    yield from spread(call, call["weight"], lambda: call["input"].clamp(max=0))


def _elementwise(derivative: Callable[[Any, bool], Any]) -> Rule:
    """Return the rule of a broadcast binary function.

    Args:
        derivative: From the other argument, and whether one's own is the first, to the derivative by one's own.
    """

    def rule(call: Call) -> Iterator[tuple[Tensor, Contribution]]:
        if call.options("alpha"):
            return
        for mine, theirs in (("input", "other"), ("other", "input")):
            if isinstance(call[mine], Tensor):
                slope = lambda other=call[theirs], first=mine == "input": derivative(other, first)  # noqa: E731
                yield from _broadcast(call, call[mine], slope)

    return rule


def _expand(call: Call) -> Iterator[tuple[Tensor, Contribution]]:
    yield from _broadcast(call, call["input"])


def _broadcast(
    call: Call, weight: Tensor, factor: Callable[[], Any] | None = None
) -> Iterator[tuple[Tensor, Contribution]]:
    """Yield the contribution to a weight that was broadcast against the output, and multiplied by a factor."""
    shape = [1] * (len(call.shape) - weight.ndim) + list(weight.shape)
    if shape.pop(call.axis) != 1:
        return  # the weight has entries of its own along the dimension of the samples

    def contribution(delta: Tensor) -> Use:
        product = delta * _detached(factor()) if factor else delta
        gradient = call.samples_first(product).sum(1).sum_to_size(call.samples, *shape)
        return Dense(gradient.reshape(call.samples, *matrix_shape(weight)))

    yield weight, contribution


def _channels(
    call: Call, weight: Tensor, factor: Callable[[], Tensor] | None = None
) -> Iterator[tuple[Tensor, Contribution]]:
    """Yield the contribution to a weight with one entry a channel, the output's second dimension."""
    if call.axis != 0:
        return

    def contribution(delta: Tensor) -> Use:
        product = delta * _detached(factor()) if factor else delta
        by_channel = product.flatten(2).sum(2) if product.ndim > 2 else product
        return Dense(by_channel.reshape(call.samples, -1, len(weight)).sum(1).unsqueeze(2))

    yield weight, contribution


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


_LINEAR = ("input", "weight", "bias")
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_PAIR = ("input", "other")
_ADD = _elementwise(lambda other, first: 1)
_SUBTRACT = _elementwise(lambda other, first: 1 if first else -1)
_MULTIPLY = _elementwise(lambda other, first: other)

# Each function with the names of its positional arguments.
RULES: dict[Callable[..., Any], tuple[Rule, Sequence[str]]] = {
    functional.linear: (_linear, _LINEAR),
    torch.matmul: (_matmul, _PAIR),
    torch.mm: (_matmul, _PAIR),
    torch.Tensor.matmul: (_matmul, _PAIR),
    torch.Tensor.mm: (_matmul, _PAIR),
    torch.addmm: (_addmm, ("input", "mat1", "mat2")),
    functional.conv1d: (_convolution, _CONVOLUTION),
    functional.conv2d: (_convolution, _CONVOLUTION),
    functional.conv3d: (_convolution, _CONVOLUTION),
    functional.embedding: (
        _embedding,
        ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq"),
    ),
    functional.layer_norm: (
        _trailing_norm(functional.layer_norm),
        ("input", "normalized_shape", "weight", "bias", "eps"),
    ),
    functional.rms_norm: (_trailing_norm(functional.rms_norm), ("input", "normalized_shape", "weight", "eps")),
    functional.group_norm: (
        _channel_norm(functional.group_norm, "num_groups"),
        ("input", "num_groups", "weight", "bias", "eps"),
    ),
    functional.batch_norm: (
        _batch_norm,
        ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    ),
    functional.instance_norm: (
        _channel_norm(functional.instance_norm, "running_mean", "running_var", "use_input_stats"),
        ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
    ),
    functional.prelu: (_prelu, ("input", "weight")),
    torch.add: (_ADD, _PAIR),
    torch.Tensor.add: (_ADD, _PAIR),
    torch.Tensor.add_: (_ADD, _PAIR),
    torch.sub: (_SUBTRACT, _PAIR),
    torch.Tensor.sub: (_SUBTRACT, _PAIR),
    torch.mul: (_MULTIPLY, _PAIR),
    torch.Tensor.mul: (_MULTIPLY, _PAIR),
    torch.Tensor.expand: (_expand, ("input",)),
    torch.Tensor.expand_as: (_expand, ("input",)),
    torch.broadcast_to: (_expand, ("input",)),
}
