"""Every measure as one frozen record: what it needs, how it is computed, and when it is a sign of lost plasticity.

A record is the only place that states a measure's needs. Listings, recipes, `diagnose`, `Monitor`, reports and the docs
read it. A result holds a measure's value for the whole network under the measure's name, and the value for one layer
under `name/layer`.

To add a measure, write its formula as a pure function and add a record to `_RECORDS`. The builders in `layer_values.py`
(`on_spectra`, `on_features`, …) turn a formula for one layer into values for all layers and a total.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch

from pliant._names import suggest
from pliant.diagnostics import curvature, features, spectra, weights
from pliant.diagnostics.balance import balancedness
from pliant.diagnostics.layer_values import (
    Compute,
    Values,
    attention_entropy,
    between_features,
    between_tensors,
    churn,
    error,
    frobenius_bound,
    frobenius_error,
    growth,
    isometry,
    largest,
    layer_balance,
    normalized_frobenius_error,
    on_features,
    on_gradient,
    on_gram,
    on_heads,
    on_network,
    on_spectra,
    on_tensors,
    on_units,
    on_update,
    rank_or_nan,
    relative_update,
    saturation,
    spectral_bound,
)
from pliant.diagnostics.probe import Need, Probe, same_parameters
from pliant.diagnostics.signs import Sign

Cost = Literal["reading", "decomposition", "forward", "backward", "curvature", "matrix"]
"""What a measure costs: reading the weights, decomposing them, a forward pass, a backward pass, many backward passes,
or a full matrix of curvature (parameters × parameters), which fits in memory only for small networks."""


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
        Sign(
            "lower", "attention looks at single tokens",
            "the softmax is flat there, so heads hardly change any more (Zhai 2023); a long healthy training sharpens "
            "attention too",
        ),
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
        chosen: The names. `None` selects all measures that need neither an optimizer's step nor a full matrix.

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
