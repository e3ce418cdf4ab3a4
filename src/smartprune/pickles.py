"""Checks pickles before they are read: which operations they have, and how large the values are that these allocate."""

from __future__ import annotations

import pickle
import pickletools
from typing import Any, BinaryIO

MAX_OPERATIONS = 10_000_000  # of a pickle; a tensor has about 40
FREE_ITEMS, MAX_GROWTH = 1 << 16, 4  # values that any pickle may have, and how many more per byte
FORBIDDEN = {  # operations that torch.save and the authors of CIFAR-10 do not write. They import more, or allocate what they claim
    *("INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID", "BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER"),
}
LONG_BYTES, MAX_LONGS = 8, 1000  # how many longer integers a pickle may have: all may have one hash, which makes dictionaries slow


def check_operations(stream: BinaryIO) -> None:
    """Moves past the next pickle in a stream. Raises for operations that no file of tensors or of data has."""
    argument: Any
    longs = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(stream), 1):
        if opcode.name in FORBIDDEN or (opcode.name.endswith("PUT") and int(argument) > count):
            raise pickle.UnpicklingError(f"it has the operation {opcode.name}, which is not allowed")
        longs += type(argument) is int and argument.bit_length() > 8 * LONG_BYTES
        if count > MAX_OPERATIONS or longs > MAX_LONGS:
            raise ValueError(f"it has more than {MAX_OPERATIONS:,} operations, or more than {MAX_LONGS:,} huge integers")


def value_limit(size: int) -> int:
    """How many values the content of pickles with so many bytes may have. Few have more than one per byte."""
    return FREE_ITEMS + MAX_GROWTH * size
