"""Curvature matrices in full, for networks small enough: what the cheap measures are validated against.

All are d × d for d learnable parameters, and are or approximate the Hessian of the mean loss:

- `hessian`: itself;
- `gauss_newton`: mean JᵀH_zJ, J the Jacobian of a sample's output, H_z the Hessian of its loss by the output;
- `fisher`: mean ggᵀ with labels drawn from the network's own predictions (Curvature C.2 draws one a sample).

The mean of ggᵀ with the true labels, the empirical Fisher, is the approximation whose rank `gradients.hessian_rank`
measures, without the matrix. With softmax and cross-entropy, the expectation of `fisher` is `gauss_newton`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pliant._eigen import eigvalsh
from pliant._precision import widen, without_autocast
from pliant._validation import check_positive_int
from pliant.diagnostics.batches import Batch, LossFn, sample_losses, summed_loss
from pliant.diagnostics.lanczos import twice_differentiable
from pliant.diagnostics.per_sample.derivatives import derivatives, learnable
from pliant.diagnostics.spectra import srank

MOST_PARAMETERS = 20_000
"""Above this a d × d matrix is too big to be meant."""

_ROWS = 128


def hessian(model: nn.Module, batch: Batch, loss_fn: LossFn) -> Tensor:
    """Return ∇² of the mean loss, [d, d].

    Raises:
        ValueError: If the model has no or more than `MOST_PARAMETERS` learnable parameters.
    """
    parameters = _parameters(model)
    with torch.enable_grad(), twice_differentiable():
        total = summed_loss(loss_fn, batch.forward(model), batch).total
        first = derivatives(total / batch.size, parameters, create_graph=True)
        return _jacobian(torch.cat([g.flatten() for g in first]), parameters)


def fisher(model: nn.Module, batch: Batch, draws: int = 1, seed: int = 0) -> Tensor:
    """Return the mean of ggᵀ with labels drawn from the softmax of the model's outputs, [d, d].

    Args:
        model: Gives logits, [samples, classes].
        batch: The samples; their target is not looked at.
        draws: Labels drawn for each sample.
        seed: Of the generator that draws them.

    Raises:
        ValueError: If the model has no or more than `MOST_PARAMETERS` learnable parameters, `draws` is not positive, or
            the outputs are not finite.
    """
    check_positive_int("draws", draws)
    parameters = _parameters(model)
    with torch.enable_grad():
        logits = batch.forward(model)
        probabilities = logits.detach().double().softmax(-1).cpu()
        if not torch.isfinite(probabilities).all():
            raise ValueError("labels cannot be drawn from the model's outputs: they are NaN or infinite")
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
        model: Gives one tensor, [samples, …].
        batch: The samples.
        loss_fn: `loss_fn(output, target)`.

    Raises:
        ValueError: If the model has no or more than `MOST_PARAMETERS` learnable parameters.
    """
    parameters = _parameters(model)
    with torch.enable_grad():
        output = batch.forward(model)
        jacobian = _jacobian(output.flatten(), parameters).reshape(batch.size, -1, _size(parameters))
        z = output.detach().requires_grad_()
        losses = sample_losses(loss_fn, z, batch)
        (first,) = torch.autograd.grad(losses.sum(), z, create_graph=True)
        # Samples do not meet in the loss, so that a sum over them keeps their second derivatives apart.
        entries = first.flatten(1).unbind(1)
        curvature = torch.stack([_derivative(entry.sum(), z).flatten(1) for entry in entries], 1)
    return _sandwich(jacobian, curvature.to(jacobian.dtype)) / batch.size


@without_autocast
def _sandwich(jacobian: Tensor, curvature: Tensor) -> Tensor:
    return torch.einsum("mad,mab,mbe->de", jacobian, curvature, jacobian)


def symmetry_limit(model: nn.Module) -> float:
    """Return by how much of it a Hessian may be off symmetry before a second derivative in it must be wrong.

    Example:
        >>> symmetry_limit(nn.Linear(2, 1)), symmetry_limit(nn.Linear(2, 1).bfloat16())
        (0.001, 0.0078125)
    """
    used = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    for device in {parameter.device.type for parameter in model.parameters()}:
        used |= {torch.get_autocast_dtype(device)} if torch.is_autocast_enabled(device) else set()
    return max([1e-3, *(torch.finfo(dtype).eps for dtype in used)])


def relative_rank(matrix: Tensor, most: int, delta: float = 0.01) -> float:
    """Return srank_δ of a symmetric matrix, divided by the most that it could be.

    Args:
        matrix: Symmetric.
        most: Its largest possible rank: d for a Hessian, the number of samples for an empirical Fisher.
        delta: The share of the sum of singular values that may be left out.

    Example:
        >>> relative_rank(torch.diag(torch.tensor([1.0, -1.0, 0.0, 0.0])), 4)
        0.5
    """
    check_positive_int("most", most)
    return srank(eigvalsh(matrix).abs(), delta) / most


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
    """Return the derivatives of a vector by all parameters, a row an entry, without its graph."""
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
