"""An optimizer that a method acts on: the parameters it holds, its step count, and the arguments of its step."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pliant._validation import check_positive_int
from pliant._warnings import warn_user
from pliant.distributed import check_not_flat, held
from pliant.methods._core.surgery import keeper_of


@dataclass
class Attachment:
    """One optimizer that a method acts on.

    Attributes:
        names: The method's parameters that the optimizer holds, in the model's order.
        groups: For each name, the index of its parameter group.
        held: The parameters in each of the optimizer's groups when they were matched.
        first: The first named parameter, if any.
        place: Its path in the model.
        placement: Dtype and device of `first` when it was matched.
        frozen: Parameters that the optimizer holds but the method does not know, because they were frozen.
        handles: The hooks.
        slot: The place of the optimizer's count in `Method.steps`.
    """

    names: tuple[str, ...]
    groups: tuple[int, ...]
    held: tuple[tuple[Tensor, ...], ...]
    first: Tensor | None = None
    place: tuple[str, ...] = ()
    placement: tuple[torch.dtype, torch.device] | None = None
    frozen: list[nn.Parameter] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)
    slot: int = 0

    @classmethod
    def of(cls, optimizer: Optimizer, parameters: dict[str, nn.Parameter] | None = None) -> Self:
        """Match an optimizer with the parameters of a method."""
        group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        matched = {name: p for name, p in (parameters or {}).items() if id(held(p)) in group_of}
        first = next(iter(matched.values()), None)
        return cls(
            names=tuple(matched),
            groups=tuple(group_of[id(held(p))] for p in matched.values()),
            held=tuple(tuple(group["params"]) for group in optimizer.param_groups),
            first=first,
            place=tuple(next(iter(matched)).split(".")) if matched else (),
            placement=None if first is None else (first.dtype, first.device),
        )

    def is_elsewhere(self) -> bool:
        """Return whether the model was cast or moved; that concerns all of it, so one parameter tells."""
        return self.first is not None and (self.first.dtype, self.first.device) != self.placement

    def is_current(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer holds the same parameters in the same place, and all frozen ones stay frozen."""
        groups = optimizer.param_groups
        if len(groups) != len(self.held):
            return False
        for group, known in zip(groups, self.held, strict=True):  # a plain loop, because it runs at every step
            params = group["params"]
            if len(params) != len(known) or not all(map(operator.is_, params, known)):
                return False
        if self.is_elsewhere():
            return False
        return not (self.frozen and any(p.requires_grad for p in self.frozen))


def free_slot(attachments: Iterable[Attachment], names: tuple[str, ...]) -> int:
    """Return the place of a new optimizer's step count: the first that no attached optimizer uses.

    An optimizer with the same parameters as an attached one takes its place: the loop made a new one without
    `detach()`.
    """
    taken = {attachment.slot: attachment.names for attachment in attachments}
    same = [slot for slot, others in taken.items() if others == names]
    return same[0] if same else min(set(range(len(taken) + 1)) - set(taken))


def count_step(steps: list[int], slot: int = 0) -> int:
    """Add one to a step count and return it.

    Example:
        >>> steps = [4]
        >>> count_step(steps), count_step(steps, 1), steps
        (5, 1, [5, 1])
    """
    steps.extend([0] * (slot + 1 - len(steps)))
    steps[slot] += 1
    return steps[slot]


def check_timing(every: int, first: int | None) -> tuple[int, int | None]:
    """Return `every` and `first` if they are integers ≥ 1, `first` possibly None, else raise a ValueError."""
    return check_positive_int("every", every), None if first is None else check_positive_int("first", first)


def is_due(step: int, every: int | None, first: int | None = None) -> bool:
    """Return whether a method acts on this step.

    Args:
        step: The number of the step, counted from 1.
        every: The number of steps between two actions; None for never.
        first: The first step to act on; `every` if None.

    Example:
        >>> [step for step in range(1, 12) if is_due(step, every=4, first=2)]
        [2, 6, 10]
    """
    if every is None:
        return False
    first = every if first is None else first
    return step >= first and (step - first) % every == 0


def check_optimizer(optimizer: Any, advice: str = "") -> None:
    """Raise a TypeError if this is not an optimizer, or only wraps the optimizer that steps (SAM), or is of FSDP1.

    Args:
        optimizer: What the user passed.
        advice: Added to the error if it is not an optimizer at all.
    """
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizers: a {kind} is not a torch.optim.Optimizer{advice}")
    inner = [name for name, held in vars(optimizer).items() if isinstance(held, Optimizer)]
    if not hasattr(optimizer, "_optimizer_step_post_hooks") or (inner and keeper_of(optimizer) is optimizer):
        named = f" ({inner[0]!r})" if inner else ""
        raise TypeError(f"optimizers: this {kind} wraps an optimizer{named}; pass the inner optimizer instead")
    check_not_flat(parameter for group in optimizer.param_groups for parameter in group["params"])


def check_rates(optimizer: Optimizer, purpose: str) -> None:
    """Raise a ValueError if an optimizer has no learning rate, and say what needs it."""
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ValueError(f"optimizers: this {type(optimizer).__name__} has no learning rate, but {purpose}")


def warn_of_average(method: str, optimizer: Optimizer) -> None:
    """Warn if the optimizer evaluates other weights than it trains, as schedule-free optimizers do."""
    if callable(getattr(optimizer, "eval", None)) and any("train_mode" in group for group in optimizer.param_groups):
        warn_user(
            f"{method} rewrites the weights that {type(optimizer).__name__} trains, but not the average that it "
            "evaluates: use an optimizer without an average of its own"
        )


def closure_of(args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """Return the closure that `optimizer.step` was called with, or None; `args[0]` is the optimizer."""
    closure: Callable[[], Any] | None = kwargs.get("closure") if len(args) < 2 else args[1]
    return closure


def with_closure(args: Any, kwargs: Any, closure: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the arguments of `optimizer.step` with the closure replaced."""
    if len(args) < 2:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


def found_inf_of(optimizer: Optimizer) -> Tensor | None:
    """Return the flag by which a fused optimizer under a GradScaler skips its step, or None.

    The flag is on the device: reading it synchronizes. For other optimizers the scaler does not call `step` at all.
    """
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    return found_inf


def was_skipped(optimizer: Optimizer) -> bool:
    """Return whether a fused optimizer skipped this step. Synchronizes the device under a GradScaler."""
    found_inf = found_inf_of(optimizer)
    return found_inf is not None and bool(found_inf)


def ascending_names(optimizer: Optimizer, names: Sequence[str], groups: Sequence[int]) -> Sequence[str]:
    """Return the parameters that the optimizer moves up their gradient (`maximize=True`).

    Args:
        optimizer: The optimizer.
        names: Names of parameters that it holds.
        groups: For each name, the index of its parameter group.
    """
    for (
        group
    ) in optimizer.param_groups:  # a plain loop, because it runs at every step and the answer is nearly always no
        if group.get("maximize"):
            break
    else:
        return ()
    return [name for name, i in zip(names, groups, strict=True) if optimizer.param_groups[i].get("maximize")]
