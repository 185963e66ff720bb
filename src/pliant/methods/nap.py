"""NaP, normalize and project: keep every weight's norm where it started (Lyle et al. 2024).

Paper: "Normalization and effective learning rates in reinforcement learning". After every step, W ← ρW/‖W‖ with
ρ = ‖W₀‖. If a norm layer follows, the function does not depend on the weight's norm, but the step relative to the
weight does: it shrinks as the weight grows. The projection removes this hidden decay of the learning rate, so a
schedule of one's own may be needed. The paper's networks have a norm layer before every nonlinearity: use `layer_norm`
beside this method if yours have not.

The projection is hard weight rescaling, by norms. `per="unit"` keeps the norm of every unit's incoming weights,
as SimbaV2 does. `SWR` with λ = 1 also keeps norms, and the function too.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from pliant._precision import widen
from pliant._validation import check_choice
from pliant.anatomy.parameters import find_matrices
from pliant.distributed import whole_norms
from pliant.methods._core.filters import Filter, learnable_parameters
from pliant.methods.weight_rescaling import WeightRescaling

Per = Literal["tensor", "unit"]


def norms_along(weight: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the norm of each slice of a weight, in float32 at least and shaped to broadcast to the weight.

    Args:
        weight: The weight.
        dims: The dimensions that count the slices, such as a weight's dimension of units.

    Example:
        >>> norms_along(torch.tensor([[3.0, 4.0], [0.0, 2.0]]), [0])
        tensor([[5.],
                [2.]])
    """
    others = [d for d in range(weight.ndim) if d not in dims]
    norms: Tensor = torch.linalg.vector_norm(widen(weight), dim=others, keepdim=bool(dims))
    return norms


class NormalizeAndProject(WeightRescaling):
    """Scale every weight to its initial norm, after every n-th step.

    Args:
        model: The model; its weights' present norms are kept.
        per: "tensor" keeps the norm of each weight, "unit" the norm of each unit's incoming weights.
        every: Act only on every n-th step.
        first: The step of the first action, counted from 1; `every` if None.
        where: Which weights to project; all learnable ones if None. Biases and norm layers are left alone.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> method = NormalizeAndProject(model)
        >>> _ = model.weight.data.copy_(torch.tensor([[0.0, 4.0]]))
        >>> method.step()
        >>> model.weight.data
        tensor([[0., 5.]])
    """

    name = "nap"
    _unsized: ClassVar[str] = "at zero"

    def __init__(
        self,
        model: nn.Module,
        *,
        per: Per = "tensor",
        every: int = 1,
        first: int | None = None,
        where: Filter | None = None,
    ) -> None:
        check_choice("per", per, get_args(Per))
        self.per = per
        learnable_parameters(model)  # rejects unsuitable parameters before their layers are examined
        self._transposed = {matrix.parameter for matrix in find_matrices(model) if matrix.transposed}
        super().__init__(model, every=every, first=first, where=where)
        if per == "unit":
            self.sharding = "whole"  # a shard may cut through the units

    def _sizes(self, names: Sequence[str]) -> list[Tensor]:
        sizes = [norms_along(self.parameters[name].detach(), self._slice_dims(name)) for name in names]
        return whole_norms(sizes, [self.parameters[name] for name in names])

    def _slice_dims(self, name: str) -> list[int]:
        """Return the dimensions that count the slices with norms of their own: members of a stack, and units."""
        dims = [*range(self._stacked[name])]
        return [*dims, len(dims) + (name in self._transposed)] if self.per == "unit" else dims
