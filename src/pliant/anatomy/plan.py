"""A rescaling of a model, as a linear map: wished log-factors in, log-scales of what is written out.

Proportional rescalings form a linear space in the logarithms of the factors (docs/proportionality.md), so all that a
method needs at run time is a matrix. How it comes about, from a chain of layers or from an exported graph, is the
business of the module that builds the plan.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Block:
    """A parameter or buffer of a model, or a slice of one along its first dimension or another.

    Attributes:
        name: Its name in the model's `named_parameters()` or `named_buffers()`.
        dim: The dimension that the slice cuts.
        start: Where the slice starts; `None` for the whole tensor.
        stop: Where it ends (exclusive); `None` for the whole tensor.
        period: The slice repeats every so many entries (queries, keys and values may lie interleaved, head by
            head); `None` for one slice.
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
        """Return the block of a whole tensor, as a view."""
        if self.start is None or self.stop is None:
            return tensor
        if self.period is None:
            return tensor.narrow(self.dim, self.start, self.stop - self.start)
        sizes = [*tensor.shape[: self.dim], -1, self.period, *tensor.shape[self.dim + 1 :]]
        return tensor.view(sizes).narrow(self.dim + 1, self.start, self.stop - self.start)


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
    matrix: Tensor
    outputs: Tensor


class BlockTensors:
    """The tensors of some blocks, looked up in the model whenever asked.

    A tensor that was fetched once goes stale when the model moves to another device or a buffer is replaced, so
    what is kept is where to look.

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
                raise ValueError(f"{block.name!r} is no parameter or buffer; is it computed by a parametrization?")
            self._places.append((holder, leaf))
            if block.start is not None:
                self._slices.append((i, block))

    def parameters(self) -> list[tuple[int, nn.Parameter]]:
        """Return the parameters among them, or those that hold them, each with its place; the others are buffers."""
        return [(place, tensor) for place, tensor in enumerate(self._whole()) if isinstance(tensor, nn.Parameter)]

    def get(self) -> list[Tensor]:
        """Return the tensors, or views of them, as the model holds them now."""
        tensors = self._whole()
        for i, block in self._slices:
            tensors[i] = block.of(tensors[i])
        return tensors

    def _whole(self) -> list[Tensor]:
        try:
            return [holder[leaf] for holder, leaf in self._places]
        except KeyError as error:
            raise ValueError(
                f"model: a tensor {error} is gone since it was analyzed (pruning, or a parametrization that was put on "
                "it); make the method anew"
            ) from None
