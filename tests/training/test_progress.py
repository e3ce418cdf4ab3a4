"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.training_jobs import SMALL_FLAGS, command, environment
from smartprune.training.progress import Progress, Tick, format_rate


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
    values = Tick("search", step, 100, step, 200, 0.5, "accuracy", 0.985, 1e-3, 42, 3.0, epoch=-(-step // 10), epochs=10)
    return replace(values, **changes)


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("smartprune.training.progress.time.monotonic", lambda: self.now)


def last_line(screen: FakeTerminal) -> str:
    return screen.text.rpartition("\r\x1b[K")[2].rstrip("\n")


def test_progress_on_a_terminal_is_one_line_per_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, clock = FakeTerminal(), Clock(monkeypatch)
    monkeypatch.setenv("COLUMNS", "140")
    progress = Progress(screen, live=True)  # type: ignore[arg-type]
    for step in range(1, 51):
        clock.now += 0.1
        progress(tick(step))
    # 10 steps per second; 50 steps of this stage and 100 of the next one are left
    assert last_line(screen) == (
        "search    " + "█" * 12 + "░" * 12 + "  epoch  5/10  loss 0.5000  val accuracy 98.5 %  tau 1.0e-03  undecided 42"
        "  10 steps/s  0:15 left"
    )
    for step in range(51, 101):
        progress(tick(step))
    assert screen.text.count("\n") == 1
    assert last_line(screen).startswith("search    epoch 10/10  loss 0.5000")
    assert last_line(screen).endswith("elapsed 0:03")


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (80, "search    ████░░░░  ep  5/10  loss 0.5000  val accuracy 98.5 %  10/s  0:15 left"),
        (60, "search    ███░░░░  ep  5/10  val accuracy 98.5 %  0:15 left"),
        (40, "search    ███░░░  val 98.5 %  0:15 left"),
        (32, "search    val 98.5 %  0:15 left"),
        (25, "search    val 98.5 %  0:15 left"),
    ],
)
def test_a_narrow_terminal_shows_the_most_important_parts(columns: int, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen, clock = FakeTerminal(), Clock(monkeypatch)
    monkeypatch.setenv("COLUMNS", str(columns))
    progress = Progress(screen, live=True)  # type: ignore[arg-type]
    progress(tick(40))
    clock.now += 1
    progress(tick(50))
    assert last_line(screen) == line[: columns - 1]


def test_the_pace_and_the_time_left_are_those_of_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow search after a fast dense stage, and a search that continues at step 40 after an interruption."""
    screen, clock = FakeTerminal(), Clock(monkeypatch)
    progress = Progress(screen, live=True)  # type: ignore[arg-type]
    progress(tick(0, stage="dense"))
    clock.now += 1
    progress(tick(100, stage="dense"))
    progress(tick(40))
    clock.now += 20
    progress(tick(50))
    assert "2.0 s/step  5:00 left" in progress.line(tick(50), clock.now)


def test_the_temperature_is_left_out_once_the_mask_is_hard() -> None:
    assert "tau" not in Progress(FakeTerminal()).line(tick(100, tau=0.0), 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.019, "53 steps/s"), (0.5, "2.0 steps/s"), (1.0, "1.0 steps/s"), (4.25, "4.2 s/step")]
)
def test_rates(seconds: float, text: str) -> None:
    assert format_rate(seconds) == text


def test_progress_counts_empty_layers() -> None:
    screen = FakeTerminal()
    progress = Progress(screen)  # type: ignore[arg-type]
    progress(tick(99))
    assert "empty" not in screen.text
    progress(tick(100, empty_layers=3))
    assert "empty layers 3" in screen.text


def test_progress_without_a_terminal_is_a_few_plain_lines() -> None:
    screen = FakeTerminal()
    progress = Progress(screen)  # type: ignore[arg-type]
    for step in range(1, 101):
        progress(tick(step))
    first, last = screen.text.splitlines()
    assert first == "search    step   1/100  epoch  1/10  loss 0.5000  val accuracy 98.5 %  tau 1.0e-03  undecided 42"
    assert last.startswith("search    step 100/100  epoch 10/10  loss 0.5000")
    assert "\r" not in screen.text
    assert "\x1b" not in screen.text


def test_the_next_output_replaces_what_is_said_between_stages() -> None:
    screen = FakeTerminal()
    progress = Progress(screen, live=True)  # type: ignore[arg-type]
    progress(tick(100))
    progress.busy("testing the model")
    assert last_line(screen) == "testing the model"
    progress(tick(50))
    progress.busy("writing the files")  # below the unfinished line
    assert screen.text.endswith("undecided 42\n\r\x1b[Kwriting the files")
    progress.message("done")
    assert screen.text.endswith("writing the files\r\x1b[Kdone\n")


def test_only_a_terminal_shows_what_is_said_between_stages() -> None:
    screen = FakeTerminal()
    Progress(screen).busy("testing the model")  # type: ignore[arg-type]
    assert screen.text == ""


def test_progress_without_unicode() -> None:
    screen = FakeTerminal()
    screen.encoding = "ascii"
    Progress(screen, live=True)(tick(50))  # type: ignore[arg-type]
    screen.text.encode("ascii")


def test_a_run_on_a_terminal_fits_80_columns(tmp_path: Path) -> None:
    """A real terminal, 80 columns wide."""
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {name: value for name, value in environment().items() if name not in ("COLUMNS", "LINES")}
    out = str(tmp_path / "run")
    process = subprocess.Popen(
        command("train", *SMALL_FLAGS, "--out", out), cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=terminal
    )
    os.close(terminal)
    written = b""
    while chunk := read_terminal(main):
        written += chunk
    assert process.wait(timeout=60) == 0
    os.close(main)
    text = written.decode().replace("\r\n", "\n")
    lines = re.split(r"\n|\r\x1b\[K", text)
    assert lines[0] == "smartprune train: loading PyTorch"
    assert f"resnet8 on digits, smart, blocks of 4x2, remove 50% of the blocks; folder {out}" in lines[1]
    progress = [line for line in lines[2:] if line]
    assert max(map(len, progress)) < 80
    assert any("█" in line for line in progress)
    assert [line.split()[0] for line in progress if " 100" not in line and ("elapsed" in line or " in 0:" in line)] == [
        "dense", "search", "finetune"
    ]  # fmt: skip
    assert {"testing the dense model", "testing the pruned model"} <= set(progress)
    assert text.endswith("exporting the pruned model\r\x1b[K")
    assert any(re.search(r"^search .*val accuracy [\d.]+ %", line) for line in progress)


def read_terminal(descriptor: int) -> bytes:
    """What was written to the terminal; nothing at its end, which Linux reports as an error."""
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""
