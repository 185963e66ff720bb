"""How a choice of settings is told."""

import pytest

from pliant.experiments.selection import is_tied, tell_choice

ONE, TWO, THREE = "l2(lam=1)", "l2(lam=2)", "l2(lam=3)"


@pytest.mark.parametrize(
    ("scores", "line"),
    [
        ({ONE: 0.5, TWO: 0.25, THREE: 0.375}, "chosen: l2(lam=1) (0.500; next 0.375 with lam=3), by 3 seeds"),
        ({ONE: 0.5, TWO: None}, "chosen: l2(lam=1) (0.500; the only one whose runs all finished), by 3 seeds"),
        (
            {ONE: None, TWO: None},
            "chosen: l2(lam=1) (the first: every setting has a run that did not finish), by 3 seeds",
        ),
        (
            {ONE: 0.0, TWO: 0.0, THREE: -1.0},
            "chosen: l2(lam=1), the first of 2 that score 0.000 (also lam=2), by 3 seeds; more selection.seeds would "
            "tell more",
        ),
    ],
)
def test_choice_is_told_with_its_scores(scores: dict[str, float | None], line: str) -> None:
    choice = {"chosen": ONE, "scores": scores, "seeds": 3, "examples": None}
    assert tell_choice("l2", choice, "validation") == line
    assert is_tied(choice) == ("the first of" in line)


def test_of_many_that_tie_some_are_named() -> None:
    scores = {f"l2(lam={lam})": 0.5 for lam in range(1, 10)}
    line = tell_choice("mine", {"chosen": ONE, "scores": scores, "seeds": 1, "examples": None}, "test")
    assert line == (
        "chosen: mine: l2(lam=1), the first of 9 that score 0.500 (also lam=2; lam=3; lam=4; lam=5; lam=6; lam=7; …), "
        "by 1 seed; more seeds would tell more"
    )


def test_several_methods_at_once_are_named_in_full() -> None:
    scores = {"swr + l2(lam=1)": 0.5, "swr + l2(lam=2)": 0.25}
    line = tell_choice(
        "swr+l2", {"chosen": "swr + l2(lam=1)", "scores": scores, "seeds": 1, "examples": None}, "validation"
    )
    assert line == "chosen: swr+l2: swr + l2(lam=1) (0.500; next 0.250 with swr + l2(lam=2)), by 1 seed"
