"""What a method knows of an optimizer that it serves, and of a step of it."""

import warnings
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


@dataclass
class Attachment:
    """One optimizer that a method serves.

    Attributes:
        names: The method's parameters that this optimizer holds, in the model's order.
        groups: For each of them, the index of its parameter group.
        size: How many parameters the optimizer had when this was noted.
        handles: The hooks, to be removed on detaching.
        counter: The name under which its steps are counted.
    """

    names: tuple[str, ...]
    groups: tuple[int, ...]
    size: int
    handles: list[RemovableHandle] = field(default_factory=list)
    counter: str = ""

    @classmethod
    def of(cls, optimizer: Optimizer, names: tuple[str, ...] = (), groups: tuple[int, ...] = ()) -> Self:
        """Note what an optimizer holds now."""
        return cls(names, groups, _count_parameters(optimizer))

    def is_current(self, optimizer: Optimizer) -> bool:
        """Say whether the optimizer holds as many parameters as when this was noted."""
        return _count_parameters(optimizer) == self.size


def _count_parameters(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


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


def warn_of_unknown(method: str, model: nn.Module, known: Container[str], optimizer: Optimizer) -> None:
    """Warn of parameters of the model that the optimizer trains, but that the method did not find when it was made.

    Args:
        method: The method's name.
        model: The model.
        known: The names of the parameters that could be learnt when the method was made.
        optimizer: The optimizer.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = model.named_parameters()
    unknown = [name for name, p in parameters if p.requires_grad and name not in known and id(p) in held]
    if unknown:
        warnings.warn(
            f"{method} does not act on {', '.join(unknown)}: frozen, or not there, when it was made", stacklevel=4
        )
