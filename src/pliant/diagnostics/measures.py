"""Every measure as one frozen record: what it needs, how it is computed, and when it is a sign of lost plasticity.

A record is the only place that states a measure's needs. Listings, recipes, `diagnose`, `Monitor`, reports and the docs
read it. A result holds a measure's value for the whole network under the measure's name, and the value for one layer
under `name/layer`.

To add a measure, write its formula as a pure function and add a record to `_RECORDS`. The builders below (`on_spectra`,
`on_features`, …) turn a formula for one layer into values for all layers and a total.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from pliant._names import suggest
from pliant.diagnostics import curvature, features, spectra, weights
from pliant.diagnostics.activations import Features
from pliant.diagnostics.attention import head_entropies
from pliant.diagnostics.balance import balancedness
from pliant.diagnostics.batches import error_rate, move_classes_last
from pliant.diagnostics.probe import Need, Probe, same_parameters
from pliant.diagnostics.signs import Sign

Cost = Literal["reading", "decomposition", "forward", "backward", "curvature", "matrix"]
"""What a measure costs: reading the weights, decomposing them, a forward pass, a backward pass, many backward passes,
or a full matrix of curvature (parameters × parameters), which fits in memory only for small networks."""

Values = dict[str, float]
"""Values by layer. The value for the whole network is stored under `TOTAL`."""

Compute = Callable[[Probe, Probe | None], Values]
"""Computes the values of a measure from a probe of the model and a probe of the reference."""

TOTAL = ""
"""The key of the value for the whole network."""


@dataclass(frozen=True)
class Measure:
    """A number about a network.

    Attributes:
        name: The key of the value for the whole network. The key for one layer is `name/layer`.
        definition: The definition in one line, including how the total follows from the layers.
        source: The paper, and where in it.
        needs: What must be given.
        cost: What it costs.
        compute: The function that computes the values.
        sign: When the value is a sign of lost plasticity; `None` if no source says that it is one.
    """

    name: str
    definition: str
    source: str
    needs: frozenset[Need]
    cost: Cost
    compute: Compute
    sign: Sign | None = None

    @property
    def of_loss(self) -> bool:
        """Whether the value depends on the labels, and so is measured for each loss."""
        return not self.needs.isdisjoint(("labels", "gradient"))

    @property
    def of_step(self) -> bool:
        """Whether a `Monitor` takes the value from the optimizer's step."""
        return not self.needs.isdisjoint(("gradient", "step", "moments"))


class Taken(NamedTuple):
    """The outcome of taking measures.

    Attributes:
        values: The values by measure.
        skipped: Why each of the other measures could not be taken.
    """

    values: dict[str, Values]
    skipped: dict[str, str]


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


_SWR, _SPECTRAL, _CURVATURE, _FIRE = "Soft weight rescaling", "Spectral regularization", "Curvature", "FIRE"


def _record(
    name: str, needs: str, cost: Cost, definition: str, source: str, compute: Compute, sign: Sign | None = None
) -> Measure:
    return Measure(name, definition, source, frozenset(cast(list[Need], needs.split())), cost, compute, sign)


_RECORDS = (
    _record(
        "loss", "batch labels loss", "forward", "mean loss over the batch", f"{_CURVATURE} §2",
        on_network(lambda p: p.loss),
    ),
    _record(
        "error", "batch labels", "forward", "fraction of samples classified wrongly", f"{_CURVATURE} §2",
        on_network(error),
    ),
    _record(
        "weight_l1", "weights", "reading", "Σ|θ|; total over all parameters", f"{_CURVATURE} §3",
        on_tensors(weights.l1_norm),
    ),
    _record(
        "weight_l2", "weights", "reading", "√Σθ²; total over all parameters", f"{_SWR} §1",
        on_tensors(weights.l2_norm),
        Sign(
            "higher", "the weights have grown",
            "unbounded growth accompanies loss of plasticity and of generalization (Soft weight rescaling §1), but an "
            "identity network grows without losing plasticity, and a relu network loses it while its norm is constant "
            "(Curvature §3)",
        ),
    ),
    _record(
        "weight_growth", "weights reference", "reading", "√Σθ² divided by the reference's", f"{_SWR} §1", growth
    ),
    _record(
        "spectral_norm", "weights", "decomposition", "σ₁(W); total is the mean over layers", f"{_SPECTRAL} §3",
        on_spectra(lambda s: float(s[0])),
        Sign(
            "higher", "the weights' largest singular values have grown",
            "accompanies loss of trainability in ResNets on random labels (Spectral regularization §5.2)",
        ),
    ),
    _record(
        "spectral_norm_max", "weights", "decomposition", "σ₁(W); total is the largest of all layers",
        f"{_SPECTRAL} §3",
        on_spectra(lambda s: float(s[0]), largest),
    ),
    _record(
        "condition_number", "weights", "decomposition", "σ₁(W)/σ_min(W); total is the mean over layers",
        f"{_SPECTRAL} §3", on_spectra(spectra.condition_number),
    ),
    _record(
        "condition_number_max", "weights", "decomposition", "σ₁(W)/σ_min(W); total is the largest of all layers",
        f"{_SPECTRAL} §3", on_spectra(spectra.condition_number, largest),
    ),
    _record(
        "stable_rank", "weights", "decomposition", "‖W‖²_F/σ₁²; total is the mean over layers", f"{_SPECTRAL} app. C",
        on_spectra(spectra.stable_rank),
    ),
    _record(
        "stable_rank_max", "weights", "decomposition", "‖W‖²_F/σ₁²; total is the largest of all layers",
        f"{_SPECTRAL} app. C", on_spectra(spectra.stable_rank, largest),
    ),
    _record(
        "weight_effective_rank", "weights", "decomposition",
        "exp of the entropy of W's normalized singular values; total is the mean over layers", f"{_SPECTRAL} §3.3",
        on_spectra(spectra.effective_rank),
        Sign(
            "lower", "the weights have lost directions",
            "it bounds the rank of the gradients that pass through the weights (Spectral regularization §3.3), but no "
            "source calls it an explanation by itself",
        ),
    ),
    _record(
        "weight_srank", "weights", "decomposition",
        "how many of W's singular values hold 99 % of their sum; total is the mean over layers", f"{_CURVATURE} §4",
        on_spectra(rank_or_nan),
    ),
    _record(
        "isometry_deviation", "weights", "decomposition",
        "deviation from isometry (DfI), ‖WᵀW − I‖²_F on W's smaller side, W as it is, a convolution's as one matrix; "
        "total is the sum over layers",
        f"{_FIRE} eq. 2", isometry,
    ),
    _record(
        "frobenius_error", "weights reference", "reading",
        "squared Frobenius error, ‖W − W̃‖²_F, W̃ the reference's; total is the sum over layers", f"{_FIRE} eq. 1",
        frobenius_error,
    ),
    _record(
        "frobenius_error_normalized", "weights reference", "reading", "the same divided by ‖W̃‖²_F", f"{_FIRE} §4.4",
        normalized_frobenius_error,
    ),
    _record(
        "lipschitz_bound", "weights", "decomposition",
        "Πσ₁(W), a convolution's times √(k_h·k_w): bounds the Lipschitz constant of a chain that calls each layer once",
        f"{_SWR} cor. 2.1", on_network(spectral_bound),
    ),
    _record(
        "frobenius_bound", "weights", "reading", "the same with ‖W‖_F in place of σ₁(W): a looser bound",
        f"{_SWR} cor. 2.1", on_network(frobenius_bound),
    ),
    _record(
        "layer_balance", "weights reference", "reading",
        "|‖W'‖/‖W‖ − ‖W'₀‖/‖W₀‖|, the worst pair of a layer; total is the worst of all", f"{_SWR} def. 2",
        layer_balance,
    ),
    _record(
        "balancedness", "weights batch", "decomposition",
        "‖W‖_{2,2} divided by its least over rescalings of units that keep the function", f"{_SWR} app. C",
        on_network(lambda p: balancedness(p.model, p.batch).ratio),
    ),
    _record(
        "distance_l2", "weights reference", "reading", "‖θ − θ₀‖, θ₀ the reference's", f"{_CURVATURE} C.5",
        between_tensors(weights.distance),
    ),
    _record(
        "distance_wasserstein", "weights reference", "reading",
        "√Σ(θ_(i) − θ⁰_(i))² over order statistics of each parameter", f"{_CURVATURE} C.5",
        between_tensors(weights.wasserstein_distance),
    ),
    _record(
        "feature_rank", "batch", "forward",
        "how many singular values of the last hidden features hold 99 % of their sum, divided by how many there are",
        f"{_CURVATURE} §3", on_heads(lambda sigma: rank_or_nan(sigma) / len(sigma)),
        Sign(
            "lower", "the last hidden features have lost rank",
            "it falls with relu as plasticity is lost, but also with tanh without a loss, and a penalty that keeps the "
            "rank does not keep plasticity (Curvature §3; in our runs of its figure 2, strong penalties did)",
        ),
    ),
    _record(
        "feature_srank", "batch", "forward",
        "how many singular values of the last hidden features hold 99 % of their sum", f"{_CURVATURE} §3",
        on_heads(rank_or_nan),
    ),
    _record(
        "feature_effective_rank", "batch", "forward",
        "exp of the entropy of the normalized singular values of the last hidden features", f"{_SPECTRAL} §3.3",
        on_heads(spectra.effective_rank),
    ),
    _record(
        "dormant_fraction", "batch", "forward",
        "fraction of units with mean|h| ≤ 0.025 of their layer's mean; total over all units", "Sokar 2023; FIRE §3.2",
        on_features(lambda f: features.dormant_fraction(features.unit_scores(f.mean_abs))),
        Sign(
            "higher", "units have gone dormant",
            "it rises with relu as plasticity is lost, but leaky relu loses plasticity without it (our runs of "
            "Curvature, figure 1)",
            lost_share=True,
        ),
    ),
    _record(
        "dead_fraction", "batch", "forward", "fraction of units that are zero on every sample; total over all units",
        "Dohare 2024", on_features(lambda f: features.dead_fraction(f.active)),
    ),
    _record(
        "dormancy", "batch", "forward",
        "Σ p log p, p a unit's share of its layer's activity; total is the mean over units", f"{_CURVATURE} app. A",
        on_features(lambda f: features.negative_entropy(f.mean_abs)),
    ),
    _record(
        "feature_covariance_distance", "batch reference", "forward",
        "‖HHᵀ/‖H‖² − H̃H̃ᵀ/‖H̃‖²‖_F, H̃ the reference's; total is the mean over layers", f"{_FIRE} thm. 1",
        between_features(features.covariance_distance),
    ),
    _record(
        "representation_change", "batch reference", "forward",
        "mean over samples of ‖h − h̃‖, h̃ the reference's; total is the mean over layers", f"{_SPECTRAL} §5.2",
        between_features(features.representation_change),
    ),
    _record(
        "gradient_l1", "gradient", "backward",
        "Σ|g| of the mean loss; in a Monitor as the step took it: clipped, and with the penalties of attached methods",
        f"{_CURVATURE} §6.2", on_gradient(weights.l1_norm),
    ),
    _record(
        "gradient_l2", "gradient", "backward",
        "√Σg² of the mean loss; in a Monitor as the step took it: clipped, and with the penalties of attached methods",
        f"{_CURVATURE} §6.2", on_gradient(weights.l2_norm),
    ),
    _record(
        "update_l1", "step", "reading", "Σ|Δθ| of an optimizer's step", f"{_CURVATURE} §3",
        on_update(weights.l1_norm),
    ),
    _record(
        "update_l2", "step", "reading", "√Σ(Δθ)² of an optimizer's step", f"{_CURVATURE} §3",
        on_update(weights.l2_norm),
    ),
    _record(
        "relative_update", "step", "reading", "‖Δθ‖/‖θ‖ of an optimizer's step: the effective learning rate",
        "Lyle 2024", relative_update,
    ),
    _record(
        "churn", "batch step", "forward",
        "mean over samples and outputs of |f(x) − f̃(x)|, f̃ the network before an optimizer's step", "Tang 2025",
        on_network(churn),
    ),
    _record(
        "gradient_dormant_fraction", "gradient", "backward",
        "fraction of units whose incoming weights' mean|g| is ≤ 0.01 of their layer's mean; total over all units",
        "Liu 2025",
        on_units(lambda p: p.gradient, lambda g: features.dormant_fraction(features.unit_scores(g), 0.01)),
    ),
    _record(
        "dead_by_moments", "moments", "reading",
        "fraction of units whose incoming weights' second moments in the optimizer are all zero; total over all units",
        "ours", on_units(lambda p: p.moments, lambda v: float((v == 0).double().mean())),
    ),
    _record(
        "saturation", "batch", "forward",
        "fraction of units with a mean |tanh|, or |2·sigmoid − 1|, above 0.99; total over all such units", "ours",
        saturation,
    ),
    _record(
        "attention_entropy", "batch", "forward",
        "entropy of a query's attention weights over log of the number of keys it sees, 1 if uniform; of each layer "
        "and layer[head], total is the mean over layers",
        "Zhai 2023", attention_entropy,
    ),
    _record(
        "gradient_condition_number", "batch labels loss", "curvature",
        "σ₁(G)/σ_M(G) of the samples' gradients", f"{_SPECTRAL} §3.3", on_gram(spectra.gradient_condition_number),
    ),
    _record(
        "gradient_effective_rank", "batch labels loss", "curvature",
        "exp of the entropy of the normalized singular values of the samples' gradients", f"{_SPECTRAL} §3.3",
        on_gram(spectra.gradient_effective_rank),
        Sign(
            "lower", "the samples' gradients have become alike",
            "learning one sample then interferes with the others, and it falls as trainability is lost (Spectral "
            "regularization §3.3)",
        ),
    ),
    _record(
        "hessian_rank", "batch labels loss", "curvature",
        "how many eigenvalues of Σggᵀ over M samples hold 99 % of their sum, divided by M, so that d parameters reach "
        "d/M at most",
        f"{_CURVATURE} §4", on_gram(spectra.hessian_rank),
        Sign(
            "lower", "directions of curvature are lost",
            "Curvature (§6) found only this sign wherever plasticity was lost, measured on new data at a task's first "
            "step, but it only approximates the rank of the Hessian, and its cause is unknown",
        ),
    ),
    _record(
        "gradient_overlap", "batch labels loss", "curvature",
        "gᵀHg/(‖g‖‖Hg‖), H = Σggᵀ cut to the directions that hessian_rank counts", f"{_CURVATURE} §6.2",
        on_gram(spectra.gradient_overlap),
    ),
    _record(
        "sharpness", "batch labels loss", "curvature", "largest eigenvalue of the loss's Hessian",
        f"{_FIRE} §4.4", on_network(lambda p: p.sharpness.largest),
        Sign(
            "higher", "the loss is sharper on this data",
            "a sharp start destabilizes training on new data (FIRE §3.2), but sharpness describes only one direction "
            "(Curvature §4)",
        ),
    ),
    _record(
        "hessian_exact_rank", "batch labels loss", "matrix",
        "how many singular values of the loss's Hessian hold 99 % of their sum, divided by the number of parameters d",
        f"{_CURVATURE} §4.2", on_network(lambda p: curvature.hessian_exact_rank(p.model, p.batch, p.loss_fn)),
    ),
    _record(
        "gauss_newton_rank", "batch labels loss", "matrix",
        "the same of the Gauss–Newton matrix over M samples of C classes, divided by min(d, M(C − 1))",
        f"{_CURVATURE} §4.2",
        on_network(lambda p: curvature.gauss_newton_rank(p.model, p.batch, p.loss_fn, p.captured.output)),
    ),
    _record(
        "fisher_rank", "batch labels loss", "matrix",
        "the same of the Fisher matrix, labels drawn from the predictions once, divided by min(d, M)",
        f"{_CURVATURE} §4.2", on_network(lambda p: curvature.fisher_rank(p.model, p.batch, p.captured.output)),
    ),
)  # fmt: skip

_BY_NAME = {record.name: record for record in _RECORDS}


def names() -> tuple[str, ...]:
    """Return the names of all measures."""
    return tuple(_BY_NAME)


def info(name: str) -> Measure:
    """Return the record of a measure.

    Raises:
        ValueError: If the name is unknown. The message suggests a similar one.

    Example:
        >>> info("weight_l2").definition
        '√Σθ²; total over all parameters'
    """
    if name not in _BY_NAME:
        raise ValueError(f"there is no measure {name!r}; {suggest(name, names())}")
    return _BY_NAME[name]


def select(chosen: Sequence[str] | None) -> tuple[Measure, ...]:
    """Return the records of the named measures.

    Args:
        chosen: The names. `None` selects all measures except those that need an optimizer's step or a full matrix.

    Raises:
        ValueError: If a name is unknown, or `chosen` is a string.
    """
    if chosen is None:
        of_optimizer = frozenset[Need](["step", "moments"])
        return tuple(r for r in _RECORDS if r.needs.isdisjoint(of_optimizer) and r.cost != "matrix")
    if isinstance(chosen, str):
        raise ValueError(f"measures: {chosen!r} is a string; it must be a list of names, [{chosen!r}]")
    return tuple(info(name) for name in dict.fromkeys(chosen))


_LACKING: dict[Need, str] = {
    "batch": "it needs a batch",
    "loss": "it needs a loss_fn",
    "labels": "it needs labels, and the batch has none",
    "reference": "it needs a reference",
    "step": "it needs an optimizer's step, so only a Monitor measures it",
    "moments": "it needs an optimizer, so only a Monitor measures it",
}
"""Why a measure is skipped, in the order in which needs are checked."""


def find_lacking(measure: Measure, probe: Probe, reference: Probe | None) -> list[Need]:
    """Return the needs of a measure that the probes do not meet."""
    given = probe.given | (frozenset[Need](["reference"]) if reference is not None else frozenset())
    needs = measure.needs - given
    if "gradient" in needs:  # the probe computes it from these
        needs = frozenset[Need](["batch", "loss", "labels"]) - given
    return [need for need in _LACKING if need in needs]


def take(chosen: Sequence[Measure], probe: Probe, reference: Probe | None = None) -> Taken:
    """Take measures of a probe.

    A measure is skipped if a need is not met, or if it does not apply to the model and the batch.

    Args:
        chosen: The measures.
        probe: The model and its batch.
        reference: The model to compare with, on the same batch.
    """
    taken = Taken({}, {})
    comparable = reference is not None and same_parameters(probe.model, reference.model)
    for measure in chosen:
        name = f"{measure.name}@{probe.loss_name}" if probe.loss_name and measure.of_loss else measure.name
        lacking = find_lacking(measure, probe, reference)
        if lacking:
            taken.skipped[name] = _LACKING[lacking[0]]
        elif "reference" in measure.needs and not comparable:
            taken.skipped[name] = "it needs a reference whose parameters have the same names and shapes"
        else:
            try:
                taken.values[name] = measure.compute(probe, reference)
            except NotImplementedError as error:  # torch lacks a derivative, and its message goes on for pages
                taken.skipped[name] = str(error).partition(". ")[0]
            except (ValueError, ArithmeticError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
                taken.skipped[name] = str(error)
    return taken
