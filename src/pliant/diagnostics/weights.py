"""Formulas on weights: norms, isometry, distances from a reference, Lipschitz bounds.

Every function takes plain tensors and computes in double precision, or takes the singular values of
`spectra.singular_values`, so that one decomposition serves several measures.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor


def l1_norm(tensors: Iterable[Tensor]) -> float:
    """Return Σ|θ| over all entries of all tensors.

    Example:
        >>> l1_norm([torch.tensor([1.0, -2.0]), torch.tensor([[3.0]])])
        6.0
    """
    return float(sum((_wide(t).abs().sum() for t in tensors), torch.zeros((), dtype=torch.float64)))


def l2_norm(tensors: Iterable[Tensor]) -> float:
    """Return √Σ|θ|² over all entries of all tensors.

    Example:
        >>> l2_norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
        5.0
    """
    return math.sqrt(sum((_squares(_wide(t)) for t in tensors), torch.zeros((), dtype=torch.float64)))


def isometry_deviation(
    sigma: Tensor, shape: tuple[int, int], side: Literal["smaller", "out", "in"] = "smaller"
) -> float:
    """Return DfI, ‖WᵀW − I‖²_F (FIRE eq. 2), from the singular values of W.

    FIRE writes a layer as ZW, so its WᵀW holds the inner products between units. With weights stored as [out, in], this
    is `side="out"`. A matrix with more units than inputs cannot reach zero on that side; every matrix can reach zero on
    the smaller side. The two sides differ by the constant |out − in|.

    Args:
        sigma: The min(out, in) singular values.
        shape: The matrix's (out, in).
        side: The size of the identity: the smaller of the two, the number of outputs, or the number of inputs.

    Raises:
        ValueError: If `side` is unknown.

    Example:
        >>> isometry_deviation(torch.tensor([1.0, 2.0]), (2, 3))
        9.0
        >>> isometry_deviation(torch.tensor([1.0, 2.0]), (2, 3), side="in")
        10.0
    """
    sizes = {"smaller": min(shape), "out": shape[0], "in": shape[1]}
    if side not in sizes:
        raise ValueError(f"side: {side!r} is not allowed; it must be one of {', '.join(map(repr, sizes))}")
    zeros = sizes[side] - len(sigma)
    return float(((sigma.double() ** 2 - 1) ** 2).sum()) + zeros


def frobenius_error(weight: Tensor, reference: Tensor) -> float:
    """Return SFE, ‖W − W̃‖²_F (FIRE eq. 1).

    Args:
        weight: W.
        reference: W̃, of the same shape.

    Example:
        >>> frobenius_error(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0]))
        2.0
    """
    _same_shape(weight, reference)
    return float(_squares(_wide(weight) - _wide(reference)))


def distance(tensors: Iterable[Tensor], reference: Iterable[Tensor]) -> float:
    """Return ‖θ − θ₀‖ over all entries of all tensors.

    Example:
        >>> distance([torch.tensor([3.0])], [torch.tensor([-1.0])])
        4.0
    """
    return math.sqrt(sum(frobenius_error(t, r) for t, r in zip(tensors, reference, strict=True)))


def wasserstein_distance(tensors: Iterable[Tensor], reference: Iterable[Tensor]) -> float:
    """Return √Σ(θ_(i) − θ⁰_(i))² over the sorted entries of each tensor (Curvature §5).

    It tells how far the distribution of the entries moved. It never exceeds the L2 distance, because sorting both sides
    gives the best pairing.

    Raises:
        ValueError: If shapes differ, or a tensor is complex and so has no order.

    Example:
        >>> wasserstein_distance([torch.tensor([1.0, 2.0])], [torch.tensor([2.0, 1.0])])
        0.0
    """
    return math.sqrt(sum(_sorted_distance(t, r) ** 2 for t, r in zip(tensors, reference, strict=True)))


def _sorted_distance(tensor: Tensor, reference: Tensor) -> float:
    _same_shape(tensor, reference)
    if tensor.is_complex() or reference.is_complex():
        raise ValueError("weight and reference must be real to be sorted, got complex numbers")
    ordered = tensor.detach().double().flatten().sort().values
    return float((ordered - reference.detach().double().flatten().sort().values).norm())


def layer_balance(norms: Sequence[float], initial: Sequence[float]) -> list[list[float]]:
    """Return b, |‖W'‖/‖W‖ − ‖W'₀‖/‖W₀‖| for every pair of layers (Soft weight rescaling, def. 2).

    In each pair, W is the layer with the smaller initial norm, as in the definition.

    Args:
        norms: The current Frobenius norms of the layers.
        initial: Their initial norms, in the same order.

    Returns:
        A symmetric table with zeros on its diagonal.

    Example:
        >>> layer_balance([2.0, 2.0], [1.0, 2.0])
        [[0.0, 1.0], [1.0, 0.0]]
    """
    if len(norms) != len(initial):
        raise ValueError(f"norms and initial must have the same length, got {len(norms)} and {len(initial)}")

    def balance(a: int, b: int) -> float:
        small, large = sorted((a, b), key=lambda layer: (initial[layer], layer))
        if norms[small] == 0 or initial[small] == 0:
            return math.inf
        return abs(norms[large] / norms[small] - initial[large] / initial[small])

    return [[balance(a, b) if a != b else 0.0 for b in range(len(norms))] for a in range(len(norms))]


def product_bound(norms: Sequence[float], places: Sequence[int] | None = None) -> float:
    """Return Π ‖W‖·√(k_h·k_w), an upper bound of the Lipschitz constant (Soft weight rescaling, cor. 2.1).

    Spectral norms give the usual bound, Frobenius norms a looser one. The bound holds for a chain of these layers and
    1-Lipschitz layers, each called once. Through residual connections and norm layers it is only an indicator.

    A convolution multiplies the patches of its input by the matrix [C_out, C_in·k_h·k_w]. Each entry of the input is in
    at most k_h·k_w patches, so Σ‖W·patch‖² ≤ ‖W‖²·k_h·k_w·‖x‖². This assumes padding with zeros; other padding repeats
    entries.

    Args:
        norms: A norm of each layer's weight as a matrix.
        places: k_h·k_w of each layer, 1 for a linear layer. By default, all layers are linear.

    Example:
        >>> product_bound([2.0, 3.0]), product_bound([2.0], [9])
        (6.0, 6.0)
    """
    return math.prod(norm * math.sqrt(count) for norm, count in zip(norms, places or [1] * len(norms), strict=True))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def _squares(tensor: Tensor) -> Tensor:
    """Return Σ|θ|²."""
    return (tensor * tensor.conj()).real.sum() if tensor.is_complex() else tensor.square().sum()


def _same_shape(weight: Tensor, reference: Tensor) -> None:
    if weight.shape != reference.shape:
        raise ValueError(
            f"weight and reference must have one shape, got {tuple(weight.shape)} and {tuple(reference.shape)}"
        )
