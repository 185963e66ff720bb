"""Make the plan by which a method rescales a model: from its traced graph, or from a chain of layers."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from torch import Tensor, nn

from pliant._validation import check_choice, check_modules
from pliant._warnings import warn_user
from pliant.anatomy.chain import Mode, chain_layers, chain_plan
from pliant.anatomy.export import ExampleError, GraphError
from pliant.anatomy.layers import Layer, called_layers
from pliant.anatomy.plan import ScalePlan
from pliant.anatomy.rescaling import OnConflict, ScaleGraph, analyze

Order = Literal["graph", "forward"]


def plan_rescaling(
    model: nn.Module,
    example: Any = None,
    *,
    order: Order | Sequence[str] = "graph",
    mode: Mode = "exact",
    approximate: Collection[str] = (),
    on_conflict: OnConflict = "preserve",
) -> ScalePlan:
    """Return which parameters follow when weights are rescaled, so that the network's function is kept.

    Args:
        model: The model.
        example: An example input. Not needed if `order` lists the layers.
        order: "graph" analyzes the traced model, for any architecture. "forward" treats the layers in order of call as
            a chain, whatever connects them. A list of module names is an explicit chain; other layers are left alone.
        mode: "exact" keeps the function. "paper" is Algorithm 1 of the SWR paper with its erratum fixed; it is defined
            for chains, so "graph" means "forward" there.
        approximate: Activations to treat as if they were homogeneous, e.g. {"gelu", "silu"}. By default their input
            keeps its scale.
        on_conflict: What to do if keeping the function does not let a weight have its factor (queries and keys before
            a softmax): "preserve" the function, or "rescale" the weight all the same.

    Raises:
        GraphError: If the model cannot be analyzed.
        ValueError: If an option is not allowed, or options do not fit together.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> plan_rescaling(model, order=["0", "2"]).matrix.int().tolist()
        [[1, 0], [1, 0], [0, 1], [1, 1]]
    """
    check_choice("mode", mode, get_args(Mode))
    check_choice("on_conflict", on_conflict, get_args(OnConflict))
    if isinstance(order, str):
        check_choice("order", order, get_args(Order))
        if example is None:
            raise ValueError("example: None; pass an example input, or list the layers with order=[module names]")
    drifts = bool(approximate) or on_conflict == "rescale"
    if order == "graph" and mode == "exact":
        scales = _analyze(model, example, approximate, on_conflict)
        _warn_of_loss(scales)
        return replace(scales.plan(), graph=scales, drifts=drifts)
    if drifts:
        raise ValueError(
            "approximate, on_conflict: they need order='graph' with mode='exact'; a chain treats every activation as "
            "homogeneous"
        )
    if isinstance(order, str):
        return chain_plan(chain_layers(model, called_layers(model, example)), mode)
    return chain_plan([Layer(name, model.get_submodule(name)) for name in check_modules("order", model, order)], mode)


def _analyze(model: nn.Module, example: Any, approximate: Collection[str], on_conflict: OnConflict) -> ScaleGraph:
    try:
        return analyze(model, example, approximate=approximate, on_conflict=on_conflict)
    except ExampleError:
        raise
    except GraphError as error:
        raise GraphError(f"{error} A plan with order='forward' or order=[module names] needs no graph.") from error


def _warn_of_loss(scales: ScaleGraph) -> None:
    """Warn if the model returns a loss on the example: the plan would keep the scale of the loss."""
    graph = scales.graph
    inputs = (value for value in graph.inputs.values() if isinstance(value, Tensor) and value.ndim > 1)
    samples = max(map(len, inputs), default=1)
    single = [
        name
        for name, node in graph.outputs.items()
        if not graph.shape(node) and graph.is_learned(node) and (samples > 1 or "loss" in name)
    ]
    if single:
        warn_user(
            f"example: with it {type(scales.model).__name__} returns a single number ({', '.join(single)}), probably a "
            "loss. Its scale would be kept, and with it the scale of the logits; leave the labels out of the example"
        )
