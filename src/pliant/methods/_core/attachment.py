"""What a method knows of an optimizer that it serves, and of a step of it."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pliant._validation import check_positive_int
from pliant._warnings import warn_user
from pliant.methods._core.surgery import keeper_of


@dataclass
class Attachment:
    """One optimizer that a method serves.

    Attributes:
        names: The method's parameters that this optimizer holds, in the model's order.
        groups: For each of them, the index of its parameter group.
        held: The parameters of each of the optimizer's groups when this was noted.
        frozen: Parameters that the optimizer holds and the method does not know, since they were frozen.
        handles: The hooks, to be removed on detaching.
        counter: The name under which its steps are counted.
    """

    names: tuple[str, ...]
    groups: tuple[int, ...]
    held: tuple[tuple[Tensor, ...], ...]
    frozen: list[nn.Parameter] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)
    counter: str = ""

    @classmethod
    def of(cls, optimizer: Optimizer, names: tuple[str, ...] = (), groups: tuple[int, ...] = ()) -> Self:
        """Note what an optimizer holds now."""
        return cls(names, groups, tuple(tuple(group["params"]) for group in optimizer.param_groups))

    def is_current(self, optimizer: Optimizer) -> bool:
        """Say whether the optimizer holds the same parameters, and none that was frozen is learned now."""
        groups = optimizer.param_groups
        if len(groups) != len(self.held):
            return False
        for group, held in zip(groups, self.held, strict=True):  # a plain loop, since every step asks
            params = group["params"]
            if len(params) != len(held) or not all(map(operator.is_, params, held)):
                return False
        return not (self.frozen and any(p.requires_grad for p in self.frozen))


def check_optimizer(optimizer: Any, advice: str = "") -> None:
    """Raise a TypeError if something is no optimizer, or only wraps one (SAM): that one steps, and remembers.

    Args:
        optimizer: What was given for an optimizer.
        advice: What to say of something else.
    """
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizers: a {kind} is no torch.optim.Optimizer{advice}")
    inner = [name for name, held in vars(optimizer).items() if isinstance(held, Optimizer)]
    if not hasattr(optimizer, "_optimizer_step_post_hooks") or (inner and keeper_of(optimizer) is optimizer):
        named = f" ({inner[0]!r})" if inner else ""
        raise TypeError(f"optimizers: this {kind} wraps an optimizer{named}; give that one instead")


def check_rates(optimizer: Optimizer, purpose: str) -> None:
    """Raise a ValueError if an optimizer has no learning rate, and say what it is for."""
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ValueError(f"optimizers: this {type(optimizer).__name__} has no learning rate, which {purpose}")


def choose_counter(names: tuple[str, ...], others: Iterable[Attachment], steps: Mapping[str, int]) -> str:
    """Return a parameter of an optimizer under which to count its steps: the first with a count of no other's.

    Steps are counted by a parameter, not by optimizer: a loop that makes a new optimizer for each task keeps its
    count, and an actor's steps are not mistaken for its critic's, even if both train the first layer. An optimizer that
    other parameters have joined goes on with its count when it is made again with all of them.

    Args:
        names: The method's parameters that the optimizer holds.
        others: The other optimizers that are attached.
        steps: The counts.
    """
    taken = {other.counter for other in others if other.names != names}
    free = [name for name in names if name not in taken] or [*names[:1], ""]
    return next((name for name in free if name in steps), free[0])


def warn_of_new_count(method: str, new: Attachment, others: Iterable[Attachment], steps: Mapping[str, int]) -> None:
    """Warn if the steps of an optimizer are counted from zero, though another one has stepped some of its parameters.

    Args:
        method: The method's name.
        new: The optimizer.
        others: Those that were attached before.
        steps: The counts.
    """
    shared = [name for other in others if other.counter in steps for name in other.names if name in new.names]
    if shared and new.counter not in steps:
        warn_user(
            f"{method} is still attached to another optimizer that holds {shared[0]!r}, and counts the steps of this "
            "one anew; detach() the old one first if this one takes its place"
        )


def warn_of_average(method: str, optimizer: Optimizer) -> None:
    """Warn if a method rewrites weights of an optimizer that shows other ones in evaluation, as schedule-free ones do.

    Args:
        method: The method's name.
        optimizer: The optimizer.
    """
    if callable(getattr(optimizer, "eval", None)) and any("train_mode" in group for group in optimizer.param_groups):
        warn_user(
            f"{method} rewrites the weights that {type(optimizer).__name__} trains, not the average that it keeps and "
            "shows in eval(): what is evaluated is another network; take an optimizer that keeps none"
        )


def closure_of(args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """Return the closure among the arguments that an optimizer's step was called with, itself the first; or None."""
    closure: Callable[[], Any] | None = kwargs.get("closure") if len(args) < 2 else args[1]
    return closure


def with_closure(args: Any, kwargs: Any, closure: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the arguments of an optimizer's step with another closure in the place of theirs."""
    if len(args) < 2:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


def found_inf_of(optimizer: Optimizer) -> Tensor | None:
    """Return what tells whether a fused optimizer under a GradScaler skips its step: not zero if so.

    Any other optimizer has none: the scaler does not call its step at all. To read it waits for the device.
    """
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    return found_inf


def was_skipped(optimizer: Optimizer) -> bool:
    """Say whether an optimizer skipped the step that it was called for."""
    found_inf = found_inf_of(optimizer)
    return found_inf is not None and bool(found_inf)


def ascending_names(optimizer: Optimizer, names: Sequence[str], groups: Sequence[int]) -> Sequence[str]:
    """Return the parameters that the optimizer moves up their gradient (`maximize=True`), not down.

    Args:
        optimizer: The optimizer.
        names: Names of parameters that it holds.
        groups: For each of them, the index of its parameter group.
    """
    for group in optimizer.param_groups:  # A plain loop, since every step asks and hardly any optimizer says yes.
        if group.get("maximize"):
            break
    else:
        return ()
    return [name for name, i in zip(names, groups, strict=True) if optimizer.param_groups[i].get("maximize")]


def check_timing(every: int, first: int | None) -> tuple[int, int | None]:
    """Return how many steps lie between two actions, and the first step to act on if one is given."""
    return check_positive_int("every", every), None if first is None else check_positive_int("first", first)


def is_due(step: int, every: int, first: int | None = None) -> bool:
    """Say whether to act on the step of this number, counted from 1.

    Args:
        step: The step.
        every: How many steps lie between two actions.
        first: The first step to act on; `every` if None.

    Example:
        >>> [step for step in range(1, 12) if is_due(step, every=4, first=2)]
        [2, 6, 10]
    """
    first = every if first is None else first
    return step >= first and (step - first) % every == 0
