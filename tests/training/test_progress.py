"""Progress on a terminal and elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from smartprune.training.progress import Progress, Tick


class FakeTerminal:
    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


def tick(step: int, **changes: Any) -> Tick:
    values = Tick("search", step, 100, step, 200, 0.5, "accuracy", 0.985, 1e-3, 42, 3.0)
    return replace(values, **changes)


def test_progress_on_a_terminal_is_one_line_per_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeTerminal()
    monkeypatch.setenv("COLUMNS", "120")
    progress = Progress(screen, live=True)  # type: ignore[arg-type]
    for step in range(1, 101):
        progress(tick(step))
    assert screen.text.count("\n") == 1
    assert "undecided 42" in screen.text
    assert "tau 1.0e-03" in screen.text
    assert "█" * 12 + "░" * 12 in screen.text
    assert "left" in screen.text


def test_progress_counts_empty_layers() -> None:
    screen = FakeTerminal()
    progress = Progress(screen)  # type: ignore[arg-type]
    progress(tick(99))
    assert "empty" not in screen.text
    progress(tick(100, empty_layers=3))
    assert "empty layers 3" in screen.text


def test_progress_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeTerminal()
    monkeypatch.setenv("COLUMNS", "50")
    Progress(screen, live=True)(tick(50))  # type: ignore[arg-type]
    assert len(screen.text.removeprefix("\r\x1b[K")) < 50


def test_progress_without_a_terminal_is_a_few_plain_lines() -> None:
    screen = FakeTerminal()
    progress = Progress(screen)  # type: ignore[arg-type]
    for step in range(1, 101):
        progress(tick(step))
    assert screen.text.splitlines()[0].startswith("search      1/100  loss 0.5000  accuracy 98.5 %")
    assert screen.text.count("\n") == 2
    assert "\r" not in screen.text
    assert "\x1b" not in screen.text


def test_progress_without_unicode() -> None:
    screen = FakeTerminal()
    screen.encoding = "ascii"
    Progress(screen, live=True)(tick(50))  # type: ignore[arg-type]
    screen.text.encode("ascii")
