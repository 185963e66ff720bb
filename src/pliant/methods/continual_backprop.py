"""Continual backprop: at every step, renew the few units that are of least use (Dohare et al. 2024).

A unit's contribution is mean|h| · mean|w_out|: its mean absolute activation times the mean size of the weights that
read it. Its utility is the moving average of that, u ← ηu + (1−η)·contribution, divided by 1 − η^age. At every step
each layer owes ρ renewals for every unit older than the maturity threshold; fractions are carried over, and whole
units are paid with the mature units of least utility. Their incoming weights are drawn from U(±gain·√(3/fan_in)), bias
and outgoing weights become zero, what they contributed on average, w_out·E[h], moves into the biases of their readers,
their norm layer becomes the identity, and the moments of all these entries are cleared.

The count of mature units is kept on the host, where it can be known without asking the device, so that a step without
a renewal needs no synchronisation.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from pliant.checking import check_number, check_positive_int
from pliant.graph.units import Reader, UnitGroup
from pliant.methods.base import Filter
from pliant.methods.recycler import Activity, Recycler, SumByUnit, sum_except
from pliant.methods.redraw import seeded
from pliant.precision import wide_dtype


def mean_inputs(weight: Tensor, reader: Reader, means: Tensor, stride: int = 1) -> Tensor:
    """Return what a reader's weight makes of the mean activations of units: w_out·E[h] for each of its outputs.

    Args:
        weight: The reader's weight.
        reader: Which of its slices read which unit.
        means: E[h] of each unit.
        stride: How many outputs of a transposed convolution share the kernel's places.
    """
    units = reader.weight.units.to(means.device)
    inputs = means[units.clamp(min=0)].where(units >= 0, 0).to(weight.dtype)
    # A convolution sees the mean at every place of its kernel.
    products: Tensor = torch.tensordot(weight, inputs, dims=([reader.weight.dim], [0]))
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
    saved: ClassVar[tuple[str, ...]] = ("renewals", "draws", "utilities", "means", "ages", "mature", "young", "owed")
    fixed: ClassVar[bool] = True

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
        self._outgoing = {
            name: [SumByUnit(reader.weight.units, group.count) for reader in group.readers]
            for name, group in self.groups.items()
        }
        self.seed = seed
        self.draws = 0
        dtypes = {name: wide_dtype(self._weight(g).dtype) for name, g in self.groups.items()}
        self.utilities = {name: torch.zeros_like(n, dtype=dtypes[name]) for name, n in self.renewals.items()}
        self.means = {name: torch.zeros_like(utility) for name, utility in self.utilities.items()}
        self.ages = {name: torch.zeros_like(n) for name, n in self.renewals.items()}
        # How many units are older than the threshold, and of the others, [steps until they are, how many].
        self.mature = dict.fromkeys(self.groups, 0)
        self.young = {name: [[self.maturity + 1, group.count]] for name, group in self.groups.items()}
        self.owed = dict.fromkeys(self.groups, 0.0)

    def _act(self, groups: Sequence[UnitGroup], seen: dict[str, Activity], step: int) -> None:
        if not groups:
            return
        self._update_averages(groups, seen)
        due = {group.name: self._pay(group.name) for group in groups}
        if not any(due.values()):
            return
        self._moments_cleared = 0
        self._chosen = {}
        with seeded(self.seed, self.draws):
            for group in groups:
                if due[group.name]:
                    self._chosen[group.name] = self._replace(group, due[group.name])
        self.draws += 1

    def _update_averages(self, groups: Sequence[UnitGroup], seen: dict[str, Activity]) -> None:
        names = [group.name for group in groups]
        for name in names:
            young = [[steps - 1, count] for steps, count in self.young[name]]
            self.mature[name] += sum(count for steps, count in young if steps == 0)
            self.young[name] = [[steps, count] for steps, count in young if steps > 0]
        torch._foreach_add_([self.ages[name] for name in names], 1)
        contributions = [seen[group.name].mean_size * self._mean_outgoing_size(group) for group in groups]
        means = [seen[name].mean for name in names]
        for averages, values in ((self.utilities, contributions), (self.means, means)):
            old = [averages[name] for name in names]
            # An activation that overflowed would stay in its average for ever.
            new = [value.where(value.isfinite(), kept) for value, kept in zip(values, old, strict=True)]
            torch._foreach_lerp_(old, new, 1 - self.decay)

    def _mean_outgoing_size(self, group: UnitGroup) -> Tensor:
        """Return the mean absolute value of all weights that read each unit."""
        totals, entries = [], []
        for reader, by_unit in zip(group.readers, self._outgoing[group.name], strict=True):
            weight = self._tensor(reader.weight.tensor).detach()
            totals.append(by_unit(sum_except(weight.abs(), reader.weight.dim)))
            entries.append(by_unit.count_entries(weight, reader.weight.dim))
        return sum(totals[1:], start=totals[0]) / sum(entries[1:], start=entries[0])

    def _pay(self, name: str) -> int:
        """Return how many units are to be renewed now, and carry the fraction over."""
        self.owed[name] += self.rate * self.mature[name]
        due = int(self.owed[name])
        self.owed[name] -= due
        self.mature[name] -= due
        if due:
            self.young[name].append([self.maturity + 1, due])
        return due

    def _replace(self, group: UnitGroup, count: int) -> Tensor:
        name = group.name
        ages = self.ages[name]
        corrections = 1 - self.decay ** ages.to(self.utilities[name].dtype)
        utilities = (self.utilities[name] / corrections).where(ages > self.maturity, torch.inf)
        chosen = torch.zeros_like(ages, dtype=torch.bool)
        # Units that are dead have equal utilities: a stable order makes the choice the same on every device.
        chosen[utilities.argsort(stable=True)[:count]] = True
        self._move_means(group, (self.means[name] / corrections).where(chosen, 0))
        weight = self._weight(group)
        fan_in = weight.numel() // group.count
        bound = self.gain * (3 / fan_in) ** 0.5
        # Drawn in the order of the entries, whatever their layout in memory.
        fresh = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device).uniform_(-bound, bound)
        self._renew(name, chosen, fresh)
        for average in (self.utilities[name], self.means[name], ages):
            average.masked_fill_(chosen, 0)
        return chosen

    def _move_means(self, group: UnitGroup, means: Tensor) -> None:
        """Add to the readers' biases what their weights make of these means."""
        for reader in group.readers:
            if reader.bias is None:
                continue
            bias = self._tensor(reader.bias)
            if bias.requires_grad:
                weight, module = self._tensor(reader.weight.tensor).detach(), self.model.get_submodule(reader.module)
                stride = math.prod(module.stride) if isinstance(module, _ConvTransposeNd) else 1
                bias.detach().add_(mean_inputs(weight, reader, means, stride))

    def _weight(self, group: UnitGroup) -> Tensor:
        return self._tensor(group.weight.tensor).detach()
