"""The measures: one frozen record each, which drives listings, recipes, reports and the docs.

`names()` lists them and `info(name)` gives a record. Results carry a measure's value for the whole network under its
name, and a layer's under `name/layer`.
"""

from collections.abc import Sequence
from typing import cast

from pliant._names import suggest
from pliant.diagnostics import evaluation as c
from pliant.diagnostics import features, gradients, spectra, weights
from pliant.diagnostics.measure import Compute, Cost, Measure, Need, Sign

_SWR, _SPECTRAL, _CURVATURE, _FIRE = "Soft weight rescaling", "Spectral regularization", "Curvature", "FIRE"


def _record(
    name: str,
    needs: str,
    cost: Cost,
    definition: str,
    source: str,
    compute: Compute,
    sign: Sign | None = None,
) -> Measure:
    return Measure(name, definition, source, frozenset(cast(list[Need], needs.split())), cost, compute, sign)


_RECORDS = (
    _record(
        "loss", "batch labels", "forward", "mean loss over the batch", f"{_CURVATURE} §2", c.total(lambda p: p.loss)
    ),
    _record(
        "error", "batch labels", "forward", "fraction of samples classified wrongly", f"{_CURVATURE} §2",
        c.total(c.error),
    ),
    _record(
        "weight_l1", "weights", "reading", "Σ|θ|; total over all parameters", f"{_CURVATURE} §3",
        c.of_tensors(weights.l1_norm),
    ),
    _record(
        "weight_l2", "weights", "reading", "√Σθ²; total over all parameters", f"{_SWR} §1",
        c.of_tensors(weights.l2_norm),
        Sign(
            "higher", "the weights have grown",
            "unbounded growth goes with loss of plasticity and of generalization (Soft weight rescaling §1), but an "
            "identity network grows without losing plasticity and a relu network loses it on a plateau (Curvature §3)",
            factor=2,
        ),
    ),
    _record(
        "weight_growth", "weights reference", "reading", "√Σθ² divided by the reference's", f"{_SWR} §1", c.growth
    ),
    _record(
        "spectral_norm", "weights", "decomposition", "σ₁(W); total is the mean over layers", f"{_SPECTRAL} §3",
        c.of_spectra(lambda s: float(s[0])),
        Sign(
            "higher", "the weights' largest singular values have grown",
            "goes with loss of trainability in ResNets on random labels (Spectral regularization §5.2)",
            factor=2,
        ),
    ),
    _record(
        "spectral_norm_max", "weights", "decomposition", "σ₁(W); total is the largest of all layers",
        f"{_SPECTRAL} §3",
        c.of_spectra(lambda s: float(s[0]), c.most),
    ),
    _record(
        "condition_number", "weights", "decomposition", "σ₁(W)/σ_min(W); total is the mean over layers",
        f"{_SPECTRAL} §3", c.of_spectra(spectra.condition_number),
    ),
    _record(
        "condition_number_max", "weights", "decomposition", "σ₁(W)/σ_min(W); total is the largest of all layers",
        f"{_SPECTRAL} §3", c.of_spectra(spectra.condition_number, c.most),
    ),
    _record(
        "stable_rank", "weights", "decomposition", "‖W‖²_F/σ₁²; total is the mean over layers", f"{_SPECTRAL} app. C",
        c.of_spectra(spectra.stable_rank),
    ),
    _record(
        "stable_rank_max", "weights", "decomposition", "‖W‖²_F/σ₁²; total is the largest of all layers",
        f"{_SPECTRAL} app. C", c.of_spectra(spectra.stable_rank, c.most),
    ),
    _record(
        "weight_effective_rank", "weights", "decomposition",
        "exp of the entropy of W's normalized singular values; total is the mean over layers", f"{_SPECTRAL} §3.3",
        c.of_spectra(spectra.effective_rank),
        Sign(
            "lower", "the weights have lost directions",
            "bounds the rank of the gradients that pass through them (Spectral regularization §3.3); no source takes "
            "it for an explanation by itself",
            factor=4 / 3,
        ),
    ),
    _record(
        "weight_srank", "weights", "decomposition",
        "how many of W's singular values hold 99 % of their sum; total is the mean over layers", f"{_CURVATURE} §4",
        c.of_spectra(c.rank_or_nan),
    ),
    _record(
        "isometry_deviation", "weights", "decomposition",
        "deviation from isometry (DfI), ‖WᵀW − I‖²_F on W's smaller side, W as it is, a convolution's as one matrix; "
        "total is the sum over layers",
        f"{_FIRE} eq. 2", c.isometry,
    ),
    _record(
        "frobenius_error", "weights reference", "reading",
        "squared Frobenius error, ‖W − W̃‖²_F, W̃ the reference's; total is the sum over layers", f"{_FIRE} eq. 1",
        c.frobenius_error(False),
    ),
    _record(
        "frobenius_error_normalized", "weights reference", "reading", "the same divided by ‖W̃‖²_F", f"{_FIRE} §4.4",
        c.frobenius_error(True),
    ),
    _record(
        "lipschitz_bound", "weights", "decomposition",
        "Πσ₁(W), a convolution's times √(k_h·k_w): bounds the Lipschitz constant of a chain that calls each layer once",
        f"{_SWR} cor. 2.1", c.lipschitz(lambda p, layer: float(p.singular_values(layer)[0])),
    ),
    _record(
        "frobenius_bound", "weights", "reading", "the same with ‖W‖_F for σ₁(W): the looser bound",
        f"{_SWR} cor. 2.1", c.lipschitz(lambda p, layer: weights.l2_norm([p.matrices[layer]])),
    ),
    _record(
        "layer_balance", "weights reference", "reading",
        "|‖W'‖/‖W‖ − ‖W'₀‖/‖W₀‖|, the worst pair of a layer; total is the worst of all", f"{_SWR} def. 2",
        c.layer_balance,
    ),
    _record(
        "balancedness", "weights batch", "decomposition",
        "‖W‖_{2,2} divided by its least over rescalings of units that keep the function", f"{_SWR} app. C",
        c.total(c.balance_ratio),
    ),
    _record(
        "distance_l2", "weights reference", "reading", "‖θ − θ₀‖, θ₀ the reference's", f"{_CURVATURE} C.5",
        c.against_tensors(weights.distance),
    ),
    _record(
        "distance_wasserstein", "weights reference", "reading",
        "√Σ(θ_(i) − θ⁰_(i))² over order statistics of each parameter", f"{_CURVATURE} C.5",
        c.against_tensors(c.wasserstein),
    ),
    _record(
        "feature_rank", "batch", "forward",
        "how many singular values of the last hidden features hold 99 % of their sum, divided by the most possible",
        f"{_CURVATURE} §3", c.total(c.feature_rank),
        Sign(
            "lower", "the last hidden features have lost rank",
            "falls with relu as plasticity is lost, but also with tanh where it is not, and keeping it up by a penalty "
            "does not keep plasticity (Curvature §3; in our runs of its figure 2, strong penalties did)",
            factor=4 / 3,
        ),
    ),
    _record(
        "feature_srank", "batch", "forward",
        "how many singular values of the last hidden features hold 99 % of their sum", f"{_CURVATURE} §3",
        c.total(lambda p: c.rank_or_nan(p.feature_singular_values)),
    ),
    _record(
        "feature_effective_rank", "batch", "forward",
        "exp of the entropy of the normalized singular values of the last hidden features", f"{_SPECTRAL} §3.3",
        c.total(lambda p: spectra.effective_rank(p.feature_singular_values)),
    ),
    _record(
        "dormant_fraction", "batch", "forward",
        "fraction of units with mean|h| ≤ 0.025 of their layer's mean; total over all units", "Sokar 2023; FIRE §3.2",
        c.of_features(lambda f: features.dormant_fraction(features.unit_scores(f.mean_abs))),
        Sign(
            "higher", "units have gone dormant",
            "rises with relu as plasticity is lost, but leaky relu loses plasticity without it (our runs of Curvature, "
            "figure 1)",
            amount=0.1, level=0.1,
        ),
    ),
    _record(
        "dead_fraction", "batch", "forward", "fraction of units that are zero on every sample; total over all units",
        "Dohare 2024", c.of_features(lambda f: features.dead_fraction(f.active)),
    ),
    _record(
        "dormancy", "batch", "forward",
        "Σ p log p, p a unit's share of its layer's activity; total is the mean over units", f"{_CURVATURE} app. A",
        c.of_features(lambda f: features.negative_entropy(f.mean_abs)),
    ),
    _record(
        "feature_covariance_distance", "batch reference", "forward",
        "‖HHᵀ/‖H‖² − H̃H̃ᵀ/‖H̃‖²‖_F, H̃ the reference's; total is the mean over layers", f"{_FIRE} thm. 1",
        c.against_features(features.covariance_distance),
    ),
    _record(
        "representation_change", "batch reference", "forward",
        "mean over samples of ‖h − h̃‖, h̃ the reference's; total is the mean over layers", f"{_SPECTRAL} §5.2",
        c.against_features(features.representation_change),
    ),
    _record(
        "gradient_l1", "batch labels gradients", "backward",
        "Σ|g| of the mean loss; in a Monitor as the step took it: clipped, and with the penalties of attached methods",
        f"{_CURVATURE} §6.2", c.of_gradient(weights.l1_norm),
    ),
    _record(
        "gradient_l2", "batch labels gradients", "backward",
        "√Σg² of the mean loss; in a Monitor as the step took it: clipped, and with the penalties of attached methods",
        f"{_CURVATURE} §6.2", c.of_gradient(weights.l2_norm),
        Sign(
            "lower", "the gradient has become small",
            "falls at the start of tasks where leaky relu loses plasticity while its updates grow: by itself it "
            "explains neither (Curvature §6.2)",
            factor=10,
        ),
    ),
    _record(
        "update_l1", "step", "reading", "Σ|Δθ| of an optimizer's step", f"{_CURVATURE} §3",
        c.of_update(weights.l1_norm),
        Sign(
            "lower", "steps have become small",
            "falls with relu as plasticity is lost, but rises with leaky relu that loses it too (Curvature §3)",
            factor=2,
        ),
    ),
    _record(
        "update_l2", "step", "reading", "√Σ(Δθ)² of an optimizer's step", f"{_CURVATURE} §3",
        c.of_update(weights.l2_norm),
    ),
    _record(
        "gradient_condition_number", "batch labels gradients curvature", "curvature",
        "σ₁(G)/σ_M(G) of the samples' gradients", f"{_SPECTRAL} §3.3", c.of_gram(gradients.condition_number),
    ),
    _record(
        "gradient_effective_rank", "batch labels gradients curvature", "curvature",
        "exp of the entropy of the normalized singular values of the samples' gradients", f"{_SPECTRAL} §3.3",
        c.of_gram(gradients.effective_rank),
        Sign(
            "lower", "the samples' gradients have become alike",
            "what is learned from one sample then interferes with the others; falls as trainability is lost (Spectral "
            "regularization §3.3)",
            factor=4 / 3,
        ),
    ),
    _record(
        "hessian_rank", "batch labels gradients curvature", "curvature",
        "how many eigenvalues of Σggᵀ over M samples hold 99 % of their sum, divided by M, so that d parameters reach "
        "d/M at most",
        f"{_CURVATURE} §4", c.of_gram(gradients.hessian_rank),
        Sign(
            "lower", "directions of curvature are lost",
            "the one sign that Curvature (§6) found wherever plasticity was lost, measured on new data at a task's "
            "first step; it stands for the Hessian's rank only approximately, and what drives it is not known",
            factor=4 / 3,
        ),
    ),
    _record(
        "gradient_overlap", "batch labels gradients curvature", "curvature",
        "gᵀHg/(‖g‖‖Hg‖), H = Σggᵀ cut to the directions that hessian_rank counts", f"{_CURVATURE} §6.2",
        c.of_gram(gradients.overlap),
    ),
    _record(
        "sharpness", "batch labels gradients curvature", "curvature", "largest eigenvalue of the loss's Hessian",
        f"{_FIRE} §4.4", c.total(lambda p: p.sharpness.largest),
        Sign(
            "higher", "the loss is sharper on this data",
            "a sharp start destabilizes training on new data (FIRE §3.2); it counts one direction and none of the "
            "others (Curvature §4)",
            factor=10,
        ),
    ),
    _record(
        "hessian_exact_rank", "batch labels gradients curvature", "matrix",
        "how many singular values of the loss's Hessian hold 99 % of their sum, divided by the number of parameters d",
        f"{_CURVATURE} §4.2", c.total(c.hessian_exact_rank),
    ),
    _record(
        "gauss_newton_rank", "batch labels gradients curvature", "matrix",
        "the same of the Gauss–Newton matrix over M samples of C classes, divided by min(d, M(C − 1))",
        f"{_CURVATURE} §4.2", c.total(c.gauss_newton_rank),
    ),
    _record(
        "fisher_rank", "batch labels gradients curvature", "matrix",
        "the same of the Fisher matrix, labels drawn from the predictions once, divided by min(d, M)",
        f"{_CURVATURE} §4.2", c.total(c.fisher_rank),
    ),
)  # fmt: skip

_BY_NAME = {record.name: record for record in _RECORDS}


def names() -> tuple[str, ...]:
    """Return the names of all measures."""
    return tuple(_BY_NAME)


def info(name: str) -> Measure:
    """Return the record of a measure.

    Raises:
        ValueError: If there is none of that name; says which may have been meant.

    Example:
        >>> info("weight_l2").definition
        '√Σθ²; total over all parameters'
    """
    if name not in _BY_NAME:
        raise ValueError(f"there is no measure {name!r}; {suggest(name, names())}")
    return _BY_NAME[name]


def select(chosen: Sequence[str] | None) -> tuple[Measure, ...]:
    """Return the records of some measures, or of all that need neither an optimizer's step nor a whole matrix.

    Raises:
        ValueError: If there is none of a name, or a string stands where names should.
    """
    if chosen is None:
        return tuple(record for record in _RECORDS if "step" not in record.needs and record.cost != "matrix")
    if isinstance(chosen, str):
        raise ValueError(f"measures: {chosen!r} is a string; it must be a list of names, [{chosen!r}]")
    return tuple(info(name) for name in dict.fromkeys(chosen))
