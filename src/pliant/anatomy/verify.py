"""Run an exported graph to check the predicted scales, and to measure drift.

Multiplication by a power of two is exact in floating point. So a rescaling by powers of two must multiply every value
of the graph by its predicted power of two, to the last bit, once the epsilons of norm layers are negligible. A wrong
rule shows at the call it is wrong for.
"""

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx

from pliant.anatomy import labels as lb
from pliant.anatomy.export import GraphError, ModelGraph
from pliant.anatomy.linear_forms import Form, System
from pliant.anatomy.plan import Block
from pliant.anatomy.scales import ScaleSystem

_TINY = 2e-38
"""An epsilon that is negligible next to any variance, and still a normal number in float32."""

_TOLERANCE = 1e-4
"""Powers of two are exact, so this only has to be far below the error of a wrong power of two."""


class _Interpreter(fx.Interpreter):
    """Runs a graph. If a system is given, epsilons are negligible and approximated activations are relu."""

    def __init__(self, graph: ModelGraph, system: ScaleSystem | None) -> None:
        super().__init__(graph.graph_module, garbage_collect_values=False)
        self.exported = graph
        self.epsilons = {} if system is None else system.epsilons
        self.approximated = {} if system is None else system.approximated

    def run_node(self, n: fx.Node) -> Any:
        if n in self.approximated:
            return torch.relu(self.env[self.approximated[n]])
        if n not in self.epsilons:
            value = super().run_node(n)
            # Uninitialized memory differs between runs.
            return value.zero_() if n.op == "call_function" and "empty" in self.exported.operator(n) else value
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        names = [argument.name for argument in n.target._schema.arguments]  # type: ignore[union-attr]
        # In a norm layer written by hand, the epsilon is the second operand of the addition.
        place = names.index("eps") if "eps" in names else 1
        if place < len(args):
            args = (*args[:place], _TINY, *args[place + 1 :])
        else:
            kwargs = {**kwargs, names[place]: _TINY}
        return self.call_function(n.target, args, kwargs)


def run_graph(
    graph: ModelGraph,
    tensors: Mapping[str, Tensor],
    system: ScaleSystem | None = None,
    inputs: Mapping[fx.Node, Any] | None = None,
) -> dict[fx.Node, Any]:
    """Run a graph and return the value of every node.

    Args:
        graph: The graph. The model's own state is not changed.
        tensors: Parameters and buffers that replace the model's own.
        system: If given, the epsilons of norm layers are made negligible and approximated activations are relu.
        inputs: The inputs; the example's if None.
    """
    inputs = graph.inputs if inputs is None else inputs
    state = dict(graph.model.named_parameters()) | dict(graph.model.named_buffers()) | dict(tensors)
    values: list[Any] = []
    for node in graph.graph_module.graph.nodes:
        if node.op == "placeholder":
            name = graph.parameters.get(node) or graph.buffers.get(node)
            value = state[name] if name else graph.constants.get(node, inputs.get(node))
            values.append(value)
    interpreter = _Interpreter(graph, system)
    devices = {tensor.device for tensor in state.values() if tensor.is_cuda}
    with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(0)  # the same dropout masks in every run
        interpreter.run(*values, enable_io_processing=False)
    return interpreter.env


def drift(graph: ModelGraph, before: Mapping[fx.Node, Any], factors: Mapping[str, float]) -> dict[str, float]:
    """Return the largest deviation of each output from its old value times its factor, relative to the largest entry.

    Args:
        graph: The graph.
        before: The values of `run_graph` before the rescaling.
        factors: The predicted factor of each output.
    """
    after = run_graph(graph, {})
    result = {}
    for name, factor in factors.items():
        node = graph.outputs[name]
        expected = before[node].double() * factor
        size = expected.abs().max().item() if expected.numel() else 0.0
        difference = (after[node].double() - expected).abs()
        result[name] = difference.max().item() / size if size else difference.sum().item()
    return result


def check_system(graph: ModelGraph, system: ScaleSystem, seed: int = 0) -> None:
    """Rescale at random within the system, and compare every value of the graph with its predicted scale.

    Raises:
        GraphError: A value differs from its prediction. The message names the call.
    """
    generator = torch.Generator().manual_seed(seed)
    state = dict(graph.model.named_parameters()) | dict(graph.model.named_buffers())
    tensors = {name: _generic(tensor.detach(), generator) for name, tensor in state.items()}
    inputs = {n: _generic(x, generator) if isinstance(x, Tensor) else x for n, x in graph.inputs.items()}
    before = run_graph(graph, tensors, system, inputs)
    half = any(_is_half(node.meta.get("val")) for node in graph.nodes)
    for exponents in _draw(system, generator, largest=4 if half else 20):
        scaled = dict(tensors)
        forms: list[tuple[Block, Form]] = [(b, {n: Fraction(1)}) for n, b in enumerate(system.blocks)]
        for block, form in [*forms, *system.statistics.items()]:
            exponent = _evaluate(form, exponents)
            if exponent:
                if scaled[block.name] is tensors[block.name]:
                    scaled[block.name] = tensors[block.name].clone()
                block.of(scaled[block.name]).mul_(2.0 ** float(exponent))
        after = run_graph(graph, scaled, system, inputs)
        # Many values have the same scale, whose form may have a term for each block before.
        power = cache(partial(_power, system, exponents))
        for node in graph.nodes:
            _compare(graph, system, node, before[node], after[node], power)


def _power(system: ScaleSystem, exponents: list[Fraction], label: int) -> float:
    return 0.0 if label == lb.ANY else float(_evaluate(system.table[label], exponents))


def _compare(
    graph: ModelGraph, system: ScaleSystem, node: fx.Node, before: Any, after: Any, power: Callable[[int], float]
) -> None:
    labels = system.labels.get(node)
    if not isinstance(labels, Tensor) or not isinstance(before, Tensor) or not before.numel():
        return
    distinct, where = torch.unique(lb.compact(labels), return_inverse=True)
    powers = torch.tensor([power(label) for label in distinct.tolist()], dtype=torch.float64)
    factor = (2.0**powers)[where].reshape(lb.compact(labels).shape)
    if torch.equal(after, before * factor.to(before)):
        return  # nearly always; what follows treats NaN, and ranges that the type of the values does not have
    expected = before.double() * factor.to(before.device)
    same = (after.double() == expected) | (after.isnan() & before.isnan())
    if bool(same.all()):
        return
    difference = (after.double() - expected)[~same].abs() / factor.to(before.device).expand(same.shape)[~same]
    finite = before.double()[before.isfinite()].abs()
    size = finite.max().item() if finite.numel() else 0.0
    error = difference.max().item()
    if not error <= _TOLERANCE * size:
        raise GraphError(
            f"the rule for {graph.describe(node)}, {graph.location(node)}, is wrong: after a rescaling by powers of "
            f"two, the result differs from its prediction by {error / size if size else error:.1e}. Please report "
            "this call."
        )


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float16


def _generic(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Add noise to a constant tensor, such as a bias of zeros, so that its scale shows."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return tensor
    flat = tensor.reshape(-1)
    if any(bool((part != flat[0]).any()) for part in (flat[:8], flat)):  # the first entries nearly always tell
        return tensor
    noise = torch.rand(tensor.shape, generator=generator).to(tensor) / 2 + 0.1
    return tensor + noise


def _draw(system: ScaleSystem, generator: torch.Generator, largest: int) -> Iterator[list[Fraction]]:
    """Draw exponents that solve the system, small enough for every value of the graph to stay in range.

    Free unknowns get even exponents, so that square roots of scales are powers of two as well.
    """
    solution = System(demand.form for demand in system.demands)
    free = [n for n in range(len(system.blocks)) if n not in solution.solved]
    share, wanted = 1.0, 1
    while wanted and free:
        exponents = [Fraction(0)] * len(system.blocks)
        draws = torch.randint(-1, 2, (len(free),), generator=generator)
        kept = torch.rand(len(free), generator=generator) < share
        for number, value in zip(free, (draws * kept).tolist(), strict=True):
            exponents[number] = Fraction(2 * value)
        for number, form in solution.solved.items():
            exponents[number] = _evaluate(form, exponents)
        reached = max(abs(_evaluate(system.table[n], exponents)) for n in range(len(system.table)))
        if reached <= largest:
            yield exponents
            wanted -= 1
        elif share == 1.0:
            share, wanted = share / 2, 3  # fewer unknowns at a time, in more rounds
        else:
            share /= 2


def _evaluate(form: Form, exponents: list[Fraction]) -> Fraction:
    return sum((coefficient * exponents[unknown] for unknown, coefficient in form.items()), Fraction(0))
