"""What the hidden units of a live model do on a batch.

A torch function mode sees every layer with a weight (linear, also as a product with a parameter, and convolution) and
every activation function that a forward pass calls, as a module or as a function. The *hidden features of a layer* are
the output of the activation that follows it, so after the norm layer and the nonlinearity; in a network without
activations between its layers, its own output. The *representation* is what the last linear layer receives: the last
hidden features, which it maps to the outputs. Units are channels after a convolution, and entries of the last dimension
after a linear layer; where dimensions are permuted or reshaped before the activation, those of the dimension that has
as many entries, if there is but one, and else where they were before the reshaping.

Activations are recognized from a list of functions. A clamp is one if its lower bound is 0, and a maximum of two
tensors is, where they leave the layer its units: both have other uses. Where one is but the gate in an activation that
is written out (½u(1 + tanh(…))), the product is taken in its place.
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
"""Linear layers, as torch has them or as products: the names and places of what they read and of their weight."""


def _functions(*names: str) -> frozenset[Callable[..., Any]]:
    """Return the functions of these names in torch, its tensors and `torch.nn.functional`, in-place ones included."""
    holders = (torch, torch.Tensor, functional)
    spelled = [name + suffix for name in names for suffix in ("", "_")]
    return frozenset(getattr(holder, name) for holder in holders for name in spelled if hasattr(holder, name))


_ACTIVATIONS = _functions(
    *APPROXIMABLE, "relu", "relu6", "leaky_relu", "rrelu", "prelu", "glu", "hardtanh", "hardsigmoid", "softsign",
    "logsigmoid", "threshold", "hardshrink", "softshrink", "tanhshrink", "sigmoid", "tanh",
)  # fmt: skip
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
    """What the units of one layer did.

    Attributes:
        mean_abs: Mean |h| of each unit over samples and positions, float64.
        active: How often each unit was not zero.
        values: The activations, a sample in each row; `None` unless they were asked for.
    """

    mean_abs: Tensor
    active: Tensor
    values: Tensor | None


@dataclass(frozen=True)
class Captured:
    """What a forward pass did.

    Attributes:
        output: The model's output.
        layers: Hidden features by the layer that they follow.
        representation: What the last linear layer received, [samples × positions, units]; `None` if there is none, or
            if a convolution comes after it.
        unclear: Layers whose hidden features are left out, since it cannot be told where their units are.
    """

    output: Any
    layers: dict[str, Features]
    representation: Tensor | None
    unclear: tuple[str, ...]


def _linear_operands(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return the input and the weight of a call that is a linear layer, as torch has it or as a product; else None."""
    if func not in _LINEAR:
        return None
    inputs, weight = (args[place] if place < len(args) else kwargs[name] for name, place in _LINEAR[func].items())
    is_layer = func is functional.linear or (weight.ndim == 2 and _stored(weight) is not None)
    return (inputs, weight) if is_layer else None


def _stored(weight: Tensor) -> nn.Parameter | None:
    """Return the parameter that a tensor is, or is a view of."""
    whole = weight if weight._base is None else weight._base
    return whole if isinstance(whole, nn.Parameter) else None


class _Layer(NamedTuple):
    """A call of a layer with a weight: its name, the shape of its output, and the dimension where its units are."""

    name: str
    shape: torch.Size
    dim: int

    @property
    def units(self) -> int:
        return self.shape[self.dim]

    def by_unit(self, out: Tensor) -> Tensor | None:
        """Return a later tensor as [units, everything else]; `None` if it cannot be told where its units are."""
        dim = self.dim
        if out.shape != self.shape and out.numel() == self.shape.numel():
            fits = [dim for dim in range(1, out.ndim) if out.shape[dim] == self.units]
            if len(fits) == 1:
                dim = fits[0]
            elif fits or not out.is_contiguous():  # its entries are, or may be, in another order than the layer's
                return None
            else:
                out = out.reshape(self.shape)
        return out.movedim(dim, 0).flatten(1)


@dataclass(eq=False)
class _Note:
    """The features after a layer, or an activation of it; `None` if they are unclear."""

    layer: _Layer
    features: Features | None


def _is_transformed() -> bool:
    """Say whether calls are inside a transform of torch.func, as vmap over an ensemble: no tensor may leave that."""
    return torch._C._are_functorch_transforms_active()


def _is_activation(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], out: Any, layer: _Layer) -> bool:
    if func in _ACTIVATIONS:
        return _stored(args[0] if args else kwargs["input"]) is None  # else a gate that was learned, not units
    if func in _CLAMPS:
        low = args[1] if len(args) > 1 else kwargs.get("min")
        if low is None or torch.as_tensor(low).any():
            return False
    elif func not in _MAXIMA or not isinstance(args[1] if len(args) > 1 else kwargs.get("other"), Tensor):
        return False
    by_unit = layer.by_unit(out) if isinstance(out, Tensor) and out.ndim > 1 else None
    return by_unit is not None and len(by_unit) == layer.units


class _Value(NamedTuple):
    """How a tensor was made: of which other, `None` for a constant, through which activations, in order.

    `product` is the activation that is written out and that the tensor is, maybe up to a constant factor.
    """

    origin: object | None
    through: tuple[Any, ...] = ()
    product: Any = None


_CONSTANT = _Value(None)


class Gates:
    """The tensors of a forward pass, as far as they are made entry by entry of one other and of the model's own.

    Activations are whatever objects the caller has for them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._values: MutableMapping[Tensor, _Value] = WeakTensorKeyDictionary()
        self._values.update((tensor, _CONSTANT) for tensor in (*model.parameters(), *model.buffers()))

    def follow(
        self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], out: Tensor, entrywise: bool
    ) -> tuple[Any, ...]:
        """Note how the result of a call was made, and return the activations in whose place it is to be taken.

        Args:
            func: What was called.
            args: Its arguments.
            kwargs: Those with a name.
            out: Its result.
            entrywise: Whether it is known to make each entry from one entry.
        """
        name = getattr(func, "__name__", "").strip("_")
        read = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        varying = [x for x in (read[:1] if name in _CASTS else read) if self._of(x).origin is not None]
        values = [self._of(x) for x in varying]
        origins = {value.origin for value in values}
        if not (entrywise or name in _ENTRYWISE) or len(origins) > 1 or any(x.shape != out.shape for x in varying):
            self._values.pop(out, None)  # what is written in place is another value
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
        """Note that a tensor is the result of an activation."""
        value = self._of(out)
        self._values[out] = _Value(value.origin, (*value.through, activation))

    def _of(self, x: Tensor) -> _Value:
        whole = None if x._base is None else self._values.get(x._base)
        if x.ndim == 0 or (whole is not None and whole.origin is None):
            return _CONSTANT
        return self._values.setdefault(x, _Value(object()))


def _is_multiple(name: str, read: Sequence[Tensor], value: Tensor) -> bool:
    """Say whether a call multiplies or divides a value by a number; one that is a parameter is none."""
    others = [x for x in read if x is not value]
    if any(x.ndim > 0 or isinstance(x, nn.Parameter) for x in others):
        return False
    return name in _PRODUCTS or (name in _QUOTIENTS and read[0] is value)


class _Watch(TorchFunctionMode):
    def __init__(self, model: nn.Module, samples: int, keep: bool) -> None:
        super().__init__()
        self._samples = samples
        self._keep = keep
        self._path: list[str] = []
        self._model = model
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._layer: _Layer | None = None  # the last one that was called
        self._activations: list[_Note] = []
        self._outputs: list[_Note] = []
        self._after_last: list[_Note] = []
        self._gates = Gates(model)
        self.representation: Tensor | None = None

    @contextmanager
    def named(self) -> Iterator[None]:
        """Keep track of the module that is at work."""

        def leave(*_: Any) -> None:
            self._path.pop()

        handles = []
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda _m, _args, name=name: self._path.append(name)))
            handles.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = _linear_operands(func, args, kwargs)
        if operands is not None:
            x, weight = operands
            self.representation = None if _is_transformed() else x.detach().reshape(-1, x.shape[-1]).clone()
        elif func in _CONVOLUTIONS:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            self.representation = None
        out = func(*args, **kwargs)
        if operands is not None or func in _CONVOLUTIONS:
            self._layer = _Layer(self._name(func, weight), out.shape, 1 if operands is None else -1)
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
                note = _Note(self._layer, self._features(self._layer, out))
                self._activations.append(note)
                self._after_last.append(note)
                self._gates.mark(out, note)
        return out

    def _name(self, func: Callable[..., Any], weight: Tensor) -> str:
        """Return the name of the module at work; in the model itself that of the weight, as other measures have it."""
        return (self._path[-1] if self._path else "") or self._names.get(id(_stored(weight)), func.__name__)

    def _features(self, layer: _Layer, out: Tensor) -> Features | None:
        if _is_transformed():
            return None
        h = out.detach()
        if h.ndim < 2:  # one sample without a dimension of its own
            h = h.reshape(1, -1)
        by_unit = layer.by_unit(h)
        if by_unit is None:
            return None
        return Features(
            by_unit.abs().mean(1, dtype=torch.float64),
            (by_unit != 0).sum(1),
            h.flatten(1).clone() if self._keep and len(h) == self._samples else None,
        )

    def layers(self) -> dict[str, Features | None]:
        """Return the hidden features: those after the last layer with a weight are outputs, not hidden.

        `None` stands for features that are unclear.
        """
        found: dict[str, Features | None] = {}
        for note in [note for note in self._activations if note not in self._after_last] or self._outputs[:-1]:
            name, again = note.layer.name, 2
            while name in found:
                name, again = f"{note.layer.name}:{again}", again + 1
            found[name] = note.features
        return found


def capture(model: nn.Module, batch: Batch, keep: bool = False) -> Captured:
    """Run a model on a batch and return what its hidden units did.

    Args:
        model: In the mode to be measured in.
        batch: The samples; their target is not looked at.
        keep: Whether to keep the activations themselves.
    """
    watch = _Watch(model, batch.size, keep)
    with torch.no_grad(), _uncompiled(), watch.named(), watch:
        output = model(*batch.args, **batch.kwargs)
    found = watch.layers()
    told = {name: features for name, features in found.items() if features is not None}
    return Captured(output, told, watch.representation, tuple(name for name in found if name not in told))


def _uncompiled() -> AbstractContextManager[None]:
    """Run compiled parts of a model as they were written, for they hide their modules and call functions to trace."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and it takes long to import
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance
