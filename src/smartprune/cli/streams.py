"""The streams of the command line: some may be closed, know no letters but ASCII, or have nobody who reads them."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def ready_streams() -> None:
    """Makes both streams fit to print to: one that is closed leads nowhere, and letters that a stream does not know become
    their codes."""
    for name, handle in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(_nowhere(handle), "w", encoding="utf-8", closefd=False))  # noqa: SIM115 (until the end)
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _nowhere(handle: int) -> int:
    """What leads nowhere, if it is free with the number of the stream: the next file that is opened must not get that."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.fstat(handle)
    except OSError:
        os.dup2(nowhere, handle)
    os.set_inheritable(nowhere, nowhere == handle)
    return nowhere


def tell(text: str) -> None:
    """A line on stderr. Where nobody can read it, the work goes on without it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        settle(sys.stderr)


def settle(stream: TextIO) -> None:
    """Drops what a stream cannot write, which would fail once more when the process ends."""
    try:
        stream.flush()
    except (OSError, ValueError):
        try:
            handle = stream.fileno()
        except (OSError, ValueError):  # closed, or none of the system's
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, handle)
        os.close(nowhere)
