"""Labelled examples in memory: raw once, normalized as batches are taken.

Images stay uint8, so that a memory-mapped data set is shared by every process that reads it, and a batch
moves a quarter of the bytes. `Examples.batch` picks rows by index and normalizes them, which is all that a
training loop needs.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pliant._seeding import generator, permutation
from pliant._validation import check_number


@dataclass(frozen=True)
class Examples:
    """Some rows of a table of inputs, with a label each.

    Args:
        x: Inputs, one a row: uint8 images [N, C, H, W], or floating-point features, which are used as they
            are.
        y: One class index (int64) for every example; for every entry of `rows` where that is given.
        rows: Which rows of `x` the examples are; all of them in order by default.
        scale: Factor by which uint8 inputs are multiplied, per channel [C, 1, 1].
        shift: Number added after that, of the same shape.
    """

    x: Tensor
    y: Tensor
    rows: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None

    def __post_init__(self) -> None:
        n = len(self.x) if self.rows is None else len(self.rows)
        if len(self.y) != n:
            raise ValueError(f"y has {len(self.y)} labels for {n} examples; it must have one for each")
        if self.y.dtype != torch.int64:
            raise ValueError(f"y has dtype {self.y.dtype}; class indices must be torch.int64")
        if self.x.dtype != torch.uint8 and not self.x.is_floating_point():
            raise ValueError(f"x has dtype {self.x.dtype}; it must be torch.uint8 or floating-point")

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        return f"Examples({len(self)} of shape {self.shape}, {self.x.dtype})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.x.shape[1:])

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Take the examples at `index`, inputs normalized.

        Args:
            index: Positions among these examples.

        Returns:
            Inputs and labels, ready for a model.
        """
        # index_select: twenty times as fast as indexing for uint8 images.
        rows = index if self.rows is None else self.rows.index_select(0, index)
        x = self.x.index_select(0, rows)
        if x.dtype == torch.uint8:
            x = x.to(torch.float32)
            if self.scale is not None and self.shift is not None:
                x.mul_(self.scale).add_(self.shift)
        return x, self.y.index_select(0, index)

    def select(self, index: Tensor) -> "Examples":
        """Keep the examples at `index`, without copying inputs."""
        index = index.to(self.y.device)
        return replace(self, y=self.y[index], rows=index if self.rows is None else self.rows[index])

    def relabel(self, y: Tensor) -> "Examples":
        """Give every example a new label."""
        return replace(self, y=y)

    def permute_pixels(self, order: Tensor) -> "Examples":
        """Move pixel `order[i]` to place i in every input, the same for all channels.

        Args:
            order: A permutation of the positions: height x width of images, the features of vectors.

        Returns:
            Examples with a copy of the inputs: permuting once is cheaper than in every batch.
        """
        x = self.x if self.rows is None else self.x[self.rows]
        positions = x.flatten(2) if x.ndim == 4 else x.flatten(1)
        if len(order) != positions.shape[-1]:
            raise ValueError(f"order has {len(order)} entries; inputs have {positions.shape[-1]} positions")
        return replace(self, x=positions[..., order].view(x.shape), rows=None)

    def to(self, device: torch.device | str) -> "Examples":
        """Copy every tensor to a device."""
        return replace(
            self,
            **{name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)},
        )


@dataclass(frozen=True)
class Dataset:
    """A classification data set: what to learn from and what to be tested on.

    Args:
        name: How it is asked for.
        train: Examples to learn from.
        test: Examples to be tested on.
        classes: Name of each class, by index.
        fingerprint: Another one for other content; empty if it is not known.
    """

    name: str
    train: Examples
    test: Examples
    classes: tuple[str, ...] = field(repr=False)
    fingerprint: str = field(default="", repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return self.train.shape

    def holdout(self, fraction: float, seed: int) -> "Dataset":
        """Put a part of the training examples in the place of the test examples, which nobody sees then.

        This is how hyper-parameters are chosen without a look at the test set.

        Args:
            fraction: Part of the training examples to test on, in (0, 1).
            seed: Decides which ones.

        Returns:
            A data set without any of this one's test examples.
        """
        check_number("fraction", fraction, high=1.0, above=True, below=True)
        order = permutation(len(self.train), "holdout", seed)
        n = round(fraction * len(self.train))
        if not 0 < n < len(self.train):
            raise ValueError(
                f"fraction (selection.fraction) is {fraction}: of {len(self.train)} training examples that leaves none "
                "to test on, or none to learn from"
            )
        test, train = self.train.select(order[:n]), self.train.select(order[n:].sort().values)
        return replace(self, train=train, test=test)

    def first(self, n: int) -> "Dataset":
        """Keep only the first n training examples, as some papers do."""
        if not isinstance(n, int) or not 0 < n <= len(self.train):
            raise ValueError(f"first is {n!r}; it must be 1 … {len(self.train)}, the number of training examples")
        return replace(self, train=self.train.select(torch.arange(n)))

    def in_unit_range(self) -> "Dataset":
        """Scale images to [0, 1], whatever their mean and deviation; features stay as they are."""

        def scaled(examples: Examples) -> Examples:
            if examples.scale is None or examples.shift is None:
                return examples
            scale, shift = torch.full_like(examples.scale, 1 / 255), torch.zeros_like(examples.shift)
            return replace(examples, scale=scale, shift=shift)

        return replace(self, train=scaled(self.train), test=scaled(self.test))

    def project(self, features: int) -> "Dataset":
        """Reduce inputs to a few features by a random projection, the same for every data set of this size.

        Its entries are normal with variance 1/D for D inputs, so that features vary about as much as inputs do.

        Args:
            features: How many to keep, at most D.

        Returns:
            A data set of vectors.
        """
        size = torch.Size(self.shape).numel()
        if not isinstance(features, int) or not 0 < features <= size:
            raise ValueError(f"project is {features!r}; it must be 1 … {size}, the size of an input")
        device = self.train.x.device
        matrix = torch.randn(size, features, generator=generator("projection", size, features)).to(device) / size**0.5

        def projected(examples: Examples) -> Examples:
            parts = torch.split(torch.arange(len(examples), device=device), 4096)
            return Examples(torch.cat([examples.batch(part)[0].flatten(1) @ matrix for part in parts]), examples.y)

        return replace(self, train=projected(self.train), test=projected(self.test))

    def to(self, device: torch.device | str) -> "Dataset":
        """Copy every tensor to a device."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def from_tensors(
    name: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: tuple[str, ...] | None = None,
) -> Dataset:
    """Make a data set of tensors; uint8 images are normalized per channel by the training images.

    Args:
        name: How to call it.
        train: Inputs and int64 labels to learn from.
        test: Inputs and labels to be tested on.
        classes: Name of each class; their numbers by default.

    Returns:
        The data set.
    """
    for part, (x, y) in {"train": train, "test": test}.items():
        for what, value in {"inputs": x, "labels": y}.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"{part} {what} are {type(value).__name__}; they must be a torch.Tensor")
        if len(y) == 0:
            raise ValueError(f"{part} has no examples")
        if x.dtype == torch.uint8 and x.ndim != 4:
            raise ValueError(f"{part} images have shape {tuple(x.shape)}; uint8 images are [N, C, H, W]")
        if y.ndim != 1:
            raise ValueError(f"{part} labels have shape {tuple(y.shape)}; they must be [N]")
        if x.is_floating_point() and not all(rows.isfinite().all() for rows in torch.split(x, 4096)):
            raise ValueError(f"{part} inputs hold values that are not finite")
    if train[0].shape[1:] != test[0].shape[1:]:
        raise ValueError(f"train inputs have shape {tuple(train[0].shape[1:])}, test inputs {tuple(test[0].shape[1:])}")
    if train[0].dtype != test[0].dtype:
        raise ValueError(f"train inputs are {train[0].dtype}, test inputs {test[0].dtype}; they must be of one type")
    if classes is None:
        classes = tuple(str(i) for i in range(int(max(train[1].max(), test[1].max())) + 1))
    low, high = min(int(train[1].min()), int(test[1].min())), max(int(train[1].max()), int(test[1].max()))
    if low < 0 or high >= len(classes):
        raise ValueError(
            f"labels run from {low} to {high}; with {len(classes)} classes they are 0 … {len(classes) - 1}"
        )
    scale, shift = _normalization(train[0]) if train[0].dtype == torch.uint8 else (None, None)
    return Dataset(
        name,
        train=Examples(*train, scale=scale, shift=shift),
        test=Examples(*test, scale=scale, shift=shift),
        classes=classes,
    )


def _normalization(images: Tensor) -> tuple[Tensor, Tensor]:
    """Find a and b per channel so that a·x + b of uint8 images has mean 0 and deviation 1.

    From histograms: exact, and needs no floating-point copy of the images.
    """
    levels = torch.arange(256, dtype=torch.float64)
    scale, shift = [], []
    for channel in range(images.shape[1]):
        counts = torch.zeros(256, dtype=torch.float64)
        for part in torch.split(images[:, channel], 4096):
            counts += part.flatten().bincount(minlength=256)
        counts /= counts.sum()
        mean = counts @ levels
        std = (counts @ (levels - mean) ** 2).sqrt().clamp(min=1.0)
        scale.append(1 / std)
        shift.append(-mean / std)
    shape = (-1, 1, 1)
    return torch.stack(scale).float().view(shape), torch.stack(shift).float().view(shape)
