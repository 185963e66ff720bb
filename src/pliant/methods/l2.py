"""L2 regularization: λ/2 ‖θ‖² in the loss (Krogh & Hertz 1991; SWR paper, appendix D.2).

This is the coupled form: the gradient λθ goes through the optimizer's moments. Decoupled weight decay is
`torch.optim.AdamW(weight_decay=…)`, another method.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from pliant.methods._core.method import Filter
from pliant.methods._core.penalty import Penalty
from pliant.methods._core.strengths import Strength, add_scaled_, half_squared_norm, resolve_strengths


class L2(Penalty):
    """Pull every learnable parameter towards zero.

    Args:
        model: The model.
        lam: λ, one for all or by name pattern.
        where: Which parameters to penalize; all learnable ones, biases and norm layers included, if None.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = model.weight.data.fill_(3.0)
        >>> L2(model, lam=0.1).value()
        tensor(0.4500)
    """

    name = "l2"
    takes_complex: ClassVar[bool] = True

    def __init__(self, model: nn.Module, *, lam: Strength = 1e-4, where: Filter | None = None) -> None:
        super().__init__(model, where=where)
        self.strengths = resolve_strengths(lam, self.parameters)

    @torch.no_grad()
    def value(self, names: Sequence[str] | None = None) -> Tensor:
        """Return λ/2 ‖θ‖²."""
        return half_squared_norm(
            {name: self.parameters[name] for name in (self.parameters if names is None else names)}, self.strengths
        )

    def _add_to(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        add_scaled_(gradients, self.parameters, self.strengths, scale)
