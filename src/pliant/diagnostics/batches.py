"""A batch of whatever form a training loop uses, and the samples in it.

A batch is one of:

- a tensor: inputs without a target;
- a pair `(inputs, target)`, where inputs are a tensor, a tuple (positional arguments) or a mapping (keyword arguments),
  and the target may be `None`; a longer tuple holds several positional inputs and the target last;
- a mapping: keyword arguments of the model, with the target under one of `TARGET_KEYS`, if there is one.

Anything else that can be iterated is a loader of such batches.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

LossFn = Callable[[Any, Any], Tensor]

TARGET_KEYS = ("labels", "label", "targets", "target")


@dataclass(frozen=True)
class Batch:
    """Inputs and target of some samples.

    Attributes:
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        target: What the loss compares with; `None` if there is none.
        size: The number of samples. Every tensor whose first dimension has this size is taken to be indexed by sample;
            others are shared.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    size: int

    @classmethod
    def of(cls, batch: Any) -> "Batch":
        """Read one batch of any of the module's forms.

        Raises:
            ValueError: If it holds no tensor of inputs.
        """
        if isinstance(batch, Batch):
            return batch
        inputs, target = batch, None
        if isinstance(batch, Mapping):
            key = next((key for key in TARGET_KEYS if key in batch), None)
            target = batch[key] if key is not None else None
            inputs = {k: v for k, v in batch.items() if k != key}
        elif isinstance(batch, (tuple, list)) and len(batch) > 1:
            *first, target = batch
            inputs = first[0] if len(first) == 1 else tuple(first)
        args, kwargs = (), {}
        if isinstance(inputs, Mapping):
            kwargs = dict(inputs)
        else:
            args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim]
        if not tensors or not len(tensors[0]):
            raise ValueError(
                "batch must be a tensor, (inputs, target) or a mapping with at least one sample, got "
                f"{type(batch).__name__} without one"
            )
        return cls(args, kwargs, target, len(tensors[0]))

    def select(self, index: Tensor | slice) -> "Batch":
        """Return the samples at some positions, as a batch."""
        args, kwargs, target = select((self.args, self.kwargs, self.target), self.size, index)
        size = len(torch.arange(self.size)[index])
        return Batch(args, kwargs, target, size)

    def on(self, model: nn.Module) -> "Batch":
        """Return the batch on the model's device, floating-point inputs in the precision of its parameters."""
        parameter = next(model.parameters(), None)
        if parameter is None:
            return self

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            # Two floating types of different width do not multiply; a target keeps its own, as the loss may want it.
            cast = leaf.is_floating_point() and parameter.is_floating_point()
            return leaf.to(parameter.device, parameter.dtype if cast else None)

        args, kwargs = tree_map(move, (self.args, self.kwargs))
        target = tree_map(lambda t: t.to(parameter.device) if isinstance(t, Tensor) else t, self.target)
        return Batch(args, kwargs, target, self.size)

    def forward(self, model: nn.Module) -> Any:
        """Return the model's output on the batch."""
        return model(*self.args, **self.kwargs)


def select(tree: Any, size: int, index: Tensor | slice) -> Any:
    """Return a nested structure with its sample-indexed tensors (first dimension of `size`) cut to some samples."""

    def cut(leaf: Any) -> Any:
        return leaf[index] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size else leaf

    return tree_map(cut, tree)


def gather(data: Any, samples: int) -> Batch:
    """Return a batch as it is, or the first samples of a loader as one batch.

    Args:
        data: A batch, or an iterable of batches.
        samples: How many samples to take of a loader.

    Raises:
        ValueError: If a loader is empty or its batches do not fit together.
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    if isinstance(data, (Batch, Tensor, Mapping, tuple, list)) or not isinstance(data, Iterable):
        return Batch.of(data)
    parts: list[Batch] = []
    for part in data:
        parts.append(Batch.of(part))
        if sum(p.size for p in parts) >= samples:
            break
    if not parts:
        raise ValueError("the loader must give at least one batch, got none")
    return _merge(parts).select(slice(0, samples))


def _merge(parts: list[Batch]) -> Batch:
    flat = [tree_flatten((part.args, part.kwargs, part.target)) for part in parts]
    first, spec = flat[0]
    for leaves, other in flat:
        if other != spec or list(map(type, leaves)) != list(map(type, first)):
            raise ValueError("batches of one loader must have one structure, got different ones")

    def join(pieces: tuple[Any, ...]) -> Any:
        by_sample = isinstance(pieces[0], Tensor) and pieces[0].ndim and len(pieces[0]) == parts[0].size
        return torch.cat(pieces) if by_sample else pieces[0]

    joined = [join(pieces) for pieces in zip(*(leaves for leaves, _ in flat), strict=True)]
    args, kwargs, target = tree_unflatten(joined, spec)
    return Batch(args, kwargs, target, sum(part.size for part in parts))


def sample_losses(loss_fn: LossFn, output: Any, batch: Batch) -> Tensor:
    """Return ℓ_i, the loss of each sample on its own: `loss_fn` on a batch of that sample alone.

    So the reduction of the loss does not matter, and a mean over tokens is each sample's own mean. A `loss_fn` that
    returns one number a sample is called once instead.

    Args:
        loss_fn: `loss_fn(output, target)`, a scalar or one number a sample.
        output: The model's output on the batch.
        batch: Its samples.

    Raises:
        ValueError: If the loss is neither.
    """
    value = loss_fn(output, batch.target)
    if value.ndim == 1 and len(value) == batch.size > 1:
        return value
    if value.numel() != 1:
        raise ValueError(f"loss_fn must return a scalar or {batch.size} numbers, got shape {tuple(value.shape)}")
    if batch.size == 1:
        return value.reshape(1)
    pairs = (select((output, batch.target), batch.size, slice(i, i + 1)) for i in range(batch.size))
    return torch.stack([loss_fn(out, target).reshape(()) for out, target in pairs])


def summed_loss(loss_fn: LossFn, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return Σℓ_i with its graph, and the ℓ_i without.

    If the loss of the whole batch is the mean or the sum of the ℓ_i, as most are, that is what carries the graph: one
    small graph instead of one for each sample.

    Args:
        loss_fn: `loss_fn(output, target)`.
        output: The model's output on the batch.
        batch: Its samples.
    """
    with torch.no_grad():
        losses = sample_losses(loss_fn, output, batch)
    whole = loss_fn(output, batch.target)
    total = losses.double().sum()
    if whole.numel() == 1:
        tolerance = torch.finfo(whole.dtype).eps ** 0.7
        for scaled in (whole * batch.size, whole):
            if torch.isclose(scaled.detach().double().reshape(()), total, rtol=tolerance, atol=0):
                return scaled.reshape(()), losses
    return sample_losses(loss_fn, output, batch).sum(), losses
