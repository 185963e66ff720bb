"""Methods that watch the units of a model during training and renew some of them.

A unit is watched at the input of the next layer, after its norm layer, nonlinearity and pooling. Only passes in
training mode that compute gradients of the next layer's weight count. Renewing a unit rewrites all its parts: its
incoming weights, its bias, its entries in norm layers and their running statistics, its outgoing weights, and the
optimizers' state of all these entries except the step count. Otherwise the new unit would start with the old momentum.
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
from pliant.distributed import Group, held, sum_over_ranks, whole_of
from pliant.methods._core.attachment import Attachment, count_step, was_skipped
from pliant.methods._core.filters import Filter, check_not_replaced, choose_units, is_linear_or_convolution
from pliant.methods._core.method import Kind, Method, Receipt
from pliant.methods._core.module_hooks import ModuleHook, input_of
from pliant.methods._core.surgery import keeper_of, slice_mask, write_, zero_moments_

_FEW = 32
"""Torch sums rows with fewer entries slowly."""


class SumByUnit:
    """Sums the values of the slices of each unit.

    Args:
        units: For each slice the unit that it belongs to, or −1.
        count: The number of units.

    Attributes:
        slices: The number of slices of each unit; a single number if it is the same for all units.

    Example:
        >>> SumByUnit(torch.tensor([0, 0, 1, -1]), 2)(torch.tensor([1.0, 2.0, 4.0, 8.0]))
        tensor([3., 4.])
    """

    def __init__(self, units: Tensor, count: int) -> None:
        self._is_identity = torch.equal(units, torch.arange(count))
        # Slices without a unit go to an extra unit, which is dropped.
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
            entries: The number of entries of each slice.
        """
        slices = self.slices if isinstance(self.slices, int) else self.slices.to(totals.device)
        return self(totals) / (entries * slices)


@dataclass
class Activity:
    """Sums over the inputs of a layer that reads units, since the last step.

    Attributes:
        total: Σ h over examples and positions for each input. A unit has one input, a flattened channel has several.
        total_size: Σ |h|.
        entries: The number of entries in each sum.
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
    """Add up the passes whose activations are all finite.

    A GradScaler usually skips the step of a pass that overflowed, without telling the method. Counting such a pass
    would make all later averages NaN. The test runs on the device, without a synchronization.
    """
    finite = [each.total_size.isfinite().all() for each in passes]
    return Activity(
        total=sum_where(finite, [each.total for each in passes]),
        total_size=sum_where(finite, [each.total_size for each in passes]),
        entries=sum_where(finite, [torch.as_tensor(each.entries, device=each.total.device) for each in passes]),
    )


def sum_where(chosen: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the chosen tensors."""
    kept = [tensor.where(flag, 0) for flag, tensor in zip(chosen, tensors, strict=True)]
    return sum(kept[1:], start=kept[0])


class Recycler(Method):
    """A method that renews units of the model after steps of the optimizer.

    Args:
        model: The model.
        example: An example input (tensor, tuple of arguments or dictionary of keyword arguments), on which the units
            are found.
        where: The layers whose units to renew, as a predicate on name and value of their weight; all if None.

    Attributes:
        groups: The layers whose units may be renewed, by name.
        skipped: The reason for each other layer, by name.
        renewals: The number of renewals of each unit, by layer.
    """

    kind: ClassVar[Kind] = "recycler"
    order: ClassVar[int] = 40
    joint: ClassVar[bool] = True
    watches: ClassVar[bool] = True
    """Whether the method needs the activations of the units."""
    renews_outgoing: ClassVar[bool] = True
    """Whether the outgoing weights are part of what is renewed."""

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
        watched = groups if self.watches else []
        self._watched_at = {group.name: self._watchable_readers(group)[0] for group in watched}
        self._sums = {
            group.name: SumByUnit(self._watched_at[group.name].weight.units, group.count) for group in watched
        }
        self._free_with = {
            name: [slices.tensor for slices in self._parts(group) if slices.tensor in self.parameters]
            for name, group in self.groups.items()
        }
        self._groups_held: dict[tuple[str, ...], list[UnitGroup]] = {}
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

    def attach(self, *optimizers: Optimizer, group: Group | None = None) -> Self:
        """Watch the model, and act after every step of these optimizers on the units whose weights they hold."""
        super().attach(*optimizers, group=group)
        self._find_holders()
        for optimizer in optimizers if self._probes else ():
            # Passes before the attachment do not belong to a step of this optimizer.
            self._forget(self._attachment(optimizer).names)
        if not self._probes and self.watches:
            self._probes = [
                m.register_forward_pre_hook(ModuleHook(m, self._see), with_kwargs=True) for m in self._watched_by
            ]
        return self

    def detach(self, *optimizers: Optimizer) -> None:
        """Remove the hooks from these optimizers, or from all if none is given; with the last one the probes go too."""
        super().detach(*optimizers)
        self._find_holders()
        if not self._attachments:
            for probe in self._probes:
                probe.remove()
            self._probes = []

    def step(self) -> None:
        """Act once by hand on all units, using the passes since the last step; needs attach() for the probes."""
        if self.watches and not self._probes:
            raise TypeError(f"{self.name} acts on activations, which it sees once attached: call attach()")
        self._check_moments(self.optimizers)
        step = count_step(self.steps)
        if self._is_due(step):
            self._act_on(list(self.groups.values()), step, tuple(self.parameters), self._holders)

    @property
    def receipt(self) -> Receipt | None:
        """The units that the last action renewed, the entries written, and the total number of units renewed so far."""
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
        """Return the state of the method, including the activity since the last step."""
        return {**super().state_dict(), "seen": {name: vars(activity) for name, activity in self._seen.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state made by `state_dict()`."""
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
        """Return the layers whose input contains all units of a group."""
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
        if any(slices.tensor not in self.parameters for slices in group.weights):
            return "the weight that makes it has no entries"
        if self.watches and not self._watchable_readers(group):
            return "no linear or convolution layer reads all of its units as its input, where they could be watched"
        return None

    @abstractmethod
    def _act(self, groups: Sequence[UnitGroup], seen: dict[str, Activity], step: int) -> None:
        """Renew units of these layers after this step."""

    def _is_due(self, step: int) -> bool:
        """Return whether to act after this step, counted from 1; only passes before such a step are watched."""
        return True

    def _rewrite(self, name: str, chosen: Tensor, incoming: Sequence[Tensor]) -> None:
        """Rewrite all parts of the chosen units except their outgoing weights.

        Args:
            name: The layer.
            chosen: For each unit, whether it is renewed.
            incoming: New incoming weights, shaped as the group's weights.
        """
        group = self.groups[name]
        for weight, drawn in zip(group.weights, incoming, strict=True):
            self._write(name, weight, chosen, drawn)
        for bias in group.biases:
            self._write(name, bias, chosen, 0.0)
        values: list[tuple[Slices | None, float]] = []
        for norm in group.norms:
            values += [(norm.weight, 1.0), (norm.bias, 0.0), (norm.running_mean, 0.0), (norm.running_var, 1.0)]
        for slices, value in values:
            if slices is not None:
                self._write(name, slices, chosen, value)
        self.renewals[name] = self.renewals[name].to(chosen.device).add_(chosen)

    def _zero_outgoing(self, name: str, chosen: Tensor) -> None:
        """Set the outgoing weights of the chosen units to zero."""
        for reader in self.groups[name].readers:
            self._write(name, reader.weight, chosen, 0.0)

    def _write(self, name: str, slices: Slices, chosen: Tensor, value: Tensor | float) -> None:
        tensor = self._tensor(slices.tensor)
        mask = slice_mask(chosen, slices.units.to(chosen.device), slices.dim, tensor.ndim)
        write_(tensor.detach(), mask, value)
        self._moments_cleared[name] += zero_moments_(self.optimizers, tensor, mask)
        if tensor.grad is not None and slices.tensor not in self._stepped:
            # Another optimizer has yet to step with this gradient, which belongs to the old unit. Gradients that were
            # used are kept, so that logging after the step shows what the step used.
            write_(tensor.grad, mask, 0.0)

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self.parameters[name] if name in self.parameters else attrgetter(name)(self.model)
        return tensor

    def _parts(self, group: UnitGroup) -> list[Slices]:
        """Return all slices that renewing units of a layer writes."""
        norms = [slices for norm in group.norms for slices in norm.tensors]
        readers = [reader.weight for reader in group.readers if self.renews_outgoing]
        return [*group.weights, *group.biases, *norms, *readers]

    def _masks(self, group: UnitGroup, chosen: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that renewing these units writes, each with a mask of the entries."""
        for slices in self._parts(group):
            yield slices.tensor, slice_mask(chosen, slices.units, slices.dim, self._tensor(slices.tensor).ndim)

    def _find_holders(self) -> None:
        """Note which optimizers hold the units of each layer; layers without an optimizer are not watched."""
        self._holders = {}
        for attachment in self._attachments.values():
            for group in self._groups_of(attachment.names):
                self._holders.setdefault(group.name, []).append(attachment.slot)
        self._seen = {name: activity for name, activity in self._seen.items() if name in self._holders}

    def _match_again(self, optimizer: Optimizer, attachment: Attachment) -> None:
        super()._match_again(optimizer, attachment)
        self._find_holders()

    def _groups_of(self, names: tuple[str, ...]) -> list[UnitGroup]:
        if names not in self._groups_held:
            held = set(names)
            self._groups_held[names] = [
                group for group in self.groups.values() if any(slices.tensor in held for slices in group.weights)
            ]
        return self._groups_held[names]

    def _register_hooks(self, optimizer: Optimizer) -> list[RemovableHandle]:
        return [after_step(optimizer, self._after_step)]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Parameters that joined the optimizer are found below, and their units are watched from then on.
        watched = self._holders
        attachment = self._attachments[optimizer]
        if not attachment.is_current(optimizer):
            self._match_again(optimizer, attachment)
        if was_skipped(optimizer):
            self._forget(attachment.names)
            return
        self._check_moments(self.optimizers)
        step = count_step(self.steps, attachment.slot)
        if self._is_due(step):
            with self._acting():
                self._act_on(self._groups_of(attachment.names), step, attachment.names, watched)

    def _forget(self, names: tuple[str, ...]) -> None:
        for group in self._groups_of(names):
            self._seen.pop(group.name, None)

    @torch.set_grad_enabled(False)  # cheaper than no_grad
    def _act_on(
        self, groups: Sequence[UnitGroup], step: int, names: Sequence[str], watched: Mapping[str, Sequence[int]]
    ) -> None:
        """Act on units of these layers.

        Args:
            groups: The layers.
            step: The number of the step.
            names: The parameters that the step changed.
            watched: The layers that were watched before the step, with the step counts of their optimizers.
        """
        seen = self._seen_on_all_ranks([group.name for group in groups]) if self.watches else {}
        groups = [group for group in groups if self._is_free(group)]
        # If several optimizers hold a layer, another one may have used its activity already.
        alone = [group.name for group in groups if len(watched.get(group.name, ())) == 1]
        unseen = [name for name in alone if self.watches and name not in seen]
        if unseen and not self._warned_of_unseen:
            self._warned_of_unseen = True
            reader = self._watched_at[unseen[0]].module
            warn_user(
                f"{self.name} saw no activations of {unseen[0]!r} before this step: the module that reads them, "
                f"{reader!r}, was not called in training mode with gradients of its weight, only inside torch.func, or "
                "was compiled before attach()"
            )
        if self.watches and not seen:  # the receipt of the last action stays
            return
        self._stepped = frozenset(names)
        self._act([group for group in groups if not self.watches or group.name in seen], seen, step)
        if not self._looked_for_unheld and any(chosen.any() for chosen in (self._chosen or {}).values()):
            # Only after the first renewal, because optimizers may be attached one by one.
            self._looked_for_unheld = True
            unheld = self._unheld()
            if unheld:
                warn_user(
                    f"{self.name} renews units with parts that no attached optimizer holds: {', '.join(unheld)}. An "
                    "optimizer that holds them keeps its state of the old units; attach it too"
                )

    def _seen_on_all_ranks(self, names: Sequence[str]) -> dict[str, Activity]:
        """Return the activity of these layers since the last step, summed over the ranks in one collective."""
        seen = {name: self._seen.pop(name) for name in names if name in self._seen}
        if self.group is None:
            return seen
        unseen = {name: self._no_activity(name) for name in names if name not in seen}
        activities = [(seen | unseen)[name] for name in names]
        parts = [part for a in activities for part in (a.total, a.total_size, torch.as_tensor(a.entries).to(a.total))]
        sums = sum_over_ranks(parts, self.group)
        reduced = {name: Activity(*sums[3 * i : 3 * i + 3]) for i, name in enumerate(names)}
        counts = torch.stack(sums[2::3]).tolist() if sums else []
        return {name: reduced[name] for name, count in zip(names, counts, strict=True) if count}

    def _no_activity(self, name: str) -> Activity:
        weight = self._tensor(self.groups[name].weight.tensor)
        nothing = weight.new_zeros(len(self._watched_at[name].weight.units), dtype=wide_dtype(weight.dtype))
        return Activity(nothing, nothing, 0)

    def _check_not_replaced(self, optimizer: Optimizer) -> None:
        parts = {slices.tensor for group in self.groups.values() for slices in self._parts(group)}
        check_not_replaced(self.name, self.model, {name: p for name, p in self.parameters.items() if name in parts})

    def _unheld(self) -> list[str]:
        """Return the learnable parts of renewed units that no attached optimizer holds."""
        held = {name for attachment in self._attachments.values() for name in attachment.names}
        parts = [slices.tensor for name in self._holders for slices in self._parts(self.groups[name])]
        learnable = [name for name in parts if name in self.parameters and self.parameters[name].requires_grad]
        return [name for name in dict.fromkeys(learnable) if name not in held]

    def _is_free(self, group: UnitGroup) -> bool:
        """Return whether all parts of the units are still learnable."""
        return all(self.parameters[name].requires_grad for name in self._free_with[group.name])

    def _check_moments(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise a ValueError if an optimizer has state that cannot be cleared for single units."""
        for optimizer in optimizers:
            if optimizer in self._checked or not keeper_of(optimizer).state:
                continue
            tensors = [self._tensor(slices.tensor) for group in self.groups.values() for slices in self._parts(group)]
            if isinstance(optimizer, LBFGS):  # its state is stored under its first parameter
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
            # Ignore passes that do not train this weight: through a frozen critic, or with other weights in its place
            # (functional_call with a target network). In a pass, fully_shard itself puts whole weights in its place.
            own = self._shards is not None or attrgetter(reader.weight.tensor)(self.model) is weight
            if own and held(weight).requires_grad:
                self._add_activity(name, input_of(args, kwargs).detach(), reader.input_dim)

    def _steps_of(self, slot: int) -> int:
        return self.steps[slot] if slot < len(self.steps) else 0

    def _add_activity(self, name: str, values: Tensor, dim: int) -> None:
        dim %= values.ndim
        activity = Activity(
            total=whole_of(sum_except(values, dim)),
            total_size=whole_of(sum_except(values.abs(), dim)),
            entries=values.numel() // values.shape[dim],
        )
        before = self._seen.get(name)
        self._seen[name] = activity if before is None else add_finite(before, activity)


def sum_except(values: Tensor, dim: int) -> Tensor:
    """Return the sum over all dimensions but one, in at least float32."""
    dtype = wide_dtype(values.dtype)
    if values.ndim == 1:  # one example without a batch dimension
        return values.to(dtype)
    if dim == 1 and values.ndim > 2 and values.is_contiguous() and values.shape[2:].numel() < _FEW:
        # Summing the batch first is faster, because the inner loop over few positions is slow.
        return values.sum(0, dtype=dtype).flatten(1).sum(1)
    return values.sum([d for d in range(values.ndim) if d != dim], dtype=dtype)
