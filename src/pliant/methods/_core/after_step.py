"""Methods that rewrite parameters after each step."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pliant._step_hooks import after_step, before_step
from pliant.methods._core.attachment import Attachment, count_step, is_due, was_skipped
from pliant.methods._core.filters import Filter
from pliant.methods._core.method import Kind, Method


class AfterStep(Method):
    """A method that rewrites parameters after every n-th step of the optimizer.

    Attributes:
        every: Act on every n-th step; never if None.
        first: The first step to act on, counted from 1; `every` if None.
    """

    kind: ClassVar[Kind] = "after_step"
    every: int | None = 1
    first: int | None = None

    @abstractmethod
    def _act(self, optimizer: Optimizer, attachment: Attachment) -> None:
        """Rewrite parameters after a step that is due; change nothing if `optimizer.found_inf` is not zero."""

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        attachment = self._attachments[optimizer]
        if not attachment.is_current(optimizer):
            self._match_again(optimizer, attachment)
        if self._count_due_step(optimizer, attachment):
            with self._acting():
                self._act(optimizer, attachment)

    def _count_due_step(self, optimizer: Optimizer, attachment: Attachment) -> bool:
        """Count a step and return whether to act on it.

        If a due step was skipped by the optimizer, it does not count, and the next step is due instead.
        """
        if not is_due(count_step(self.steps, attachment.slot), self.every, self.first):
            return False
        if self.every != 1 and was_skipped(optimizer):
            self.steps[attachment.slot] -= 1
            return False
        return True

    def _register_hooks(self, optimizer: Optimizer) -> list[RemovableHandle]:
        return [after_step(optimizer, self._after_step)]


class AroundStep(AfterStep):
    """A method that rewrites the optimizer's own move: it copies the parameters before each step."""

    order: ClassVar[int] = 10

    def __init__(self, model: nn.Module, *, where: Filter | None = None) -> None:
        super().__init__(model, where=where)
        self._before: dict[tuple[str, ...], list[Tensor]] = {}

    def step(self) -> None:
        """Raise a TypeError: without an optimizer's step there is no move to rewrite."""
        raise TypeError(f"{self.name} acts on an optimizer's step: call attach()")

    def _register_hooks(self, optimizer: Optimizer) -> list[RemovableHandle]:
        return [*super()._register_hooks(optimizer), before_step(optimizer, self._before_step)]

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        names = self._attachment(optimizer).names
        with self._acting():
            self._gradients(names)  # refuse sparse gradients before anything moves
            self._before[names] = list(torch._foreach_clone([self.parameters[name] for name in names]))

    def _take_before(self, attachment: Attachment) -> dict[str, Tensor]:
        """Return the parameters as they were before the step, by name."""
        return dict(zip(attachment.names, self._before.pop(attachment.names), strict=True))
