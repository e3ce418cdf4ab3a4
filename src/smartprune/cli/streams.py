"""stdout and stderr of the command line. They may be closed, limited to ASCII, or have no reader."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


def prepare_streams() -> None:
    """Makes both streams safe to print to: a closed stream becomes /dev/null, and characters that it cannot encode are escaped."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(_open_null(descriptor), "w", encoding="utf-8", closefd=False))  # noqa: SIM115 (until the end)
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _open_null(descriptor: int) -> int:
    """Opens /dev/null, on the stream's own descriptor if that is free, so that no other file gets it."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.fstat(descriptor)
    except OSError:
        os.dup2(null, descriptor)
    os.set_inheritable(null, null == descriptor)
    return null


def print_message(text: str) -> None:
    """Prints a line on stderr. If that fails, the command continues without it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard_unwritten(sys.stderr)


def announce(command: str, terminal_only: bool = False) -> None:
    """Prints a first line if the command is about to load PyTorch, which takes seconds. Once per run of torchrun."""
    if terminal_only and not sys.stderr.isatty():
        return
    if "torch" not in sys.modules and os.environ.get("RANK", "0") == "0":
        print_message(f"{command}: loading PyTorch")


@contextmanager
def short_warnings() -> Iterator[None]:
    """A context in which warnings are one line that names the program, instead of a line of its code."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"smartprune: warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = usual


def discard_unwritten(stream: TextIO) -> None:
    """Discards buffered output that cannot be written, which would fail again when the process exits."""
    try:
        stream.flush()
    except (OSError, ValueError):
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError):  # closed, or not backed by a file of the operating system
            return
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
