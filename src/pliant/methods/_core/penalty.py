"""Methods that are a term of the loss.

A penalty adds its closed-form gradient to `.grad` before the step: the trajectory of the same term in the loss, without
an autograd graph. Three facts follow. Gradient clipping by the user happens before the hook, so the penalty is not
clipped (call `add_gradient_()` before clipping instead of attaching for the in-loss meaning); a parameter whose `.grad`
is None is skipped, as the optimizer itself skips it; and two optimizers that share a parameter need a backward pass
each, or the second finds the penalty of the first in its gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pliant._precision import widen
from pliant._step_hooks import before_step
from pliant.methods._core.attachment import ascending_names, closure_of, count_step, found_inf_of, with_closure
from pliant.methods._core.method import Kind, Method, Receipt


class Penalty(Method):
    """A term of the loss, λ·penalty(θ), that enters as its gradient."""

    kind: ClassVar[Kind] = "penalty"
    order: ClassVar[int] = 0
    strengths: Mapping[str, float]
    """λ of each parameter that has one, by name."""

    @abstractmethod
    def value(self, names: Sequence[str] | None = None) -> Tensor:
        """Return the term λ·penalty(θ) over these parameters (all if None), without a graph."""

    @abstractmethod
    def _add_to(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        """Add the term's gradient, times `scale` if given, to these tensors in place; change nothing else."""

    def _observe(self, gradients: Mapping[str, Tensor], scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Bring what is kept between steps up to date, once a step, before the term's gradient is added.

        Args:
            gradients: The loss's gradients by name, times `scale` if given.
            scale: The loss scale.
            found_inf: Not zero if the step is going to be skipped; None if that cannot be.
        """

    def add_gradient_(self) -> None:
        """Add the gradient of the term to every parameter's `.grad`, as the hook does."""
        self._add_gradient(tuple(self.parameters), 0)

    def step(self) -> None:
        """Do by hand what the hook does before a step: the same as `add_gradient_()`."""
        self.add_gradient_()

    @property
    def receipt(self) -> Receipt | None:
        """The penalty's value and gradient norm at the present parameters, and how often it acted."""
        if not self.steps:
            return None
        served = self._served()
        gradients = {name: torch.zeros_like(self.parameters[name]) for name in served}
        with torch.no_grad():
            self._add_to(gradients, None)
            norms = torch.stack([widen(g).norm().float() for g in gradients.values()])
            value = float(self.value(served))
        details = {"value": value, "gradient_norm": float(norms.norm()), "steps": sum(self.steps)}
        penalized = [self.parameters[name].numel() for name in served if name in self.strengths]
        return Receipt(self.name, "add gradient", len(penalized), sum(penalized), details)

    def _acted_on(self) -> Iterable[nn.Parameter]:
        return [self.parameters[name] for name, strength in self.strengths.items() if strength]

    def _register_hooks(self, optimizer: Optimizer) -> list[RemovableHandle]:
        return [before_step(optimizer, self._before_step)]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        attachment = self._attachment(optimizer)
        names, slot = attachment.names, attachment.slot
        ascending = ascending_names(optimizer, names, attachment.groups)
        closure = closure_of(args, kwargs)
        if closure is None:
            # Under a GradScaler a fused optimizer gets its gradients still scaled, and says by how much.
            scale = getattr(optimizer, "grad_scale", None)
            self._add_gradient(names, slot, ascending, scale, found_inf_of(optimizer))
            return None
        calls = 0

        def closure_with_penalty() -> Any:
            # The closure clears and fills the gradients, possibly many times a step: add after each call. A line
            # search compares the values that it returns, so these must hold the term too, and the term must be one
            # function of the parameters: what is kept between steps changes at the first call alone.
            nonlocal calls
            loss = closure()
            self._add_gradient(names, slot, ascending, first=calls == 0)
            calls += 1
            if loss is None:
                return None
            descending = [name for name in names if name not in ascending]
            return loss + self.value(descending).to(loss) - self.value(ascending).to(loss)

        return with_closure(args, kwargs, closure_with_penalty)

    @torch.set_grad_enabled(False)  # Cheaper than no_grad, where every microsecond counts.
    def _add_gradient(
        self,
        names: Sequence[str],
        slot: int,
        ascending: Sequence[str] = (),
        scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        *,
        first: bool = True,
    ) -> None:
        gradients = self._gradients(names)
        # An optimizer that maximizes is given the gradient of minus the loss.
        climbed = [gradients[name] for name in ascending if name in gradients] if ascending else None
        if climbed:
            torch._foreach_neg_(climbed)
        if first:
            count_step(self.steps, slot)
            self._observe(gradients, scale, found_inf)
        if gradients:
            self._add_to(gradients, scale)
        if climbed:
            torch._foreach_neg_(climbed)
