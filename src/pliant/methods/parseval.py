"""Parseval regularization: keep the rows of every weight orthogonal and of one length (Chung et al. 2024).

The FIRE paper (A.3) states it as λ‖WWᵀ − sI‖² for every weight, a convolution read as [C_out, C_in·kh·kw]. The
gradient is 4λ(WWᵀ − sI)W: two matrix products, where the term in the loss takes three.

Where we deviate. The rows of a weight with more rows than columns cannot be orthogonal. There we keep the columns
orthogonal, λ‖WᵀW − sI‖², which can reach zero.

What other code does. The authors weight each layer by (64/width)² and use s = 2 for ReLU (the squared gain of the
initialization): set `s`, and λ per name pattern. FIRE's code adds λ‖γ² − 1‖² for the scales of norm layers: set
`norm_scales=True`.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from pliant._precision import without_autocast
from pliant._validation import check_number
from pliant.anatomy.parameters import Role, as_matrix, members, role_of, stack_dims
from pliant.methods._core.filters import Filter, Strength, having_role, warn_of_computed
from pliant.methods._core.learning_rate import Schedule
from pliant.methods._core.on_ranks import Sharding
from pliant.methods._core.orthogonal import gram
from pliant.methods._core.penalty import Penalty, add_scaled_, half_squared_norm


@without_autocast
def deviation(weight: Tensor, s: float) -> Tensor:
    """Return WWᵀ − sI, or WᵀW − sI if W has more rows than columns.

    Args:
        weight: W.
        s: The squared length that rows (or columns) should have.

    Example:
        >>> import torch
        >>> deviation(torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), 1.0)
        tensor([[3., 0.],
                [0., 0.]])
    """
    rows, columns = weight.shape
    result = gram(weight if rows <= columns else weight.mT)
    result.diagonal().sub_(s)
    return result


@without_autocast
def add_parseval_gradient_(gradient: Tensor, weight: Tensor, s: float, lam: float, scale: Tensor | None = None) -> None:
    """Add scale · 4λ(WWᵀ − sI)W to a gradient in place, or scale · 4λW(WᵀW − sI) if W has more rows than columns.

    Args:
        gradient: A tensor of any memory layout with as many entries as W.
        weight: W as a matrix.
        s: The squared length that rows (or columns) should have.
        lam: λ.
        scale: A loss scale on the device; 1 if None.

    Example:
        >>> import torch
        >>> gradient = torch.zeros(1, 2)
        >>> add_parseval_gradient_(gradient, torch.tensor([[2.0, 0.0]]), s=1.0, lam=0.5)  # 4·½·(2² − 1)·2
        >>> gradient
        tensor([[12.,  0.]])
    """
    excess = deviation(weight, s)
    if scale is not None:
        excess.mul_(scale)
    left, right = (excess, weight) if len(excess) == len(weight) else (weight, excess)
    if gradient.is_contiguous():
        gradient.view(weight.shape).addmm_(left, right, alpha=4 * lam)
    else:
        gradient.add_((left @ right).view(gradient.shape), alpha=4 * lam)


class ParsevalRegularization(Penalty):
    """Pull all singular values of every weight towards √s.

    Args:
        model: The model.
        lam: λ, one number for all parameters or one per name pattern.
        s: The squared length that rows should have.
        norm_scales: Whether to pull the scales of norm layers towards ±1 too, by λ‖γ² − 1‖². This includes other
            vectors that are scales by name, such as the gamma of a LayerScale.
        schedule: "constant" λ, or "coupled": λ·lr/lr₀, where lr₀ is the learning rate at the start.
        where: Which parameters to penalize; all learnable weights (and scales) if None.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 2)
        >>> _ = model.weight.data.copy_(torch.diag(torch.tensor([2.0, 1.0])))
        >>> round(float(ParsevalRegularization(model, lam=0.5).value()), 4)  # ½·(2² − 1)²
        4.5
    """

    name = "parseval"
    sharding: Sharding = "owned"
    reads_values: ClassVar[bool] = False

    def __init__(
        self,
        model: nn.Module,
        *,
        lam: Strength = 1e-4,
        s: float = 1.0,
        norm_scales: bool = False,
        schedule: Schedule = "constant",
        where: Filter | None = None,
    ) -> None:
        roles: tuple[Role, ...] = ("matrix", "scale") if norm_scales else ("matrix",)
        where = having_role(model, where, *roles)
        super().__init__(model, lam=lam, schedule=schedule, where=where)
        warn_of_computed(self.name, model, self.parameters)
        self.s = check_number("s", s)
        self._scales = {name for name in self.strengths if role_of(model, name, self.parameters[name]) == "scale"}
        self._stacked = {name: stack_dims(model, name, self.parameters[name]) for name in self.strengths}

    def value(self, names: Sequence[str] | None = None) -> Tensor:
        """Return λ Σ‖WWᵀ − sI‖², plus λ Σ‖γ² − 1‖² if norm scales are penalized."""
        excesses = {}
        for name in self.parameters if names is None else names:
            if name in self.strengths:
                parameter = self.parameters[name].detach()
                if name in self._scales:
                    excesses[name] = parameter**2 - 1
                else:
                    matrices = map(as_matrix, members(parameter, self._stacked[name]))
                    excesses[name] = torch.stack([deviation(matrix, self.s) for matrix in matrices])
        return 2 * half_squared_norm(excesses, self.strengths)

    def _add_to(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        directions = {}
        for name, gradient in gradients.items():
            parameter = self.parameters[name].detach()
            if name in self._scales:
                directions[name] = 4 * (parameter**2 - 1) * parameter
            elif name in self.strengths:
                for part, weight in zip(*(members(t, self._stacked[name]) for t in (gradient, parameter)), strict=True):
                    add_parseval_gradient_(part, as_matrix(weight), self.s, self.strengths[name], scale)
        add_scaled_({name: gradients[name] for name in directions}, directions, self.strengths, scale)
