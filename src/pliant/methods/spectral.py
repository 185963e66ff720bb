"""Spectral regularization: keep the largest singular value of every layer near one (Lewandowski et al. 2024).

Paper: "Learning Continually by Spectral Regularization", §4 and A.7. The term is, with λ in front,

    Σ_W (σ₁(W)ᵏ − 1)²  +  Σ_γ Σ_i (|γ_i|ᵏ − 1)²  +  Σ_b (‖b‖ᵏ)²

over matrices W (a convolution as [C_out, C_in·kh·kw]), scales γ of norm layers and biases b, shifts of norm layers
included. σ₁ = uᵀWv comes from one power iteration a step, with u and v kept between steps and held fixed in the
derivative, so that the gradient is ∂/∂W = 2k(σᵏ − 1)σᵏ⁻¹ uvᵀ.

Where we make precise what the paper leaves open: "each weight towards 1" of a norm layer's scale (A.7) is the same
(·ᵏ − 1)², entry by entry, since each entry is a singular value of Diag(γ); and u, v do not start at random but at
the singular pair itself, so that the first steps already see σ₁.

`SpectralNorm` is the older baseline, λ/2 Σσ₁(W)² over the matrices alone (Yoshida & Miyato 2017).
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from pliant.checking import check_number
from pliant.methods.base import Filter
from pliant.methods.penalty import Penalty
from pliant.methods.roles import ROLES, as_matrix, having_role, role_of, warn_of_computed, without_stacks
from pliant.methods.strengths import Strength, resolve_strengths
from pliant.precision import widen, without_autocast
from pliant.seeding import generator

_TINY = 1e-18
"""Far below the rounding of a product, but all that there is where that is zero. Its square is still a float32."""

_SMALL = 1e-12
"""The size of entries below which the squares of a matrix would underflow, or above whose inverse overflow."""


@without_autocast
def leading_pair(weight: Tensor, size: int = 30) -> tuple[Tensor, Tensor]:
    """Return the leading singular vectors (u, v) of a matrix, to within a fraction of a percent of σ₁.

    The best pair in the Krylov space of WᵀW: a random matrix has its largest singular values close together, so that
    plain power iteration would take hundreds of rounds.

    Args:
        weight: The matrix.
        size: The dimension of the space.

    Example:
        >>> weight = torch.diag(torch.tensor([1.0, 3.0]))
        >>> u, v = leading_pair(weight)
        >>> round(float(u @ weight @ v), 4)
        3.0
    """
    matrix = widen(weight)
    largest = matrix.abs().max()
    if 0 < largest < _SMALL or largest > 1 / _SMALL:  # its square would be lost
        matrix = matrix / largest
    random = generator("leading pair")
    vector = torch.randn(len(matrix), generator=random).to(matrix) @ matrix
    if not vector.any():  # the weight is zero, and any pair as good as another
        vector = torch.randn(matrix.shape[1], generator=random).to(matrix)
    basis = matrix.new_zeros(0, matrix.shape[1])
    for _ in range(min(size, *matrix.shape)):
        for _ in range(2):  # once leaves what rounding brought in
            vector = vector - (basis @ vector) @ basis
        if not vector.any():
            break
        direction = vector / vector.norm()
        if (basis @ direction).norm() > 1e-4:  # the rank is reached, and what is left is rounding
            break
        basis = torch.cat([basis, direction.unsqueeze(0)])
        vector = (matrix @ basis[-1]) @ matrix
    u, _, v = torch.linalg.svd(matrix @ basis.mT, full_matrices=False)
    v = v[0] @ basis
    return u[:, 0].contiguous(), v / v.norm()  # The basis is orthonormal up to 1e-4 alone.


@without_autocast
def iterate_power_(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Do one power iteration in place: v ← Wᵀu/‖Wᵀu‖, u ← Wv/‖Wv‖; return σ = uᵀWv = ‖Wv‖.

    While the weight is all zero, u is zero and v stays as it is, so that the pair is there when the weight grows again.
    A pair that a weight of NaN or infinity has spoilt starts anew.

    Args:
        weight: W.
        left: u.
        right: v.

    Example:
        >>> u, v = torch.tensor([0.6, 0.8]), torch.tensor([1.0, 0.0])
        >>> iterate_power_(torch.diag(torch.tensor([3.0, 0.0])), u, v)
        tensor(3.)
    """
    if weight.dtype == left.dtype:
        right.addmv_(weight.mT, left, beta=_TINY)
        right.div_(torch.linalg.vector_norm(right))
        left.addmv_(weight, right, beta=0)
    else:
        right.mul_(_TINY).add_(weight.mT @ left.to(weight.dtype))
        right.div_(torch.linalg.vector_norm(right))
        left.copy_(weight @ right.to(weight.dtype))
    sigma: Tensor = torch.linalg.vector_norm(left)
    left.div_(sigma.clamp_min(_TINY))
    if not (sigma.is_cpu and math.isfinite(sigma.item())):  # elsewhere, to ask would be to wait
        for vector in (left, right):
            vector.nan_to_num_(nan=1.0, posinf=1.0, neginf=1.0)
    return sigma


class _LargestSingularValue(Penalty):
    """A penalty Σ λ·cost(σ₁(W)) over the matrices of a model, with the power iteration that follows σ₁."""

    saved: ClassVar[tuple[str, ...]] = ("left", "right")

    def __init__(self, model: nn.Module, *, lam: Strength, where: Filter) -> None:
        super().__init__(model, where=where)
        warn_of_computed(self)
        self.strengths = resolve_strengths(lam, self.parameters)
        self.roles = {name: role_of(model, name, self.parameters[name]) for name in self.strengths}
        matrices = [name for name, role in self.roles.items() if role == "matrix"]
        pairs = {name: leading_pair(as_matrix(self.parameters[name])) for name in matrices}
        self.left = {name: u for name, (u, _) in pairs.items()}
        self.right = {name: v for name, (_, v) in pairs.items()}
        self._fresh: dict[str, Tensor] = {}

    @without_autocast
    def sigma(self, name: str) -> Tensor:
        """Return uᵀWv, the estimate of a weight's largest singular value."""
        weight, u, v = as_matrix(self.parameters[name]), self.left[name], self.right[name]
        return u @ (weight @ v.to(weight.dtype)).to(u.dtype)

    def value(self, names: Sequence[str] | None = None) -> Tensor:
        """Return the term at the present parameters, with the singular vectors of the last step."""
        terms = [self._term(name) for name in (self.parameters if names is None else names) if name in self.strengths]
        return sum(terms, start=torch.zeros(()))

    @abstractmethod
    def _cost(self, sigma: Tensor) -> Tensor:
        """Return what a singular value costs."""

    @abstractmethod
    def _slopes(self, sigmas: list[Tensor]) -> list[Tensor]:
        """Return the derivative of the cost at each singular value, beside it."""

    def _term(self, name: str) -> Tensor:
        return self.strengths[name] * self._cost(self.sigma(name))

    def _observe(self, gradients: Mapping[str, Tensor], scale: Tensor | None, found_inf: Tensor | None) -> None:
        for name in gradients:
            if name in self.left:
                weight = as_matrix(self.parameters[name])
                self._fresh[name] = iterate_power_(weight, self.left[name], self.right[name])

    def _add_to(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        names = [name for name in gradients if name in self.left]
        if not names:
            return
        # The iteration of this step has just computed σ; at any other time it takes one more product.
        fresh, self._fresh = self._fresh, {}
        slopes = self._slopes([fresh[name] if name in fresh else self.sigma(name) for name in names])
        for name, slope in zip(names, slopes, strict=True):
            left = self.left[name] * (slope if scale is None else slope * scale)
            add_outer_(gradients[name], left, self.right[name], self.strengths[name])


class Spectral(_LargestSingularValue):
    """Pull the largest singular value of every weight, and every scale, towards one, and every shift to zero.

    Args:
        model: The model.
        lam: λ, one for all or by name pattern.
        k: The exponent, at least 1: the larger, the steeper beyond one and the flatter below.
        where: Which parameters to penalise; all learnable ones if None (see `pliant.methods.roles`).

    Example:
        >>> model = nn.Linear(2, 2)
        >>> _ = model.weight.data.copy_(torch.diag(torch.tensor([2.0, 1.0])))
        >>> _ = model.bias.data.copy_(torch.tensor([1.0, 0.0]))
        >>> round(float(Spectral(model, lam=1.0).value()), 4)  # (2² − 1)² + (1²)²
        10.0
    """

    name = "spectral"

    def __init__(self, model: nn.Module, *, lam: Strength = 1e-4, k: float = 2, where: Filter | None = None) -> None:
        super().__init__(model, lam=lam, where=having_role(model, without_stacks(self.name, model, where), *ROLES))
        self.k = check_number("k", k, low=1.0)

    def _cost(self, sigma: Tensor) -> Tensor:
        return (sigma.abs() ** self.k - 1) ** 2

    def _slopes(self, sigmas: list[Tensor]) -> list[Tensor]:
        slopes = self._slope(torch.stack([sigma.to(sigmas[0].device) for sigma in sigmas]))
        return [slope.to(sigma.device) for slope, sigma in zip(slopes.unbind(), sigmas, strict=True)]

    def _slope(self, sigma: Tensor) -> Tensor:
        is_odd = self.k % 2 == 0  # then powers do by themselves what the sign does
        size = sigma if is_odd else sigma.abs()
        power = size ** (self.k - 1)
        slope = (power * size - 1) * power * (2 * self.k)
        return slope if is_odd else slope * sigma.sign()

    def _term(self, name: str) -> Tensor:
        parameter = self.parameters[name].detach()
        if self.roles[name] == "scale":
            return self.strengths[name] * self._cost(parameter.abs()).sum()
        if self.roles[name] == "shift":
            norm: Tensor = widen(parameter).norm()
            return self.strengths[name] * norm ** (2 * self.k)
        return super()._term(name)

    def _add_to(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        super()._add_to(gradients, scale)
        for name, gradient in gradients.items():
            role = self.roles.get(name)
            if role == "scale":
                parameter = self.parameters[name].detach()
                slope = self._slope(parameter)
                gradient.add_(slope if scale is None else slope * scale, alpha=self.strengths[name])
            elif role == "shift":
                parameter = self.parameters[name].detach()
                power: Tensor = torch.linalg.vector_norm(widen(parameter)) ** (2 * self.k - 2)
                factor = power if scale is None else power * scale
                gradient.addcmul_(parameter, factor, value=2 * self.k * self.strengths[name])


class SpectralNorm(_LargestSingularValue):
    """Pull the largest singular value of every weight towards zero: λ/2 Σσ₁(W)².

    Args:
        model: The model.
        lam: λ, one for all or by name pattern.
        where: Which parameters to penalise; all learnable matrices if None.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> _ = model.weight.data.copy_(torch.diag(torch.tensor([2.0, 1.0])))
        >>> round(float(SpectralNorm(model, lam=1.0).value()), 4)
        2.0
    """

    name = "spectral_norm"

    def __init__(self, model: nn.Module, *, lam: Strength = 1e-4, where: Filter | None = None) -> None:
        super().__init__(model, lam=lam, where=having_role(model, without_stacks(self.name, model, where), "matrix"))

    def _cost(self, sigma: Tensor) -> Tensor:
        return sigma**2 / 2

    def _slopes(self, sigmas: list[Tensor]) -> list[Tensor]:
        return sigmas


def add_outer_(gradient: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
    """Add factor · left ⊗ right to a gradient, seen as a matrix, in place.

    Args:
        gradient: A tensor of any memory layout.
        left: As long as the gradient's first dimension.
        right: As long as all its other dimensions together.
        factor: The factor.
    """
    if left.dtype != gradient.dtype:
        left, right = left.to(gradient.dtype), right.to(gradient.dtype)
    if gradient.is_contiguous():
        gradient.flatten(1).addr_(left, right, alpha=factor)
    else:
        gradient.add_(torch.outer(left, right).view(gradient.shape), alpha=factor)
