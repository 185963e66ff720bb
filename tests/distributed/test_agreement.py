"""What two ranks must refuse, and what they must agree on (checks.py)."""

from pathlib import Path

from tests.distributed.launching import launch


def test_two_ranks_agree_or_refuse(tmp_path: Path) -> None:
    for rank in launch(["checks"], 2, tmp_path):
        failures = {name: error for name, error in rank.items() if error}
        assert not failures, "\n".join(failures.values())
