"""Rules for calls that move, split, repeat or select entries: they act on labels as they act on values."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pliant.anatomy import labels as lb
from pliant.anatomy.operators import CASTS, FILLS, MOVES, RESHAPES, SHAPE_ONLY, SPLITS
from pliant.anatomy.walk import Value, Walk, rule


@rule(*RESHAPES)
def _reshape(walk: Walk, node: fx.Node) -> Value:
    return walk.of(node.args[0]).reshape(walk.shape(node))


@rule(*MOVES)
def _move(walk: Walk, node: fx.Node) -> Value:
    labels = walk.of(node.args[0])
    if len(node.all_input_nodes) > 1:  # the second input decides where entries go
        merged = walk.merge(node, labels, range(labels.ndim))
        return walk.everywhere(node, int(merged.reshape(())))
    result: Value = _run(node, labels)
    return result


@rule(*SPLITS)
def _split(walk: Walk, node: fx.Node) -> Value:
    whole = walk.of(node.args[0])
    result: Tensor | Sequence[Tensor] = _run(node, whole)
    walk.meaning.split(whole, [result] if isinstance(result, Tensor) else result)
    return result


@rule("im2col")
def _windows(walk: Walk, node: fx.Node) -> Value:
    padded: Tensor = _run(node, walk.of(node.args[0]).double() - lb.ANY)  # the padding of zeros becomes `ANY`
    return padded.long() + lb.ANY


@rule("pad")
def _pad(walk: Walk, node: fx.Node) -> Value:
    labels, pad = walk.get(node, "self"), list(walk.graph.argument(node, "pad"))
    mode, value = walk.graph.argument(node, "mode"), walk.graph.argument(node, "value")
    if mode == "constant":
        return torch.constant_pad_nd(labels, pad, int(walk.of(value or 0)))
    return torch.nn.functional.pad(labels.double(), pad, mode).long()


@rule("broadcast_tensors")
def _broadcast(walk: Walk, node: fx.Node) -> Value:
    parts = [walk.of(part) for part in walk.graph.argument(node, "tensors")]
    return [part.expand(result.shape) for part, result in zip(parts, node.meta["val"], strict=True)]


@rule("cat")
def _cat(walk: Walk, node: fx.Node) -> Value:
    parts = [walk.of(part) for part in walk.graph.argument(node, "tensors")]
    parts = [part for part in parts if part.shape != (0,)]  # `cat` skips tensors of this shape
    return torch.cat(parts, dim=walk.graph.argument(node, "dim"))


@rule("stack")
def _stack(walk: Walk, node: fx.Node) -> Value:
    parts = [walk.of(part) for part in walk.graph.argument(node, "tensors")]
    return torch.stack(parts, dim=walk.graph.argument(node, "dim"))


@rule("tril", "triu")
def _triangle(walk: Walk, node: fx.Node) -> Value:
    return walk.of(node.args[0])  # entries that become zero have any scale


@rule(*CASTS)
def _cast(walk: Walk, node: fx.Node) -> Value:
    labels, target = walk.of(node.args[0]), node.meta["val"].dtype
    if target == torch.bool:
        return lb.uniform(lb.ONE, labels.shape)  # a scale does not change which entries are zero
    if not (target.is_floating_point or target.is_complex):
        walk.fix(node, labels)
        return lb.uniform(lb.ONE, labels.shape)
    return labels


@rule("select_scatter", "slice_scatter")
def _scatter_slice(walk: Walk, node: fx.Node) -> Value:
    whole, part = walk.get(node, "self"), walk.get(node, "src")
    names = ("dim", "index") if walk.graph.operator(node) == "select_scatter" else ("dim", "start", "end", "step")
    where = {name: walk.graph.argument(node, name) for name in names}
    return node.target(whole.contiguous(), part, **where)  # type: ignore[operator, no-any-return]


@rule("copy")
def _copy(walk: Walk, node: fx.Node) -> Value:
    return walk.get(node, "src").expand(walk.shape(node))


@rule("fill")
def _fill(walk: Walk, node: fx.Node) -> Value:
    return walk.get(node, "value").expand(walk.shape(node))


@rule(*FILLS)
def _filled(walk: Walk, node: fx.Node) -> Value:
    name = walk.graph.operator(node)
    fill = walk.graph.argument(node, "fill_value") if "full" in name else 0
    label = int(walk.of(fill)) if isinstance(fill, int | float) else lb.ONE
    return lb.uniform(label if node.meta["val"].is_floating_point() else lb.ONE, walk.shape(node))


@rule(*(SHAPE_ONLY - set(FILLS)), "isnan", "isinf", "isfinite", "logical_not", "sign", "sgn")
def _scale_free(walk: Walk, node: fx.Node) -> Value:
    return walk.everywhere(node, lb.ONE)  # depends on the shape, signs or finiteness of the operand only


@rule("index")
def _index(walk: Walk, node: fx.Node) -> Value:
    labels, indices = walk.get(node, "self"), list(walk.graph.argument(node, "indices"))
    walk.fix(node, *(walk.of(index) for index in indices if index is not None))
    dims: list[int] = []
    position = 0
    for index in indices:
        # A mask takes as many dimensions as it has, a tensor of positions takes one.
        width = 1
        if index is not None and index.meta["val"].dtype == torch.bool:
            width = index.meta["val"].ndim
        if index is not None:
            dims.extend(range(position, position + width))
        position += width
    # Which entries are picked depends on data, so all that may be picked must share a scale.
    labels = walk.merge(node, labels, dims)
    if lb.single(labels) is None:
        kept = [dim for dim in range(labels.ndim) if dim not in dims]
        # Neighbouring indices leave the picked dimensions in their place, others put them first.
        where = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
        picked = walk.shape(node)[where : len(walk.shape(node)) - (len(kept) - where)]
        labels = labels.squeeze(dims)
        for _ in picked:
            labels = labels.unsqueeze(where)
        return labels.expand(walk.shape(node))
    return lb.uniform(int(lb.single(labels) or lb.ONE), walk.shape(node))


@rule("index_select", "gather", "take_along_dim")
def _pick(walk: Walk, node: fx.Node) -> Value:
    labels, dim = walk.get(node, "self"), walk.graph.argument(node, "dim")
    walk.fix(node, walk.get(node, "index" if walk.graph.operator(node) != "take_along_dim" else "indices"))
    merged = walk.merge(node, labels, [dim])
    if merged.shape != torch.Size(1 if d == dim % labels.ndim else s for d, s in enumerate(walk.shape(node))):
        merged = walk.merge(node, merged, range(labels.ndim))  # `gather` may read a part of the other dimensions
    return merged.expand(walk.shape(node))


@rule("index_put", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "masked_scatter")
def _scatter(walk: Walk, node: fx.Node) -> Value:
    arguments = (*node.args[1:], *node.kwargs.values())
    if "prod" in arguments or "multiply" in arguments:
        return walk.fix_all(node)
    labels = walk.of(node.args[0])
    sources = [walk.of(arg) for arg in arguments if isinstance(arg, fx.Node) and _is_float(arg)]
    if walk.graph.find_argument(node, "value") is not None:
        sources.append(walk.get(node, "value"))
    everything = [walk.merge(node, part, range(part.ndim)).reshape(()) for part in (labels, *sources)]
    return walk.join(node, *everything).expand(walk.shape(node))


@rule("masked_fill")
def _masked_fill(walk: Walk, node: fx.Node) -> Value:
    return walk.join(node, walk.get(node, "self"), walk.get(node, "value")).expand(walk.shape(node))


@rule("where")
def _where(walk: Walk, node: fx.Node) -> Value:
    walk.fix(node, walk.get(node, "condition"))
    return walk.join(node, walk.get(node, "self"), walk.get(node, "other")).expand(walk.shape(node))


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _run(node: fx.Node, labels: Tensor) -> Any:
    """Run a call with labels as its first argument."""
    return node.target(labels, *node.args[1:], **node.kwargs)  # type: ignore[operator]
