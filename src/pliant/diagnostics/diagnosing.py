"""Diagnose a network: every measure that applies, on one batch, against a reference."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pliant.diagnostics import measures as registry
from pliant.diagnostics.batches import Batch, LossFn, gather
from pliant.diagnostics.diagnosis import Diagnosis, combine
from pliant.diagnostics.probe import Probe, Statistics, batch_statistics, undisturbed
from pliant.diagnostics.record import Measure
from pliant.diagnostics.weights import non_finite

Found = dict[str, Mapping[str, float]]

# What a measure raises that cannot be taken of this model and batch.
SKIPPED = (ValueError, ArithmeticError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]


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
            (`pliant.diagnostics.batches`). New data, if the question is whether it can be learnt.
        loss_fn: `loss_fn(output, target)`, with any reduction; or several by name, whose values are then keyed
            `measure@name`.
        reference: The network to compare with: itself as it was at first, or a fresh one.
        measures: Names of `pliant.diagnostics.measures.names()`; by default all but those of a whole matrix of
            curvature.
        samples: How many samples to take of a loader.
        statistics: What BatchNorm layers normalise with: the statistics of this batch, held constant, which is what a
            training step sees; or their running ones, which a fresh reference has none of.

    Returns:
        The values, the verdict, and what was skipped.

    Raises:
        ValueError: If a measure is unknown or an argument makes no sense.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> found = diagnose(network, torch.eye(2), measures=["dead_fraction", "hessian_rank"])
        >>> found.skipped
        {'hessian_rank': 'it needs a loss_fn'}
    """
    if statistics not in ("batch", "running"):
        raise ValueError(f"statistics must be 'batch' or 'running', got {statistics!r}")
    chosen = registry.select(measures)
    model, reference = unwrapped(model), unwrapped(reference) if reference is not None else None
    batch = gather(data, samples) if data is not None else None
    losses = dict(loss_fn) if isinstance(loss_fn, Mapping) else {"": loss_fn}
    keep = reference is not None and any({"batch", "reference"} <= measure.needs for measure in chosen)
    with ExitStack() as stack:
        ours = prepare(stack, model, batch, statistics)
        theirs = prepare(stack, reference, batch, statistics) if reference is not None else None
        notes = _notes_on_weights(model, "the model")
        notes += _notes_on_weights(reference, "the reference") if reference is not None else []
        found: Found = {}
        beside: Found = {}
        skipped: dict[str, str] = {}
        for name, each in losses.items():
            probe = Probe(model, ours, each, keep=keep)
            other = Probe(reference, theirs, each, keep=keep) if reference is not None else None
            run = [measure for measure in chosen if "labels" in measure.needs or name == next(iter(losses))]
            _take(run, probe, other, name, found, skipped)
            if other is not None:
                _take([m for m in run if "reference" not in m.needs], other, None, name, beside, {})
            notes += _notes_on_probe(probe, name)
    values, compared = combine(found), combine(beside)
    strange = [f"{key} is {value}" for key, value in values.items() if not math.isfinite(value)]
    if strange:
        notes.append(f"not finite: {', '.join(strange)}")
    return Diagnosis(values, compared, skipped, tuple(notes), batch.size if batch else 0)


def _take(
    chosen: Sequence[Measure], probe: Probe, other: Probe | None, loss: str, found: Found, skipped: dict[str, str]
) -> None:
    for measure in chosen:
        name = f"{measure.name}@{loss}" if loss and "labels" in measure.needs else measure.name
        try:
            found[name] = measure.compute(probe, other)
        except SKIPPED as reason:
            skipped[name] = str(reason)


def prepare(stack: ExitStack, model: nn.Module, batch: Batch | None, statistics: Statistics) -> Batch | None:
    """Put a model at rest until the stack unwinds, and return a batch where the model is."""
    stack.enter_context(undisturbed(model))
    if batch is None:
        return None
    moved = batch.on(model)
    if statistics == "batch" and moved.size > 1:
        stack.enter_context(batch_statistics(model, moved))
    return moved


def unwrapped(model: nn.Module) -> nn.Module:
    """Return what `torch.compile` wrapped: a compiled forward pass cannot be watched."""
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, nn.Module)
    return inner


def _notes_on_weights(model: nn.Module, whose: str) -> list[str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    counts = {name: non_finite(tensor) for name, tensor in named if tensor.is_floating_point()}
    return [f"{whose} has {count} NaN or infinite entries in {name}" for name, count in counts.items() if count]


def _notes_on_probe(probe: Probe, loss: str) -> list[str]:
    done = probe.__dict__
    of = f" of {loss}" if loss else ""
    notes = []
    if "captured" in done and not loss:
        outputs = [leaf for leaf in tree_leaves(probe.captured.output) if isinstance(leaf, Tensor)]
        strange = sum(non_finite(leaf) for leaf in outputs if leaf.is_floating_point())
        notes += [f"{strange} entries of the model's output are NaN or infinite"] if strange else []
    if "gram" in done:
        notes += [
            f"gradients{of} taken sample by sample for {name}: {why}" for name, why in probe.gram.one_by_one.items()
        ]
        if probe.gram.cut_off:
            notes.append(f"used without a gradient{of}: {', '.join(probe.gram.cut_off)}")
    if "sharpness" in done:
        ends = probe.sharpness
        if not ends.converged:
            notes.append(f"sharpness{of} is right only to ±{ends.residual:.2g} after {ends.iterations} products")
        if ends.asymmetry > 1e-3:
            notes.append(
                f"sharpness{of} is doubtful: the Hessian is not symmetric (by {ends.asymmetry:.2g} of it), so that a "
                "second derivative in it is wrong"
            )
    return notes
