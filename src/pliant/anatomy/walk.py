"""Run an exported graph on labels instead of values.

A `Walk` visits the calls of a graph in order and gives each value a label tensor. A `Meaning` decides what labels stand
for: linear forms in the log-scales of the parameters (`scales`), or sets of entries of the parameters (`partition`).
One set of rules says what each call does to labels (`arithmetic`, `shapes`, `contractions`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from pliant.anatomy import labels as lb
from pliant.anatomy.export import GraphError, ModelGraph
from pliant.anatomy.operators import VIEWS

Value = Tensor | Sequence[Tensor | None] | None
Rule = Callable[["Walk", fx.Node], Value]

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators, by their names without overload."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return register


class Meaning(ABC):
    """What labels stand for, and how they combine. The methods that only take note do nothing by default."""

    @abstractmethod
    def parameter(self, name: str, shape: torch.Size) -> Tensor:
        """Return the labels of a parameter."""

    @abstractmethod
    def multiply(self, left: int, right: int, power: Fraction) -> int:
        """Return the label of `left * right**power`."""

    @abstractmethod
    def add(self, left: int, right: int, node: fx.Node) -> int:
        """Return the label of the sum of two entries with different labels, not `ANY`."""

    @abstractmethod
    def mix(self, labels: Sequence[int], node: fx.Node) -> int:
        """Return the label of a reduction over entries with two or more different labels, not `ANY`."""

    def fix(self, label: int, node: fx.Node) -> None:  # noqa: B027
        """Take note that a call is not homogeneous, so its operands must keep their scale."""

    def statistic(self, name: str, labels: Tensor, node: fx.Node) -> None:  # noqa: B027
        """Take note that a buffer holds values with these labels."""

    def split(self, whole: Tensor, pieces: Sequence[Tensor]) -> None:  # noqa: B027
        """Take note that a call splits a tensor."""

    def read(self, labels: Tensor) -> None:  # noqa: B027
        """Take note that a call uses these labels, other than to move entries."""


class Walk:
    """One pass over a graph.

    Args:
        graph: The graph.
        meaning: What the labels stand for.
        strict: Whether a call without a rule is an error. Otherwise its operands must keep their scale, which keeps
            the function whatever the call does.
        shortcuts: Nodes that take the labels of another node; None for the nodes in between.
    """

    def __init__(
        self,
        graph: ModelGraph,
        meaning: Meaning,
        strict: bool = True,
        shortcuts: Mapping[fx.Node, fx.Node | None] | None = None,
    ) -> None:
        self.graph = graph
        self.meaning = meaning
        self.strict = strict
        self.shortcuts = shortcuts or {}
        self.values: dict[fx.Node, Value] = {}
        self.factors: set[str] = set()
        self.epsilons: dict[fx.Node, float] = {}
        self._origins: dict[fx.Node, frozenset[str]] = {}
        self._from_inputs: set[fx.Node] = set(graph.inputs)

    def run(self) -> None:
        """Visit every call."""
        uses = self.graph.first_uses()
        late = (len(self.graph.nodes), 0)
        for node, name in sorted(self.graph.parameters.items(), key=lambda item: uses.get(item[0], late)):
            self.values[node] = self.meaning.parameter(name, self.graph.shape(node))
            self._origins[node] = frozenset({name})
        for node in (*self.graph.buffers, *self.graph.constants, *self.graph.inputs):
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                constant = self.graph.constants.get(node)
                label = lb.ANY if isinstance(constant, Tensor) and _scaleless(constant) else lb.ONE
                self.values[node] = lb.uniform(label, value.shape)
        for node in self.graph.nodes:
            value = self._visit(node)
            _check(self.graph, node, value)
            self.values[node] = lb.tidy(value) if isinstance(value, Tensor) else value
            self._note_origins(node)
        for node in self.graph.outputs.values():
            self.meaning.read(self.of(node))

    def _visit(self, node: fx.Node) -> Value:
        """Return the labels of a call's result."""
        if node in self.shortcuts:
            source = self.shortcuts[node]
            return None if source is None else self.of(source)
        name = self.graph.operator(node)
        first = node.args[0] if node.args else None
        if name == "getitem":
            assert isinstance(first, fx.Node)
            results = self.values[first]
            assert isinstance(results, Sequence)
            return results[int(node.args[1])]  # type: ignore[arg-type]
        if name not in VIEWS:
            for source in node.all_input_nodes:
                value = self.values.get(source)
                if isinstance(value, Tensor):
                    self.meaning.read(value)
        function = RULES.get(name)
        constant = all(self._is_one(source) for source in node.all_input_nodes)
        if constant and (function is None or node.all_input_nodes):
            return self.everywhere(node, lb.ONE)  # all operands are constants
        if function is not None:
            return function(self, node)
        if not self.strict:
            return self.fix_all(node)
        raise GraphError(
            f"no rule for the scale of {self.graph.describe(node)}, {self.graph.location(node)}; "
            "pliant.anatomy.analyze(…, strict=False) keeps the scale of its operands."
        )

    def _note_origins(self, node: fx.Node) -> None:
        """Record the parameters from which a weight is computed by calls that follow their scale."""
        name, sources, first = self.graph.operator(node), node.all_input_nodes, node.args[0] if node.args else None
        if not self._from_inputs.isdisjoint(sources):
            self._from_inputs.add(node)
        found = [self._origins[source] for source in sources if source in self._origins]
        if name in VIEWS or name == "getitem":
            found = [self._origins[first]] if isinstance(first, fx.Node) and first in self._origins else []
        elif node in self._from_inputs or (found and self._is_one(node)):
            found = []
        elif name in ("add", "sub") and not all(each in self._origins for each in node.args[:2]):
            found = []  # such as 1 + γ, which is not homogeneous in γ
        if found:
            self._origins[node] = frozenset().union(*found)

    def _is_one(self, node: fx.Node) -> bool:
        value, result = self.values.get(node), node.meta.get("val")
        if not isinstance(result, Tensor | tuple | list):
            return True  # a number
        parts = value if isinstance(value, Sequence) else [value]
        return all(part is not None and lb.single(part) == lb.ONE for part in parts)

    def everywhere(self, node: fx.Node, label: int) -> Value:
        """Return one label for all results of a call."""
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            return lb.uniform(label, value.shape)
        if isinstance(value, tuple | list):
            return [lb.uniform(label, v.shape) if isinstance(v, Tensor) else None for v in value]
        return None

    # The vocabulary of the rules.

    def of(self, value: Any) -> Tensor:
        """Return the labels of a node or number: `ANY` for zero and infinity, `ONE` for other numbers."""
        if isinstance(value, fx.Node):
            found = self.values[value]
            if not isinstance(found, Tensor):
                raise GraphError(f"no rule for this result of {self.graph.describe(value)}")
            return found
        assert isinstance(value, int | float | bool), value
        return lb.uniform(lb.ANY if value == 0 or math.isinf(value) else lb.ONE, ())

    def get(self, node: fx.Node, name: str) -> Tensor:
        """Return the labels of an argument by its name in the operator's schema."""
        return self.of(self.graph.argument(node, name))

    def maybe(self, node: fx.Node, name: str) -> Tensor | None:
        """Return the labels of an optional argument."""
        value = self.graph.find_argument(node, name)
        return None if value is None else self.of(value)

    def shape(self, node: fx.Node) -> torch.Size:
        """Return the shape of a call's result."""
        return self.graph.shape(node)

    def times(self, left: Tensor, right: Tensor, power: int | Fraction = 1) -> Tensor:
        """Return the labels of `left * right**power`."""
        exponent = Fraction(power)

        def multiply(a: int, b: int) -> int:
            return lb.ANY if lb.ANY in (a, b) else self.meaning.multiply(a, b, exponent)

        return lb.combine(left, right, multiply)

    def power(self, base: Tensor, power: int | Fraction) -> Tensor:
        """Return the labels of `base**power`."""
        if not power:
            return lb.uniform(lb.ONE, base.shape)  # also for zeros
        return self.times(lb.uniform(lb.ONE, ()), base, power).expand(base.shape)

    def join(self, node: fx.Node, *operands: Tensor | None) -> Tensor:
        """Return the labels of tensors that are added, compared or selected from, entry by entry."""

        def add(a: int, b: int) -> int:
            if a == b or b == lb.ANY:
                return a
            return b if a == lb.ANY else self.meaning.add(a, b, node)

        present = [operand for operand in operands if operand is not None]
        result = present[0]
        for other in present[1:]:
            result = lb.combine(result, other, add)
        return result

    def merge(self, node: fx.Node, labels: Tensor, dims: Sequence[int]) -> Tensor:
        """Return the labels after a reduction over dimensions, which are kept with size one."""

        def mix(group: list[int]) -> int:
            group = [label for label in group if label != lb.ANY]
            return group[0] if len(group) == 1 else self.meaning.mix(group, node)

        return lb.reduce(labels, dims, mix)

    def fix(self, node: fx.Node, *operands: Tensor | None) -> None:
        """Demand that operands keep their scale."""
        for operand in operands:
            if operand is not None:
                for label in torch.unique(lb.compact(operand)).tolist():
                    if label not in (lb.ANY, lb.ONE):
                        self.meaning.fix(label, node)

    def fix_all(self, node: fx.Node) -> Value:
        """Demand that all operands of a call keep their scale, and return the labels of its results."""
        for source in node.all_input_nodes:
            value = self.values.get(source)
            self.fix(node, *([value] if isinstance(value, Tensor) else value or []))
        return self.everywhere(node, lb.ONE)

    def is_number(self, value: Any) -> bool:
        """Say whether a factor is a number. A parameter that is multiplied by a number may still be a shift."""
        return not isinstance(value, fx.Node) or value in self.graph.constants

    def factor(self, *arguments: Any) -> None:
        """Note that parameters enter a product, so they are weights, not shifts."""
        for argument in arguments:
            if isinstance(argument, fx.Node) and argument in self._origins:
                self.factors |= self._origins[argument]


def _scaleless(constant: Tensor) -> bool:
    """Say whether a constant is known to hold only zeros and infinities."""
    if constant.is_meta or not constant.is_floating_point():
        return False
    return bool(((constant == 0) | constant.isinf()).all())


def _check(graph: ModelGraph, node: fx.Node, value: Value) -> None:
    """Assert that labels have the shape of their values."""
    if isinstance(value, Tensor):
        assert value.shape == graph.shape(node), (graph.describe(node), value.shape, graph.shape(node))
    elif isinstance(value, Sequence):
        for part, result in zip(value, node.meta["val"], strict=True):
            assert part is None or part.shape == result.shape, graph.describe(node)
