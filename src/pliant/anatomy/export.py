"""A model as a graph of ATen calls, from which scales and units are computed.

`export_graph(model, example)` traces the model with `torch.export`, in its current mode, and returns a `ModelGraph`:

- `nodes`: the calls in order of execution. In-place calls are replaced (`add_` by `add`), and writes to buffers are
  listed in `mutations`. These composite calls are not decomposed: `linear`, `conv2d`, `layer_norm`, `group_norm`,
  `rms_norm`, `embedding`, `scaled_dot_product_attention`, `softmax`, `einsum`, `matmul`, `lstm`. Batch norm appears as
  `_native_batch_norm_legit_functional` (training) or `_native_batch_norm_legit_no_training` (eval), dropout as
  `dropout`, `native_dropout` or `clone`. A call with several results is followed by `getitem` calls. Bodies of
  `no_grad` are inlined, and `autocast` has no effect.
- `parameters`, `buffers`, `constants`, `inputs`: the meaning of each placeholder. A tied weight has one name: its name
  in `model.named_parameters()`.
- `outputs`: the tensors that the model returns, by a path such as `logits` or `heads.0`.

All sizes are the example's sizes. Nothing is symbolic.
"""

import contextlib
import io
import logging
import operator
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.distributions import Distribution
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils._pytree import tree_leaves, tree_unflatten

from pliant.running import Example, call_with, check_callable, left_as_it_was, split_example

_TORCH = str(Path(torch.__file__).parent)
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_ALIASES = {
    "absolute": "abs", "clip": "clamp", "concat": "cat", "concatenate": "cat", "divide": "div", "greater": "gt",
    "greater_equal": "ge", "less": "lt", "less_equal": "le", "multiply": "mul", "negative": "neg", "not_equal": "ne",
    "special_erf": "erf", "special_softmax": "softmax", "subtract": "sub", "true_divide": "div",
}  # fmt: skip
"""Second names of calls with the same arguments."""
_FUNCTIONAL_ALIASES = {
    "reshape": "view", "flatten": "view", "contiguous": "clone", "lift_fresh_copy": "clone", "to": "_to_copy",
    "detach_": "detach", "dropout": "dropout",
}  # fmt: skip
"""Calls that may return their own operand, and the calls whose entries they share."""
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in \S+\n\s+(?P<code>.*)')


class GraphError(ValueError):
    """The model cannot be analyzed. The message names the call and its line of code."""


class ExampleError(GraphError):
    """The model cannot be called with the example."""


@dataclass(frozen=True)
class ModelGraph:
    """The exported graph of a model; the module docstring describes each field."""

    model: nn.Module
    graph_module: fx.GraphModule
    nodes: tuple[fx.Node, ...]
    parameters: dict[fx.Node, str]
    buffers: dict[fx.Node, str]
    constants: dict[fx.Node, Any]
    inputs: dict[fx.Node, Any]
    outputs: dict[str, fx.Node]
    mutations: dict[str, fx.Node]

    def operator(self, node: fx.Node) -> str:
        """Return the name of the operator that a node calls, without namespace and overload, such as "linear"."""
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            name = target._schema.name.removeprefix("aten::")
            return _ALIASES.get(name) or _FUNCTIONAL_ALIASES.get(name, name)
        return getattr(target, "__name__", str(target))

    def argument(self, node: fx.Node, name: str) -> Any:
        """Return an argument of a call by its name in the operator's schema, or its default."""
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        for position, argument in enumerate(target._schema.arguments):
            if argument.name != name:
                continue
            if name in node.kwargs:
                return node.kwargs[name]
            return node.args[position] if position < len(node.args) else argument.default_value
        raise KeyError(f"{target} has no argument {name!r}")

    def find_argument(self, node: fx.Node, name: str) -> Any:
        """Return an argument of a call like `argument`, or None if the operator has no such argument."""
        with contextlib.suppress(KeyError):
            return self.argument(node, name)
        return None

    def shape(self, node: fx.Node) -> torch.Size:
        """Return the shape of a node's value, which must be a single tensor."""
        value = node.meta["val"]
        assert isinstance(value, torch.Tensor)
        return value.shape

    def is_learned(self, node: fx.Node) -> bool:
        """Say whether a value depends on a parameter."""
        below, seen = [node], {node}
        while below:
            each = below.pop()
            if each in self.parameters:
                return True
            below.extend(source for source in each.all_input_nodes if source not in seen)
            seen.update(each.all_input_nodes)
        return False

    def first_uses(self) -> dict[fx.Node, tuple[int, int]]:
        """Return the first use of each node: the position of the call, and the position among its inputs."""
        uses: dict[fx.Node, tuple[int, int]] = {}
        for place, node in enumerate(self.nodes):
            for position, source in enumerate(node.all_input_nodes):
                uses.setdefault(source, (place, position))
        return uses

    def module_path(self, node: fx.Node) -> str:
        """Return the path of the submodule whose forward made the call, '' for the model itself."""
        return _innermost(node)[0]

    def module_type(self, node: fx.Node) -> str:
        """Return the class name of the submodule whose forward made the call."""
        return _innermost(node)[1].rpartition(".")[2] or type(self.model).__name__

    def module_call(self, node: fx.Node) -> str:
        """Return a name for this call of the submodule, which differs between several calls of one submodule."""
        stack = node.meta.get("nn_module_stack") or {}
        return str(next(reversed(stack), ""))

    def location(self, node: fx.Node) -> str:
        """Return the line of code of the call: the innermost outside torch, if there is one."""
        frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
        frames = [frame for frame in frames if not frame["file"].startswith("<") and frame["file"] != __file__]
        if not frames:
            return "source unknown"
        own = [frame for frame in frames if not frame["file"].startswith(_TORCH)]
        frame = (own or frames)[-1]
        return f"{frame['file']}:{frame['line']}: {frame['code'].strip()}"

    def describe(self, node: fx.Node) -> str:
        """Return operator, module and class in one phrase, such as "softmax in blocks.0.attention (Attention)"."""
        path = self.module_path(node)
        return f"{self.operator(node)} in {path or 'the model'} ({self.module_type(node)})"


def check_runs(model: nn.Module, example: Example) -> None:
    """Raise an ExampleError if the model cannot be called with the example. The model is left as it was."""
    try:
        with left_as_it_was(model), torch.no_grad():
            call_with(model, example)
    except Exception as error:
        raise ExampleError(
            f"example: {type(model).__name__} cannot be called with it: {type(error).__name__}: {error}"
        ) from error


def _export(shell: nn.Module, arguments: tuple[Any, ...]) -> ExportedProgram:
    """Export a model.

    `autocast` inside the model is switched off if possible, since calls under it lose their module path. Distributions
    do not validate their arguments, since validation depends on the data.
    """
    with _without_validation():
        exported = torch.export.export(shell, arguments, strict=False)
    bodies = [body for body in exported.graph_module.modules() if isinstance(body, fx.GraphModule)]
    if any(node.target is _AUTOCAST for body in bodies for node in body.graph.nodes):
        with contextlib.suppress(Exception), _without_autocast(), _without_validation():
            return torch.export.export(shell, arguments, strict=False)
    return exported


def _functional(exported: ExportedProgram) -> ExportedProgram:
    """Return the program without calls that write to their operands.

    `run_decompositions` traces the model a second time, which takes longer than the export. Most models need it only
    for calls that a graph may hold as they are.
    """
    exported.graph.eliminate_dead_code()
    calls = [node for node in exported.graph.nodes if node.op not in ("placeholder", "output")]
    return exported if all(map(_is_functional, calls)) else exported.run_decompositions({})


def _is_functional(node: fx.Node) -> bool:
    """Say whether a call is known to write to none of its operands, and is not made of calls that do."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    schema = target._schema
    if schema.name.removeprefix("aten::") in _FUNCTIONAL_ALIASES:
        return True
    if schema.is_mutable or torch.Tag.maybe_aliasing_or_mutating in target.tags:
        return False
    name = f"{schema.name}.{schema.overload_name}".removesuffix(".")
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    return not (is_composite and any(argument.alias_info for argument in schema.arguments))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch.export prints and logs when it fails, such as the graph so far, from the user's terminal."""
    loggers = {logger: logger.level for logger in map(logging.getLogger, ("torch.export", "torch.fx.experimental"))}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)


@contextlib.contextmanager
def _without_validation() -> Iterator[None]:
    usual = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(usual)


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    usual = {name: vars(torch.autocast)[name] for name in ("__enter__", "__exit__")}
    for name in usual:
        setattr(torch.autocast, name, lambda context, *_: None)
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(torch.autocast, name, function)


def export_graph(model: nn.Module, example: Example) -> ModelGraph:
    """Export a model in its current mode.

    Args:
        model: Any module that `torch.export` can trace. It is left as it was.
        example: An input of the model: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
            (For a model whose one argument is a dict, pass a tuple that holds it.)

    Returns:
        The graph of the call.

    Raises:
        GraphError: The model cannot be exported.
        ValueError: The model has no forward().
    """
    check_callable(model)
    arguments, keywords = split_example(example)
    shell = _Shell(model)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # Trace the parts of nn.TransformerEncoderLayer, not its fused inference kernel.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _quiet(), warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            exported = _export(shell, (arguments, keywords))
            program = _functional(exported)
    except Exception as error:
        check_runs(model, example)
        first = str(error).strip().partition("\n")[0]
        raise GraphError(
            f"torch.export cannot trace {type(model).__name__}: {type(error).__name__}: {first} "
            f"(control flow that depends on data is the usual cause)."
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)

    names = {id(tensor): name for name, tensor in model.named_parameters()}
    names |= {id(tensor): name for name, tensor in model.named_buffers()}
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    values = tree_leaves((arguments, keywords))
    parameters: dict[fx.Node, str] = {}
    buffers: dict[fx.Node, str] = {}
    constants: dict[fx.Node, Any] = {}
    inputs: dict[fx.Node, Any] = {}
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            inputs[node] = values[len(inputs)]
        elif spec.kind is InputKind.PARAMETER:
            parameters[node] = names[id(_lookup(shell, spec.target))]
        elif spec.kind is InputKind.BUFFER:
            buffers[node] = names[id(_lookup(shell, spec.target))]
        else:
            constants[node] = program.constants[str(spec.target)]

    nodes = {node.name: node for node in program.graph.nodes}
    paths = iter(tree_unflatten(range(exported.call_spec.out_spec.num_leaves), exported.call_spec.out_spec))
    outputs: dict[str, fx.Node] = {}
    mutations: dict[str, fx.Node] = {}
    for output in program.graph_signature.output_specs:
        node = nodes[output.arg.name]
        if output.kind is OutputKind.USER_OUTPUT:
            outputs[next(paths)] = node
        elif output.kind is OutputKind.BUFFER_MUTATION:
            mutations[names[id(_lookup(shell, output.target))]] = node
    graph = ModelGraph(
        model=model,
        graph_module=program.graph_module,
        nodes=tuple(node for node in program.graph.nodes if node.op == "call_function"),
        parameters=parameters,
        buffers=buffers,
        constants=constants,
        inputs=inputs,
        outputs=outputs,
        mutations=mutations,
    )
    for node in graph.nodes:
        if any(isinstance(size, torch.SymInt) for part in tree_leaves(node.meta.get("val")) for size in _sizes(part)):
            raise GraphError(
                f"the size of {graph.describe(node)}, {graph.location(node)}, depends on the data, so the model cannot "
                "be analyzed."
            )
    return graph


def _sizes(value: Any) -> tuple[Any, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else (value,)


class _Shell(nn.Module):
    """Calls a model and returns the tensors of its result by path, so that results of any type can be exported.

    Other parts of the result, such as numbers and cache objects, are left out.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {path or "output": tensor for path, tensor in _tensors(self.model(*arguments, **keywords), "")}


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a result with their paths, depth first."""
    prefix = f"{path}." if path else ""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{prefix}{key}")
    elif isinstance(value, tuple | list):
        labels = getattr(value, "_fields", range(len(value)))
        for label, item in zip(labels, value, strict=True):
            yield from _tensors(item, f"{prefix}{label}")
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name), f"{prefix}{field.name}")


def _lookup(root: nn.Module, target: str | None) -> Any:
    """Return a parameter or buffer by its dotted name, without the deduplication of `named_parameters`."""
    return operator.attrgetter(str(target))(root)


def _innermost(node: fx.Node) -> tuple[str, str]:
    """Return path and class of the innermost module on a node's stack, without the shell."""
    stack = node.meta.get("nn_module_stack") or {}
    path, kind = list(stack.values())[-1] if stack else ("", "")
    kind = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    if path in ("", "model"):
        return "", kind if path else ""
    return path.removeprefix("model."), kind
