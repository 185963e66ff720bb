"""What all tests share: the same random numbers in every run, alone or beside the others."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)  # pytest --hypothesis-profile=explore looks for new examples.
settings.load_profile("repeatable")

torch.manual_seed(0)  # For what a test module draws while it is imported.


@pytest.fixture(autouse=True)
def repeatable() -> None:
    """Start every test from the same state of torch's generator."""
    torch.manual_seed(0)
