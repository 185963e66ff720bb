"""The layers of a model in the order in which it calls them, seen by running an example."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from pliant._seeding import undrawn


@dataclass(frozen=True)
class Layer:
    """A module that holds parameters of its own, or a norm layer without any.

    Attributes:
        name: Its name in the model.
        module: The module.
    """

    name: str
    module: nn.Module


NORM_LAYERS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""The layers that undo a scale of their input (batch and instance norm share `_NormBase`)."""

Example = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]
"""An input of a model: a tensor, a tuple of positional arguments or a dictionary of keyword arguments."""

WEIGHT_LAYERS = (nn.Linear, _ConvNd)
"""The layers whose output is linear in weight and input, plus a bias."""


def split_example(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split an example into positional and keyword arguments."""
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple):
        return example, {}
    raise TypeError(
        f"example is a {type(example).__name__}; allowed are a tensor, a tuple of positional arguments "
        "and a dict of keyword arguments"
    )


def check_callable(model: nn.Module) -> None:
    """Raise a ValueError if the model has no forward(), as an agent that holds an actor and a critic."""
    if getattr(model.forward, "__func__", None) is nn.Module.forward:
        children = ", ".join(name for name, _ in model.named_children()) or "it has none"
        raise ValueError(
            f"model: {type(model).__name__} has no forward(); pass the networks that it holds one at a time "
            f"({children}), or a module whose forward() calls them"
        )


def call_with(model: nn.Module, example: Example) -> Any:
    """Call the model on an example."""
    check_callable(model)
    arguments, keywords = split_example(example)
    return model(*arguments, **keywords)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode, and afterwards every module in the mode it was in.

    The flags are set as they are: `train()` and `eval()` of a module may do more, such as merging an adapter into a
    weight, which would change the model.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Bring back the random generators and what passes may write: buffers, weights that `max_norm` shortens."""
    saved = []
    for module in model.modules():
        held: dict[str, torch.Tensor] = dict(module.named_buffers(recurse=False))
        if getattr(module, "max_norm", None) is not None:
            held |= module.named_parameters(recurse=False)
        saved += [(module, name, tensor, tensor.detach().clone()) for name, tensor in held.items()]
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    with undrawn(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, tensor, before in saved:
                    # Only what changed: writing into a tensor spoils the graphs that it is part of.
                    if tensor.layout != torch.strided or not tensor.equal(before):
                        tensor.copy_(before)
                    if getattr(module, name) is not tensor:
                        setattr(module, name, tensor)


def called_layers(model: nn.Module, example: Any) -> tuple[Layer, ...]:
    """Return the layers of a model in the order in which it calls them on the example.

    Those are the modules with parameters of their own, and all norm layers. A module that is called twice appears
    twice. The model runs once in eval mode without gradients and is left as it was.
    """
    called: list[Layer] = []
    handles = []
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None or isinstance(module, NORM_LAYERS):
            layer = Layer(name, module)
            handles.append(module.register_forward_pre_hook(lambda _m, _args, layer=layer: called.append(layer)))
    try:
        with left_as_it_was(model), eval_mode(model), torch.no_grad():
            call_with(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(called)


def classifier_names(layers: Sequence[Layer]) -> tuple[str, ...]:
    """Return the names of the classifier: the linear layers at the end, up to the first layer of another kind.

    A network of linear layers alone is no classifier from top to bottom: there it is the last layer.

    Args:
        layers: The layers in order of their call.

    Raises:
        ValueError: If the last layer is not linear, so that the classifier must be named.
    """
    names: list[str] = []
    layers = [layer for layer in layers if not isinstance(layer.module, nn.PReLU)]  # an activation, learned or not
    for layer in reversed(layers):
        if not isinstance(layer.module, nn.Linear):
            break
        names.insert(0, layer.name)
    if not names:
        last = f"{layers[-1].name!r} ({type(layers[-1].module).__name__})" if layers else "no layer at all"
        raise ValueError(f"model: it ends in {last}, not in a linear layer; name the classifier's modules yourself")
    if len(names) == len(layers):
        return (names[-1],)
    return tuple(dict.fromkeys(names))
