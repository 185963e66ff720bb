"""Methods that rewrite parameters after each step."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pliant._step_hooks import after_step
from pliant.methods._core.attachment import is_due, was_skipped
from pliant.methods._core.method import Kind, Method


class AfterStep(Method):
    """A rule that rewrites parameters right after each step of the optimizer."""

    kind: ClassVar[Kind] = "after_step"

    @abstractmethod
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Act after a step; honor `optimizer.found_inf`: a step that was skipped is not followed by an action."""

    def _count_due_step(self, optimizer: Optimizer, counter: str, every: int, first: int | None = None) -> bool:
        """Count a step, and say whether to act on it; one of n > 1 that was skipped leaves that to the next."""
        if not is_due(self._count_step(counter), every, first):
            return False
        if every > 1 and self._was_skipped(optimizer):
            self.steps[counter] -= 1
            return False
        return True

    _was_skipped = staticmethod(was_skipped)

    def _register_hooks(self, optimizer: Optimizer) -> list[RemovableHandle]:
        return [after_step(optimizer, self._after_step)]
