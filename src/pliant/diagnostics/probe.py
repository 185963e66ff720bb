"""A model at rest, and what is measured of it, each thing computed once and only when it is asked for."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import cycle
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pliant.diagnostics import tensors as layers
from pliant.diagnostics.activations import Captured, capture
from pliant.diagnostics.batches import Batch, LossFn, mean_loss, summed_loss
from pliant.diagnostics.gradients import Spectrum, spectrum
from pliant.diagnostics.lanczos import Extremes, sharpness
from pliant.diagnostics.per_sample.derivatives import derivatives, learnable
from pliant.diagnostics.per_sample.gradient_gram import GradientGram, gradient_gram
from pliant.diagnostics.spectra import singular_values

Statistics = Literal["batch", "running"]

TOTAL = ""
"""The key of what belongs to the whole network, beside those of its layers."""


@contextmanager
def learning_alike(reference: nn.Module, model: nn.Module) -> Iterator[None]:
    """Let those parameters of a reference learn that do in a model of the same parameters; it is undone afterwards.

    Gradients over other parameters could not be compared: part of the model may be frozen, and a reference that is not
    trained often is altogether.
    """
    changed: list[nn.Parameter] = []
    if layers.same_parameters(model, reference):
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


def batch_norms(model: nn.Module, statistics: Statistics) -> list[_BatchNorm]:
    """Return the BatchNorm layers that normalize with the statistics of a batch.

    Those that keep no running statistics always do. Of a model in train mode, those that were put in eval mode do not:
    they are frozen, and a training step does not see the batch's either.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if statistics == "running":
        return [norm for norm in norms if norm.running_mean is None]
    return [norm for norm in norms if norm.training or not model.training or norm.running_mean is None]


@contextmanager
def batch_statistics(model: nn.Module, batch: Batch, norms: Sequence[_BatchNorm] | None = None) -> Iterator[None]:
    """Let BatchNorm layers normalize with the statistics of a batch, as constants; their own come back afterwards.

    A layer that is called several times has those of each call.

    Args:
        model: In eval mode.
        batch: The samples.
        norms: The layers; by default all of the model's.
    """
    norms = batch_norms(model, "batch") if norms is None else norms
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
    """A model with what it can be measured on.

    Args:
        model: The model, `undisturbed` while the probe is in use.
        batch: Samples on the model's device; `None` if there are none.
        loss_fn: `loss_fn(output, target)`; `None` if there is none.
        keep: Whether hidden activations are to be kept for a comparison with those of another model.
        gradient: The gradient of each parameter, if it is known already; that of the mean loss on the batch otherwise.
        before: The parameters as they were before the last step, by name, if there was one.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch | None = None,
        loss_fn: LossFn | None = None,
        *,
        keep: bool = False,
        gradient: dict[str, Tensor] | None = None,
        before: dict[str, Tensor] | None = None,
    ) -> None:
        self.model = model
        self.before = before
        self._batch = batch
        self._loss_fn = loss_fn
        self._keep = keep
        self._gradient = gradient
        self._singular: dict[str, Tensor] = {}

    @property
    def batch(self) -> Batch:
        """The samples."""
        if self._batch is None:
            raise ValueError("it needs a batch")
        return self._batch

    @property
    def loss_fn(self) -> LossFn:
        """The loss, for a batch that has a target."""
        if self._loss_fn is None:
            raise ValueError("it needs a loss_fn")
        if self.batch.target is None:
            raise ValueError("it needs labels, and the batch has none")
        return self._loss_fn

    @cached_property
    def matrices(self) -> dict[str, Tensor]:
        """The weights that are matrices, by layer."""
        found = layers.matrices(self.model)
        if not found:
            raise ValueError("it needs a weight of two or more dimensions, and the model has none")
        return found

    @cached_property
    def single(self) -> dict[str, Tensor]:
        """Those of them that are one matrix each, and have singular values."""
        stacks = layers.stacks(self.model)
        found = {layer: weight for layer, weight in self.matrices.items() if layer not in stacks}
        if not found:
            raise ValueError(
                f"it needs a weight that is one matrix, and these may each be several: {', '.join(stacks)}"
            )
        return found

    @cached_property
    def tensors(self) -> dict[str, list[Tensor]]:
        """All parameters, by layer."""
        return layers.tensors_by_layer(self.model)

    def singular_values(self, layer: str) -> Tensor:
        """Return the singular values of a layer's weight."""
        if layer not in self._singular:
            self._singular[layer] = singular_values(self.matrices[layer])
        return self._singular[layer]

    @cached_property
    def captured(self) -> Captured:
        """What the hidden units did on the batch."""
        return capture(self.model, self.batch, self._keep)

    @cached_property
    def feature_singular_values(self) -> Tensor:
        """The singular values of the last hidden features, as many as samples or units, whichever are fewer."""
        if self.captured.representation is None:
            raise ValueError("it needs a linear layer at the end, and none was seen in the forward pass")
        return singular_values(self.captured.representation)

    @cached_property
    def gram(self) -> GradientGram:
        """The inner products of the samples' gradients."""
        return gradient_gram(self.model, self.batch, self.loss_fn)

    @cached_property
    def gradient_spectra(self) -> dict[str, Spectrum]:
        """The spectrum of the gradients' inner products, of each layer's and under `TOTAL` of all parameters."""
        names = layers.layer_names(self.model)
        by_layer: dict[str, Tensor] = {TOTAL: self.gram.total}
        for parameter, gram in self.gram.parameters.items():
            layer = names[parameter]
            by_layer[layer] = by_layer[layer] + gram if layer in by_layer else gram
        return {layer: spectrum(gram) for layer, gram in by_layer.items()}

    @cached_property
    def sharpness(self) -> Extremes:
        """The ends of the Hessian's spectrum."""
        return sharpness(self.model, self.batch, self.loss_fn)

    @cached_property
    def loss(self) -> float:
        """The mean loss over the batch."""
        if "gram" in self.__dict__ and self.gram.reduced:
            return float(self.gram.losses.double().mean())
        with torch.no_grad():
            return mean_loss(self.loss_fn, self.captured.output, self.batch)

    @cached_property
    def gradient(self) -> dict[str, Tensor]:
        """The gradient of each parameter that learns."""
        if self._gradient is not None:
            return self._gradient
        if "gram" in self.__dict__ and self.gram.reduced:
            return self.gram.gradient
        named = learnable(self.model)
        with torch.enable_grad():
            total = summed_loss(self.loss_fn, self.batch.forward(self.model), self.batch).total
            found = derivatives(total / self.batch.size, list(named.values()))
        return dict(zip(named, found, strict=True))
