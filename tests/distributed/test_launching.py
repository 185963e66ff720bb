"""No rank of a test outlives the test."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.distributed.launching import launch
from tests.experiments.helpers import descendants


def test_no_rank_outlives_the_limit(tmp_path: Path) -> None:
    before = descendants(os.getpid())
    with pytest.raises(subprocess.TimeoutExpired):
        launch(["checks"], 2, tmp_path, limit=1)
    assert descendants(os.getpid()) <= before
