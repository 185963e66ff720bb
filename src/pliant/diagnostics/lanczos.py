"""Sharpness: the largest eigenvalue of the Hessian, from products with vectors alone."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pliant._validation import check_positive_int
from pliant.diagnostics.batches import Batch, LossFn, summed_loss
from pliant.diagnostics.per_sample.derivatives import dense, derivatives, learnable

_STEADY = 5
"""For how many products the largest eigenvalue must have stood still."""


@dataclass(frozen=True)
class Extremes:
    """Both ends of a symmetric matrix's spectrum.

    Attributes:
        largest: The largest eigenvalue.
        smallest: The smallest that was met on the way to the largest.
        residual: ‖Av − λv‖ of the largest one's vector: an eigenvalue lies at most so far away.
        iterations: How many products it took.
        converged: Whether the residual came below the tolerance, and the eigenvalue stood still.
        asymmetry: The largest |uᵀAv − vᵀAu| that was met, relative to the largest eigenvalue in absolute value. A
            Hessian that is not symmetric to rounding has a second derivative in it that is wrong, as that of
            `weight_norm` is in PyTorch 2.13 on a CPU.
    """

    largest: float
    smallest: float
    residual: float
    iterations: int
    converged: bool
    asymmetry: float


def lanczos(
    multiply: Callable[[Tensor], Tensor], size: int, iterations: int = 64, tolerance: float = 1e-4, seed: int = 0
) -> Extremes:
    """Find the ends of a symmetric matrix's spectrum by Lanczos' method.

    Only three vectors are held: without orthogonalization against all that came before, rounding brings found
    directions back as copies, which does not move the ends.

    Args:
        multiply: From a float64 vector v to Av.
        size: The length of v.
        iterations: The most products to take.
        tolerance: Stop when the residual is below this times the absolute value of the largest eigenvalue, and that
            has moved by less in the last few products: an eigenvalue is also met on the way to a larger one. Or when
            the residual is as small as the rounding of the eigenvalue that is largest in absolute value.
        seed: Of the start vector, drawn from a generator of its own.

    Raises:
        ValueError: If `iterations` is not positive, or a product is not finite.

    Example:
        >>> diagonal = torch.tensor([1.0, -3.0, 5.0], dtype=torch.float64)
        >>> found = lanczos(lambda v: diagonal * v, 3)
        >>> round(found.largest, 6), round(found.smallest, 6), found.converged
        (5.0, -3.0, True)
    """
    check_positive_int("iterations", iterations)
    start = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    current, before = start / start.norm(), torch.zeros_like(start)
    diagonal: list[float] = []
    beside: list[float] = []
    asymmetry = 0.0
    last: Tensor | None = None
    largest: list[float] = []
    while True:
        product = multiply(current)
        if not torch.isfinite(product).all():
            raise ValueError("a product of the Hessian with a vector must be finite, got NaN or inf")
        current, before = current.to(product.device), before.to(product.device)
        beta = beside[-1] if beside else 0.0
        if last is not None:  # The same entry of a symmetric matrix from both sides.
            asymmetry = max(asymmetry, abs(float(before @ product) - float(current @ last)))
        last = product
        diagonal.append(float(current @ product))
        rest = product - diagonal[-1] * current - beta * before
        beta = float(rest.norm())
        found = _ritz(diagonal, beside, beta, asymmetry, largest[-_STEADY:], tolerance)
        if found.converged or len(diagonal) == iterations:
            return found
        largest.append(found.largest)
        beside.append(beta)
        current, before = rest / beta, current


def _ritz(
    diagonal: list[float],
    beside: list[float],
    beta: float,
    asymmetry: float,
    earlier: list[float],
    tolerance: float,
) -> Extremes:
    """Take the ends of the tridiagonal matrix's spectrum, and judge them by what was found in earlier steps."""
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if beside:
        off = torch.tensor(beside, dtype=torch.float64)
        matrix = matrix + torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(matrix)
    scale = float(values.abs().max())
    residual = beta * abs(float(vectors[-1, -1]))
    limit = tolerance * abs(float(values[-1]))
    steady = len(earlier) == _STEADY and float(values[-1]) - earlier[0] <= limit
    converged = residual <= 1e-14 * scale or (residual <= limit and steady)
    relative = asymmetry / scale if scale else 0.0
    return Extremes(float(values[-1]), float(values[0]), residual, len(diagonal), converged, relative)


def twice_differentiable() -> AbstractContextManager[None]:
    """Make attention use the one of its kernels whose derivative has a derivative."""
    return sdpa_kernel(SDPBackend.MATH)


def hessian_product(model: nn.Module, batch: Batch, loss_fn: LossFn) -> tuple[Callable[[Tensor], Tensor], int]:
    """Return v ↦ Hv for the Hessian of the mean loss over a batch, and the length of v.

    Vectors are float64 and hold all learnable parameters in the model's order; the product itself is computed in the
    model's precision. `.grad` is not touched.

    Raises:
        ValueError: If the model has no learnable parameter, or a complex one.
    """
    parameters = list(learnable(model, real=True).values())
    with torch.enable_grad(), twice_differentiable():
        total = summed_loss(loss_fn, batch.forward(model), batch).total
        first = derivatives(total / batch.size, parameters, create_graph=True)
    used = [(p, g) for p, g in zip(parameters, first, strict=True) if g.requires_grad]

    def multiply(vector: Tensor) -> Tensor:
        if not used:
            return torch.zeros_like(vector)
        pieces = dict(zip(parameters, torch.split(vector, [p.numel() for p in parameters]), strict=True))
        along = [pieces[p].reshape(p.shape).to(p.device, p.dtype) for p, _ in used]
        second = torch.autograd.grad([g for _, g in used], parameters, along, retain_graph=True, allow_unused=True)
        filled = [torch.zeros_like(p) if h is None else dense(h) for p, h in zip(parameters, second, strict=True)]
        return torch.cat([h.flatten() for h in filled]).double()

    return multiply, sum(p.numel() for p in parameters)


def sharpness(
    model: nn.Module, batch: Batch, loss_fn: LossFn, iterations: int = 64, tolerance: float = 1e-2
) -> Extremes:
    """Return the largest (and smallest) eigenvalue of the Hessian of the mean loss (FIRE §4.4).

    Args:
        model: In the mode to be measured in.
        batch: The samples.
        loss_fn: `loss_fn(output, target)`.
        iterations: The most Hessian-vector products to take, each about two backward passes.
        tolerance: Of the residual, relative to the largest eigenvalue, whose own error is of the order of its square.
    """
    multiply, size = hessian_product(model, batch, loss_fn)
    return lanczos(multiply, size, iterations, tolerance)
