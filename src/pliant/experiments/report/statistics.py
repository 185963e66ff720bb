"""Statistics over seeds: intervals, tests, corrections, and the number of seeds that would be enough.

Student's t gives both the intervals and the tests, so that they always agree:

- Two methods are compared by Student's paired t-test on the seeds that both have, because runs of one seed share data
  order, initial weights and tasks. Rank and sign tests cannot reach 5 % with fewer than six seeds.
- Families of tests are corrected by Holm's procedure. The interval of a difference uses the level at which Holm's
  procedure tests it: the interval excludes zero exactly if the corrected p-value is below 5 %.
- With two seeds there is no interval: Student's would reach 13 standard errors to each side.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]

LEVEL = 0.05
"""A difference is significant if its corrected p-value is below this level."""
POWER = 0.8
"""The power for which `seeds_needed` plans."""
MANY_SEEDS = 1000
"""The most seeds that `seeds_needed` suggests."""
ANYTHING = (-math.inf, math.inf)
"""The limits of a mean that may be any number."""

_FEWEST = 3
"""The fewest seeds that give an interval."""
_ROUNDING = 1e-9
"""Differences below this fraction of the values are rounding errors."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its interval.

    Args:
        mean: The mean.
        low: The lower end; NaN for fewer than three values.
        high: The upper end; NaN for fewer than three values.
        count: The number of values.
    """

    mean: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Difference:
    """The difference of two methods: mean of the first minus mean of the second.

    Args:
        mean: The difference.
        error: Its standard error; 0 if all paired differences are equal up to rounding, NaN if it is unknown.
        freedom: The degrees of freedom of the error.
        count: The number of seeds: the shared ones, or if unpaired the fewer of the two.
        paired: Whether the difference is paired by seed.
    """

    mean: float
    error: float
    freedom: float
    count: int
    paired: bool

    @property
    def reversed(self) -> "Difference":
        """The second minus the first."""
        # 0.0 − x, because −x turns 0 into −0.
        return Difference(0.0 - self.mean, self.error, self.freedom, self.count, self.paired)

    @property
    def p(self) -> float:
        """The uncorrected p-value; NaN if a test is impossible.

        Differences that are all equal have no variance for a t-test. They are tested by a sign test instead.
        """
        if self.error == 0:
            return 1.0 if self.mean == 0 else float(stats.binomtest(self.count, self.count).pvalue)
        return float(2 * stats.t.sf(abs(self.mean) / self.error, self.freedom))

    def interval(self, level: float = LEVEL) -> Interval:
        """Return the interval that excludes zero exactly if `p` is below a level; NaN if there is no such interval."""
        reach = float(stats.t.isf(level / 2, self.freedom)) * self.error
        if self.count < _FEWEST or (self.error == 0 and self.mean != 0):
            reach = math.nan
        return Interval(self.mean, self.mean - reach, self.mean + reach, self.count)


def interval(values: Sequence[float], within: tuple[float, float] = ANYTHING) -> Interval:
    """Estimate a mean with Student's 95 % interval over seeds.

    Args:
        values: A finite number for each seed, at least one.
        within: The smallest and largest possible mean.

    Example:
        >>> interval([2.0, 2.0, 2.0]), round(interval([1.0, 2.0, 3.0]).high, 3)
        (Interval(mean=2.0, low=2.0, high=2.0, count=3), 4.484)
    """
    if len(values) == 0:
        raise ValueError("values is empty; a mean needs at least one")
    mean, low, high = (float(each[0]) for each in bands(np.asarray(values, dtype=float)[:, None], within))
    return Interval(mean, low, high, len(values))


def bands(values: Floats, within: tuple[float, float] = ANYTHING) -> tuple[Floats, Floats, Floats]:
    """Estimate the mean at every point of a curve with Student's 95 % interval over seeds.

    Args:
        values: [seeds, points]; NaN where a seed has no value.
        within: The smallest and largest possible mean.

    Returns:
        Mean, lower end and upper end at every point, over the seeds with a value there. The mean is NaN without a
        value; the ends are NaN with fewer than three.
    """
    count = np.isfinite(values).sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(values, axis=0) / count
        scatter = np.sqrt(np.nansum((values - mean) ** 2, axis=0) / (count - 1))
        reach = np.where(count < _FEWEST, np.nan, stats.t.isf(LEVEL / 2, count - 1) * scatter / np.sqrt(count))
    return mean, np.maximum(mean - reach, within[0]), np.minimum(mean + reach, within[1])


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Difference:
    """Compare two methods on their shared seeds, or by Welch's test on all seeds if they share fewer than two.

    Args:
        first: A value for each seed, at least one.
        second: A value for each seed, at least one.

    Example:
        >>> found = difference({0: 3.0, 1: 5.0, 2: 7.0, 9: 100.0}, {0: 2.0, 1: 3.0, 2: 4.0})
        >>> found.mean, round(found.p, 4)
        (2.0, 0.0742)
    """
    shared = sorted(first.keys() & second.keys())
    if len(shared) >= 2:
        pairs = np.array([(first[seed], second[seed]) for seed in shared])
        gaps, rounding = pairs[:, 0] - pairs[:, 1], _ROUNDING * np.abs(pairs).max()
        mean, error = float(gaps.mean()), float(stats.sem(gaps))
        if np.ptp(gaps) <= rounding:
            mean, error = mean if abs(mean) > rounding else 0.0, 0.0
        return Difference(mean, error, len(shared) - 1, len(shared), True)
    x, y = (np.array(list(values.values())) for values in (first, second))
    mean, count = float(x.mean() - y.mean()), min(len(x), len(y))
    if count < 2 or max(np.ptp(x), np.ptp(y)) <= _ROUNDING * np.abs([*x, *y]).max():
        return Difference(mean, math.nan, math.nan, count, False)
    variances = stats.sem(x) ** 2, stats.sem(y) ** 2
    freedom = sum(variances) ** 2 / sum(v**2 / (len(z) - 1) for v, z in zip(variances, (x, y), strict=True))
    return Difference(mean, math.sqrt(sum(variances)), float(freedom), count, False)


def adjust(p_values: Sequence[float]) -> list[float]:
    """Correct the p-values of one family by Holm's procedure; NaN stays NaN and does not count.

    The smallest of n is multiplied by n, the next by n − 1, and so on. No corrected value is below a smaller one's.

    Example:
        >>> adjust([0.01, 0.04, float("nan")])
        [0.02, 0.04, nan]
    """
    order = sorted((place for place, p in enumerate(p_values) if not math.isnan(p)), key=p_values.__getitem__)
    corrected, largest = list(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def matching_level(p: float, corrected: float, family: int) -> float:
    """Return the level at which a test with p-value `p` decides as the corrected one does at 5 %.

    It lies between 5 % divided by the size of the family and 5 %.

    Example:
        >>> matching_level(0.01, 0.02, 2), matching_level(0.7, 1.0, 2)
        (0.025, 0.025)
    """
    return LEVEL * p / corrected if p > 0 and corrected < 1 else LEVEL / max(1, family)


def seeds_needed(gap: Difference, comparisons: int) -> int | None:
    """Return the number of seeds that would show the observed difference with a power of 80 %.

    Equal differences are tested by a sign test, which needs a fixed number of seeds.

    Args:
        gap: The observed difference.
        comparisons: The number of tests in the family; the strictest of Holm's levels is used.

    Returns:
        The total number of seeds; None if it is unknown or above `MANY_SEEDS`.
    """
    if not gap.paired or math.isnan(gap.error) or gap.mean == 0:
        return None
    level = LEVEL / max(1, comparisons)
    if gap.error == 0:
        return next(seeds for seeds in range(2, MANY_SEEDS + 1) if 2 * 0.5**seeds < level)
    effect = abs(gap.mean) / (gap.error * math.sqrt(gap.count))
    return next((seeds for seeds in range(2, MANY_SEEDS + 1) if _power(effect, seeds, level) >= POWER), None)


def _power(effect: float, seeds: int, level: float) -> float:
    """Return the power of the paired t-test, from the noncentral F; scipy's noncentral t fails for large effects."""
    return float(stats.ncf.sf(stats.t.isf(level / 2, seeds - 1) ** 2, 1, seeds - 1, seeds * effect**2))


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Spearman's ρ over the finite pairs; NaN with fewer than three pairs or without variation.

    Example:
        >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 100.0, 1000.0])
        1.0
    """
    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    good = np.isfinite(a) & np.isfinite(b)
    a, b = a[good], b[good]
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    return float(stats.spearmanr(a, b).statistic)
