"""The plan of a chain of layers: theorem 1 and Algorithm 1 of the SWR paper.

In a chain of layers with homogeneous activations, W_l ← c_l W_l and b_l ← (Π c_i) b_l keep the function up to a factor.
The product runs over the layers since the last norm layer. `analyze` finds this for any architecture. This module
serves models that cannot be analyzed, whose layers the user lists, and the paper's own algorithm.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from pliant.anatomy.layers import NORM_LAYERS, WEIGHT_LAYERS, Layer
from pliant.anatomy.plan import Block, ScalePlan

Mode = Literal["exact", "paper"]
CHAIN_LAYERS = (*WEIGHT_LAYERS, *NORM_LAYERS)


def chain_plan(layers: Sequence[Layer], mode: Mode = "exact") -> ScalePlan:
    """Return the plan of a chain.

    Args:
        layers: Weight layers (linear, convolution) and norm layers, in order.
        mode: "exact" scales every bias by the product since the last norm layer, and scales the running statistics of
            batch norm with their input. "paper" is Algorithm 1, corrected to cumulate from the final norm layer on
            (`l > k` instead of the printed `l ≥ k`): before that layer, a bias is scaled by its own layer's factor
            only, and running statistics are not scaled.

    Returns:
        The plan. Frozen weights have no wish, and no frozen tensor is a target.

    Raises:
        ValueError: If a layer is of another kind, is used twice with a bias, or has a frozen bias after a trained
            weight.
    """
    for layer in layers:
        if not isinstance(layer.module, CHAIN_LAYERS):
            raise ValueError(
                f"layers: {layer.name!r} is a {type(layer.module).__name__}; a chain consists of linear, convolution "
                "and norm layers"
            )
        if "weight" not in layer.module._parameters:
            raise ValueError(
                f"layers: {layer.name!r} computes its weight by a parametrization or a hook; in a chain, weights must "
                "be parameters"
            )
    weights = [w for layer in layers if isinstance(w := layer.module.weight, Tensor) and w.requires_grad]
    columns = {key: column for column, key in enumerate(dict.fromkeys(map(id, weights)))}
    norm_positions = [i for i, layer in enumerate(layers) if isinstance(layer.module, NORM_LAYERS)]
    last_norm = norm_positions[-1] if norm_positions else -1
    rows: dict[Block, Tensor] = {}
    tensors: dict[int, Block] = {}

    def demand(layer: Layer, leaf: str, form: Tensor) -> None:
        tensor = getattr(layer.module, leaf, None)
        if tensor is None:
            return
        block = tensors.setdefault(id(tensor), Block(f"{layer.name}.{leaf}" if layer.name else leaf))
        if block in rows and not torch.equal(rows[block], form):
            raise ValueError(
                f"layers: {block.name!r} is used twice and would need two scales; use order='graph', "
                "which finds the nearest rescaling that keeps the function"
            )
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad and form.any():
            raise ValueError(
                f"layers: {block.name!r} is frozen but would have to be scaled with the weights before it; "
                "use order='graph', which keeps frozen parameters as they are"
            )
        rows[block] = form

    scale = torch.zeros(len(columns), dtype=torch.float64)
    for position, layer in enumerate(layers):
        own = torch.zeros_like(scale)
        if id(layer.module.weight) in columns:
            own[columns[id(layer.module.weight)]] = 1.0
        if isinstance(layer.module, NORM_LAYERS):
            if mode == "exact":
                demand(layer, "running_mean", scale)
                demand(layer, "running_var", 2 * scale)
            scale = own
        else:
            scale = own if mode == "paper" and position < last_norm else scale + own
        demand(layer, "weight", own)
        demand(layer, "bias", scale)
    written = {block: row for block, row in rows.items() if row.any()}
    return ScalePlan(
        wishes=tuple(tensors[key] for key in columns),
        targets=tuple(written),
        matrix=torch.stack(list(written.values())) if written else scale.new_zeros(0, len(columns)),
        outputs=scale.unsqueeze(0),
    )


def chain_layers(model: nn.Module, called: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return the called layers that can be part of a chain.

    Raises:
        ValueError: If a parameter of the model does not belong to one of these layers.
    """
    layers = tuple(layer for layer in called if isinstance(layer.module, CHAIN_LAYERS))
    covered = {id(p) for layer in layers for p in layer.module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if id(parameter) not in covered:
            raise ValueError(
                f"model: the parameter {name!r} does not belong to a linear, convolution or norm layer that was called "
                "on the example; list the layers to rescale with order=[module names]"
            )
    return layers
