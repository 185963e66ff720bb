"""L2 Init, or regenerative regularization: λ/2 ‖θ − θ₀‖² in the loss (Kumar et al. 2023; SWR paper, appendix D.2).

The name is used for several things elsewhere; here it is squared, with the ½, over all learnable parameters unless
told otherwise (its authors leave norm layers out; `where=lambda name, p: p.ndim > 1` leaves these and biases out).
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from pliant.methods._core.method import Filter
from pliant.methods._core.penalty import Penalty
from pliant.methods._core.strengths import Strength, add_scaled_, half_squared_norm, resolve_strengths


class L2Init(Penalty):
    """Pull every learnable parameter towards its value at construction.

    Args:
        model: The model; its present values are θ₀.
        lam: λ, one for all or by name pattern.
        where: Which parameters to penalize; all learnable ones if None.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> penalty = L2Init(model, lam=0.5)
        >>> _ = model.weight.data.add_(2.0)
        >>> round(float(penalty.value()), 4)
        1.0
    """

    name = "l2_init"
    takes_complex: ClassVar[bool] = True
    saved: ClassVar[tuple[str, ...]] = ("initial",)

    def __init__(self, model: nn.Module, *, lam: Strength = 1e-4, where: Filter | None = None) -> None:
        super().__init__(model, where=where)
        self.strengths = resolve_strengths(lam, self.parameters)
        self.initial = {name: self.parameters[name].detach().clone() for name in self.strengths}

    @torch.no_grad()
    def value(self, names: Sequence[str] | None = None) -> Tensor:
        """Return λ/2 ‖θ − θ₀‖²."""
        chosen = [name for name in (self.parameters if names is None else names) if name in self.initial]
        return half_squared_norm({name: self.parameters[name] - self.initial[name] for name in chosen}, self.strengths)

    def _add_to(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        add_scaled_(gradients, self.parameters, self.strengths, scale, self.initial)
