"""Methods that rewrite parameters when the user says that the data is new, or at given steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pliant._step_hooks import after_step, unwrap_optimizer
from pliant._validation import check_choice, check_positive_int
from pliant._warnings import warn_user
from pliant.distributed import Group, held, sum_shards
from pliant.methods._core.attachment import (
    Attachment,
    check_optimizer,
    count_step,
    is_due,
    warn_of_average,
    was_skipped,
)
from pliant.methods._core.filters import Filter, check_not_replaced
from pliant.methods._core.method import Batches, Kind, LossFunction, Method, Receipt, Targets
from pliant.methods._core.surgery import check_targets, copy_targets_, forget_state_

OptimizerState = Literal["keep", "reset"]
Steps = int | Sequence[int]


class Reinitializer(Method):
    """A method that rewrites parameters on `apply()`, or by itself at given steps of the optimizer.

    Args:
        model: The model.
        optimizer_state: "keep" or "reset" the optimizers' state of the parameters; a method may offer more choices.
        where: Which parameters the method may touch; all learnable ones if None.
        at: Steps after which the method acts by itself, counted from 1.
        every: The number of steps between two actions by itself; None for none. Of several attached optimizers, the
            steps of the first one count.
    """

    kind: ClassVar[Kind] = "reinitializer"
    order: ClassVar[int] = 50
    action: ClassVar[str] = "reinitialize"
    optimizer_states: ClassVar[tuple[str, ...]] = get_args(OptimizerState)

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer_state: str = "keep",
        where: Filter | None = None,
        at: Steps = (),
        every: int | None = None,
    ) -> None:
        super().__init__(model, where=where)
        self.at = check_steps(at)
        self.every = None if every is None else check_positive_int("every", every)
        check_choice("optimizer_state", optimizer_state, self.optimizer_states)
        self.optimizer_state = optimizer_state
        self._receipt: Receipt | None = None

    @abstractmethod
    def _reinitialize(self, batches: Batches | None, loss_fn: LossFunction | None) -> Mapping[str, Any]:
        """Rewrite the parameters in place; return details for the receipt."""

    @torch.no_grad()
    def apply(
        self,
        *optimizers: Optimizer,
        batches: Batches | None = None,
        loss_fn: LossFunction | None = None,
        targets: Targets = (),
        group: Group | None = None,
    ) -> Receipt:
        """Act once, because the data is new.

        Args:
            optimizers: The optimizers of the parameters, in addition to the attached ones.
            batches: The new data as (input, target) pairs, for methods that use it.
            loss_fn: The loss of an output and a target, for methods that use gradients.
            targets: Pairs of a network and the target network that follows it. Each target becomes a copy.
            group: The ranks that train this model together, all of which call this; as at `attach()` if None.

        Returns:
            The receipt: the numbers of changed tensors and entries, and of dropped optimizer tensors.

        Raises:
            ValueError: If there are optimizers, but none holds a parameter of the method.
        """
        optimizers = tuple(map(unwrap_optimizer, optimizers))
        for optimizer in optimizers:
            check_optimizer(optimizer, "; data goes to batches=")
            if optimizer not in self._attachments:
                warn_of_average(self.name, optimizer)
        concerned = tuple(dict.fromkeys((*optimizers, *self.optimizers)))
        if self.optimizer_state != "keep" and not concerned:
            warn_user(
                f"{self.name}.apply() is given no optimizer and attached to none, so no optimizer state was reset; "
                "pass the optimizer, or set optimizer_state='keep'"
            )
        check_targets(targets)
        check_not_replaced(self.name, self.model, self.parameters)
        self._check_held(concerned)
        self._check_state(concerned)
        self._agree(group)
        tensors, entries, details = self._act(concerned, batches, loss_fn)
        if targets:
            details["targets_copied"] = copy_targets_(targets)
        self._receipt = Receipt(self.name, self.action, tensors, entries, details)
        return self._receipt

    def _act(
        self, optimizers: Sequence[Optimizer], batches: Batches | None, loss_fn: LossFunction | None
    ) -> tuple[int, int, dict[str, Any]]:
        """Rewrite the parameters and treat the optimizers' state; return the receipt's tensors, entries and details."""
        parameters: list[Tensor] = list(self.parameters.values())
        before = torch._foreach_clone(parameters)
        details = dict(self._reinitialize(batches, loss_fn))
        for old, parameter in zip(before, parameters, strict=True):
            if not parameter.requires_grad:  # frozen after construction
                parameter.copy_(old)
        counts = [(old != new).sum() for old, new in zip(before, parameters, strict=True)]
        changed = [int(count) for count in sum_shards(counts, parameters)]
        if not any(changed):
            warn_user(f"{self.name}.apply() changed none of {len(changed)} parameters")
        self._warn_of_unheld(optimizers, [name for name, count in zip(self.parameters, changed, strict=True) if count])
        details |= self._treat_state(optimizers)
        return sum(count > 0 for count in changed), sum(changed), details

    @property
    def receipt(self) -> Receipt | None:
        """What the last `apply()` did."""
        return self._receipt

    @property
    def acts_on_new_data(self) -> bool:
        """Whether the method waits for `apply()`; a method with `at` or `every` acts by itself."""
        return not self.at and self.every is None

    def _check_state(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise a ValueError before anything is written if `_treat_state` would fail."""

    def _treat_state(self, optimizers: Sequence[Optimizer]) -> Mapping[str, Any]:
        """Treat the optimizers' state as `optimizer_state` says; return details for the receipt."""
        if self.optimizer_state != "reset":
            return {}
        return {"optimizer_tensors_reset": forget_state_(optimizers, self._rewritten())}

    def _check_held(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise a ValueError if the optimizers hold none of the parameters, as another model's optimizers do."""
        if optimizers and not any(Attachment.of(optimizer, self.parameters).names for optimizer in optimizers):
            kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
            raise ValueError(
                f"optimizers: {kinds} hold none of the {len(self.parameters)} parameters of {self.name} (the first is "
                f"{next(iter(self.parameters))!r}). Pass the optimizer of this model, not of a copy"
            )

    def _warn_of_unheld(self, optimizers: Sequence[Optimizer], changed: Sequence[str]) -> None:
        """Warn if no optimizer holds some of the rewritten parameters, such as a target network's."""
        trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        unheld = [name for name in changed if id(held(self.parameters[name])) not in trained]
        if trained and unheld:
            more = f" and {len(unheld) - 3} more" if len(unheld) > 3 else ""
            warn_user(
                f"{self.name}.apply() rewrote parameters that no given or attached optimizer holds: "
                f"{', '.join(unheld[:3])}{more}; pass all optimizers, or leave out untrained parameters (a target "
                "network) with where="
            )

    def _rewritten(self) -> Iterable[nn.Parameter]:
        """Return the parameters that the last action rewrote, whose optimizer state may be dropped."""
        return self._free().values()

    def _free(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are still learnable."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    def _match(self, optimizer: Optimizer) -> Attachment:
        # An optimizer without any of the parameters is fine here: it has no state to treat.
        return Attachment.of(optimizer, self.parameters)

    def _register_hooks(self, optimizer: Optimizer) -> list[RemovableHandle]:
        return [] if self.acts_on_new_data else [after_step(optimizer, self._after_step)]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        slot = self._attachment(optimizer).slot
        step = count_step(self.steps, slot)
        if slot == 0 and (step in self.at or is_due(step, self.every)):
            if was_skipped(optimizer):  # it does not count, and the next step is due instead
                self.steps[slot] -= 1
            else:
                self.apply()


def check_steps(at: Steps) -> tuple[int, ...]:
    """Return the steps, sorted, if they are integers ≥ 1, else raise a ValueError.

    Example:
        >>> check_steps([50, 10]), check_steps(10)
        ((10, 50), (10,))
    """
    steps = at if isinstance(at, Sequence) and not isinstance(at, str) else [at]
    return tuple(sorted(check_positive_int("at", step) for step in steps))
