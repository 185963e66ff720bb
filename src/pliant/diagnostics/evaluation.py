"""From a probe of a model to numbers: how its parts go into the pure functions, layer by layer and in all.

Each function here is, or makes, the `compute` of a measure's record (`measures.py`).
"""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from pliant.anatomy.parameters import find_computed, matrices_in_use
from pliant.diagnostics import curvature, spectra, weights
from pliant.diagnostics.activations import Features
from pliant.diagnostics.balance import balancedness
from pliant.diagnostics.gradients import Spectrum
from pliant.diagnostics.measure import Compute
from pliant.diagnostics.plasticity import error_rate
from pliant.diagnostics.probe import TOTAL, Probe
from pliant.diagnostics.tensors import layer_names, same_parameters, stacks

Values = dict[str, float]
Reduce = Callable[[Iterable[float]], float]


def mean(values: Iterable[float]) -> float:
    """Return the mean over layers; NaN without any."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else math.nan


def most(values: Iterable[float]) -> float:
    """Return the largest of all layers; NaN without any, or if one is NaN."""
    listed = list(values)
    return max(listed) if listed and not any(map(math.isnan, listed)) else math.nan


def _by_layer(values: Values, total: float) -> Values:
    return {**values, TOTAL: total}


def of_tensors(norm: Callable[[Iterable[Tensor]], float]) -> Compute:
    """A norm of all parameters, those of a layer together."""

    def compute(probe: Probe, _: Probe | None) -> Values:
        return _by_layer(
            {layer: norm(tensors) for layer, tensors in probe.tensors.items()}, norm(probe.model.parameters())
        )

    return compute


def against_tensors(distance: Callable[[list[Tensor], list[Tensor]], float]) -> Compute:
    """A comparison of all parameters with the reference's."""

    def compute(probe: Probe, reference: Probe | None) -> Values:
        theirs = _same(probe, reference).tensors
        by_layer = {layer: distance(tensors, theirs[layer]) for layer, tensors in probe.tensors.items()}
        everything = [[t for tensors in p.values() for t in tensors] for p in (probe.tensors, theirs)]
        return _by_layer(by_layer, distance(*everything))

    return compute


def of_spectra(number: Callable[[Tensor], float], reduce: Reduce = mean) -> Compute:
    """A number of each weight's singular values."""

    def compute(probe: Probe, _: Probe | None) -> Values:
        by_layer = {layer: number(probe.singular_values(layer)) for layer in probe.single}
        return _by_layer(by_layer, reduce(by_layer.values()))

    return compute


def of_features(number: Callable[[Features], float]) -> Compute:
    """A number of each layer's hidden features, averaged over units; NaN where activations are not finite."""

    def compute(probe: Probe, _: Probe | None) -> Values:
        layers = _hidden(probe)
        finite = {name: bool(torch.isfinite(layer.mean_abs).all()) for name, layer in layers.items()}
        by_layer = {name: number(layer) if finite[name] else math.nan for name, layer in layers.items()}
        units = {name: len(layer.mean_abs) for name, layer in layers.items()}
        return _by_layer(by_layer, sum(by_layer[n] * units[n] for n in units) / sum(units.values()))

    return compute


def against_features(number: Callable[[Tensor, Tensor], float]) -> Compute:
    """A comparison of each layer's hidden features with the reference's on the same batch."""

    def compute(probe: Probe, reference: Probe | None) -> Values:
        ours, theirs = _hidden(probe), _hidden(_same(probe, reference))
        by_layer = {}
        for name, layer in ours.items():
            other = theirs[name].values if name in theirs else None
            if layer.values is not None and other is not None:
                by_layer[name] = number(layer.values, other)
        return _by_layer(by_layer, mean(by_layer.values()))

    return compute


def of_gram(number: Callable[[Spectrum], float]) -> Compute:
    """A number of the Gram matrix of per-sample gradients: of all parameters, and of each layer's."""

    def compute(probe: Probe, _: Probe | None) -> Values:
        return {layer: number(spectrum) for layer, spectrum in probe.gradient_spectra.items()}

    return compute


def of_gradient(norm: Callable[[Iterable[Tensor]], float]) -> Compute:
    """A norm of the gradient."""

    def compute(probe: Probe, _: Probe | None) -> Values:
        return _norm_by_layer(probe, probe.gradient, norm)

    return compute


def of_update(norm: Callable[[Iterable[Tensor]], float]) -> Compute:
    """A norm of what an optimizer's step did."""

    def compute(probe: Probe, _: Probe | None) -> Values:
        if probe.before is None:
            raise ValueError("it needs an optimizer's step: it is measured by a Monitor")
        update = {name: p.detach() - probe.before[name] for name, p in probe.model.named_parameters()}
        return _norm_by_layer(probe, update, norm)

    return compute


def _norm_by_layer(probe: Probe, tensors: Mapping[str, Tensor], norm: Callable[[Iterable[Tensor]], float]) -> Values:
    names = layer_names(probe.model)
    by_layer: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        by_layer.setdefault(names[name], []).append(tensor)
    return _by_layer({layer: norm(each) for layer, each in by_layer.items()}, norm(tensors.values()))


def total(number: Callable[[Probe], float]) -> Compute:
    """A number of the whole network."""
    return lambda probe, _: {TOTAL: number(probe)}


def _hidden(probe: Probe) -> dict[str, Features]:
    if not probe.captured.layers:
        raise ValueError("it needs hidden units, and none were seen in the forward pass")
    return probe.captured.layers


def _same(probe: Probe, reference: Probe | None) -> Probe:
    if reference is None:
        raise ValueError("it needs a reference")
    if not same_parameters(probe.model, reference.model):
        raise ValueError("it needs a reference whose parameters have the same names and shapes")
    return reference


def growth(probe: Probe, reference: Probe | None) -> Values:
    """Divide the L2 norm of the parameters by the reference's."""
    theirs = _same(probe, reference)
    ours_by, theirs_by = (of_tensors(weights.l2_norm)(p, None) for p in (probe, theirs))
    return {layer: _ratio(ours_by[layer], theirs_by[layer]) for layer in ours_by}


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.inf if a else 1.0


def isometry(probe: Probe, _: Probe | None) -> Values:
    """Return DfI of each weight, and their sum."""
    by_layer = {}
    for layer, weight in probe.single.items():
        out, into = spectra.as_matrix(weight).shape
        by_layer[layer] = weights.isometry_deviation(probe.singular_values(layer), (out, into))
    return _by_layer(by_layer, sum(by_layer.values()))


def lipschitz(norm: Callable[[Probe, str], float]) -> Compute:
    """The product over a chain of what bounds each layer by a norm of its weight."""

    def bound(probe: Probe) -> float:
        found = probe.matrices
        for name in find_computed(probe.model, hooks_only=True):
            raise ValueError(
                f"the weight of {name or 'the model'} is computed from others, whose norms do not bound it"
            )
        for name in matrices_in_use(probe.model):
            if "weight" not in name.rpartition(".")[2]:  # a table of positions, or a weight by another name
                raise ValueError(f"it is not known whether {name} is a weight that its layer's input is multiplied by")
        for layer in stacks(probe.model):
            raise ValueError(f"the weight of {layer} may be several matrices, whose norms it does not tell")
        modules = probe.model.named_modules()
        places = {name or "weight": math.prod(m.kernel_size) for name, m in modules if isinstance(m, _ConvNd)}
        return weights.product_bound(
            weights.layer_bound(norm(probe, layer), places.get(layer.removesuffix(".weight"), 1)) for layer in found
        )

    return total(bound)


def frobenius_error(normalized: bool) -> Compute:
    """The squared distance of weights from the reference's, as it is or relative to the reference's squared norm.

    FIRE plots a normalized SFE without defining it; this is ours.
    """

    def compute(probe: Probe, reference: Probe | None) -> Values:
        theirs = _same(probe, reference).matrices
        error = {layer: weights.frobenius_error(w, theirs[layer]) for layer, w in probe.matrices.items()}
        if not normalized:
            return _by_layer(error, sum(error.values()))
        size = {layer: weights.l2_norm([w]) ** 2 for layer, w in theirs.items()}
        return _by_layer(
            {layer: _ratio(error[layer], size[layer]) if error[layer] else 0.0 for layer in error},
            _ratio(sum(error.values()), sum(size.values())) if any(error.values()) else 0.0,
        )

    return compute


def layer_balance(probe: Probe, reference: Probe | None) -> Values:
    """Return for each layer how far it is out of balance with the worst of the others."""
    theirs = _same(probe, reference).matrices
    names = list(probe.matrices)
    table = weights.layer_balance(
        [weights.l2_norm([probe.matrices[n]]) for n in names], [weights.l2_norm([theirs[n]]) for n in names]
    )
    return _by_layer({name: most(row) for name, row in zip(names, table, strict=True)}, most(map(most, table)))


def wasserstein(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the distance of distributions over several parameters."""
    pairs = zip(ours, theirs, strict=True)
    return math.sqrt(sum(weights.wasserstein_distance(t, r) ** 2 for t, r in pairs))


def feature_rank(probe: Probe) -> float:
    """Return the share of directions that the last hidden features use."""
    sigma = probe.feature_singular_values
    return rank_or_nan(sigma) / len(sigma)


def balance_ratio(probe: Probe) -> float:
    """Return the balancedness of a model that is a homogeneous chain."""
    return balancedness(probe.model, probe.batch).ratio


def error(probe: Probe) -> float:
    """Return the fraction of samples that are classified wrongly."""
    output, target = probe.captured.output, probe.batch.target
    if target is None:
        raise ValueError("it needs labels, and the batch has none")
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or target.is_floating_point():
        raise ValueError("it needs a tensor of logits and integer labels")
    # Classes are last, or second as torch's losses have them.
    dims = {1, output.ndim - 1} if output.ndim > 1 else set()
    places = [dim for dim in dims if output.shape[:dim] + output.shape[dim + 1 :] == target.shape]
    if not places or output.shape[places[0]] < 2:
        raise ValueError(
            "it needs logits of at least two classes, [samples, …, classes] or [samples, classes, …], and a label for "
            f"each of the others, got shapes {tuple(output.shape)} and {tuple(target.shape)}"
        )
    if len(places) > 1:
        raise ValueError(
            f"it needs to know where classes are, which outputs of shape {tuple(output.shape)} do not tell"
        )
    return error_rate(output.movedim(places[0], -1), target)


def hessian_exact_rank(probe: Probe) -> float:
    """Return the share of directions that the Hessian itself has."""
    matrix = curvature.hessian(probe.model, probe.batch, probe.loss_fn)
    off = float((matrix - matrix.T).norm() / matrix.norm())
    if off > curvature.symmetry_limit(probe.model):
        raise ValueError(f"the Hessian is not symmetric (by {off:.2g} of it): a second derivative in it is wrong")
    return curvature.relative_rank(matrix, len(matrix))


def gauss_newton_rank(probe: Probe) -> float:
    """Return the share of directions that the Gauss–Newton matrix has, for softmax and cross-entropy."""
    samples, classes = _logits(probe).shape
    matrix = curvature.gauss_newton(probe.model, probe.batch, probe.loss_fn)
    return curvature.relative_rank(matrix, min(len(matrix), samples * (classes - 1)))


def fisher_rank(probe: Probe) -> float:
    """Return the share of directions that the Fisher matrix has, with one label drawn for each sample."""
    samples, _ = _logits(probe).shape
    matrix = curvature.fisher(probe.model, probe.batch)
    return curvature.relative_rank(matrix, min(len(matrix), samples))


def _logits(probe: Probe) -> Tensor:
    output, target = probe.captured.output, probe.batch.target
    if not isinstance(output, Tensor) or output.ndim != 2 or output.shape[1] < 2:
        raise ValueError("it needs logits, [samples, classes], of at least two classes")
    if not isinstance(target, Tensor) or target.is_floating_point() or target.shape != output.shape[:1]:
        raise ValueError("it needs a class for each sample, as an integer")
    return output


def rank_or_nan(sigma: Tensor) -> float:
    """Return srank; NaN for singular values that are not finite."""
    return float(spectra.srank(sigma)) if torch.isfinite(sigma).all() else math.nan
