"""Hooks on modules that stay with the module they were made for."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class ModuleHook:
    """A hook for one module, to be registered on it, that calls a method of an object as long as that lives.

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
