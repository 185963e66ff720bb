"""ReDo: renew dormant units at regular intervals (Sokar et al. 2023, "The dormant neuron phenomenon").

A unit's score is its mean absolute activation divided by the mean of its layer, mean|h_i| / (mean_j mean|h_j| + 1e-9).
Units with a score of at most τ are renewed: their incoming weights are re-drawn, their bias and outgoing weights become
zero, their norm layer becomes the identity, and the moments of all these entries are cleared. The function hardly
changes. A weight between two renewed units is both incoming and outgoing; it becomes zero.

Where we deviate. Scores are measured on the batch (or the accumulated batches) of the step after which units are
renewed; the authors draw another batch from the replay buffer. New weights come from the layer's own initial
distribution, which is Xavier's in the authors' networks. A unit of a gated layer (SwiGLU), which the authors do not
treat, is the product of its gate and its value: h is that product, and the incoming weights of both are re-drawn.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pliant._validation import check_number
from pliant.anatomy.units import UnitGroup
from pliant.methods._core.attachment import check_timing, is_due
from pliant.methods._core.filters import Filter
from pliant.methods._core.initial import Init
from pliant.methods._core.recycler import Activity
from pliant.methods._core.redrawing import RedrawingRecycler
from pliant.methods._core.surgery import reset_steps_


def dormancy_scores(mean_size: Tensor) -> Tensor:
    """Return mean|h_i| / (mean_j mean|h_j| + 1e-9), given mean|h_i| of the units of a layer.

    This is the authors' score; the diagnostic of dormant units divides by the layer's mean alone. If any activation
    overflowed, all scores of the layer are NaN.

    Example:
        >>> dormancy_scores(torch.tensor([0.0, 1.0, 2.0]))
        tensor([0., 1., 2.])
    """
    mean = mean_size.mean()
    return mean_size / (mean.where(mean.isfinite(), torch.nan) + 1e-9)


class ReDo(RedrawingRecycler):
    """Renew the units with a score of at most τ, every n steps.

    Args:
        model: The model.
        example: An example input, from which the units are found.
        tau: τ, the largest score of a dormant unit.
        every: The number of steps between two renewals.
        first: The step of the first renewal, counted from 1; `every` if None. If the length of a task is a multiple of
            `every`, `first` sets how far from the task's end the method acts.
        reset_step: Whether the optimizers' step counts of tensors with renewed units start again. Adam counts the steps
            of a whole tensor: with the old count, the first steps of a renewed unit are about 3 learning rates long.
        init: A function that initializes a layer in place, run after the layer's own `reset_parameters`.
        seed: The seed of a private random stream. None draws from torch's global generators.
        where: Which layers' units to renew, as a predicate on the name and value of their weight; all if None.
    """

    name = "redo"

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        *,
        tau: float = 0.025,
        every: int = 1000,
        first: int | None = None,
        reset_step: bool = False,
        init: Init | None = None,
        seed: int | None = None,
        where: Filter | None = None,
    ) -> None:
        self.tau = check_number("tau", tau)
        self.every, self.first = check_timing(every, first)
        self.reset_step = reset_step
        super().__init__(model, example, init=init, seed=seed, where=where)

    def _is_due(self, step: int) -> bool:
        return is_due(step, self.every, self.first)

    def _act(self, groups: Sequence[UnitGroup], seen: dict[str, Activity], step: int) -> None:
        sizes = {group.name: (seen[group.name].total_size, seen[group.name].entries) for group in groups}
        means = {name: self._sums[name].mean(*size) for name, size in sizes.items()}
        chosen = {name: dormancy_scores(mean) <= self.tau for name, mean in means.items()}
        self._renew(chosen)
        if self.reset_step:
            parts = {part.tensor for name in chosen if chosen[name].any() for part in self._parts(self.groups[name])}
            reset_steps_(self.optimizers, [p for name, p in self.parameters.items() if name in parts])
