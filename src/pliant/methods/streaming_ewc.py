"""Streaming EWC: hold each parameter near its moving average, in proportion to its squared gradients.

Elastic weight consolidation (Kirkpatrick et al. 2017) stores parameters and squared gradients at the end of each task.
The streaming form (Elsayed & Mahmood 2024; a baseline in the spectral regularization paper, §5) needs no task
boundaries. Its term is

    λ/2 Σ F ⊙ (θ − θ̄)²,    θ̄ = EMA(θ),  F = EMA(g²),

with bias-corrected averages that already include the current θ and g. F should measure the loss alone, so attach this
method before other penalties: it would count their gradients too.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from pliant._precision import widen
from pliant._validation import check_number
from pliant.methods._core.averages import start_averages, update_averages_
from pliant.methods._core.filters import Filter, Strength
from pliant.methods._core.learning_rate import Schedule
from pliant.methods._core.on_ranks import Sharding
from pliant.methods._core.penalty import Penalty, add_scaled_, half_squared_norm


def weighted_distances(values: list[Tensor], means: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Return w ⊙ (θ − θ̄) of each parameter.

    With w = F it is the gradient of ½ Σ F ⊙ (θ − θ̄)². With w = √F its squared norm is twice that term.

    Args:
        values: θ.
        means: θ̄.
        weights: w.

    Example:
        >>> weighted_distances([torch.tensor([1.0, 2.0])], [torch.tensor([0.5, 2.0])], [torch.tensor([4.0, 9.0])])
        [tensor([2., 0.])]
    """
    if not values:  # torch's foreach functions reject empty lists
        return []
    distances = torch._foreach_sub(values, means)
    torch._foreach_mul_(distances, weights)
    return list(distances)


class StreamingEWC(Penalty):
    """Pull each parameter towards its moving average, weighted by the moving average of its squared gradient.

    Args:
        model: The model.
        lam: λ, one number for all parameters or one per name pattern.
        beta: β of both averages, in [0, 1).
        schedule: "constant" λ, or "coupled": λ·lr/lr₀, where lr₀ is the learning rate at the start.
        where: Which parameters to penalize; all learnable ones if None.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> penalty = StreamingEWC(model, lam=3.0, beta=0.5)
        >>> for weight in (0.0, 1.0):  # θ̄ becomes 0, then 2/3; F is 4
        ...     _ = model.weight.data.fill_(weight)
        ...     model.weight.grad = torch.full((1, 1), 2.0)
        ...     penalty.step()
        >>> model.weight.grad  # 2 + 3·4·(1 − 2/3)
        tensor([[6.]])
    """

    name = "streaming_ewc"
    sharding: Sharding = "entries"
    saved: ClassVar[tuple[str, ...]] = ("averages",)
    pins_placement: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        *,
        lam: Strength = 1.0,
        beta: float = 0.999,
        schedule: Schedule = "constant",
        where: Filter | None = None,
    ) -> None:
        super().__init__(model, lam=lam, schedule=schedule, where=where)
        self.beta = check_number("beta", beta, high=1.0, below=True)  # at 1 the averages would never move
        self.averages = start_averages(
            {name: self.parameters[name] for name in self.strengths}, "values", "importances"
        )

    def value(self, names: Sequence[str] | None = None) -> Tensor:
        """Return λ/2 Σ F ⊙ (θ − θ̄)²."""
        roots = {name: importance.sqrt() for name, importance in self.averages["importances"].items()}
        return half_squared_norm(self._distances(self.parameters if names is None else names, roots), self.strengths)

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
        add_scaled_(gradients, self._distances(gradients, self.averages["importances"]), self.strengths, scale)

    def _distances(self, names: Iterable[str], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        chosen = [name for name in names if name in self.strengths]
        values = [widen(self.parameters[name].detach()) for name in chosen]
        means = [self.averages["values"][name] for name in chosen]
        distances = weighted_distances(values, means, [weights[name] for name in chosen])
        return dict(zip(chosen, distances, strict=True))
