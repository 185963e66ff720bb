"""The interface of every method: attach to an optimizer, act, report, save and load.

A method acts through the optimizer's own hooks, so any training loop can use it unchanged:

- a `Penalty` (penalty.py) adds its gradient before the step;
- an `AfterStep` method (after_step.py) rewrites weights after the step;
- a `Reinitializer` (reinitializer.py) acts when the user calls `apply()` because the data is new;
- a `Recycler` (recycler.py) renews single units after the step;
- an `Architecture` (architecture.py) changes the model once, at construction.

`Method.order` says in which order the methods of one optimizer act.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pliant._step_hooks import before_step, owners_of_hooks, place_hook, unwrap_optimizer
from pliant._warnings import warn_user
from pliant.distributed import Group, as_shard, as_sharded, held
from pliant.methods._core.attachment import Attachment, check_optimizer, free_slot, warn_of_average
from pliant.methods._core.filters import Filter, check_not_replaced, learnable_parameters, warn_of_unknown
from pliant.methods._core.learning_rate import LearningRateSchedule
from pliant.methods._core.on_ranks import OnRanks
from pliant.methods._core.state_trees import (
    check_same_shapes,
    check_same_structure,
    copy_state_,
    leave_out,
    replace_values,
    value_at,
)

Kind = Literal["penalty", "after_step", "reinitializer", "recycler", "architecture"]
Batches = Iterable[tuple[Any, Any]]
Targets = Sequence[tuple[nn.Module, nn.Module]]
LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Receipt:
    """What the last action of a method did, in plain types.

    Attributes:
        method: The method's registry name.
        action: The action, as a verb.
        tensors: The number of tensors written (a reinitializer: changed).
        entries: The number of entries written (a reinitializer: changed).
        details: Further facts by name, measured when the receipt is read.
    """

    method: str
    action: str
    tensors: int
    entries: int
    details: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the receipt as text: the action, then one line per detail."""
        lines = [f"{self.method}: {self.action}, {self.tensors} tensors, {self.entries} entries"]
        return "\n".join([*lines, *(f"  {name}: {_write(value)}" for name, value in self.details.items())])

    def as_dict(self) -> dict[str, Any]:
        """Return the receipt as a flat dictionary, ready for a log."""
        head = {"method": self.method, "action": self.action, "tensors": self.tensors, "entries": self.entries}
        return {**head, **self.details}


def _write(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_write(each)}" for name, each in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_write, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Method(OnRanks):
    """A way to keep a model able to learn.

    Args:
        model: The model to act on. Its parameters are held, never replaced.
        where: Which parameters the method may touch, as a predicate on name and parameter; all if None.

    Attributes:
        parameters: The parameters that the method acts on, by name; a tied parameter once.
        steps: The number of steps of each attached optimizer, in order of attachment. A new optimizer continues the
            count of the optimizer that was detached before it.
        schedule: How the method follows the learning rate.
        group: The ranks that share the model, since the last `attach()` or `apply()`; None if there is only one.
    """

    kind: ClassVar[Kind]
    """How the method acts; one of the five kinds."""
    order: ClassVar[int] = 20
    """The place among the methods of one optimizer; methods of equal order act in order of attachment.

    0: penalties, which only change gradients before the step. After the step: 10 UPGD, which must see the optimizer's
    own move; 20 methods that rescale or clip weights, and hooks of others; 30 Hare & Tortoise, which averages the
    result; 40 recyclers, so that nothing undoes a renewed unit; 50 reinitializers with `at` or `every`, which act as
    `apply()` after the step does.
    """
    saved: ClassVar[tuple[str, ...]] = ()
    """The names of the attributes to save: tensors, dictionaries of tensors, plain numbers."""
    pins_placement: ClassVar[bool] = False
    """Whether parameters must keep the dtype and device that they had at construction."""
    joint: ClassVar[bool] = False
    """Whether an action also concerns parameters that the stepping optimizer does not hold."""
    takes_complex: ClassVar[bool] = False
    """Whether the method's formula holds for complex parameters too."""

    def __init__(self, model: nn.Module, *, where: Filter | None = None) -> None:
        if torch.is_inference_mode_enabled():
            raise ValueError(
                f"{self.name} cannot be made under torch.inference_mode(), because its tensors could not change "
                "afterwards; make it outside, or under torch.no_grad()"
            )
        super().__init__(model)
        self.parameters = learnable_parameters(model, where)
        for name, parameter in self.parameters.items():
            if parameter.is_complex() and not self.takes_complex:
                raise ValueError(
                    f"model: parameter {name!r} is complex; {self.name} is for real ones (where= may help)"
                )
        self.steps: list[int] = []
        self.schedule = LearningRateSchedule("constant")
        self._placements = {name: (p.dtype, p.device) for name, p in self.parameters.items()}
        self._known = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._told: set[str] = set()
        self._attachments: WeakKeyDictionary[Optimizer, Attachment] = WeakKeyDictionary()

    def attach(self, *optimizers: Optimizer, group: Group | None = None) -> Self:
        """Act on every step of these optimizers from now on, each time on the parameters that the optimizer holds.

        On several ranks, all of them call this: they agree on a seed and check that they hold the same values.

        Args:
            optimizers: One or more. A loop that makes a new optimizer detaches the old one and attaches the new one. On
                resuming, attach several optimizers in the same order again, because the order identifies their counts.
            group: The ranks that train this model together. By default the mesh of a sharded model, or the ranks of the
                DistributedDataParallel that the method was made on, else all ranks.

        Returns:
            The method itself.

        Raises:
            ValueError: If an optimizer is attached already, holds no parameter of the method, or holds one that was
                cast or moved since construction; or if a parameter was replaced since construction; or if a
                parameter, the state or a setting differs between ranks.
        """
        if not optimizers:
            raise ValueError("optimizers: none given; attach() takes one optimizer or more")
        self._given_group = self._given_group if group is None else group
        self._find_shards()
        optimizers = tuple(map(unwrap_optimizer, optimizers))
        for optimizer in optimizers:
            check_optimizer(optimizer)
            if optimizer in self._attachments:
                raise ValueError(
                    f"{self.name} is attached to this {type(optimizer).__name__} already; detach() it first"
                )
        for optimizer in optimizers:
            self._check_not_replaced(optimizer)
            self.schedule.check(optimizer)
        prepared = {optimizer: self._match(optimizer) for optimizer in optimizers}
        for optimizer, attachment in prepared.items():
            self._check_placement(attachment.names)
            if self.order > 0:
                warn_of_average(self.name, optimizer)
            self._warn_of_another(optimizer)
            attachment.frozen = warn_of_unknown(self.name, self.model, self._known, optimizer, self._told)
        self._agree(group)
        for optimizer, attachment in prepared.items():
            attachment.slot = free_slot(self._attachments.values(), attachment.names)
            attachment.handles = self._register_hooks(optimizer)
            acts_before = any(handle.id in optimizer._optimizer_step_pre_hooks for handle in attachment.handles)
            if attachment.handles and not acts_before:
                attachment.handles.append(before_step(optimizer, self._check_before_step))
            for handle in attachment.handles:
                place_hook(optimizer, handle, self._acts_before)
            self._attachments[optimizer] = attachment
            self.schedule.note(optimizer, attachment)
        return self

    def detach(self, *optimizers: Optimizer) -> None:
        """Remove the hooks from these optimizers, or from all if none is given."""
        optimizers = tuple(map(unwrap_optimizer, optimizers))
        for optimizer in optimizers:
            if optimizer not in self._attachments:
                raise ValueError(f"{self.name} is not attached to this {type(optimizer).__name__}")
        for optimizer in dict.fromkeys(optimizers) or tuple(self._attachments):
            for handle in self._attachments.pop(optimizer).handles:
                handle.remove()

    @property
    def acts_on_new_data(self) -> bool:
        """Whether the method acts only when the caller says that data is new, by `apply()`."""
        return False

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that the method is attached to, in order of attachment."""
        return tuple(self._attachments)

    def step(self) -> None:
        """Act once by hand, on all parameters of the method."""
        raise TypeError(f"{self.name} acts when data is new: call apply()")

    def apply(
        self,
        *optimizers: Optimizer,
        batches: Batches | None = None,
        loss_fn: LossFunction | None = None,
        targets: Targets = (),
        group: Group | None = None,
    ) -> Receipt:
        """Act because the data is new: reinitializers do, and Hare & Tortoise."""
        raise TypeError(f"{self.name} acts at every step of an optimizer: call attach() or step()")

    @property
    @abstractmethod
    def receipt(self) -> Receipt | None:
        """What the last action did, or None before the first one. Reading it may synchronize the device."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the method; it holds references to tensors, and `weights_only=True` can load it."""
        state = self._state()
        if self._shards is not None:
            sharded = self._shards.held()
            state = replace_values(
                state, {path: as_sharded(value_at(state, path), sharded[path[-1]]) for path in self._sharded_state}
            )
        return {"method": self.name, "shapes": self._shapes(), "steps": list(self.steps), "state": state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state made by `state_dict()`. Settings are not part of it: they come from the constructor.

        Raises:
            ValueError: If the state is of another method or another architecture. Nothing is changed then.
        """
        if state_dict.get("method") != self.name:
            raise ValueError(f"state_dict: made by method {state_dict.get('method')!r}, this is {self.name!r}")
        for key in ("shapes", "steps", "state"):
            if key not in state_dict:
                raise ValueError(f"state_dict: {key!r} is missing")
        check_same_shapes(self._shapes(), state_dict["shapes"])
        self._find_shards()
        mine, theirs = self._state(), state_dict["state"]
        if self._shards is not None:
            check_same_structure(leave_out(mine, self._sharded_state), leave_out(theirs, self._sharded_state), "state")
            sharded = self._shards.held()
            theirs = replace_values(
                theirs, {p: as_shard(value_at(theirs, p), sharded[p[-1]]) for p in self._sharded_state}
            )
        check_same_structure(mine, theirs, "state")
        self.steps = list(state_dict["steps"])
        loaded = copy_state_(mine, theirs)
        self.schedule.state = loaded.pop("learning_rates", {})
        for name, value in loaded.items():
            setattr(self, name, value)

    def _state(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in self.saved}
        return {**state, "learning_rates": self.schedule.state} if self.schedule.state else state

    def __repr__(self) -> str:
        attached = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        where = f"attached to {attached}" if attached else "not attached"
        return f"<{type(self).__name__} of {type(self.model).__name__}, {where}, {sum(self.steps)} steps>"

    def _acts_before(self, owner: object) -> bool:
        """Return whether this method acts before the owner of another hook."""
        return (owner.order if isinstance(owner, Method) else Method.order) > self.order

    def _acted_on(self) -> Iterable[nn.Parameter]:
        """Return the parameters that the method changes, or whose gradients it changes."""
        return self.parameters.values()

    def _warn_of_another(self, optimizer: Optimizer) -> None:
        """Warn if another instance already acts on these parameters, as after running a notebook cell twice."""
        others = [other for other in owners_of_hooks(optimizer) if type(other) is type(self)]
        own = {id(held(parameter)) for parameter in self._acted_on()}
        if any(id(held(parameter)) in own for other in others for parameter in other._acted_on()):
            warn_user(
                f"another {self.name} is attached to this {type(optimizer).__name__} and acts on the same parameters: "
                "both will act; detach() the other one, or create a new optimizer"
            )

    def _shapes(self) -> dict[str, list[int]]:
        return {name: list(held(parameter).shape) for name, parameter in self.parameters.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_attachments": None, "group": None, "_given_group": None, "_shards": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attachments = WeakKeyDictionary()

    def _register_hooks(self, optimizer: Optimizer) -> list[RemovableHandle]:
        return []

    def _attachment(self, optimizer: Optimizer) -> Attachment:
        """Return the attachment of an optimizer, matched again if its parameters changed."""
        attachment = self._attachments[optimizer]
        if not attachment.is_current(optimizer) or self._is_replaced(attachment):
            self._match_again(optimizer, attachment)
        return attachment

    def _check_before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Raise an error before the optimizer steps, not after it, if the model was cast or its parameters replaced.

        Parameters that joined the optimizer are matched after the step: what they did before it was not watched.
        """
        attachment = self._attachments[optimizer]
        if attachment.is_elsewhere() or self._is_replaced(attachment):
            self._attachment(optimizer)

    def _is_replaced(self, attachment: Attachment) -> bool:
        """Return whether the model holds another tensor in the place of the first parameter.

        `load_state_dict(assign=True)` replaces all of them, so one tells.
        """
        if self._shards is not None or not attachment.names:
            return False
        module = self.model
        for child in attachment.place[:-1]:  # as `get_submodule` does, in a third of its time
            found = module._modules.get(child)
            if found is None:
                return False
            module = found
        present = module._parameters.get(attachment.place[-1])
        return present is not None and present is not self.parameters[attachment.names[0]]

    def _match_again(self, optimizer: Optimizer, attachment: Attachment) -> None:
        self._check_not_replaced(optimizer)
        found = self._match(optimizer)
        self._check_placement(found.names)
        attachment.names, attachment.groups, attachment.held = found.names, found.groups, found.held
        attachment.first, attachment.place, attachment.placement = found.first, found.place, found.placement
        self.schedule.note(optimizer, attachment)
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
        """Return the gradients of learnable parameters that have one, by name."""
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
        """Return the parameters that the attached optimizers hold, or all if the method is not attached."""
        held = {name for attachment in self._attachments.values() for name in attachment.names}
        return tuple(name for name in self.parameters if not held or name in held)

    def _match(self, optimizer: Optimizer) -> Attachment:
        attachment = Attachment.of(optimizer, self.parameters)
        if not attachment.names:
            raise ValueError(
                f"optimizers: this {type(optimizer).__name__} holds none of the {len(self.parameters)} parameters of "
                f"{self.name} (the first is {next(iter(self.parameters))!r}). Pass an optimizer of this model, not of "
                "a copy"
            )
        return attachment
