"""Batches in any form that a training loop uses, and the loss of each sample.

A batch is one of:

- a tensor: inputs without a target;
- a pair `(inputs, target)`. The inputs are a tensor, a tuple (positional arguments) or a mapping (keyword arguments).
  The target may be `None`. A longer tuple holds several positional inputs, and the target last;
- a mapping: keyword arguments of the model, with the target, if any, under one of `TARGET_KEYS`.

Any other iterable, and a list of tuples, is a loader of such batches.

A tensor is indexed by sample if its first dimension is as long as the batch; other tensors are shared by all samples.
This holds for inputs, targets and outputs.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from itertools import repeat
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from pliant._examples import TARGET_KEYS
from pliant._seeding import generators_of, undrawn
from pliant._validation import check_positive_int

LossFn = Callable[[Any, Any], Tensor]

IGNORED = -100
"""The class index of targets that do not count, as in `torch.nn.functional.cross_entropy`."""

_CAN_BE_CUT = "tensors in tuples, lists, dictionaries or types registered with `torch.utils._pytree`"


@dataclass(frozen=True)
class Batch:
    """Inputs and target of some samples.

    Attributes:
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        target: The target of the loss, or `None`.
        size: The number of samples.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    size: int

    @classmethod
    def of(cls, batch: Any) -> "Batch":
        """Read a batch in any of the forms above.

        Raises:
            ValueError: If it does not hold a tensor of inputs.
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
        """Return some samples as a batch.

        Raises:
            ValueError: If the target cannot be cut into samples.
        """
        _check_target(self)
        args, kwargs, target = select((self.args, self.kwargs, self.target), self.size, index)
        size = len(torch.arange(self.size)[index])
        return Batch(args, kwargs, target, size)

    def on(self, model: nn.Module) -> "Batch":
        """Return the batch on the model's device, with floating-point inputs in a precision that the model has."""
        parameter = next(model.parameters(), None)
        if parameter is None:
            return self
        held = {each.dtype for each in model.parameters()}

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            # torch does not multiply two floating types. The target keeps its type, because the loss may need it.
            cast = leaf.is_floating_point() and parameter.is_floating_point() and leaf.dtype not in held
            return _ordinary(leaf.to(parameter.device, parameter.dtype if cast else None))

        args, kwargs = tree_map(move, (self.args, self.kwargs))
        target = tree_map(lambda t: _ordinary(t.to(parameter.device)) if isinstance(t, Tensor) else t, self.target)
        return Batch(args, kwargs, target, self.size)

    def forward(self, model: nn.Module) -> Any:
        """Return the model's output on the batch."""
        return model(*self.args, **self.kwargs)


def select(tree: Any, size: int, index: Tensor | slice) -> Any:
    """Return a nested structure with its tensors indexed by sample cut to some samples."""
    return tree_map(lambda leaf: leaf[index] if _by_sample(leaf, size) else leaf, tree)


def _by_sample(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == size


def _ordinary(tensor: Tensor) -> Tensor:
    """Return a tensor that autograd can save. A tensor made in inference mode is copied."""
    return tensor.clone() if tensor.is_inference() else tensor


def gather(data: Any, samples: int) -> Batch:
    """Return a batch, or the first samples of a loader as one batch.

    Random generators, including the loader's own, are left as they were.

    Args:
        data: A batch, or an iterable of batches.
        samples: How many samples to take from a loader.

    Raises:
        ValueError: If a loader is empty, or its batches have different structures.
    """
    check_positive_int("samples", samples)
    # A collated batch may be a list of tensors, lists or mappings, but not of tuples.
    batches = isinstance(data, list) and bool(data) and all(isinstance(part, tuple) for part in data)
    single = isinstance(data, (Batch, Tensor, Mapping, tuple, list)) and not batches
    if single or not isinstance(data, Iterable):
        return Batch.of(data)
    parts: list[Batch] = []
    with undrawn(generators=generators_of(data)):
        for part in data:
            parts.append(Batch.of(part))
            if sum(p.size for p in parts) >= samples:
                break
    if not parts:
        raise ValueError("the loader must give at least one batch, got none")
    return _merge(parts).select(slice(0, samples))


def _merge(parts: list[Batch]) -> Batch:
    for part in parts:
        _check_target(part)
    flat = [tree_flatten((part.args, part.kwargs, part.target)) for part in parts]
    first, spec = flat[0]
    for leaves, other in flat:
        if other != spec or list(map(type, leaves)) != list(map(type, first)):
            raise ValueError("the batches of a loader must have the same structure, got different ones")

    def join(pieces: tuple[Any, ...]) -> Any:
        if not _by_sample(pieces[0], parts[0].size):
            return pieces[0]
        try:
            return torch.cat(pieces)
        except RuntimeError as error:
            shapes = " and ".join(dict.fromkeys(str(tuple(piece.shape[1:])) for piece in pieces))
            raise ValueError(f"samples of one loader must have one shape to make a batch, got {shapes}") from error

    joined = [join(pieces) for pieces in zip(*(leaves for leaves, _ in flat), strict=True)]
    args, kwargs, target = tree_unflatten(joined, spec)
    return Batch(args, kwargs, target, sum(part.size for part in parts))


def sample_losses(loss_fn: LossFn, output: Any, batch: Batch) -> Tensor:
    """Return ℓ_i, the loss of each sample: `loss_fn` on a batch of that sample alone.

    So reduction `mean` and `sum` give the same, and a mean over tokens is taken within each sample. A mean that weights
    samples, such as by class, loses the weights; a sum keeps them. A `loss_fn` that returns one number per sample is
    called only once, on the whole batch.

    Args:
        loss_fn: `loss_fn(output, target)`, a scalar or one number per sample.
        output: The model's output on the batch.
        batch: The samples.

    Raises:
        ValueError: If the loss has another shape, if output or target cannot be cut into samples, or if a sample alone
            has a NaN loss and the batch does not.
    """
    losses, value = _losses(loss_fn, output, batch)
    if losses.isnan().any() and value.isfinite().all():
        raise ValueError(
            "the loss of a sample is NaN when it is taken alone, but the loss of the batch is not. All targets of the "
            "sample may be ignored; leave such samples out, or pass a loss with reduction='sum' or 'none'"
        )
    return losses


def _losses(loss_fn: LossFn, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return ℓ_i and the loss of the whole batch."""
    value = loss_fn(output, batch.target)
    if value.ndim == 1 and len(value) == batch.size > 1:
        return value, value
    if value.numel() != 1:
        raise ValueError(f"loss_fn must return a scalar or {batch.size} numbers, got shape {tuple(value.shape)}")
    if batch.size == 1:
        return value.reshape(1), value
    _check_cuts(output, batch)
    losses = [loss_fn(*pair).reshape(()) for pair in _apart((output, batch.target), batch.size)]
    return torch.stack(losses), value


def _apart(tree: Any, size: int) -> Iterator[Any]:
    """Yield each sample of a nested structure.

    Tensors are split once, because the derivative of a slice would have the size of the batch for every sample. The
    pieces are copies, so that a loss may write into them.
    """
    leaves, spec = tree_flatten(tree)
    pieces = [map(Tensor.clone, leaf.split(1)) if _by_sample(leaf, size) else repeat(leaf, size) for leaf in leaves]
    for sample in zip(*pieces, strict=True):
        yield tree_unflatten(list(sample), spec)


def _check_cuts(output: Any, batch: Batch) -> None:
    """Raise if output or target holds an object whose tensors cannot be found, so that it would count as shared."""
    leaves = tree_leaves(output)
    unseen = next((leaf for leaf in leaves if is_dataclass(leaf)), output)
    if unseen is not output or not any(_by_sample(leaf, batch.size) for leaf in leaves):
        raise ValueError(
            f"the model's output must have a row for each of the {batch.size} samples and be made of {_CAN_BE_CUT}, "
            f"got {_described(unseen)}"
        )
    _check_target(batch)


def _check_target(batch: Batch) -> None:
    def listed(node: Any) -> bool:
        plain = isinstance(node, (tuple, list)) and len(node) == batch.size
        return plain and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(node))

    for leaf in tree_leaves(batch.target, is_leaf=listed):
        if leaf is not None and not isinstance(leaf, (Tensor, Number, str)):
            raise ValueError(f"the target must be made of {_CAN_BE_CUT}, got {_described(leaf)}")


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def mean_loss(loss_fn: LossFn, output: Any, batch: Batch) -> float:
    """Return the mean of the ℓ_i. If the loss of the whole batch is neither their mean nor their sum, return that loss.

    Args:
        loss_fn: `loss_fn(output, target)`.
        output: The model's output on the batch.
        batch: The samples.
    """
    losses, whole = _losses(loss_fn, output, batch)
    reduced = whole.numel() > 1 or any(_is_sum(factor, whole, losses) for factor in (batch.size, 1))
    return float(losses.double().mean() if reduced else whole.double().sum())


class Summed(NamedTuple):
    """The losses of a batch's samples.

    Attributes:
        total: Their sum, with its graph.
        losses: The ℓ_i, without a graph.
        reduced: Whether the loss of the whole batch is their mean or their sum.
    """

    total: Tensor
    losses: Tensor
    reduced: bool


def summed_loss(loss_fn: LossFn, output: Any, batch: Batch, apart: bool = False) -> Summed:
    """Return Σℓ_i with its graph, and the ℓ_i without a graph.

    Most losses of a whole batch are the mean or the sum of the ℓ_i. Then that loss carries the graph, which is smaller
    than one graph per sample. Its value and its derivative by the output decide. Losses with class weights, ignored
    targets or comparisons between samples are neither. Such a loss is treated as a mean, times the number of samples.

    Args:
        loss_fn: `loss_fn(output, target)`.
        output: The model's output on the batch.
        batch: The samples.
        apart: Whether the total must be Σℓ_i even then.

    Raises:
        ValueError: As `sample_losses`, if `apart`.
    """
    with torch.enable_grad():
        losses, slopes = _with_slopes(lambda out: _losses(loss_fn, out, batch)[0], output)
        whole, slopes_of_whole = _with_slopes(lambda out: loss_fn(out, batch.target), output)
    by_value = [factor for factor in (batch.size, 1) if whole.numel() == 1 and _is_sum(factor, whole, losses)]
    # If all slopes are zero, they do not show whether the second derivatives are equal.
    told = whole.numel() == 1 and any(bool(slope.any()) for slope in slopes)
    if told:
        for factor in by_value:
            pairs = zip((factor * slope for slope in slopes_of_whole), slopes, strict=True)
            if all(_near(ours, theirs, theirs.dtype) for ours, theirs in pairs):
                return Summed(factor * loss_fn(output, batch.target).reshape(()), losses, True)
    # A loss that is NaN or infinite equals nothing, which does not mean that it has weights.
    reduced = whole.numel() > 1 or not bool(whole.isfinite()) or (bool(by_value) and not told)
    if not apart and whole.numel() == 1 and (told or not by_value):
        return Summed(batch.size * loss_fn(output, batch.target).reshape(()), losses, reduced)
    return Summed(sample_losses(loss_fn, output, batch).sum(), losses, reduced)


def _is_sum(factor: int, whole: Tensor, losses: Tensor) -> bool:
    """Return whether `factor · whole` is the sum of the losses, up to rounding relative to their absolute values."""
    losses = losses.double()
    error = (factor * whole.double().sum() - losses.sum()).abs()
    return bool(error <= torch.finfo(whole.dtype).eps ** 0.7 * losses.abs().sum())


def _with_slopes(loss: Callable[[Any], Tensor], output: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a loss without its graph, and the derivatives of its sum by the tensors of the output."""
    free = tree_map(lambda leaf: leaf.detach().requires_grad_() if _smooth(leaf) else leaf, output)
    inputs = [leaf for leaf in tree_leaves(free) if _smooth(leaf)]
    # Copies of the inputs, because a loss may write into its arguments.
    value = loss(tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, free))
    if not inputs or not value.requires_grad:
        return value.detach(), ()
    slopes = torch.autograd.grad(value.sum(), inputs, allow_unused=True, materialize_grads=True)
    return value.detach(), slopes


def _smooth(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()) and leaf.numel() > 0


def _near(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two tensors are equal up to rounding relative to the largest entry."""
    return bool((ours - theirs).abs().max() <= torch.finfo(dtype).eps ** 0.7 * theirs.abs().max())


def move_classes_last(output: Any, target: Any) -> Tensor:
    """Return logits as [samples, …, classes], from that form or the form of torch's losses, [samples, classes, …].

    Args:
        output: The logits.
        target: Class indices, of the shape of `output` without the classes.

    Raises:
        ValueError: If output and target do not have these shapes, or both dimensions could hold the classes.
    """
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or target.is_floating_point():
        raise ValueError("it needs a tensor of logits and integer labels")
    dims = {1, output.ndim - 1} if output.ndim > 1 else set()
    places = [dim for dim in dims if output.shape[:dim] + output.shape[dim + 1 :] == target.shape]
    if not places or output.shape[places[0]] < 2:
        raise ValueError(
            "it needs logits of at least two classes, [samples, …, classes] or [samples, classes, …], and a label for "
            f"each of the others, got shapes {tuple(output.shape)} and {tuple(target.shape)}"
        )
    if len(places) > 1:
        raise ValueError(f"outputs of shape {tuple(output.shape)} do not show which dimension holds the classes")
    return output.movedim(places[0], -1)


def error_rate(output: Tensor, target: Tensor) -> float:
    """Return the fraction of samples whose largest output is not at the target class.

    The result is NaN if no target counts, or if an output that counts is NaN or +inf.

    Args:
        output: Logits, [samples, …, classes].
        target: Class indices of the shape of `output` without the classes. Targets of `IGNORED` do not count.

    Example:
        >>> error_rate(torch.eye(2), torch.tensor([0, 0]))
        0.5
    """
    if output.shape[:-1] != target.shape:
        raise ValueError(
            f"target must have the output's shape without classes, got {tuple(target.shape)} for {tuple(output.shape)}"
        )
    counted = target != IGNORED
    output, target = output[counted], target[counted]
    if not (output < math.inf).all():  # −inf rules a class out
        return math.nan
    return float((output.argmax(-1) != target).double().mean())
