"""The progress of a sweep on a terminal and in a log."""

from __future__ import annotations

import io

import pytest

from smartprune.experiments.sweep.progress import RunStatus, SweepProgress, SweepStatus


class BrokenStream(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("live", [False, True])
def test_progress_is_silent_after_the_stream_breaks(live: bool) -> None:
    progress = SweepProgress(BrokenStream(), live=live)
    progress.show(SweepStatus(1, 2, 0, None, []))
    progress.message("a")
    progress.close()


def test_live_block_is_replaced_by_messages() -> None:
    stream = io.StringIO()
    progress = SweepProgress(stream, live=True)
    progress.show(SweepStatus(1, 4, 1, 75.0, [RunStatus("smart-0.9-s0", "search 3/9", 5.0)]))
    progress.message("done")
    progress.close()
    text = stream.getvalue()
    assert "sweep  1/4 done, 1 running, 1 failed, about 1:15 left\n  smart-0.9-s0   0:05  search 3/9\n" in text
    assert text.endswith("\x1b[2A\x1b[Jdone\n")


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (80, "search    epoch 1/8  loss 0.0533  tau 4.1e-02"),
        (60, "search    epoch 1/8  loss 0.0533"),
        (45, "search    epoch 1/8"),
        (30, "search"),
    ],
)
def test_narrow_terminals_show_whole_parts_of_a_line(columns: int, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = io.StringIO()
    run = RunStatus("smart-0.9-s0", "search    epoch 1/8  loss 0.0533  tau 4.1e-02", 5.0)
    SweepProgress(stream, live=True).show(SweepStatus(0, 1, 0, None, [run]))
    last = stream.getvalue().splitlines()[-1]
    assert last.partition("0:05  ")[2] == line
    assert len(last) < columns
