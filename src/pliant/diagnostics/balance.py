"""Balancedness: how far a network is from the smallest norm that its function allows.

Let the activations be homogeneous: f(ax) = af(x) for a > 0. Multiplying a hidden unit's incoming weights and bias by a,
and dividing its outgoing weights by a, keeps the function. Among all networks reached this way, one has the least
entry-wise norm

    ‖W‖_{p,q} = (Σ_i (Σ_j |W_ij|^p)^{q/p})^{1/q},  i the receiving unit, j what it receives,

over the weights of the whole network. `balance` finds it by the multiplicative updates of Saul (2023, algorithm 1). The
norm divided by this minimum is the balancedness of Soft weight rescaling (app. C): 1 is balanced. As in both sources,
biases are rescaled too but do not count. A convolution's unit is a channel.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.utils._pytree import tree_leaves

from pliant._seeding import generator
from pliant._validation import check_number
from pliant.anatomy.layers import WEIGHT_LAYERS, called_layers
from pliant.diagnostics.batches import Batch
from pliant.running import call_with, eval_mode


@dataclass(frozen=True)
class Balance:
    """The balanced form of a chain of layers.

    Attributes:
        scales: For each hidden layer, the factor of each unit's incoming weights.
        norm: ‖W‖_{p,q} before.
        least: The minimum of ‖W‖_{p,q} over the rescalings.
        iterations: The number of updates.
    """

    scales: tuple[Tensor, ...]
    norm: float
    least: float
    iterations: int

    @property
    def ratio(self) -> float:
        """The norm divided by the minimum; 1 is balanced."""
        return self.norm / self.least


def balance(
    weights: Sequence[Tensor], p: float = 2.0, q: float = 2.0, tolerance: float = 1e-6, iterations: int = 100_000
) -> Balance:
    """Find the rescaling of a chain's hidden units that minimizes ‖W‖_{p,q}.

    Each update multiplies every unit's factor by (out/in)^{1/(4 max(p,q))}, where in and out are the contributions of
    the unit's incoming and outgoing weights to ‖W‖^q. The norm falls with every update, to the global minimum.

    The weights of a unit without incoming (or outgoing) weights can be scaled toward zero. They are left out, and the
    minimum is then an infimum.

    Args:
        weights: [out, in, …] of each layer, in order. After a flattened convolution, a linear layer has a multiple of
            the channels as inputs.
        p: The exponent over the inputs of a unit, at least 1.
        q: The exponent over units, at least 1.
        tolerance: Stop when |log(out/in)| is below this for all units. The relative error of the minimum is about its
            square.
        iterations: The largest number of updates.

    Raises:
        ValueError: If an argument is out of range, there are no layers, the layers do not fit together, a weight is not
            finite, or all weights are zero.
        ArithmeticError: If the updates did not converge.

    Example:
        >>> found = balance([torch.tensor([[4.0]]), torch.tensor([[1.0]])])
        >>> round(found.least, 6), round(float(found.scales[0]), 6)
        (2.828427, 0.5)
    """
    check_number("p", p, low=1.0)
    check_number("q", q, low=1.0)
    if not weights:
        raise ValueError("weights must hold at least one layer, got none")
    powers = [_powers(weight, p) for weight in weights]
    fans = [_fan(before, after) for before, after in pairwise(weights)]
    norm = _norm([power.sum(1) for power in powers], p, q)
    powers = _without_lone_units(powers, fans)
    if not any(float(power.sum()) for power in powers):
        raise ValueError("weights must connect at least one input with an output, got none")
    logs = [power.new_zeros(len(power)) for power in powers[:-1]]
    for step in range(iterations + 1):
        # The rescaled |W_ij|^p is left_i |W_ij|^p right_j, so products with vectors suffice.
        left = [*((p * log).exp() for log in logs), powers[-1].new_ones(len(powers[-1]))]
        inverse = ((-p * log).exp().repeat_interleave(fan) for log, fan in zip(logs, fans, strict=True))
        right = [powers[0].new_ones(powers[0].shape[1]), *inverse]
        rows = [a * (power @ b) for a, power, b in zip(left, powers, right, strict=True)]
        # A weight contributes |W_ij|^p (Σ_k |W_ik|^p)^{(q−p)/p} to ‖W‖^q; zero rows contribute nothing.
        shares = [torch.where(row > 0, row, 1).pow((q - p) / p) for row in rows]
        updates = []
        for layer, fan in enumerate(fans):
            into, after = rows[layer] * shares[layer], layer + 1
            out = right[after] * ((left[after] * shares[after]) @ powers[after])
            ratio = out.reshape(-1, fan).sum(1) / torch.where(into > 0, into, 1)
            updates.append(torch.where(into > 0, ratio, 1).log())
        if max((float(update.abs().max()) for update in updates), default=0.0) <= tolerance:
            return Balance(tuple(log.exp() for log in logs), norm, _norm(rows, p, q), step)
        logs = [log + update / (4 * max(p, q)) for log, update in zip(logs, updates, strict=True)]
    raise ArithmeticError(f"weight balancing did not reach tolerance {tolerance} in {iterations} updates")


def balancedness(model: nn.Module, batch: Batch, p: float = 2.0, q: float = 2.0) -> Balance:
    """Return the balance of a model that is a chain of linear and convolution layers.

    The order of the chain is the order in which the layers are called. A test on a copy proves that the model is a
    chain with homogeneous activations: rescaling its units must not change its outputs on the batch.

    Args:
        model: The model. It is not changed.
        batch: Inputs to run it on.
        p: The exponent over the inputs of a unit.
        q: The exponent over units.

    Raises:
        ValueError: If the model has other layers with parameters or computed weights, is not a homogeneous chain,
            cannot be copied, or its outputs on the batch are not finite tensors.
    """
    batch = batch.on(model)
    layers = called_layers(model, batch.kwargs or batch.args)
    for layer in layers:
        if not isinstance(layer.module, WEIGHT_LAYERS) or isinstance(layer.module, _ConvTransposeNd):
            raise ValueError(
                f"balancedness is defined for chains of linear and convolution layers, but {layer.name!r} is a "
                f"{type(layer.module).__name__}"
            )
        if not isinstance(layer.module.weight, nn.Parameter):
            raise ValueError(f"balancedness needs weights that are parameters, but {layer.name!r} computes its own")
    names = [layer.name for layer in layers]
    if len(set(names)) != len(names):
        raise ValueError(f"balancedness is defined for chains in which each layer is called once, got {names}")
    found = balance([layer.module.get_parameter("weight").detach() for layer in layers], p, q)
    twin = _copied(model)
    example = batch.kwargs or batch.args
    with eval_mode(twin), torch.no_grad():
        before = _floats(call_with(twin, example))
        _scale_units([twin.get_submodule(name) for name in names])
        after = _floats(call_with(twin, example))
    if not before or not all(torch.isfinite(output).all() for output in before):
        raise ValueError("balancedness is proved on the outputs, which must be tensors of finite numbers on the batch")
    if not all(_is_close(b, a) for b, a in zip(before, after, strict=True)):
        raise ValueError(
            "balancedness is defined for chains with homogeneous activations such as relu, but rescaling the units of "
            "this model changes its outputs"
        )
    return found


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a lock, an open file and a tensor with a graph each raise another error
        reason = str(error).partition("\n")[0]
        raise ValueError(f"balancedness is proved on a copy of the model, which cannot be copied: {reason}") from error


def _is_close(one: Tensor, other: Tensor) -> bool:
    tolerance = 8 * torch.finfo(one.dtype).eps
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(one.abs().max()))


def _floats(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _powers(weight: Tensor, p: float) -> Tensor:
    if weight.ndim < 2:
        raise ValueError(f"weights must have at least 2 dimensions, got shape {tuple(weight.shape)}")
    if not torch.isfinite(weight).all():
        raise ValueError("weights must be finite, got NaN or inf")
    powers = weight.detach().double().abs().pow(p)
    # All entries of a kernel are scaled together.
    return powers.flatten(2).sum(2) if weight.ndim > 2 else powers


def _fan(before: Tensor, after: Tensor) -> int:
    """Return how many inputs of a layer come from each unit of the previous layer."""
    if after.shape[1] % len(before):
        raise ValueError(f"a layer with {after.shape[1]} inputs cannot follow one with {len(before)} units")
    return int(after.shape[1] // len(before))


def _norm(rows: list[Tensor], p: float, q: float) -> float:
    """Return ‖W‖_{p,q} from Σ_j |W_ij|^p for the units of each layer."""
    total = torch.stack([row.pow(q / p).sum() for row in rows]).sum()
    return float(total.pow(1 / q))


def _without_lone_units(powers: list[Tensor], fans: list[int]) -> list[Tensor]:
    powers = [power.clone() for power in powers]
    while True:
        changed = False
        for layer, fan in enumerate(fans):
            into = powers[layer].sum(1) > 0
            out = powers[layer + 1].sum(0).reshape(-1, fan).sum(1) > 0
            lone = into != out
            if lone.any():
                powers[layer][lone] = 0
                powers[layer + 1][:, lone.repeat_interleave(fan)] = 0
                changed = True
        if not changed:
            return powers


def _scale_units(layers: list[nn.Module]) -> None:
    """Scale every hidden unit by a power of two, in place. Powers of two are exact in every precision.

    The powers are drawn for each layer, so that the sum of two layers around a shortcut changes.
    """
    for place, (layer, following) in enumerate(pairwise(layers)):
        weight, bias = layer.get_parameter("weight"), getattr(layer, "bias", None)
        drawn = torch.randint(4, (len(weight),), generator=generator("balancedness", place))
        scale = weight.new_tensor([0.25, 0.5, 2.0, 4.0])[drawn.to(weight.device)]
        weight.mul_(scale.reshape(-1, *[1] * (weight.ndim - 1)))
        if bias is not None:
            bias.mul_(scale)
        after = following.get_parameter("weight")
        after.div_(scale.repeat_interleave(after.shape[1] // len(scale)).reshape(1, -1, *[1] * (after.ndim - 2)))
