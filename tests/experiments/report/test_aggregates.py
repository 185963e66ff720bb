"""Aggregates of agents' scores, against slow versions written from their definitions (Agarwal et al. 2021)."""

import itertools

import numpy as np
import pytest

from pliant.experiments.report.aggregates import (
    bootstrap,
    interquartile_mean,
    performance_profile,
    probability_of_improvement,
)


@pytest.fixture
def scores() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(10, 3)).round(1)


def test_interquartile_mean_drops_a_quarter_of_all_scores_at_each_end(scores: np.ndarray) -> None:
    ordered = sorted(scores.flatten().tolist())
    cut = len(ordered) // 4
    assert interquartile_mean(scores) == pytest.approx(sum(ordered[cut:-cut]) / len(ordered[cut:-cut]))


def test_probability_of_improvement_counts_pairs_of_seeds_within_an_environment(scores: np.ndarray) -> None:
    other = np.random.default_rng(1).normal(size=(7, 3)).round(1)
    by_environment = []
    for place in range(3):
        pairs = list(itertools.product(scores[:, place], other[:, place]))
        by_environment.append(sum(1.0 if x > y else 0.5 if x == y else 0.0 for x, y in pairs) / len(pairs))
    assert probability_of_improvement(scores, other) == pytest.approx(sum(by_environment) / 3)


def test_performance_profile_averages_the_tail_over_environments(scores: np.ndarray) -> None:
    thresholds = np.array([-1.0, 0.0, 0.3, 5.0])
    slow = [np.mean([[score > threshold for score in column] for column in scores.T]) for threshold in thresholds]
    np.testing.assert_allclose(performance_profile(scores, thresholds), slow)


def test_the_bootstrap_draws_seeds_within_each_environment() -> None:
    """Two environments on very different scales: a draw that mixed them would change the mean."""
    scores = np.array([[0.0, 100.0], [0.0, 100.0], [0.0, 100.0]])
    estimate = bootstrap(lambda table: float(table.mean()), scores)
    assert (estimate.mean, estimate.low, estimate.high) == (50.0, 50.0, 50.0)


def test_the_bootstrap_agrees_with_the_normal_interval_of_a_mean() -> None:
    scores = np.random.default_rng(2).normal(size=(200, 1))
    estimate = bootstrap(lambda table: float(table.mean()), scores)
    error = 1.96 * scores.std() / np.sqrt(200)
    assert estimate.low == pytest.approx(scores.mean() - error, abs=0.15 * error)
    assert estimate.high == pytest.approx(scores.mean() + error, abs=0.15 * error)
