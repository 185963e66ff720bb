"""Without a browser and data sets, tests that need them are not run: the last line says so, `--require-all` fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.requirements import describe

ROOT = Path(__file__).parent.parent
PAGE = "tests/experiments/report/test_page.py"
DATA = "tests/data/test_hub.py"


def run_bare(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """Run tests with no program on PATH and an empty cache of the hub; return the exit code and what was printed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "HF_"))}
    environment |= {"PATH": str(folder), "HF_HOME": str(folder)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


# .ci/run looks at the last line of a run without workers.
@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.long), "1"])
def test_last_line_says_what_was_not_run(workers: str, tmp_path: Path) -> None:
    code, lines = run_bare(tmp_path, "-n", workers, PAGE, DATA, "-k", "axe or known_statistics or invalid_idx")
    assert code == 0
    assert lines[-2].startswith("3 passed")
    assert lines[-1] == (
        "not run here: 2 tests of the page (no chromedriver), 2 on MNIST and CIFAR-10 (not in the cache): make test-all"
    )


def test_require_all_fails(tmp_path: Path) -> None:
    code, lines = run_bare(tmp_path, "--require-all", PAGE, DATA, "-k", "axe or known_statistics or invalid_idx")
    assert code == 1
    assert lines[-1].startswith("3 passed, ")
    assert "4 errors" in lines[-1]
    assert "--require-all: chromedriver is missing; `make test-all` gets what it can" in lines


def test_one_requirement_alone_is_named() -> None:
    assert describe({"needs_data": {"mnist": 3}}) == "not run here: 3 tests on MNIST (not in the cache): make test-all"
    assert describe({"needs_browser": {"chromium": 18}}) == (
        "not run here: 18 tests of the page (no chromium): make test-all"
    )
