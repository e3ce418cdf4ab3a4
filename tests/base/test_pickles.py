"""Pickles are checked before they are read."""

from __future__ import annotations

import io
import pickle
import struct

import pytest

from smartprune.pickles import MAX_LONGS, check_operations

ONE_HASH = 2**61 - 1  # integers that differ by multiples of it have the same hash


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_pass(protocol: int) -> None:
    values = {"a": [1, 2.5, None, True, b"x", "y", (1, 2)], "random": 2**127, 3: {4, 5}}
    stream = io.BytesIO(pickle.dumps(values, protocol) + b"rest")
    check_operations(stream)
    assert stream.read() == b"rest"


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x05\x96" + struct.pack("<Q", 3) + b"abc.",  # a bytearray
        b"\x80\x02Nr" + struct.pack("<I", 2**31 - 1) + b".",  # a memo with billions of places
        b"(i__builtin__\nlist\n.",
        b"Pname\n.",
    ],
)
def test_operations_that_allocate_or_import_are_refused(data: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match="which is not allowed"):
        check_operations(io.BytesIO(data))


def test_many_integers_with_one_hash_are_refused() -> None:
    """A dictionary of 60,000 of them takes a minute."""
    check_operations(io.BytesIO(pickle.dumps({ONE_HASH * i: None for i in range(MAX_LONGS)})))
    with pytest.raises(ValueError, match="huge integers"):
        check_operations(io.BytesIO(pickle.dumps({ONE_HASH * i: None for i in range(2 * MAX_LONGS)})))
