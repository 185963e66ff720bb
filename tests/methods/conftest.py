"""What tests of methods share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """Let this process be the only one of a group, as those who train in parallel have it."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
