"""The units of a model: which weights make each one, and which weights read it.

A unit is an output of a linear layer or a channel of a convolution. To renew one, a method must know more than the row
of weights that makes it: the entries of norm layers that belong to it, and every weight that reads it, wherever
reshapes, pooling and concatenation carried it. `find_units` follows each unit through the exported graph of the model,
entry by entry: values are replaced by labels that say which unit an entry belongs to, and calls that move entries are
run on the labels.

Not every unit can be renewed alone. One that is added to other values (a residual stream), multiplied by them, compared
with them (attention) or returned by the model is part of something larger. Such layers are left out and listed with
the reason, so that every layer of the model is found in one of the two lists.
"""

from dataclasses import dataclass

from torch import nn

from pliant.anatomy.export import export_graph
from pliant.anatomy.unit_parts import Norm, Passage, Reader, Slices, UnitGroup
from pliant.anatomy.unit_tracker import Tracker
from pliant.running import Example

__all__ = ["Norm", "Passage", "Reader", "Slices", "UnitGraph", "UnitGroup", "find_units"]


@dataclass(frozen=True)
class UnitGraph:
    """All layers of a model that make units.

    Attributes:
        groups: Those whose units can be renewed, in order of their call.
        skipped: The others by name, with the reason.
    """

    groups: tuple[UnitGroup, ...]
    skipped: dict[str, str]


def find_units(model: nn.Module, example: Example) -> UnitGraph:
    """Find the units of a model.

    Args:
        model: A model that `torch.export` can trace; it is left as it was.
        example: An example input: a tensor, a tuple of arguments or a dictionary of keyword arguments.

    Returns:
        Who makes and who reads each unit; every layer that makes units is either in `groups` or in `skipped`.

    Raises:
        GraphError: If the model cannot be traced.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> units = find_units(model, torch.zeros(1, 4))
        >>> [(group.name, group.count, group.readers[0].module) for group in units.groups]
        [('0', 3, '2')]
        >>> units.skipped
        {'2': 'it is an output of the model'}
    """
    tracker = Tracker(export_graph(model, example))
    tracker.run()
    return UnitGraph(
        groups=tuple(draft.finished() for draft in tracker.drafts if not draft.reasons),
        skipped={draft.name: "; ".join(draft.reasons) for draft in tracker.drafts if draft.reasons} | tracker.opaque,
    )
