"""ReDo: renew dormant units every so often (Sokar et al. 2023, "The dormant neuron phenomenon"; spectral paper, §5).

A unit's score is its mean absolute activation over the average of its layer, mean|h_i| / (mean_j mean|h_j| + 1e-9).
Units with a score of τ or less are renewed: the weights that make them are drawn anew, their bias and the weights that
read them become zero, so that the function stays nearly the same, their norm layer becomes the identity, and the
moments of all these entries are cleared. A weight between two renewed units is both drawn and read: it becomes zero.

Where we deviate. Scores are taken on the batch (or the accumulated batches) of the step after which units are renewed;
the authors draw another batch from the replay buffer. New weights come from the layer's own initial distribution,
which in the authors' networks is Xavier's.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pliant._validation import check_number, check_seed
from pliant.anatomy.units import UnitGroup
from pliant.methods._core.attachment import check_timing, is_due
from pliant.methods._core.initial import Init, check_redrawable, draw_fresh, seeded
from pliant.methods._core.method import Filter
from pliant.methods._core.recycler import Activity, Recycler


def dormancy_scores(mean_size: Tensor) -> Tensor:
    """Return mean|h_i| / (mean_j mean|h_j| + 1e-9), given mean|h_i| of the units of a layer.

    As its authors have it. The diagnostic of dormant units divides by the layer's mean alone.
    Beside a unit that overflowed none can be told dormant: the scores are NaN.

    Example:
        >>> dormancy_scores(torch.tensor([0.0, 1.0, 2.0]))
        tensor([0., 1., 2.])
    """
    mean = mean_size.mean()
    return mean_size / (mean.where(mean.isfinite(), torch.nan) + 1e-9)


class ReDo(Recycler):
    """Renew the units whose score is τ or less, every n steps.

    Args:
        model: The model.
        example: An example input, from which the units are found.
        tau: τ, the score up to which a unit counts as dormant.
        every: How many steps lie between two renewals.
        first: The step of the first renewal, counted from 1; `every` if None. Where tasks last a multiple of
            `every`, it says how far from their ends the method acts.
        init: What else initializes a layer in place, after the layer's own `reset_parameters`.
        seed: Draw from a stream of its own; from torch's global generators if None.
        where: Whose units to renew, as a predicate on name and value of the weight that makes them; all if None.
    """

    name = "redo"
    saved: ClassVar[tuple[str, ...]] = ("renewals", "draws")

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        *,
        tau: float = 0.025,
        every: int = 1000,
        first: int | None = None,
        init: Init | None = None,
        seed: int | None = None,
        where: Filter | None = None,
    ) -> None:
        self.tau = check_number("tau", tau)
        self.every, self.first = check_timing(every, first)
        super().__init__(model, example, where=where)
        check_redrawable(model, init, [group.weight.tensor for group in self.groups.values()], whole=False)
        self.init = init
        self.seed = check_seed(seed)
        self.draws = 0

    def _is_due(self, step: int) -> bool:
        return is_due(step, self.every, self.first)

    def _act(self, groups: Sequence[UnitGroup], seen: dict[str, Activity], step: int) -> None:
        self._moments_cleared.clear()
        self._chosen = {}
        with seeded(self.seed, self.draws):
            for group in groups:
                activity = seen[group.name]
                mean_size = self._sums[group.name].mean(activity.total_size, activity.entries)
                chosen = dormancy_scores(mean_size) <= self.tau
                fresh = draw_fresh(self._layer(group), self.init)
                self._make_anew(group.name, chosen, fresh[group.weight.tensor.rpartition(".")[2]])
                self._chosen[group.name] = chosen
        # After all draws, or those of the next layer would be read by its renewed units.
        for name, chosen in self._chosen.items():
            self._zero_outgoing(name, chosen)
        self.draws += 1

    def _layer(self, group: UnitGroup) -> nn.Module:
        return self.model.get_submodule(group.weight.tensor.rpartition(".")[0])
