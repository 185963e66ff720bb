"""What two ranks must refuse, and what they must agree on (checks.py)."""

from pathlib import Path

import pytest
from benchmarks import eight_billion

from tests.distributed.launching import launch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["ranks", "eight_billion"])
def test_the_page_shows_the_kept_costs(name: str) -> None:
    kept = (ROOT / "benchmarks" / "results" / f"{name}.txt").read_text().partition("\n\n")[2].rstrip()
    assert kept in (ROOT / "docs" / "howto-many-gpus.md").read_text()


def test_the_costs_on_paper_are_as_kept(capsys: pytest.CaptureFixture[str]) -> None:
    eight_billion.main()
    assert capsys.readouterr().out.rstrip() in (ROOT / "benchmarks" / "results" / "eight_billion.txt").read_text()


def test_two_ranks_agree_or_refuse(tmp_path: Path) -> None:
    for rank in launch(["checks"], 2, tmp_path):
        failures = {name: error for name, error in rank.items() if error}
        assert not failures, "\n".join(failures.values())
