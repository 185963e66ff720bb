"""Aggregates of agents' scores over seeds and environments.

Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice". Scores are tables of seeds
× environments. Intervals are percentile bootstrap intervals that draw seeds separately in each environment.
"""

from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from pliant.experiments.report.statistics import LEVEL, Floats, Interval

_DRAWS = 2000


def interquartile_mean(scores: Floats) -> float:
    """Return the mean over the middle half of all scores.

    Example:
        >>> interquartile_mean(np.array([[0.0], [1.0], [3.0], [100.0]]))
        2.0
    """
    return float(stats.trim_mean(scores, 0.25, axis=None))


def performance_profile(scores: Floats, thresholds: Floats) -> Floats:
    """Return the fraction of scores above each threshold, averaged over environments.

    Example:
        >>> performance_profile(np.array([[1.0], [2.0]]), np.array([0.0, 1.0, 2.0])).tolist()
        [1.0, 0.5, 0.0]
    """
    return np.asarray((scores[..., None] > thresholds).mean(axis=(0, 1)), dtype=np.float64)


def probability_of_improvement(first: Floats, second: Floats) -> float:
    """Return the probability that a seed of the first scores higher than a seed of the second; ties count half.

    Example:
        >>> probability_of_improvement(np.array([[1.0], [2.0]]), np.array([[0.0], [1.0]]))
        0.875
    """
    pairs = np.sign(first[:, None] - second[None])  # [seeds, seeds, environments]
    return float((0.5 + 0.5 * pairs).mean())


def bootstrap(statistic: Callable[..., float], *tables: Floats, draws: int = _DRAWS, seed: int = 0) -> Interval:
    """Estimate a statistic with its 95 % stratified bootstrap interval.

    Args:
        statistic: A function of the tables.
        tables: Scores, each seeds × environments.
        draws: Number of draws.
        seed: Seed of the draws.
    """
    random = np.random.default_rng(seed)

    def draw(table: Floats) -> Floats:
        return np.take_along_axis(table, random.integers(len(table), size=table.shape), axis=0)

    values = [statistic(*map(draw, tables)) for _ in range(draws)]
    low, high = np.quantile(values, [LEVEL / 2, 1 - LEVEL / 2])
    return Interval(statistic(*tables), float(low), float(high), min(map(len, tables)))


def spread_thresholds(tables: Sequence[Floats], points: int = 100) -> Floats:
    """Return evenly spaced thresholds from below the lowest to the highest score."""
    low, high = min(map(np.min, tables)), max(map(np.max, tables))
    return np.linspace(low - 0.02 * (high - low), high, points)
