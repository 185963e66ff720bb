"""What recyclers share: they watch the units of a model at work, and renew some of them.

A unit is watched where it is read: at the input of the next layer, after its norm layer, nonlinearity and pooling, in
training mode, in passes that gradients of the next layer's weight are taken of. To renew it is to make it anew in all
its parts: the weights that make it, its bias, its share of norm layers and of their running statistics, the weights
that read it, and all that optimizers remember of those entries, the step count excepted. Without the latter it is born
with the momentum of the unit that it replaces.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from pliant._precision import wide_dtype
from pliant._step_hooks import after_step
from pliant._warnings import warn_user
from pliant.anatomy.units import Reader, Slices, UnitGroup
from pliant.methods._core.attachment import Attachment, count_step, was_skipped
from pliant.methods._core.filters import Filter, check_not_replaced, choose_units, is_linear_or_convolution
from pliant.methods._core.method import Kind, Method, Receipt
from pliant.methods._core.module_hooks import ModuleHook, input_of
from pliant.methods._core.surgery import keeper_of, slice_mask, write_, zero_moments_

_FEW = 32
"""Entries in a row below which torch sums slowly."""


class SumByUnit:
    """Adds up values of the slices of a tensor that belong to each unit.

    Args:
        units: For each slice the unit that it belongs to, or −1.
        count: How many units there are.

    Attributes:
        slices: How many slices each unit has: a number if it is the same for all.

    Example:
        >>> SumByUnit(torch.tensor([0, 0, 1, -1]), 2)(torch.tensor([1.0, 2.0, 4.0, 8.0]))
        tensor([3., 4.])
    """

    def __init__(self, units: Tensor, count: int) -> None:
        self._is_identity = torch.equal(units, torch.arange(count))
        # Slices that belong to no unit go to one more, which is dropped.
        self._index = units.where(units >= 0, count)
        self._count = count
        slices = torch.bincount(self._index, minlength=count + 1)[:count]
        self.slices: Tensor | int = int(slices[0]) if (slices == slices[0]).all() else slices

    def __call__(self, values: Tensor) -> Tensor:
        """Return the sums, one for each unit."""
        if self._is_identity:
            return values
        if self._index.device != values.device:
            self._index = self._index.to(values.device)
        return values.new_zeros(self._count + 1).index_add_(0, self._index, values)[: self._count]

    def mean(self, totals: Tensor, entries: Tensor | int = 1) -> Tensor:
        """Return the mean over all entries of each unit's slices.

        Args:
            totals: The sum over the entries of each slice.
            entries: How many entries each slice has.
        """
        slices = self.slices if isinstance(self.slices, int) else self.slices.to(totals.device)
        return self(totals) / (entries * slices)


@dataclass
class Activity:
    """What the inputs of a layer that reads units were since the last step.

    Attributes:
        total: Σ h over examples and places, for each input: one a unit, or as many as a flattened channel has pixels.
        total_size: Σ |h|.
        entries: How many entries each of these sums is over.
    """

    total: Tensor
    total_size: Tensor
    entries: Tensor | int

    @property
    def mean(self) -> Tensor:
        """The mean activation at each input."""
        return self.total / self.entries

    @property
    def mean_size(self) -> Tensor:
        """The mean absolute activation at each input."""
        return self.total_size / self.entries


def add_finite(*passes: Activity) -> Activity:
    """Add up the passes in which all activations were finite.

    A pass that overflowed has most likely had its step skipped, by a GradScaler or by the loop, and nobody tells: it
    would come into the next step's sums, and spoil all averages for ever. Only the device knows, so it decides.
    """
    finite = [each.total_size.isfinite().all() for each in passes]
    return Activity(
        total=sum_where(finite, [each.total for each in passes]),
        total_size=sum_where(finite, [each.total_size for each in passes]),
        entries=sum_where(finite, [torch.as_tensor(each.entries, device=each.total.device) for each in passes]),
    )


def sum_where(chosen: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the tensors that are chosen."""
    kept = [tensor.where(flag, 0) for flag, tensor in zip(chosen, tensors, strict=True)]
    return sum(kept[1:], start=kept[0])


class Recycler(Method):
    """A rule that renews units of the model, after steps of the optimizer.

    Args:
        model: The model.
        example: An example input (tensor, tuple of arguments or dictionary of keyword arguments), from which the units
            are found.
        where: Whose units to renew, as a predicate on name and value of the weight that makes them; all if None.

    Attributes:
        groups: The layers whose units may be renewed, by name.
        skipped: The layers whose units may not, by name, with the reason.
        renewals: How often each unit was renewed, by layer.
    """

    kind: ClassVar[Kind] = "recycler"
    order: ClassVar[int] = 40
    joint: ClassVar[bool] = True

    def __init__(self, model: nn.Module, example: Any, *, where: Filter | None = None) -> None:
        super().__init__(model)
        groups, self.skipped = choose_units(
            self.name,
            model,
            example,
            where,
            self._reason_against,
            "it has no units that can be renewed one by one",
        )
        self.groups = {group.name: group for group in groups}
        self._watched_at = {group.name: self._watchable_readers(group)[0] for group in groups}
        self._sums = {group.name: SumByUnit(self._watched_at[group.name].weight.units, group.count) for group in groups}
        self._watched_by: dict[nn.Module, list[str]] = {}
        for name, reader in self._watched_at.items():
            self._watched_by.setdefault(model.get_submodule(reader.module), []).append(name)
        self.renewals = {
            name: torch.zeros(group.count, dtype=torch.int64, device=self.parameters[group.weight.tensor].device)
            for name, group in self.groups.items()
        }
        self._seen: dict[str, Activity] = {}
        self._holders: dict[str, list[int]] = {}
        self._probes: list[RemovableHandle] = []
        self._chosen: dict[str, Tensor] | None = None
        self._moments_cleared: Counter[str] = Counter()
        self._warned_of_unseen = self._looked_for_unheld = False
        self._stepped: Collection[str] = ()
        self._checked: WeakSet[Optimizer] = WeakSet()

    def attach(self, *optimizers: Optimizer) -> Self:
        """Watch the model, and act after every step of these optimizers on the units whose weights they hold."""
        super().attach(*optimizers)
        self._find_holders()
        for optimizer in optimizers if self._probes else ():
            # What was seen while no optimizer held these units belongs to none of its steps.
            self._forget(self._attachment(optimizer).names)
        if not self._probes:
            self._probes = [
                m.register_forward_pre_hook(ModuleHook(m, self._see), with_kwargs=True) for m in self._watched_by
            ]
        return self

    def detach(self, *optimizers: Optimizer) -> None:
        """Stop acting on these optimizers, or on all if none is given; no hook is left when it was the last."""
        super().detach(*optimizers)
        self._find_holders()
        if not self._attachments:
            for probe in self._probes:
                probe.remove()
            self._probes = []

    def step(self) -> None:
        """Act once by hand on what was seen of all units since the last step; without attach() nothing was."""
        if not self._probes:
            raise TypeError(f"{self.name} acts on activations, which it sees once attached: call attach()")
        step = count_step(self.steps)
        if self._is_due(step):
            self._act_on(list(self.groups.values()), step, tuple(self.parameters), self._holders)

    @property
    def receipt(self) -> Receipt | None:
        """Which units the last action renewed, how many entries that wrote, and how many units it were so far."""
        if self._chosen is None:
            return None
        renewed = {name: chosen.cpu() for name, chosen in self._chosen.items() if chosen.any()}
        written: dict[str, Tensor] = {}
        for name, chosen in renewed.items():
            for tensor, mask in self._masks(self.groups[name], chosen):
                written[tensor] = written[tensor] | mask if tensor in written else mask
        entries = sum(int(mask.expand(self._tensor(tensor).shape).sum()) for tensor, mask in written.items())
        details = {
            "units": {name: chosen.nonzero().flatten().tolist() for name, chosen in renewed.items()},
            "units_so_far": {name: int(counts.sum()) for name, counts in self.renewals.items()},
            "optimizer_tensors_cleared": sum(self._moments_cleared[name] for name in renewed),
            "steps": sum(self.steps),
            "skipped": self.skipped,
        }
        return Receipt(self.name, "renew units", len(written), entries, details)

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs, what was seen since the last step included."""
        return {**super().state_dict(), "seen": {name: vars(activity) for name, activity in self._seen.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state made by `state_dict()`; settings come from construction, not from here."""
        seen = state_dict.get("seen", {})
        for name, activity in seen.items():
            reader = self._watched_at.get(name)
            if reader is None or len(activity["total"]) != len(reader.weight.units):
                raise ValueError(f"state_dict: has seen units of {name!r} that this model has not")
        super().load_state_dict(state_dict)
        self._seen = {name: self._here(name, activity) for name, activity in seen.items()}

    def _here(self, name: str, activity: Mapping[str, Any]) -> Activity:
        device = self._tensor(self.groups[name].weight.tensor).device
        return Activity(**{key: v.to(device) if isinstance(v, Tensor) else v for key, v in activity.items()})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_probes": [], "_seen": {}, "_checked": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._checked = WeakSet()

    def _watchable_readers(self, group: UnitGroup) -> list[Reader]:
        """Return the layers at whose input all units of a group can be seen."""
        units = torch.arange(group.count)
        return [
            reader
            for reader in group.readers
            if reader.reads_input
            and is_linear_or_convolution(self.model.get_submodule(reader.module))
            and torch.isin(units, reader.weight.units).all()
        ]

    def _reason_against(self, group: UnitGroup) -> str | None:
        """Return why units cannot be renewed, or None if they can."""
        if group.weight.tensor not in self.parameters:
            return "the weight that makes it has no entries"
        if not self._watchable_readers(group):
            return "no linear or convolution layer reads all of its units as its input, where they could be watched"
        return None

    @abstractmethod
    def _act(self, groups: Sequence[UnitGroup], seen: dict[str, Activity], step: int) -> None:
        """Renew what is to be renewed of these layers, after the step of that number."""

    def _is_due(self, step: int) -> bool:
        """Say whether this step, counted from 1, is one to act after, so that what precedes it must be watched."""
        return True

    def _make_anew(self, name: str, chosen: Tensor, incoming: Tensor) -> None:
        """Make units of a layer anew, up to the weights that read them.

        Args:
            name: The layer.
            chosen: For each of its units, whether it is renewed.
            incoming: The weights to make them with, shaped as the layer's weight.
        """
        group = self.groups[name]
        self._write(name, group.weight, chosen, incoming)
        values = [(group.bias, 0.0)]
        for norm in group.norms:
            values += [(norm.weight, 1.0), (norm.bias, 0.0), (norm.running_mean, 0.0), (norm.running_var, 1.0)]
        for slices, value in values:
            if slices is not None:
                self._write(name, slices, chosen, value)
        self.renewals[name] = self.renewals[name].to(chosen.device).add_(chosen)

    def _zero_outgoing(self, name: str, chosen: Tensor) -> None:
        """Let nobody read the chosen units of a layer."""
        for reader in self.groups[name].readers:
            self._write(name, reader.weight, chosen, 0.0)

    def _write(self, name: str, slices: Slices, chosen: Tensor, value: Tensor | float) -> None:
        tensor = self._tensor(slices.tensor)
        mask = slice_mask(chosen, slices.units.to(chosen.device), slices.dim, tensor.ndim)
        write_(tensor.detach(), mask, value)
        self._moments_cleared[name] += zero_moments_(self.optimizers, tensor, mask)
        if tensor.grad is not None and slices.tensor not in self._stepped:
            # Another optimizer has yet to step with this gradient, which is that of the unit that is gone. One that was
            # used is left alone: whoever logs it after the step finds what the step was made with.
            write_(tensor.grad, mask, 0.0)

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self.parameters[name] if name in self.parameters else attrgetter(name)(self.model)
        return tensor

    def _masks(self, group: UnitGroup, chosen: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are written when units of a layer are renewed, each with a mask of its entries."""
        for slices in _parts(group):
            yield slices.tensor, slice_mask(chosen, slices.units, slices.dim, self._tensor(slices.tensor).ndim)

    def _find_holders(self) -> None:
        """Note by whose steps the units of each layer are counted; those of no optimizer are not watched."""
        self._holders = {}
        for attachment in self._attachments.values():
            for group in self._groups_of(attachment.names):
                self._holders.setdefault(group.name, []).append(attachment.slot)
        self._seen = {name: activity for name, activity in self._seen.items() if name in self._holders}

    def _match_again(self, optimizer: Optimizer, attachment: Attachment) -> None:
        super()._match_again(optimizer, attachment)
        self._find_holders()

    def _groups_of(self, names: Sequence[str]) -> list[UnitGroup]:
        held = set(names)
        return [group for group in self.groups.values() if group.weight.tensor in held]

    def _register_hooks(self, optimizer: Optimizer) -> list[RemovableHandle]:
        return [after_step(optimizer, self._after_step)]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Units of parameters that have joined the optimizer since are found now, and watched from now on.
        watched = self._holders
        attachment = self._attachment(optimizer)
        if was_skipped(optimizer):
            self._forget(attachment.names)
            return
        self._check_moments([optimizer])
        step = count_step(self.steps, attachment.slot)
        if self._is_due(step):
            self._act_on(self._groups_of(attachment.names), step, attachment.names, watched)

    def _forget(self, names: Sequence[str]) -> None:
        for group in self._groups_of(names):
            self._seen.pop(group.name, None)

    @torch.no_grad()
    def _act_on(
        self, groups: Sequence[UnitGroup], step: int, names: Sequence[str], watched: Mapping[str, Sequence[int]]
    ) -> None:
        """Act on units of these layers.

        Args:
            groups: The layers.
            step: The number of the step that it is done after.
            names: The parameters that were stepped.
            watched: The layers whose units were watched before the step, and by whose steps they are counted.
        """
        seen = {group.name: self._seen.pop(group.name) for group in groups if group.name in self._seen}
        groups = [group for group in groups if self._is_free(group)]
        self._check_moments(self.optimizers)
        # Of what several optimizers hold, another one may have taken what was seen.
        alone = [group.name for group in groups if len(watched.get(group.name, ())) == 1]
        unseen = [name for name in alone if name not in seen]
        if unseen and not self._warned_of_unseen:
            self._warned_of_unseen = True
            reader = self._watched_at[unseen[0]].module
            warn_user(
                f"{self.name} saw nothing of the units of {unseen[0]!r} before this step: the module that reads them, "
                f"{reader!r}, was not called in training mode with gradients of its weight, only inside torch.func, or "
                "was compiled before attach()"
            )
        if not seen:  # the receipt stays that of the last action
            return
        self._stepped = frozenset(names)
        self._act([group for group in groups if group.name in seen], seen, step)
        if not self._looked_for_unheld and any(chosen.any() for chosen in (self._chosen or {}).values()):
            # Not before the first renewal, since optimizers may be attached one by one.
            self._looked_for_unheld = True
            unheld = self._unheld()
            if unheld:
                warn_user(
                    f"{self.name} is attached to no optimizer that holds {', '.join(unheld)}, parts of units that it "
                    "renews: one that does would go on with what it remembers of the old units; attach it too"
                )

    def _check_not_replaced(self, optimizer: Optimizer) -> None:
        parts = {slices.tensor for group in self.groups.values() for slices in _parts(group)}
        check_not_replaced(self.name, self.model, {name: p for name, p in self.parameters.items() if name in parts})

    def _unheld(self) -> list[str]:
        """Return the learnable parts of units that are renewed, but held by no optimizer that the method serves."""
        held = {name for attachment in self._attachments.values() for name in attachment.names}
        parts = [slices.tensor for name in self._holders for slices in _parts(self.groups[name])]
        learnable = [name for name in parts if name in self.parameters and self.parameters[name].requires_grad]
        return [name for name in dict.fromkeys(learnable) if name not in held]

    def _is_free(self, group: UnitGroup) -> bool:
        """Say whether all that makes or reads the units is learnable still, and was not frozen in the meantime."""
        tensors = [slices.tensor for slices in _parts(group)]
        return all(self.parameters[name].requires_grad for name in tensors if name in self.parameters)

    def _check_moments(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise a ValueError if an optimizer keeps what cannot be cleared in part, as soon as it keeps anything."""
        for optimizer in optimizers:
            if optimizer in self._checked or not keeper_of(optimizer).state:
                continue
            tensors = [self._tensor(slices.tensor) for group in self.groups.values() for slices in _parts(group)]
            if isinstance(optimizer, LBFGS):  # it keeps what it knows of all parameters under its first
                tensors += optimizer.state
            for tensor in tensors:
                zero_moments_([optimizer], tensor, torch.zeros((), dtype=torch.bool, device=tensor.device))
            self._checked.add(optimizer)

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        for name in self._watched_by[module]:
            if not any(self._is_due(self._steps_of(slot) + 1) for slot in self._holders.get(name, ())):
                continue
            reader = self._watched_at[name]
            weight = self._tensor(reader.weight.tensor)
            # A pass through a frozen critic trains the actor, and is none of those that the critic learns from; one in
            # which other weights are in the place of these (functional_call: a target network) says nothing of them.
            if weight.requires_grad and attrgetter(reader.weight.tensor)(self.model) is weight:
                self._add_activity(name, input_of(args, kwargs).detach(), reader.input_dim)

    def _steps_of(self, slot: int) -> int:
        return self.steps[slot] if slot < len(self.steps) else 0

    def _add_activity(self, name: str, values: Tensor, dim: int) -> None:
        dim %= values.ndim
        activity = Activity(
            total=sum_except(values, dim),
            total_size=sum_except(values.abs(), dim),
            entries=values.numel() // values.shape[dim],
        )
        before = self._seen.get(name)
        self._seen[name] = activity if before is None else add_finite(before, activity)


def sum_except(values: Tensor, dim: int) -> Tensor:
    """Return Σ over all dimensions but one, in float32 at least."""
    dtype = wide_dtype(values.dtype)
    if values.ndim == 1:  # one example without a dimension for examples; a sum over no dimension would be over all
        return values.to(dtype)
    if dim == 1 and values.ndim > 2 and values.is_contiguous() and values.shape[2:].numel() < _FEW:
        # The places of a kernel are too few for a fast inner loop, all that comes after the first dimension is not.
        return values.sum(0, dtype=dtype).flatten(1).sum(1)
    return values.sum([d for d in range(values.ndim) if d != dim], dtype=dtype)


def _parts(group: UnitGroup) -> list[Slices]:
    """Return all that is written when units of a layer are renewed."""
    norms = [slices for norm in group.norms for slices in norm.tensors]
    own = [group.weight] if group.bias is None else [group.weight, group.bias]
    return [*own, *norms, *(reader.weight for reader in group.readers)]
