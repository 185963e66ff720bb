"""A data set whose images encode their row number."""

import pytest
import torch

from pliant.data.dataset import Dataset, from_tensors
from tests.streams.stream_options import CLASSES, TESTS, N


@pytest.fixture(scope="session")
def dataset() -> Dataset:
    """Images that encode their row number, so tests can see which examples a task has."""
    rows = torch.arange(N + TESTS)
    x = torch.zeros(N + TESTS, 1, 3, 4, dtype=torch.uint8)
    x[:, 0, 0, 0], x[:, 0, 2, 3] = (rows % 16 * 10).to(torch.uint8), (rows // 16 * 10).to(torch.uint8)
    y = torch.arange(N + TESTS) % CLASSES
    return from_tensors("rows", (x[:N], y[:N]), (x[N:], y[N:]))
