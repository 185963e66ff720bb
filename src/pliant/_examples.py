"""Labeled data in memory: from a pair, a data set, or an iterable of batches."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, IterableDataset, default_collate

from pliant._seeding import drawing_for, generators_of, permutation, undrawn

TARGET_KEYS = ("labels", "label", "targets", "target")
"""The keys under which a mapping may hold the target."""


@dataclass(frozen=True)
class Examples:
    """Inputs and targets in memory, on one device.

    Attributes:
        inputs: A tensor, a tuple of arguments or a dictionary of keyword arguments.
        targets: One target for each example.
    """

    inputs: Any
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def are_classes(self) -> bool:
        """Whether each target is one whole number."""
        return self.targets.ndim == 1 and not self.targets.is_floating_point() and not self.targets.is_complex()

    def take(self, index: Tensor) -> "Examples":
        """Return some of the examples.

        Example:
            >>> Examples(torch.eye(3), torch.tensor([5, 6, 7])).take(torch.tensor([2])).targets
            tensor([7])
        """
        return Examples(tree_map(lambda leaf: leaf[index], self.inputs), self.targets[index])


def gather(
    argument: str, data: Any, most: int, *, unlabeled: bool = False, seed: int = 0, device: Any = "cpu"
) -> Examples:
    """Bring data into memory.

    Random generators, including a loader's own, are left as they were.

    Args:
        argument: The name of the argument, for errors.
        data: A pair (inputs, targets), a data set of such pairs, or an iterable of such batches. In place of a pair, a
            mapping may hold the targets under one of `TARGET_KEYS`, and keyword arguments of the model.
        most: How many examples to take at most: of a pair or a data set a random choice, of an iterable the first.
        unlabeled: Whether inputs without targets are allowed; their targets become zeros.
        seed: Decides the random choice.
        device: Where to hold them.

    Raises:
        ValueError: If the data does not have one of the forms.
    """
    with undrawn(generators=generators_of(data)), drawing_for("data", seed):
        if isinstance(data, IterableDataset):
            data = default_collate(list(islice(data, most)))
        elif isinstance(data, Dataset):
            chosen = permutation(len(data), "examples", seed)[:most].tolist()  # type: ignore[arg-type]
            data = default_collate([data[i] for i in chosen])
        elif _as_pair(data, unlabeled) is None:
            data = _concatenate(argument, data, most, unlabeled)
    pair = _as_pair(data, unlabeled)
    if pair is None:
        raise ValueError(
            f"{argument}: a {type(data).__name__} is not allowed; pass a pair (inputs, targets), a data set of such "
            "pairs, or an iterable of such batches"
        )
    inputs, targets = tree_map(lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, pair)
    lengths = {len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)} | {len(targets)}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"{argument}: inputs and targets have {sorted(lengths)} examples; the numbers must agree")
    found = Examples(inputs, targets)
    return found if len(found) <= most else found.take(permutation(len(found), "examples", seed)[:most])


def _concatenate(argument: str, batches: Iterable[Any], most: int, unlabeled: bool) -> Any:
    found: list[Any] = []
    try:
        for batch in batches:
            pair = _as_pair(batch, unlabeled)
            if pair is None:
                hint = "; if there are only inputs, pass labels='random'" if isinstance(batch, Tensor) else ""
                raise ValueError(f"a batch is a {type(batch).__name__}{hint}")
            found.append(pair)
            if sum(len(targets) for _, targets in found) >= most:
                break
        if not found:
            raise ValueError("there is no batch")
        return tree_map(lambda *leaves: torch.cat(leaves), *found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{argument}: its batches are not pairs (inputs, targets) of equal form: {error}") from error


def _as_pair(batch: Any, unlabeled: bool) -> tuple[Any, Tensor] | None:
    if isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    if isinstance(batch, Mapping):
        key = next((key for key in TARGET_KEYS if isinstance(batch.get(key), Tensor)), None)
        inputs = {name: value for name, value in batch.items() if name != key}
        if key is not None:
            return inputs, batch[key]
        return _without_targets(inputs) if unlabeled else None
    if isinstance(batch, list | tuple) and len(batch) == 1:
        batch = batch[0]
    return _without_targets(batch) if unlabeled and isinstance(batch, Tensor) and batch.ndim > 0 else None


def _without_targets(inputs: Any) -> tuple[Any, Tensor] | None:
    first = next((leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim > 0), None)
    return None if first is None else (inputs, torch.zeros(len(first), dtype=torch.int64))
