"""The defaults are what the kept protocol chose, and the page shows it."""

import inspect
import json

import pytest
from benchmarks import defaults

from pliant import methods

KEPT = json.loads((defaults.RESULTS / "defaults.json").read_text())


@pytest.mark.parametrize("name", KEPT)
def test_default_is_the_chosen_setting_or_must_be_given_where_that_hurts(name: str) -> None:
    setting, _, value = KEPT[name]["chosen"].partition(" ")[2].partition("=")
    scores = KEPT[name]["judged"][KEPT[name]["chosen"]]
    hurts = any(score["high"] < 0 for score in scores.values())
    if setting:
        assert methods.options(name)[setting] == (inspect.Parameter.empty if hurts else float(value))


def test_page_and_table_show_the_kept_scores() -> None:
    table = defaults.show(KEPT)
    assert (defaults.RESULTS / "defaults.txt").read_text() == table
    assert table in defaults.DOCS.read_text()
