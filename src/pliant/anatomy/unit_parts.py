"""What a unit is made of: the slices of parameters and buffers that make it, normalize it and read it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Slices:
    """Which slices of a parameter or buffer belong to which unit.

    Attributes:
        tensor: Its name in the model.
        dim: The dimension that is sliced.
        units: For each index along that dimension the unit that it belongs to, or −1.
    """

    tensor: str
    dim: int
    units: Tensor


@dataclass(frozen=True)
class Norm:
    """The part of a norm layer that belongs to the units of a group; what the layer does not have is None."""

    weight: Slices | None
    bias: Slices | None
    running_mean: Slices | None
    running_var: Slices | None

    @property
    def tensors(self) -> tuple[Slices, ...]:
        """All that there is."""
        return tuple(s for s in (self.weight, self.bias, self.running_mean, self.running_var) if s is not None)


@dataclass(frozen=True)
class Reader:
    """A layer that reads units.

    Attributes:
        module: The path of the module that makes the call.
        weight: The slices of its weight that read each unit: one column, or as many as a channel has pixels.
        bias: The name of its bias, None if it has none of its own.
        input_dim: The dimension of its input along which the units lie, as those slices do.
        reads_input: Whether what it multiplies by the weight is what the module is called with, but for a padding and
            for the shape of the dimensions before the units'.
        passed: The names of the calls between the units' layer and it.
    """

    module: str
    weight: Slices
    bias: str | None
    input_dim: int
    reads_input: bool
    passed: frozenset[str]


@dataclass(frozen=True)
class Passage:
    """A call that turns each entry of units into another one, or normalizes them, on their way to their readers.

    Attributes:
        operator: The call's name ("relu", "layer_norm").
        module: The path of the module that makes it.
        alone: Whether that is the only call of its kind that the module makes, so that it stands for the module.
        dim: The dimension along which the units lie, counted from the end; None if it is not one alone.
        ndim: How many dimensions there are.
    """

    operator: str
    module: str
    alone: bool
    dim: int | None
    ndim: int


@dataclass(frozen=True)
class UnitGroup:
    """The units that one layer makes, all of which can be renewed one by one.

    Attributes:
        name: The layer's path.
        count: How many units.
        weight: What makes them.
        bias: Its bias, None if it has none.
        norms: The norm layers that they pass through.
        passages: All calls that they pass through as they are, norm layers too and dropout aside, in order.
        readers: The layers that read them, in order of their call.
    """

    name: str
    count: int
    weight: Slices
    bias: Slices | None
    norms: tuple[Norm, ...]
    passages: tuple[Passage, ...]
    readers: tuple[Reader, ...]
