"""The values of measures by layer and for the whole network, computed from a probe.

The builders (`on_spectra`, `on_features`, …) turn a formula for one layer into values for all layers and a total. The
other functions are measures that do not fit a builder.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from pliant.diagnostics import spectra, weights
from pliant.diagnostics.activations import Features
from pliant.diagnostics.attention import head_entropies
from pliant.diagnostics.batches import error_rate, move_classes_last
from pliant.diagnostics.probe import Probe

Values = dict[str, float]
"""Values by layer. The value for the whole network is stored under `TOTAL`."""

Compute = Callable[[Probe, Probe | None], Values]
"""Computes the values of a measure from a probe of the model and a probe of the reference."""

TOTAL = ""
"""The key of the value for the whole network."""


def mean(values: Iterable[float]) -> float:
    """Return the mean, or NaN if there are no values."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else math.nan


def largest(values: Iterable[float]) -> float:
    """Return the largest value, or NaN if there are no values or one of them is NaN."""
    listed = list(values)
    return max(listed) if listed and not any(map(math.isnan, listed)) else math.nan


def relative_update(probe: Probe, _: Probe | None) -> Values:
    """Return ‖Δθ‖/‖θ‖ of an optimizer's step, θ as it was before the step."""
    moved = on_update(weights.l2_norm)(probe, None)
    sizes = _norms(weights.l2_norm, probe.by_layer(probe.before), list(probe.before.values()))
    return {layer: _ratio(moved[layer], sizes[layer]) if moved[layer] else 0.0 for layer in moved}


def on_units(tensors: Callable[[Probe], Mapping[str, Tensor]], number: Callable[[Tensor], float]) -> Compute:
    """Compute a number from the mean size of each unit's incoming gradients or moments. The total is over all units."""

    def compute(probe: Probe, _: Probe | None) -> Values:
        sizes = probe.by_unit(tensors(probe))
        by_layer = {layer: number(each) for layer, each in sizes.items()}
        units = {layer: len(each) for layer, each in sizes.items()}
        return {**by_layer, TOTAL: sum(by_layer[n] * units[n] for n in units) / sum(units.values())}

    return compute


def saturation(probe: Probe, _: Probe | None) -> Values:
    """Return the fraction of tanh and sigmoid units that are saturated in the mean over samples; 0 without any."""
    bounded = {name: layer.mean_extreme for name, layer in probe.hidden.items() if layer.mean_extreme is not None}
    by_layer = {name: float((extreme > 0.99).double().mean()) for name, extreme in bounded.items()}
    units = sum(map(len, bounded.values()))
    return {**by_layer, TOTAL: sum(by_layer[name] * len(bounded[name]) for name in bounded) / max(units, 1)}


class _Before(nn.Module):
    """A model with the parameters that it had before an optimizer's step."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self.model, self.before = probe.model, probe.before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.model, self.before, args, kwargs)


@torch.no_grad()
def churn(probe: Probe) -> float:
    """Return the mean of |f(x) − f̃(x)| over samples and outputs, f̃ the network before an optimizer's step."""
    after, before = (tree_leaves(probe.batch.forward(model)) for model in (probe.model, _Before(probe)))
    pairs = [(a, b) for a, b in zip(after, before, strict=True) if isinstance(a, Tensor) and a.is_floating_point()]
    if not pairs:
        raise ValueError("it needs real outputs, and the model returns none")
    return float(torch.cat([(a - b).abs().double().flatten() for a, b in pairs]).mean())


def attention_entropy(probe: Probe, _: Probe | None) -> Values:
    """Return the entropy of attention: the mean over layers, of each layer, and of each head of a layer."""
    heads = {layer: entropies.tolist() for layer, entropies in head_entropies(probe.model, probe.batch).items()}
    if not heads:
        raise ValueError("it needs attention, and the forward pass showed none")
    by_layer = {layer: mean(values) for layer, values in heads.items()}
    by_head = {f"{layer}[{n}]": value for layer, values in heads.items() for n, value in enumerate(values)}
    return {**by_layer, **by_head, TOTAL: mean(by_layer.values())}


def on_network(number: Callable[[Probe], float]) -> Compute:
    """Compute one number for the whole network."""
    return lambda probe, _: {TOTAL: number(probe)}


def on_tensors(norm: Callable[[Iterable[Tensor]], float]) -> Compute:
    """Compute a norm of the parameters of each layer, and of all parameters."""
    return lambda probe, _: _norms(norm, probe.tensors, list(probe.model.parameters()))


def on_gradient(norm: Callable[[Iterable[Tensor]], float]) -> Compute:
    """Compute a norm of the gradient."""
    return lambda probe, _: _norms(norm, probe.by_layer(probe.gradient), list(probe.gradient.values()))


def on_update(norm: Callable[[Iterable[Tensor]], float]) -> Compute:
    """Compute a norm of the update that an optimizer's step made."""

    def compute(probe: Probe, _: Probe | None) -> Values:
        update = {name: p.detach() - probe.before[name] for name, p in probe.model.named_parameters()}
        return _norms(norm, probe.by_layer(update), list(update.values()))

    return compute


def _norms(
    norm: Callable[[Iterable[Tensor]], float], by_layer: Mapping[str, list[Tensor]], everything: list[Tensor]
) -> Values:
    return {**{layer: norm(tensors) for layer, tensors in by_layer.items()}, TOTAL: norm(everything)}


def between_tensors(distance: Callable[[list[Tensor], list[Tensor]], float]) -> Compute:
    """Compute a distance of the parameters from the reference's, for each layer and for all parameters."""

    def compute(probe: Probe, reference: Probe | None) -> Values:
        assert reference is not None
        ours, theirs = probe.tensors, reference.tensors
        by_layer = {layer: distance(tensors, theirs[layer]) for layer, tensors in ours.items()}
        everything = [[tensor for tensors in each.values() for tensor in tensors] for each in (ours, theirs)]
        return {**by_layer, TOTAL: distance(*everything)}

    return compute


def on_spectra(number: Callable[[Tensor], float], total: Callable[[Iterable[float]], float] = mean) -> Compute:
    """Compute a number from the singular values of each weight."""

    def compute(probe: Probe, _: Probe | None) -> Values:
        by_layer = {layer: number(sigma) for layer, sigma in probe.singular_values.items()}
        return {**by_layer, TOTAL: total(by_layer.values())}

    return compute


def on_features(number: Callable[[Features], float]) -> Compute:
    """Compute a number from the hidden features of each layer. The total is the mean over units.

    The number is NaN if an activation of the layer is not finite.
    """

    def compute(probe: Probe, _: Probe | None) -> Values:
        layers = probe.hidden
        finite = {name: bool(torch.isfinite(layer.mean_abs).all()) for name, layer in layers.items()}
        by_layer = {name: number(layer) if finite[name] else math.nan for name, layer in layers.items()}
        units = {name: len(layer.mean_abs) for name, layer in layers.items()}
        return {**by_layer, TOTAL: sum(by_layer[n] * units[n] for n in units) / sum(units.values())}

    return compute


def on_heads(number: Callable[[Tensor], float]) -> Compute:
    """Compute a number from the singular values of the last hidden features; of several heads, also for each."""

    def compute(probe: Probe, _: Probe | None) -> Values:
        by_head = {head: number(sigma) for head, sigma in probe.feature_singular_values.items()}
        return {**(by_head if len(by_head) > 1 else {}), TOTAL: mean(by_head.values())}

    return compute


def between_features(distance: Callable[[Tensor, Tensor], float]) -> Compute:
    """Compute a distance of each layer's hidden features from the reference's on the same batch."""

    def compute(probe: Probe, reference: Probe | None) -> Values:
        assert reference is not None
        ours, theirs = probe.hidden, reference.hidden
        by_layer = {}
        for name, layer in ours.items():
            other = theirs[name].values if name in theirs else None
            if layer.values is not None and other is not None:
                by_layer[name] = distance(layer.values, other)
        return {**by_layer, TOTAL: mean(by_layer.values())}

    return compute


def on_gram(number: Callable[[spectra.GramSpectrum], float]) -> Compute:
    """Compute a number from the Gram matrix of per-sample gradients, for each layer and for all parameters."""
    return lambda probe, _: {layer: number(spectrum) for layer, spectrum in probe.gradient_spectra.items()}


def growth(probe: Probe, reference: Probe | None) -> Values:
    """Return the L2 norm of the parameters divided by the reference's."""
    assert reference is not None
    ours, theirs = (on_tensors(weights.l2_norm)(each, None) for each in (probe, reference))
    return {layer: _ratio(ours[layer], theirs[layer]) for layer in ours}


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.inf if a else 1.0


def isometry(probe: Probe, _: Probe | None) -> Values:
    """Return the deviation from isometry of each weight, and the sum."""
    shapes = {layer: (len(weight), weight[0].numel()) for layer, weight in probe.single_matrices.items()}
    by_layer = {
        layer: weights.isometry_deviation(probe.singular_values[layer], shape) for layer, shape in shapes.items()
    }
    return {**by_layer, TOTAL: sum(by_layer.values())}


def frobenius_error(probe: Probe, reference: Probe | None) -> Values:
    """Return ‖W − W̃‖²_F of each weight, and the sum."""
    assert reference is not None
    theirs = reference.matrices
    error = {layer: weights.frobenius_error(weight, theirs[layer]) for layer, weight in probe.matrices.items()}
    return {**error, TOTAL: sum(error.values())}


def normalized_frobenius_error(probe: Probe, reference: Probe | None) -> Values:
    """Return ‖W − W̃‖²_F / ‖W̃‖²_F of each weight; the total divides the sums.

    FIRE plots a normalized error without a definition; this one is Pliant's.
    """
    assert reference is not None
    error = frobenius_error(probe, reference)
    size = {layer: norm**2 for layer, norm in reference.matrix_norms.items()}
    size[TOTAL] = sum(size.values())
    return {layer: _ratio(error[layer], size[layer]) if error[layer] else 0.0 for layer in error}


def spectral_bound(probe: Probe) -> float:
    """Return the product of the layers' spectral norms, as a bound of the Lipschitz constant."""
    places = _kernel_places(probe)
    return weights.product_bound([float(sigma[0]) for sigma in probe.singular_values.values()], places)


def frobenius_bound(probe: Probe) -> float:
    """Return the product of the layers' Frobenius norms, as a looser bound of the Lipschitz constant."""
    places = _kernel_places(probe)
    return weights.product_bound(list(probe.matrix_norms.values()), places)


def _kernel_places(probe: Probe) -> list[int]:
    """Return how many places the kernel of each layer has: 1 for a linear layer.

    Raises:
        ValueError: If the norms of the weights do not bound the network.
    """
    layers = probe.matrices
    for name in probe.computed_by_hooks:
        raise ValueError(
            f"the weight of {name or 'the model'} is computed from other tensors, whose norms do not bound it"
        )
    for name in probe.matrix_names:
        if "weight" not in name.rpartition(".")[2]:
            raise ValueError(f"{name} may be a table of positions rather than a weight that multiplies the input")
    for layer in probe.stacks:
        raise ValueError(f"the weight of {layer} may hold several matrices, whose norms are unknown")
    modules = probe.model.named_modules()
    places = {name or "weight": math.prod(m.kernel_size) for name, m in modules if isinstance(m, _ConvNd)}
    return [places.get(layer.removesuffix(".weight"), 1) for layer in layers]


def layer_balance(probe: Probe, reference: Probe | None) -> Values:
    """Return how far each layer is out of balance with its worst partner."""
    assert reference is not None
    ours = probe.matrices
    table = weights.layer_balance(
        [probe.matrix_norms[layer] for layer in ours], [reference.matrix_norms[layer] for layer in ours]
    )
    by_layer = {layer: largest(row) for layer, row in zip(ours, table, strict=True)}
    return {**by_layer, TOTAL: largest(by_layer.values())}


def error(probe: Probe) -> float:
    """Return the fraction of samples that are classified wrongly."""
    target = probe.batch.target
    return error_rate(move_classes_last(probe.captured.output, target), target)


def rank_or_nan(sigma: Tensor) -> float:
    """Return srank, or NaN if a singular value is not finite."""
    return float(spectra.srank(sigma)) if torch.isfinite(sigma).all() else math.nan
