"""Spectral norm penalty: λ/2 Σ σ₁(W)² in the loss (Yoshida & Miyato 2017).

σ₁ is the largest singular value of a weight, a convolution read as [C_out, C_in·kh·kw]. One power iteration a step
tracks it, with its singular vectors u and v kept between steps and held fixed in the derivative. The gradient is then
∂/∂W = λσ₁ uvᵀ.
"""

from torch import Tensor, nn

from pliant.methods._core.filters import Filter, Strength, having_role
from pliant.methods._core.learning_rate import Schedule
from pliant.methods._core.power_iteration import SingularValuePenalty


def spectral_norm_cost(sigma: Tensor) -> Tensor:
    """Return σ²/2, whose derivative is σ.

    Example:
        >>> import torch
        >>> spectral_norm_cost(torch.tensor(3.0))
        tensor(4.5000)
    """
    return sigma**2 / 2


class SpectralNormPenalty(SingularValuePenalty):
    """Pull the largest singular value of every weight towards zero.

    Args:
        model: The model.
        lam: λ, one number for all weights or one per name pattern.
        schedule: "constant" λ, or "coupled": λ·lr/lr₀, where lr₀ is the learning rate at the start.
        where: Which weights to penalize; all learnable matrices if None.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 2)
        >>> _ = model.weight.data.copy_(torch.diag(torch.tensor([2.0, 1.0])))
        >>> round(float(SpectralNormPenalty(model, lam=1.0).value()), 4)
        2.0
    """

    name = "spectral_norm"

    def __init__(
        self,
        model: nn.Module,
        *,
        lam: Strength = 1e-2,
        schedule: Schedule = "constant",
        where: Filter | None = None,
    ) -> None:
        where = having_role(model, where, "matrix")
        super().__init__(model, lam=lam, schedule=schedule, where=where)

    def _cost(self, sigma: Tensor) -> Tensor:
        return spectral_norm_cost(sigma)

    def _slopes(self, sigmas: Tensor) -> Tensor:
        return sigmas
