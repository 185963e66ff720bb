"""What all tests share: the same random numbers in every run, alone or beside the others."""

import atexit
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from pliant.data.cache import entries

pytest_plugins = ["tests.requirements"]

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)  # pytest --hypothesis-profile=explore looks for new examples.
settings.load_profile("repeatable")

# Bits depend on the number of threads: as many here as the workers of runs have, however the tests are started,
# and in the processes that tests start.
os.environ["OMP_NUM_THREADS"] = os.environ.get("PLIANT_TEST_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# `make test-all` fetches data before the tests: no test asks the hub, and none waits for an answer.
os.environ["HF_HUB_OFFLINE"] = "1"

# No test leaves data in the user's cache, where a mistake in a decoder would outlive its mending. What comes from the
# hub is linked: to decode it takes a while. Workers of one session share the folder.
if "PYTEST_XDIST_WORKER" not in os.environ:
    decoded = [entry for entry in entries() if not entry.name.startswith("digits-")]
    os.environ["PLIANT_CACHE"] = tempfile.mkdtemp(prefix="pliant-tests-")
    atexit.register(shutil.rmtree, os.environ["PLIANT_CACHE"])
    for entry in decoded:
        Path(os.environ["PLIANT_CACHE"], entry.name).symlink_to(entry.resolve())

FRAMEWORKS = {  # by what tests/integrations/conftest.py does not collect without them
    "accelerate": ["test_transformers.py", "test_models.py", "test_ranks.py"],
    "lightning": ["test_lightning.py", "test_ranks.py"],
    "sb3_contrib": ["test_stable_baselines3.py", "test_priming.py", "test_examples.py"],
    "trackio": ["test_loggers.py"],
    "torchrl": ["test_torchrl.py"],
    "minatar": [],
    "ale_py": [],
    "dm_control": [],
}
SUITES = ("minatar", "ale_py", "dm_control")
"""The packages of environments; tests/rl/conftest.py does not collect tests/rl/test_suites.py without them."""


IMPORTERS = {
    "lightning": ["pliant.integrations.lightning"],
    "sb3_contrib": [
        "pliant.integrations.stable_baselines3",
        "pliant.integrations._agents",
        "pliant.integrations._changed_agents",
        "pliant.rl.agents",
        "pliant.rl.atari",
        "pliant.rl.control_suite",
        "pliant.rl.policies",
        "pliant.rl.agent_learner",
        "pliant.rl.environments",
        "pliant.rl.evaluation",
        "pliant.experiments.agent_run",
        "benchmarks.rl.priming",
    ],
}


def missing_frameworks() -> list[str]:
    return [name for name in FRAMEWORKS if importlib.util.find_spec(name) is None]


def can_import(module: str) -> bool:
    """Return whether the framework that a module imports is installed."""
    return not any(module in IMPORTERS.get(name, ()) for name in missing_frameworks())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if missing := missing_frameworks():
        terminalreporter.write_line(
            f"not run here: tests of {', '.join(missing)} (not installed): make setup", red=True
        )


torch.manual_seed(0)  # For what a test module draws while it is imported.


@pytest.fixture(autouse=True)
def repeatable() -> None:
    """Start every test from the same state of torch's generator."""
    torch.manual_seed(0)
