"""Find the units of a model by following them through its exported graph.

To renew a unit, a method needs more than the row of weights that makes it: the entries of norm layers that belong to
it, and every weight that reads it after reshapes, pooling and concatenation.

The tracker replaces values by labels, which say for each entry to which unit it belongs. Each layer gets a range of
labels, one for each of its units. Calls that move entries are run on the labels.

Two outputs that are multiplied by each other, and by nothing else, are one unit: the gate and the value of a gated
layer. Their labels become one label from there on.

Some units cannot be renewed alone: units that are added to other values (a residual stream), multiplied by several,
compared with them (attention) or returned by the model. Their layers are listed with the reason.

The tracker is not a meaning of `walk.Walk`. It shares the operator tables with the walk, but not its rules: the walk
asks of a call whether it is homogeneous, the tracker whether it is elementwise.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from pliant.anatomy import labels as lb
from pliant.anatomy.export import ModelGraph, export_graph
from pliant.anatomy.layers import WEIGHT_LAYERS
from pliant.anatomy.operators import (
    CASTS,
    CONVOLUTIONS,
    ELEMENTWISE,
    LAYER_NORMS,
    MOVES,
    NORMS,
    POOLS,
    RESHAPES,
    SHAPE_ONLY,
    SPLITS,
    pooled_dimensions,
)
from pliant.anatomy.units import UNREACHED, Norm, Passage, Reader, Slices, UnitGraph, UnitGroup
from pliant.distributed import unwrap_model, whole_model
from pliant.running import Example


def find_units(model: nn.Module, example: Example) -> UnitGraph:
    """Find the units of a model.

    Args:
        model: A model that `torch.export` can trace. It is left as it was. If it is sharded, all ranks call this.
        example: An example input: a tensor, a tuple of arguments or a dictionary of keyword arguments.

    Returns:
        The layers that make and read each unit. Every layer that makes units is either in `groups` or in `skipped`.

    Raises:
        GraphError: If the model cannot be traced.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> units = find_units(model, torch.zeros(1, 4))
        >>> [(group.name, group.count, group.readers[0].module) for group in units.groups]
        [('0', 3, '2')]
        >>> units.skipped
        {'2': 'it is an output of the model'}
    """
    model = unwrap_model(model)
    with whole_model(model):
        tracker = _Tracker(export_graph(model, example))
    tracker.run()
    return UnitGraph(
        groups=tuple(draft.finished() for draft in tracker.drafts if not draft.reasons),
        skipped={name: "; ".join(draft.reasons) for draft in tracker.drafts if draft.reasons for name in draft.names}
        | tracker.opaque,
    )


@dataclass
class _Draft:
    """A layer whose units are being followed. Their labels start at `first`."""

    names: list[str]
    count: int
    first: int
    weights: list[Slices]
    biases: list[Slices]
    norms: list[Norm] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    reasons: dict[str, None] = field(default_factory=dict)

    def finished(self) -> UnitGroup:
        """Return the finished record, with the units counted from 0."""
        present = torch.unique(self.weights[0].units)
        return UnitGroup(
            name=self.names[0],
            count=len(present),
            weights=tuple(_renumbered(slices, present) for slices in self.weights),
            biases=tuple(_renumbered(slices, present) for slices in self.biases),
            norms=tuple(_mapped(norm, lambda slices: _renumbered(slices, present)) for norm in self.norms),
            passages=tuple(self.passages),
            readers=tuple(replace(reader, weight=_renumbered(reader.weight, present)) for reader in self.readers),
        )

    def units(self, labels: Tensor) -> Tensor:
        """Return the unit of each label, −1 for labels of other groups."""
        mine = (labels >= self.first) & (labels < self.first + self.count)
        return torch.where(mine, labels - self.first, -1)

    def join(self, other: "_Draft", units: Tensor) -> None:
        """Make the units of another layer, or other units of this one, part of this layer's units.

        Args:
            other: The other layer.
            units: For each unit of the other layer, the unit of this layer that it becomes a part of.
        """

        def moved(slices: Slices) -> Slices:
            return replace(slices, units=torch.where(slices.units < 0, -1, units[slices.units]))

        weights, biases = map(moved, other.weights), map(moved, other.biases)
        norms = (_mapped(norm, moved) for norm in other.norms)
        if other is self:
            self.weights, self.biases, self.norms = list(weights), list(biases), list(norms)
        else:
            self.names += other.names
            self.weights += weights
            self.biases += biases
            self.norms += norms
            self.passages += other.passages


def _renumbered(slices: Slices, present: Tensor) -> Slices:
    """Return slices whose units are counted among those present."""
    return replace(
        slices, units=torch.where(slices.units < 0, -1, torch.searchsorted(present, slices.units.contiguous()))
    )


def _mapped(norm: Norm, function: Callable[[Slices], Slices]) -> Norm:
    return Norm(**{leaf: part and function(part) for leaf, part in vars(norm).items()})


_NONE = 0
"""The label of an entry that does not belong to a unit."""

_POOLING_REDUCTIONS = ("mean", "sum", "amax", "amin")
_ATTENTION = ("scaled_dot_product_attention", "softmax", "matmul", "bmm", "einsum")


class _Tracker:
    """One pass over a graph."""

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph
        self.drafts: list[_Draft] = []
        self.opaque: dict[str, str] = {}
        self._labels: dict[fx.Node, Any] = {}
        self._layers: set[fx.Node] = set()
        self._next = _NONE + 1
        self._joined: dict[int, int] = {}
        self._uses = Counter(name for node, name in graph.parameters.items() for _ in node.users)
        self._calls = Counter((graph.module_path(node), graph.operator(node)) for node in graph.nodes)

    def run(self) -> None:
        """Follow all units to their readers."""
        for node in self.graph.nodes:
            self._labels[node] = self._visit(node)
        for node in self.graph.outputs.values():
            self._flag(self._of(node), "it is an output of the model")
        for draft in self.drafts:
            if not draft.readers and not draft.reasons:
                draft.reasons["nothing reads it"] = None
        called = {name for draft in self.drafts for name in draft.names} | self.opaque.keys()
        for path, module in self.graph.model.named_modules():
            if path not in called and isinstance(module, WEIGHT_LAYERS):
                self.opaque[path] = UNREACHED

    def _visit(self, node: fx.Node) -> Any:
        name = self.graph.operator(node)
        if name == "getitem":
            source, position = node.args
            labels = self._labels[source]  # type: ignore[index]
            return labels[position] if isinstance(labels, list | tuple) else labels  # type: ignore[index]
        layer = self._layer(node)
        if layer is not None:
            return self._follow_layer(node, *layer)
        if not any(self._has_units(source) for source in node.all_input_nodes):
            return None
        first = node.args[0]
        if name in SHAPE_ONLY:
            return None
        if name in CASTS or (name == "mul" and _is_mask(node.args[1], self.graph)):
            return self._of(first)
        if name in NORMS:
            self._note_passage(node)
            return self._follow_norm(node)
        if name in ELEMENTWISE and (name == "prelu" or self._are_alike(node)):
            if "dropout" not in name:  # it acts in training mode only
                self._note_passage(node)
            return self._first_of(node, self._of(node.all_input_nodes[0]).expand(_first_shape(node)))
        if name in RESHAPES:
            return self._of(first).reshape(self.graph.shape(node))
        if name in (*MOVES, *SPLITS) and len(node.all_input_nodes) == 1:  # a second input would decide where entries go
            return node.target(self._of(first), *node.args[1:], **node.kwargs)  # type: ignore[operator]
        if name in ("cat", "stack"):
            parts = [self._of(part) for part in self.graph.argument(node, "tensors")]
            return (torch.cat if name == "cat" else torch.stack)(parts, dim=self.graph.argument(node, "dim"))
        if name in (*POOLS, "pad"):
            return self._follow_pool(node)
        if name in _POOLING_REDUCTIONS:
            return self._follow_reduction(node)
        factors = self._factors(node)
        if factors is not None and self._join(*factors):
            return self._of_labels(factors[0]).expand(self.graph.shape(node))
        self._flag_inputs(node, self._reason(node))
        return None

    def _factors(self, node: fx.Node) -> tuple[Tensor, Tensor] | None:
        """Return the labels of the two factors of a product, or None if the call is not a product."""
        name = self.graph.operator(node)
        if name == "mul" and len(node.all_input_nodes) == 2:
            left, right = (self._of(source) for source in node.all_input_nodes)
            return left, right
        if name == "glu":
            left, right = self._of(node.args[0]).chunk(2, self.graph.argument(node, "dim"))
            return left, right
        return None

    def _join(self, left: Tensor, right: Tensor) -> bool:
        """Join units that are multiplied by each other; return False if they are not pairs or were read before."""
        both = torch.broadcast_tensors(lb.compact(left), lb.compact(right))  # type: ignore[no-untyped-call]
        pairs = torch.unique(torch.stack(both).flatten(1), dim=1)
        kept, joined = pairs
        drafts = [self._drafts_in(labels) for labels in (kept, joined)]
        if any(len(found) != 1 or found[0].readers or found[0].reasons for found in drafts):
            return False
        ((first,), (second,)) = drafts
        if first.first > second.first:
            first, second, kept, joined = second, first, joined, kept
        whole = first is second or len(kept) == first.count == second.count
        distinct = len(torch.unique(kept)) == len(torch.unique(joined)) == len(kept)
        if not (whole and distinct) or _NONE in pairs or torch.isin(kept, joined).any():
            return False
        units = torch.arange(second.count)
        units[joined - second.first] = kept - first.first
        first.join(second, units)
        if second is not first:
            self.drafts.remove(second)
        self._joined |= dict(zip(joined.tolist(), kept.tolist(), strict=True))
        return True

    def _are_alike(self, node: fx.Node) -> bool:
        """Say whether all operands of an elementwise call belong to the same unit, entry by entry."""
        first, *others = [self._of(source) for source in node.all_input_nodes]
        return all(bool((lb.compact(first) == lb.compact(other)).all()) for other in others)

    def _reason(self, node: fx.Node) -> str:
        name, where = self.graph.operator(node), self.graph.module_path(node) or "the model"
        if name in ("add", "sub"):
            return f"it is added to other values in {where}"
        if name in ("mul", "div"):
            return f"it is multiplied by other values in {where}"
        if name in _ATTENTION:
            return f"it is part of attention in {where}"
        return f"it goes through {self.graph.describe(node)}, which is not known to keep units apart"

    # Layers read units and make new ones.

    def _layer(self, node: fx.Node) -> tuple[Any, Any, Any, int, int, int] | None:
        """Return the input, weight and bias of a layer, and three dimensions; None if the call is not a layer.

        The dimensions are: the output dimension of the weight, the input dimension of the weight, and the dimension of
        the layer's input and output along which units lie, counted from the end.
        """
        name, argument = self.graph.operator(node), self.graph.argument
        if name == "linear":
            return argument(node, "input"), argument(node, "weight"), argument(node, "bias"), 0, 1, -1
        if name in CONVOLUTIONS:
            out_dim, in_dim = (1, 0) if "transpose" in name else (0, 1)
            dim = -int(name[-2]) - 1
            return argument(node, "input"), argument(node, "weight"), argument(node, "bias"), out_dim, in_dim, dim
        if name == "addmm":
            return argument(node, "mat1"), argument(node, "mat2"), argument(node, "self"), 1, 0, -1
        if name in ("matmul", "mm"):
            source, weight = node.args
            if isinstance(weight, fx.Node) and weight in self.graph.parameters and len(self.graph.shape(weight)) == 2:
                return source, weight, None, 1, 0, -1
        return None

    def _follow_layer(
        self, node: fx.Node, source: Any, weight: Any, bias: Any, out_dim: int, in_dim: int, value_dim: int
    ) -> Tensor | None:
        path = self.graph.module_path(node)
        if weight not in self.graph.parameters or (bias is not None and bias not in self.graph.parameters):
            self.opaque[path] = "its weight or bias is computed, not stored"
            self._flag_inputs(node, f"it is read by {path or 'the model'}, whose weight is computed, not stored")
            return None
        grouped = self.graph.operator(node) in CONVOLUTIONS and self.graph.argument(node, "groups") != 1
        if self._has_units(source):
            if grouped:
                self._flag(self._of(source), f"it is read by the grouped convolution {path}")
            else:
                self._add_reader(node, source, weight, bias, in_dim, value_dim)
        count = self.graph.shape(weight)[out_dim]
        own = torch.arange(count)
        draft = _Draft(
            names=[self._layer_name(path, self.graph.parameters[weight])],
            count=count,
            first=self._next,
            weights=[Slices(self.graph.parameters[weight], out_dim, own)],
            biases=[] if bias is None else [Slices(self.graph.parameters[bias], 0, own)],
        )
        self._next += count
        self._layers.add(node)
        self.drafts.append(draft)
        for parameter in (weight, bias):
            self._check_parameter(draft, parameter, "it is made by")
        if grouped and out_dim == 1:
            draft.reasons.setdefault("it is made by a grouped transposed convolution")
        shape = self.graph.shape(node)
        return None if draft.reasons else (own + draft.first).view(-1, *[1] * (-1 - value_dim)).expand(shape)

    def _add_reader(self, node: fx.Node, source: Any, weight: Any, bias: Any, in_dim: int, value_dim: int) -> None:
        labels, path = self._of(source), self.graph.module_path(node)
        vector = _along(labels, value_dim)
        if vector is None:
            self._flag(labels, f"it is mixed with others before {path or 'the model'} reads it")
            return
        for draft in self._drafts_in(vector):
            slices = Slices(self.graph.parameters[weight], in_dim, draft.units(vector))
            name = self.graph.parameters.get(bias, "")
            own_bias = name if self._uses[name] == 1 else None
            outside = self._is_made_outside(source, path, value_dim)
            draft.readers.append(Reader(path, slices, own_bias, value_dim, outside, self._passed(source)))
            self._check_parameter(draft, weight, "it is read by")

    def _passed(self, source: fx.Node) -> frozenset[str]:
        """Return the names of the calls between the layers that make the units and `source`."""
        seen, waiting = set(self._layers), [source]
        while waiting:
            node = waiting.pop()
            if node not in seen and self._has_units(node):
                seen.add(node)
                waiting += node.all_input_nodes
        return frozenset(self.graph.operator(node) for node in seen - self._layers)

    def _is_made_outside(self, source: fx.Node, path: str, value_dim: int) -> bool:
        """Say whether a module multiplies its own input by its weight, with all units in their place."""
        while self.graph.module_path(source) == path and self._leaves_in_place(source, value_dim):
            source = source.all_input_nodes[0]
        return not f"{self.graph.module_path(source)}.".startswith(f"{path}.")

    def _leaves_in_place(self, node: fx.Node, value_dim: int) -> bool:
        """Say whether a call pads, casts or reshapes its input without moving units along a dimension.

        A reshape keeps the order of entries, so units along the last dimension stay if its size does.
        """
        name = self.graph.operator(node)
        if name in RESHAPES:
            sizes = [self.graph.shape(each)[-1:] for each in (node, node.all_input_nodes[0])]
            return value_dim == -1 and sizes[0] == sizes[1]
        return name in ("pad", *CASTS)

    def _layer_name(self, path: str, weight: str) -> str:
        """Return the module that owns the weight; if several share it, the module that makes the call."""
        owner, _, leaf = weight.rpartition(".")
        if leaf != "weight":
            return weight
        called = self.graph.model.get_submodule(path)
        return path if called._parameters.get("weight") is self.graph.model.get_parameter(weight) else owner

    def _check_parameter(self, draft: _Draft, parameter: fx.Node | None, how: str) -> None:
        if parameter is None:
            return
        name = self.graph.parameters[parameter]
        if self._uses[name] > 1:
            draft.reasons.setdefault(f"{how} {name!r}, which is used more than once")
        if not self.graph.model.get_parameter(name).requires_grad:
            draft.reasons.setdefault(f"{how} {name!r}, which is frozen")

    # Calls that units pass through.

    def _note_passage(self, node: fx.Node) -> None:
        labels, path = self._of(node.all_input_nodes[0]), self.graph.module_path(node)
        varying = [dim for dim in range(labels.ndim) if not lb.same_along(labels, dim)]
        passage = Passage(
            operator=self.graph.operator(node),
            module=path,
            alone=self._calls[path, self.graph.operator(node)] == 1,
            dim=varying[0] - labels.ndim if len(varying) == 1 else None,
            ndim=labels.ndim,
        )
        for draft in self._drafts_in(labels):
            draft.passages.append(passage)

    def _follow_norm(self, node: fx.Node) -> Any:
        labels = self._of(node.args[0])
        name = self.graph.operator(node)
        if name in LAYER_NORMS:
            width = len(self.graph.argument(node, "normalized_shape"))
            inner = _inner(labels, width)
        else:
            inner = _along(labels, 1)
        if inner is None:
            self._flag(labels, f"it is mixed with others before {self.graph.module_path(node)} normalizes it")
            return None
        for draft in self._drafts_in(inner):
            units = draft.units(inner)
            parts = {}
            for leaf in ("weight", "bias", "running_mean", "running_var"):
                tensor = self.graph.find_argument(node, leaf)
                parts[leaf] = self._norm_part(draft, tensor, units)
            draft.norms.append(Norm(**parts))
        return self._first_of(node, labels)

    def _first_of(self, node: fx.Node, labels: Tensor) -> Any:
        """Return labels for the first result of a call and None for the others, such as masks and statistics."""
        result = node.meta["val"]
        return [labels, *[None] * (len(result) - 1)] if isinstance(result, tuple | list) else labels

    def _norm_part(self, draft: _Draft, tensor: fx.Node | None, units: Tensor) -> Slices | None:
        if tensor is None:
            return None
        name = self.graph.parameters.get(tensor) or self.graph.buffers.get(tensor)
        if name is None:
            draft.reasons.setdefault("it is normalized by a weight that is computed, not stored")
            return None
        if tensor in self.graph.parameters:
            self._check_parameter(draft, tensor, "it is normalized by")
        varying = [dim for dim in range(units.ndim) if not lb.same_along(units, dim)]
        if len(varying) > 1:
            draft.reasons.setdefault(f"it lies across two dimensions of {name!r}")
            return None
        dim = varying[0] if varying else 0
        along = units.movedim(dim, 0).flatten(1)[:, 0] if units.ndim > 1 else units
        return Slices(name, dim, along)

    def _follow_pool(self, node: fx.Node) -> Any:
        labels, shape = self._of(node.args[0]), _first_shape(node)
        name = self.graph.operator(node)
        last = len(self.graph.argument(node, "pad")) // 2 if name == "pad" else pooled_dimensions(name)
        spatial = range(labels.ndim - last, labels.ndim)
        if labels.shape[:-last] != shape[:-last] or not all(lb.same_along(labels, dim) for dim in spatial):
            self._flag(labels, self._reason(node))
            return None
        for dim in spatial:
            labels = labels.narrow(dim, 0, 1)
        return self._first_of(node, labels.expand(shape))

    def _follow_reduction(self, node: fx.Node) -> Tensor | None:
        labels = self._of(node.args[0])
        dims = self.graph.find_argument(node, "dim")
        dims = range(labels.ndim) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
        if not all(lb.same_along(labels, dim) for dim in dims):
            self._flag(labels, f"it is summed with other units in {self.graph.module_path(node) or 'the model'}")
            return None
        for dim in dims:
            labels = labels.narrow(dim, 0, 1)
        return labels.reshape(self.graph.shape(node))

    # Labels of values.

    def _of(self, value: Any) -> Tensor:
        labels = self._labels.get(value)
        if isinstance(labels, Tensor):
            return self._of_labels(labels)
        return lb.uniform(_NONE, self.graph.shape(value))

    def _of_labels(self, labels: Tensor) -> Tensor:
        """Replace the labels of units that were joined to others since."""
        if not self._joined:
            return labels
        small = lb.compact(labels)
        known = torch.arange(self._next)
        known[list(self._joined)] = torch.tensor(list(self._joined.values()))
        return known[small].expand(labels.shape)

    def _has_units(self, value: Any) -> bool:
        labels = self._labels.get(value)
        parts: Sequence[Any] = labels if isinstance(labels, list | tuple) else [labels]
        return any(isinstance(part, Tensor) and bool((lb.compact(part) != _NONE).any()) for part in parts)

    def _drafts_in(self, labels: Tensor) -> list[_Draft]:
        present = torch.unique(lb.compact(labels))
        return [d for d in self.drafts if bool(((present >= d.first) & (present < d.first + d.count)).any())]

    def _flag(self, labels: Tensor, reason: str) -> None:
        for draft in self._drafts_in(labels):
            draft.reasons.setdefault(reason)

    def _flag_inputs(self, node: fx.Node, reason: str) -> None:
        for source in node.all_input_nodes:
            if self._has_units(source):
                self._flag(self._of(source), reason)


def _is_mask(value: Any, graph: ModelGraph) -> bool:
    """Say whether a value is the mask of a channel dropout: random numbers divided by the share that is kept."""
    while isinstance(value, fx.Node) and graph.operator(value) == "div":
        value = value.args[0]
    return isinstance(value, fx.Node) and graph.operator(value) == "bernoulli"


def _first_shape(node: fx.Node) -> torch.Size:
    """Return the shape of a call's first result."""
    result = node.meta["val"]
    shape: torch.Size = (result[0] if isinstance(result, tuple | list) else result).shape
    return shape


def _along(labels: Tensor, dim: int) -> Tensor | None:
    """Return the labels along a dimension; None if they vary along another one."""
    dim %= labels.ndim
    if not all(lb.same_along(labels, other) for other in range(labels.ndim) if other != dim):
        return None
    return labels.movedim(dim, 0).flatten(1)[:, 0] if labels.ndim > 1 else labels


def _inner(labels: Tensor, width: int) -> Tensor | None:
    """Return the labels of the last `width` dimensions; None if they vary along another one."""
    outer = labels.ndim - width
    if not all(lb.same_along(labels, dim) for dim in range(outer)):
        return None
    return labels[(0,) * outer]
