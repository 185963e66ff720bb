"""Derivatives by the learnable parameters of a model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def learnable(model: nn.Module, real: bool = False) -> dict[str, nn.Parameter]:
    """Return the learnable parameters by name.

    Args:
        model: The model.
        real: Whether to reject complex parameters.

    Raises:
        ValueError: If there are none, or a gradient by one of them cannot be taken.
    """
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not found:
        raise ValueError("the model must have a parameter that requires gradients, got none")
    for name, parameter in found.items():
        if parameter.is_inference():
            raise ValueError(f"{name} was made in inference mode, so it cannot have a gradient; make the model outside")
        if real and parameter.is_complex():
            raise ValueError(f"the parameters must be real, got complex numbers in {name}")
    return found


def derivatives(
    value: Tensor | Sequence[Tensor],
    parameters: Sequence[Tensor],
    *,
    along: Sequence[Tensor] | None = None,
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> list[Tensor]:
    """Return the derivative of a value by each parameter, dense, and zero if the value does not depend on it.

    Args:
        value: A scalar, or tensors together with `along`.
        parameters: What to differentiate by.
        along: For each tensor of `value`, the weights of its entries in the sum that is differentiated.
        create_graph: Whether the derivatives will be differentiated again.
        retain_graph: Whether to keep the graph of the value. By default, the value of `create_graph`.

    Raises:
        ValueError: If a reentrant checkpoint blocks the gradient.

    Example:
        >>> used, unused = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
        >>> derivatives((used * used).sum(), [used, unused])
        [tensor([2., 2.]), tensor([0.])]
    """
    if isinstance(value, Tensor) and not value.requires_grad:
        return [torch.zeros_like(parameter) for parameter in parameters]
    try:
        found = torch.autograd.grad(
            value, parameters, along, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True
        )
    except RuntimeError as error:
        if "use_reentrant" in str(error):
            raise ValueError("gradients do not pass a reentrant checkpoint; set use_reentrant=False") from error
        raise
    return [torch.zeros_like(p) if g is None else dense(g) for p, g in zip(parameters, found, strict=True)]


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient as a dense tensor. The gradient of an embedding may be sparse."""
    return gradient.to_dense() if gradient.is_sparse else gradient
