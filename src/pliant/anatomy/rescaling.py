"""Which rescalings keep the function of a model, for any model that can be exported."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from pliant._names import suggest
from pliant._validation import check_choice
from pliant.anatomy.explain import explain
from pliant.anatomy.export import ModelGraph, check_runs, export_graph
from pliant.anatomy.linear_forms import Form, System
from pliant.anatomy.operators import APPROXIMABLE
from pliant.anatomy.plan import Block, BlockTensors, ScalePlan
from pliant.anatomy.scales import Demand, ScaleSystem, build_system
from pliant.anatomy.solve import project
from pliant.anatomy.verify import check_system, drift, run_graph
from pliant.distributed import unwrap_model, whole_model
from pliant.running import Example

OnConflict = Literal["preserve", "rescale"]


@dataclass(frozen=True)
class Rescaling:
    """The result of a rescaling.

    Attributes:
        factors: The factor of each block of a parameter or buffer that was multiplied.
        outputs: The predicted factor of each output of the model.
        drift: The largest deviation of each output from its prediction, relative to its largest entry, on the example.
    """

    factors: dict[str, float]
    outputs: dict[str, float]
    drift: dict[str, float]


class ScaleGraph:
    """The relations between the scales of a model's parameters, as found by `analyze`.

    Attributes:
        model: The model.
        graph: The exported graph of the model.
        system: The unknown scales and the equations between them.
        demands: The equations to satisfy. `on_conflict="rescale"` drops equations of calls that are not homogeneous.
    """

    def __init__(self, graph: ModelGraph, system: ScaleSystem, on_conflict: OnConflict = "preserve") -> None:
        self.model = graph.model
        self.graph = graph
        self.system = system
        self.on_conflict = on_conflict
        self.demands: tuple[Demand, ...] = tuple(
            demand for demand in system.demands if on_conflict == "preserve" or demand.kind != "fixed"
        )
        self._solution = System(demand.form for demand in self.demands)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of the parameters, in order of first use."""
        return self.system.blocks

    def is_fixed(self, block: Block) -> bool:
        """Say whether a block keeps its scale in every rescaling that keeps the function."""
        return not self._solution.reduce({self.blocks.index(block): Fraction(1)})

    def plan(self, wishes: Collection[str] | None = None) -> ScalePlan:
        """Return the map from wished factors to the nearest rescaling that keeps the function.

        Args:
            wishes: Names of parameters, or of single blocks as `str` writes them. By default all weights and scales
                of norm layers that are not fixed. Other weights stay as close to their values as the function allows.

        Raises:
            ValueError: A name is not a parameter of the model.
        """
        numbers = self._numbers(wishes)
        forms = [demand.form for demand in self.demands]
        solution = project(forms, len(self.blocks), numbers, self.system.weights)
        targets: dict[Block, Tensor] = {}
        for block, form in self._written():
            row = _apply(form, solution)
            if bool(row.any()):
                targets[block] = row
        outputs = [_apply(form, solution) for form in self.system.outputs.values()]
        empty = solution.new_zeros(0, len(numbers))
        return ScalePlan(
            wishes=tuple(self.blocks[number] for number in numbers),
            targets=tuple(targets),
            matrix=torch.stack(list(targets.values())) if targets else empty,
            outputs=torch.stack(outputs) if outputs else empty,
        )

    def explain(self) -> str:
        """Return a table with each parameter, the relation of its factor to others, and the reason."""
        return explain(self.graph, self.system, self.demands)

    @torch.no_grad()
    def rescale_(self, wishes: Mapping[str, float]) -> Rescaling:
        """Multiply parameters by wished factors, or by the nearest factors that keep the function.

        Weights without a wish stay as close to their values as the function allows. Biases and the running statistics
        of batch norm are scaled accordingly.

        Args:
            wishes: Positive factors by name of a parameter, or of a block as `str` writes it.

        Returns:
            The applied factors, the factors of the outputs, and the drift on the example.

        Raises:
            ValueError: A factor is not positive, or a name is not a parameter of the model.
        """
        for name, factor in wishes.items():
            if not 0 < factor < float("inf"):
                raise ValueError(f"wishes: the factor of {name!r} is {factor}; it must be positive and finite")
        plan = self.plan(wishes)
        wished = [wishes.get(str(block), wishes.get(block.name, 1.0)) for block in plan.wishes]
        logarithms = torch.tensor(wished, dtype=torch.float64).log()
        factors = (plan.matrix @ logarithms).exp().tolist()
        before = run_graph(self.graph, {})
        tensors = BlockTensors(self.model, plan.targets).get()
        for tensor, factor in zip(tensors, factors, strict=True):
            tensor.mul_(factor)
        outputs = dict(zip(self.system.outputs, (plan.outputs @ logarithms).exp().tolist(), strict=True))
        return Rescaling(
            factors={str(block): factor for block, factor in zip(plan.targets, factors, strict=True)},
            outputs=outputs,
            drift=drift(self.graph, before, outputs),
        )

    def _numbers(self, wishes: Collection[str] | None) -> list[int]:
        """Return the unknowns with a wish."""
        if wishes is None:
            return [n for n in sorted(self.system.weights) if not self.is_fixed(self.blocks[n])]
        names = {name for block in self.blocks for name in (str(block), block.name)}
        for name in wishes:
            if name not in names:
                raise ValueError(f"wishes: {name!r} is not a parameter; {suggest(name, sorted(names))}")
        return [n for n, block in enumerate(self.blocks) if {str(block), block.name} & set(wishes)]

    def _written(self) -> list[tuple[Block, Form]]:
        """Return statistics and parameters with their forms, in order of first use, statistics first."""
        uses: dict[str, tuple[int, int]] = {}
        for node, (place, position) in self.graph.first_uses().items():
            if node in self.graph.buffers:
                uses.setdefault(self.graph.buffers[node], (place, 0))
            elif node in self.graph.parameters:
                uses.setdefault(self.graph.parameters[node], (place, 1 + position))
        written: list[tuple[Block, Form]] = list(self.system.statistics.items())
        written += [(block, {n: Fraction(1)}) for n, block in enumerate(self.blocks)]
        return sorted(written, key=lambda item: uses.get(item[0].name, (len(self.graph.nodes), 0)))


def analyze(
    model: nn.Module,
    example: Example,
    *,
    approximate: Collection[str] = frozenset(),
    on_conflict: OnConflict = "preserve",
    strict: bool = True,
) -> ScaleGraph:
    """Find the rescalings of a model's parameters that keep its function up to a factor.

    The result is checked: copies of the parameters are rescaled at random, and every value of the graph is compared
    with its predicted scale. This costs two runs of the model on the example. A model on the meta device has no values,
    so its result is not checked; a constant of such a model keeps its scale. Frozen parameters are never rescaled.

    Args:
        model: Any model that `torch.export` can trace, in training or eval mode. It is left as it was. If it is
            sharded, all ranks call this.
        example: An input of the model: a tensor, a tuple of positional arguments, or a dict of keyword arguments. The
            model must make the same calls for all other inputs.
        approximate: Activations to treat as relu, out of gelu, silu, mish, elu, celu, selu, softplus and hardswish. The
            function is then kept approximately.
        on_conflict: What to do if a wish would change the function, because a call is not homogeneous (queries and
            keys before a softmax): `"preserve"` the function, or `"rescale"` anyway.
        strict: Whether calls without a rule and parameters that the example does not reach are errors. Otherwise the
            operands of such calls, and such parameters, keep their scale.

    Returns:
        The scale graph, which covers every parameter.

    Raises:
        GraphError: The model cannot be exported, a call has no rule, or the example does not reach a parameter.
        ValueError: An option has a value that is not allowed.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> analyze(model, torch.ones(1, 2)).plan().matrix.int().tolist()
        [[1, 0], [1, 0], [0, 1], [1, 1]]
    """
    if isinstance(approximate, str) or not set(approximate) <= APPROXIMABLE:
        allowed = ", ".join(sorted(APPROXIMABLE))
        raise ValueError(f"approximate: {approximate!r} is not allowed; it must be a set of {allowed}")
    check_choice("on_conflict", on_conflict, get_args(OnConflict))
    model = unwrap_model(model)
    with whole_model(model):
        graph = export_graph(model, example)
        system = build_system(graph, approximate=approximate, strict=strict)
        try:
            if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
                check_system(graph, system)
        except RuntimeError:
            check_runs(model, example)  # torch.export accepts examples of another precision than the model's
            raise
    return ScaleGraph(graph, system, on_conflict)


def _apply(form: Form, solution: Tensor) -> Tensor:
    """Return the value of a form for each wish, as a row."""
    row = solution.new_zeros(solution.shape[1])
    for unknown, coefficient in form.items():
        row = row + float(coefficient) * solution[unknown]
    return row
