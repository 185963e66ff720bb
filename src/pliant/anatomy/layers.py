"""The layers of a model in order of call, found by running an example."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from pliant.running import call_with, undisturbed


@dataclass(frozen=True)
class Layer:
    """A module that holds parameters directly, or a norm layer.

    Attributes:
        name: The module's name in the model.
        module: The module.
        sources: The names of the layers whose outputs it reads, through operators but not through other layers.
    """

    name: str
    module: nn.Module
    sources: frozenset[str] = frozenset()


NORM_LAYERS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Torch's norm layers, whose output does not depend on the scale of their input. Batch norm is a `_NormBase`."""

WEIGHT_LAYERS = (nn.Linear, _ConvNd)
"""Layers that compute a product of weight and input, plus a bias."""


def is_norm(module: nn.Module) -> bool:
    """Say whether a module is a norm layer: torch's own, or one of another library, such as `LlamaRMSNorm`.

    A module of another class is a norm layer if the class has "Norm" in its name, and the module holds vectors and no
    other modules.

    Example:
        >>> class ChannelNorm(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.ones(3))
        >>> [is_norm(module) for module in (nn.BatchNorm1d(3), ChannelNorm(), nn.Linear(3, 3))]
        [True, True, False]
    """
    if isinstance(module, NORM_LAYERS):
        return True
    own = list(module.parameters(recurse=False))
    named = re.search("norm(?!al)", type(module).__name__.lower())  # but not a normal distribution
    return bool(named and own and all(p.ndim == 1 for p in own) and next(module.children(), None) is None)


def called_layers(model: nn.Module, example: Any) -> tuple[Layer, ...]:
    """Return the layers of a model in the order in which it calls them on the example.

    A module that is called twice appears twice. The model runs once, in eval mode and without gradients, and is left
    as it was.
    """
    called: list[Layer] = []
    origins = _Origins()

    def note(module: nn.Module, args: Any, kwargs: Any, name: str) -> None:
        called.append(Layer(name, module, origins.of((args, kwargs))))

    handles = []
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None or isinstance(module, NORM_LAYERS):
            handles.append(module.register_forward_pre_hook(partial(note, name=name), with_kwargs=True))
            handles.append(module.register_forward_hook(lambda _m, _args, out, name=name: origins.set(out, {name})))
    try:
        with undisturbed(model), torch.no_grad(), origins:
            call_with(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(called)


class _Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows from which layers' outputs each tensor was computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; its outputs come from what its inputs come from."""
        out = func(*args, **(kwargs or {}))
        self.set(out, self.of((args, kwargs)))
        return out

    def of(self, values: Any) -> frozenset[str]:
        """Return the names of the layers that the tensors in a tree come from."""
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        return frozenset(name for tensor in tensors for name in self._names.get(tensor, ()))

    def set(self, values: Any, names: Collection[str]) -> None:
        """Let the tensors in a tree come from these layers."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                self._names[leaf] = frozenset(names)


def classifier_names(layers: Sequence[Layer]) -> tuple[str, ...]:
    """Return the names of the linear layers at the end of a model: its classifier.

    If all layers are linear, the classifier is the last one; of a model with several heads, the last of each.

    Args:
        layers: The layers in order of call.

    Raises:
        ValueError: If the last layer is not linear.
    """
    names: list[str] = []
    layers = [layer for layer in layers if not isinstance(layer.module, nn.PReLU)]  # PReLU is an activation
    for layer in reversed(layers):
        if not isinstance(layer.module, nn.Linear):
            break
        names.insert(0, layer.name)
    if not names:
        last = f"{layers[-1].name!r} ({type(layers[-1].module).__name__})" if layers else "no layer at all"
        raise ValueError(f"model: it ends in {last}, not in a linear layer; name the classifier's modules yourself")
    if len(names) == len(layers):
        read = {source for layer in layers for source in layer.sources}
        names = [name for name in names[:-1] if name not in read] + names[-1:]
    return tuple(dict.fromkeys(names))


def classifier_parameters(model: nn.Module, example: Any) -> set[int]:
    """Return the identities (`id`) of the classifier's parameters."""
    modules = [model.get_submodule(name) for name in classifier_names(called_layers(model, example))]
    return {id(parameter) for module in modules for parameter in module.parameters()}
