"""Labeled data in memory: from a pair, a data set, or an iterable of batches."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, default_collate

from pliant._seeding import permutation


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

    Args:
        argument: The name of the argument, for errors.
        data: A pair (inputs, targets), a data set of such pairs, or an iterable of such batches.
        most: How many examples to take at most: of a pair or a data set a random choice, of an iterable the first.
        unlabeled: Whether inputs without targets are allowed; their targets become zeros.
        seed: Decides the random choice.
        device: Where to hold them.

    Raises:
        ValueError: If the data does not have one of the forms.
    """
    if isinstance(data, Dataset):
        chosen = permutation(len(data), "examples", seed)[:most].tolist()  # type: ignore[arg-type]
        data = default_collate([data[i] for i in chosen])
    elif not _is_pair(data) and not (unlabeled and isinstance(data, Tensor)):
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
        raise ValueError(f"{argument}: inputs and targets have {sorted(lengths)} examples; they must have equally many")
    found = Examples(inputs, targets)
    return found if len(found) <= most else found.take(permutation(len(found), "examples", seed)[:most])


def _concatenate(argument: str, batches: Iterable[Any], most: int, unlabeled: bool) -> Any:
    found: list[Any] = []
    try:
        for batch in batches:
            pair = _as_pair(batch, unlabeled)
            if pair is None:
                raise ValueError(f"a batch is a {type(batch).__name__}")
            found.append(pair)
            if sum(len(targets) for _, targets in found) >= most:
                break
        return tree_map(lambda *leaves: torch.cat(leaves), *found) if found else None
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{argument}: its batches are not pairs (inputs, targets) of equal form: {error}") from error


def _as_pair(batch: Any, unlabeled: bool) -> tuple[Any, Tensor] | None:
    if _is_pair(batch):
        return tuple(batch)
    if unlabeled and isinstance(batch, Tensor) and batch.ndim > 0:
        return batch, torch.zeros(len(batch), dtype=torch.int64)
    return None


def _is_pair(data: Any) -> bool:
    return isinstance(data, list | tuple) and len(data) == 2 and isinstance(data[1], Tensor)
