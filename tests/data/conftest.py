"""A cache folder for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pliant.data import digits, hub


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty cache folder, and clear the in-process caches before and after."""
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    for remembered in (digits.load_digits, hub.load_from_hub):
        remembered.cache_clear()
    yield tmp_path / "cache"
    for remembered in (digits.load_digits, hub.load_from_hub):
        remembered.cache_clear()
