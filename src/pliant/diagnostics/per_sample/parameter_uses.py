"""The uses of parameters in a forward pass, and what each use contributes to the per-sample gradients.

A torch function mode sees every call of a torch function, whichever module makes it. A *weight* is a tensor that is
computed from parameters and does not grow with the number of samples: a parameter itself, a transposed, split or
re-parametrized one, a position embedding. A *use* is a call that reads a weight and whose output grows with the
samples. A comparison with the shapes of a pass over another number of samples shows which tensors grow, and in which
dimension.

Each torch function with a rule has one entry in `RULES`. A rule keeps what it needs from the forward pass, and says how
that combines with the gradient at the output, δ. A linear layer keeps its input, since the gradient of a sample is
Σ δ aᵀ over positions; a norm layer keeps its normalized input; an embedding keeps the indices. A rule does not yield a
weight that it cannot treat.

A weight that is used in a call without a rule is reported, so that its gradients can be taken in another way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pliant._precision import widen
from pliant.diagnostics.per_sample.inner_products import (
    Convolution,
    Dense,
    Lookup,
    Outer,
    Rows,
    Use,
    Window,
    check_memory,
    matrix_shape,
)

Contribution = Callable[[Tensor], Use]
"""Maps the gradient at the output of a call to the contribution to the gradients of a weight."""


@dataclass(frozen=True)
class Call:
    """A call whose output grows with the number of samples.

    Attributes:
        values: Its arguments by name.
        shape: The shape of its output.
        samples: The number of samples.
        axis: The dimension of the output that holds the samples, possibly merged with positions, samples first.
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
        """Return a tensor with the output's leading dimensions as [samples, positions merged with them, …]."""
        moved = tensor.detach().movedim(self.axis, 0)
        return moved.reshape(self.samples, -1, *moved.shape[1:])

    def positions(self, tensor: Tensor) -> Tensor:
        """Return a tensor whose features are last as [samples, positions, features]."""
        return self.samples_first(tensor).flatten(1, -2)


Rule = Callable[[Call], Iterator[tuple[Tensor, Contribution]]]


def _linear(call: Call) -> Iterator[tuple[Tensor, Contribution]]:
    yield call["weight"], lambda delta: Outer(call.positions(delta), call.positions(widen(call["input"])))
    if call["bias"] is not None:
        yield from _broadcast(call, call["bias"])


def _matmul(call: Call) -> Iterator[tuple[Tensor, Contribution]]:
    x, weight = call["input"], call["other"]
    if weight.ndim == 2 and x.ndim >= 2:
        yield weight, lambda delta: Outer(call.positions(widen(x)), call.positions(delta))


def _addmm(call: Call) -> Iterator[tuple[Tensor, Contribution]]:
    if call.options("alpha", "beta"):
        return
    yield from _broadcast(call, call["input"])
    yield call["mat2"], lambda delta: Outer(call.positions(widen(call["mat1"])), call.positions(delta))


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
    """Return the rule of a norm layer with a scale and a shift per channel; `normalize` needs the arguments `names`."""

    def rule(call: Call) -> Iterator[tuple[Tensor, Contribution]]:
        if call["weight"] is not None:
            yield from _channels(call, call["weight"], lambda: normalize(call["input"], **call.options(*names, "eps")))
        if call["bias"] is not None:
            yield from _channels(call, call["bias"])

    return rule


def _batch_norm(call: Call) -> Iterator[tuple[Tensor, Contribution]]:
    if call["training"]:
        raise ValueError(
            "a BatchNorm layer takes its statistics from the batch, so a sample has no gradient of its own; put the "
            "model in eval mode"
        )
    yield from _channel_norm(functional.batch_norm, "running_mean", "running_var")(call)


def _prelu(call: Call) -> Iterator[tuple[Tensor, Contribution]]:
    spread = _broadcast if call["weight"].numel() == 1 else _channels
    yield from spread(call, call["weight"], lambda: call["input"].clamp(max=0))


def _elementwise(derivative: Callable[[Any, bool], Any]) -> Rule:
    """Return the rule of a broadcast binary function.

    Args:
        derivative: Maps the other argument, and whether the weight comes first, to the derivative by the weight.
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
    """Yield the contribution to a weight that is broadcast to the output and multiplied by a factor."""
    shape = [1] * (len(call.shape) - weight.ndim) + list(weight.shape)
    if shape.pop(call.axis) != 1:
        return  # the weight is not broadcast over the samples

    def contribution(delta: Tensor) -> Use:
        product = delta * _detached(factor()) if factor else delta
        gradient = call.samples_first(product).sum(1).sum_to_size(call.samples, *shape)
        return Dense(gradient.reshape(call.samples, *matrix_shape(weight)))

    yield weight, contribution


def _channels(
    call: Call, weight: Tensor, factor: Callable[[], Tensor] | None = None
) -> Iterator[tuple[Tensor, Contribution]]:
    """Yield the contribution to a weight with one entry per channel, the output's second dimension."""
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

# Each function with its rule and the names of its positional arguments.
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


# The positional arguments of `multi_head_attention_forward` after query, key and value.
_ATTENTION = (
    "embed_dim_to_check",
    "num_heads",
    "in_proj_weight",
    "in_proj_bias",
    "bias_k",
    "bias_v",
    "add_zero_attn",
    "dropout_p",
    "out_proj_weight",
    "out_proj_bias",
)


class Shapes(TorchFunctionMode):
    """Records the shapes of all tensors that a forward pass computes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Size] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            return self._attention(*args, **kwargs)
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.saw(func, args, kwargs, tensor)
        return out

    def saw(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], out: Tensor) -> None:
        """Record a tensor that a call returned."""
        self.made.append(out.shape)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute multi-head attention with its four projections as calls that the mode can see.

        The function itself then gets the projected inputs, with identities as its projections.
        """
        given = {**dict(zip(_ATTENTION, args, strict=False)), **kwargs}
        size = given["embed_dim_to_check"]
        with self:
            weight, bias = given["in_proj_weight"], given["in_proj_bias"]
            separate = [given.pop(f"{name}_proj_weight", None) for name in "qkv"]
            if query is key is value and weight is not None:
                projected = functional.linear(query, weight, bias).chunk(3, dim=-1)
            else:
                weights = weight.chunk(3) if weight is not None else separate
                biases = bias.chunk(3) if bias is not None else [None] * 3
                three = zip((query, key, value), weights, biases, strict=True)
                projected = tuple(functional.linear(*each) for each in three)
        weight_out, bias_out = given["out_proj_weight"], given["out_proj_bias"]
        identity = torch.eye(size, dtype=query.dtype, device=query.device)
        given |= {"in_proj_weight": identity.repeat(3, 1), "in_proj_bias": None, "use_separate_proj_weight": False}
        given |= {"out_proj_weight": identity, "out_proj_bias": None}
        mixed, attention = functional.multi_head_attention_forward(*projected, **given)  # type: ignore[arg-type]
        for extra in (given["bias_k"], given["bias_v"]):
            if extra is not None:
                self.saw(functional.multi_head_attention_forward, (extra,), {}, mixed)
        with self:
            return functional.linear(mixed, weight_out, bias_out), attention


class Uses(Shapes):
    """Watches a forward pass, and passes every use of a parameter to a callback during the backward pass.

    Attributes:
        pending: For each parameter, the number of uses that have not arrived yet.
        untreated: Parameters with a use that has no rule, and why.
        cut_off: Parameters that were used where no gradients are recorded.
        diverged: Whether the pass made other calls than the pass over another number of samples.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        samples: int,
        probe: Shapes,
        probe_samples: int,
        deliver: Callable[[str, Use], None],
    ) -> None:
        super().__init__()
        self.pending = dict.fromkeys(parameters, 0)
        self.untreated: dict[str, str] = {}
        self.cut_off: set[str] = set()
        self.diverged = False
        self._parameters = parameters
        self._samples = samples
        self._probe = probe.made
        self._probe_samples = probe_samples
        self._deliver = deliver
        # Weights by id, with their parameters. The tensor is kept, because Python could reuse its id.
        self._weights = {id(p): (p, frozenset([name])) for name, p in parameters.items()}

    def saw(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], out: Tensor) -> None:
        """Record a tensor that a call returned: a weight, a use of weights, or neither."""
        place = len(self.made)
        super().saw(func, args, kwargs, out)
        if place >= len(self._probe) or len(self._probe[place]) != out.ndim:
            self.diverged = True
            return
        weights = [leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._weights]
        if not weights or not out.is_floating_point():
            return
        grown = [axis for axis, size in enumerate(self._probe[place]) if size != out.shape[axis]]
        if not grown:
            if out.requires_grad:  # the parameter was not detached
                sources = frozenset().union(*(self._weights[id(weight)][1] for weight in weights))
                self._weights.setdefault(id(out), (out, sources))
            return
        contributions: dict[int, Contribution] = {}
        why = f"it is used in `{getattr(func, '__name__', func)}`, which has no rule"
        if not self._holds_samples(grown, out.shape, self._probe[place]):
            why = f"{why} for tensors without a dimension of all samples"
        elif func in RULES:
            rule, names = RULES[func]
            call = Call({**dict(zip(names, args, strict=False)), **kwargs}, out.shape, self._samples, grown[0])
            contributions = {id(weight): contribution for weight, contribution in rule(call)}
        for weight in weights:
            if id(weight) in contributions:
                self._watch(weight, contributions[id(weight)], out)
            else:
                self.untreated |= dict.fromkeys(self._weights[id(weight)][1], why)

    def _holds_samples(self, grown: list[int], shape: torch.Size, probe: torch.Size) -> bool:
        """Return whether exactly one dimension grew, in proportion to the number of samples."""
        if len(grown) != 1 or shape[grown[0]] % self._samples:
            return False
        return shape[grown[0]] * self._probe_samples == probe[grown[0]] * self._samples

    def _watch(self, weight: Tensor, contribution: Contribution, out: Tensor) -> None:
        sources = self._weights[id(weight)][1]
        if not out.requires_grad:
            self.cut_off |= sources
            return
        for name in sources:
            self.pending[name] += 1

        # The hook lives as long as the graph, but the tensors that the contribution keeps must be freed earlier.
        once = [contribution]
        del contribution

        def arrived(delta: Tensor) -> None:
            use = once.pop()(widen(delta.detach()))
            for name in sources:
                self.pending[name] -= 1
                self._deliver(name, use if weight is self._parameters[name] else self._through(use, weight, name))

        out.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _through(self, use: Use, weight: Tensor, name: str) -> Use:
        """Return the use of a weight as a use of the parameter that the weight was computed from."""
        parameter = self._parameters[name]
        if (same := _of_view(use, weight, parameter)) is not None:
            return same
        check_memory([parameter], self._samples, f"{name} (a tensor computed from it is used)")
        rows = torch.arange(matrix_shape(weight)[0], device=weight.device)
        gradients = []
        for gradient in use.block(rows):
            outer = gradient.reshape(weight.shape).to(weight.dtype)
            (inner,) = torch.autograd.grad(weight, parameter, outer, retain_graph=True, allow_unused=True)
            gradients.append((torch.zeros_like(parameter) if inner is None else inner).reshape(matrix_shape(parameter)))
        return Dense(torch.stack(gradients))


def _of_view(use: Use, weight: Tensor, parameter: Tensor) -> Use | None:
    """Return the use of a view as a use of the parameter, if it is a transpose or a range of rows; else `None`."""
    if weight._base is not parameter or weight.ndim != parameter.ndim or not weight.ndim:
        return None
    transposed = weight.shape == parameter.shape[::-1] and weight.stride() == parameter.stride()[::-1]
    if isinstance(use, Outer) and weight.ndim == 2 and transposed:
        return Outer(use.right, use.left)
    in_rows = weight.shape[1:] == parameter.shape[1:] and weight.stride() == parameter.stride()
    if isinstance(use, Outer | Dense) and in_rows:
        start = (weight.storage_offset() - parameter.storage_offset()) // parameter.stride(0)
        return Rows(use, start, len(weight))
    return None
