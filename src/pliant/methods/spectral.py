"""Spectral regularization: keep the largest singular value of every layer near one (Lewandowski et al. 2024).

Paper: "Learning Continually by Spectral Regularization", §4 and A.7. With λ in front, the term is

    Σ_W (σ₁(W)ᵏ − 1)²  +  Σ_γ Σ_i (|γ_i|ᵏ − 1)²  +  Σ_b (‖b‖ᵏ)²

over matrices W (a convolution as [C_out, C_in·kh·kw]), scales γ of norm layers, and biases b, which include the shifts
of norm layers. One power iteration a step tracks σ₁ = uᵀWv, with u and v kept between steps and held fixed in the
derivative. The gradient is then ∂/∂W = 2k(σᵏ − 1)σᵏ⁻¹ uvᵀ.

Where the paper leaves a choice:

- A.7 pulls "each weight towards 1" for the scale of a norm layer. We use (|γ_i|ᵏ − 1)² for each entry, since the
  entries are the singular values of Diag(γ).
- u and v start at the leading singular pair instead of at random, so that the first steps already see σ₁.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pliant._precision import widen
from pliant._validation import check_number
from pliant.anatomy.parameters import ROLES, members
from pliant.distributed import whole_norms
from pliant.methods._core import host
from pliant.methods._core.filters import Filter, Strength, having_role
from pliant.methods._core.learning_rate import Schedule
from pliant.methods._core.power_iteration import LARGEST_NUMBER, SingularValuePenalty


def spectral_cost(sigma: Tensor, k: float) -> Tensor:
    """Return (|σ|ᵏ − 1)².

    Example:
        >>> spectral_cost(torch.tensor([1.0, 2.0]), 2)
        tensor([0., 9.])
    """
    return (sigma.abs() ** k - 1) ** 2


def spectral_slope(sigma: Tensor, k: float) -> Tensor:
    """Return the derivative of the cost, 2k(|σ|ᵏ − 1)|σ|ᵏ⁻¹ sign(σ).

    Example:
        >>> spectral_slope(torch.tensor([1.0, 2.0, -2.0]), 2)
        tensor([  0.,  24., -24.])
    """
    if k % 2 == 0:  # σᵏ⁻¹ has the sign of σ
        power = sigma ** (k - 1)
        return (power * sigma - 1) * power * (2 * k)
    size = sigma.abs()
    power = size ** (k - 1)
    return (power * size - 1) * power * (2 * k) * sigma.sign()


class SpectralRegularization(SingularValuePenalty):
    """Pull the largest singular value of every weight and every scale towards one, and every shift towards zero.

    Args:
        model: The model.
        lam: λ, one number for all parameters or one per name pattern.
        k: The exponent, at least 1. A larger k is steeper above one and flatter below.
        schedule: "constant" λ, or "coupled": λ·lr/lr₀, where lr₀ is the learning rate at the start.
        where: Which parameters to penalize; all learnable matrices, scales and shifts if None.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> _ = model.weight.data.copy_(torch.diag(torch.tensor([2.0, 1.0])))
        >>> _ = model.bias.data.copy_(torch.tensor([1.0, 0.0]))
        >>> round(float(SpectralRegularization(model, lam=1.0).value()), 4)  # (2² − 1)² + (1²)²
        10.0
    """

    name = "spectral"

    def __init__(
        self,
        model: nn.Module,
        *,
        lam: Strength = 1e-3,
        k: float = 2,
        schedule: Schedule = "constant",
        where: Filter | None = None,
    ) -> None:
        where = having_role(model, where, *ROLES)
        super().__init__(model, lam=lam, schedule=schedule, where=where)
        self.k = check_number("k", k, low=1.0)

    def _cost(self, sigma: Tensor) -> Tensor:
        return spectral_cost(sigma, self.k)

    def _slopes(self, sigmas: Tensor) -> Tensor:
        return spectral_slope(sigmas, self.k)

    def _term(self, name: str) -> Tensor:
        parameter = self.parameters[name].detach()
        if self.roles[name] == "scale":
            return self.strengths[name] * spectral_cost(parameter, self.k).sum()
        if self.roles[name] == "shift":
            norms = torch.stack([widen(shift).norm() for shift in self._shifts(name)])
            return self.strengths[name] * (norms ** (2 * self.k)).sum()
        return super()._term(name)

    def _add_to(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        super()._add_to(gradients, scale)
        for name in (name for name in gradients if self.roles.get(name) == "scale"):
            slope = spectral_slope(self.parameters[name].detach(), self.k)
            gradients[name].add_(slope if scale is None else slope * scale, alpha=self.strengths[name])
        shifts = [
            (name, part, shift)
            for name in gradients
            if self.roles.get(name) == "shift"
            for part, shift in zip(self._shifts(name, gradients[name]), self._shifts(name), strict=True)
        ]
        norms: list[Tensor] = [torch.linalg.vector_norm(widen(shift)) for _, _, shift in shifts]
        norms = whole_norms(norms, [self.parameters[name] for name, _, _ in shifts])
        for (name, part, shift), norm in zip(shifts, norms, strict=True):
            power: Tensor = norm ** (2 * self.k - 2)
            factor = power if scale is None else power * scale
            number = 2 * self.k * self.strengths[name]
            if host.is_on_host(factor) and number * factor.item() < LARGEST_NUMBER:
                part.add_(shift, alpha=number * factor.item())
            else:
                part.addcmul_(shift, factor, value=number)

    def _shifts(self, name: str, tensor: Tensor | None = None) -> list[Tensor]:
        """Return the members of a shift, or of a tensor shaped as the shift."""
        return members(self.parameters[name].detach() if tensor is None else tensor, self._stacked[name])
