"""What the hidden units of a live model do on a batch.

A torch function mode sees every layer with a weight (linear, convolution) and every activation function that a forward
pass calls, as a module or as a function. The *hidden features of a layer* are the output of the first activation that
follows it, so after the norm layer and the nonlinearity; in a network without activations, its own output. The
*representation* is what the last linear layer receives: the last hidden features, which it maps to the outputs. Units
are channels after a convolution, and entries of the last dimension after a linear layer.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pliant.diagnostics.batches import Batch

_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)

_ACTIVATIONS = frozenset(
    {
        torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_, functional.relu, functional.relu6,
        functional.leaky_relu, functional.rrelu, functional.prelu, functional.elu, functional.celu, functional.selu,
        functional.gelu, functional.silu, functional.mish, functional.hardswish, functional.hardtanh,
        functional.softplus, functional.softsign, functional.sigmoid, functional.tanh, functional.hardsigmoid,
        torch.tanh, torch.sigmoid, torch.Tensor.tanh, torch.Tensor.sigmoid,
    }
)  # fmt: skip


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
        representation: What the last linear layer received, [samples × positions, units]; `None` if there is none.
    """

    output: Any
    layers: dict[str, Features]
    representation: Tensor | None


class _Watch(TorchFunctionMode):
    def __init__(self, model: nn.Module, samples: int, keep: bool) -> None:
        super().__init__()
        self._samples = samples
        self._keep = keep
        self._path: list[str] = []
        self._model = model
        self._layer: tuple[str, int] | None = None  # the last layer with a weight, and where its units are
        self._activations: dict[str, Features] = {}
        self._outputs: dict[str, Features] = {}
        self._after_last: list[str] = []
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
        if func is functional.linear:
            x = args[0] if args else kwargs["input"]
            self.representation = x.detach().flatten(0, -2).clone()
        out = func(*args, **kwargs)
        if func is functional.linear or func in _CONVOLUTIONS:
            name = self._path[-1] if self._path else ""
            self._layer = (name, -1 if func is functional.linear else 1)
            self._after_last = []
            self._note(self._outputs, out)
        elif func in _ACTIVATIONS and self._layer is not None:
            self._after_last.append(self._note(self._activations, out))
        return out

    def _note(self, found: dict[str, Features], out: Tensor) -> str:
        assert self._layer is not None
        layer, dim = self._layer
        name, again = layer, 2
        while name in found:
            name, again = f"{layer}:{again}", again + 1
        h = out.detach()
        by_unit = h.movedim(dim, 0).flatten(1)
        found[name] = Features(
            by_unit.abs().mean(1, dtype=torch.float64),
            (by_unit != 0).sum(1),
            h.flatten(1).clone() if self._keep and len(h) == self._samples else None,
        )
        return name

    def layers(self) -> dict[str, Features]:
        """Return the hidden features: those after the last layer with a weight are outputs, not hidden."""
        if self._activations:
            return {name: f for name, f in self._activations.items() if name not in self._after_last}
        return dict(list(self._outputs.items())[:-1])


def capture(model: nn.Module, batch: Batch, keep: bool = False) -> Captured:
    """Run a model on a batch and return what its hidden units did.

    Args:
        model: In the mode to be measured in.
        batch: The samples; their target is not looked at.
        keep: Whether to keep the activations themselves.
    """
    watch = _Watch(model, batch.size, keep)
    with torch.no_grad(), watch.named(), watch:
        output = batch.forward(model)
    return Captured(output, watch.layers(), watch.representation)
