"""The Gram matrix of per-sample gradients, GᵀG, computed without holding the gradients G.

Curvature (Lewandowski 2023, §4.1) measures curvature by the rank of Σ g_i g_iᵀ = GGᵀ, the rank of the M × M
matrix GᵀG. G has one column of the model's size for each of the M samples: 11 GiB for a ResNet-18 and 256 samples. Here
⟨g_i, g_j⟩ is summed parameter by parameter during one backward pass over the whole batch (`parameter_uses.py`), from
activations and output gradients (`inner_products.py`).

A per-sample gradient is g_i = ∇ℓ_i, where ℓ_i is the loss of sample i alone (`batches.sample_losses`). The model must
treat samples independently. BatchNorm does so in eval mode, where its statistics are constants. In train mode a sample
has no gradient of its own, which raises an error.

Every result is checked against the gradients of two samples, taken one at a time. Parameters that fail the check or
have no rule get their gradients sample by sample, which is slower and takes memory. `GradientGram.one_by_one` names
them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pliant.diagnostics.batches import Batch, LossFn, sample_losses, summed_loss
from pliant.diagnostics.per_sample.derivatives import derivatives, learnable
from pliant.diagnostics.per_sample.inner_products import Dense, Use, check_memory, gram, matrix_shape
from pliant.diagnostics.per_sample.parameter_uses import Shapes, Uses


@dataclass(frozen=True)
class GradientGram:
    """Inner products of the per-sample gradients of a model.

    Attributes:
        total: ⟨g_i, g_j⟩ over all learnable parameters, [M, M], float64.
        parameters: The same for each parameter by name; they sum to `total`.
        losses: ℓ_i, [M].
        reduced: Whether the loss of the whole batch is the mean or the sum of the ℓ_i.
        gradient: For each parameter, the mean of the g_i: the gradient of the mean loss.
        one_by_one: Parameters whose gradients were taken sample by sample, and why.
        cut_off: Parameters with a use under `no_grad` or in a reentrant checkpoint, which adds nothing to the gradient.
    """

    total: Tensor
    parameters: dict[str, Tensor]
    losses: Tensor
    reduced: bool
    gradient: dict[str, Tensor]
    one_by_one: dict[str, str]
    cut_off: tuple[str, ...]


def gradient_gram(model: nn.Module, batch: Batch, loss_fn: LossFn) -> GradientGram:
    """Return the inner products of the gradients of all samples of a batch.

    Args:
        model: The model, in the mode to measure it in. It is not changed, including `.grad`.
        batch: The M samples.
        loss_fn: `loss_fn(output, target)`.

    Raises:
        ValueError: If the model has no learnable parameter or a complex one, if samples influence each other's loss,
            or if gradients that must be held do not fit in memory.
    """
    parameters = learnable(model, real=True)
    check = _Check(model, batch, loss_fn, parameters)
    grams: dict[str, Tensor] = {}
    arrived: dict[str, list[Use]] = {name: [] for name in parameters}

    def finish(name: str) -> None:
        grams[name] = gram(arrived.pop(name), batch.size, parameters[name])

    def deliver(name: str, use: Use) -> None:
        arrived[name].append(use)
        # Finishing at the last use frees the factors, so that only a few layers' factors are held at a time.
        if not watch.pending[name]:
            finish(name)

    watch = Uses(parameters, batch.size, check.shapes, check.size, deliver)
    with torch.enable_grad(), watch:
        output = model(*batch.args, **batch.kwargs)
    with torch.enable_grad():
        total_loss, losses, reduced = summed_loss(loss_fn, output, batch, apart=True)
        del output
        check.losses_agree(losses)
        found = _gradients(total_loss, parameters)
    gradient = {name: total / batch.size for name, total in found.items()}
    for name in list(arrived):
        finish(name)
    reasons = dict.fromkeys(parameters, "the forward pass depends on the number of samples") if watch.diverged else {}
    reasons |= watch.untreated
    reasons |= dict.fromkeys(check.disagreements(grams, reasons), "the check against single samples failed")
    if reasons:
        grams |= _one_by_one(model, batch, loss_fn, {name: parameters[name] for name in reasons}, reasons)
    ordered = {name: grams[name] for name in parameters}
    total = torch.stack([matrix.to(losses.device) for matrix in ordered.values()]).sum(0)
    return GradientGram(total, ordered, losses, reduced, gradient, reasons, tuple(sorted(watch.cut_off)))


class _Check:
    """The gradients of the first and the last sample, taken one at a time in a small batch.

    Attributes:
        size: The size of the small batch.
        shapes: The shapes of all tensors of its forward pass.
    """

    def __init__(self, model: nn.Module, batch: Batch, loss_fn: LossFn, parameters: Mapping[str, Tensor]) -> None:
        last = batch.size - 1
        index = torch.tensor([0, last, 0] if batch.size == 2 else [0, last])
        few = batch.select(index)
        self.size = few.size
        self.shapes = Shapes()
        with torch.enable_grad():
            try:
                with self.shapes:
                    output = model(*few.args, **few.kwargs)
            except RuntimeError as error:
                raise ValueError(
                    f"the model does not run on {few.size} of the {batch.size} samples. Every input with first "
                    f"dimension {batch.size} is indexed by sample, so a shared input, such as a mask, must not be as "
                    f"long as the batch ({error})"
                ) from error
            losses = sample_losses(loss_fn, output, few)[:2]
            gradients = [_gradients(loss, parameters, keep=True) for loss in losses]
        self._losses = losses.detach()
        self._tolerance = 3 * max(torch.finfo(t.dtype).eps for t in (losses, *parameters.values())) ** 0.5
        # ⟨g_a, g_b⟩ of the two samples for each parameter, [2, 2].
        self._products = {name: torch.stack([g[name].flatten().double() for g in gradients]) for name in parameters}
        self._products = {name: two @ two.T for name, two in self._products.items()}

    def losses_agree(self, losses: Tensor) -> None:
        """Raise if the losses of the two samples depend on the other samples."""
        here = losses[[0, -1]]
        if not torch.allclose(here, self._losses, rtol=self._tolerance, atol=self._tolerance, equal_nan=True):
            raise ValueError(
                "the loss of a sample must not depend on the other samples of its batch, but the loss of the first is "
                f"{float(here[0]):.6g} among {len(losses)} and {float(self._losses[0]):.6g} among {self.size}. Put "
                "BatchNorm layers in eval mode; a shared output or target must not be as long as the batch, because it "
                "would be indexed by sample"
            )

    def disagreements(self, grams: Mapping[str, Tensor], skip: Collection[str]) -> list[str]:
        """Return the parameters whose inner products differ from the two single samples' products."""
        scale = torch.stack([two.diagonal() for two in self._products.values()]).sum(0).sqrt()
        # Gradients that cancel, such as a key bias's, are rounding errors relative to the whole gradient.
        floor = (scale.unsqueeze(1) * scale) * self._tolerance**2
        wrong = []
        for name, two in self._products.items():
            own = two.diagonal().clamp(min=0).sqrt()
            bound = self._tolerance * (own.unsqueeze(1) * own) + floor
            there = grams[name][[0, -1]][:, [0, -1]]
            if name not in skip and ((there - two).abs() > bound).any():
                wrong.append(name)
        return wrong


def _gradients(loss: Tensor, parameters: Mapping[str, Tensor], keep: bool = False) -> dict[str, Tensor]:
    return dict(zip(parameters, derivatives(loss, list(parameters.values()), retain_graph=keep), strict=True))


def _one_by_one(
    model: nn.Module, batch: Batch, loss_fn: LossFn, parameters: Mapping[str, Tensor], reasons: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return the inner products of some parameters' gradients, from one pass for each sample."""
    check_memory(parameters.values(), batch.size, ", ".join(f"{name} ({reasons[name]})" for name in parameters))
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for i in range(batch.size):
        one = batch.select(slice(i, i + 1))
        with torch.enable_grad():
            loss = sample_losses(loss_fn, one.forward(model), one)[0]
            for name, gradient in _gradients(loss, parameters).items():
                rows[name].append(gradient.reshape(matrix_shape(gradient)))
    return {name: gram([Dense(torch.stack(rows[name]))], batch.size, p) for name, p in parameters.items()}
