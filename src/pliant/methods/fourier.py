"""Deep Fourier features: activations become [sin(x), cos(x)] (Lewandowski et al. 2024).

Paper: "Plastic learning with deep Fourier features". Wherever sin is flat, cos has its full slope, so each unit always
passes a gradient. The layer before the activation gets half as many units, so the layers behind it keep their width.

The halved layer keeps its first rows. In a network that was not trained yet they are distributed as fresh ones,
because the number of inputs stays. The function changes: use it before training.
"""

import torch
from torch import Tensor, nn

from pliant.anatomy.units import Passage, UnitGroup
from pliant.methods._core.architecture import Architecture, replace_module
from pliant.methods._core.filters import is_linear_or_convolution
from pliant.methods.adalin import find_activation


class FourierFeatures(nn.Module):
    """Return sin(x) and cos(x), concatenated along a dimension.

    Args:
        dim: The dimension of the units: 1 for images, −1 for vectors.

    Example:
        >>> FourierFeatures()(torch.tensor([[0.0, torch.pi / 2]])).round(decimals=4)
        tensor([[0., 1., 1., -0.]])
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Return [sin(x), cos(x)]."""
        return torch.cat([x.sin(), x.cos()], self.dim)

    def extra_repr(self) -> str:
        """Return the arguments shown in the module's representation."""
        return f"dim={self.dim}"


class FourierConversion(Architecture):
    """Replace activation modules by deep Fourier features and halve the layers before them, at construction.

    Args:
        model: The model, changed in place. Make the optimizer and other methods afterwards.
        example: An example input, from which the layers are found.
        where: After which layers, as a predicate on the name and value of their weight; all if None.

    Attributes:
        skipped: The layers whose activation stays, with the reason.
    """

    name = "fourier"

    def _reason_against(self, model: nn.Module, group: UnitGroup) -> str | None:
        found = find_activation(model, group)
        if isinstance(found, str):
            return found
        if group.norms:
            return "a norm layer of the same width follows it"
        if group.is_gated or group.weight.dim != 0 or not is_linear_or_convolution(model.get_submodule(group.name)):
            return "its outputs cannot be halved"
        return None if group.count % 2 == 0 else f"it has an odd number of units, {group.count}"

    def _change(self, model: nn.Module, place: UnitGroup) -> None:
        passage = find_activation(model, place)
        assert isinstance(passage, Passage)
        assert passage.dim is not None
        replace_module(model, passage.module, FourierFeatures(passage.dim))
        module = model.get_submodule(place.name)
        for leaf, old in list(module.named_parameters(recurse=False)):
            new = old.detach()[: place.count // 2].clone()
            self._replace_parameter(module, leaf, nn.Parameter(new, requires_grad=old.requires_grad))
        for attribute in ("out_features", "out_channels"):
            if hasattr(module, attribute):
                setattr(module, attribute, place.count // 2)
