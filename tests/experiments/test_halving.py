"""Successive halving: who survives, how many runs it takes, and what fits a budget."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.experiments.halving import Tried, fit_settings, halve, round_sizes, seconds_needed


def play(
    table: dict[str, list[float]], rounds: int | None = None
) -> tuple[str, list[Tried], list[tuple[int, list[str]]]]:
    """Halve settings whose score in each round is known; return the winner, what was tried, and the runs."""
    played: list[tuple[int, list[str]]] = []
    winner, tried = halve(
        list(table),
        round_sizes(len(table)),
        lambda number, labels: played.append((number, list(labels))),
        lambda label, count: tuple(table[label][:count]),
        lambda number: rounds is None or number < rounds,
    )
    return winner, tried, played


def test_the_worse_half_is_dropped_and_means_over_all_rounds_decide() -> None:
    table = {"a": [0.9, 0.1, 0.9], "b": [0.8, 0.8, 0.8], "c": [0.7, 0.9, 0.9], "d": [0.1], "e": [0.2], "f": [0.3]}
    winner, tried, played = play(table)
    assert played == [(0, list("abcdef")), (1, list("abc")), (2, ["b", "c"])]
    assert winner == "c", "0.83 against 0.8 over three rounds, though b led after two"
    assert [each.label for each in tried] == ["c", "b", "a", "f", "e", "d"]
    assert [len(each.scores) for each in tried] == [3, 3, 2, 1, 1, 1]


def test_a_run_that_did_not_finish_loses() -> None:
    winner, tried, _ = play({"a": [-math.inf, 1.0], "b": [0.1, 0.1], "c": [0.2, 0.0]})
    assert winner in "bc"
    assert tried[-1].label == "a"


def test_a_single_setting_wins_without_a_round() -> None:
    assert play({"a": []}) == ("a", [Tried("a", ())], [])


def test_without_time_the_leader_so_far_wins() -> None:
    winner, tried, played = play({"a": [0.5, 0.9], "b": [0.6, 0.0], "c": [0.4, 0.4]}, rounds=1)
    assert (winner, played) == ("b", [(0, ["a", "b", "c"])])
    assert [each.label for each in tried] == ["b", "a", "c"]


@given(st.integers(1, 60), st.integers(3, 8), st.floats(0.1, 50), st.floats(0.1, 50), st.integers(1, 8))
def test_what_is_planned_is_what_is_run(settings: int, seeds: int, run: float, scratch: float, workers: int) -> None:
    _, _, played = play({str(number): [0.0] * 20 for number in range(settings)})
    work = sum(len(labels) + 1 for _, labels in played) * run + len(played) * scratch + seeds * (2 * run + scratch)
    assert seconds_needed(settings, seeds, run, scratch, workers) == pytest.approx(work / workers)


@given(st.integers(1, 40), st.floats(1, 2000))
def test_as_many_settings_as_fit_are_chosen(available: int, budget: float) -> None:
    fitting = fit_settings(available, 5, 2.0, 3.0, 2, budget)
    if fitting:
        assert seconds_needed(fitting, 5, 2.0, 3.0, 2) <= budget
    assert all(seconds_needed(more, 5, 2.0, 3.0, 2) > budget for more in range(fitting + 1, available + 1))
