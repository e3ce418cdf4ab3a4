"""The error type, and errors about memory."""

import pytest

from smartprune.errors import SmartpruneError, explain_memory_errors


def test_only_memory_errors_are_explained() -> None:
    for error in (RuntimeError("shapes differ"), TypeError("no such argument"), SmartpruneError("int8 sums overflow")):
        with pytest.raises(type(error), match=str(error)), explain_memory_errors("x"):
            raise error
    for error in (
        MemoryError(),
        RuntimeError("CUDA out of memory"),
        SmartpruneError("not enough memory"),
        OverflowError("too big"),
    ):
        with pytest.raises(SmartpruneError, match="x takes more memory than is available"), explain_memory_errors("x"):
            raise error
