"""Continual backprop: at every step, renew the few units that are of least use (Dohare et al. 2024).

A unit's contribution is the mean of |w_out| · mean|h| over the weights that read it: each one's size times the mean
absolute activation at its input; of several readers, at that of the first. (A channel that is flattened has an input
for each of its pixels.) Its utility is the moving average of that, u ← ηu + (1−η)·contribution, divided by 1 − η^age.
At every step each layer owes ρ renewals for every unit older than the maturity threshold; fractions are carried over,
and whole units are paid with the mature units of least utility. Their incoming weights are drawn from
U(±gain·√(3/fan_in)), bias and outgoing weights become zero, what they contributed on average, w_out·E[h], moves into
the biases of their readers, their norm layer becomes the identity, and the moments of all these entries are cleared.
Layer by layer, as the authors go: between two units that are renewed at once, the weight that the later layer draws
stays.

The count of mature units is kept on the host, where it can be known without asking the device, so that a step without
a renewal needs no synchronization.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from pliant._precision import wide_dtype, without_autocast
from pliant._validation import check_number, check_positive_int, check_seed
from pliant.anatomy.units import Reader, UnitGroup
from pliant.methods._core.initial import seeded
from pliant.methods._core.method import Filter
from pliant.methods._core.recycler import Activity, Recycler, SumByUnit, sum_except
from pliant.methods._core.surgery import slice_mask


@dataclass(frozen=True)
class Outgoing:
    """How a layer reads the units of another.

    Attributes:
        reader: The layer.
        by_unit: Adds up over its inputs that belong to a unit.
        entries: How many weights, of all layers, read the unit that an input belongs to: a number if always the same.
        watched: Whether the units are watched at these inputs, or at others that belong to them.
    """

    reader: Reader
    by_unit: SumByUnit
    entries: Tensor | int
    watched: bool


@without_autocast
def mean_outputs(weight: Tensor, dim: int, means: Tensor, stride: int = 1) -> Tensor:
    """Return what a weight makes of the means of its inputs: w·E[h] for each of its outputs.

    Args:
        weight: The weight of a linear or convolution layer.
        dim: The dimension along which its inputs lie.
        means: E[h] at each input.
        stride: How many outputs of a transposed convolution share the kernel's places.

    Example:
        >>> mean_outputs(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 1, torch.tensor([1.0, 10.0]))
        tensor([21., 43.])
    """
    # A convolution sees the mean at every place of its kernel.
    products: Tensor = torch.tensordot(weight, means.to(weight.dtype), dims=([dim], [0]))
    return products.flatten(1).sum(1) / stride if products.ndim > 1 else products


class ContinualBackprop(Recycler):
    """Renew the mature units of least utility, a small fraction at every step.

    Args:
        model: The model.
        example: An example input, from which the units are found.
        rate: ρ, the fraction of the mature units that is renewed at each step.
        maturity: The age in steps up to which a unit is left in peace.
        decay: η, the decay of the moving averages.
        gain: What √(3/fan_in), the bound of the new weights, is multiplied by: √2 for ReLU, 5/3 for tanh.
        seed: Draw from a stream of its own; from torch's global generators if None.
        where: Whose units to renew, as a predicate on name and value of the weight that makes them; all if None.
    """

    name = "continual_backprop"
    saved: ClassVar[tuple[str, ...]] = ("renewals", "draws", "utilities", "means", "ages", "owed")
    pins_placement: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        *,
        rate: float = 1e-4,
        maturity: int = 100,
        decay: float = 0.99,
        gain: float = 2**0.5,
        seed: int | None = None,
        where: Filter | None = None,
    ) -> None:
        self.rate = check_number("rate", rate, high=1.0)
        self.maturity = check_positive_int("maturity", maturity)
        self.decay = check_number("decay", decay, high=1.0, below=True)  # with 1 the average would never move
        self.gain = check_number("gain", gain)
        super().__init__(model, example, where=where)
        self._outgoing = {name: self._find_outgoing(group) for name, group in self.groups.items()}
        self.seed = check_seed(seed)
        self.draws = 0
        dtypes = {name: wide_dtype(self._weight(g).dtype) for name, g in self.groups.items()}
        self.utilities = {name: torch.zeros_like(n, dtype=dtypes[name]) for name, n in self.renewals.items()}
        # E[h] at each input of the layer where the units are watched.
        self.means = {name: u.new_zeros(len(self._watched_at[name].weight.units)) for name, u in self.utilities.items()}
        self.ages = {name: torch.zeros_like(n) for name, n in self.renewals.items()}
        self.owed = dict.fromkeys(self.groups, 0.0)
        self._count_mature()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state made by `state_dict()`; who is mature is told by this method's own threshold."""
        super().load_state_dict(state_dict)
        self._count_mature()

    def _find_outgoing(self, group: UnitGroup) -> list[Outgoing]:
        watched = self._watched_at[group.name].weight.units
        sums = [SumByUnit(reader.weight.units, group.count) for reader in group.readers]
        weights = [self._tensor(reader.weight.tensor) for reader in group.readers]
        sizes = [w.numel() // w.shape[r.weight.dim] for w, r in zip(weights, group.readers, strict=True)]
        counts = [size * by_unit.slices for size, by_unit in zip(sizes, sums, strict=True)]
        entries = sum(counts[1:], start=counts[0])
        return [
            Outgoing(
                reader,
                by_unit,
                entries if isinstance(entries, int) else _at_inputs(entries, reader).to(weight.device),
                watched=torch.equal(reader.weight.units, watched),
            )
            for reader, by_unit, weight in zip(group.readers, sums, weights, strict=True)
        ]

    def _count_mature(self) -> None:
        """Note how many units are older than the threshold, and of the others, [steps until they are, how many]."""
        ages = {name: Counter(ages.tolist()) for name, ages in self.ages.items()}
        self._mature = {name: sum(n for age, n in c.items() if age > self.maturity) for name, c in ages.items()}
        self._young = {
            name: [[self.maturity + 1 - age, n] for age, n in c.items() if age <= self.maturity]
            for name, c in ages.items()
        }

    def _act(self, groups: Sequence[UnitGroup], seen: dict[str, Activity], step: int) -> None:
        if not groups:
            return
        self._update_averages(groups, seen)
        due = {group.name: self._pay(group.name) for group in groups}
        if not any(due.values()):
            return
        self._moments_cleared.clear()
        self._chosen = {}
        with seeded(self.seed, self.draws):
            for group in groups:
                if due[group.name]:
                    self._chosen[group.name] = self._replace(group, due[group.name])
        self.draws += 1

    def _update_averages(self, groups: Sequence[UnitGroup], seen: dict[str, Activity]) -> None:
        names = [group.name for group in groups]
        for name in names:
            young = [[steps - 1, count] for steps, count in self._young[name]]
            self._mature[name] += sum(count for steps, count in young if steps == 0)
            self._young[name] = [[steps, count] for steps, count in young if steps > 0]
        torch._foreach_add_([self.ages[name] for name in names], 1)
        contributions = [self._contributions(name, seen[name].mean_size) for name in names]
        means = [seen[name].mean for name in names]
        for averages, values in ((self.utilities, contributions), (self.means, means)):
            old = [averages[name] for name in names]
            # An activation that overflowed would stay in its average for ever.
            new = [value.where(value.isfinite(), kept) for value, kept in zip(values, old, strict=True)]
            torch._foreach_lerp_(old, new, 1 - self.decay)

    def _contributions(self, name: str, mean_size: Tensor) -> Tensor:
        """Return the mean of |w|·mean|h| over all weights that read each unit, given mean|h| where it is watched."""
        terms = []
        for outgoing in self._outgoing[name]:
            reader = outgoing.reader
            sizes = sum_except(self._tensor(reader.weight.tensor).detach().abs(), reader.weight.dim)
            terms.append(outgoing.by_unit(self._seen_by(name, outgoing, mean_size) * (sizes / outgoing.entries)))
        return sum(terms[1:], start=terms[0])

    def _seen_by(self, name: str, outgoing: Outgoing, values: Tensor) -> Tensor:
        """Return at each input of a reader what is known of it, given that where the units are watched.

        Inputs of another reader are given their unit's mean.
        """
        return values if outgoing.watched else _at_inputs(self._sums[name].mean(values), outgoing.reader)

    def _pay(self, name: str) -> int:
        """Return how many units are to be renewed now, and carry the fraction over."""
        self.owed[name] += self.rate * self._mature[name]
        due = int(self.owed[name])
        self.owed[name] -= due
        self._mature[name] -= due
        if due:
            self._young[name].append([self.maturity + 1, due])
        return due

    def _replace(self, group: UnitGroup, count: int) -> Tensor:
        name = group.name
        ages = self.ages[name]
        corrections = 1 - self.decay ** ages.to(self.utilities[name].dtype)
        utilities = (self.utilities[name] / corrections).where(ages > self.maturity, torch.inf)
        chosen = torch.zeros_like(ages, dtype=torch.bool)
        # Units that are dead have equal utilities: a stable order makes the choice the same on every device.
        chosen[utilities.argsort(stable=True)[:count]] = True
        watched = self._watched_at[name]
        self._move_means(group, self.means[name] / _at_inputs(corrections, watched), chosen)
        weight = self._weight(group)
        fan_in = weight.numel() // group.count
        bound = self.gain * (3 / fan_in) ** 0.5
        # Drawn in the order of the entries, whatever their layout in memory.
        fresh = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device).uniform_(-bound, bound)
        self._make_anew(name, chosen, fresh)
        self._zero_outgoing(name, chosen)
        for average in (self.utilities[name], ages):
            average.masked_fill_(chosen, 0)
        self.means[name].masked_fill_(_inputs_of(chosen, watched), 0)
        return chosen

    def _move_means(self, group: UnitGroup, means: Tensor, chosen: Tensor) -> None:
        """Add to the readers' biases what their weights make of the means of the chosen units."""
        for outgoing in self._outgoing[group.name]:
            reader = outgoing.reader
            if reader.bias is None:
                continue
            bias = self._tensor(reader.bias)
            if bias.requires_grad:
                weight, module = self._tensor(reader.weight.tensor).detach(), self.model.get_submodule(reader.module)
                stride = math.prod(module.stride) if isinstance(module, _ConvTransposeNd) else 1
                inputs = self._seen_by(group.name, outgoing, means).where(_inputs_of(chosen, reader), 0)
                bias.detach().add_(mean_outputs(weight, reader.weight.dim, inputs, stride))

    def _masks(self, group: UnitGroup, chosen: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield from super()._masks(group, chosen)
        for reader in group.readers:
            if reader.bias is not None and self._tensor(reader.bias).requires_grad:
                yield reader.bias, torch.ones(1, dtype=torch.bool)

    def _weight(self, group: UnitGroup) -> Tensor:
        return self._tensor(group.weight.tensor).detach()


def _at_inputs(values: Tensor, reader: Reader) -> Tensor:
    """Return at each input of a reader the value of the unit that it belongs to; of one that belongs to none, any."""
    return values[reader.weight.units.clamp(min=0).to(values.device)]


def _inputs_of(chosen: Tensor, reader: Reader) -> Tensor:
    """Return for each input of a reader whether it belongs to a chosen unit."""
    return slice_mask(chosen, reader.weight.units.to(chosen.device), 0, 1)
