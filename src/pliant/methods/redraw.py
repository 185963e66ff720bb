"""Fresh draws of a model's initial values, in the distribution that its own modules initialise themselves with."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pliant.seeding import derive_seed

Init = Callable[[nn.Module], object]


def has_own_tensors(module: nn.Module) -> bool:
    """Return whether the module itself, not a child, holds parameters."""
    return next(module.parameters(recurse=False), None) is not None


def reset_function(module: nn.Module) -> Callable[[], object] | None:
    """Return the module's own initialiser (torch names it in two ways), or None if it has none."""
    function = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return function if callable(function) else None


def check_redrawable(model: nn.Module, init: Init | None) -> None:
    """Raise a ValueError naming the first module whose parameters nothing can re-draw."""
    if init is not None:
        return
    for name, module in model.named_modules():
        if has_own_tensors(module) and reset_function(module) is None:
            parameter = next(iter(dict(module.named_parameters(recurse=False))))
            raise ValueError(
                f"model: module {name or type(module).__name__!r} holds the parameter {parameter!r} but has no "
                "reset_parameters(); give it one, or pass init=, a function that initialises a model in place"
            )


@contextmanager
def seeded(seed: int | None, draw: int) -> Iterator[None]:
    """Draw from torch's global generators, or, given a seed, from a stream of our own that leaves them as they are.

    Args:
        seed: The stream; None for the global generators.
        draw: Which draw of the stream this is, counted from 0, so that a resumed run goes on where it stopped.
    """
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed("draw", seed, draw))
        yield


def draw_fresh(model: nn.Module, init: Init | None = None) -> dict[str, Tensor]:
    """Return newly initialised values of all parameters and buffers by name; the model itself is not touched.

    Args:
        model: The model.
        init: A function that initialises a model in place; each module's own `reset_parameters` if None.
    """
    fresh = copy.deepcopy(model)
    for parameter in fresh.parameters():
        # A draw fills memory in order: the layout of the weights must not decide which entry gets which value.
        parameter.data = parameter.data.contiguous()
    if init is not None:
        init(fresh)
    else:
        for module in fresh.modules():
            function = reset_function(module)
            if function is not None:
                function()
    # Tied tensors appear under each of their names, so that a caller finds whichever it knows.
    return {
        name: tensor.detach()
        for tensors in (
            fresh.named_parameters(remove_duplicate=False),
            fresh.named_buffers(remove_duplicate=False),
        )
        for name, tensor in tensors
    }


@torch.no_grad()
def redraw_(model: nn.Module, parameters: Mapping[str, nn.Parameter], init: Init | None = None) -> None:
    """Re-draw these parameters in place, and start the buffers of the modules that own them anew.

    Args:
        model: The model.
        parameters: The parameters to re-draw, by their names in the model.
        init: A function that initialises a model in place; each module's own `reset_parameters` if None.
    """
    fresh = draw_fresh(model, init)
    torch._foreach_copy_(list(parameters.values()), [fresh[name] for name in parameters])
    owners = {name.rpartition(".")[0] for name in parameters}
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[0] in owners:
            buffer.copy_(fresh[name])
