"""A cache of its own for tests of what is kept in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pliant.data import embedded, hub


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache: what this process has loaded, from here or for others, is forgotten on both sides."""
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    for remembered in (embedded.digits, hub.load_from_hub):
        remembered.cache_clear()
    yield tmp_path / "cache"
    for remembered in (embedded.digits, hub.load_from_hub):
        remembered.cache_clear()
