"""Statistics over seeds: intervals, tests, corrections, and the number of seeds that would be enough.

scipy and statsmodels do the computations. The choices made here:

- Intervals are expanded percentile bootstrap intervals over seeds (Hesterberg 2015, "What teachers should know about
  the bootstrap"). Plain percentiles are too narrow by √((n−1)/n) and use the normal quantile instead of Student's.
  With two or three seeds the interval is their range, which covers the mean of a symmetric distribution in 1 − 2^(1−n)
  of all cases.
- Two methods are compared by Student's paired t-test on the seeds that both have, because runs of one seed share data
  order, initial weights and tasks. Rank and sign tests cannot reach 5 % with fewer than six seeds.
- Families of tests are corrected by Holm's procedure.
"""

import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from statsmodels.stats.multitest import multipletests

Floats = NDArray[np.float64]

LEVEL = 0.05
"""A difference is significant if its corrected p-value is below this level."""
POWER = 0.8
"""The power for which `seeds_needed` plans."""
MANY_SEEDS = 1000
"""The most seeds that `seeds_needed` suggests."""

_RESAMPLES = 9999
_BAND_RESAMPLES = 999
_BATCH = 20_000_000
"""The most numbers to resample at a time; bounds memory."""
_ROUNDING = 1e-9
"""Differences below this fraction of the values are rounding errors."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % interval.

    Args:
        mean: The mean.
        low: The lower end; NaN for a single value.
        high: The upper end; NaN for a single value.
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
        interval: The difference; its ends are NaN with too few seeds.
        p: The uncorrected p-value; NaN if a test is impossible.
        paired: Whether the difference is paired by seed.
        scatter: Standard deviation of the paired differences; 0 if they are equal up to rounding, NaN if unpaired.
    """

    interval: Interval
    p: float
    paired: bool
    scatter: float

    @property
    def reversed(self) -> "Difference":
        """The second minus the first."""
        gap = self.interval
        mean, low, high = (
            0.0 - value for value in (gap.mean, gap.high, gap.low)
        )  # 0.0 − x, because −x turns 0 into −0.
        return Difference(Interval(mean, low, high, gap.count), self.p, self.paired, self.scatter)


def interval(values: Sequence[float]) -> Interval:
    """Estimate a mean with its 95 % bootstrap interval over seeds.

    Args:
        values: A finite number for each seed, at least one.

    Example:
        >>> interval([3.0, 3.0, 3.0])
        Interval(mean=3.0, low=3.0, high=3.0, count=3)
    """
    if len(values) == 0:
        raise ValueError("values is empty; a mean needs at least one")
    sample = np.asarray(values, dtype=float)
    low, high = _bootstrap(sample[:, None], _RESAMPLES)
    return Interval(float(sample.mean()), float(low[0]), float(high[0]), len(sample))


def bands(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Estimate the mean at every point of a curve with its 95 % bootstrap interval over seeds.

    Args:
        values: [seeds, points]; NaN where a seed has no value.

    Returns:
        Mean, lower end and upper end at every point, over the seeds with a value there. They are NaN without a value;
        the ends are also NaN with only one.
    """
    points = values.shape[1]
    mean, low, high = (np.full(points, np.nan) for _ in range(3))
    present = np.isfinite(values)
    # Points with values from the same seeds are resampled together.
    patterns, group_of = np.unique(present, axis=1, return_inverse=True)
    for group in range(patterns.shape[1]):
        seeds, columns = patterns[:, group], np.flatnonzero(group_of.reshape(-1) == group)
        if seeds.any():
            sample = values[np.ix_(seeds, columns)]
            mean[columns] = sample.mean(axis=0)
            low[columns], high[columns] = _bootstrap(sample, _BAND_RESAMPLES)
    return mean, low, high


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Difference:
    """Compare two methods on their shared seeds, or on all seeds if they share fewer than two.

    Args:
        first: A value for each seed, at least one.
        second: A value for each seed, at least one.

    Example:
        >>> round(difference({0: 3.0, 1: 5.0, 2: 7.0}, {0: 2.0, 1: 3.0, 2: 4.0}).p, 4)
        0.0742
    """
    p = compare(first, second)
    shared = sorted(first.keys() & second.keys())
    if len(shared) >= 2:
        gaps, rounding = _gaps(first, second, shared)
        scatter = float(np.std(gaps, ddof=1)) if np.ptp(gaps) > rounding else 0.0
        return Difference(interval(gaps.tolist()), p, True, scatter)
    x, y = (np.array(list(values.values())) for values in (first, second))
    mean, count = mean_difference(first, second), min(len(x), len(y))
    if count < 2:
        return Difference(Interval(mean, math.nan, math.nan, count), p, False, math.nan)
    ends = stats.bootstrap(
        (x, y),
        lambda a, b, axis: a.mean(axis=axis) - b.mean(axis=axis),
        confidence_level=_expanded_level(count),
        n_resamples=_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Difference(Interval(mean, float(ends.low), float(ends.high), count), p, False, math.nan)


def mean_difference(first: Mapping[int, float], second: Mapping[int, float]) -> float:
    """Return the mean of the first minus that of the second, over the seeds that `compare` tests.

    Example:
        >>> mean_difference({0: 3.0, 1: 5.0, 2: 100.0}, {0: 2.0, 1: 3.0})
        1.5
    """
    shared = sorted(first.keys() & second.keys())
    if len(shared) >= 2:
        return float(np.mean([first[seed] - second[seed] for seed in shared]))
    return float(np.mean(list(first.values())) - np.mean(list(second.values())))


def compare(first: Mapping[int, float], second: Mapping[int, float]) -> float:
    """Test whether two methods differ: Student's paired t-test, or Welch's if they share fewer than two seeds.

    Differences that are all equal have no variance for a t-test. They are tested by a sign test instead.

    Args:
        first: A value for each seed.
        second: A value for each seed.

    Returns:
        The p-value; NaN if there are too few seeds.

    Example:
        >>> compare({0: 0.9, 1: 0.8, 2: 0.7}, {0: 0.8, 1: 0.7, 2: 0.6})
        0.25
    """
    shared = sorted(first.keys() & second.keys())
    if len(shared) >= 2:
        gaps, rounding = _gaps(first, second, shared)
        if np.ptp(gaps) > rounding:
            return float(stats.ttest_1samp(gaps, 0.0).pvalue)
        return 1.0 if abs(gaps[0]) <= rounding else float(stats.binomtest(len(gaps), len(gaps)).pvalue)
    x, y = (np.array(list(values.values())) for values in (first, second))
    if min(len(x), len(y)) < 2 or max(np.ptp(x), np.ptp(y)) <= _ROUNDING * np.abs([*x, *y]).max():
        return math.nan
    return float(stats.ttest_ind(x, y, equal_var=False).pvalue)


def _gaps(first: Mapping[int, float], second: Mapping[int, float], seeds: Sequence[int]) -> tuple[Floats, float]:
    """Return the differences of these seeds, and the threshold below which a difference is a rounding error."""
    pairs = np.array([(first[seed], second[seed]) for seed in seeds])
    return pairs[:, 0] - pairs[:, 1], float(_ROUNDING * np.abs(pairs).max())


def adjust(p_values: Sequence[float]) -> list[float]:
    """Correct the p-values of one family by Holm's procedure; NaN stays NaN and does not count.

    Example:
        >>> adjust([0.01, 0.04, float("nan")])
        [0.02, 0.04, nan]
    """
    known = [p for p in p_values if not math.isnan(p)]
    if not known:
        return list(p_values)
    # statsmodels calls gc.collect(), which takes half a second with torch's objects unless they are frozen.
    gc.freeze()
    try:
        corrected = iter(multipletests(known, method="holm")[1].tolist())
    finally:
        gc.unfreeze()
    return [p if math.isnan(p) else next(corrected) for p in p_values]


def seeds_needed(gap: Difference, comparisons: int) -> int | None:
    """Return the number of seeds that would show the observed difference with a power of 80 %.

    Equal differences are tested by a sign test, which needs a fixed number of seeds.

    Args:
        gap: The observed difference.
        comparisons: The number of tests in the family; the strictest of Holm's levels is used.

    Returns:
        The total number of seeds; None if it is unknown or above `MANY_SEEDS`.
    """
    if math.isnan(gap.scatter) or gap.interval.mean == 0:
        return None
    level = LEVEL / max(1, comparisons)
    if gap.scatter == 0:
        return next(seeds for seeds in range(2, MANY_SEEDS + 1) if 2 * 0.5**seeds < level)
    effect = abs(gap.interval.mean) / gap.scatter
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


def _expanded_level(count: int) -> float:
    """Return the level at which a percentile interval is as wide as Student's interval (Hesterberg 2015)."""
    quantile = stats.t.ppf(LEVEL / 2, count - 1) * math.sqrt(count / (count - 1))
    return float(1 - 2 * stats.norm.cdf(quantile))


def _bootstrap(sample: Floats, resamples: int) -> tuple[Floats, Floats]:
    """Bootstrap the mean over the first axis, for every column at once."""
    count, columns = sample.shape
    if count == 1:
        return np.full(columns, np.nan), np.full(columns, np.nan)
    found = stats.bootstrap(
        (sample,),
        np.mean,
        axis=0,
        vectorized=True,
        confidence_level=_expanded_level(count),
        n_resamples=resamples,
        batch=max(1, _BATCH // sample.size),
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return np.asarray(found.low), np.asarray(found.high)
