"""What there is to know of a measure: one frozen record, from which everything else follows."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pliant.diagnostics.probe import Probe

Need = Literal["weights", "batch", "labels", "gradients", "curvature", "reference", "step"]
"""What a measure needs: the weights alone; inputs; inputs with labels and a loss; gradients of the loss; per-sample
gradients or second derivatives; another model to compare with; the parameters before and after an optimizer's step."""

Cost = Literal["reading", "decomposition", "forward", "backward", "curvature", "matrix"]
"""What a measure costs: reading the weights; decomposing them; a forward pass; a backward pass; many of them; a whole
matrix of curvature, parameters by parameters, which only small networks have room for."""

Compute = Callable[[Probe, Probe | None], Mapping[str, float]]


@dataclass(frozen=True)
class Sign:
    """When a measure is a sign of lost plasticity, and what the sources say that it explains.

    A value is a sign if it is worse than the reference's by a factor, or by an amount, or beyond a level without
    any reference. The thresholds are Pliant's own conventions; no source gives any.

    Attributes:
        worse: Whether higher or lower values are the worse ones.
        says: What it means, in a few words.
        explains: What the sources found it to explain, and not to explain.
        factor: Worse by this factor than the reference's value.
        amount: Worse by this amount than the reference's value.
        level: Worse than this, where there is no reference to compare with.
    """

    worse: Literal["higher", "lower"]
    says: str
    explains: str
    factor: float | None = None
    amount: float | None = None
    level: float | None = None

    def limit(self, reference: float | None) -> float | None:
        """Return the value beyond which there is a sign; `None` if nothing can be said.

        Nothing can if the reference is NaN or infinite, or if a factor is to be taken of one that is not positive.
        """
        if reference is None or (self.factor is None and self.amount is None):
            return self.level
        if not math.isfinite(reference):
            return None
        up = self.worse == "higher"
        if self.factor is not None:
            scaled = reference * self.factor if up else reference / self.factor
            return scaled if reference > 0 else None
        assert self.amount is not None
        return reference + self.amount if up else reference - self.amount

    def present(self, value: float, reference: float | None) -> bool:
        """Say whether a value is a sign. NaN is none: it is reported as what it is."""
        limit = self.limit(reference)
        if limit is None:
            return False
        return value > limit if self.worse == "higher" else value < limit


@dataclass(frozen=True)
class Measure:
    """A number about a network.

    Attributes:
        name: The key of its value for the whole network; a layer's is `name/layer`.
        definition: What it is, in a line; says how layers make the total.
        source: Where it comes from.
        needs: What it needs.
        cost: What it costs.
        compute: From a probe of the model and one of the reference to values by layer, the total under `TOTAL`.
        sign: When it is a sign of lost plasticity; `None` if it is not known to be.
    """

    name: str
    definition: str
    source: str
    needs: frozenset[Need]
    cost: Cost
    compute: Compute
    sign: Sign | None = None
