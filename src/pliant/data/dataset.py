"""Labeled examples in memory. Inputs are stored raw; each batch is normalized when it is taken.

Images stay uint8: processes share a memory-mapped data set, and a batch moves a quarter of the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import torch
from torch import Tensor

from pliant._seeding import generator, permutation
from pliant._validation import check_number

TEST_FRACTION = 0.2
"""The fraction of each class that becomes the test set of data without one."""


@dataclass(frozen=True)
class Examples:
    """Inputs with labels, or a selection of their rows.

    Args:
        x: Inputs: uint8 images [N, C, H, W], floating-point features, which are not normalized, or int64 tokens [N, T].
        y: The class index (int64) of every example or of every token, or real targets [N, K]; in the order of `rows` if
            given.
        rows: The rows of `x` that are the examples; all rows in order by default.
        scale: Factor of uint8 inputs per channel [C, 1, 1].
        shift: Number added after scaling, of the same shape.
        source: The number of the text that each example comes from, if there may be several.
        characters: How many characters the targets of each example have, if they are tokens of a text.
    """

    x: Tensor
    y: Tensor
    rows: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    source: Tensor | None = None
    characters: Tensor | None = None

    def __post_init__(self) -> None:
        n = len(self.x) if self.rows is None else len(self.rows)
        if len(self.y) != n:
            raise ValueError(f"y has {len(self.y)} labels for {n} examples; it must have one for each")
        if self.y.dtype != torch.int64 and not (self.y.is_floating_point() and self.y.ndim == 2):
            raise ValueError(
                f"y has dtype {self.y.dtype} and shape {tuple(self.y.shape)}; "
                "it must be torch.int64 (classes), or floating-point of shape [N, K] (real targets)"
            )
        if self.x.dtype not in (torch.uint8, torch.int64) and not self.x.is_floating_point():
            raise ValueError(
                f"x has dtype {self.x.dtype}; it must be torch.uint8 (images), torch.int64 (tokens) or floating-point"
            )

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        return f"Examples({len(self)} of shape {self.shape}, {self.x.dtype})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.x.shape[1:])

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the examples at `index` with normalized inputs.

        Args:
            index: Positions among these examples.

        Returns:
            Inputs and labels, ready for a model.
        """
        # index_select is 20 times faster than indexing for uint8 images.
        rows = index if self.rows is None else self.rows.index_select(0, index)
        x = self.x.index_select(0, rows)
        if x.dtype == torch.uint8:
            x = x.to(torch.float32)
            if self.scale is not None and self.shift is not None:
                x.mul_(self.scale).add_(self.shift)
        return x, self.y.index_select(0, index)

    def select(self, index: Tensor) -> "Examples":
        """Return the examples at `index`, without copying inputs; targets in a row are not copied either."""
        first = int(index[0]) if len(index) else 0
        in_a_row = torch.equal(index, torch.arange(first, first + len(index), device=index.device))
        index = index.to(self.y.device)
        place = slice(first, first + len(index)) if in_a_row else index
        source, characters = (None if each is None else each[place] for each in (self.source, self.characters))
        rows = index if self.rows is None else self.rows[place]
        return replace(self, y=self.y[place], rows=rows, source=source, characters=characters)

    def from_source(self, source: int) -> "Examples":
        """Return the examples of one text."""
        assert self.source is not None
        return self.select((self.source == source).nonzero().flatten())

    def are_in(self, others: "Examples") -> Tensor:
        """Say for each example whether other examples hold its input, to the last bit."""
        known = set(others._digests())
        return torch.tensor([digest in known for digest in self._digests()], dtype=torch.bool)

    def _digests(self) -> list[bytes]:
        x = self.x if self.rows is None else self.x[self.rows]
        return [blake2b(each.numpy().tobytes(), digest_size=16).digest() for each in x.cpu().contiguous()]

    def relabel(self, y: Tensor) -> "Examples":
        """Return the examples with new labels."""
        return replace(self, y=y)

    def permute_pixels(self, order: Tensor) -> "Examples":
        """Move pixel `order[i]` to position i in every input and channel.

        Args:
            order: A permutation of the height x width positions of images, or of the features of vectors.

        Returns:
            Examples with a permuted copy of the inputs. Permuting once is cheaper than permuting every batch.
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
    """A classification data set.

    Args:
        name: The name that `load` takes.
        train: Training examples.
        test: Test examples.
        classes: The name of each class, by index.
        fingerprint: A digest of the content; empty if unknown.
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

    def holdout(self, fraction: float, seed: int, seen: Tensor | None = None) -> "Dataset":
        """Replace the test set by a random part of the training set, to choose hyperparameters.

        Args:
            fraction: The fraction of the training examples to hold out, in (0, 1).
            seed: Seed of the random split.
            seen: Which training examples the network has learned before. Others are held out, up to half of them; if
                there are none, any example.

        Returns:
            A data set without the original test examples.
        """
        check_number("fraction", fraction, high=1.0, above=True, below=True)
        order = permutation(len(self.train), "holdout", seed)
        n = round(fraction * len(self.train))
        if not 0 < n < len(self.train):
            raise ValueError(
                f"fraction (selection.fraction) is {fraction}; with {len(self.train)} training examples this leaves "
                "the training set or the test set empty"
            )
        if seen is not None and (new := order[~seen[order]]).numel() > 1:
            chosen = new[: min(n, len(new) // 2)]
            order, n = torch.cat([chosen, order[~torch.isin(order, chosen)]]), len(chosen)
        test, train = self.train.select(order[:n]), self.train.select(order[n:].sort().values)
        return replace(self, train=train, test=test)

    def first(self, n: int) -> "Dataset":
        """Keep only the first n training examples."""
        if not isinstance(n, int) or not 0 < n <= len(self.train):
            raise ValueError(f"first is {n!r}; it must be 1 … {len(self.train)}, the number of training examples")
        return replace(self, train=self.train.select(torch.arange(n)))

    def shuffled(self) -> "Dataset":
        """Return the data set with training examples in a fixed random order; files are often sorted by class."""
        return replace(self, train=self.train.select(permutation(len(self.train), "shuffle")))

    def in_unit_range(self) -> "Dataset":
        """Scale images to [0, 1] instead of mean 0 and standard deviation 1; features do not change."""

        def scaled(examples: Examples) -> Examples:
            if examples.scale is None or examples.shift is None:
                return examples
            scale, shift = torch.full_like(examples.scale, 1 / 255), torch.zeros_like(examples.shift)
            return replace(examples, scale=scale, shift=shift)

        return replace(self, train=scaled(self.train), test=scaled(self.test))

    def project(self, features: int) -> "Dataset":
        """Reduce inputs to a few features by a random projection that depends only on the sizes.

        For inputs of size D its entries are normal with variance 1/D, which about keeps the variance.

        Args:
            features: The number of features, at most D.

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
    """Make a data set from tensors; uint8 images are normalized per channel by the training images.

    Args:
        name: The name of the data set.
        train: Training inputs and int64 labels.
        test: Test inputs and labels.
        classes: The name of each class; the numbers by default.

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
        raise ValueError(
            f"train inputs are {train[0].dtype}, test inputs {test[0].dtype}; they must have the same dtype"
        )
    if classes is None:
        classes = tuple(str(i) for i in range(int(max(train[1].max(), test[1].max())) + 1))
    low, high = min(int(train[1].min()), int(test[1].min())), max(int(train[1].max()), int(test[1].max()))
    if low < 0 or high >= len(classes):
        raise ValueError(
            f"labels range from {low} to {high}; with {len(classes)} classes they must be 0 … {len(classes) - 1}"
        )
    scale, shift = _normalization(train[0]) if train[0].dtype == torch.uint8 else (None, None)
    return Dataset(
        name,
        train=Examples(*train, scale=scale, shift=shift),
        test=Examples(*test, scale=scale, shift=shift),
        classes=classes,
    )


def split_off_test(
    x: Tensor, y: Tensor, source: str, classes: Sequence[str] | None = None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Split a fixed random part of every class off for testing, at least one example.

    Args:
        x: Inputs.
        y: Labels.
        source: The file or folder that error messages name.
        classes: The names of the classes; their numbers by default.

    Returns:
        Training inputs and labels, test inputs and labels.
    """
    chosen = []
    for label in torch.unique(y).tolist():
        members = (y == label).nonzero().flatten()
        if len(members) < 2:
            name = repr(classes[label]) if classes else label
            raise ValueError(f"{source}: class {name} has {len(members)} example; a class must have at least 2")
        order = permutation(len(members), "split", label)
        chosen.append(members[order[: max(1, round(TEST_FRACTION * len(members)))]])
    is_test = torch.zeros(len(y), dtype=torch.bool)
    is_test[torch.cat(chosen)] = True
    return (x[~is_test], y[~is_test]), (x[is_test], y[is_test])


def _normalization(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return a and b per channel such that a·x + b has mean 0 and standard deviation 1 over uint8 images.

    Histograms make this exact, without a floating-point copy of the images.
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
