"""LayerNorm: normalize what the units of a layer take in, between the layer and its activation (Ba et al. 2016).

The sources use it as a baseline (Lyle et al. 2023 find that it keeps plasticity). `LayerNormInsertion` puts it into an
existing model: `nn.LayerNorm` behind linear layers, and behind convolutions its like, `nn.GroupNorm(1, channels)`,
which takes mean and variance over channels and places of each example. It changes what the model computes, so it is
for models that are not trained yet.
"""

from torch import nn

from pliant.anatomy.units import Passage, UnitGroup
from pliant.methods._core.architecture import Architecture, replace_module, replaceable


class LayerNormInsertion(Architecture):
    """Insert a LayerNorm before every activation module that follows a layer without one, at once.

    Args:
        model: The model; it is changed in place. Make the optimizer and other methods afterwards.
        example: An example input, from which the layers are found.
        where: Behind which layers, as a predicate on name and value of their weight; all if None.

    Activations that are called as a function (`torch.relu`) cannot be replaced; the layers before them, and those that
    have a norm layer already, are listed in `skipped`.
    """

    name = "layer_norm"

    def _reason_against(self, model: nn.Module, group: UnitGroup) -> str | None:
        if group.norms:
            return "it has a norm layer already"
        if not group.passages:
            return "no activation follows it"
        activation = group.passages[0]
        if not replaceable(model, activation):
            return "its activation is no module of its own"
        if activation.dim not in (-1, 1 - activation.ndim):
            return "its units lie neither along the last dimension nor along that of channels"
        return None

    def _change(self, model: nn.Module, group: UnitGroup) -> None:
        activation = group.passages[0]
        weight = model.get_parameter(group.weight.tensor)
        norm = _norm_for(activation, group.count).to(device=weight.device, dtype=weight.dtype)
        for leaf, parameter in norm.named_parameters():
            self._count(parameter)
            self._companions[f"{activation.module}.0.{leaf}"] = group.weight.tensor
        replace_module(model, activation.module, nn.Sequential(norm, model.get_submodule(activation.module)))


def _norm_for(activation: Passage, count: int) -> nn.Module:
    return nn.LayerNorm(count) if activation.dim == -1 else nn.GroupNorm(1, count)
