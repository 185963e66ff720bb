"""Aggregates of agents' scores, against slow versions from their definitions (Agarwal et al. 2021) and its authors'."""

import itertools
from typing import Any

import numpy as np
import pytest
from arch.bootstrap import IIDBootstrap, IndependentSamplesBootstrap
from rliable import library, metrics

from pliant.experiments.report.aggregates import (
    bootstrap,
    bootstrap_band,
    interquartile_mean,
    performance_profile,
    probability_of_improvement,
    sample_efficiency,
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


def test_estimates_are_those_of_rliable(scores: np.ndarray) -> None:
    other = np.random.default_rng(1).normal(size=(7, 3)).round(1)
    assert interquartile_mean(scores) == pytest.approx(metrics.aggregate_iqm(scores), rel=1e-12)
    theirs = metrics.probability_of_improvement(scores, other)
    assert probability_of_improvement(scores, other) == pytest.approx(theirs, rel=1e-12)
    thresholds = np.linspace(-2.0, 2.0, 41)
    profile = [library.run_score_deviation(scores, threshold) for threshold in thresholds]
    np.testing.assert_allclose(performance_profile(scores, thresholds), profile, rtol=1e-12)
    points = np.random.default_rng(2).normal(size=(9, 6))
    slow = [metrics.aggregate_iqm(points[:, [point]]) for point in range(6)]
    np.testing.assert_allclose(sample_efficiency(points), slow, rtol=1e-12)


@pytest.fixture
def rliable_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give rliable 1.2 the name `random_state` of what arch 7 calls `seed`; it draws from NumPy's global generator."""
    for cls in (IIDBootstrap, IndependentSamplesBootstrap):

        def start(self: Any, *tables: Any, random_state: Any = None, made: Any = cls.__init__, **options: Any) -> None:
            made(self, *tables, **{"seed": random_state, **options})

        monkeypatch.setattr(cls, "__init__", start)
    np.random.seed(0)


@pytest.mark.usefixtures("rliable_draws")
def test_intervals_are_those_of_rliable(scores: np.ndarray) -> None:
    """Both draw at random: the ends scatter by 1 % of the width with 4 000 draws, by 2 % with 1 000."""
    other = np.random.default_rng(1).normal(size=(7, 3)) + 0.5
    cases = [
        (interquartile_mean, metrics.aggregate_iqm, (scores,), 4000),
        (probability_of_improvement, metrics.probability_of_improvement, (scores, other), 1000),
    ]
    for ours, theirs, tables, reps in cases:
        mine = bootstrap(ours, *tables, draws=4000)
        given = tables[0] if len(tables) == 1 else tables
        _, intervals = library.get_interval_estimates(
            {"x": given}, lambda *drawn, theirs=theirs: np.array([theirs(*drawn)]), reps=reps
        )
        (low,), (high,) = intervals["x"]
        assert (mine.low, mine.high) == pytest.approx((low, high), abs=0.06 * (high - low))


@pytest.mark.usefixtures("rliable_draws")
def test_bands_are_those_of_rliable(scores: np.ndarray) -> None:
    thresholds = np.linspace(-1.5, 1.5, 7)
    low, high = bootstrap_band(lambda table: performance_profile(table, thresholds), scores, 4000)
    _, bands = library.create_performance_profile({"x": scores}, thresholds, reps=4000)
    theirs = bands["x"]
    np.testing.assert_allclose(np.stack([low, high]), theirs, atol=1 / 30 + 1e-12)  # One of 30 scores: they are steps.
    assert np.mean(np.abs(np.stack([low, high]) - theirs)) < 0.01
