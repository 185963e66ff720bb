"""Diagnose a network: every measure that applies, on one batch, against a reference."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, get_args

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pliant._validation import check_choice
from pliant.anatomy.layers import WEIGHT_LAYERS
from pliant.diagnostics import caveats as note
from pliant.diagnostics import measures as registry
from pliant.diagnostics.batches import Batch, LossFn, gather
from pliant.diagnostics.diagnosis import Diagnosis, combine
from pliant.diagnostics.measure import Measure
from pliant.diagnostics.probe import Probe, Statistics, batch_norms, batch_statistics, learning_alike
from pliant.diagnostics.tensors import same_parameters
from pliant.running import check_callable, undisturbed

Found = dict[str, Mapping[str, float]]

# What a measure raises that cannot be taken of this model and batch; torch raises NotImplementedError where a second
# derivative is missing.
SKIPPED = (ValueError, ArithmeticError, NotImplementedError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]


def diagnose(
    model: nn.Module,
    data: Any = None,
    loss_fn: LossFn | Mapping[str, LossFn] | None = None,
    reference: nn.Module | None = None,
    *,
    measures: Sequence[str] | None = None,
    samples: int = 256,
    statistics: Statistics = "batch",
) -> Diagnosis:
    """Measure what is known to go with loss of plasticity, and say which signs are there.

    The model is measured in eval mode and left as it was: weights, buffers, gradients, modes and random generators.
    Measures that lack what they need (labels, a loss, a reference) are skipped, and the result says so.

    Args:
        model: The network.
        data: A batch, or a loader whose first samples make one: a tensor, `(inputs, target)`, or a mapping
            (`pliant.diagnostics.batches`). New data, if the question is whether it can be learned.
        loss_fn: `loss_fn(output, target)`, with any reduction, but `sum` or `none` if it weights samples (by class,
            say), so that their gradients keep the weights; or several by name, whose values are then keyed
            `measure@name`.
        reference: The network to compare with: itself as it was at first, or a fresh one. Its gradients are taken by
            those parameters that learn in the model.
        measures: Names of `pliant.diagnostics.measures.names()`; by default all but those of a whole matrix of
            curvature and of an optimizer's step.
        samples: How many samples to take of a loader.
        statistics: What BatchNorm layers normalize with: the statistics of this batch, held constant, which is what a
            training step sees; or their running ones, which a fresh reference has none of.

    Returns:
        The values, the verdict, and what was skipped.

    Raises:
        ValueError: If a measure is unknown, a model is not initialized or has a layer without units, or an argument
            makes no sense.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> found = diagnose(network, torch.eye(2), measures=["dead_fraction", "hessian_rank"])
        >>> found.skipped
        {'hessian_rank': 'it needs a loss_fn'}
    """
    check_choice("statistics", statistics, get_args(Statistics))
    chosen = registry.select(measures)
    model = initialized(model, "model")
    reference = initialized(reference, "reference") if reference is not None else None
    batch = gather(data, samples) if data is not None else None
    losses = _by_name(loss_fn)
    keep = reference is not None and any({"batch", "reference"} <= measure.needs for measure in chosen)
    with torch.inference_mode(False), ExitStack() as stack:
        ours = prepare(stack, model, batch, statistics)
        # A model that is at rest already does not tell any more which of its layers are frozen.
        theirs = ours if reference is None or reference is model else prepare(stack, reference, batch, statistics)
        if reference is not None:
            stack.enter_context(learning_alike(reference, model))
        notes = note.on_weights(model, "the model") | note.on_statistics(model, ours, statistics)
        if reference is not None:
            notes |= note.on_weights(reference, "the reference") | note.on_statistics(reference, theirs, statistics)
        found: Found = {}
        beside: Found = {}
        skipped: dict[str, str] = {}
        for name, each in losses.items():
            probe = Probe(model, ours, each, keep=keep)
            other = Probe(reference, theirs, each, keep=keep) if reference is not None else None
            run = [measure for measure in chosen if "labels" in measure.needs or name == next(iter(losses))]
            found |= take(run, probe, other, skipped, name)
            if other is not None:
                lacking: dict[str, str] = {}
                beside |= take([m for m in run if "reference" not in m.needs], other, None, lacking, name)
                absent = ((m, why) for m, why in lacking.items() if m not in skipped)
                notes |= {f"the reference's {m}": f"the reference has no {m}: {why}" for m, why in absent}
            notes |= note.on_probe(probe, name)
    values, compared = combine(found), combine(beside)
    notes |= note.on_values(values)
    comparable = reference is None or same_parameters(model, reference)
    if not comparable:
        notes["comparable"] = (
            "the reference has parameters of other names or shapes than the model: its values stand beside the "
            "model's, but no sign is judged by them"
        )
    return Diagnosis(values, compared, skipped, tuple(notes.values()), batch.size if batch else 0, comparable)


def _by_name(loss_fn: LossFn | Mapping[str, LossFn] | None) -> dict[str, LossFn | None]:
    if not isinstance(loss_fn, Mapping):
        return {"": loss_fn}
    if not loss_fn:
        raise ValueError("loss_fn must be a loss, or hold at least one by name, got an empty mapping")
    for name in loss_fn:
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"loss_fn must have names without '/', which stands before a layer, got {name!r}")
    return dict(loss_fn)


def take(
    chosen: Sequence[Measure], probe: Probe, other: Probe | None, skipped: dict[str, str], loss: str = ""
) -> Found:
    """Take measures.

    Args:
        chosen: The measures.
        probe: What they look at.
        other: What they compare it with.
        skipped: Where to note why a measure cannot be taken, by its name; one that can be is struck out.
        loss: The name of the loss, if there are several.
    """
    found: Found = {}
    for measure in chosen:
        name = f"{measure.name}@{loss}" if loss and "labels" in measure.needs else measure.name
        try:
            found[name] = measure.compute(probe, other)
            skipped.pop(name, None)
        except SKIPPED as error:
            skipped[name] = _reason(error)
    return found


def _reason(error: Exception) -> str:
    """Return why a measure was skipped; of what torch has not implemented, the first sentence of many."""
    return str(error).partition(". ")[0] if isinstance(error, NotImplementedError) else str(error)


def prepare(stack: ExitStack, model: nn.Module, batch: Batch | None, statistics: Statistics) -> Batch | None:
    """Put a model at rest until the stack unwinds, and return a batch where the model is."""
    norms = batch_norms(model, statistics)  # which depends on the modes
    stack.enter_context(undisturbed(model))
    if batch is None:
        return None
    check_callable(model)
    moved = batch.on(model)
    if moved.size > 1:
        stack.enter_context(batch_statistics(model, moved, norms))
    return moved


def unwrapped(model: nn.Module) -> nn.Module:
    """Return what `torch.compile` and data parallelism wrapped.

    A compiled forward pass cannot be watched, and that of a parallel model waits for other processes.
    """
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def initialized(model: nn.Module, argument: str) -> nn.Module:
    """Return a model without its wrappers.

    Raises:
        ValueError: If it has lazy parameters that were never given a shape, tensors without values (on the device
            "meta"), or a weight without entries; names the argument.
    """
    model = unwrapped(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(f"{argument} must be initialized, but {name} has no shape yet: call it on a batch first")
        if tensor.is_meta:
            raise ValueError(f"{argument} must hold values, but {name} is on the device 'meta', which keeps none")
    for name, module in model.named_modules():
        weight = module._parameters.get("weight") if isinstance(module, WEIGHT_LAYERS) else None
        if weight is not None and not weight.numel():
            shape = tuple(weight.shape)
            raise ValueError(f"{argument} must have units in every layer, but the weight of {name!r} has shape {shape}")
    return model
