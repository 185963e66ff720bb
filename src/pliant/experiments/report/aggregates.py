"""Aggregates of agents' scores over seeds and environments.

Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice". Scores are tables of seeds
× environments. Intervals are percentile bootstrap intervals that draw seeds separately in each environment.
"""

from collections.abc import Callable, Iterator, Sequence

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


def sample_efficiency(scores: Floats) -> Floats:
    """Return the interquartile mean over seeds at each point of a training.

    Args:
        scores: Seeds × points.

    Example:
        >>> sample_efficiency(np.array([[0.0, 4.0], [1.0, 4.0], [3.0, 5.0], [100.0, 9.0]])).tolist()
        [2.0, 4.5]
    """
    return np.asarray(stats.trim_mean(scores, 0.25, axis=0), dtype=np.float64)


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
    values = [statistic(*drawn) for drawn in _draw(tables, draws, seed)]
    low, high = np.quantile(values, [LEVEL / 2, 1 - LEVEL / 2])
    return Interval(statistic(*tables), float(low), float(high), min(map(len, tables)))


def bootstrap_band(
    statistic: Callable[[Floats], Floats], table: Floats, draws: int = _DRAWS, seed: int = 0
) -> tuple[Floats, Floats]:
    """Return the ends of the 95 % stratified bootstrap interval at each point of a curve.

    Args:
        statistic: A curve as a function of the table.
        table: Scores, seeds × environments.
        draws: Number of draws.
        seed: Seed of the draws.
    """
    values = [statistic(drawn) for (drawn,) in _draw([table], draws, seed)]
    low, high = np.quantile(values, [LEVEL / 2, 1 - LEVEL / 2], axis=0)
    return low, high


def _draw(tables: Sequence[Floats], draws: int, seed: int) -> Iterator[list[Floats]]:
    """Draw the seeds of each table with replacement, separately in each environment."""
    random = np.random.default_rng(seed)
    for _ in range(draws):
        places = [random.integers(len(table), size=table.shape) for table in tables]
        yield [np.take_along_axis(table, place, axis=0) for table, place in zip(tables, places, strict=True)]


def spread_thresholds(tables: Sequence[Floats], points: int = 100) -> Floats:
    """Return evenly spaced thresholds from below the lowest to the highest score."""
    low, high = min(map(np.min, tables)), max(map(np.max, tables))
    return np.linspace(low - 0.02 * (high - low), high, points)
