"""What a reader of values must know beside them, in sentences by kind."""

import math
from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from pliant.anatomy.parameters import find_computed
from pliant.diagnostics import curvature
from pliant.diagnostics.batches import Batch
from pliant.diagnostics.probe import Probe, Statistics
from pliant.diagnostics.tensors import stacks
from pliant.diagnostics.weights import non_finite

Notes = dict[str, str]


def on_weights(model: nn.Module, whose: str) -> Notes:
    """Name the parameters and buffers that hold what is no number."""
    named = [*model.named_parameters(), *model.named_buffers()]
    counts = {name: non_finite(tensor) for name, tensor in named if tensor.is_floating_point()}
    return {
        f"{whose}: {name}": f"{whose} has {count} NaN or infinite entries in {name}"
        for name, count in counts.items()
        if count
    }


def on_statistics(model: nn.Module, batch: Batch | None, statistics: Statistics) -> Notes:
    """Say when the statistics that were asked for are not those that were used."""
    if statistics == "running" or batch is None or batch.size > 1:
        return {}
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return {}
    return {"statistics": "BatchNorm layers used their running statistics: a single sample has none of its own"}


def on_probe(probe: Probe, loss: str = "") -> Notes:
    """Say what was met on the way to what a probe computed; nothing is computed for it.

    Args:
        probe: The probe, after its use.
        loss: The name of its loss, if there are several.
    """
    done = probe.__dict__
    of = f" of {loss}" if loss else ""
    notes = {}
    if "matrices" in done and (computed := find_computed(probe.model, hooks_only=True)):
        notes["hooks"] = (
            f"weights that a hook computes ({', '.join(computed)}) are measured as they are stored; those of "
            "torch.nn.utils.parametrizations are measured as they are used"
        )
    if "single" in done and (several := stacks(probe.model)):
        notes["stacks"] = (
            "weights of three or more dimensions that no convolution is seen to read may each be several matrices, and "
            f"are left out where singular values are measured: {', '.join(several)}"
        )
    if "captured" in done:
        outputs = [leaf for leaf in tree_leaves(probe.captured.output) if isinstance(leaf, Tensor)]
        strange = sum(non_finite(leaf) for leaf in outputs if leaf.is_floating_point())
        if strange:
            notes["output"] = f"{strange} entries of the model's output are NaN or infinite"
        if probe.captured.unclear:
            notes["units"] = (
                "hidden units are left out, since entries were reordered between layer and activation, or are inside a "
                f"transform of torch.func, and it cannot be told where units are: {', '.join(probe.captured.unclear)}"
            )
    if "gram" in done:
        if not probe.gram.reduced:
            notes[f"samples{of}"] = (
                f"the loss{of} of the batch is neither the mean nor the sum of its samples' losses, each taken alone, "
                "as with class weights, ignored targets or samples that are compared with each other: measures of the "
                "samples' gradients are of those, without the weights that a mean gives them; a loss with "
                "reduction='sum' or 'none' keeps weights"
            )
        for name, why in probe.gram.one_by_one.items():
            notes[f"one by one{of}: {name}"] = f"gradients{of} taken sample by sample for {name}: {why}"
        if probe.gram.cut_off:
            notes[f"cut off{of}"] = f"used without a gradient{of}: {', '.join(probe.gram.cut_off)}"
    if "sharpness" in done:
        ends = probe.sharpness
        if not ends.converged:
            notes[f"sharpness{of}"] = (
                f"sharpness{of} is right only to ±{ends.residual:.2g} after {ends.iterations} products"
            )
        if ends.asymmetry > curvature.symmetry_limit(probe.model):
            notes[f"asymmetry{of}"] = (
                f"sharpness{of} is doubtful: the Hessian is not symmetric (by {ends.asymmetry:.2g} of it), so that a "
                "second derivative in it is wrong"
            )
    return notes


def on_values(values: Mapping[str, float]) -> Notes:
    """Name the values that are no numbers."""
    strange = [f"{key} is {value}" for key, value in values.items() if not math.isfinite(value)]
    return {"values": f"not finite: {', '.join(strange)}"} if strange else {}
