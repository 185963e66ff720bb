"""The tests behind a verdict agree with scipy's and with the definitions."""

import math

import pytest
from benchmarks.reproduction import verdicts
from scipy import integrate, stats

INF = math.inf
SAMPLES = [(0.2, 0.21, 0.19), (-0.1, 0.1, 0.2, 0.4), (1.0, -3.0, 2.5, 0.5, 0.7)]


@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("bound", [-0.5, 0.0, 0.3])
def test_one_sided_p_value_is_that_of_scipy(samples: tuple[float, ...], bound: float) -> None:
    expected = stats.ttest_1samp(samples, bound, alternative="greater").pvalue
    assert verdicts.tail(samples, bound) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("samples", SAMPLES)
def test_p_value_of_a_claimed_side_is_the_two_sided_one(samples: tuple[float, ...]) -> None:
    for claimed in ((0.0, INF), (-INF, 0.0)):
        p, verdict = verdicts.decide(samples, claimed)
        assert p == pytest.approx(stats.ttest_1samp(samples, 0.0).pvalue, rel=1e-9)
        assert verdict == ("supported" if (sum(samples) > 0) == (claimed[1] == INF) else "contradicted")


@pytest.mark.parametrize("samples", SAMPLES)
def test_a_range_with_two_ends_needs_both_tests(samples: tuple[float, ...]) -> None:
    above = stats.ttest_1samp(samples, -0.25, alternative="greater").pvalue
    below = stats.ttest_1samp(samples, 0.25, alternative="less").pvalue
    assert verdicts.support(samples, (-0.25, 0.25)) == pytest.approx(max(above, below), rel=1e-9)
    assert verdicts.equivalence(samples, 0.25) == pytest.approx(max(above, below), rel=1e-9)
    out = 2 * min(1 - above, 1 - below)
    assert verdicts.contradiction(samples, (-0.25, 0.25)) == pytest.approx(min(1.0, out), rel=1e-9)


def test_equal_samples_decide_unless_they_lie_on_the_bound() -> None:
    assert verdicts.decide((0.1, 0.1, 0.1), (0.0, INF)) == (0.0, "supported")
    assert verdicts.decide((-0.1, -0.1, -0.1), (0.0, INF)) == (0.0, "contradicted")
    assert verdicts.decide((0.0, 0.0, 0.0), (0.0, INF))[0] == 1.0
    assert verdicts.equivalence((0.0, 0.0, 0.0), 0.005) == 0.0
    assert verdicts.seeds_needed((0.0, 0.0, 0.0), (0.0, INF)) is None


def test_correction_is_that_of_benjamini_and_hochberg() -> None:
    values = [0.001, 0.3, 0.012, 0.04, 0.9, 0.012]
    for level in (0.005, 0.02, 0.03, 0.05, 0.07, 0.5):
        ordered = sorted(values)
        passed = [p for rank, p in enumerate(ordered, start=1) if p <= level * rank / len(values)]
        rejected = [p <= max(passed, default=-1.0) for p in values]
        assert [q <= level for q in verdicts.correct(values)] == rejected
    assert verdicts.correct([]) == []


@pytest.mark.parametrize("samples", [(0.0, 1.0, 2.0), (0.3, 0.5, 0.1, 0.6), (1.0, -0.5, 0.9, 0.4)])
def test_seeds_needed_have_the_power(samples: tuple[float, ...]) -> None:
    """The power is integrated over the distribution of the estimated deviation."""
    effect = stats.tmean(samples) / stats.tstd(samples)

    def power(count: int) -> float:
        critical = stats.t.ppf(0.975, count - 1)

        def rejected(chi: float) -> float:
            return float(stats.norm.sf(critical * chi / math.sqrt(count - 1) - math.sqrt(count) * effect))

        density = stats.chi(count - 1).pdf
        return float(integrate.quad(lambda chi: rejected(chi) * density(chi), 0, 40)[0])

    needed = verdicts.seeds_needed(samples, (0.0, INF))
    assert needed is not None
    assert power(needed) >= 0.8
    assert needed == len(samples) + 1 or power(needed - 1) < 0.8


def test_small_effects_need_more_seeds_than_are_worth_naming() -> None:
    assert verdicts.seeds_needed((1.0, -1.0, 0.01), (0.0, INF)) is None
