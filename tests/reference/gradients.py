"""Per-sample gradients and Hessians by definition: one sample and one entry at a time."""

from typing import Any

import torch
from torch import Tensor, nn

from pliant.diagnostics.batches import Batch, LossFn


def per_sample_gradients(model: nn.Module, batch: Batch, loss_fn: LossFn) -> Tensor:
    """Return G of shape [samples, parameters], with one pass per sample."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(batch.size):
        one = batch.select(slice(i, i + 1))
        loss = loss_fn(one.forward(model), one.target).sum()
        rows.append(flat(torch.autograd.grad(loss, parameters, allow_unused=True), parameters))
    return torch.stack(rows)


def flat(gradients: Any, parameters: list[nn.Parameter]) -> Tensor:
    """Return the gradients as one vector, with zeros for missing ones."""
    pairs = zip(gradients, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def hessian(model: nn.Module, batch: Batch, loss_fn: LossFn) -> Tensor:
    """Return the Hessian of the mean loss, with one backward pass per row."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = loss_fn(batch.forward(model), batch.target)
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    entries = torch.cat([g.flatten() for g in first])
    return torch.stack(
        [flat(torch.autograd.grad(e, parameters, retain_graph=True, allow_unused=True), parameters) for e in entries]
    )
