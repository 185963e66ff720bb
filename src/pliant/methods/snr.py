"""Self-normalized resets: renew units that are silent for longer than they used to be (Farias & Jozefiak 2025).

Paper: "Self-normalized resets for plasticity in continual learning". A unit's age is the number of steps since it was
last positive on some example. When it fires again, the age enters the unit's histogram. A unit whose age reaches its
threshold is renewed: its incoming weights are re-drawn, its bias and outgoing weights become zero, its norm layer
becomes the identity, and the moments of all these entries are cleared.

Every `window` steps, each threshold becomes the p-quantile of the ages in the window. If that is not below the old
threshold, the threshold is doubled instead. Thresholds stay between 1 step and `longest` steps. The method is for
units that are silent at zero: ReLU and its relatives.

Where we deviate. Ages are counted in steps; the authors count examples, up to 20 000. The histogram has 8 buckets for
each doubling of the age, so a quantile is at most 9 % too long; the authors' has a bucket for every age.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pliant._validation import check_number, check_positive_int
from pliant.anatomy.units import UnitGroup
from pliant.methods._core.filters import Filter
from pliant.methods._core.initial import Init
from pliant.methods._core.recycler import Activity
from pliant.methods._core.redrawing import RedrawingRecycler

_PER_DOUBLING = 8


def bucket_edges(longest: int) -> Tensor:
    """Return the largest age of each bucket, 2^(k/8), up to the first that is not below the longest age.

    Example:
        >>> bucket_edges(2)
        tensor([1.0000, 1.0905, 1.1892, 1.2968, 1.4142, 1.5422, 1.6818, 1.8340, 2.0000],
               dtype=torch.float64)
    """
    count = math.ceil(_PER_DOUBLING * math.log2(longest)) + 1
    return torch.tensor([2.0 ** (k / _PER_DOUBLING) for k in range(count)], dtype=torch.float64)


def update_thresholds(thresholds: Tensor, counts: Tensor, edges: Tensor, quantile: float) -> Tensor:
    """Return the new thresholds: each unit's quantile of ages, or twice the threshold if the quantile is not below it.

    Args:
        thresholds: The threshold of each unit.
        counts: The number of ages in each bucket, one row per unit.
        edges: The largest age of each bucket.
        quantile: p.

    Example:
        >>> counts = torch.tensor([[9, 0, 1], [0, 0, 5]])
        >>> update_thresholds(torch.tensor([4.0, 4.0]), counts, torch.tensor([1.0, 2.0, 4.0]), 0.9)
        tensor([1., 4.])
    """
    parts = counts.cumsum(1) / counts.sum(1, keepdim=True).clamp(min=1)
    # A unit that was never silent has no ages: as for the authors, its quantile is the shortest age.
    found = edges[(parts >= quantile).to(torch.int8).argmax(1)]
    return torch.where(found < thresholds, found, 2 * thresholds).clamp(max=edges[-1])


class SelfNormalizedResets(RedrawingRecycler):
    """Renew units that are silent for longer than almost ever before.

    Args:
        model: The model.
        example: An example input, from which the units are found.
        quantile: p in (0, 1], the quantile of a unit's ages that becomes its threshold.
        longest: The largest threshold in steps; thresholds start at half of it.
        window: The number of steps between two updates of the thresholds.
        every: Look for units to renew every n steps. Each look synchronizes the device.
        init: A function that initializes a layer in place, run after the layer's own `reset_parameters`.
        seed: The seed of a private random stream. None draws from torch's global generators.
        where: Which layers' units to renew, as a predicate on the name and value of their weight; all if None.
    """

    name = "snr"
    saved: ClassVar[tuple[str, ...]] = ("renewals", "draws", "ages", "counts", "thresholds")

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        *,
        quantile: float = 0.9,
        longest: int = 200,
        window: int = 1000,
        every: int = 1,
        init: Init | None = None,
        seed: int | None = None,
        where: Filter | None = None,
    ) -> None:
        self.quantile = check_number("quantile", quantile, high=1.0, above=True)
        self.longest = check_positive_int("longest", longest)
        self.window = check_positive_int("window", window)
        self.every = check_positive_int("every", every)
        super().__init__(model, example, init=init, seed=seed, where=where)
        edges = bucket_edges(self.longest)
        self._edges = {name: edges.to(count.device) for name, count in self.renewals.items()}
        self.ages = {name: torch.zeros_like(count) for name, count in self.renewals.items()}
        self.counts = {name: age.new_zeros(len(age), len(edges)) for name, age in self.ages.items()}
        self.thresholds = {
            name: age.new_full((len(age),), max(self.longest / 2, 1.0), dtype=torch.float64)
            for name, age in self.ages.items()
        }

    def _act(self, groups: Sequence[UnitGroup], seen: dict[str, Activity], step: int) -> None:
        names = [group.name for group in groups]
        for name in names:
            # Σh + Σ|h| is twice the sum of the positive activations: it is zero exactly where a unit never fires.
            silent = self._sums[name](seen[name].total + seen[name].total_size) <= 0
            self._record(name, ~silent & (self.ages[name] > 0))
            self.ages[name].add_(1).mul_(silent)
        if step % self.window == 0:
            for name in names:
                counts, edges = self.counts[name], self._edges[name]
                self.thresholds[name].copy_(update_thresholds(self.thresholds[name], counts, edges, self.quantile))
                counts.zero_()
        if step % self.every == 0:
            due = {name: self.ages[name] >= self.thresholds[name] for name in names}
            found = [chosen.any() for chosen in due.values()]
            if torch.stack([each.to(found[0].device) for each in found]).any():  # one wait for the device, not one each
                self._renew(due)
                for name, chosen in due.items():
                    self._record(name, chosen)
                    self.ages[name].masked_fill_(chosen, 0)

    def _record(self, name: str, chosen: Tensor) -> None:
        """Add the ages of the chosen units to their histograms."""
        edges, counts = self._edges[name], self.counts[name]
        buckets = torch.bucketize(self.ages[name].to(edges.dtype), edges).clamp(max=len(edges) - 1)
        counts.scatter_add_(1, buckets[:, None], chosen[:, None].to(counts.dtype))
