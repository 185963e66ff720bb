"""CReLU: concatenated ReLU, [relu(x), relu(−x)] (Shang et al. 2016; for plasticity, Abbas et al. 2023).

A unit whose input is negative has no gradient behind a ReLU; behind a CReLU one of its two halves always has. The
layer that reads it is twice as wide. `CReLU` is the module; `CReLUConversion` puts it in the place of every `nn.ReLU`
of an existing model and widens the layers that read it.

With weights="keep" the new weights are zero: the converted model computes what the model computed, and learns to use
the other half. With weights="fresh" the widened layers are initialized as layers of their new width: a network that
was built with CReLU.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from pliant._validation import check_choice, check_seed
from pliant.anatomy.unit_parts import Reader
from pliant.anatomy.units import UnitGroup
from pliant.methods._core.architecture import Architecture, replace_module, replaceable
from pliant.methods._core.initial import reset_function, seeded
from pliant.methods._core.method import Filter
from pliant.methods._core.unit_selection import is_linear_or_convolution

Weights = Literal["keep", "fresh"]


class CReLU(nn.Module):
    """Return relu(x) and relu(−x), one after the other along a dimension.

    Args:
        dim: The dimension along which units lie: 1 for images, −1 for vectors.

    Example:
        >>> CReLU()(torch.tensor([[1.0, -2.0]]))
        tensor([[1., 0., 0., 2.]])
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Apply both halves."""
        return torch.cat([x, -x], self.dim).relu()

    def extra_repr(self) -> str:
        """Return what the module's representation shows."""
        return f"dim={self.dim}"


def widened_places(units: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """Return where a reader's inputs lie after CReLU: the places of relu(x) and those of relu(−x).

    Args:
        units: For each input of the reader the unit that it belongs to.
        count: How many units there are.

    Returns:
        The places in an input that is twice as wide, None if they cannot be told: if the reader reads other values too.

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
    """Replace ReLU modules by CReLU and widen the layers that read them, at once.

    Args:
        model: The model; it is changed in place. Make the optimizer and other methods afterwards.
        example: An example input, from which the layers are found.
        weights: "keep" the function, with zeros for the new weights, or "fresh": initialize the widened layers anew.
        seed: Draw from a stream of its own, for weights="fresh"; from torch's global generators if None.
        where: Behind which layers, as a predicate on name and value of their weight; all if None.

    Activations that are called as a function (`torch.relu`) cannot be replaced; the layers before them are listed in
    `skipped`.
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
        relu = group.passages[relus[0]]
        if not replaceable(model, relu):
            return "its ReLU is no module of its own"
        if relu.dim is None:
            return "its ReLU does not tell where its units lie"
        if any("norm" in passage.operator for passage in group.passages[relus[0] :]):
            return "a norm layer follows its ReLU"
        for reader in group.readers:
            module = model.get_submodule(reader.module)
            if "relu" not in reader.passed:
                return f"{reader.module} reads it before its ReLU"
            if not is_linear_or_convolution(module):
                return f"it is read by {reader.module}, a {type(module).__name__}, which cannot be widened"
            if widened_places(reader.weight.units, group.count) is None:
                return f"{reader.module} reads other values beside it"
            if self.weights == "fresh" and reset_function(module) is None:
                return f"it is read by {reader.module}, a {type(module).__name__}, which cannot be initialized anew"
        return None

    def _change(self, model: nn.Module, group: UnitGroup) -> None:
        relu = next(passage for passage in group.passages if passage.operator == "relu")
        replace_module(model, relu.module, CReLU(relu.dim if relu.dim is not None else 1))
        with seeded(self.seed, len(self.changed)):
            for reader in group.readers:
                self._widen(model.get_submodule(reader.module), reader, group.count)

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
