"""Call a model on an example, and leave the model as it was."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pliant._seeding import undrawn

Example = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]
"""The input of a model: a tensor, a tuple of positional arguments or a dictionary of keyword arguments."""


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
    """Raise a ValueError if the model lacks a forward(), such as an agent that only holds an actor and a critic."""
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
    """Put a model in eval mode. Afterwards, every module returns to its previous mode.

    This sets the `training` flags directly. A module's own `train()` and `eval()` may do more, such as merging an
    adapter into a weight.
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
    """Restore everything that a forward pass may change.

    That is: the random generators, the buffers, and embedding weights that `max_norm` renormalizes in place.
    """
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
                    # Write only changed values: an in-place write invalidates autograd graphs that hold the tensor.
                    if tensor.layout != torch.strided or not tensor.equal(before):
                        tensor.copy_(before)
                    if getattr(module, name) is not tensor:
                        setattr(module, name, tensor)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode. Afterwards, restore its modes and everything that a forward pass may change."""
    with left_as_it_was(model), eval_mode(model):
        yield
