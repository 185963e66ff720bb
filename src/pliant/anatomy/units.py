"""The units of a model: the slices of parameters and buffers that make each unit, normalize it and read it.

A unit is an output of a linear layer or a channel of a convolution. In a gated layer, such as the SwiGLU of LLaMA, two
outputs are multiplied by each other before anything reads them: they are one unit. The *readers* of a unit are the
layers that multiply it by a weight. `pliant.anatomy.unit_tracker.find_units` fills these records.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Slices:
    """The slices of a parameter or buffer that belong to units.

    Attributes:
        tensor: The name of the parameter or buffer in the model.
        dim: The dimension that is sliced.
        units: For each index along that dimension, the number of its unit, or −1.
    """

    tensor: str
    dim: int
    units: Tensor


@dataclass(frozen=True)
class Norm:
    """The slices of a norm layer that belong to the units of a group; None for tensors that the layer lacks."""

    weight: Slices | None
    bias: Slices | None
    running_mean: Slices | None
    running_var: Slices | None

    @property
    def tensors(self) -> tuple[Slices, ...]:
        """The slices of all tensors that the layer has."""
        return tuple(s for s in (self.weight, self.bias, self.running_mean, self.running_var) if s is not None)


@dataclass(frozen=True)
class Reader:
    """A layer that reads units.

    Attributes:
        module: The path of the module that makes the call.
        weight: The slices of its weight that read each unit: one column, or one for each pixel of a flattened channel.
        bias: The name of its bias; None if it has none or shares it.
        input_dim: The dimension of its input along which the units lie, counted from the end.
        reads_input: Whether the weight multiplies the module's own input, except for padding and for reshaping the
            dimensions before the units'.
        passed: The names of the calls between the layer that makes the units and this one.
    """

    module: str
    weight: Slices
    bias: str | None
    input_dim: int
    reads_input: bool
    passed: frozenset[str]


@dataclass(frozen=True)
class Passage:
    """An elementwise call or a norm layer between a layer and its readers.

    Attributes:
        operator: The name of the call ("relu", "layer_norm").
        module: The path of the module that makes the call.
        alone: Whether the module calls this operator only once.
        dim: The dimension along which the units lie, counted from the end; None if they lie along several.
        ndim: The number of dimensions.
    """

    operator: str
    module: str
    alone: bool
    dim: int | None
    ndim: int


@dataclass(frozen=True)
class UnitGroup:
    """The units of one layer, or of several that are multiplied by each other. Each unit can be renewed alone.

    Attributes:
        name: The path of the first layer.
        count: The number of units.
        weights: The slices of each layer's weight that make the units.
        biases: The slices of the biases that the layers have.
        norms: The norm layers on the way to the readers.
        passages: The elementwise calls and norm layers on the way to the readers, in order, without dropout.
        readers: The layers that read the units, in order of their call.
    """

    name: str
    count: int
    weights: tuple[Slices, ...]
    biases: tuple[Slices, ...]
    norms: tuple[Norm, ...]
    passages: tuple[Passage, ...]
    readers: tuple[Reader, ...]

    @property
    def weight(self) -> Slices:
        """The slices of the first layer's weight."""
        return self.weights[0]

    @property
    def is_gated(self) -> bool:
        """Whether a unit is the product of several outputs."""
        return sum(len(slices.units) for slices in self.weights) > self.count


@dataclass(frozen=True)
class UnitGraph:
    """All layers of a model that make units.

    Attributes:
        groups: The layers whose units can be renewed, in order of their call.
        skipped: For each other layer, the reason why its units cannot be renewed.
    """

    groups: tuple[UnitGroup, ...]
    skipped: dict[str, str]


UNREACHED = "it has no part in what the model returns"
"""The reason for a layer that the example does not reach."""
