"""The error that this package raises, and what turns others into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

TOO_LARGE = ("allocate memory", "not enough memory", "out of memory")  # in what torch says, and what we quote of that


class SmartpruneError(Exception):
    """Says where, what was given, what is allowed and what to do."""


@contextmanager
def explain_memory_errors(what: str) -> Iterator[None]:
    """Says what asks for more memory than there is, where something does."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError, TypeError, SmartpruneError) as error:
        said = str(error).lower()
        overflow = isinstance(error, OverflowError) or ("overflow" in said and not isinstance(error, SmartpruneError))
        if not (overflow or isinstance(error, MemoryError) or any(words in said for words in TOO_LARGE)):
            raise
        raise SmartpruneError(f"{what} takes more memory than there is; give something smaller") from None
