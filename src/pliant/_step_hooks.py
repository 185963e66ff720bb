"""Hooks on an optimizer's step that run once per step.

torch wraps the `step` of a class when the first optimizer of exactly that class is created, and every wrapped `step`
runs the hooks. If the step of a subclass calls the step of its parent, and an optimizer of the parent class exists, the
hooks run twice per step. The hooks here ignore the inner call.
"""

import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

Hook = Callable[[Optimizer, Any, Any], Any]

_STEP: CodeType = Optimizer.profile_hook_step(lambda: None).__code__
"""The code of a step that torch has wrapped."""

_WRAPPING = ("accelerate", "lightning", "pytorch_lightning", "lightning_fabric")
"""Packages that wrap optimizers and have the wrapped one as `.optimizer`."""


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of Accelerate and Lightning, which call its step."""
    while any(cls.__module__.split(".")[0] in _WRAPPING for cls in type(optimizer).__mro__):
        optimizer = optimizer.optimizer
    return optimizer


def before_step(optimizer: Optimizer, hook: Hook) -> RemovableHandle:
    """Call a hook once before each step."""
    return optimizer.register_step_pre_hook(_once(optimizer, hook))


def after_step(optimizer: Optimizer, hook: Hook) -> RemovableHandle:
    """Call a hook once after each step."""
    return optimizer.register_step_post_hook(_once(optimizer, hook))


def owners_of_hooks(optimizer: Optimizer) -> list[object]:
    """Return the objects whose methods are hooks of the optimizer's step; None for a plain function."""
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    return [_owner_of(hook) for hook in hooks]


def place_hook(optimizer: Optimizer, handle: RemovableHandle, acts_later: Callable[[object], bool]) -> None:
    """Move a post-hook before the first post-hook that must act later.

    Args:
        optimizer: The optimizer.
        handle: The handle of the post-hook.
        acts_later: Whether the post-hook of this owner must act later (`owners_of_hooks` says who owns a hook).
    """
    hooks = optimizer._optimizer_step_post_hooks
    keys = list(hooks)
    first = next((place for place, key in enumerate(keys) if acts_later(_owner_of(hooks[key]))), len(keys))
    for key in keys[first:]:
        if key != handle.id:
            hooks[key] = hooks.pop(key)


def _owner_of(hook: Hook) -> object:
    return getattr(getattr(hook, "hook", hook), "__self__", None)


class _StepHook:
    """A hook that a compiled step runs uncompiled, and that may ignore a step called by another step of the optimizer.

    Args:
        hook: The hook.
        outermost: Whether to ignore inner steps.
    """

    def __init__(self, hook: Hook, *, outermost: bool) -> None:
        self.hook = hook
        self._outermost = outermost

    @_disable_dynamo
    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._outermost and _is_inner_step(optimizer):
            return None
        return self.hook(optimizer, args, kwargs)


def _is_inner_step(optimizer: Optimizer) -> bool:
    """Return whether a step of the optimizer is running that called the one with this hook."""
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None:
        steps += frame.f_code is _STEP and frame.f_locals["self"] is optimizer
        frame = frame.f_back
    return steps > 1


def _once(optimizer: Optimizer, hook: Hook) -> Hook:
    steps = {inspect.unwrap(vars(c)["step"]) for c in type(optimizer).__mro__ if "step" in vars(c) and c != Optimizer}
    return _StepHook(hook, outermost=len(steps) > 1)  # most optimizers need no look at the stack
