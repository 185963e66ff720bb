"""Coverage of intervals, agreement of tests with scipy, and the number of seeds needed."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from pliant.experiments.report.statistics import (
    LEVEL,
    Difference,
    Interval,
    adjust,
    bands,
    difference,
    interval,
    matching_level,
    rank_correlation,
    seeds_needed,
)

numbers = st.floats(-1e3, 1e3, allow_nan=False)


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_intervals_cover_the_mean_in_95_of_100_cases(seeds: int) -> None:
    draws = np.random.default_rng(seeds).standard_normal((seeds, 10_000))
    _, low, high = bands(draws)
    assert np.mean((low <= 0) & (high >= 0)) == pytest.approx(0.95, abs=0.01)


@given(st.lists(numbers, min_size=3, max_size=8))
def test_an_interval_is_students(values: list[float]) -> None:
    found = interval(values)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-9)
    assert found.count == len(values)
    assume(np.ptp(values) > 1e-6 * max(map(abs, values)))  # scipy warns of a loss of precision
    ends = stats.ttest_1samp(values, 0.0).confidence_interval()
    assert (found.low, found.high) == (pytest.approx(ends.low), pytest.approx(ends.high))


def test_an_interval_stays_within_the_limits_of_a_mean() -> None:
    found = interval([0.99, 1.0, 0.98], within=(0.0, 1.0))
    assert found.low == pytest.approx(0.99 - 4.3026527 * 0.01 / math.sqrt(3))
    assert found.high == 1.0


@pytest.mark.parametrize("values", [[2.0], [1.0, 3.0]])
def test_one_or_two_seeds_have_no_interval(values: list[float]) -> None:
    found = interval(values)
    assert (found.mean, found.count) == (2.0, len(values))
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_an_empty_sample_is_rejected() -> None:
    with pytest.raises(ValueError, match="values is empty"):
        interval([])


def test_bands_use_the_seeds_with_values() -> None:
    values = np.array([[1.0, 2.0, np.nan, np.nan], [3.0, 4.0, 5.0, np.nan], [8.0, np.nan, np.nan, np.nan]])
    mean, low, high = bands(values)
    np.testing.assert_allclose(mean, [4.0, 3.0, 5.0, np.nan])
    ends = stats.ttest_1samp([1.0, 3.0, 8.0], 0.0).confidence_interval()
    np.testing.assert_allclose(low, [ends.low, np.nan, np.nan, np.nan])
    np.testing.assert_allclose(high, [ends.high, np.nan, np.nan, np.nan])


def test_paired_differences_agree_with_scipy() -> None:
    draw = np.random.default_rng(1)
    x = draw.standard_normal(7)
    y = x + draw.normal(0.4, 0.3, 7)
    first, second = dict(enumerate(x)), dict(reversed(list(enumerate(y))))
    found = difference(first, second)
    assert found.paired
    assert found.p == pytest.approx(stats.ttest_rel(x, y).pvalue, rel=1e-9)
    assert found.mean == pytest.approx(np.mean(x - y))
    for level in (0.05, 0.01):
        ends = stats.ttest_rel(x, y).confidence_interval(1 - level)
        assert found.interval(level).low == pytest.approx(ends.low)
        assert found.interval(level).high == pytest.approx(ends.high)


def test_only_shared_seeds_are_paired() -> None:
    first = {0: 1.0, 1: 2.0, 2: 3.5, 9: 100.0}
    second = {0: 0.5, 1: 1.8, 2: 2.5, 8: -100.0}
    found = difference(first, second)
    assert found.p == pytest.approx(stats.ttest_rel([1.0, 2.0, 3.5], [0.5, 1.8, 2.5]).pvalue)


def test_without_shared_seeds_welchs_test_is_used() -> None:
    found = difference({0: 1.0, 1: 2.0, 2: 3.0}, {5: 4.0, 6: 6.0, 7: 9.0, 8: 5.0})
    expected = stats.ttest_ind([1, 2, 3], [4, 6, 9, 5], equal_var=False)
    assert not found.paired
    assert found.p == pytest.approx(expected.pvalue)
    assert found.mean == -4.0
    ends = expected.confidence_interval()
    assert (found.interval().low, found.interval().high) == (pytest.approx(ends.low), pytest.approx(ends.high))


@pytest.mark.parametrize(
    ("first", "second"), [({0: 1.0}, {0: 2.0}), ({0: 1.0}, {1: 2.0}), ({0: 1.0, 1: 2.0}, {5: 3.0})]
)
def test_too_few_seeds_are_not_tested(first: dict[int, float], second: dict[int, float]) -> None:
    found = difference(first, second)
    assert math.isnan(found.p)
    assert math.isnan(found.interval().low)


@given(st.integers(2, 8), st.sampled_from([0.01, 0.1, -0.3]))
def test_equal_differences_use_a_sign_test(seeds: int, gap: float) -> None:
    # 0.1 + 0.2 style rounding leaves a scatter of 1e-17, from which a t-test would conclude anything.
    second = {seed: 0.1 * (seed + 1) for seed in range(seeds)}
    first = {seed: value + gap for seed, value in second.items()}
    found = difference(first, second)
    assert found.p == pytest.approx(2.0 ** (1 - seeds))
    assert math.isnan(found.interval().low)  # The t interval would be a point that excludes zero.


def test_ties_have_p_value_one() -> None:
    same = {0: 0.5, 1: 0.5, 2: 0.5}
    assert difference(same, dict(same)).p == 1.0
    assert difference(same, dict(same)).interval() == Interval(0.0, 0.0, 0.0, 3)
    assert math.isnan(difference(same, {7: 0.5, 8: 0.5}).p)


def test_holm_correction_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.04 are multiplied by 3, 2, 1, never falling.
    assert adjust([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert adjust([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_correction_never_lowers_p_values_and_keeps_their_order(p_values: list[float]) -> None:
    corrected = adjust(p_values)
    assert all(new >= old for new, old in zip(corrected, p_values, strict=True))
    assert max(corrected) <= 1
    for (p, a), (q, b) in itertools.combinations(zip(p_values, corrected, strict=True), 2):
        assert (p < q) <= (a <= b)


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(0.01, 3)), min_size=1, max_size=8), st.integers(3, 9))
def test_intervals_decide_as_the_corrected_tests(family: list[tuple[float, float]], seeds: int) -> None:
    gaps = [Difference(mean, error, seeds - 1, seeds, True) for mean, error in family]
    for gap, p in zip(gaps, adjust([gap.p for gap in gaps]), strict=True):
        assume(abs(p - LEVEL) > 1e-9)
        level = matching_level(gap.p, p, len(gaps))
        assert LEVEL / len(gaps) * (1 - 1e-9) <= level <= LEVEL * (1 + 1e-9)
        ends = gap.interval(level)
        assert (ends.low > 0 or ends.high < 0) == (p < LEVEL)


def planted(effect: float, seeds: int = 3) -> Difference:
    return Difference(effect, 1 / math.sqrt(seeds), seeds - 1, seeds, True)


@pytest.mark.parametrize(("effect", "comparisons"), [(1.5, 1), (0.8, 1), (0.8, 6), (5.0, 3), (20.0, 3)])
def test_seeds_needed_reach_the_planned_power(effect: float, comparisons: int) -> None:
    seeds = seeds_needed(planted(effect), comparisons)
    assert seeds is not None

    def power(count: int) -> float:
        draws = np.random.default_rng(count).normal(effect, 1.0, (20_000, count))
        return float(np.mean(stats.ttest_1samp(draws, 0, axis=1).pvalue < LEVEL / comparisons))

    assert power(seeds) > 0.79
    assert power(seeds - 1) < 0.81


def test_tiny_differences_need_too_many_seeds() -> None:
    assert seeds_needed(planted(0.01), 1) is None
    assert seeds_needed(planted(0.0), 1) is None


@pytest.mark.parametrize(("comparisons", "seeds"), [(1, 6), (2, 7), (10, 9)])
def test_equal_differences_need_the_seeds_of_a_sign_test(comparisons: int, seeds: int) -> None:
    def alike(count: int) -> Difference:
        return difference(dict.fromkeys(range(count), 0.92), dict.fromkeys(range(count), 0.9))

    assert seeds_needed(alike(5), comparisons) == seeds
    assert alike(seeds).p < LEVEL / comparisons <= alike(seeds - 1).p


def test_rank_correlation_needs_variation() -> None:
    assert rank_correlation([1.0, 2.0, 3.0, math.nan], [3.0, 2.0, 1.0, 9.0]) == -1.0
    assert math.isnan(rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]))
    assert math.isnan(rank_correlation([1.0, 2.0], [1.0, 2.0]))
