"""The system of linear equations whose solutions are the rescalings that keep a model's function.

The unknowns are the logarithms of the factors by which the blocks of the parameters are multiplied. A walk over the
exported graph gives every tensor its log-scale as a linear form in these unknowns, and collects the equations that each
call requires (docs/proportionality.md has the theory, docs/proportionality-proofs.md the proof).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor, fx

from pliant.anatomy import arithmetic, contractions, shapes  # noqa: F401  (they register the rules)
from pliant.anatomy import labels as lb
from pliant.anatomy.export import GraphError, ModelGraph
from pliant.anatomy.linear_forms import Form, FormTable, System, add
from pliant.anatomy.operators import APPROXIMABLE
from pliant.anatomy.partition import Partition, blocks_of, find_partition
from pliant.anatomy.plan import Block
from pliant.anatomy.walk import Meaning, Value, Walk

Kind = Literal["equal", "fixed", "frozen", "unreached"]


@dataclass(frozen=True)
class Demand:
    """An equation between scales, and its origin.

    Attributes:
        form: The form that must be zero.
        kind: `"equal"`: the terms of a sum. `"fixed"`: a call that is not homogeneous. `"frozen"`: a parameter without
            gradient. `"unreached"`: a parameter that the example does not use.
        node: The call that demands the equation, if any.
        reason: The operator and module, for people.
    """

    form: Form
    kind: Kind
    node: fx.Node | None
    reason: str


@dataclass(frozen=True)
class ScaleSystem:
    """The unknowns of a model and the equations between them.

    Attributes:
        blocks: The unknowns: blocks of parameters, in order of first use.
        weights: The unknowns that enter products: weights and scales of norm layers, not biases and shifts.
        demands: The equations.
        statistics: The running statistics of norm layers, and their forms.
        outputs: The model's outputs, and their forms.
        epsilons: The epsilons of norm layers, by call.
        approximated: The activations that are treated as relu, and the input of each.
        labels: The label tensor of every value in the graph. Labels are numbers of forms in `table`.
        table: The forms by number.
    """

    blocks: tuple[Block, ...]
    weights: frozenset[int]
    demands: tuple[Demand, ...]
    statistics: Mapping[Block, Form]
    outputs: Mapping[str, Form]
    epsilons: Mapping[fx.Node, float]
    approximated: Mapping[fx.Node, fx.Node]
    labels: Mapping[fx.Node, Value]
    table: FormTable


class _Scales(Meaning):
    """Labels that stand for linear forms in the unknowns, the log-scales."""

    def __init__(self, graph: ModelGraph, partition: Partition) -> None:
        self.graph = graph
        self.partition = partition
        self.table = FormTable()
        self.blocks: list[Block] = []
        self.indices: list[list[int]] = []
        self.demands: dict[frozenset[tuple[int, Fraction]], Demand] = {}
        self.statistics: dict[str, Tensor] = {}
        self.read_labels: set[int] = set()
        self._parameters: dict[str, Tensor] = {}

    def parameter(self, name: str, shape: torch.Size) -> Tensor:
        """Give every block of a parameter an unknown. A tied parameter gets its unknowns once."""
        if name in self._parameters:
            return self._parameters[name]
        blocks = blocks_of(name, shape, self.partition)
        dim = blocks[0][0].dim
        labels = torch.zeros(shape[dim] if len(blocks) > 1 else 1, dtype=torch.int64)
        for block, indices in blocks:
            labels[indices] = self.table.number({len(self.blocks): Fraction(1)})
            self.blocks.append(block)
            self.indices.append(indices)
        view = [-1 if d == dim else 1 for d in range(len(shape))]
        self._parameters[name] = labels.view(view).expand(shape)
        return self._parameters[name]

    def multiply(self, left: int, right: int, power: Fraction) -> int:
        """The log-scale of a product is the sum of log-scales."""
        return self.table.number(add(self.table[left], self.table[right], power))

    def add(self, left: int, right: int, node: fx.Node) -> int:
        """The terms of a sum must have one scale."""
        self.demand(add(self.table[left], self.table[right], Fraction(-1)), "equal", node)
        return left

    def mix(self, labels: Sequence[int], node: fx.Node) -> int:
        """The entries of a reduction must have one scale."""
        for label in labels[1:]:
            self.add(labels[0], label, node)
        return labels[0]

    def fix(self, label: int, node: fx.Node) -> None:
        """The operands of a call that is not homogeneous must keep their scale."""
        self.demand(self.table[label], "fixed", node)

    def statistic(self, name: str, labels: Tensor, node: fx.Node) -> None:
        """A running statistic has the scale of the values it describes, at every use."""
        if name in self.statistics:
            pairs = torch.unique(torch.stack([self.statistics[name], labels]), dim=1)
            for left, right in pairs.T.tolist():
                if left != right:
                    self.add(left, right, node)
        else:
            self.statistics[name] = labels

    def read(self, labels: Tensor) -> None:
        """Record the labels that reach a computation."""
        self.read_labels.update(torch.unique(lb.compact(labels)).tolist())

    def demand(self, form: Form, kind: Kind, node: fx.Node | None, reason: str = "") -> None:
        """Add an equation, unless it is empty or already known up to sign."""
        if not form:
            return
        sign = 1 if form[min(form)] > 0 else -1
        key = frozenset((unknown, sign * coefficient) for unknown, coefficient in form.items())
        reason = self.graph.describe(node) if node is not None else reason
        self.demands.setdefault(key, Demand(form, kind, node, reason))


def build_system(
    graph: ModelGraph,
    *,
    approximate: Collection[str] = (),
    strict: bool = True,
) -> ScaleSystem:
    """Return the system of scales of a graph; `pliant.anatomy.analyze` documents the options.

    Raises:
        GraphError: A call has no rule, or the example does not reach a parameter.
    """
    shortcuts = _approximated(graph, approximate)
    partition = find_partition(graph)
    scales, walk = _walk(graph, partition, strict, shortcuts)
    merged = _merge_inseparable(scales, partition)
    if merged != partition:
        scales, walk = _walk(graph, merged, strict, shortcuts)
    outputs = {}
    for name, node in graph.outputs.items():
        if node.meta["val"].is_floating_point():
            labels = walk.merge(node, walk.of(node), range(walk.of(node).ndim))
            outputs[name] = _form(scales, int(labels.reshape(())))
    for name, node in graph.mutations.items():
        if name not in scales.statistics and node.meta["val"].is_floating_point():
            walk.fix(node, walk.of(node))  # a buffer other than the statistics of norm layers
    read = {u for label in scales.read_labels if label != lb.ANY for u in scales.table[label]}
    parameters = dict(graph.model.named_parameters())
    lost = []
    for number, block in enumerate(scales.blocks):
        form = {number: Fraction(1)}
        if not parameters[block.name].requires_grad:
            scales.demand(form, "frozen", None, "requires_grad is False")
        elif number not in read:
            if parameters[block.name].numel():
                lost.append(str(block))
            scales.demand(form, "unreached", None, "the example does not reach it")
    if lost and strict:
        raise GraphError(
            f"the example does not reach {', '.join(lost[:5])}{' …' if len(lost) > 5 else ''}. Pass an example that "
            "uses these parameters, or freeze them with requires_grad_(False); pliant.anatomy.analyze(…, strict=False) "
            "leaves them alone."
        )
    return ScaleSystem(
        blocks=tuple(scales.blocks),
        weights=frozenset(n for n, block in enumerate(scales.blocks) if block.name in walk.factors),
        demands=tuple(scales.demands.values()),
        statistics=_statistics(scales),
        outputs=outputs,
        epsilons=walk.epsilons,
        approximated={node: source for node, source in shortcuts.items() if source is not None},
        labels=walk.values,
        table=scales.table,
    )


def _walk(
    graph: ModelGraph, partition: Partition, strict: bool, shortcuts: Mapping[fx.Node, fx.Node | None]
) -> tuple[_Scales, Walk]:
    scales = _Scales(graph, partition)
    walk = Walk(graph, scales, strict, shortcuts)
    walk.run()
    return scales, walk


def _form(scales: _Scales, label: int) -> Form:
    return {} if label == lb.ANY else scales.table[label]


def _merge_inseparable(scales: _Scales, partition: Partition) -> Partition:
    """Merge blocks of a parameter that have the same scale in every solution.

    Rotary embeddings split each head in halves and add them crosswise, so both halves must have one scale.
    """
    system = System(demand.form for demand in scales.demands.values())
    merged: Partition = {}
    for name, (dim, classes) in partition.items():
        classes = list(classes)
        numbers: dict[frozenset[tuple[int, Fraction]], int] = {}
        for unknown, block in enumerate(scales.blocks):
            if block.name == name:
                solution = frozenset(system.reduce({unknown: Fraction(1)}).items())
                number = numbers.setdefault(solution, len(numbers))
                for index in scales.indices[unknown]:
                    classes[index] = number
        if len(numbers) > 1:
            merged[name] = (dim, classes)
    return merged


def _statistics(scales: _Scales) -> dict[Block, Form]:
    """Split the buffers where their scale changes."""
    statistics: dict[Block, Form] = {}
    for name, labels in scales.statistics.items():
        whole = lb.single(labels)
        if whole is not None:
            statistics[Block(name)] = _form(scales, whole)
            continue
        numbers = labels.tolist()
        starts = [i for i in range(len(numbers)) if i == 0 or numbers[i] != numbers[i - 1]]
        for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True):
            statistics[Block(name, 0, start, stop)] = _form(scales, numbers[start])
    return statistics


def _named_for(name: str) -> str:
    """Return the longest name of an activation that the name of a class contains: relu in ReLUSquared, not elu.

    Example:
        >>> _named_for("NewGELUActivation"), _named_for("ReLUSquared"), _named_for("Gate")
        ('gelu', 'relu', '')
    """
    return max((each for each in (*APPROXIMABLE, "relu") if each in name.lower()), key=len, default="")


def _approximated(graph: ModelGraph, approximate: Collection[str]) -> dict[fx.Node, fx.Node | None]:
    """Return the activations to treat as relu, each with its input.

    An activation is a call of that name, or all calls of a module whose class has that name in its own and which has
    neither parameters nor submodules: many models write GELU by hand. The nodes inside such a module map to None.
    """
    bare = {
        name: module for name, module in graph.model.named_modules() if not [*module.children(), *module.parameters()]
    }
    shortcuts: dict[fx.Node, fx.Node | None] = {}
    regions: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if graph.operator(node) in approximate:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            shortcuts[node] = source
        elif (path := graph.module_path(node)) in bare and _named_for(type(bare[path]).__name__) in approximate:
            regions.setdefault(graph.module_call(node), []).append(node)
    for nodes in regions.values():
        inside = set(nodes)
        sources = {source for node in nodes for source in node.all_input_nodes if source not in inside}
        if len(sources) != 1 or inside & set(shortcuts) or next(iter(sources)) in graph.parameters:
            continue
        for node in nodes:
            leaves = any(user not in inside for user in node.users)
            shortcuts[node] = next(iter(sources)) if leaves else None
    return shortcuts
