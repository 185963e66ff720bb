"""CReLU: concatenated ReLU, [relu(x), relu(−x)] (Shang et al. 2016; for plasticity, Abbas et al. 2023).

A ReLU passes no gradient where its input is negative; one half of a CReLU always does. The layers that read it are
twice as wide. `CReLU` is the module. `CReLUConversion` replaces every `nn.ReLU` of an existing model by it and widens
the layers that read it:

- weights="keep" sets the new weights to zero, so that the converted model computes the same function;
- weights="fresh" initializes the widened layers at their new width, as if the network had been built with CReLU.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from pliant._validation import check_choice, check_seed
from pliant.anatomy.units import Reader, UnitGroup
from pliant.methods._core.architecture import Architecture, replace_module, replaceable
from pliant.methods._core.filters import Filter, is_linear_or_convolution
from pliant.methods._core.initial import reset_function, seeded

Weights = Literal["keep", "fresh"]


class CReLU(nn.Module):
    """Return relu(x) and relu(−x), concatenated along a dimension.

    Args:
        dim: The dimension of the units: 1 for images, −1 for vectors.

    Example:
        >>> CReLU()(torch.tensor([[1.0, -2.0]]))
        tensor([[1., 0., 0., 2.]])
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Return [relu(x), relu(−x)]."""
        return torch.cat([x, -x], self.dim).relu()

    def extra_repr(self) -> str:
        """Return the arguments shown in the module's representation."""
        return f"dim={self.dim}"


def widened_places(units: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """Return where a reader's inputs lie after CReLU: the positions of relu(x) and of relu(−x).

    Args:
        units: For each input of the reader, the unit that it belongs to.
        count: The number of units.

    Returns:
        The positions in an input of twice the width, or None if the reader also reads other values.

    Example:
        >>> widened_places(torch.tensor([0, 0, 1, 1]), 2)  # two channels of two pixels, flattened
        (tensor([0, 1, 2, 3]), tensor([4, 5, 6, 7]))
        >>> widened_places(torch.tensor([0, 1, 0, 1]), 2)  # two pixels of two channels
        (tensor([0, 1, 4, 5]), tensor([2, 3, 6, 7]))
    """
    size = len(units)
    if size % count:
        return None
    index, each = torch.arange(size), size // count
    if torch.equal(units, index // each):
        return index, index + size
    if torch.equal(units, index % count):
        first = index + index // count * count
        return first, first + count
    return None


class CReLUConversion(Architecture):
    """Replace ReLU modules by CReLU and widen the layers that read them, at construction.

    Args:
        model: The model, changed in place. Make the optimizer and other methods afterwards.
        example: An example input, from which the layers are found.
        weights: "keep" the function with zeros as new weights, or "fresh": re-initialize the widened layers.
        seed: The seed of a private random stream, for weights="fresh". None draws from torch's global generators.
        where: After which layers, as a predicate on the name and value of their weight; all if None.

    Attributes:
        skipped: The layers whose ReLU stays, with the reason. A ReLU that is called as a function (`torch.relu`) cannot
            be replaced.
    """

    name = "crelu"

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        *,
        weights: Weights = "keep",
        seed: int | None = None,
        where: Filter | None = None,
    ) -> None:
        check_choice("weights", weights, get_args(Weights))
        self.weights = weights
        self.seed = check_seed(seed)
        super().__init__(model, example, where=where)

    def _reason_against(self, model: nn.Module, group: UnitGroup) -> str | None:
        relus = [i for i, passage in enumerate(group.passages) if passage.operator == "relu"]
        if len(relus) != 1:
            return "no ReLU follows it" if not relus else "more than one ReLU follows it"
        if group.is_gated:
            return "it is multiplied by a gate, which would have to be widened too"
        relu = group.passages[relus[0]]
        if not replaceable(model, relu):
            return "its ReLU is not a module of its own"
        if relu.dim is None:
            return "the dimension of its units at the ReLU is unknown"
        if any("norm" in passage.operator for passage in group.passages[relus[0] :]):
            return "a norm layer follows its ReLU"
        for reader in group.readers:
            module = model.get_submodule(reader.module)
            if "relu" not in reader.passed:
                return f"{reader.module} reads it before its ReLU"
            if not is_linear_or_convolution(module):
                return f"it is read by {reader.module}, a {type(module).__name__}, which cannot be widened"
            if widened_places(reader.weight.units, group.count) is None:
                return f"{reader.module} also reads other values"
            if self.weights == "fresh" and reset_function(module) is None:
                return f"it is read by {reader.module}, a {type(module).__name__}, which cannot be re-initialized"
        return None

    def _change(self, model: nn.Module, place: UnitGroup) -> None:
        relu = next(passage for passage in place.passages if passage.operator == "relu")
        assert relu.dim is not None
        replace_module(model, relu.module, CReLU(relu.dim))
        with seeded(self.seed, len(self.changed)):
            for reader in place.readers:
                self._widen(model.get_submodule(reader.module), reader, place.count)

    def _widen(self, module: nn.Module, reader: Reader, count: int) -> None:
        places = widened_places(reader.weight.units, count)
        assert places is not None
        old = module.weight
        assert isinstance(old, nn.Parameter)
        dim = reader.weight.dim
        shape = [2 * size if d == dim else size for d, size in enumerate(old.shape)]
        new = torch.zeros(shape, dtype=old.dtype, device=old.device)
        new.index_copy_(dim, places[0].to(old.device), old.detach())
        self._replace_parameter(module, "weight", nn.Parameter(new, requires_grad=old.requires_grad))
        for attribute in ("in_features", "in_channels", "nx"):
            if hasattr(module, attribute):
                setattr(module, attribute, shape[dim])
        if self.weights == "fresh":
            reset = reset_function(module)
            assert reset is not None
            reset()
