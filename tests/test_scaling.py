"""The page about scaling shows the numbers that are kept."""

from pathlib import Path

import pytest
from benchmarks import scaling

ROOT = Path(__file__).parents[1]
KEPT = (ROOT / "benchmarks" / "results" / "scaling.txt").read_text()


def test_the_page_shows_the_kept_numbers() -> None:
    assert KEPT.partition("\n\n")[2].rstrip() in (ROOT / "docs" / "scaling.md").read_text()


def test_the_costs_on_paper_follow_from_the_kept_operators(capsys: pytest.CaptureFixture[str]) -> None:
    scaling.seventy_billion()
    assert capsys.readouterr().out.rstrip() in KEPT
