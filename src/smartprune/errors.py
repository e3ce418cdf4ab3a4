"""The one error type of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

MEMORY_MESSAGES = ("allocate memory", "not enough memory", "out of memory")  # parts of torch's messages, also where ours quote them


class SmartpruneError(Exception):
    """The error type of smartprune. Its message says where it happened, what was given, what is allowed and what to do.

    Examples:
        >>> import smartprune as sp
        >>> try:
        ...     sp.blocks(97)
        ... except sp.SmartpruneError as error:
        ...     print(error)
        blocks=97 is outside [0, 1): it is the share to remove; write blocks=0.97
    """


@contextmanager
def explain_memory_errors(what: str) -> Iterator[None]:
    """Turns errors that mean "too little memory" into one that names ``what`` needs it. Other errors pass through."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError, TypeError, SmartpruneError) as error:
        message = str(error).lower()
        overflow = isinstance(error, OverflowError) or ("overflow" in message and not isinstance(error, SmartpruneError))
        if not (overflow or isinstance(error, MemoryError) or any(part in message for part in MEMORY_MESSAGES)):
            raise
        raise SmartpruneError(f"{what} takes more memory than is available; use something smaller") from None
