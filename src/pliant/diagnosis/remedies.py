"""What to try: the methods that act on a sign in a network that is trained already, each with two lines of code.

Methods that pull weights towards their values at construction, such as L2 Init, are not listed: they would hold a
trained network where it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pliant.diagnostics import Finding

_ACTS_ON: dict[str, tuple[str, ...]] = {
    "dormant_fraction": ("redo", "continual_backprop"),
    "weight_l2": ("shrink_perturb", "weight_clipping"),
    "spectral_norm": ("fire", "spectral"),
    "sharpness": ("shrink_perturb", "spectral"),
    "weight_effective_rank": ("fire", "spectral"),
    "gradient_effective_rank": ("fire", "shrink_perturb"),
    "feature_rank": ("fire", "shrink_perturb"),
    "hessian_rank": ("shrink_perturb", "fire"),
    "attention_entropy": ("fire", "shrink_perturb"),
}
"""The methods that act on each sign."""

_CODE: dict[str, tuple[str, str, str]] = {
    "redo": (
        "renews dormant units during training",
        "redo = pliant.ReDo(model, x, every=100)  # x: a batch of inputs",
        "redo.attach(optimizer)",
    ),
    "continual_backprop": (
        "renews the least useful units during training",
        "cbp = pliant.ContinualBackprop(model, x)  # x: a batch of inputs",
        "cbp.attach(optimizer)",
    ),
    "shrink_perturb": (
        "mixes the weights with fresh ones, once, before the new data",
        'shrink = pliant.ShrinkPerturb(model, toward="fresh")',
        "shrink.apply(optimizer)",
    ),
    "fire": (
        "makes the weights orthogonal, once, before the new data",
        "fire = pliant.FIRE(model)",
        "fire.apply(optimizer)",
    ),
    "spectral": (
        "keeps the largest singular values near 1 during training",
        "spectral = pliant.SpectralRegularization(model)",
        "spectral.attach(optimizer)",
    ),
    "weight_clipping": (
        "clips the weights to their initial range during training",
        "clipping = pliant.WeightClipping(model)",
        "clipping.attach(optimizer)",
    ),
    "full_reset": (
        "trains from scratch: draws all weights again",
        "reset = pliant.FullReset(model)",
        "reset.apply(optimizer)",
    ),
}
"""What each method does, and the two lines that use it."""


_MOST = 4


@dataclass(frozen=True)
class Remedy:
    """A method to try.

    Attributes:
        method: Its name in `pliant.methods`.
        does: What it does.
        code: The two lines to paste.
        measures: The signs that it acts on.
    """

    method: str
    does: str
    code: tuple[str, str]
    measures: tuple[str, ...]


def choose_remedies(findings: Sequence[Finding], lost: bool) -> list[Remedy]:
    """Return the methods that act on the signs that are present, for the largest sign first; four at most.

    Args:
        findings: The signs, the largest first.
        lost: Whether the network has lost plasticity. If no sign is present then, methods that renew all weights are
            returned.
    """
    found: dict[str, list[str]] = {}
    for finding in findings:
        if finding.present:
            measure = finding.measure.partition("@")[0]
            for method in _ACTS_ON[measure]:
                found.setdefault(method, []).append(measure)
    if lost and not found:
        found = {"shrink_perturb": [], "full_reset": []}
    remedies = [Remedy(name, _CODE[name][0], _CODE[name][1:], tuple(signs)) for name, signs in found.items()]
    return remedies[:_MOST]
