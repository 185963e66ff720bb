"""What the weights alone say: norms, isometry, distance from where they started, Lipschitz bounds.

Every function takes plain tensors and works in double precision, or on singular values (`spectra.singular_values`)
where one decomposition serves several measures.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from pliant._validation import check_choice


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

    FIRE writes a layer as ZW, so that WᵀW holds the inner products between units: `side="out"` here, where weights are
    [out, in]. A matrix with more units than inputs cannot reach zero on that side; on the smaller side every matrix
    can. The sides differ by the constant |out − in|.

    Args:
        sigma: The min(out, in) singular values.
        shape: The matrix's (out, in).
        side: The size of the identity: the smaller of the two, the outputs, or the inputs.

    Raises:
        ValueError: If `side` is none of the three.

    Example:
        >>> isometry_deviation(torch.tensor([1.0, 2.0]), (2, 3))
        9.0
        >>> isometry_deviation(torch.tensor([1.0, 2.0]), (2, 3), side="in")
        10.0
    """
    sizes = {"smaller": min(shape), "out": shape[0], "in": shape[1]}
    check_choice("side", side, tuple(sizes))
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


def wasserstein_distance(weight: Tensor, reference: Tensor) -> float:
    """Return √Σ(θ_(i) − θ⁰_(i))² over order statistics: how far the distribution of entries moved (Curvature §5).

    It never exceeds the L2 distance, since sorting both sides is the best pairing.

    Example:
        >>> wasserstein_distance(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0]))
        0.0
    """
    _same_shape(weight, reference)
    if weight.is_complex() or reference.is_complex():
        raise ValueError("weight and reference must be real, or they have no order, got complex numbers")
    ordered = weight.detach().double().flatten().sort().values
    return float((ordered - reference.detach().double().flatten().sort().values).norm())


def layer_balance(norms: Sequence[float], initial: Sequence[float]) -> list[list[float]]:
    """Return b, |‖W'‖/‖W‖ − ‖W'₀‖/‖W₀‖| for every pair of layers (Soft weight rescaling, def. 2).

    Of a pair, W is the one whose initial norm is the smaller, as the definition asks.

    Args:
        norms: Frobenius norms of the layers now.
        initial: Their initial norms, in the same order.

    Returns:
        A symmetric table with zeros on its diagonal.

    Example:
        >>> layer_balance([2.0, 2.0], [1.0, 2.0])
        [[0.0, 1.0], [1.0, 0.0]]
    """
    if len(norms) != len(initial):
        raise ValueError(f"norms and initial must be equally many, got {len(norms)} and {len(initial)}")

    def balance(a: int, b: int) -> float:
        small, large = sorted((a, b), key=lambda layer: (initial[layer], layer))
        if norms[small] == 0 or initial[small] == 0:
            return math.inf
        return abs(norms[large] / norms[small] - initial[large] / initial[small])

    return [[balance(a, b) if a != b else 0.0 for b in range(len(norms))] for a in range(len(norms))]


def layer_bound(norm: float, places: int) -> float:
    """Return ‖W‖·√(k_h·k_w), which bounds how much a convolution stretches; of a linear layer ‖W‖ itself.

    The matrix [C_out, C_in·k_h·k_w] meets the patches of an input, and each entry of the input is in k_h·k_w of them
    at most: Σ‖W·patch‖² ≤ ‖W‖²·k_h·k_w·‖x‖². Padding other than by zeros repeats entries, and is not counted.

    Args:
        norm: The spectral norm of the weight as that matrix, or its Frobenius norm.
        places: k_h·k_w of a convolution, 1 of a linear layer.

    Example:
        >>> layer_bound(2.0, 9)
        6.0
    """
    return norm * math.sqrt(places)


def product_bound(norms: Iterable[float]) -> float:
    """Return Π norms: an upper bound of the Lipschitz constant (Soft weight rescaling, cor. 2.1).

    Spectral norms give the usual bound, Frobenius norms a looser one. It holds for a chain of 1-Lipschitz layers and
    those whose bounds these are, each called once; through residual connections and norm layers it is an
    indicator only.

    Example:
        >>> product_bound([2.0, 3.0])
        6.0
    """
    return math.prod(norms)


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


def distance(tensors: Iterable[Tensor], reference: Iterable[Tensor]) -> float:
    """Return ‖θ − θ₀‖ over all entries of all tensors.

    Example:
        >>> distance([torch.tensor([3.0])], [torch.tensor([-1.0])])
        4.0
    """
    pairs = zip(tensors, reference, strict=True)
    return math.sqrt(sum(frobenius_error(t, r) for t, r in pairs))


def non_finite(tensor: Tensor) -> int:
    """Return how many entries are NaN or infinite.

    Example:
        >>> non_finite(torch.tensor([1.0, float("nan"), float("inf")]))
        2
    """
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = (tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor).values()
    return int((~torch.isfinite(tensor)).sum())
