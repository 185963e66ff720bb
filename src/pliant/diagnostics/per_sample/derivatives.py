"""Derivatives by the learnable parameters of a model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def learnable(model: nn.Module, real: bool = False) -> dict[str, nn.Parameter]:
    """Return the parameters that learn, by name.

    Args:
        model: The model.
        real: Whether complex parameters cannot be treated.

    Raises:
        ValueError: If there are none, or one that gradients cannot be taken by.
    """
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not found:
        raise ValueError("the model must have a parameter that requires gradients, got none")
    for name, parameter in found.items():
        if parameter.is_inference():
            raise ValueError(f"the model must not be made in inference mode, which {name} was: it has no gradients")
        if real and parameter.is_complex():
            raise ValueError(f"the parameters must be real, got complex numbers in {name}")
    return found


def derivatives(
    value: Tensor, parameters: Sequence[Tensor], *, create_graph: bool = False, retain_graph: bool | None = None
) -> list[Tensor]:
    """Return the derivatives of a number by each parameter, dense, and zero by those that it does not depend on.

    Args:
        value: A scalar.
        parameters: What to differentiate by.
        create_graph: Whether the derivatives are to be differentiated again.
        retain_graph: Whether the graph of the value is still needed; by default if `create_graph`.

    Raises:
        ValueError: If a reentrant checkpoint is in the way.

    Example:
        >>> used, unused = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
        >>> derivatives((used * used).sum(), [used, unused])
        [tensor([2., 2.]), tensor([0.])]
    """
    if not value.requires_grad:
        return [torch.zeros_like(parameter) for parameter in parameters]
    try:
        found = torch.autograd.grad(
            value, parameters, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True
        )
    except RuntimeError as error:
        if "use_reentrant" in str(error):
            raise ValueError("gradients do not pass a reentrant checkpoint; use_reentrant=False lets them") from error
        raise
    return [torch.zeros_like(p) if g is None else dense(g) for p, g in zip(parameters, found, strict=True)]


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient with all its entries: that of an embedding may hold only the rows that were looked up."""
    return gradient.to_dense() if gradient.is_sparse else gradient
