"""Continual backprop: at every step, renew the few units of least utility (Dohare et al. 2024).

A unit's contribution is the mean of |w_out|·mean|h| over the weights that read it. mean|h| is measured at the input of
the first layer that reads the unit; a flattened channel has one input per pixel. The utility is the moving average
u ← ηu + (1−η)·contribution, divided by 1 − η^age.

At every step, each layer owes ρ renewals per unit older than the maturity threshold. Fractions carry over. Whole units
are paid with the mature units of least utility:

- their incoming weights are drawn from U(±gain·√(3/fan_in)), and their bias and outgoing weights become zero;
- their mean contribution w_out·E[h] moves into the biases of the layers that read them;
- their norm layer becomes the identity, and the moments of all these entries are cleared.

Layers are renewed one after the other, as in the authors' code. A weight between two units that are renewed at the same
step therefore keeps the value that the later layer draws.

A unit of a gated layer (SwiGLU), which the authors do not treat, is the product of its gate and its value: h is that
product, and the incoming weights of both are drawn.

The number of mature units is tracked on the host, so that a step without a renewal does not synchronize the device.
"""

import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from pliant._precision import wide_dtype, without_autocast
from pliant._validation import check_choice, check_number, check_positive_int, check_seed
from pliant.anatomy.units import Reader, Slices, UnitGroup
from pliant.methods._core.filters import Filter
from pliant.methods._core.initial import seeded
from pliant.methods._core.recycler import Activity, Recycler, SumByUnit, sum_except
from pliant.methods._core.surgery import slice_mask

Utility = Literal["contribution", "adaptation", "adaptable", "weight", "random"]


@dataclass(frozen=True)
class Outgoing:
    """How one layer reads the units of another.

    Attributes:
        reader: The reading layer.
        by_unit: Sums values over the inputs that belong to each unit.
        entries: For each input, the number of weights in all layers that read its unit; an int if it is constant.
        watched: Whether activations are measured at these inputs.
    """

    reader: Reader
    by_unit: SumByUnit
    entries: Tensor | int
    watched: bool


@without_autocast
def mean_outputs(weight: Tensor, dim: int, means: Tensor, stride: int = 1) -> Tensor:
    """Return w·E[h] for each output of a layer.

    Args:
        weight: The weight of a linear or convolution layer.
        dim: The dimension of its inputs.
        means: E[h] at each input.
        stride: The product of a transposed convolution's strides; 1 for other layers.

    Example:
        >>> mean_outputs(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 1, torch.tensor([1.0, 10.0]))
        tensor([21., 43.])
    """
    # A convolution reads the mean at every position of its kernel.
    products: Tensor = torch.tensordot(weight, means.to(weight.dtype), dims=([dim], [0]))
    return products.flatten(1).sum(1) / stride if products.ndim > 1 else products


def least_useful(utilities: Tensor, mature: Tensor, count: int) -> Tensor:
    """Return a mask of the mature units with the smallest utilities.

    Args:
        utilities: The utility of each unit.
        mature: Whether each unit may be renewed.
        count: How many units to choose, at most the number of mature units.

    Example:
        >>> utilities, mature = torch.tensor([3.0, 1.0, 2.0, 0.0]), torch.tensor([True, True, True, False])
        >>> least_useful(utilities, mature, 2)
        tensor([False,  True,  True, False])
    """
    # Dead units have equal utilities. A stable sort chooses the same ones on every device.
    order = utilities.where(mature, torch.inf).argsort(stable=True)
    chosen = torch.zeros_like(mature)
    chosen[order[:count]] = True
    return chosen


def move_averages_(averages: Tensor, values: Sequence[Tensor], weight: float) -> None:
    """Move averages towards values in place, ū ← ū + weight·(u − ū), except where a value is not finite.

    An overflow would stay in the average forever.

    Args:
        averages: ū of all layers as one vector, because starting an operator costs more than its work on one layer.
        values: u of each layer, in the same order.
        weight: The weight of a value, 1 − η.

    Example:
        >>> averages = torch.tensor([1.0, 1.0, 2.0])
        >>> move_averages_(averages, [torch.tensor([3.0, torch.inf]), torch.tensor([0.0])], 0.5)
        >>> averages
        tensor([2., 1., 1.])
    """
    moves = torch.cat(tuple(values)).sub_(averages).nan_to_num_(0.0, 0.0, 0.0)
    averages.add_(moves, alpha=weight)


class ContinualBackprop(Recycler):
    """Renew a small fraction of the mature units, the least useful, at every step.

    Args:
        model: The model.
        example: An example input, from which the units are found.
        rate: ρ, the fraction of the mature units to renew at each step.
        maturity: The age in steps up to which a unit is not renewed.
        decay: η, the decay of the moving averages.
        utility: What the moving average is of: the "contribution"; "adaptation", 1/mean|w_in|; "adaptable", their
            product; "weight", mean|w_out|; or "random" choices.
        gain: The factor of the new weights' bound √(3/fan_in): √2 for ReLU, 5/3 for tanh.
        seed: The seed of a private random stream. None draws from torch's global generators.
        where: Which layers' units to renew, as a predicate on the name and value of their weight; all if None.
    """

    name = "continual_backprop"
    saved: ClassVar[tuple[str, ...]] = ("renewals", "draws", "utilities", "means", "ages", "owed")
    pins_placement: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        *,
        rate: float = 1e-3,
        maturity: int = 100,
        decay: float = 0.99,
        utility: Utility = "contribution",
        gain: float = 2**0.5,
        seed: int | None = None,
        where: Filter | None = None,
    ) -> None:
        self.rate = check_number("rate", rate, high=1.0)
        self.maturity = check_positive_int("maturity", maturity)
        self.decay = check_number("decay", decay, high=1.0, below=True)  # at 1 the averages would never move
        check_choice("utility", utility, get_args(Utility))
        self.utility = utility
        self.gain = check_number("gain", gain)
        super().__init__(model, example, where=where)
        self._joined: dict[tuple[str, ...], tuple[list[Tensor], Tensor, Tensor]] = {}
        self._outgoing = {name: self._find_outgoing(group) for name, group in self.groups.items()}
        self.seed = check_seed(seed)
        self.draws = 0
        dtypes = {name: wide_dtype(self._tensor(g.weight.tensor).dtype) for name, g in self.groups.items()}
        self.utilities = {name: torch.zeros_like(n, dtype=dtypes[name]) for name, n in self.renewals.items()}
        # E[h] at each input of the layer where the units are measured.
        self.means = {name: u.new_zeros(len(self._watched_at[name].weight.units)) for name, u in self.utilities.items()}
        self.ages = {name: torch.zeros_like(n) for name, n in self.renewals.items()}
        self.owed = dict.fromkeys(self.groups, 0.0)
        self._count_mature()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state made by `state_dict()`; the maturity threshold comes from construction."""
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
        """Count the mature units of each layer; for the others keep [steps until maturity, number of units]."""
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
        for alike in self._alike(names):
            averages, ages = self._join(alike)
            ages.add_(1)
            utilities = [self._utilities_now(name, seen[name]) for name in alike]
            move_averages_(averages, utilities + [seen[name].mean for name in alike], 1 - self.decay)

    def _alike(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """Return these layers by dtype and device, which nearly always are the same for all."""
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name in names:
            kinds.setdefault((self.utilities[name].dtype, self.utilities[name].device), []).append(name)
        return [tuple(alike) for alike in kinds.values()]

    def _join(self, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Return the averages of these layers as one vector, and their ages as another: what is saved are views."""
        tables = (self.utilities, self.means, self.ages)
        present = [table[name] for table in tables for name in names]
        joined = self._joined.get(names)
        if joined is None or not all(map(operator.is_, joined[0], present)):
            count = 2 * len(names)
            averages, ages = torch.cat(present[:count]), torch.cat(present[count:])
            views = [*torch.split(averages, [len(part) for part in present[:count]])]
            views += torch.split(ages, [len(part) for part in present[count:]])
            for i, table in enumerate(tables):
                table |= zip(names, views[i * len(names) : (i + 1) * len(names)], strict=True)
            joined = self._joined[names] = views, averages, ages
        return joined[1:]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_joined": {}}  # copies of the views would not share memory

    def _utilities_now(self, name: str, seen: Activity) -> Tensor:
        """Return the utility of each unit at this step, given what was measured."""
        if self.utility == "weight":
            return self._contributions(name, torch.ones_like(seen.total_size), 1)
        if self.utility in ("contribution", "random"):  # random choices are drawn when units are chosen
            return self._contributions(name, seen.total_size, seen.entries)
        adaptation = self._incoming_sizes(name).reciprocal()
        if self.utility == "adaptation":
            return adaptation
        return adaptation * self._contributions(name, seen.total_size, seen.entries)

    def _incoming_sizes(self, name: str) -> Tensor:
        """Return mean|w_in| of each unit; a gated unit has several rows."""
        group = self.groups[name]
        weights = [(self._tensor(w.tensor).detach().abs().movedim(w.dim, 0).flatten(1), w.units) for w in group.weights]
        rows = torch.cat([rows.mean(1, dtype=wide_dtype(rows.dtype)) for rows, _ in weights])
        return SumByUnit(torch.cat([units for _, units in weights]), group.count).mean(rows)

    def _contributions(self, name: str, total_size: Tensor, entries: Tensor | int) -> Tensor:
        """Return the mean of |w|·mean|h| over all weights that read each unit, given the measured Σ|h|.

        Args:
            name: The layer.
            total_size: Σ|h| at each input where the units are measured.
            entries: The number of entries in each sum.
        """
        terms = []
        for outgoing in self._outgoing[name]:
            reader = outgoing.reader
            sizes = sum_except(self._tensor(reader.weight.tensor).detach().abs(), reader.weight.dim)
            sizes.div_(entries * outgoing.entries)
            terms.append(outgoing.by_unit(self._seen_by(name, outgoing, total_size) * sizes))
        return sum(terms[1:], start=terms[0])

    def _seen_by(self, name: str, outgoing: Outgoing, values: Tensor) -> Tensor:
        """Return measured values at the inputs of a reader; inputs that are not measured get their unit's mean."""
        return values if outgoing.watched else _at_inputs(self._sums[name].mean(values), outgoing.reader)

    def _pay(self, name: str) -> int:
        """Return how many units to renew now, and carry the fraction over."""
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
        utilities = self.utilities[name] / corrections
        if self.utility == "random":
            utilities = torch.rand(utilities.shape, dtype=utilities.dtype, device=utilities.device)
        chosen = least_useful(utilities, ages > self.maturity, count)
        watched = self._watched_at[name]
        self._move_means(group, self.means[name] / _at_inputs(corrections, watched), chosen)
        self._rewrite(name, chosen, [self._draw(weight) for weight in group.weights])
        self._zero_outgoing(name, chosen)
        for average in (self.utilities[name], ages):
            average.masked_fill_(chosen, 0)
        self.means[name].masked_fill_(_inputs_of(chosen, watched), 0)
        return chosen

    def _move_means(self, group: UnitGroup, means: Tensor, chosen: Tensor) -> None:
        """Add w·E[h] of the chosen units to the biases of the layers that read them."""
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

    def _draw(self, slices: Slices) -> Tensor:
        weight = self._tensor(slices.tensor)
        fan_in = weight.numel() // weight.shape[slices.dim]
        bound = self.gain * (3 / fan_in) ** 0.5
        # Fill a contiguous tensor, so that the draw does not depend on the weight's memory layout.
        return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device).uniform_(-bound, bound)


def _at_inputs(values: Tensor, reader: Reader) -> Tensor:
    """Return the value of each input's unit; inputs without a unit get an arbitrary one."""
    return values[reader.weight.units.clamp(min=0).to(values.device)]


def _inputs_of(chosen: Tensor, reader: Reader) -> Tensor:
    """Return a mask of the reader's inputs that belong to chosen units."""
    return slice_mask(chosen, reader.weight.units.to(chosen.device), 0, 1)
