"""Rules for calls that compute: activations, arithmetic, reductions, pooling, norm layers, recurrent layers, losses.

A rule maps the scales of a call's operands to the scale of its result. If h(kx) = k^d h(x) for every k > 0, the scale
passes through with degree d. A call without a degree is fixed: its operands and its result keep their scale. The tests
check every rule against the call itself.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from torch import Tensor, fx

from pliant.anatomy import labels as lb
from pliant.anatomy.operators import (
    BATCH_NORMS,
    CLAMPS,
    FIXED,
    HOMOGENEOUS,
    LAYER_NORMS,
    NONLINEAR,
    POOLS,
    POWERS,
    REDUCTIONS,
    SUMS,
    pooled_dimensions,
)
from pliant.anatomy.walk import Value, Walk, rule

_EPSILON = 1e-3
"""The largest constant that counts as a guard against division by zero."""


@rule(*NONLINEAR, *FIXED)
def _fixed(walk: Walk, node: fx.Node) -> Value:
    return walk.fix_all(node)


@rule(*HOMOGENEOUS)
def _homogeneous(walk: Walk, node: fx.Node) -> Value:
    return walk.of(node.args[0])


@rule("native_dropout")
def _native_dropout(walk: Walk, node: fx.Node) -> Value:
    labels = walk.of(node.args[0])
    return [labels, lb.uniform(lb.ONE, labels.shape)]


@rule("prelu")
def _prelu(walk: Walk, node: fx.Node) -> Value:
    walk.fix(node, walk.get(node, "weight"))
    return walk.get(node, "self")


@rule(*CLAMPS)
def _clamp(walk: Walk, node: fx.Node) -> Value:
    limits = [argument for argument in node.args[1:] if argument is not None]
    limits += [argument for argument in node.kwargs.values() if argument is not None]
    labels = walk.of(node.args[0])
    from_below = walk.graph.operator(node) in ("clamp_min", "clamp") and node.args[1:2] != (None,)
    if from_below and _is_guard(walk, node, limits):
        return labels
    return walk.join(node, labels, *(walk.of(limit) for limit in limits)).expand(labels.shape)


@rule(*POWERS)
def _root(walk: Walk, node: fx.Node) -> Value:
    return walk.power(walk.of(node.args[0]), POWERS[walk.graph.operator(node)])


@rule("pow")
def _power(walk: Walk, node: fx.Node) -> Value:
    base, exponent = node.args[:2]
    if isinstance(exponent, int | float):
        return walk.power(walk.of(base), Fraction(exponent))
    walk.fix(node, walk.of(base), walk.of(exponent))
    return lb.uniform(lb.ONE, walk.shape(node))


@rule(*SUMS)
def _add(walk: Walk, node: fx.Node) -> Value:
    left, right = node.args[:2]
    if walk.graph.operator(node) == "add" and _is_guard(walk, node, [right]):
        return walk.of(left)
    return walk.join(node, walk.of(left), walk.of(right)).expand(walk.shape(node))


@rule("eq", "ne", "lt", "le", "gt", "ge", "atan2", "logical_and", "logical_or")
def _compare(walk: Walk, node: fx.Node) -> Value:
    walk.join(node, walk.of(node.args[0]), walk.of(node.args[1]))
    return lb.uniform(lb.ONE, walk.shape(node))


@rule("mul")
def _multiply(walk: Walk, node: fx.Node) -> Value:
    left, right = node.args[:2]
    if not (walk.is_number(left) or walk.is_number(right)):
        walk.factor(left, right)
    return walk.times(walk.of(left), walk.of(right)).expand(walk.shape(node))


@rule("div")
def _divide(walk: Walk, node: fx.Node) -> Value:
    left, right = node.args[:2]
    if node.kwargs.get("rounding_mode") is not None:
        walk.fix(node, walk.of(left), walk.of(right))
        return lb.uniform(lb.ONE, walk.shape(node))
    if not walk.is_number(right):
        walk.factor(left)
    return walk.times(walk.of(left), walk.of(right), -1).expand(walk.shape(node))


@rule("addcmul", "addcdiv")
def _add_product(walk: Walk, node: fx.Node) -> Value:
    walk.factor(*node.args[1:3])
    power = 1 if walk.graph.operator(node) == "addcmul" else -1
    product = walk.times(walk.get(node, "tensor1"), walk.get(node, "tensor2"), power)
    return walk.join(node, walk.get(node, "self"), product).expand(walk.shape(node))


@rule("lerp")
def _interpolate(walk: Walk, node: fx.Node) -> Value:
    walk.fix(node, walk.get(node, "weight"))
    return walk.join(node, walk.get(node, "self"), walk.get(node, "end")).expand(walk.shape(node))


# Reductions: all entries that are reduced must have one scale.


@rule(*REDUCTIONS)
def _reduce(walk: Walk, node: fx.Node) -> Value:
    name = walk.graph.operator(node)
    if name in ("max", "min") and len(node.args) > 1 and isinstance(node.args[1], fx.Node):
        return walk.join(node, walk.of(node.args[0]), walk.of(node.args[1])).expand(walk.shape(node))
    labels = walk.of(node.args[0])
    dim = walk.graph.find_argument(node, "dim")
    dims = range(labels.ndim) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    merged = walk.merge(node, labels, dims)
    counts = name == "linalg_vector_norm" and walk.graph.argument(node, "ord") == 0
    results = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else [node.meta["val"]]
    values = []
    for position, result in enumerate(results):
        degree = 0 if counts or not result.is_floating_point() else 1 if position else REDUCTIONS[name]
        values.append(walk.power(merged, degree).reshape(result.shape))
    return values if isinstance(node.meta["val"], tuple | list) else values[0]


@rule("cumsum", "sort", "topk", "argsort", "cummax", "cummin", "diff", "kthvalue")
def _along(walk: Walk, node: fx.Node) -> Value:
    dim = walk.graph.argument(node, "dim")
    parts = [walk.of(source) for source in node.all_input_nodes]  # `diff` may have several inputs
    merged = walk.join(node, *(walk.merge(node, part, [dim] if part.ndim else []) for part in parts))
    many = isinstance(node.meta["val"], tuple | list)
    values = []
    for result in node.meta["val"] if many else [node.meta["val"]]:
        own = merged if result.is_floating_point() else lb.uniform(lb.ONE, merged.shape)
        values.append((own if own.ndim == result.ndim else own.reshape(result.shape)).expand(result.shape))
    return values if many else values[0]


@rule(*POOLS, "grid_sampler")
def _pool(walk: Walk, node: fx.Node) -> Value:
    labels = walk.of(node.args[0])
    if "grid" in walk.graph.operator(node):
        walk.fix(node, walk.get(node, "grid"))
        spatial = labels.ndim - 2
    else:
        spatial = pooled_dimensions(walk.graph.operator(node))
    merged = walk.merge(node, labels, range(-spatial, 0))
    if not isinstance(node.meta["val"], tuple | list):
        return merged.expand(walk.shape(node))
    values, indices = node.meta["val"]
    return [merged.expand(values.shape), lb.uniform(lb.ONE, indices.shape)]


# Norm layers remove the scale of their input. The output has the scale of γ, which β must have too.


def _normalized(walk: Walk, node: fx.Node, *tail: int) -> Tensor:
    """Return the labels of γ and β, broadcast over the result; `tail` are the dimensions after theirs."""
    walk.epsilons[node] = walk.graph.argument(node, "eps") or 0.0
    weight = walk.graph.argument(node, "weight")
    walk.factor(weight)
    scale = lb.uniform(lb.ONE, ()) if weight is None else walk.of(weight)
    shift = walk.maybe(node, "bias")
    labels = walk.join(node, scale, shift)
    return labels.reshape(*labels.shape, *tail) if labels.ndim else labels


@rule(*LAYER_NORMS)
def _layer_norm(walk: Walk, node: fx.Node) -> Value:
    width = len(walk.graph.argument(node, "normalized_shape"))
    walk.merge(node, walk.get(node, "input"), range(-width, 0))
    return _first(walk, node, _normalized(walk, node))


@rule("group_norm")
def _group_norm(walk: Walk, node: fx.Node) -> Value:
    labels = walk.get(node, "input")
    groups = walk.graph.argument(node, "num_groups")
    grouped = labels.reshape(labels.shape[0], groups, -1, *labels.shape[2:])
    walk.merge(node, grouped, range(2, grouped.ndim))
    return _first(walk, node, _normalized(walk, node, *[1] * (labels.ndim - 2)))


@rule(*BATCH_NORMS)
def _batch_norm(walk: Walk, node: fx.Node) -> Value:
    labels = walk.get(node, "input")
    mean = walk.graph.find_argument(node, "running_mean")
    var = walk.graph.find_argument(node, "running_var")
    # Instance norm normalizes each sample alone, but running statistics are shared between samples.
    apart = walk.graph.operator(node) == "instance_norm" and mean is None
    merged = walk.merge(node, labels, [dim for dim in range(labels.ndim) if dim not in ((0, 1) if apart else (1,))])
    if mean is not None:
        scale = merged.reshape(-1)
        scales = [scale, walk.power(scale, 2)]
        for statistic, own in zip((mean, var), scales, strict=True):
            if statistic in walk.graph.buffers:
                walk.meaning.statistic(walk.graph.buffers[statistic], own, node)
            else:
                walk.join(node, walk.of(statistic), own)  # computed by an earlier call, or a constant
    result = _normalized(walk, node, *[1] * (labels.ndim - 2))
    if mean is None or not isinstance(node.meta["val"], tuple | list) or len(node.meta["val"]) < 5:
        return _first(walk, node, result)
    # The functional form also returns the new statistics.
    first = _first(walk, node, result)
    assert isinstance(first, Sequence)
    return [*first[:3], *scales]


def _first(walk: Walk, node: fx.Node, labels: Tensor) -> Value:
    """Return labels for the first result of a call and None for the others, which are saved for the backward pass."""
    result = node.meta["val"]
    if isinstance(result, Tensor):
        return labels.expand(result.shape)
    return [labels.expand(result[0].shape), *[None] * (len(result) - 1)]


@rule("_weight_norm")
def _weight_norm(walk: Walk, node: fx.Node) -> Value:
    walk.factor(walk.graph.argument(node, "g"), walk.graph.argument(node, "v"))
    direction, dim = walk.get(node, "v"), walk.graph.argument(node, "dim")
    walk.merge(node, direction, [d for d in range(direction.ndim) if d != dim])
    return _first(walk, node, walk.get(node, "g"))


# Guards against division by zero, in norm layers written by hand.

_EVEN = {"square", "abs", "var", "std", "linalg_vector_norm", "relu"}
_KEEPS_SIGN = {"mean", "sum", "amax", "view", "unsqueeze", "squeeze", "clone", "_to_copy", "expand", "sqrt"}


def _is_guard(walk: Walk, node: fx.Node, others: Sequence[object]) -> bool:
    """Say whether a call adds a small number to a nonnegative value and then divides: `rsqrt(x.pow(2).mean() + eps)`.

    The result is homogeneous as long as the number is small compared to the value. The number is recorded as an epsilon
    and reported like the epsilons of norm layers.
    """
    if len(others) != 1 or not isinstance(others[0], int | float) or not 0 < others[0] <= _EPSILON:
        return False
    if not (_is_size(walk, node.args[0]) and all(_divides(walk, user, node) for user in node.users)):
        return False
    walk.epsilons[node] = float(others[0])
    return True


def _is_size(walk: Walk, value: object) -> bool:
    """Say whether the calls that make a value show that it is not negative."""
    while isinstance(value, fx.Node) and value.op == "call_function":
        name = walk.graph.operator(value)
        if name in _EVEN or (name == "mul" and value.args[0] is value.args[1]):
            return True
        if name == "pow":
            return isinstance(value.args[1], int | float) and math.fmod(value.args[1], 2) == 0
        if name not in _KEEPS_SIGN:
            return False
        value = value.args[0]
    return False


def _divides(walk: Walk, user: fx.Node, node: fx.Node) -> bool:
    """Say whether a call divides by a node, maybe after a root, a cast or a reshape."""
    name = walk.graph.operator(user)
    if name == "div":
        return user.args[1] is node and user.args[0] is not node
    if name in ("sqrt", "expand", "view", "_to_copy", "unsqueeze", "squeeze", "clone"):
        return all(_divides(walk, next_user, user) for next_user in user.users)
    if name == "pow":
        exponent = user.args[1]
        if user.args[0] is not node or not isinstance(exponent, int | float):
            return False
        return exponent < 0 or all(_divides(walk, next_user, user) for next_user in user.users)
    return name in ("rsqrt", "reciprocal")
