"""Curvature of the loss: sharpness from Hessian-vector products, and full matrices for small networks.

Sharpness is the largest eigenvalue of the Hessian. The full matrices are d × d for d learnable parameters, and validate
the cheap measures:

- `hessian`: the Hessian of the mean loss;
- `gauss_newton`: the mean of JᵀH_zJ, where J is the Jacobian of a sample's output by the parameters, and H_z the
  Hessian of its loss by the output;
- `fisher`: the mean of ggᵀ with labels drawn from the network's own predictions (Curvature C.2 draws one per sample).

The mean of ggᵀ with the true labels, the empirical Fisher, is the approximation whose rank `spectra.hessian_rank`
measures without the matrix. With softmax and cross-entropy, the expectation of `fisher` is `gauss_newton`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from pliant._eigen import eigvalsh
from pliant._precision import widen, without_autocast
from pliant._validation import check_positive_int
from pliant.diagnostics.batches import Batch, LossFn, sample_losses, summed_loss
from pliant.diagnostics.per_sample.derivatives import derivatives, learnable
from pliant.diagnostics.spectra import srank

MOST_PARAMETERS = 20_000
"""The largest number of parameters d for which a d × d matrix is formed."""

_ROWS = 128
"""How many rows of a Jacobian are computed at once."""

_STEADY = 5
"""For how many products the largest eigenvalue must not have moved."""


@dataclass(frozen=True)
class Extremes:
    """The largest and the smallest eigenvalue of a symmetric matrix.

    Attributes:
        largest: The largest eigenvalue.
        smallest: The smallest eigenvalue found on the way to the largest.
        residual: ‖Av − λv‖ for the largest eigenvalue λ. An exact eigenvalue lies within this distance of λ.
        iterations: The number of products with a vector.
        converged: Whether the residual is below the tolerance and λ has stopped moving.
        asymmetry: The largest |uᵀAv − vᵀAu| found, relative to the largest absolute eigenvalue. If it exceeds the
            rounding error, a second derivative is wrong. One example is `weight_norm` in PyTorch 2.13 on a CPU.
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
    """Find the largest and the smallest eigenvalue of a symmetric matrix by Lanczos' method.

    Only three vectors are held. Without orthogonalization against all earlier vectors, rounding brings found directions
    back as copies, which does not change the extremes.

    Args:
        multiply: Maps a float64 vector v to Av.
        size: The length of v.
        iterations: The largest number of products.
        tolerance: Stop when the residual is below `tolerance` times the largest eigenvalue, and that eigenvalue has
            moved by less than this over the last products. The second condition is needed because the iteration passes
            smaller eigenvalues on the way. It also stops when the residual is as small as the rounding error.
        seed: The seed of the start vector, which has its own generator.

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
        if last is not None:  # both sides give the same entry of a symmetric matrix
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
    """Return the extreme eigenvalues of the tridiagonal matrix, and judge convergence by earlier steps."""
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
    """Make attention use its only kernel with a second derivative."""
    return sdpa_kernel(SDPBackend.MATH)


def hessian_product(model: nn.Module, batch: Batch, loss_fn: LossFn) -> tuple[Callable[[Tensor], Tensor], int]:
    """Return the function v ↦ Hv for the Hessian of the mean loss over a batch, and the length of v.

    Vectors are float64 and hold all learnable parameters in the model's order. The product is computed in the model's
    precision. `.grad` stays as it is.

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
        second = derivatives([g for _, g in used], parameters, along=along, retain_graph=True)
        return torch.cat([h.flatten() for h in second]).double()

    return multiply, sum(p.numel() for p in parameters)


def sharpness(
    model: nn.Module, batch: Batch, loss_fn: LossFn, iterations: int = 64, tolerance: float = 1e-2
) -> Extremes:
    """Return the largest (and smallest) eigenvalue of the Hessian of the mean loss (FIRE §4.4).

    Args:
        model: The model, in the mode to measure it in.
        batch: The samples.
        loss_fn: `loss_fn(output, target)`.
        iterations: The largest number of Hessian-vector products. Each costs about two backward passes.
        tolerance: The residual relative to the eigenvalue. The eigenvalue's own relative error is about its square.
    """
    multiply, size = hessian_product(model, batch, loss_fn)
    return lanczos(multiply, size, iterations, tolerance)


def hessian(model: nn.Module, batch: Batch, loss_fn: LossFn) -> Tensor:
    """Return the Hessian of the mean loss, [d, d].

    Raises:
        ValueError: If the model has no learnable parameters or more than `MOST_PARAMETERS`.
    """
    parameters = _parameters(model)
    with torch.enable_grad(), twice_differentiable():
        total = summed_loss(loss_fn, batch.forward(model), batch).total
        first = derivatives(total / batch.size, parameters, create_graph=True)
        return _jacobian(torch.cat([g.flatten() for g in first]), parameters)


def fisher(model: nn.Module, batch: Batch, draws: int = 1, seed: int = 0) -> Tensor:
    """Return the mean of ggᵀ with labels drawn from the softmax of the model's outputs, [d, d].

    Args:
        model: A model whose outputs are logits, [samples, classes].
        batch: The samples. Their target is not used.
        draws: How many labels to draw for each sample.
        seed: The seed of the labels.

    Raises:
        ValueError: If the model has no learnable parameters or more than `MOST_PARAMETERS`, `draws` is not positive,
            or the outputs are not finite.
    """
    check_positive_int("draws", draws)
    parameters = _parameters(model)
    with torch.enable_grad():
        logits = batch.forward(model)
        probabilities = logits.detach().double().softmax(-1).cpu()
        if not torch.isfinite(probabilities).all():
            raise ValueError("labels cannot be drawn from the model's outputs, which are NaN or infinite")
        labels = torch.multinomial(probabilities, draws, True, generator=torch.Generator().manual_seed(seed))
        losses = [cross_entropy(logits, drawn, reduction="none") for drawn in labels.to(logits.device).unbind(1)]
        return _sum_of_products(_jacobian(each, parameters) for each in losses).div_(labels.numel())


@without_autocast
def _sum_of_products(parts: Iterator[Tensor]) -> Tensor:
    first = next(parts)
    total = first.T @ first
    for part in parts:
        total.addmm_(part.T, part)
    return total


def gauss_newton(model: nn.Module, batch: Batch, loss_fn: LossFn) -> Tensor:
    """Return the mean of JᵀH_zJ over samples, [d, d].

    Args:
        model: A model whose output is one tensor, [samples, …].
        batch: The samples.
        loss_fn: `loss_fn(output, target)`.

    Raises:
        ValueError: If the model has no learnable parameters or more than `MOST_PARAMETERS`.
    """
    parameters = _parameters(model)
    with torch.enable_grad():
        output = batch.forward(model)
        jacobian = _jacobian(output.flatten(), parameters).reshape(batch.size, -1, _size(parameters))
        z = output.detach().requires_grad_()
        losses = sample_losses(loss_fn, z, batch)
        (first,) = torch.autograd.grad(losses.sum(), z, create_graph=True)
        # The loss does not mix samples, so the second derivatives of the sum are each sample's own.
        entries = first.flatten(1).unbind(1)
        curvature = torch.stack([_derivative(entry.sum(), z).flatten(1) for entry in entries], 1)
    return _sandwich(jacobian, curvature.to(jacobian.dtype)) / batch.size


@without_autocast
def _sandwich(jacobian: Tensor, curvature: Tensor) -> Tensor:
    return torch.einsum("mad,mab,mbe->de", jacobian, curvature, jacobian)


def symmetry_limit(model: nn.Module) -> float:
    """Return the relative asymmetry of a Hessian that rounding can explain.

    Example:
        >>> symmetry_limit(nn.Linear(2, 1)), symmetry_limit(nn.Linear(2, 1).bfloat16())
        (0.001, 0.0078125)
    """
    used = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    for device in {parameter.device.type for parameter in model.parameters()}:
        used |= {torch.get_autocast_dtype(device)} if torch.is_autocast_enabled(device) else set()
    return max([1e-3, *(torch.finfo(dtype).eps for dtype in used)])


def relative_rank(matrix: Tensor, most: int, delta: float = 0.01) -> float:
    """Return srank_δ of a symmetric matrix, divided by its largest possible rank.

    Args:
        matrix: A symmetric matrix.
        most: The largest possible rank: d for a Hessian, the number of samples for an empirical Fisher.
        delta: The share of the sum of singular values that may be left out.

    Example:
        >>> relative_rank(torch.diag(torch.tensor([1.0, -1.0, 0.0, 0.0])), 4)
        0.5
    """
    check_positive_int("most", most)
    return srank(eigvalsh(matrix).abs(), delta) / most


def hessian_exact_rank(model: nn.Module, batch: Batch, loss_fn: LossFn) -> float:
    """Return the relative rank of the Hessian itself.

    Raises:
        ValueError: If the Hessian is not symmetric.
    """
    matrix = hessian(model, batch, loss_fn)
    off = float((matrix - matrix.T).norm() / matrix.norm())
    if off > symmetry_limit(model):
        raise ValueError(
            f"the Hessian is not symmetric (relative error {off:.2g}), so a second derivative in it is wrong"
        )
    return relative_rank(matrix, len(matrix))


def gauss_newton_rank(model: nn.Module, batch: Batch, loss_fn: LossFn, output: object) -> float:
    """Return the relative rank of the Gauss–Newton matrix for softmax and cross-entropy.

    Raises:
        ValueError: If the model's output is not logits, or the target not a class for each sample.
    """
    samples, classes = _check_logits(output, batch.target)
    matrix = gauss_newton(model, batch, loss_fn)
    return relative_rank(matrix, min(len(matrix), samples * (classes - 1)))


def fisher_rank(model: nn.Module, batch: Batch, output: object) -> float:
    """Return the relative rank of the Fisher matrix, with one label drawn for each sample.

    Raises:
        ValueError: If the model's output is not logits, or the target not a class for each sample.
    """
    samples, _ = _check_logits(output, batch.target)
    matrix = fisher(model, batch)
    return relative_rank(matrix, min(len(matrix), samples))


def _check_logits(output: object, target: object) -> torch.Size:
    if not isinstance(output, Tensor) or output.ndim != 2 or output.shape[1] < 2:
        raise ValueError("it needs logits, [samples, classes], of at least two classes")
    if not isinstance(target, Tensor) or target.is_floating_point() or target.shape != output.shape[:1]:
        raise ValueError("it needs a class for each sample, as an integer")
    return output.shape


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    parameters = list(learnable(model, real=True).values())
    if _size(parameters) > MOST_PARAMETERS:
        raise ValueError(
            f"the model must have at most {MOST_PARAMETERS} learnable parameters for a full matrix, "
            f"got {_size(parameters)}"
        )
    return parameters


def _size(parameters: list[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def _jacobian(values: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    """Return the derivatives of a vector by all parameters, one row per entry, without their graph."""
    if not values.requires_grad:
        return widen(values.new_zeros(len(values), _size(parameters)))
    rows = []
    for part in torch.split(torch.eye(len(values), dtype=values.dtype, device=values.device), _ROWS):
        found = torch.autograd.grad(
            values, parameters, part, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        pairs = zip(found, parameters, strict=True)
        parts = [p.new_zeros(len(part), *p.shape) if g is None else g for g, p in pairs]
        rows.append(torch.cat([each.reshape(len(part), -1) for each in parts], 1))
    return widen(torch.cat(rows).detach())


def _derivative(value: Tensor, by: Tensor) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(by)
    (found,) = torch.autograd.grad(value, by, retain_graph=True, allow_unused=True)
    return torch.zeros_like(by) if found is None else found
