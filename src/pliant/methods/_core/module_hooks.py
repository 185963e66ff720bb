"""Hooks on modules that stay with the module they were made for."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class _Thread(threading.local):
    """What is set for one thread alone."""

    silent = False


_thread = _Thread()


@contextmanager
def silent_hooks() -> Iterator[None]:
    """Keep all of these hooks from seeing passes of this thread that are no training: a method's look at the data."""
    before, _thread.silent = _thread.silent, True
    try:
        yield
    finally:
        _thread.silent = before


class ModuleHook:
    """A hook for one module, to be registered on it, that calls a method of an object as long as that lives.

    It is silent while the model is traced: other methods trace it to find their way, on tensors that hold no numbers.
    So it is inside a transform of torch.func, whose tensors may not leave it: per-example gradients are no training.

    Copying or pickling a model takes its hooks along, and with them whatever they hold: a copy of the object, acting on
    the copied model without anyone having attached it. This hook holds both ends weakly, and a copy of it does nothing.

    Args:
        module: The module.
        function: A bound method, called with what the module passes to the hook.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self._function = weakref.WeakMethod(function)

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        """Pass on what the module says, if it is the one that this hook was made for."""
        if _thread.silent or torch.compiler.is_exporting() or torch._C._are_functorch_transforms_active():
            return None
        function = self._function()
        return function(module, *args) if module is self._module() and function is not None else None

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _silence, ()


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first argument that a module was called with, given by its place or by its name."""
    return args[0] if args else next(iter(kwargs.values()))


def _silence() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    """Stand where a hook was before its module was copied."""
