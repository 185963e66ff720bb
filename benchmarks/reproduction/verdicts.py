"""The statistics behind a verdict: Student's t tests, a correction for many statements, and the seeds that are needed.

A statement has samples, one a seed, and a claimed range of their mean, whose ends do not belong to it.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from scipy import stats

LEVEL = 0.05
"""The corrected p-value up to which a statement is decided."""
POWER = 0.8
MOST_SEEDS = 100
"""The largest number of seeds that is worth naming."""
Range = tuple[float, float]


def tail(samples: Sequence[float], bound: float) -> float:
    """Return the one-sided p-value of the null hypothesis that the mean is at most `bound`.

    Example:
        >>> round(tail([1.0, 2.0, 3.0], 0.0), 4), tail([1.0, 1.0, 1.0], 0.0), tail([1.0, 1.0, 1.0], 1.0)
        (0.0371, 0.0, 1.0)
    """
    mean, error = fmean(samples), stdev(samples) / math.sqrt(len(samples))
    if not error or math.isinf(bound):
        return 0.0 if mean > bound else 1.0
    return float(stats.t.sf((mean - bound) / error, len(samples) - 1))


def support(samples: Sequence[float], claimed: Range) -> float:
    """Return the p-value of the null hypothesis that the mean is outside the claimed range."""
    low, high = claimed
    return max(tail(samples, low), tail([-value for value in samples], -high))


def contradiction(samples: Sequence[float], claimed: Range) -> float:
    """Return the p-value of the null hypothesis that the mean is inside the claimed range or at its end."""
    low, high = claimed
    sides = [tail([-value for value in samples], -low)] if math.isfinite(low) else []
    sides += [tail(samples, high)] if math.isfinite(high) else []
    return min(1.0, len(sides) * min(sides))


def decide(samples: Sequence[float], claimed: Range) -> tuple[float, str]:
    """Return the p-value of a statement, two-sided, and what it decides if it is small.

    Example:
        >>> decide([-1.0, -1.1, -0.9], (0.0, math.inf))[1]
        'contradicted'
    """
    for_it, against = support(samples, claimed), contradiction(samples, claimed)
    return min(1.0, 2 * min(for_it, against)), "supported" if for_it <= against else "contradicted"


def equivalence(samples: Sequence[float], margin: float) -> float:
    """Return the p-value of two one-sided tests that the mean is within ±margin of zero."""
    return support(samples, (-margin, margin))


def correct(values: Sequence[float]) -> list[float]:
    """Correct p-values by Benjamini and Hochberg: reject those up to q, and a share of q at most is wrong on average.

    Example:
        >>> correct([0.01, 0.04, 0.03])
        [0.03, 0.04, 0.04]
    """
    return [float(value) for value in stats.false_discovery_control(list(values))] if values else []


def seeds_needed(samples: Sequence[float], claimed: Range) -> int | None:
    """Return the seeds that decide with a power of 80 % if the true mean and deviation are those seen; None above 100.

    Example:
        >>> seeds_needed([0.0, 1.0, 2.0], (0.0, math.inf))
        10
    """
    mean, deviation = fmean(samples), stdev(samples)
    distance = min(abs(mean - end) for end in claimed if math.isfinite(end))
    if not distance or not deviation:
        return None
    for count in range(len(samples) + 1, MOST_SEEDS + 1):
        critical = stats.t.ppf(1 - LEVEL / 2, count - 1)
        if stats.nct.sf(critical, count - 1, math.sqrt(count) * distance / deviation) >= POWER:
            return count
    return None
