"""What all tests share: the same random numbers in every run, alone or beside the others."""

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)  # pytest --hypothesis-profile=explore looks for new examples.
settings.load_profile("repeatable")

# Bits depend on the number of threads: as many here as the workers of runs have, however the tests are started,
# and in the processes that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

torch.manual_seed(0)  # For what a test module draws while it is imported.


@pytest.fixture(autouse=True)
def repeatable() -> None:
    """Start every test from the same state of torch's generator."""
    torch.manual_seed(0)
