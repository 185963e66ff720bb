"""LayerNorm: normalize the inputs of each activation (Ba et al. 2016).

It is a baseline of the papers; Lyle et al. 2023 find that it keeps plasticity. `LayerNormInsertion` puts it into an
existing model: `nn.LayerNorm` after linear layers, and `nn.GroupNorm(1, channels)` after convolutions, which normalizes
each example over channels and positions. The model then computes another function, so use it before training.
"""

from torch import nn

from pliant.anatomy.units import UnitGroup
from pliant.methods._core.architecture import Architecture, replace_module, replaceable


def norm_layer(units: int, dim: int) -> nn.Module:
    """Return the norm layer for units along a dimension: LayerNorm for the last one, else GroupNorm over all channels.

    Args:
        units: The number of units.
        dim: The dimension along which they lie, counted from the end.

    Example:
        >>> norm_layer(4, -1).normalized_shape
        (4,)
        >>> norm_layer(4, -3).num_groups
        1
    """
    return nn.LayerNorm(units) if dim == -1 else nn.GroupNorm(1, units)


class LayerNormInsertion(Architecture):
    """Insert a norm layer between each layer without one and its activation module, at construction.

    Args:
        model: The model, changed in place. Make the optimizer and other methods afterwards.
        example: An example input, from which the layers are found.
        where: After which layers, as a predicate on the name and value of their weight; all if None.

    Attributes:
        skipped: The layers without an inserted norm layer, with the reason. An activation that is called as a function
            (`torch.relu`) cannot be replaced.
    """

    name = "layer_norm"

    def _reason_against(self, model: nn.Module, group: UnitGroup) -> str | None:
        if group.norms:
            return "it has a norm layer already"
        if not group.passages:
            return "no activation follows it"
        activation = group.passages[0]
        if not replaceable(model, activation):
            return "its activation is not a module of its own"
        if activation.dim not in (-1, 1 - activation.ndim):
            return "its units lie neither along the last dimension nor along the channels"
        return None

    def _change(self, model: nn.Module, place: UnitGroup) -> None:
        activation = place.passages[0]
        assert activation.dim is not None
        weight = model.get_parameter(place.weight.tensor)
        norm = norm_layer(place.count, activation.dim).to(device=weight.device, dtype=weight.dtype)
        for leaf, parameter in norm.named_parameters():
            self._count(parameter)
            self._companions[f"{activation.module}.0.{leaf}"] = place.weight.tensor
        replace_module(model, activation.module, nn.Sequential(norm, model.get_submodule(activation.module)))
