"""Nearest orthogonal matrices by Newton–Schulz iteration or its limit, the polar factor; and Gram matrices.

One iteration maps X to X·q(XᵀX) with a polynomial q: it multiplies every singular value by q(σ²) and turns no singular
vector. N of them are X·T, where T is a function of the Gram matrix XᵀX alone. Four ways lead to the same result:

- "loop" iterates on X, as FIRE's Algorithm 1 does: two products with X an iteration.
- "gram" iterates on XᵀX and multiplies X once, which is cheaper for tall matrices.
- "eigh" diagonalizes XᵀX and iterates on its eigenvalues. By far the fastest on a CPU.
- "svd" iterates on the singular values of X. The most accurate after "loop".

Squaring X squares its condition number. In the results of "gram" and "eigh" a singular value may be off by
ε·λ₁·min(g², 1/λₙ), where λ are the eigenvalues of XᵀX at ‖X‖ = 1, ε is the precision and g the factor by which the
iterations enlarge a tiny singular value (58 after ten cubic ones). "eigh" measures that for each matrix and leaves it
to "svd" where it exceeds 1e-4.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pliant._eigen import eigh
from pliant._precision import wide_dtype, widen, without_autocast
from pliant._validation import check_choice, check_positive_int
from pliant.methods._core import host

Polynomial = Literal["cubic", "quintic", "exact"]
Solver = Literal["auto", "loop", "gram", "eigh", "svd"]

_COEFFICIENTS = {"cubic": (1.5, -0.5, 0.0), "quintic": (2.0, -1.5, 0.5)}
_TOLERANCE = 1e-4
_QUARTER_FROM, _HALVE_FROM, _LONG = 128, 64, 512
"""Rows from which four panels pay, and on a CPU two if the rows are long."""


class Orthogonalized(NamedTuple):
    """The result for a batch of matrices.

    Attributes:
        matrices: The results X, shaped as the matrices.
        deviation: DfI of each, ‖XᵀX − I‖²_F, or ‖XXᵀ − I‖²_F if X is wider than tall.
        maps: The symmetric T with X = (W/‖W‖)·T, or X = T·(W/‖W‖) if X is wider than tall; None from "loop".
    """

    matrices: Tensor
    deviation: Tensor
    maps: Tensor | None


@dataclass(frozen=True)
class Iteration:
    """N steps of X ← X·q(XᵀX), or their limit.

    Args:
        polynomial: "cubic", q = 1.5 − 0.5λ (FIRE, Algorithm 1); "quintic", q = 2 − 1.5λ + 0.5λ² (FIRE, A.2); "exact",
            the limit of both: the polar factor, with null directions left null.
        steps: How many; the limit has no use for it.
    """

    polynomial: Polynomial = "cubic"
    steps: int = 10

    def __post_init__(self) -> None:
        check_choice("polynomial", self.polynomial, get_args(Polynomial))
        check_positive_int("iterations", self.steps)

    @property
    def gain(self) -> float:
        """By how much a singular value close to zero grows."""
        return float("inf") if self.polynomial == "exact" else float(_COEFFICIENTS[self.polynomial][0] ** self.steps)

    def gains(self, eigenvalues: Tensor) -> Tensor:
        """Return by how much the singular value √λ grows for each eigenvalue λ of XᵀX.

        Example:
            >>> import torch
            >>> Iteration("cubic", 1).gains(torch.tensor([0.0, 1.0])).tolist()
            [1.5, 1.0]
        """
        eigenvalues = eigenvalues.clamp(min=0)
        if self.polynomial == "exact":
            precision = torch.finfo(eigenvalues.dtype).eps * eigenvalues.shape[-1]
            null = eigenvalues <= eigenvalues.amax(-1, keepdim=True) * precision**2
            return torch.where(null, 0, eigenvalues.rsqrt())
        gains = torch.ones_like(eigenvalues)
        for _ in range(self.steps):
            factors = self._factors(eigenvalues)
            gains = gains * factors
            eigenvalues = eigenvalues * factors**2
        return gains

    def _factors(self, eigenvalues: Tensor) -> Tensor:
        a, b, c = _COEFFICIENTS[self.polynomial]
        return a + b * eigenvalues + c * eigenvalues**2

    def matrix_factor(self, gram: Tensor) -> Tensor:
        """Return q(A) for a batch of Gram matrices A."""
        a, b, c = _COEFFICIENTS[self.polynomial]
        factor = b * gram if c == 0 else torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        return factor


def check_solver(solver: Solver, polynomial: Polynomial) -> None:
    """Raise a ValueError if the solver is unknown or cannot reach the limit."""
    check_choice("solver", solver, get_args(Solver))
    if solver in ("loop", "gram") and polynomial == "exact":
        raise ValueError(f"solver: {solver!r} iterates, which never reaches the exact factor; use 'eigh' or 'svd'")


@without_autocast
def orthogonalize(matrices: Tensor, iteration: Iteration, solver: Solver = "auto") -> Orthogonalized:
    """Apply an iteration to W/‖W‖ for each matrix W of a batch.

    Args:
        matrices: [batch, rows, columns]; computed in float32 at least. A matrix of zeros stays one.
        iteration: Which one.
        solver: How: "loop", "gram", "eigh", "svd", or "auto", which picks by device, shape and iteration.

    Raises:
        ValueError: If the solver is unknown, or cannot find the limit ("loop" and "gram").

    Example:
        >>> import torch
        >>> orthogonalize(torch.tensor([[[3.0, 0.0], [0.0, -0.5]]]), Iteration("exact")).matrices
        tensor([[[ 1.,  0.],
                 [ 0., -1.]]])
    """
    check_solver(solver, iteration.polynomial)
    if matrices.shape[-2] < matrices.shape[-1]:
        result = orthogonalize(matrices.mT, iteration, solver)
        return result._replace(matrices=result.matrices.mT)
    if solver == "auto":
        solver = _choose_solver(matrices, iteration)
    x = widen(matrices)
    norms = torch.linalg.matrix_norm(x, keepdim=True)
    x = x / norms.where(norms > 0, 1)
    return Orthogonalized(*{"loop": _loop, "gram": _gram, "eigh": _eigh, "svd": _svd}[solver](x, iteration))


@without_autocast
def isometry_deviation(matrices: Tensor) -> Tensor:
    """Return ‖WᵀW − I‖² of each matrix of a batch, on its smaller side.

    Example:
        >>> import torch
        >>> isometry_deviation(torch.tensor([[[2.0, 0.0], [0.0, 1.0]]]))
        tensor([9.])
    """
    tall = matrices if matrices.shape[-2] >= matrices.shape[-1] else matrices.mT
    return _deviation(tall.mT @ tall)


def _choose_solver(tall: Tensor, iteration: Iteration) -> Solver:
    _, rows, columns = tall.shape
    precision = torch.finfo(wide_dtype(tall.dtype)).eps
    # A tall random matrix is well conditioned, a square one is not: there, a large gain makes "eigh" fail its test.
    risky = precision * iteration.gain**2 > 100 * _TOLERANCE
    if host.is_on_host(tall):
        return "svd" if risky and rows < 2 * columns else "eigh"
    if iteration.polynomial == "exact":
        return "svd"
    return "gram" if rows >= 2 * columns and not risky else "loop"


def _loop(x: Tensor, iteration: Iteration) -> tuple[Tensor, Tensor, None]:
    for _ in range(iteration.steps):
        x = x @ iteration.matrix_factor(x.mT @ x)
    return x, _deviation(x.mT @ x), None


def _gram(x: Tensor, iteration: Iteration) -> tuple[Tensor, Tensor, Tensor]:
    gram = x.mT @ x
    maps = torch.eye(gram.shape[-1], dtype=x.dtype, device=x.device).expand_as(gram)
    for _ in range(iteration.steps):
        factor = iteration.matrix_factor(gram)
        maps = maps @ factor
        gram = gram @ factor @ factor
    return x @ maps, _deviation(gram), maps


def _eigh(x: Tensor, iteration: Iteration) -> tuple[Tensor, Tensor, Tensor]:
    eigenvalues, vectors = eigh(x.mT @ x)
    gains = iteration.gains(eigenvalues)
    maps = (vectors * gains.unsqueeze(-2)) @ vectors.mT
    results = (x @ maps, _spectral_deviation(eigenvalues.clamp(min=0) * gains**2), maps)
    largest, smallest = eigenvalues[:, -1], eigenvalues[:, 0].clamp(min=0)
    growth = smallest.reciprocal().clamp(max=iteration.gain**2)
    inaccurate = torch.finfo(x.dtype).eps * largest * growth > _TOLERANCE
    if inaccurate.any():
        for whole, part in zip(results, _svd(x[inaccurate], iteration), strict=True):
            whole[inaccurate] = part
    return results


def _svd(x: Tensor, iteration: Iteration) -> tuple[Tensor, Tensor, Tensor]:
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    gains = iteration.gains(values**2)
    new_values = values * gains
    maps = (right.mT * gains.unsqueeze(-2)) @ right
    return (left * new_values.unsqueeze(-2)) @ right, _spectral_deviation(new_values**2), maps


def _deviation(gram: Tensor) -> Tensor:
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return (gram - identity).square().sum((-2, -1))


def _spectral_deviation(eigenvalues: Tensor) -> Tensor:
    return ((eigenvalues - 1) ** 2).sum(-1)


def gram(matrix: Tensor) -> Tensor:
    """Return M Mᵀ, computing little more than one of the two halves that mirror each other.

    Panels of rows, each multiplied with the rows from its own first one on: four panels take 5/8 of the products.

    Args:
        matrix: M.

    Example:
        >>> gram(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
        tensor([[5., 2.],
                [2., 1.]])
    """
    rows = len(matrix)
    halves = rows >= _HALVE_FROM and matrix.shape[1] >= _LONG and host.is_on_host(matrix)
    panels = 4 if rows >= _QUARTER_FROM else 2 if halves else 1
    if panels == 1:
        return matrix @ matrix.mT
    result = matrix.new_empty(rows, rows)
    height = -(-rows // panels // 4) * 4  # BLAS is faster on multiples of four
    for top in range(0, rows, height):
        end = min(top + height, rows)
        torch.mm(matrix[top:end], matrix[top:].mT, out=result[top:end, top:])
        result[end:, top:end] = result[top:end, end:].mT
    return result
