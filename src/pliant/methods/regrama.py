"""ReGraMa: renew units with small gradients at regular intervals (Liu et al. 2025).

Paper: "Measure gradients, not activations! Enhancing neuronal activity in deep reinforcement learning". A unit's score
is the mean absolute gradient of its incoming weights divided by the mean of its layer,
mean|∂L/∂W_i| / (mean_j mean|∂L/∂W_j| + 1e-9). Units with a score of at most τ are renewed: their incoming weights are
re-drawn, their bias becomes zero, their norm layer becomes the identity, and the moments of these entries are cleared.
Their outgoing weights stay, so the function changes unless the unit was silent.

The method reads `.grad` of the step alone: it needs no activations, and works for any activation function.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pliant._precision import widen
from pliant._validation import check_number
from pliant.anatomy.units import UnitGroup
from pliant.methods._core.attachment import check_timing, is_due
from pliant.methods._core.filters import Filter
from pliant.methods._core.initial import Init
from pliant.methods._core.recycler import Activity, SumByUnit
from pliant.methods._core.redrawing import RedrawingRecycler


def gradient_scores(mean_size: Tensor) -> Tensor:
    """Return mean|g_i| / (mean_j mean|g_j| + 1e-9), given mean|g_i| over the incoming weights of each unit.

    Example:
        >>> gradient_scores(torch.tensor([0.0, 1.0, 2.0]))
        tensor([0., 1., 2.])
    """
    return mean_size / (mean_size.mean() + 1e-9)


class ReGraMa(RedrawingRecycler):
    """Renew the units whose gradient score is at most τ, every n steps.

    Args:
        model: The model.
        example: An example input, from which the units are found.
        tau: τ, the largest score of a unit that does not learn.
        every: The number of steps between two renewals.
        first: The step of the first renewal, counted from 1; `every` if None.
        init: A function that initializes a layer in place, run after the layer's own `reset_parameters`.
        seed: The seed of a private random stream. None draws from torch's global generators.
        where: Which layers' units to renew, as a predicate on the name and value of their weight; all if None.
    """

    name = "regrama"
    watches: ClassVar[bool] = False
    renews_outgoing: ClassVar[bool] = False

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        *,
        tau: float = 0.01,
        every: int = 1000,
        first: int | None = None,
        init: Init | None = None,
        seed: int | None = None,
        where: Filter | None = None,
    ) -> None:
        self.tau = check_number("tau", tau)
        self.every, self.first = check_timing(every, first)
        super().__init__(model, example, init=init, seed=seed, where=where)

    def _is_due(self, step: int) -> bool:
        return is_due(step, self.every, self.first)

    def _act(self, groups: Sequence[UnitGroup], seen: dict[str, Activity], step: int) -> None:
        gradients = self._gradients([weight.tensor for group in groups for weight in group.weights])
        reached = [group for group in groups if all(weight.tensor in gradients for weight in group.weights)]
        scores = {group.name: gradient_scores(self._mean_sizes(group, gradients)) for group in reached}
        if scores:
            self._renew({name: score <= self.tau for name, score in scores.items()})

    def _mean_sizes(self, group: UnitGroup, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the mean absolute gradient of the incoming weights of each unit; a gated unit has several rows."""
        sizes, units = [], []
        for weight in group.weights:
            sizes.append(widen(gradients[weight.tensor]).abs().movedim(weight.dim, 0).flatten(1).mean(1))
            units.append(weight.units)
        return SumByUnit(torch.cat(units), group.count).mean(torch.cat(sizes))
