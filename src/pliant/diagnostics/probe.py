"""A probe: a model with a batch and a loss, and every quantity that measures read, computed once on demand."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import cycle
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from pliant.anatomy.layers import WEIGHT_LAYERS
from pliant.anatomy.parameters import find_computed, find_matrices, is_stack, matrices_in_use
from pliant.diagnostics.activations import Captured, Features, capture
from pliant.diagnostics.batches import Batch, LossFn, mean_loss, summed_loss
from pliant.diagnostics.curvature import Extremes, sharpness, symmetry_limit
from pliant.diagnostics.per_sample.derivatives import derivatives, learnable
from pliant.diagnostics.per_sample.gradient_gram import GradientGram, gradient_gram
from pliant.diagnostics.spectra import GramSpectrum, decompose_gram, singular_values
from pliant.diagnostics.weights import l2_norm
from pliant.distributed import unwrap_model
from pliant.running import check_callable, undisturbed

Statistics = Literal["batch", "running"]

Need = Literal["weights", "batch", "labels", "loss", "gradient", "step", "moments", "reference"]
"""What a measure can need: the weights, inputs, labels, a loss, the gradient of the loss (of an optimizer's step, or on
a batch with labels), the parameters before and after an optimizer's step, the optimizer's second moments, or another
model to compare with."""

Notes = dict[str, str]
"""Sentences that a reader of the values must know, by kind."""


def check_initialized(model: nn.Module, argument: str) -> nn.Module:
    """Return a model without its wrappers.

    Raises:
        ValueError: If a lazy parameter has no shape yet, a tensor is on the device "meta", or a weight has no entries.
            The message names the argument.
    """
    model = unwrap_model(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(f"{argument} must be initialized, but {name} has no shape yet: call it on a batch first")
        if tensor.is_meta:
            raise ValueError(f"{argument} must hold values, but {name} is on the device 'meta', which stores none")
    for name, module in model.named_modules():
        weight = module._parameters.get("weight") if isinstance(module, WEIGHT_LAYERS) else None
        if weight is not None and not weight.numel():
            shape = tuple(weight.shape)
            raise ValueError(f"{argument} must have units in every layer, but the weight of {name!r} has shape {shape}")
    return model


def same_parameters(model: nn.Module, other: nn.Module) -> bool:
    """Return whether two models have parameters of the same names and shapes."""
    ours, theirs = ({name: p.shape for name, p in m.named_parameters()} for m in (model, other))
    return ours == theirs


@contextmanager
def resting(model: nn.Module, batch: Batch | None, statistics: Statistics) -> Iterator[Batch | None]:
    """Put a model in eval mode with fixed BatchNorm statistics, and leave it as it was afterwards.

    Args:
        model: The model.
        batch: The samples.
        statistics: What BatchNorm layers normalize with.

    Yields:
        The batch on the model's device.
    """
    norms = find_batch_norms(model, statistics)  # before eval mode: the modes tell which layers are frozen
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        if batch is not None:
            check_callable(model)
            batch = batch.on(model)
            if batch.size > 1:
                stack.enter_context(batch_statistics(model, batch, norms))
        yield batch


@contextmanager
def learning_alike(reference: nn.Module, model: nn.Module) -> Iterator[None]:
    """Temporarily copy `requires_grad` from `model` to `reference`, if their parameters match.

    Otherwise gradients of the two could not be compared: part of the model may be frozen, and all of the reference.
    """
    changed: list[nn.Parameter] = []
    if same_parameters(model, reference):
        ours = dict(model.named_parameters())
        pairs = ((p, ours[name]) for name, p in reference.named_parameters() if not p.is_inference())
        changed = [theirs for theirs, own in pairs if theirs.requires_grad != own.requires_grad]
    for parameter in changed:
        parameter.requires_grad = not parameter.requires_grad
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad = not parameter.requires_grad


def find_batch_norms(model: nn.Module, statistics: Statistics) -> list[_BatchNorm]:
    """Return the BatchNorm layers that normalize with the statistics of a batch.

    A layer without running statistics always does. If the model is in train mode, a layer in eval mode is frozen and
    keeps its running statistics, as in a training step.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if statistics == "running":
        return [norm for norm in norms if norm.running_mean is None]
    return [norm for norm in norms if norm.training or not model.training or norm.running_mean is None]


@contextmanager
def batch_statistics(model: nn.Module, batch: Batch, norms: Sequence[_BatchNorm] | None = None) -> Iterator[None]:
    """Make BatchNorm layers normalize with the statistics of a batch, held constant, and restore their own afterwards.

    A layer that is called several times uses the statistics of each call.

    Args:
        model: The model, in eval mode.
        batch: The samples.
        norms: The layers. By default, all BatchNorm layers of the model.
    """
    norms = find_batch_norms(model, "batch") if norms is None else norms
    found: dict[_BatchNorm, list[tuple[Tensor, Tensor]]] = {norm: [] for norm in norms}
    following: dict[_BatchNorm, Iterator[tuple[Tensor, Tensor]]] = {}

    def measure(norm: _BatchNorm, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> None:
        x = args[0] if args else kwargs["input"]
        dtype = x.dtype if norm.running_mean is None else norm.running_mean.dtype
        variance, mean = torch.var_mean(x.transpose(0, 1).flatten(1), 1, correction=0)
        found[norm].append((mean.to(dtype), variance.to(dtype)))
        norm.running_mean, norm.running_var = found[norm][-1]

    def begin(*_: Any) -> None:
        following.update({norm: cycle(calls) for norm, calls in found.items() if len(calls) > 1})

    def call(norm: _BatchNorm, *_: Any) -> None:
        norm.running_mean, norm.running_var = next(following[norm])

    with ExitStack() as stack:
        for norm in norms:
            stack.callback(_set_statistics, norm, norm.running_mean, norm.running_var)
        if norms:
            handles = [norm.register_forward_pre_hook(measure, with_kwargs=True) for norm in norms]
            try:
                with torch.no_grad():
                    batch.forward(model)
            finally:
                for handle in handles:
                    handle.remove()
        begin()
        if following:
            stack.callback(model.register_forward_pre_hook(begin).remove)
        for norm in following:
            stack.callback(norm.register_forward_pre_hook(call).remove)
        yield


def _set_statistics(norm: _BatchNorm, mean: Tensor | None, variance: Tensor | None) -> None:
    norm.running_mean, norm.running_var = mean, variance


class Probe:
    """A model with the data to measure it on.

    Every quantity is computed when a measure first reads it. What a reader must know about it goes into `notes`.

    Args:
        model: The model, `resting` while the probe is in use.
        batch: Samples on the model's device, if there are any.
        loss_fn: `loss_fn(output, target)`, if there is one.
        loss_name: The name of the loss, if there are several.
        keep: Whether to keep the hidden activations, for a comparison with another model.
        gradient: The gradient of each parameter. By default, the gradient of the mean loss on the batch.
        before: The parameters before the optimizer's last step, by name, if there was a step.
        moments: The optimizer's averages of squared gradients, by parameter, if there is an optimizer.

    Attributes:
        given: The needs that the probe meets.
        notes: What a reader of the values must know.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch | None = None,
        loss_fn: LossFn | None = None,
        *,
        loss_name: str = "",
        keep: bool = False,
        gradient: dict[str, Tensor] | None = None,
        before: dict[str, Tensor] | None = None,
        moments: dict[str, Tensor] | None = None,
    ) -> None:
        self.model = model
        self.loss_name = loss_name
        self.notes: Notes = {}
        labels = batch.target if batch is not None else None
        parts: dict[Need, object] = {
            "weights": model, "batch": batch, "labels": labels, "loss": loss_fn, "gradient": gradient, "step": before,
            "moments": moments,
        }  # fmt: skip
        self.given: frozenset[Need] = frozenset(need for need, part in parts.items() if part is not None)
        self._batch = batch
        self._loss_fn = loss_fn
        self._keep = keep
        self._gradient = gradient
        self._before = before
        self._moments = moments

    @property
    def batch(self) -> Batch:
        """The samples."""
        assert self._batch is not None
        return self._batch

    @property
    def loss_fn(self) -> LossFn:
        """The loss."""
        assert self._loss_fn is not None
        return self._loss_fn

    @property
    def before(self) -> dict[str, Tensor]:
        """The parameters before the optimizer's step, by name."""
        assert self._before is not None
        return self._before

    @property
    def moments(self) -> dict[str, Tensor]:
        """The optimizer's averages of squared gradients, by parameter."""
        assert self._moments is not None
        return self._moments

    def by_unit(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean size of the entries that belong to each unit's incoming weights, by layer.

        Args:
            tensors: Tensors shaped as the parameters of the same names: gradients, moments.
        """
        found: dict[str, list[Tensor]] = {}
        for matrix in find_matrices(self.model):
            if matrix.parameter in tensors:
                rows = matrix.view(tensors[matrix.parameter].detach()).abs().movedim(-2, 0).flatten(1)
                found.setdefault(layer_of(matrix.parameter), []).append(rows.mean(1, dtype=torch.float64))
        if not found:
            raise ValueError("it needs a linear or convolution layer, and none has such values")
        return {layer: torch.cat(parts) for layer, parts in found.items()}

    def by_layer(self, tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """Group tensors by the module that owns the parameter of that name."""
        found: dict[str, list[Tensor]] = {}
        for name, tensor in tensors.items():
            found.setdefault(layer_of(name), []).append(tensor)
        return found

    @cached_property
    def tensors(self) -> dict[str, list[Tensor]]:
        """All parameters, by layer."""
        return self.by_layer(dict(self.model.named_parameters()))

    @cached_property
    def matrix_names(self) -> dict[str, str]:
        """The name of each weight that is a matrix, mapped to its layer.

        A weight that shares its layer with another weight goes by its own name.
        """
        names = {name: layer_of(name) for name in self._named_matrices}
        shared = Counter(names.values())
        return {name: name if shared[layer] > 1 else layer for name, layer in names.items()}

    @cached_property
    def _named_matrices(self) -> dict[str, Tensor]:
        return matrices_in_use(self.model)

    @cached_property
    def matrices(self) -> dict[str, Tensor]:
        """The weights that are matrices, by layer."""
        found = {layer: self._named_matrices[name] for name, layer in self.matrix_names.items()}
        if not found:
            raise ValueError("it needs a weight of two or more dimensions, and the model has none")
        if self.computed_by_hooks:
            self.notes["hooks"] = (
                f"hooks compute the weights of these layers, and the stored tensors are measured in their place: "
                f"{', '.join(self.computed_by_hooks)} (torch.nn.utils.parametrizations has no such limit)"
            )
        return found

    @cached_property
    def matrix_norms(self) -> dict[str, float]:
        """The Frobenius norm of each weight that is a matrix, by layer."""
        return {layer: l2_norm([weight]) for layer, weight in self.matrices.items()}

    @cached_property
    def computed_by_hooks(self) -> list[str]:
        """The layers whose weight a hook computes when they are called."""
        return find_computed(self.model, hooks_only=True)

    @cached_property
    def stacks(self) -> list[str]:
        """The layers whose weight may hold several matrices."""
        found = self._named_matrices
        return [layer for name, layer in self.matrix_names.items() if is_stack(self.model, name, found[name])]

    @cached_property
    def single_matrices(self) -> dict[str, Tensor]:
        """The weights that are one matrix each, by layer."""
        found = {layer: weight for layer, weight in self.matrices.items() if layer not in self.stacks}
        if not found:
            raise ValueError(
                f"it needs a weight that is one matrix, and these may hold several each: {', '.join(self.stacks)}"
            )
        if self.stacks:
            self.notes["stacks"] = (
                "these weights have three or more dimensions and no convolution reads them, so each may hold several "
                f"matrices; they are left out where singular values are measured: {', '.join(self.stacks)}"
            )
        return found

    @cached_property
    def singular_values(self) -> dict[str, Tensor]:
        """The singular values of each weight that is one matrix, by layer."""
        return {layer: singular_values(weight) for layer, weight in self.single_matrices.items()}

    @cached_property
    def captured(self) -> Captured:
        """What the forward pass on the batch did."""
        captured = capture(self.model, self.batch, self._keep)
        outputs = [leaf for leaf in tree_leaves(captured.output) if isinstance(leaf, Tensor)]
        bad = sum(count_non_finite(leaf) for leaf in outputs if leaf.is_floating_point())
        if bad:
            self.notes["output"] = f"{bad} entries of the model's output are NaN or infinite"
        if captured.unclear:
            self.notes["units"] = (
                "the hidden units of these layers are left out, because entries are reordered between the layer and "
                "its activation, or a transform of torch.func hides them, so that it is unknown which entries belong "
                f"to a unit: {', '.join(captured.unclear)}"
            )
        return captured

    @cached_property
    def hidden(self) -> dict[str, Features]:
        """The hidden features of each layer."""
        if not self.captured.layers:
            raise ValueError("it needs hidden units, and the forward pass showed none")
        return self.captured.layers

    @cached_property
    def feature_singular_values(self) -> dict[str, Tensor]:
        """The singular values of the last hidden features, min(samples, units) of them, by head."""
        if not self.captured.representations:
            raise ValueError("it needs a linear layer at the end, and the forward pass showed none")
        return {head: singular_values(features) for head, features in self.captured.representations.items()}

    @cached_property
    def gram(self) -> GradientGram:
        """The inner products of the samples' gradients."""
        gram = gradient_gram(self.model, self.batch, self.loss_fn)
        of = self._of_loss
        if not gram.reduced:
            self.notes[f"samples{of}"] = (
                f"the loss{of} of the batch is neither the mean nor the sum of the samples' losses, as with class "
                "weights, ignored targets or losses that compare samples. Measures of the samples' gradients use each "
                "sample's own loss, without those weights. A loss with reduction='sum' or 'none' keeps the weights"
            )
        for name, why in gram.one_by_one.items():
            self.notes[f"one by one{of}: {name}"] = f"gradients{of} were taken sample by sample for {name}: {why}"
        if gram.cut_off:
            self.notes[f"cut off{of}"] = f"used without a gradient{of}: {', '.join(gram.cut_off)}"
        return gram

    @cached_property
    def gradient_spectra(self) -> dict[str, GramSpectrum]:
        """The spectrum of the gradients' inner products: under "" for all parameters, then by layer."""
        by_layer: dict[str, Tensor] = {"": self.gram.total}
        for parameter, gram in self.gram.parameters.items():
            layer = layer_of(parameter)
            by_layer[layer] = by_layer[layer] + gram if layer in by_layer else gram
        return {layer: decompose_gram(gram) for layer, gram in by_layer.items()}

    @cached_property
    def sharpness(self) -> Extremes:
        """The largest and the smallest eigenvalue of the Hessian."""
        found = sharpness(self.model, self.batch, self.loss_fn)
        of = self._of_loss
        if not found.converged:
            self.notes[f"sharpness{of}"] = (
                f"sharpness{of} is accurate only to ±{found.residual:.2g} after {found.iterations} products"
            )
        if found.asymmetry > symmetry_limit(self.model):
            self.notes[f"asymmetry{of}"] = (
                f"sharpness{of} is doubtful: the Hessian is not symmetric (relative error {found.asymmetry:.2g}), so a "
                "second derivative in it is wrong"
            )
        return found

    @cached_property
    def loss(self) -> float:
        """The mean loss over the batch."""
        with torch.no_grad():
            return mean_loss(self.loss_fn, self.captured.output, self.batch)

    @cached_property
    def gradient(self) -> dict[str, Tensor]:
        """The gradient of each learnable parameter."""
        if self._gradient is not None:
            return self._gradient
        named = learnable(self.model)
        with torch.enable_grad():
            total = summed_loss(self.loss_fn, self.batch.forward(self.model), self.batch).total
            found = derivatives(total / self.batch.size, list(named.values()))
        return dict(zip(named, found, strict=True))

    @property
    def _of_loss(self) -> str:
        return f" of {self.loss_name}" if self.loss_name else ""


def layer_of(parameter: str) -> str:
    """Return the name of the module that owns a parameter, or the parameter's own name if that is the model itself.

    Example:
        >>> layer_of("0.weight"), layer_of("token")
        ('0', 'token')
    """
    return parameter.rpartition(".")[0] or parameter


def note_weights(model: nn.Module, whose: str) -> Notes:
    """Return a note for each parameter and buffer with entries that are NaN or infinite."""
    named = [*model.named_parameters(), *model.named_buffers()]
    counts = {name: count_non_finite(tensor) for name, tensor in named if tensor.is_floating_point()}
    return {
        f"{whose}: {name}": f"{whose} has {count} NaN or infinite entries in {name}"
        for name, count in counts.items()
        if count
    }


def note_statistics(model: nn.Module, batch: Batch | None, statistics: Statistics) -> Notes:
    """Return a note if BatchNorm layers could not use the statistics of the batch."""
    if statistics == "running" or batch is None or batch.size > 1:
        return {}
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return {}
    return {"statistics": "BatchNorm layers used their running statistics, because a single sample has no variance"}


def count_non_finite(tensor: Tensor) -> int:
    """Return how many entries are NaN or infinite.

    Example:
        >>> count_non_finite(torch.tensor([1.0, float("nan"), float("inf")]))
        2
    """
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = (tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor).values()
    return int((~torch.isfinite(tensor)).sum())
