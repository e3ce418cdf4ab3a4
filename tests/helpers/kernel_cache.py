"""Empty caches of compiled kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

import smartprune
from smartprune.runtime.cpu import build, store

SOURCE = Path(smartprune.__file__).parents[1]
PROBE = [build.Unit("probe.c", ("-DPROBES=PROBE(portable, 1)",))]


def use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMARTPRUNE_CACHE", str(folder))
    store.cache_folder.cache_clear()


def script(path: Path, *lines: str) -> Path:
    """A shell script that takes the place of a compiler."""
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path
