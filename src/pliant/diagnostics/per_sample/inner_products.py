"""Inner products of the per-sample gradients of one parameter, from factors far smaller than the gradients.

A parameter is seen as a matrix [rows, columns]. Each *use* of it in the forward pass contributes to the gradient of
every sample, and can return its contribution for some rows at a time. The gradient is the sum over uses, so the
contributions of several uses (a layer called twice, tied weights) are summed before they are multiplied.

For a linear layer the gradient of sample i is Σ_t δ_it a_itᵀ over positions t. Its inner products come in two ways:

- pairs: ⟨g_i, g_j⟩ = Σ_{t,s} (a_it·a_js)(δ_it·δ_js) takes (MT)²(rows + columns) multiplications, without a gradient;
- blocks: the gradients of some rows, formed for all samples, take M(M + T)·rows·columns multiplications.

The cheaper way is taken. Products are accumulated in float64, because a Gram matrix squares the condition number.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

# The largest memory for gradients that must be held for all samples.
HELD_BYTES = 4 * 2**30
# Working memory for a block of gradients, and for the float64 products of pairs or of parts of a block.
BLOCK_BYTES = 64 * 2**20
PRODUCT_BYTES = 32 * 2**20
# Products are symmetric, so this many rows are computed at a time, and only from the diagonal to the right.
SAMPLES_AT_ONCE = 64


class Use(Protocol):
    """The contribution of one use of a parameter to the gradients of all samples."""

    def block(self, rows: Tensor) -> Tensor:
        """Return the contribution to some rows, [samples, rows, columns]."""


@dataclass(frozen=True)
class Dense:
    """A contribution in full: biases, norm layers, small parameters.

    Attributes:
        gradients: [samples, rows, columns].
    """

    gradients: Tensor

    def block(self, rows: Tensor) -> Tensor:
        """Return the contribution to some rows."""
        return self.gradients.index_select(1, rows)


@dataclass(frozen=True)
class Outer:
    """Σ_t left_t right_tᵀ: linear layers and matrix products.

    Attributes:
        left: [samples, positions, rows].
        right: [samples, positions, columns].
    """

    left: Tensor
    right: Tensor
    groups: ClassVar[int] = 1

    def block(self, rows: Tensor) -> Tensor:
        """Return the contribution to some rows."""
        return self.left.index_select(2, rows).transpose(1, 2) @ self.right

    def outer(self) -> "Outer":
        """Return the factors themselves."""
        return self

    @property
    def positions(self) -> int:
        """How many outer products a sample's gradient is the sum of."""
        return self.left.shape[1]


@dataclass(frozen=True)
class Window:
    """How a convolution cuts its input into patches."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    def pad(self, x: Tensor) -> Tensor:
        """Return an input with the convolution's padding."""
        return functional.pad(x, [width for pair in reversed(self.padding) for width in pair])

    def patches(self, x: Tensor) -> Tensor:
        """Return [samples, channels × kernel entries, positions] of an input [samples, channels, …]."""
        x = self.pad(x)
        for dim, (k, step, gap) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True), 2):
            x = x.unfold(dim, gap * (k - 1) + 1, step)[..., ::gap]
        space = len(self.kernel)
        order = (0, 1, *range(2 + space, 2 + 2 * space), *range(2, 2 + space))
        return x.permute(order).flatten(2 + space).flatten(1, 1 + space)


@dataclass(frozen=True)
class Convolution:
    """A convolution: an outer product at every output position, over the patch of the input under the kernel.

    Attributes:
        inputs: [samples × copies, channels, …], where copies are positions merged into the first dimension.
        deltas: Gradients at the output, [samples × copies, rows, …].
        window: The geometry.
        groups: The convolution's groups.
        samples: The number of samples.
    """

    inputs: Tensor
    deltas: Tensor
    window: Window
    groups: int
    samples: int

    def block(self, rows: Tensor) -> Tensor:
        """Return the contribution to some rows, from one convolution with a group for every sample."""
        window, count = self.window, len(self.inputs)
        deltas, groups = self.deltas, self.groups
        if groups == 1:
            deltas = deltas.index_select(1, rows)
        x = window.pad(self.inputs)
        size = (count * deltas.shape[1], x.shape[1] // groups, *window.kernel)
        weight_gradient = (conv1d_weight, conv2d_weight, conv3d_weight)[len(window.kernel) - 1]
        flat: Tensor = weight_gradient(  # type: ignore[no-untyped-call]
            x.reshape(1, -1, *x.shape[2:]),
            size,
            deltas.reshape(1, -1, *deltas.shape[2:]),
            stride=window.stride,
            dilation=window.dilation,
            groups=count * groups,
        )
        gradient = flat.reshape(self.samples, -1, deltas.shape[1], math.prod(size[1:])).sum(1)
        return gradient if groups == 1 else gradient.index_select(1, rows)

    def outer(self) -> Outer:
        """Return the factors of a linear layer that is equal to this convolution, which must have one group."""
        patches = self.window.patches(self.inputs).transpose(1, 2)
        left = self.deltas.flatten(2).transpose(1, 2)
        return Outer(left.reshape(self.samples, -1, left.shape[2]), patches.reshape(self.samples, -1, patches.shape[2]))

    @property
    def positions(self) -> int:
        """How many outer products a sample's gradient is the sum of."""
        return self.deltas[0, 0].numel() * (len(self.deltas) // self.samples)


@dataclass(frozen=True)
class Lookup:
    """An embedding: the gradient at a position goes to the row that is looked up there.

    Attributes:
        index: [samples, positions].
        deltas: [samples, positions, columns].
        rows: The number of rows of the table.
    """

    index: Tensor
    deltas: Tensor
    rows: int

    def block(self, rows: Tensor) -> Tensor:
        """Return the contribution to some rows."""
        place = torch.full((self.rows,), -1, device=rows.device)
        place[rows] = torch.arange(len(rows), device=rows.device)
        where = place[self.index]
        sample, position = (where >= 0).nonzero(as_tuple=True)
        flat = sample * len(rows) + where[sample, position]
        gradient = self.deltas.new_zeros(len(self.index) * len(rows), self.deltas.shape[2])
        gradient.index_add_(0, flat, self.deltas[sample, position])
        return gradient.reshape(len(self.index), len(rows), -1)

    def used(self) -> Tensor:
        """Return the rows that were looked up."""
        used: Tensor = torch.unique(self.index)
        return used


@dataclass(frozen=True)
class Rows:
    """A contribution to consecutive rows: the use of a part of a parameter.

    Attributes:
        part: The contribution to the part.
        start: The first row of the part.
        count: The number of rows of the part.
    """

    part: Outer | Dense
    start: int
    count: int

    def block(self, rows: Tensor) -> Tensor:
        """Return the contribution to some rows."""
        inside = (rows >= self.start) & (rows < self.start + self.count)
        part = self.part.block(rows[inside] - self.start)
        block = part.new_zeros(len(part), len(rows), part.shape[2])
        block[:, inside] = part
        return block


def matrix_shape(weight: Tensor) -> tuple[int, int]:
    """Return the shape [rows, columns] of a weight seen as a matrix: its first dimension, and all others."""
    rows = len(weight) if weight.ndim else 1
    return rows, weight.numel() // max(rows, 1)


def check_memory(parameters: Iterable[Tensor], samples: int, what: str) -> None:
    """Raise a ValueError if the gradients of all samples by some parameters are too large to hold.

    Args:
        parameters: The parameters.
        samples: The number of samples.
        what: Their names, and why the gradients must be held.
    """
    needed = sum(parameter.numel() * parameter.element_size() for parameter in parameters) * samples
    if needed > HELD_BYTES:
        raise ValueError(
            f"the gradients of {samples} samples must be held for {what}, which needs {needed / 2**30:.1f} GiB; pass "
            "fewer samples, or write the layer with functions that have a rule"
        )


def gram(uses: Sequence[Use], samples: int, parameter: Tensor) -> Tensor:
    """Return ⟨g_i, g_j⟩ for all pairs of samples, in float64.

    Args:
        uses: All uses of one parameter.
        samples: The number of samples M.
        parameter: The parameter.

    Returns:
        [M, M].
    """
    if not uses:
        return torch.zeros(samples, samples, dtype=torch.float64, device=parameter.device)
    rows, columns = matrix_shape(parameter)
    outers = [use for use in uses if isinstance(use, Outer | Convolution) and use.groups == 1]
    if len(outers) == len(uses):
        positions = sum(use.positions for use in outers)
        if samples * positions**2 * (rows + columns) <= (positions + samples) * rows * columns:
            factors = [use.outer() for use in outers]
            return _gram_by_pairs(
                torch.cat([factor.left for factor in factors], 1), torch.cat([factor.right for factor in factors], 1)
            )
    return _gram_by_blocks(uses, samples, rows, columns, parameter.device)


def _gram_by_pairs(left: Tensor, right: Tensor) -> Tensor:
    samples, positions, _ = left.shape
    left, right = left.double().flatten(0, 1), right.double().flatten(0, 1)
    step = min(SAMPLES_AT_ONCE, max(1, PRODUCT_BYTES // (8 * samples * positions**2)))
    total = left.new_zeros(samples, samples)
    for start in range(0, samples, step):
        part, rest = slice(start * positions, (start + step) * positions), slice(start * positions, None)
        pairs = (left[part] @ left[rest].T).mul_(right[part] @ right[rest].T)
        total[start : start + step, start:] = pairs.reshape(-1, positions, samples - start, positions).sum((1, 3))
    return _mirror(total)


def _gram_by_blocks(uses: Sequence[Use], samples: int, rows: int, columns: int, device: torch.device) -> Tensor:
    lookups = [use for use in uses if isinstance(use, Lookup)]
    # Rows that were not looked up have no gradient, and a batch looks up few rows of a vocabulary.
    index = (
        torch.unique(torch.cat([use.used() for use in lookups]))
        if len(lookups) == len(uses)
        else torch.arange(rows, device=device)
    )
    total = torch.zeros(samples, samples, dtype=torch.float64, device=device)
    step = max(1, BLOCK_BYTES // (4 * samples * columns))
    for part in index.split(step):
        block = uses[0].block(part)
        for use in uses[1:]:
            block = block + use.block(part)
        for piece in torch.split(block.reshape(samples, -1), max(1, PRODUCT_BYTES // (8 * samples)), dim=1):
            _add_products(total, piece.double())
    return _mirror(total)


def _add_products(total: Tensor, factor: Tensor) -> None:
    """Add factor · factorᵀ to the blocks on the diagonal and right of it."""
    for start in range(0, len(total), SAMPLES_AT_ONCE):
        part = slice(start, start + SAMPLES_AT_ONCE)
        total[part, start:].addmm_(factor[part], factor[start:].T)


def _mirror(upper: Tensor) -> Tensor:
    return upper.triu() + upper.triu(1).T
