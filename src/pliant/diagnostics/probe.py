"""A model at rest, and what is measured of it, each thing computed once and only when it is asked for."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pliant.diagnostics import layers
from pliant.diagnostics.batches import Batch, LossFn, sample_losses, summed_loss
from pliant.diagnostics.capture import Captured, capture
from pliant.diagnostics.gradients import Spectrum, spectrum
from pliant.diagnostics.gram import GradientGram, gradient_gram
from pliant.diagnostics.lanczos import Extremes, sharpness
from pliant.diagnostics.spectra import singular_values

Statistics = Literal["batch", "running"]

TOTAL = ""
"""The key of what belongs to the whole network, beside those of its layers."""


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode, and leave its modes and the random generators as they were."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices):
        try:
            model.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training


@contextmanager
def batch_statistics(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Let BatchNorm layers normalise with the statistics of a batch, as constants; their own come back afterwards."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    saved = [(norm, copy.deepcopy(norm.running_mean), copy.deepcopy(norm.running_var)) for norm in norms]

    def measure(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(norm, _BatchNorm)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        variance, mean = torch.var_mean(args[0].transpose(0, 1).flatten(1), 1, correction=0)
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)

    handles = [norm.register_forward_pre_hook(measure) for norm in norms]
    try:
        if norms:
            with torch.no_grad():
                batch.forward(model)
        for handle in handles:
            handle.remove()
        yield
    finally:
        for norm, mean, variance in saved:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            assert mean is not None
            assert variance is not None
            with torch.no_grad():
                norm.running_mean.copy_(mean)
                norm.running_var.copy_(variance)


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
        if "gram" in self.__dict__:
            return float(self.gram.losses.double().mean())
        with torch.no_grad():
            return float(sample_losses(self.loss_fn, self.captured.output, self.batch).double().mean())

    @cached_property
    def gradient(self) -> dict[str, Tensor]:
        """The gradient of each parameter that has one."""
        if self._gradient is not None:
            return self._gradient
        if "gram" in self.__dict__:
            return self.gram.gradient
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        with torch.enable_grad():
            total, _ = summed_loss(self.loss_fn, self.batch.forward(self.model), self.batch)
            found = torch.autograd.grad(total / self.batch.size, list(named.values()), allow_unused=True)
        return {name: g for name, g in zip(named, found, strict=True) if g is not None}
