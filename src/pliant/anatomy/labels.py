"""Label tensors: an integer for every entry of a tensor, which stands for the scale of that entry.

The entries of a tensor may differ in scale: the output of a packed projection holds queries, keys and values. So every
tensor of a graph gets a *label tensor* of its own shape. Shape operations are run on labels as they are run on values,
so scales follow any sequence of reshapes, permutations and splits. Most label tensors hold a single label: they are
kept as expanded views, and operations run on the distinct entries only.

Two labels have a fixed meaning. `ONE` is the scale of values that no rescaling changes. `ANY` is the scale of zeros and
infinities, which are equal to any multiple of themselves.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ANY = -1
ONE = 0


def uniform(label: int, shape: Sequence[int]) -> Tensor:
    """Return a label tensor with a single label, as an expanded view."""
    return torch.tensor(label).expand(torch.Size(shape))


def compact(labels: Tensor) -> Tensor:
    """Return the labels with every expanded dimension reduced to one entry."""
    for dim, (size, stride) in enumerate(zip(labels.shape, labels.stride(), strict=True)):
        if stride == 0 and size > 1:
            labels = labels.narrow(dim, 0, 1)
    return labels


def single(labels: Tensor) -> int | None:
    """Return the label that all entries share, or None if they differ or there are no entries."""
    distinct = torch.unique(compact(labels))
    return int(distinct) if len(distinct) == 1 else None


def same_along(labels: Tensor, dim: int) -> bool:
    """Say whether the labels are constant along a dimension."""
    labels = compact(labels)
    return labels.shape[dim] <= 1 or bool((labels == labels.narrow(dim, 0, 1)).all())


def combine(left: Tensor, right: Tensor, rule: Callable[[int, int], int]) -> Tensor:
    """Combine two label tensors entry by entry, with broadcasting. The rule is called once for each pair of labels."""
    shape = torch.broadcast_shapes(left.shape, right.shape)  # type: ignore[no-untyped-call]
    first, second = torch.broadcast_tensors(compact(left), compact(right))  # type: ignore[no-untyped-call]
    if not first.numel():
        return uniform(ANY, shape)
    # Encode a pair of labels as one number: finding distinct numbers is much faster than finding distinct rows.
    base = int(second.max()) + 2
    distinct, where = torch.unique((first - ANY) * base + (second - ANY), return_inverse=True)
    results = torch.tensor([rule(pair // base + ANY, pair % base + ANY) for pair in distinct.tolist()])
    return tidy(results[where]).expand(shape)


def reduce(labels: Tensor, dims: Sequence[int], rule: Callable[[list[int]], int]) -> Tensor:
    """Reduce dimensions to size one. The rule is called once for each set of two or more labels."""
    dims = sorted({dim % labels.ndim for dim in dims}) if labels.ndim else []
    shape = [1 if dim in dims else size for dim, size in enumerate(labels.shape)]
    if not labels.numel():
        return uniform(ANY, shape)
    small = compact(labels)
    kept = [dim for dim in range(labels.ndim) if dim not in dims]
    rows = small.permute([*kept, *dims]).reshape([small.shape[dim] for dim in kept] + [-1])
    kept_sizes = rows.shape[:-1]
    rows = rows.reshape(-1, rows.shape[-1])
    if bool((rows == rows[:, :1]).all()):
        reduced = rows[:, 0]
    else:
        distinct, where = torch.unique(rows, dim=0, return_inverse=True)
        results = []
        for row in distinct.tolist():
            present = sorted(set(row))
            results.append(present[0] if len(present) == 1 else rule(present))
        reduced = torch.tensor(results, dtype=torch.int64)[where]
    sizes = iter(kept_sizes)
    reduced = reduced.reshape([1 if dim in dims else next(sizes) for dim in range(labels.ndim)])
    return tidy(reduced).expand(shape)


def tidy(labels: Tensor) -> Tensor:
    """Return the same labels, with each dimension along which they are constant turned into an expanded view."""
    shape = labels.shape
    for dim, (size, stride) in enumerate(zip(shape, labels.stride(), strict=True)):
        if size > 1 and stride and same_along(labels, dim):
            labels = labels.narrow(dim, 0, 1)
    return labels.expand(shape)
