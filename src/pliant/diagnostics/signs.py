"""Signs of lost plasticity: how far a measure is beyond its range in healthy networks.

A value is compared with a fresh network's: how many times worse is it? Training a healthy network changes most measures
too. So what counts is the ratio beside the largest one among healthy networks, which `_healthy_limits.py` holds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pliant.diagnostics._healthy_limits import LIMITS, SEVERE

Grade = Literal["fine", "raised", "severe"]
_LAYERS_IN_A_SENTENCE = 3
_NOTICED = 1.05
"""Below this ratio, a value is written as not worse: rounded, the ratio is 1.0."""


@dataclass(frozen=True)
class Sign:
    """When a measure is a sign of lost plasticity, and what the sources say about it.

    Attributes:
        worse: Whether higher or lower values are worse.
        says: What the sign means, in a few words.
        explains: What the sources found the sign to explain, and what it does not explain.
        lost_share: Whether the value is a share of units that is lost. Then the shares that remain are compared.
    """

    worse: Literal["higher", "lower"]
    says: str
    explains: str
    lost_share: bool = False

    def times(self, value: float, reference: float | None) -> float | None:
        """Return how many times worse a value is than a fresh network's, or None if they cannot be compared.

        Example:
            >>> Sign("higher", "", "").times(6.0, 2.0), Sign("lower", "", "").times(0.1, 0.2)
            (3.0, 2.0)
            >>> Sign("higher", "", "", lost_share=True).times(0.5, None)  # half of the units remain
            2.0
        """
        if self.lost_share:
            value, reference = 1 - value, 1 - (reference or 0.0)
        if reference is None or not math.isfinite(reference) or reference <= 0 or math.isnan(value):
            return None
        if self.worse == "higher" and not self.lost_share:
            return value / reference
        return reference / value if value > 0 else math.inf


@dataclass(frozen=True)
class Finding:
    """A sign that was judged.

    Attributes:
        measure: The measure's name.
        sign: The sign.
        value: The network's value.
        reference: The fresh network's value, or None.
        by_layer: The size of the sign in each layer, as `size`.
    """

    measure: str
    sign: Sign
    value: float
    reference: float | None
    by_layer: Mapping[str, float] = field(default_factory=dict)

    @property
    def times(self) -> float:
        """How many times worse the value is than the fresh network's."""
        found = self.sign.times(self.value, self.reference)
        assert found is not None
        return found

    @property
    def limit(self) -> float:
        """The largest `times` among healthy networks."""
        return healthy_limit(self.measure)

    @property
    def size(self) -> float:
        """The sign as a multiple of the largest in healthy networks."""
        return self.times / self.limit

    @property
    def grade(self) -> Grade:
        """Whether the sign is in the range of healthy networks, beyond it, or far beyond it."""
        return grade(self.size)

    @property
    def present(self) -> bool:
        """Whether the sign is beyond the range of healthy networks."""
        return self.grade != "fine"

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers in which the sign is beyond the range of healthy networks, worst first."""
        raised = [layer for layer, size in self.by_layer.items() if grade(size) != "fine"]
        return tuple(sorted(raised, key=lambda layer: -self.by_layer[layer]))

    @property
    def written_layers(self) -> str:
        """The worst of `layers`, in words."""
        shown = ", ".join(self.layers[:_LAYERS_IN_A_SENTENCE])
        return f"layer{'s' if len(self.layers) > 1 else ''} {shown}"

    @property
    def evidence(self) -> str:
        """The value, the fresh network's, and the range of healthy networks.

        Example:
            >>> Finding("weight_l2", Sign("higher", "", ""), 20.0, 5.0).evidence.partition(";")[0]
            'weight_l2 is 20, 4.0x worse than the fresh 5'
            >>> units = Finding("dormant_fraction", Sign("higher", "", "", lost_share=True), 0.75, 0.0)
            >>> units.evidence.partition(";")[0]
            'dormant_fraction is 0.75, so 4.0x fewer units remain than with the fresh 0'
        """
        text = f"{self.measure} is {self.value:.3g}"
        if self.reference is not None:
            text += f", {self._comparison} the fresh {self.reference:.3g}"
        text += f"; healthy networks reach {_write(self.limit)}"
        return f"{text}; largest in {self.written_layers}" if self.layers else text

    @property
    def _comparison(self) -> str:
        if self.times < _NOTICED:
            return "not worse than"
        if self.sign.lost_share:
            return f"so {_write(self.times)} fewer units remain than with"
        return f"{_write(self.times)} worse than"


def grade(size: float) -> Grade:
    """Return the grade of a multiple of the healthy limit.

    Example:
        >>> grade(0.9), grade(1.01), grade(1000.0)
        ('fine', 'raised', 'severe')
    """
    return "severe" if size > SEVERE else "raised" if size > 1 else "fine"


def healthy_limit(measure: str) -> float:
    """Return how many times worse than a fresh network's the measure gets in healthy networks."""
    return LIMITS[measure.partition("@")[0]]


def _write(times: float) -> str:
    return "infinitely" if math.isinf(times) else f"{times:.1f}x" if times < 1000 else f"{times:.2g}x"
