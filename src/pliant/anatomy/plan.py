"""A plan maps wished factors of some weights to the factors of all tensors that a rescaling multiplies.

Proportional rescalings form a linear space in the logarithms of the factors (docs/proportionality.md). So all that a
method needs at run time is a matrix. `chain` builds it from a chain of layers, `rescaling` from an exported graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from pliant.anatomy.rescaling import ScaleGraph


@dataclass(frozen=True)
class Block:
    """A parameter or buffer of a model, or a slice of it along one dimension.

    Attributes:
        name: The tensor's name in the model's `named_parameters()` or `named_buffers()`.
        dim: The dimension that the slice cuts.
        start: The first index of the slice; None for the whole tensor.
        stop: The last index of the slice, exclusive; None for the whole tensor.
        period: The distance at which the slice repeats, if queries, keys and values are interleaved head by head; None
            for a single slice.
    """

    name: str
    dim: int = 0
    start: int | None = None
    stop: int | None = None
    period: int | None = None

    def __str__(self) -> str:
        if self.start is None:
            return self.name
        repeats = "" if self.period is None else f" mod {self.period}"
        return f"{self.name}[{':, ' * self.dim}{self.start}:{self.stop}{repeats}]"

    def of(self, tensor: Tensor) -> Tensor:
        """Return the block as a view of the whole tensor."""
        if self.start is None or self.stop is None:
            return tensor
        if self.period is None:
            return tensor.narrow(self.dim, self.start, self.stop - self.start)
        sizes = [*tensor.shape[: self.dim], -1, self.period, *tensor.shape[self.dim + 1 :]]
        return tensor.view(sizes).narrow(self.dim + 1, self.start, self.stop - self.start)


@dataclass(frozen=True)
class ScalePlan:
    """The map from wished factors to a rescaling: log factors(targets) = matrix @ log factors(wishes).

    Attributes:
        wishes: The blocks whose factor a method chooses: weights, and scales of norm layers.
        targets: The blocks that the rescaling multiplies: parameters and running statistics.
        matrix: float64, a row for each target and a column for each wish.
        outputs: float64, a row for each output of the model and a column for each wish: the same map for the factors
            of the outputs.
        graph: The analysis that the plan was made from; None for a chain of layers, and in copies of a method.
        drifts: Whether the plan keeps the function only approximately.
    """

    wishes: tuple[Block, ...]
    targets: tuple[Block, ...]
    matrix: Tensor
    outputs: Tensor
    graph: ScaleGraph | None = None
    drifts: bool = False

    def analyzed(self) -> ScaleGraph:
        """Return the analysis that the plan was made from.

        Raises:
            ValueError: If there is none.
        """
        if self.graph is None:
            raise ValueError(
                "plan: it has no graph, because it is a chain of layers or belongs to a copy of a method; use "
                "order='graph' and mode='exact', and construct the method again"
            )
        return self.graph

    def rows_that_follow(self, pulled: Tensor) -> list[int]:
        """Return the targets that follow at least one pulled wish; the others must not be written at all.

        Args:
            pulled: For each wish whether it is pulled.
        """
        rows: list[int] = self.matrix[:, pulled.cpu()].any(1).nonzero().flatten().tolist()
        return rows


class BlockTensors:
    """The tensors of some blocks, looked up in the model at each use.

    A stored tensor would go stale when the model moves to another device or a buffer is replaced.

    Args:
        model: The model.
        blocks: The blocks, in order.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[Block]) -> None:
        self._places: list[tuple[dict[str, Tensor], str]] = []
        self._slices: list[tuple[int, Block]] = []
        for i, block in enumerate(blocks):
            path, _, leaf = block.name.rpartition(".")
            owner = model.get_submodule(path)
            holder: dict[str, Tensor] = owner._buffers if leaf in owner._buffers else owner._parameters  # type: ignore[assignment]
            if holder.get(leaf) is None:
                raise ValueError(f"{block.name!r} is not a parameter or buffer; is it computed by a parametrization?")
            self._places.append((holder, leaf))
            if block.start is not None:
                self._slices.append((i, block))

    def parameters(self) -> list[tuple[int, nn.Parameter]]:
        """Return the parameters of the blocks that are not buffers, each with the position of its block."""
        return [(place, tensor) for place, tensor in enumerate(self._whole()) if isinstance(tensor, nn.Parameter)]

    def get(self) -> list[Tensor]:
        """Return the current tensor of each block, as a view."""
        tensors = self._whole()
        for i, block in self._slices:
            tensors[i] = block.of(tensors[i])
        return tensors

    def _whole(self) -> list[Tensor]:
        try:
            return [holder[leaf] for holder, leaf in self._places]
        except KeyError as error:
            raise ValueError(
                f"model: the tensor {error} was removed after the analysis (by pruning or a parametrization); create "
                "the method again"
            ) from None
