"""Streaming EWC: hold each parameter near its recent average, the more so the more the loss has felt it.

Elastic weight consolidation (Kirkpatrick et al. 2017) remembers parameters and squared gradients at the end of each
task. The streaming form (Elsayed & Mahmood 2024; a baseline of the spectral regularization paper, §5) knows no tasks:
both are exponential moving averages, bias-corrected, and the gradient gains

    λ F ⊙ (θ − θ̄),    θ̄ = EMA(θ),  F = EMA(g²),

with the present θ and g in the averages already. F is meant to be of the loss alone: attach this method before other
penalties, whose gradients it would otherwise count in.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from pliant._precision import widen
from pliant._validation import check_number
from pliant.methods._core.averages import start_averages, update_averages_
from pliant.methods._core.method import Filter
from pliant.methods._core.penalty import Penalty
from pliant.methods._core.strengths import Strength, add_scaled_, half_squared_norm, resolve_strengths


class StreamingEWC(Penalty):
    """Pull each parameter towards its moving average, weighted by the moving average of its squared gradient.

    Args:
        model: The model.
        lam: λ, one for all or by name pattern.
        beta: β of both averages, in [0, 1).
        where: Which parameters to penalize; all learnable ones if None.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> penalty = StreamingEWC(model, lam=3.0, beta=0.5)
        >>> for weight in (0.0, 1.0):  # the average becomes 0, then 2/3; that of g² is 4
        ...     _ = model.weight.data.fill_(weight)
        ...     model.weight.grad = torch.full((1, 1), 2.0)
        ...     penalty.step()
        >>> model.weight.grad  # 2 + 3·4·(1 − 2/3)
        tensor([[6.]])
    """

    name = "streaming_ewc"
    saved: ClassVar[tuple[str, ...]] = ("averages",)
    pins_placement: ClassVar[bool] = True

    def __init__(
        self, model: nn.Module, *, lam: Strength = 1.0, beta: float = 0.999, where: Filter | None = None
    ) -> None:
        super().__init__(model, where=where)
        self.strengths = resolve_strengths(lam, self.parameters)
        self.beta = check_number("beta", beta, high=1.0, below=True)  # with 1 the average would never move
        self.averages = start_averages(
            {name: self.parameters[name] for name in self.strengths}, "values", "importances"
        )

    def value(self, names: Sequence[str] | None = None) -> Tensor:
        """Return λ/2 Σ F ⊙ (θ − θ̄)²."""
        distances = self._distances(tuple(self.parameters) if names is None else names)
        roots = {name: distance * self.averages["importances"][name].sqrt() for name, distance in distances.items()}
        return half_squared_norm(roots, self.strengths)

    def _observe(self, gradients: Mapping[str, Tensor], scale: Tensor | None, found_inf: Tensor | None) -> None:
        names = [name for name in gradients if name in self.strengths]
        if not names:
            return
        squares = [widen(gradients[name]) for name in names]
        if scale is not None:
            squares = list(torch._foreach_mul(squares, scale.reciprocal()))
        squares = list(torch._foreach_mul(squares, squares))
        values = [widen(self.parameters[name].detach()) for name in names]
        update_averages_(self.averages, self.beta, names, {"values": values, "importances": squares}, found_inf)

    def _add_to(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        directions = self._distances(gradients)
        if not directions:
            return
        importances = self.averages["importances"]
        torch._foreach_mul_(list(directions.values()), [importances[name] for name in directions])
        add_scaled_(gradients, directions, self.strengths, scale)

    def _distances(self, names: Mapping[str, Tensor] | Sequence[str]) -> dict[str, Tensor]:
        chosen = [name for name in names if name in self.strengths]
        if not chosen:
            return {}
        present = [widen(self.parameters[name].detach()) for name in chosen]
        averages = [self.averages["values"][name] for name in chosen]
        return dict(zip(chosen, torch._foreach_sub(present, averages), strict=True))
