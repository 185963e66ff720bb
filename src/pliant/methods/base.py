"""The contract that every method keeps: attach to an optimizer, act, leave a receipt, resume.

A method hangs on the optimizer's own hooks, so it works in any training loop and the loop does not change:

- a `Penalty` adds its closed-form gradient to `.grad` before the step: the trajectory of the same term in the loss,
  without an autograd graph. Three facts follow. Gradient clipping by the user happens before the hook, so the penalty
  is not clipped (call `add_gradient_()` before clipping instead of attaching for the in-loss meaning); a parameter
  whose `.grad` is None is skipped, as the optimizer itself skips it; and two optimizers that share a parameter need
  a backward pass each, or the second finds the penalty of the first in its gradient;
- a `Rescaler` rewrites weights after the step;
- a `Reinitializer` acts when its user says that the data is new: `apply()`;
- a `Recycler` (recycler.py) renews single units after the step;
- an `Architecture` (architecture.py) changes the model once, when it is made.

Methods on one optimizer act in the order in which they were attached; all penalties act before the step, all
rescalers and recyclers after it, UPGD first of these, and Hare & Tortoise before the recyclers.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pliant.checking import check_choice
from pliant.methods.attachment import (
    Attachment,
    ascending_names,
    check_optimizer,
    choose_counter,
    closure_of,
    found_inf_of,
    is_due,
    warn_of_new_count,
    was_skipped,
    with_closure,
)
from pliant.methods.parameters import check_not_replaced, learnable_parameters, warn_of_unknown
from pliant.methods.state import check_same_shapes, check_same_structure, copy_state_
from pliant.step_hooks import after_step, before_step
from pliant.surgery import forget_state_

Kind = Literal["penalty", "rescaler", "reinitializer", "recycler", "architecture"]
Filter = Callable[[str, nn.Parameter], bool]
Batches = Iterable[tuple[Any, Any]]
LossFunction = Callable[[Any, Any], Tensor]
OptimizerState = Literal["keep", "reset"]


@dataclass(frozen=True)
class Receipt:
    """What an action of a method did, in plain types.

    Attributes:
        method: The method's registry name.
        action: What it did, as a verb.
        tensors: How many tensors it wrote (a reinitializer: changed).
        entries: How many entries it wrote (a reinitializer: changed).
        details: What else is worth knowing, by name; measured when the receipt is read.
    """

    method: str
    action: str
    tensors: int
    entries: int
    details: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the receipt as a flat dictionary, ready for a log."""
        head = {"method": self.method, "action": self.action, "tensors": self.tensors, "entries": self.entries}
        return {**head, **self.details}


class Method(ABC):
    """A way to keep a model able to learn.

    Args:
        model: The model to act on. Its parameters are held, never replaced.
        where: Which parameters the method may touch, as a predicate on name and parameter; all if None.

    Attributes:
        parameters: The parameters that the method acts on, by name; tied ones once.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    saved: ClassVar[tuple[str, ...]] = ()
    """The attributes that make up the state: tensors, dictionaries of tensors, plain numbers."""
    pins_placement: ClassVar[bool] = False
    """Whether the parameters must keep the dtype and device that they had when the method was made."""
    joint: ClassVar[bool] = False
    """Whether parameters are acted on together, those that an optimizer does not hold included."""
    takes_complex: ClassVar[bool] = False
    """Whether the method's formula holds for complex parameters too."""

    def __init__(self, model: nn.Module, *, where: Filter | None = None) -> None:
        self.model = model
        self.parameters = learnable_parameters(model, where)
        for name, parameter in self.parameters.items():
            if parameter.is_complex() and not self.takes_complex:
                raise ValueError(
                    f"model: parameter {name!r} is complex; {self.name} is for real ones (where= may help)"
                )
        self.steps: dict[str, int] = {}
        self._placements = {name: (p.dtype, p.device) for name, p in self.parameters.items()}
        self._known = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._told: set[str] = set()
        self._attachments: WeakKeyDictionary[Optimizer, Attachment] = WeakKeyDictionary()

    def attach(self, *optimizers: Optimizer) -> Self:
        """Act on every step of these optimizers from now on, each on the parameters that it holds.

        Args:
            optimizers: One or more; a loop that makes a new optimizer detaches the old one and attaches the new one.
                Several that share parameters are attached in the same order again on resuming: by it their steps
                are counted apart.

        Returns:
            The method itself.

        Raises:
            ValueError: If one of them is attached already, holds no parameter of the method, or holds one that was
                cast or moved since; or if a parameter was replaced since.
        """
        if not optimizers:
            raise ValueError("optimizers: none given; attach() takes one optimizer or more")
        for optimizer in optimizers:
            check_optimizer(optimizer)
            if optimizer in self._attachments:
                raise ValueError(
                    f"{self.name} is attached to this {type(optimizer).__name__} already; detach() it first"
                )
        for optimizer in optimizers:
            self._check_not_replaced(optimizer)
        prepared = {optimizer: self._match(optimizer) for optimizer in optimizers}
        before = list(self._attachments.values())
        for optimizer, attachment in prepared.items():
            self._check_placement(attachment.names)
            attachment.frozen = warn_of_unknown(self.name, self.model, self._known, optimizer, self._told)
        for optimizer, attachment in prepared.items():
            attachment.counter = choose_counter(attachment.names, self._attachments.values(), self.steps)
            attachment.handles = self._register_hooks(optimizer)
            self._attachments[optimizer] = attachment
        if getattr(self, "every", None) not in (None, 1):
            for attachment in prepared.values():
                warn_of_new_count(self.name, attachment, before, self.steps)
        return self

    def detach(self, *optimizers: Optimizer) -> None:
        """Stop acting on these optimizers, or on all if none is given; no hook is left."""
        for optimizer in optimizers:
            if optimizer not in self._attachments:
                raise ValueError(f"{self.name} is not attached to this {type(optimizer).__name__}")
        for optimizer in dict.fromkeys(optimizers) or tuple(self._attachments):
            for handle in self._attachments.pop(optimizer).handles:
                handle.remove()

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that the method is attached to, in order of attachment."""
        return tuple(self._attachments)

    def step(self) -> None:
        """Do once by hand, on all of the method's parameters, what the hook does."""
        raise TypeError(f"{self.name} acts when data is new: call apply()")

    def apply(
        self, *optimizers: Optimizer, batches: Batches | None = None, loss_fn: LossFunction | None = None
    ) -> Receipt:
        """Act because the data is new: reinitializers do, and Hare & Tortoise."""
        raise TypeError(f"{self.name} acts at every step of an optimizer: call attach() or step()")

    @property
    @abstractmethod
    def receipt(self) -> Receipt | None:
        """What the last action did, or None before the first one. Reading it may synchronise the device."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs: references to tensors, plain types (`weights_only=True` loads it)."""
        state = {name: getattr(self, name) for name in self.saved}
        return {"method": self.name, "shapes": self._shapes(), "steps": dict(self.steps), "state": state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state made by `state_dict()`; settings come from construction, not from here.

        Raises:
            ValueError: If the state is another method's or another architecture's; names the first difference and
                changes nothing.
        """
        if state_dict.get("method") != self.name:
            raise ValueError(f"state_dict: made by method {state_dict.get('method')!r}, this is {self.name!r}")
        for key in ("steps", "state"):
            if key not in state_dict:
                raise ValueError(f"state_dict: {key!r} is missing")
        if "shapes" in state_dict:
            check_same_shapes(self._shapes(), state_dict["shapes"])
        unknown = [name for name in state_dict["steps"] if name not in self.parameters]
        if unknown:
            raise ValueError(f"state_dict: counts steps of {unknown[0]!r}, which this model has not")
        mine = {name: getattr(self, name) for name in self.saved}
        check_same_structure(mine, state_dict["state"], "state")
        self.steps = dict(state_dict["steps"])
        for name, value in copy_state_(mine, state_dict["state"]).items():
            setattr(self, name, value)

    def _shapes(self) -> dict[str, list[int]]:
        return {name: list(parameter.shape) for name, parameter in self.parameters.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_attachments": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attachments = WeakKeyDictionary()

    def _register_hooks(self, optimizer: Optimizer) -> list[RemovableHandle]:
        return []

    def _attachment(self, optimizer: Optimizer) -> Attachment:
        """Return what is known of an optimizer, brought up to date if its parameters are others, or learnt now."""
        attachment = self._attachments[optimizer]
        if not attachment.is_current(optimizer):
            self._match_again(optimizer, attachment)
        elif self.pins_placement and attachment.names:
            self._check_placement(attachment.names[:1])  # what casts or moves a model does so to all of it
        return attachment

    def _match_again(self, optimizer: Optimizer, attachment: Attachment) -> None:
        self._check_not_replaced(optimizer)
        found = self._match(optimizer)
        self._check_placement(found.names)
        attachment.names, attachment.groups, attachment.held = found.names, found.groups, found.held
        attachment.frozen = warn_of_unknown(self.name, self.model, self._known, optimizer, self._told)

    def _check_not_replaced(self, optimizer: Optimizer) -> None:
        check_not_replaced(self.name, self.model, self.parameters, None if self.joint else optimizer)

    def _check_placement(self, names: Sequence[str]) -> None:
        for name in names if self.pins_placement else ():
            now, then = (self.parameters[name].dtype, self.parameters[name].device), self._placements[name]
            if now != then:
                raise ValueError(
                    f"model: parameter {name!r} was {then[0]} on {then[1]} when {self.name} was made and is {now[0]} "
                    f"on {now[1]} now; cast and move the model first, then make {self.name}"
                )

    def _gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the gradients that are there, by name; of what was frozen a loop may keep one of zeros."""
        gradients = {}
        for name in names:
            gradient = self.parameters[name].grad
            if gradient is None or not self.parameters[name].requires_grad:
                continue
            if gradient.is_sparse:
                raise ValueError(
                    f"parameter {name!r} has a sparse gradient, but {self.name} needs a dense one; "
                    "use sparse=False or leave it out with where="
                )
            gradients[name] = gradient
        return gradients

    def _served(self) -> tuple[str, ...]:
        """Return the parameters that the attached optimizers hold, or all if there is none."""
        held = {name for attachment in self._attachments.values() for name in attachment.names}
        return tuple(name for name in self.parameters if not held or name in held)

    def _count_step(self, counter: str) -> int:
        self.steps[counter] = self.steps.get(counter, 0) + 1
        return self.steps[counter]

    def _match(self, optimizer: Optimizer) -> Attachment:
        group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        names = tuple(name for name, p in self.parameters.items() if id(p) in group_of)
        if not names:
            raise ValueError(
                f"optimizers: this {type(optimizer).__name__} holds none of the {len(self.parameters)} parameters of "
                f"{self.name} (the first is {next(iter(self.parameters))!r}); was it made for another model or a copy?"
            )
        groups = tuple(group_of[id(self.parameters[name])] for name in names)
        return Attachment.of(optimizer, names, groups)


class Penalty(Method):
    """A term of the loss, λ·penalty(θ), that enters as its gradient."""

    kind: ClassVar[Kind] = "penalty"
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
        names = tuple(self.parameters)
        self._add_gradient(names, names[0])

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
            norms = torch.stack([g.float().norm() for g in gradients.values()])
            value = float(self.value(served))
        details = {"value": value, "gradient_norm": float(norms.norm()), "steps": sum(self.steps.values())}
        penalised = [self.parameters[name].numel() for name in served if name in self.strengths]
        return Receipt(self.name, "add gradient", len(penalised), sum(penalised), details)

    def _register_hooks(self, optimizer: Optimizer) -> list[RemovableHandle]:
        return [before_step(optimizer, self._before_step)]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        attachment = self._attachment(optimizer)
        names, counter = attachment.names, attachment.counter
        ascending = ascending_names(optimizer, names, attachment.groups)
        closure = closure_of(args, kwargs)
        if closure is None:
            # Under a GradScaler a fused optimizer gets its gradients still scaled, and says by how much.
            scale = getattr(optimizer, "grad_scale", None)
            self._add_gradient(names, counter, ascending, scale, found_inf_of(optimizer))
            return None
        calls = 0

        def closure_with_penalty() -> Any:
            # The closure clears and fills the gradients, possibly many times a step: add after each call. A line
            # search compares the values that it returns, so these must hold the term too, and the term must be one
            # function of the parameters: what is kept between steps changes at the first call alone.
            nonlocal calls
            loss = closure()
            self._add_gradient(names, counter, ascending, first=calls == 0)
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
        counter: str,
        ascending: Sequence[str] = (),
        scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        *,
        first: bool = True,
    ) -> None:
        gradients = self._gradients(names)
        # An optimizer that maximises is given the gradient of minus the loss.
        climbed = [gradients[name] for name in ascending if name in gradients] if ascending else None
        if climbed:
            torch._foreach_neg_(climbed)
        if first:
            self._count_step(counter)
            self._observe(gradients, scale, found_inf)
        if gradients:
            self._add_to(gradients, scale)
        if climbed:
            torch._foreach_neg_(climbed)


class Rescaler(Method):
    """A rule that rewrites parameters right after each step of the optimizer."""

    kind: ClassVar[Kind] = "rescaler"

    @abstractmethod
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Act after a step; honour `optimizer.found_inf`: a step that was skipped is not followed by an action."""

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


class Reinitializer(Method):
    """A rule that rewrites parameters when the data is new.

    Args:
        model: The model.
        optimizer_state: What becomes of the optimizers' memory of the parameters: "keep" or "reset", or what else the
            method knows to do with it.
        where: Which parameters the method may touch; all learnable ones if None.
    """

    kind: ClassVar[Kind] = "reinitializer"
    optimizer_states: ClassVar[tuple[str, ...]] = get_args(OptimizerState)

    def __init__(self, model: nn.Module, *, optimizer_state: str = "keep", where: Filter | None = None) -> None:
        super().__init__(model, where=where)
        check_choice("optimizer_state", optimizer_state, self.optimizer_states)
        self.optimizer_state = optimizer_state
        self._receipt: Receipt | None = None

    @abstractmethod
    def _reinitialise(self, batches: Batches | None, loss_fn: LossFunction | None) -> Mapping[str, Any]:
        """Rewrite the parameters in place; return what is worth noting in the receipt."""

    @torch.no_grad()
    def apply(
        self, *optimizers: Optimizer, batches: Batches | None = None, loss_fn: LossFunction | None = None
    ) -> Receipt:
        """Act once, because the data is new.

        Args:
            optimizers: Whose state belongs to the parameters that change; the attached ones if none is given.
            batches: The new data as (input, target) pairs, for methods that look at it.
            loss_fn: The loss of an output and a target, for methods that look at gradients.

        Returns:
            The receipt: how many tensors and entries changed, how many optimizer tensors were dropped.
        """
        for optimizer in optimizers:
            check_optimizer(optimizer, "; data goes to batches=")
        concerned = optimizers or self.optimizers
        if self.optimizer_state != "keep" and not concerned:
            warnings.warn(
                f"{self.name}.apply() is given no optimizer and attached to none: what one remembers of the old "
                "weights is kept; pass it, or make it anew (optimizer_state='keep' says so)",
                stacklevel=3,
            )
        check_not_replaced(self.name, self.model, self.parameters)
        self._check_state(concerned)
        parameters: list[Tensor] = list(self.parameters.values())
        before = torch._foreach_clone(parameters)
        details = dict(self._reinitialise(batches, loss_fn))
        for old, parameter in zip(before, parameters, strict=True):
            if not parameter.requires_grad:  # frozen since the method was made
                parameter.copy_(old)
        changed = [int((old != new).sum()) for old, new in zip(before, parameters, strict=True)]
        if not any(changed):
            warnings.warn(f"{self.name}.apply() changed none of {len(changed)} parameters", stacklevel=3)
        details |= self._treat_state(concerned)
        tensors = sum(count > 0 for count in changed)
        self._receipt = Receipt(self.name, "reinitialise", tensors, sum(changed), details)
        return self._receipt

    @property
    def receipt(self) -> Receipt | None:
        """What the last `apply()` did."""
        return self._receipt

    def _check_state(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise a ValueError if `_treat_state` cannot do its part, before anything is written."""

    def _treat_state(self, optimizers: Sequence[Optimizer]) -> Mapping[str, Any]:
        """Do with the optimizers' memory what `optimizer_state` says; return what is worth noting."""
        if self.optimizer_state != "reset":
            return {}
        return {"optimizer_tensors_reset": forget_state_(optimizers, self._rewritten())}

    def _rewritten(self) -> Iterable[nn.Parameter]:
        """Return the parameters that the last action was on, of which optimizers may forget what they know."""
        return self._free().values()

    def _free(self) -> dict[str, nn.Parameter]:
        """Return the parameters that were not frozen since the method was made."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    def _match(self, optimizer: Optimizer) -> Attachment:
        # An optimizer without any of the parameters is no mistake here: its state is simply not concerned.
        return Attachment.of(optimizer)
