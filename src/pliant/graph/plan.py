"""A rescaling of a model, as a linear map: wished log-factors in, log-scales of what is written out.

Proportional rescalings form a linear space in the logarithms of the factors (docs/proportionality.md), so all that a
method needs at run time is a matrix. How it comes about, from a chain of layers or from an exported graph, is the
business of the module that builds the plan.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Block:
    """A parameter or buffer of a model, or a slice of one along its first dimension or another.

    Attributes:
        name: Its name in the model's `named_parameters()` or `named_buffers()`.
        dim: The dimension that the slice cuts.
        start: Where the slice starts; `None` for the whole tensor.
        stop: Where it ends (exclusive); `None` for the whole tensor.
    """

    name: str
    dim: int = 0
    start: int | None = None
    stop: int | None = None

    def of(self, model: nn.Module) -> torch.Tensor:
        """Return the block as a view on the model's own memory, detached from autograd."""
        owner, _, leaf = self.name.rpartition(".")
        tensor = getattr(model.get_submodule(owner), leaf)
        assert isinstance(tensor, torch.Tensor)
        tensor = tensor.detach()
        if self.start is None or self.stop is None:
            return tensor
        return tensor.narrow(self.dim, self.start, self.stop - self.start)

    def __str__(self) -> str:
        if self.start is None:
            return self.name
        return f"{self.name}[{':, ' * self.dim}{self.start}:{self.stop}]"


@dataclass(frozen=True)
class ScalePlan:
    """How wished factors become a rescaling: `log scale(targets) = matrix @ log wish(wishes)`.

    Attributes:
        wishes: The blocks whose factor a method wishes for (weights, and the scales of norm layers).
        targets: The blocks that a rescaling multiplies, parameters and running statistics.
        matrix: float64, one row a target, one column a wish.
        outputs: float64, one row an output of the model, one column a wish: the log of the factor by which
            that output is multiplied.
    """

    wishes: tuple[Block, ...]
    targets: tuple[Block, ...]
    matrix: torch.Tensor
    outputs: torch.Tensor
