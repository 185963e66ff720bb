"""Hooks on modules that are not copied with the module."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo


class _Thread(threading.local):
    """State of one thread."""

    silent = False


_thread = _Thread()


@contextmanager
def silent_hooks() -> Iterator[None]:
    """Silence all these hooks in this thread, while a method runs the model for its own purposes."""
    before, _thread.silent = _thread.silent, True
    try:
        yield
    finally:
        _thread.silent = before


class ModuleHook:
    """A hook that calls a bound method as long as its object exists.

    The hook is silent while the model is traced, and inside transforms of torch.func, whose tensors must not leave
    them.

    Copying or pickling a model copies its hooks and everything they hold. This hook holds the module and the object by
    weak references, and a copy of the hook does nothing.

    Args:
        module: The module.
        function: The bound method, called with the arguments of the hook.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self._function = weakref.WeakMethod(function)

    @_disable_dynamo
    def __call__(self, module: nn.Module, *args: Any) -> Any:
        """Call the method, uncompiled, if this is the module that the hook was made for."""
        if _thread.silent or torch.compiler.is_exporting() or torch._C._are_functorch_transforms_active():
            return None
        function = self._function()
        return function(module, *args) if module is self._module() and function is not None else None

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _silence, ()


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first argument of a module's call, positional or keyword."""
    return args[0] if args else next(iter(kwargs.values()))


def _silence() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    """Replace the hook in a copied module."""
