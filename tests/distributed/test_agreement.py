"""What two ranks must refuse, and what they must agree on (checks.py)."""

from pathlib import Path

from tests.distributed.launching import launch

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_kept_costs() -> None:
    kept = (ROOT / "benchmarks" / "results" / "ranks.txt").read_text().partition("\n\n")[2].rstrip()
    assert kept in (ROOT / "docs" / "howto-many-gpus.md").read_text()


def test_two_ranks_agree_or_refuse(tmp_path: Path) -> None:
    for rank in launch(["checks"], 2, tmp_path):
        failures = {name: error for name, error in rank.items() if error}
        assert not failures, "\n".join(failures.values())
