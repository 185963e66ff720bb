"""Rules for sums of products: linear and convolution layers, matrix products, embedding, attention.

The scale of Σ_i x_i w_i is the scale of x_i w_i, which must be the same for every i.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from pliant.anatomy import labels as lb
from pliant.anatomy.operators import CONVOLUTIONS
from pliant.anatomy.walk import Value, Walk, rule

Operand = tuple[Tensor, str]


def contract(walk: Walk, node: fx.Node, operands: Sequence[Operand], out: str) -> Tensor:
    """Return the labels of an Einstein sum.

    Args:
        walk: The pass.
        node: The call.
        operands: Label tensors, each with one letter for each dimension.
        out: The letters of the result.
    """
    tensors = [tensor for tensor, _ in operands]
    letters = [letter for _, letter in operands]
    for letter in sorted(set("".join(letters)) - set(out)):
        varying = [
            i
            for i, names in enumerate(letters)
            if letter in names and not lb.same_along(tensors[i], names.index(letter))
        ]
        joint = len(varying) > 1
        for i, names in enumerate(letters):
            if letter in names and not (joint and i in varying):
                dim = names.index(letter)
                tensors[i] = walk.merge(node, tensors[i], [dim]).squeeze(dim)
                letters[i] = names.replace(letter, "", 1)
    order = out + "".join(sorted(set("".join(letters)) - set(out)))
    result: Tensor | None = None
    for tensor, names in zip(tensors, letters, strict=True):
        aligned = tensor.permute([names.index(letter) for letter in order if letter in names])
        for dim, letter in enumerate(order):
            if letter not in names:
                aligned = aligned.unsqueeze(dim)
        result = aligned if result is None else walk.times(result, aligned)
    assert result is not None
    summed = range(len(out), len(order))
    return walk.merge(node, result, summed).reshape(result.shape[: len(out)])


def _affine(walk: Walk, node: fx.Node, product: Tensor, shift: Tensor | None) -> Tensor:
    """Return the labels of a product plus a shift."""
    return walk.join(node, product, shift).expand(walk.shape(node))


@rule("linear")
def _linear(walk: Walk, node: fx.Node) -> Value:
    walk.factor(walk.graph.argument(node, "weight"), walk.graph.argument(node, "input"))
    x, w = walk.get(node, "input"), walk.get(node, "weight")
    lead = _letters(x.ndim - 1)
    if w.ndim == 1:
        return _affine(walk, node, contract(walk, node, [(x, lead + "i"), (w, "i")], lead), walk.maybe(node, "bias"))
    product = contract(walk, node, [(x, lead + "i"), (w, "oi")], lead + "o")
    return _affine(walk, node, product, walk.maybe(node, "bias"))


@rule("matmul", "mm", "bmm", "mv", "dot", "vdot")
def _matmul(walk: Walk, node: fx.Node) -> Value:
    walk.factor(*node.args[:2])
    return _matrix_product(walk, node, walk.of(node.args[0]), walk.of(node.args[1])).expand(walk.shape(node))


@rule("addmm", "baddbmm", "addmv")
def _addmm(walk: Walk, node: fx.Node) -> Value:
    walk.factor(*node.args[1:3])
    product = _matrix_product(walk, node, walk.of(node.args[1]), walk.of(node.args[2]))
    return _affine(walk, node, product, walk.get(node, "self"))


def _matrix_product(walk: Walk, node: fx.Node, left: Tensor, right: Tensor) -> Tensor:
    """Return the labels of a matrix product, batch dimensions broadcast as `torch.matmul` does."""
    rows, columns = left.shape[-2:-1], right.shape[-1:] if right.ndim > 1 else ()
    left = left.unsqueeze(0) if left.ndim == 1 else left
    right = right.unsqueeze(-1) if right.ndim == 1 else right
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]
    lead = _letters(len(batch))
    left, right = left.expand(*batch, *left.shape[-2:]), right.expand(*batch, *right.shape[-2:])
    product = contract(walk, node, [(left, lead + "mi"), (right, lead + "in")], lead + "mn")
    return product.reshape([*batch, *rows, *columns])


@rule("einsum")
def _einsum(walk: Walk, node: fx.Node) -> Value:
    equation, arguments = node.args[0], node.args[1]
    assert isinstance(equation, str)
    assert isinstance(arguments, Sequence)
    walk.factor(*arguments)
    tensors = [walk.of(argument) for argument in arguments]
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    width = max(
        (tensor.ndim - len(term) + 3 for tensor, term in zip(tensors, terms, strict=True) if "..." in term), default=0
    )
    dots = "".join(chr(ord("Ā") + i) for i in range(width))
    operands = []
    for tensor, term in zip(tensors, terms, strict=True):
        term = term.replace("...", dots[width - (tensor.ndim - len(term) + 3) :] if "..." in term else "")
        for letter in sorted({letter for letter in term if term.count(letter) > 1}):
            first, second = term.index(letter), term.rindex(letter)
            tensor = tensor.diagonal(dim1=first, dim2=second)  # a repeated letter takes the diagonal
            term = term[:first] + term[first + 1 : second] + term[second + 1 :] + letter
        operands.append((tensor, term))
    if not arrow:
        right = "..." + "".join(sorted(c for c in set(left) - set(".,") if left.count(c) == 1))
    return contract(walk, node, operands, right.replace("...", dots)).expand(walk.shape(node))


@rule("bilinear")
def _bilinear(walk: Walk, node: fx.Node) -> Value:
    walk.factor(walk.graph.argument(node, "weight"))
    x, y, w = walk.get(node, "input1"), walk.get(node, "input2"), walk.get(node, "weight")
    lead = _letters(x.ndim - 1)
    product = contract(walk, node, [(x, lead + "i"), (w, "oij"), (y, lead + "j")], lead + "o")
    return _affine(walk, node, product, walk.maybe(node, "bias"))


@rule("outer")
def _outer(walk: Walk, node: fx.Node) -> Value:
    walk.factor(*node.args[:2])
    return contract(walk, node, [(walk.of(node.args[0]), "m"), (walk.of(node.args[1]), "n")], "mn")


@rule(*CONVOLUTIONS)
def _convolution(walk: Walk, node: fx.Node) -> Value:
    walk.factor(walk.graph.argument(node, "weight"))
    x, w, shape = walk.get(node, "input"), walk.get(node, "weight"), walk.shape(node)
    groups, spatial = walk.graph.argument(node, "groups"), w.ndim - 2
    weight = "gio" if "transpose" in walk.graph.operator(node) else "goi"
    batched = x.ndim == w.ndim
    x = x if batched else x.unsqueeze(0)
    # Windows overlap, so all positions must have one scale. The zeros of the padding have any scale.
    x = walk.merge(node, x, range(2, x.ndim)).reshape(x.shape[0], groups, -1)
    w = walk.merge(node, w, range(2, w.ndim)).reshape(groups, -1, w.shape[1])
    product = contract(walk, node, [(x, "bgi"), (w, weight)], "bgo").flatten(1)
    labels = walk.join(node, product, walk.maybe(node, "bias"))
    labels = labels.reshape(*labels.shape, *[1] * spatial)
    return (labels if batched else labels.squeeze(0)).expand(shape)


@rule("embedding")
def _embedding(walk: Walk, node: fx.Node) -> Value:
    walk.factor(walk.graph.argument(node, "weight"))
    # The data decides which rows are used.
    return walk.merge(node, walk.get(node, "weight"), [0]).squeeze(0).expand(walk.shape(node))


@rule("scaled_dot_product_attention")
def _attention(walk: Walk, node: fx.Node) -> Value:
    query, key, value = (walk.get(node, name) for name in ("query", "key", "value"))
    if walk.graph.argument(node, "enable_gqa"):
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
    scores = _matrix_product(walk, node, query, key.transpose(-2, -1))
    mask = walk.maybe(node, "attn_mask")
    walk.fix(node, scores, mask)
    return walk.merge(node, value, [-2]).expand(walk.shape(node))


def _letters(count: int) -> str:
    """Return capital letters for leading dimensions; rules name other dimensions with small letters."""
    return "".join(chr(ord("A") + i) for i in range(count))


@rule("cdist")
def _distance(walk: Walk, node: fx.Node) -> Value:
    left, right = (walk.merge(node, walk.get(node, name), [-1]) for name in ("x1", "x2"))
    return walk.join(node, left, right.transpose(-2, -1)).expand(walk.shape(node))


@rule("cosine_similarity")
def _cosine(walk: Walk, node: fx.Node) -> Value:
    dim = walk.graph.argument(node, "dim")
    for name in ("x1", "x2"):
        walk.merge(node, walk.get(node, name), [dim])
    return lb.uniform(lb.ONE, walk.shape(node))


@rule("tensordot")
def _tensordot(walk: Walk, node: fx.Node) -> Value:
    walk.factor(*node.args[:2])
    left, right = walk.get(node, "self"), walk.get(node, "other")
    first = [dim % left.ndim for dim in walk.graph.argument(node, "dims_self")]
    second = [dim % right.ndim for dim in walk.graph.argument(node, "dims_other")]
    left_names = list(_letters(left.ndim))
    right_names = [chr(ord("a") + dim) for dim in range(right.ndim)]
    for a, b in zip(first, second, strict=True):
        right_names[b] = left_names[a]
    out = [name for dim, name in enumerate(left_names) if dim not in first]
    out += [name for dim, name in enumerate(right_names) if dim not in second]
    operands = [(left, "".join(left_names)), (right, "".join(right_names))]
    return contract(walk, node, operands, "".join(out)).reshape(torch.Size(walk.shape(node)))
