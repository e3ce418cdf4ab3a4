"""Fixtures that several modules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from smartprune.runtime.cpu import build, store


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an empty cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SMARTPRUNE_CACHE", str(folder))
    store.cache_folder.cache_clear()
    build.supported_sets.cache_clear()
    yield folder
    store.cache_folder.cache_clear()
    build.supported_sets.cache_clear()
