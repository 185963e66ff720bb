"""L2 regularization: λ/2 ‖θ‖² in the loss (Krogh & Hertz 1991; SWR paper, D.2).

The gradient λθ passes through the optimizer's moments. Decoupled weight decay, `torch.optim.AdamW(weight_decay=…)`,
is another method.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from pliant.methods._core.filters import Filter, Strength
from pliant.methods._core.learning_rate import Schedule
from pliant.methods._core.on_ranks import Sharding
from pliant.methods._core.penalty import Penalty, add_scaled_, half_squared_norm


def l2_penalty(parameters: Mapping[str, Tensor], strengths: Mapping[str, float]) -> Tensor:
    """Return Σ λ/2 ‖θ‖², whose gradient is λθ.

    Args:
        parameters: θ by name.
        strengths: λ by name; a parameter without one is left out.

    Example:
        >>> l2_penalty({"weight": torch.tensor([3.0, 4.0])}, {"weight": 0.1})
        tensor(1.2500)
    """
    return half_squared_norm(parameters, strengths)


class L2(Penalty):
    """Pull every learnable parameter towards zero.

    Args:
        model: The model.
        lam: λ, one number for all parameters or one per name pattern.
        schedule: "constant" λ, or "coupled": λ·lr/lr₀, where lr₀ is the learning rate at the start.
        where: Which parameters to penalize; all learnable ones, including biases and norm layers, if None.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = model.weight.data.fill_(3.0)
        >>> model.weight.grad = torch.zeros(1, 1)
        >>> L2(model, lam=0.1).step()
        >>> model.weight.grad
        tensor([[0.3000]])
    """

    name = "l2"
    sharding: Sharding = "entries"
    takes_complex: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        *,
        lam: Strength = 1e-3,
        schedule: Schedule = "constant",
        where: Filter | None = None,
    ) -> None:
        super().__init__(model, lam=lam, schedule=schedule, where=where)

    @torch.no_grad()
    def value(self, names: Sequence[str] | None = None) -> Tensor:
        """Return Σ λ/2 ‖θ‖²."""
        chosen = self.parameters if names is None else {name: self.parameters[name] for name in names}
        return l2_penalty(chosen, self.strengths)

    def _add_to(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        add_scaled_(gradients, self.parameters, self.strengths, scale)
