"""Methods that are a term of the loss, and the arithmetic that they share.

A penalty adds its closed-form gradient to `.grad` before the step. The run is the same as with the term in the loss,
without an autograd graph. Three facts follow:

- Gradient clipping by the user happens before the hook, so the penalty is not clipped. To clip it too, call
  `add_gradient_()` before clipping instead of attaching.
- A parameter whose `.grad` is None is skipped, as the optimizer itself skips it.
- Two optimizers that share a parameter need a backward pass each. Otherwise the second one finds the penalty of the
  first one in the gradient.
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
from pliant.methods._core.filters import Filter, Strength, resolve_strengths
from pliant.methods._core.learning_rate import LearningRateSchedule, Schedule
from pliant.methods._core.method import Kind, Method, Receipt


class Penalty(Method):
    """A term of the loss, λ·penalty(θ), that enters as its gradient.

    Args:
        model: The model.
        lam: λ, one for all parameters or by name pattern.
        schedule: "constant" λ, or "coupled": λ·lr/lr₀, where lr₀ is the rate at the
            start.
        where: Which parameters to penalize; all learnable ones if None.

    Attributes:
        strengths: λ of each parameter that has one, by name, at the present learning rate.
    """

    kind: ClassVar[Kind] = "penalty"
    order: ClassVar[int] = 0

    def __init__(
        self, model: nn.Module, *, lam: Strength, schedule: Schedule = "constant", where: Filter | None = None
    ) -> None:
        super().__init__(model, where=where)
        self._lam = resolve_strengths(lam, self.parameters)
        self.strengths: Mapping[str, float] = self._lam
        self.schedule = LearningRateSchedule(schedule, tuple(self._lam), allowed=("constant", "coupled"))

    @abstractmethod
    def value(self, names: Sequence[str] | None = None) -> Tensor:
        """Return the term λ·penalty(θ) over these parameters (all if None), without a graph."""

    @abstractmethod
    def _add_to(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        """Add the term's gradient, times `scale` if given, to these tensors in place; change nothing else."""

    def _observe(self, gradients: Mapping[str, Tensor], scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Update the state between steps; called once per step, before the term's gradient is added.

        Args:
            gradients: The gradients of the loss by name, times `scale` if given.
            scale: The loss scale.
            found_inf: Not zero if the optimizer will skip the step; None if it cannot skip.
        """

    def add_gradient_(self) -> None:
        """Add the gradient of the term to every parameter's `.grad`, as the hook does."""
        self._follow_rates(*self.optimizers)
        self._add_gradient(tuple(self.parameters), 0)

    def step(self) -> None:
        """Add the gradient of the term by hand: the same as `add_gradient_()`."""
        self.add_gradient_()

    @property
    def receipt(self) -> Receipt | None:
        """The penalty's value and gradient norm at the present parameters, and the number of steps."""
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
        self._follow_rates(optimizer)
        ascending = ascending_names(optimizer, names, attachment.groups)
        closure = closure_of(args, kwargs)
        if closure is None:
            # Under a GradScaler, the gradients of a fused optimizer are still scaled.
            scale = getattr(optimizer, "grad_scale", None)
            self._add_gradient(names, slot, ascending, scale, found_inf_of(optimizer))
            return None
        calls = 0

        def closure_with_penalty() -> Any:
            # The closure computes new gradients, possibly several times per step, so the term is added after each call.
            # A line search compares the returned values, so they include the term, and the state between steps changes
            # only at the first call.
            nonlocal calls
            loss = closure()
            self._add_gradient(names, slot, ascending, first=calls == 0)
            calls += 1
            if loss is None:
                return None
            descending = [name for name in names if name not in ascending]
            return loss + self.value(descending).to(loss) - self.value(ascending).to(loss)

        return with_closure(args, kwargs, closure_with_penalty)

    def _follow_rates(self, *optimizers: Optimizer) -> None:
        """With schedule="coupled", multiply λ of the parameters of these optimizers by lr/lr₀."""
        if self.schedule.kind == "coupled":
            attached = [(optimizer, self._attachment(optimizer)) for optimizer in optimizers]
            factors = self.schedule.factors(attached, otherwise=1.0).tolist()
            self.strengths = {
                name: lam * factor for (name, lam), factor in zip(self._lam.items(), factors, strict=True)
            }

    @torch.set_grad_enabled(False)  # cheaper than no_grad
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
        if first:
            count_step(self.steps, slot)
        with self._acting():
            for part in self._in_batches(names, gradients=True):
                gradients = self._gradients(part)
                # An optimizer that maximizes has the gradient of minus the loss.
                climbed = [gradients[name] for name in ascending if name in gradients] if ascending else None
                if climbed:
                    torch._foreach_neg_(climbed)
                if first:
                    self._observe(gradients, scale, found_inf)
                if gradients:
                    self._add_to(gradients, scale)
                if climbed:
                    torch._foreach_neg_(climbed)


def add_scaled_(
    gradients: Mapping[str, Tensor],
    directions: Mapping[str, Tensor],
    strengths: Mapping[str, float],
    scale: Tensor | None,
    origins: Mapping[str, Tensor] | None = None,
) -> None:
    """Add strength · scale · (direction − origin) to each gradient in place, in batches of equal strength.

    Args:
        gradients: The gradients by name.
        directions: The directions by name, for every gradient with a strength.
        strengths: The strengths by name; a gradient without one is left alone.
        scale: A factor for all of them (the loss scale); 1 if None.
        origins: The origins by name; 0 if None.
    """
    by_strength: dict[float, list[str]] = {}
    for name in gradients:
        if name in strengths:
            by_strength.setdefault(strengths[name], []).append(name)
    for strength, names in by_strength.items():
        added = [directions[name] for name in names]
        if origins is not None:
            added = list(torch._foreach_sub(added, [origins[name] for name in names]))
        if scale is not None:
            added = list(torch._foreach_mul(added, scale))
        torch._foreach_add_([gradients[name] for name in names], added, alpha=strength)


def half_squared_norm(directions: Mapping[str, Tensor], strengths: Mapping[str, float]) -> Tensor:
    """Return Σ strength/2 · ‖direction‖² over the names with a strength, accumulated in at least float32."""
    names = [name for name in directions if name in strengths]
    tensors = [directions[name] for name in names]
    if not tensors:
        return torch.zeros(())
    squares = torch.stack([widen(tensor).norm() for tensor in tensors]) ** 2
    weights = torch.tensor([strengths[name] for name in names], dtype=squares.dtype, device=squares.device)
    return weights.dot(squares) / 2
