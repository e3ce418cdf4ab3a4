"""Files and modules that the documentation names exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLACES = [ROOT, ROOT / "src" / "smartprune", ROOT / "tests", ROOT / "docs"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_source_files_exist(page: Path) -> None:
    names = set(re.findall(r"(?<![\w/.-])([\w.-]+(?:/[\w.-]+)*\.(?:py|c|h|js|css))\b", page.read_text()))
    names -= {"train.py", "mine.py", "script.py", "net.c", "net.h", "net8.c", "net16.c"}  # files of the reader
    names = {name for name in names if not name.startswith("runs/")}  # files of a run
    missing = [name for name in sorted(names) if not any((place / name).exists() for place in (page.parent, *PLACES))]
    assert not missing, f"{page.name} names files that do not exist: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_imported_modules_exist(page: Path) -> None:
    names = set(re.findall(r"^ *(?:from|import) (smartprune(?:\.\w+)*)", page.read_text(), re.M))
    for name in sorted(names):
        if not name.startswith("smartprune.integrations."):  # these need the trainer
            importlib.import_module(name)
