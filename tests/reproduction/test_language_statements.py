"""Statements about text are judged by losses, and the cards show them."""

import pytest
from benchmarks.reproduction import language_effects, statements
from benchmarks.reproduction.kept import find_recipe
from benchmarks.reproduction.language_effects import LANGUAGE, language_block
from benchmarks.reproduction.statements import judge, load_statements

from tests.reproduction.helpers import make_kept

SMALL = "p4_fig3_gpt_small"
NOISE = (0.0, 0.01, -0.01)


def kept(losses: dict[str, float], headline: str) -> object:
    return make_kept({one: {s: {headline: loss + e} for s, e in enumerate(NOISE)} for one, loss in losses.items()},
                     headline)  # fmt: skip


@pytest.mark.parametrize("recipe", [SMALL, LANGUAGE])
def test_statements_name_labels_of_their_recipe(recipe: str) -> None:
    labels = {entry.label for entry in find_recipe(recipe).methods}
    stated = [one for one in load_statements() if one["recipe"] == recipe]
    assert len(stated) >= 5
    assert {one[key] for one in stated for key in ("higher", "lower", "label") if key in one} <= labels


@pytest.mark.parametrize("like_the_paper", [True, False])
def test_the_papers_four_results_are_judged(like_the_paper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    base, fire = (2.3, 1.9) if like_the_paper else (1.8, 2.1)
    losses = {"base, best": 2.0, "base, last": base, "FIRE, best": 1.9, "FIRE, last": fire,
              "S&P, last": fire + (0.2 if like_the_paper else -0.2), "full reset": 2.6}  # fmt: skip
    monkeypatch.setattr(statements, "load_kept", lambda name: kept(losses, "final_test_loss"))
    judged = judge([one for one in load_statements() if one["recipe"] == SMALL])
    expected = "supported" if like_the_paper else "contradicted"
    assert [one.verdict for one in judged[:4]] == [expected] * 4
    assert judged[4].verdict == "supported"


def test_card_shows_text_where_there_are_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"vanilla": 1.0, "fresh": 0.8, "FIRE": 0.3}
    monkeypatch.setattr(language_effects, "load_kept", lambda name: kept(losses, "final_train_loss"))
    assert language_block("fire").splitlines()[2:] == [
        "| *plain training* | 1.00 ± 0.02 |  |  | 3 |",
        "| *a fresh network for every task* | 0.80 ± 0.02 |  |  | 3 |",
        "| FIRE | 0.30 ± 0.02 | -0.70 ± 0.00 | helps | 3 |",
    ]
    assert language_block("swr") == ""
    monkeypatch.setattr(language_effects, "load_kept", lambda name: None)
    assert language_block("fire") == ""
