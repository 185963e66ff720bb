"""Means, intervals and the rows of the table."""

import math
from pathlib import Path

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from pliant.experiments.config import Part
from pliant.experiments.store import Run
from pliant.experiments.table import chosen, interval, student_quantile, tabulate
from tests.experiments.helpers import small


@pytest.mark.parametrize("freedom", [*range(1, 60), 100, 1000])
def test_student_quantiles_are_right_to_four_digits(freedom: int) -> None:
    assert student_quantile(freedom) == pytest.approx(scipy.stats.t.ppf(0.975, freedom), rel=1e-4)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40))
def test_intervals_are_scipys(values: list[float]) -> None:
    result = interval(values)
    mean, error = sum(values) / len(values), scipy.stats.sem(values)
    assert result.mean == pytest.approx(mean, abs=1e-9)
    expected = scipy.stats.t.ppf(0.975, len(values) - 1) * error
    assert result.half == pytest.approx(expected, rel=1e-4, abs=1e-9)


def test_one_value_has_no_interval() -> None:
    assert math.isnan(interval([0.5]).half)
    assert str(interval([0.5])) == "0.5000"
    with pytest.raises(ValueError, match="values is empty"):
        interval([])


def run(seed: int, score: float, status: str = "finished", **changes: object) -> Run:
    result = {"final_test_accuracy": score} if status == "finished" else {}
    return Run(Path(str(seed)), small(seed=seed, **changes), status, result, "")


def test_rows_gather_seeds_and_count_what_went_wrong() -> None:
    other = {"label": "other", "methods": (Part("swr", {"lam": 1}),)}
    runs = [
        run(0, 0.25),
        run(1, 0.75),
        run(2, 0, "diverged"),
        run(3, 0, "failed"),
        run(4, 0, "unfinished"),
        run(0, 0.5, **other),
        run(9, 0.9, purpose="selection"),
        run(1, 0, "failed", label="never", methods=()),
    ]
    first, second, never = tabulate(runs)
    assert first.numbers["final_test_accuracy"] == interval([0.25, 0.75])
    assert (first.bad, second.label, second.settings) == (2, "other", "swr(lam=1)")
    assert (never.numbers, never.bad) == ({}, 1)


def test_only_chosen_settings_stand_where_there_was_a_choice() -> None:
    runs = [run(0, 0.1, label="swr", methods=(Part("swr", {"lam": lam}),)) for lam in (1, 2)] + [run(0, 0.2)]
    rows = chosen(tabulate(runs), {"labels": {"swr": {"chosen": "swr(lam=2)"}}})
    assert [row.settings for row in rows] == ["swr(lam=2)", "l2_init(lam=0.01) + shrink_perturb(lam=0.5)"]
    assert len(chosen(tabulate(runs), {})) == 3
