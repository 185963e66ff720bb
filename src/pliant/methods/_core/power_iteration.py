"""Power iteration, and the penalties on largest singular values that it serves."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from pliant._precision import widen, without_autocast
from pliant._seeding import generator
from pliant.anatomy.parameters import as_matrix, members, role_of, stack_dims
from pliant.distributed import held, is_shard, own_rows_and_columns, sum_shards
from pliant.methods._core import host
from pliant.methods._core.filters import Filter, Strength, warn_of_computed
from pliant.methods._core.learning_rate import Schedule
from pliant.methods._core.on_ranks import Sharding
from pliant.methods._core.penalty import Penalty

_TINY = 1e-18
"""Far below the rounding error of any nonzero product; its square is still representable in float32."""

LARGEST_NUMBER = 6e4
"""Below the largest float16: torch rejects a larger factor as a number, while in a tensor it becomes infinite."""

_SMALL = 1e-12
"""A matrix is rescaled if its largest entry is below this, or above its inverse: squares would under- or overflow."""


@without_autocast
def leading_pair(weight: Tensor, size: int = 30) -> tuple[Tensor, Tensor]:
    """Return the leading singular vectors (u, v) of a matrix, with uᵀWv within a fraction of a percent of σ₁.

    They are the best pair in a Krylov space of WᵀW. The largest singular values of a random matrix lie close together,
    so plain power iteration would need hundreds of rounds.

    Args:
        weight: The matrix.
        size: The dimension of the Krylov space.

    Example:
        >>> weight = torch.diag(torch.tensor([1.0, 3.0]))
        >>> u, v = leading_pair(weight)
        >>> round(float(u @ weight @ v), 4)
        3.0
    """
    matrix = widen(weight)
    largest = matrix.abs().max()
    if 0 < largest < _SMALL or largest > 1 / _SMALL:
        matrix = matrix / largest
    random = generator("leading pair")
    vector = torch.randn(len(matrix), generator=random).to(matrix) @ matrix
    if not vector.any():  # the weight is zero: any pair will do
        vector = torch.randn(matrix.shape[1], generator=random).to(matrix)
    basis = matrix.new_zeros(0, matrix.shape[1])
    for _ in range(min(size, *matrix.shape)):
        for _ in range(2):  # the second pass removes the first one's rounding error
            vector = vector - (basis @ vector) @ basis
        if not vector.any():
            break
        direction = vector / vector.norm()
        if (basis @ direction).norm() > 1e-4:  # the rank is reached; the rest is rounding error
            break
        basis = torch.cat([basis, direction.unsqueeze(0)])
        vector = (matrix @ basis[-1]) @ matrix
    u, _, v = torch.linalg.svd(matrix @ basis.mT, full_matrices=False)
    v = v[0] @ basis
    return u[:, 0].contiguous(), v / v.norm()  # the basis is orthonormal only up to 1e-4


@without_autocast
def iterate_power_(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Do one power iteration in place, v ← Wᵀu/‖Wᵀu‖ and u ← Wv/‖Wv‖, and return σ = uᵀWv = ‖Wv‖.

    If the weight is all zero, u becomes zero and v stays, so that the iteration recovers when the weight grows.
    If the weight holds NaN or infinity, both vectors restart.

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
    return _normalize_(left, right)


@without_autocast
def iterate_shards_(
    weights: Sequence[Tensor], parameters: Sequence[Tensor], lefts: Sequence[Tensor], rights: Sequence[Tensor]
) -> list[Tensor]:
    """Do the same iteration on weights of which this rank holds shards, by products with the shards: two collectives.

    Args:
        weights: The shards of the matrices W, by rows or by columns.
        parameters: The parameters that they belong to.
        lefts: The whole u of each matrix.
        rights: The whole v.

    Returns:
        σ of each matrix.
    """
    own = [own_rows_and_columns(held(parameter)) for parameter in parameters]
    pulled = [torch.zeros_like(v) for v in rights]
    for part, weight, u, (rows, columns) in zip(pulled, weights, lefts, own, strict=True):
        part[columns] = (weight.mT @ u[rows].to(weight.dtype)).to(part.dtype)
    for v, part in zip(rights, sum_shards(pulled, parameters), strict=True):
        v.mul_(_TINY).add_(part)
        v.div_(torch.linalg.vector_norm(v))
    pushed = [torch.zeros_like(u) for u in lefts]
    for part, weight, v, (rows, columns) in zip(pushed, weights, rights, own, strict=True):
        part[rows] = (weight @ v[columns].to(weight.dtype)).to(part.dtype)
    sigmas = []
    for u, v, part in zip(lefts, rights, sum_shards(pushed, parameters), strict=True):
        u.copy_(part)
        sigmas.append(_normalize_(u, v))
    return sigmas


def _normalize_(left: Tensor, right: Tensor) -> Tensor:
    """Divide u = Wv by its norm σ in place, and return σ; restart both vectors if they are not finite."""
    sigma: Tensor = torch.linalg.vector_norm(left)
    if host.is_on_host(sigma):  # on other devices item() would synchronize
        number = sigma.item()
        left.div_(sigma if number > _TINY else _TINY)
        if math.isfinite(number):
            return sigma
    else:
        left.div_(sigma.clamp_min(_TINY))
    for vector in (left, right):
        vector.nan_to_num_(nan=1.0, posinf=1.0, neginf=1.0)
    return sigma


class SingularValuePenalty(Penalty):
    """A penalty Σ λ·cost(σ₁(W)) over the matrices of a model; power iteration tracks each σ₁.

    A stack of matrices has a σ₁ for each member, under the names `weight[0]`, `weight[1]`, …

    Args:
        model: The model.
        lam: λ, one number for all parameters or one per name pattern.
        schedule: "constant" λ, or "coupled": λ·lr/lr₀.
        where: Which parameters to penalize.

    Attributes:
        left: u of each matrix, by name.
        right: v of each matrix, by name.
    """

    saved: ClassVar[tuple[str, ...]] = ("left", "right")
    sharding: Sharding = "norms"

    def __init__(self, model: nn.Module, *, lam: Strength, schedule: Schedule, where: Filter) -> None:
        super().__init__(model, lam=lam, schedule=schedule, where=where)
        warn_of_computed(self.name, model, self.parameters)
        self.roles = {name: role_of(model, name, self.parameters[name]) for name in self.strengths}
        self._stacked = {name: stack_dims(model, name, self.parameters[name]) for name in self.strengths}
        if any(self._stacked.values()):
            self.sharding = "whole"  # a shard may cut through the members of a stack
        self._matrices: dict[str, list[str]] = {}
        for name in (name for name, role in self.roles.items() if role == "matrix"):
            count = len(members(self.parameters[name], self._stacked[name]))
            self._matrices[name] = [f"{name}[{i}]" for i in range(count)] if self._stacked[name] else [name]
        pairs = {key: leading_pair(weight) for name in self._matrices for key, weight in self._members(name)}
        self.left = {key: u for key, (u, _) in pairs.items()}
        self.right = {key: v for key, (_, v) in pairs.items()}
        self._fresh: dict[str, Tensor] = {}

    def _members(self, name: str, tensor: Tensor | None = None) -> list[tuple[str, Tensor]]:
        """Return the matrices of a weight, or views of a tensor shaped as the weight, each with its name."""
        if not self._stacked[name]:  # directly, because it runs at every step
            return [(name, as_matrix(self.parameters[name]) if tensor is None else tensor)]
        parts = members(self.parameters[name].detach() if tensor is None else tensor, self._stacked[name])
        return list(zip(self._matrices[name], map(as_matrix, parts) if tensor is None else parts, strict=True))

    def _vectors(self, name: str, key: str) -> tuple[Tensor, Tensor]:
        """Return u and v of a matrix; of a shard, their entries for the rows and columns that this rank holds."""
        parameter = self.parameters[name]
        if self._shards is None or not is_shard(parameter):
            return self.left[key], self.right[key]
        rows, columns = own_rows_and_columns(held(parameter))
        return self.left[key][rows], self.right[key][columns]

    @without_autocast
    def sigma(self, name: str) -> Tensor:
        """Return uᵀWv, the estimate of a weight's largest singular value; of a stack, one for each member."""
        found = []
        for key, weight in self._members(name):
            u, v = self._vectors(name, key)
            found.append(u @ (weight @ v.to(weight.dtype)).to(u.dtype))
        found = sum_shards(found, [self.parameters[name]] * len(found))
        return torch.stack(found) if self._stacked[name] else found[0]

    def value(self, names: Sequence[str] | None = None) -> Tensor:
        """Return the term at the current parameters, with the singular vectors of the last step."""
        terms = [self._term(name) for name in (self.parameters if names is None else names) if name in self.strengths]
        return sum(terms, start=torch.zeros(()))

    @abstractmethod
    def _cost(self, sigma: Tensor) -> Tensor:
        """Return the cost of a singular value."""

    @abstractmethod
    def _slopes(self, sigmas: Tensor) -> Tensor:
        """Return the derivative of the cost at each singular value of a vector of them."""

    def _term(self, name: str) -> Tensor:
        return self.strengths[name] * self._cost(self.sigma(name)).sum()

    def _observe(self, gradients: Mapping[str, Tensor], scale: Tensor | None, found_inf: Tensor | None) -> None:
        names = [name for name in gradients if name in self._matrices]
        shards = [] if self._shards is None else [name for name in names if is_shard(self.parameters[name])]
        for name in [name for name in names if name not in shards] if shards else names:
            for key, weight in self._members(name):
                self._fresh[key] = iterate_power_(weight, self.left[key], self.right[key])
        if shards:
            weights = [as_matrix(self.parameters[name].detach()) for name in shards]
            vectors = [[each[name] for name in shards] for each in (self.left, self.right)]
            sigmas = iterate_shards_(weights, [self.parameters[name] for name in shards], *vectors)
            self._fresh |= zip(shards, sigmas, strict=True)

    def _add_to(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        names = [name for name in gradients if name in self._matrices]
        if not names:
            return
        # This step's iteration has just computed σ. Other callers compute it with one more product.
        fresh, self._fresh = self._fresh, {}
        sigmas: dict[str, Tensor] = {}
        for name in names:
            keys = self._matrices[name]
            known = all(key in fresh for key in keys)
            sigmas |= zip(keys, [fresh[key] for key in keys] if known else self.sigma(name).reshape(-1), strict=True)
        slopes = dict(zip(sigmas, self._factors_at(list(sigmas.values()), scale), strict=True))
        for name in names:
            for key, gradient in self._members(name, gradients[name]):
                u, v = self._vectors(name, key)
                slope = slopes[key]
                if isinstance(slope, float):
                    add_outer_(gradient, u, v, self.strengths[name] * slope)
                else:
                    add_outer_(gradient, u * slope, v, self.strengths[name])

    def _factors_at(self, sigmas: list[Tensor], scale: Tensor | None) -> Sequence[float | Tensor]:
        """Return the slope of each singular value times the scale: numbers on the host, since they save operators."""
        slopes = self._slopes(torch.stack([sigma.to(sigmas[0].device) for sigma in sigmas]))
        if scale is not None:
            slopes = slopes * scale.to(slopes.device)
        if host.is_on_host(slopes):
            numbers: list[float] = slopes.tolist()
            return numbers
        return [slope.to(sigma.device) for slope, sigma in zip(slopes.unbind(), sigmas, strict=True)]


def add_outer_(gradient: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
    """Add factor · left ⊗ right to a gradient in place.

    Args:
        gradient: A tensor of any memory layout, read as the matrix [first dimension, all others].
        left: One entry per row of that matrix.
        right: One entry per column.
        factor: The factor.

    Example:
        >>> gradient = torch.zeros(2, 2)
        >>> add_outer_(gradient, torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0]), 0.5)
        >>> gradient
        tensor([[1.5000, 0.0000],
                [3.0000, 0.0000]])
    """
    if not -LARGEST_NUMBER < factor < LARGEST_NUMBER:
        left, factor = left * factor, 1.0
    if left.dtype != gradient.dtype:
        left, right = left.to(gradient.dtype), right.to(gradient.dtype)
    if gradient.is_contiguous():
        gradient.flatten(1).addr_(left, right, alpha=factor)
    else:
        gradient.add_(torch.outer(left, right).view(gradient.shape), alpha=factor)
