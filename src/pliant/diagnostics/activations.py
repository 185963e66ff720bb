"""Capture what the hidden units of a model do on a batch.

A torch function mode sees every weight layer and every activation function that a forward pass calls, as a module or as
a function. Weight layers are linear layers, products with a parameter, and convolutions.

- The *hidden features of a layer* are the output of the activation that follows the layer and its norm layer. In a
  network without activations between its layers, they are the layer's own output.
- A *representation* is what a head reads: the last hidden features. Heads are the linear layers that the output comes
  from with no other weight layer in between: one in most networks, one for each of two twin critics.
- *Units* are channels after a convolution, and entries of the last dimension after a linear layer. If dimensions are
  permuted or reshaped before the activation, units are found by their number, if only one dimension has that size.

Activations are recognized from a list of functions. A clamp counts if its lower bound is 0, and a maximum of two
tensors counts, if the result still has the layer's units; both functions have other uses.

Some activations are written out as products, such as u · sigmoid(u) or ½u(1 + tanh(…)). Here the listed function is a
gate, and the product is the activation. `_Gates` finds such products by following values through elementwise calls: a
product is an activation if both factors come from the same tensor but went through different activations. The product
replaces those activations. A multiple of it by a number replaces it in turn. A product with a parameter or a buffer,
such as a branch's scale or a mask, does not. A gate that multiplies another tensor remains an activation of its own.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from pliant.anatomy.operators import APPROXIMABLE, ELEMENTWISE
from pliant.diagnostics.batches import Batch

_CONVOLUTIONS = (
    functional.conv1d, functional.conv2d, functional.conv3d,
    functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d,
)  # fmt: skip

_LINEAR: dict[Callable[..., Any], dict[str, int]] = {
    functional.linear: {"input": 0, "weight": 1},
    **{key: {"input": 0, "other": 1} for key in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)},
    **{key: {"input": 0, "mat2": 1} for key in (torch.mm, torch.Tensor.mm)},
    **{key: {"mat1": 1, "mat2": 2} for key in (torch.addmm, torch.Tensor.addmm)},
}
"""Functions that are linear layers: the names and positions of the arguments for the input and the weight."""


def _functions(*names: str) -> frozenset[Callable[..., Any]]:
    """Return the functions of these names in `torch`, `torch.Tensor` and `torch.nn.functional`, also in-place."""
    holders = (torch, torch.Tensor, functional)
    spelled = [name + suffix for name in names for suffix in ("", "_")]
    return frozenset(getattr(holder, name) for holder in holders for name in spelled if hasattr(holder, name))


_ACTIVATIONS = _functions(
    *APPROXIMABLE, "relu", "relu6", "leaky_relu", "rrelu", "prelu", "glu", "hardtanh", "hardsigmoid", "softsign",
    "logsigmoid", "threshold", "hardshrink", "softshrink", "tanhshrink", "sigmoid", "tanh",
)  # fmt: skip
_TANH, _SIGMOID = _functions("tanh"), _functions("sigmoid")
_CLAMPS = _functions("clamp", "clip", "clamp_min")
_MAXIMA = _functions("maximum", "fmax", "max")
_PRODUCTS = frozenset({"mul", "rmul", "imul", "multiply"})
_QUOTIENTS = frozenset({"div", "truediv", "idiv", "itruediv", "divide", "true_divide"})
_CASTS = frozenset({"to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone"})
_ENTRYWISE = frozenset({
    *ELEMENTWISE, *_PRODUCTS, *_QUOTIENTS, *_CASTS, "rdiv", "rtruediv", "radd", "iadd", "isub", "subtract", "rpow",
    "ipow", "float_power", "negative", "positive", "special_erf", "special_erfc", "special_expit", "arctan", "sign",
    "clip", "dropout",
})  # fmt: skip
"""Elementwise functions by their names in Python, without underscores."""


@dataclass(frozen=True)
class Features:
    """The activations of one layer's units.

    Attributes:
        mean_abs: The mean of |h| over samples and positions for each unit, float64.
        active: How often each unit was not zero.
        values: The activations, one row per sample, if they were kept.
        mean_extreme: The mean of |tanh|, or of |2·sigmoid − 1|, for each unit; None for other activations.
    """

    mean_abs: Tensor
    active: Tensor
    values: Tensor | None
    mean_extreme: Tensor | None = None


@dataclass(frozen=True)
class Captured:
    """The outcome of a forward pass.

    Attributes:
        output: The model's output.
        layers: The hidden features of each layer.
        representations: The input of each head, [samples × positions, units]. Of heads that read the same features,
            one is here. Empty if the network does not end in linear layers.
        unclear: Layers that are left out because it is unknown which entries belong to a unit.
    """

    output: Any
    layers: dict[str, Features]
    representations: dict[str, Tensor]
    unclear: tuple[str, ...]


def _linear_operands(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return the input and the weight if the call is a linear layer or a product with a parameter, else `None`."""
    if func not in _LINEAR:
        return None
    inputs, weight = (args[place] if place < len(args) else kwargs[name] for name, place in _LINEAR[func].items())
    is_layer = func is functional.linear or (weight.ndim == 2 and _stored(weight) is not None)
    return (inputs, weight) if is_layer else None


def _stored(weight: Tensor) -> nn.Parameter | None:
    """Return the parameter if the tensor is one or a view of one, else `None`."""
    whole = weight if weight._base is None else weight._base
    return whole if isinstance(whole, nn.Parameter) else None


class _Layer(NamedTuple):
    """A call of a weight layer: the name, the shape of the output, and the dimension of the units."""

    name: str
    shape: torch.Size
    dim: int

    @property
    def units(self) -> int:
        return self.shape[self.dim]

    def by_unit(self, out: Tensor) -> Tensor | None:
        """Return a later tensor as [units, everything else], or `None` if the dimension of the units is unknown."""
        dim = self.dim
        if out.shape != self.shape and out.numel() == self.shape.numel():
            fits = [dim for dim in range(1, out.ndim) if out.shape[dim] == self.units]
            if len(fits) == 1:
                dim = fits[0]
            elif fits or not out.is_contiguous():  # the entries may be reordered
                return None
            else:
                out = out.reshape(self.shape)
        return out.movedim(dim, 0).flatten(1)


@dataclass(eq=False)
class _Note:
    """The features of a layer after one activation, or of its output. They are `None` if they are unclear."""

    layer: _Layer
    features: Features | None


def _is_transformed() -> bool:
    """Return whether a transform of torch.func is active, such as vmap. Its tensors must not leave it."""
    return torch._C._are_functorch_transforms_active()


def _is_activation(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], out: Any, layer: _Layer) -> bool:
    if func in _ACTIVATIONS:
        return _stored(args[0] if args else kwargs["input"]) is None  # a function of a parameter is a learned gate
    if func in _CLAMPS:
        low = args[1] if len(args) > 1 else kwargs.get("min")
        if low is None or torch.as_tensor(low).any():
            return False
    elif func not in _MAXIMA or not isinstance(args[1] if len(args) > 1 else kwargs.get("other"), Tensor):
        return False
    by_unit = layer.by_unit(out) if isinstance(out, Tensor) and out.ndim > 1 else None
    return by_unit is not None and len(by_unit) == layer.units


class _Value(NamedTuple):
    """How a tensor was computed.

    Attributes:
        origin: Identifies the tensor that it was computed from entry by entry; `None` for a constant.
        through: The activations on the way, in order.
        product: The written-out activation that the tensor is, up to a constant factor, if it is one.
    """

    origin: object | None
    through: tuple[Any, ...] = ()
    product: Any = None


_CONSTANT = _Value(None)


class _Gates:
    """Follows the tensors of a forward pass through elementwise calls, to find activations written out as products.

    Activations are any objects that the caller passes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._values: MutableMapping[Tensor, _Value] = WeakTensorKeyDictionary()
        self._values.update((tensor, _CONSTANT) for tensor in (*model.parameters(), *model.buffers()))

    def follow(
        self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], out: Tensor, entrywise: bool
    ) -> tuple[Any, ...]:
        """Record how the result of a call was computed, and return the activations that the result replaces.

        Args:
            func: The function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            out: Its result.
            entrywise: Whether the caller knows the function to be elementwise.
        """
        name = getattr(func, "__name__", "").strip("_")
        read = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        varying = [x for x in (read[:1] if name in _CASTS else read) if self._of(x).origin is not None]
        values = [self._of(x) for x in varying]
        origins = {value.origin for value in values}
        if not (entrywise or name in _ENTRYWISE) or len(origins) > 1 or any(x.shape != out.shape for x in varying):
            self._values.pop(out, None)  # a tensor written in place has a new value
            return ()
        through = tuple(dict.fromkeys(activation for value in values for activation in value.through))
        replaced: tuple[Any, ...] = ()
        if name in _PRODUCTS and len(values) > 1:
            replaced = tuple(a for a in through if not all(a in value.through for value in values))
        elif len(values) == 1 and values[0].product is not None and _is_multiple(name, read, varying[0]):
            replaced = (values[0].product,)
        if replaced:
            through = (*(a for a in through if a not in replaced), replaced[0])
        self._values[out] = _Value(next(iter(origins), None), through, replaced[0] if replaced else None)
        return replaced

    def mark(self, out: Tensor, activation: Any) -> None:
        """Record that a tensor is the result of an activation."""
        value = self._of(out)
        self._values[out] = _Value(value.origin, (*value.through, activation))

    def _of(self, x: Tensor) -> _Value:
        whole = None if x._base is None else self._values.get(x._base)
        if x.ndim == 0 or (whole is not None and whole.origin is None):
            return _CONSTANT
        return self._values.setdefault(x, _Value(object()))


def _is_multiple(name: str, read: Sequence[Tensor], value: Tensor) -> bool:
    """Return whether a call multiplies or divides a value by a number that is not a parameter."""
    others = [x for x in read if x is not value]
    if any(x.ndim > 0 or isinstance(x, nn.Parameter) for x in others):
        return False
    return name in _PRODUCTS or (name in _QUOTIENTS and read[0] is value)


class _Head(NamedTuple):
    """A call of a weight layer that no other weight layer has read yet.

    Attributes:
        name: The layer.
        sources: The calls of weight layers that it reads, through other functions but not through other layers.
        features: What a linear layer reads; `None` for a convolution, or if a transform of torch.func hides it.
    """

    name: str
    sources: frozenset[int]
    features: Tensor | None


class _Heads:
    """Follows the outputs of weight layers, to find the layers that compute the model's output."""

    def __init__(self) -> None:
        self._origins: MutableMapping[Tensor, frozenset[int]] = WeakTensorKeyDictionary()
        self._unread: dict[int, _Head] = {}
        self._calls = 0

    def add(self, head: _Head, out: Tensor) -> None:
        """Record a call of a weight layer and its result."""
        for source in head.sources:
            self._unread.pop(source, None)
        self._unread[self._calls] = head
        self._origins[out] = frozenset({self._calls})
        self._calls += 1

    def follow(self, read: Any, out: Any) -> None:
        """Record a call of any other function: its result comes from what it read."""
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if results:
            origins = self.origins_of(read)
            self._origins.update((result, origins) for result in results)

    def origins_of(self, values: Any) -> frozenset[int]:
        """Return the calls of weight layers that the tensors in a tree come from."""
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        return frozenset().union(*(self._origins.get(tensor, frozenset()) for tensor in tensors))

    def representations(self, output: Any) -> dict[str, Tensor]:
        """Return what the heads read; if none is seen to lead to the output, what the last weight layer reads."""
        reached = sorted(self.origins_of(output) & self._unread.keys())
        heads = [self._unread[call] for call in reached or [*self._unread][-1:]]
        apart = {head.sources: head for head in heads}.values()
        return {head.name: head.features for head in apart if head.features is not None}


@contextmanager
def track_modules(model: nn.Module) -> Iterator[list[str]]:
    """Yield the names of the modules that are running, the innermost last; it changes as the model runs."""
    path: list[str] = []
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda _m, _args, name=name: path.append(name)))
        handles.append(module.register_forward_hook(lambda *_: _leave(path)))
    try:
        yield path
    finally:
        for handle in handles:
            handle.remove()


def _leave(path: list[str]) -> None:
    path.pop()


class _Watch(TorchFunctionMode):
    def __init__(self, model: nn.Module, samples: int, keep: bool, path: list[str]) -> None:
        super().__init__()
        self._samples = samples
        self._keep = keep
        self._path = path
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._layer: _Layer | None = None  # the last weight layer that was called
        self._activations: list[_Note] = []
        self._outputs: list[_Note] = []
        self._after_last: list[_Note] = []
        self._gates = _Gates(model)
        self.heads = _Heads()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = _linear_operands(func, args, kwargs)
        features = None
        if operands is not None:
            x, weight = operands
            features = None if _is_transformed() else x.detach().reshape(-1, x.shape[-1]).clone()
        elif func in _CONVOLUTIONS:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
        out = func(*args, **kwargs)
        if operands is None and func not in _CONVOLUTIONS:
            self.heads.follow((args, kwargs), out)
        if operands is not None or func in _CONVOLUTIONS:
            self._layer = _Layer(self._name(func, weight), out.shape, 1 if operands is None else -1)
            self.heads.add(_Head(self._layer.name, self.heads.origins_of((args, kwargs)), features), out)
            self._after_last = []
            self._outputs.append(_Note(self._layer, self._features(self._layer, out)))
        elif self._layer is not None and isinstance(out, Tensor):
            is_activation = _is_activation(func, args, kwargs, out, self._layer)
            entrywise = is_activation or func in _ACTIVATIONS
            replaced: tuple[_Note, ...] = ()
            if not _is_transformed():
                replaced = self._gates.follow(func, args, kwargs, out, entrywise)
            if replaced:
                replaced[0].features = self._features(replaced[0].layer, out)
                self._activations = [note for note in self._activations if note not in replaced[1:]]
            elif is_activation:
                note = _Note(self._layer, self._features(self._layer, out, func))
                self._activations.append(note)
                self._after_last.append(note)
                self._gates.mark(out, note)
        return out

    def _name(self, func: Callable[..., Any], weight: Tensor) -> str:
        """Return the name of the running module, or in the model itself the name of the weight."""
        return (self._path[-1] if self._path else "") or self._names.get(id(_stored(weight)), func.__name__)

    def _features(self, layer: _Layer, out: Tensor, func: Callable[..., Any] | None = None) -> Features | None:
        if _is_transformed():
            return None
        h = out.detach()
        if h.ndim < 2:  # a single sample without a batch dimension
            h = h.reshape(1, -1)
        by_unit = layer.by_unit(h)
        if by_unit is None:
            return None
        return Features(
            by_unit.abs().mean(1, dtype=torch.float64),
            (by_unit != 0).sum(1),
            h.flatten(1).clone() if self._keep and len(h) == self._samples else None,
            _mean_extreme(by_unit, func),
        )

    def layers(self) -> dict[str, Features | None]:
        """Return the hidden features by layer, `None` for unclear ones.

        Activations after the last weight layer belong to the output.
        """
        found: dict[str, Features | None] = {}
        for note in [note for note in self._activations if note not in self._after_last] or self._outputs[:-1]:
            name, again = note.layer.name, 2
            while name in found:
                name, again = f"{note.layer.name}:{again}", again + 1
            found[name] = note.features
        return found


def _mean_extreme(by_unit: Tensor, func: Callable[..., Any] | None) -> Tensor | None:
    if func not in _TANH | _SIGMOID:
        return None
    return (by_unit if func in _TANH else 2 * by_unit - 1).abs().mean(1, dtype=torch.float64)


def capture(model: nn.Module, batch: Batch, keep: bool = False) -> Captured:
    """Run a model on a batch and return its hidden features.

    Args:
        model: The model, in the mode to measure it in.
        batch: The samples. Their target is not used.
        keep: Whether to keep the activations themselves.
    """
    with torch.no_grad(), uncompiled(), track_modules(model) as path, _Watch(model, batch.size, keep, path) as watch:
        output = model(*batch.args, **batch.kwargs)
    found = watch.layers()
    told = {name: features for name, features in found.items() if features is not None}
    unclear = tuple(name for name in found if name not in told)
    return Captured(output, told, watch.heads.representations(output), unclear)


def uncompiled() -> AbstractContextManager[None]:
    """Run compiled parts of a model uncompiled, because compiled code hides modules and calls."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import is slow
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance
