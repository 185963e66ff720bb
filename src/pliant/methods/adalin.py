"""AdaLin: inject linearity where an activation saturates (Razavi Rohani et al. 2025).

Paper: "Preserving plasticity in continual learning with adaptive linearity injection". Each activation φ becomes

    φ(x) + α_i·x·cos(π/2·|φ′(x)|/L),

where α_i is learned for each unit, L is the largest |φ′|, and the cosine counts as a constant in the backward pass.
Where φ has its full slope, the cosine is 0 and the unit is as before. Where φ is flat, the cosine is 1 and the unit is
linear with slope α_i, so it receives a gradient again.

Where we deviate. Only the text was found, not the authors' code. α starts at zero, so the network computes the same
function until it learns.
"""

from collections.abc import Callable
from math import pi
from typing import Any

import torch
from torch import Tensor, nn

from pliant._validation import check_number
from pliant.anatomy.units import Passage, UnitGroup
from pliant.methods._core.architecture import Architecture, replace_module, replaceable
from pliant.methods._core.filters import Filter


def _gelu_slope(x: Tensor, _: nn.Module) -> Tensor:
    slope: Tensor = torch.special.ndtr(x) + x * (-x.square() / 2).exp() / (2 * pi) ** 0.5
    return slope


def _silu_slope(x: Tensor, _: nn.Module) -> Tensor:
    return x.sigmoid() * (1 + x * (1 - x.sigmoid()))


SLOPES: dict[type[nn.Module], tuple[Callable[[Tensor, Any], Tensor], float]] = {
    nn.ReLU: (lambda x, _: (x > 0).to(x.dtype), 1.0),
    nn.LeakyReLU: (lambda x, module: torch.where(x > 0, 1.0, module.negative_slope).to(x.dtype), 1.0),
    nn.Tanh: (lambda x, _: 1 - x.tanh().square(), 1.0),
    nn.Sigmoid: (lambda x, _: x.sigmoid() * (1 - x.sigmoid()), 0.25),
    nn.GELU: (_gelu_slope, 1.1289),
    nn.SiLU: (_silu_slope, 1.0998),
}
"""φ′ and its largest size, by activation."""


def flatness(activation: nn.Module, x: Tensor) -> Tensor:
    """Return cos(π/2·|φ′(x)|/L): 1 where the activation is flat, 0 where it has its full slope.

    Args:
        activation: φ.
        x: Its input.

    Example:
        >>> flatness(nn.ReLU(), torch.tensor([-1.0, 2.0])).round(decimals=4)
        tensor([1., -0.])
    """
    slope, largest = SLOPES[type(activation)]
    return (pi / 2 * slope(x, activation).abs().clamp(max=largest) / largest).cos()


class AdaLin(nn.Module):
    """An activation with learned linearity where it is flat.

    Args:
        activation: φ.
        units: The number of units.
        dim: The dimension along which the units lie, counted from the end.
        alpha: The first value of α.
    """

    def __init__(self, activation: nn.Module, units: int, dim: int = -1, alpha: float = 0.0) -> None:
        super().__init__()
        self.activation, self.dim = activation, dim
        self.alpha = nn.Parameter(torch.full((units,), float(alpha)))

    def forward(self, x: Tensor) -> Tensor:
        """Return φ(x) + α·x·cos(π/2·|φ′(x)|/L)."""
        alpha = self.alpha.view(-1, *[1] * (-1 - self.dim))
        output: Tensor = self.activation(x)
        return output + alpha * x * flatness(self.activation, x.detach())


def find_activation(model: nn.Module, group: UnitGroup) -> Passage | str:
    """Return the only call of an activation behind a layer, or why there is none that can be replaced."""
    found = [
        passage
        for passage in group.passages
        if replaceable(model, passage) and type(model.get_submodule(passage.module)) in SLOPES
    ]
    if len(found) != 1:
        known = ", ".join(kind.__name__ for kind in SLOPES)
        number = "more than one activation follows it" if found else "no activation module follows it"
        return f"{number} (known are {known})"
    if found[0].dim not in (-1, 1 - found[0].ndim):
        return "its units lie neither along the last dimension nor along the channels"
    if getattr(model.get_submodule(found[0].module), "approximate", "none") != "none":
        return "its GELU is an approximation"
    return found[0]


class AdaptiveLinearity(Architecture):
    """Replace activation modules by AdaLin, at construction.

    Args:
        model: The model, changed in place. Make the optimizer and other methods afterwards.
        example: An example input, from which the layers are found.
        alpha: The first value of α; 0 keeps the function.
        where: After which layers, as a predicate on the name and value of their weight; all if None.

    Attributes:
        skipped: The layers whose activation stays, with the reason.
    """

    name = "adalin"

    def __init__(
        self, model: nn.Module, example: Any = None, *, alpha: float = 0.0, where: Filter | None = None
    ) -> None:
        self.alpha = check_number("alpha", alpha)
        super().__init__(model, example, where=where)

    def _reason_against(self, model: nn.Module, group: UnitGroup) -> str | None:
        found = find_activation(model, group)
        return found if isinstance(found, str) else None

    def _change(self, model: nn.Module, place: UnitGroup) -> None:
        passage = find_activation(model, place)
        assert isinstance(passage, Passage)
        assert passage.dim is not None
        weight = model.get_parameter(place.weight.tensor)
        made = AdaLin(model.get_submodule(passage.module), place.count, passage.dim, self.alpha).to(weight)
        self._count(made.alpha)
        self._companions[f"{passage.module}.alpha"] = place.weight.tensor
        replace_module(model, passage.module, made)
