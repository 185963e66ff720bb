"""Which activation functions are but a part of one that is written out, as in u · sigmoid(u) or ½u(1 + tanh(…)).

There the function that is called gives a gate, and what the units do is the product. A gate is told from a genuine
activation by what it multiplies: values are followed through the calls that make each entry from one entry, and a
product is an activation that is written out where both of its factors were made in this way of one and the same tensor,
and went through different activations. It stands for those that not both went through, and so does its multiple by a
number; by what the model has learned or was given (the scale of a branch, a mask) it does not: that is no part of the
activation. A gate that multiplies another tensor (that of another layer, another part of the same layer's output, a
mean of it) stays an activation of its own.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

_PRODUCTS = frozenset({"mul", "rmul", "imul", "multiply"})
_QUOTIENTS = frozenset({"div", "truediv", "idiv", "itruediv", "divide", "true_divide"})
_CASTS = frozenset({"to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone"})
_ENTRYWISE = frozenset({
    *_PRODUCTS, *_QUOTIENTS, *_CASTS, "rdiv", "rtruediv", "add", "radd", "iadd", "sub", "rsub", "isub", "subtract",
    "pow", "rpow", "ipow", "float_power", "square", "sqrt", "rsqrt", "reciprocal", "neg", "negative", "positive", "abs",
    "exp", "expm1", "log", "log1p", "erf", "erfc", "special_erf", "special_erfc", "special_expit", "atan", "arctan",
    "sin", "cos", "sign", "clamp", "clip", "clamp_min", "clamp_max", "dropout",
})  # fmt: skip
"""Functions that make each entry from one entry of each tensor that they read, by their names without underscores."""


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
