"""The CPU instruction sets that the kernels are compiled for: one row each.

To add one, append a row to ``INSTRUCTION_SETS`` and, if the compiler does not do well on the portable code, add a header
with its primitives to ``csrc`` (``csrc/vectors.h`` lists them).
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import numpy as np

HALF_SUM = 64  # products that are added in float16 before the sum is added to a float32 sum
HALF_LANES = (8,)  # numbers of output channels that a float16 kernel may hold in a vector, for all instruction sets


@dataclass(frozen=True)
class InstructionSet:
    """One instruction set, and what the kernels and the planner need to know about it."""

    name: str
    architecture: str | None  # as platform.machine() spells it on Linux; None: any
    flags: tuple[str, ...]  # of the compiler
    probe: str  # C expression: whether this machine has it (probe.c)
    lanes: tuple[int, ...]  # numbers of output channels that a kernel may hold in a vector
    pixels: int  # most pixels of a tile: as many vectors as stay in registers
    quantum_bytes: int = 2  # bytes of a quantized activation: 1 where one instruction multiplies four of them
    lowest_quantum: int = 0  # the smallest quantized activation: -128 where that instruction multiplies signed bytes
    word_bytes: int = 4  # of quantized activations that one instruction multiplies with a channel's weights
    header: str | None = None  # file in csrc with its primitives
    macro: str = ""  # that compilers define if its instructions are on
    half_pixels: int = 0  # 16 if it multiplies float16 numbers, in tiles of up to 16 pixels; 0 if it converts them to float32

    @property
    def definitions(self) -> tuple[str, ...]:
        """Compiler flags that describe this row to the C sources."""
        header = () if self.header is None else (f'-DISA_HEADER="{self.header}"',)
        wide = int(16 in self.lanes)
        numbers = {
            "MOST_PIXELS": self.pixels,
            "QUANTUM_BYTES": self.quantum_bytes,
            "LOWEST_QUANTUM": self.lowest_quantum,
            "WORD_BYTES": self.word_bytes,
            "HAS_WIDTH_16": wide,
            "HALF_PIXELS": self.half_pixels,
            "HALF_SUM": HALF_SUM,
        }
        return *header, *(f"-D{name}={number}" for name, number in numbers.items())

    @property
    def quantum(self) -> type[np.integer[Any]]:
        """The type of a quantized activation."""
        if self.quantum_bytes == 2:
            return np.uint16
        return np.int8 if self.lowest_quantum < 0 else np.uint8

    @property
    def quanta_per_word(self) -> int:
        return self.word_bytes // self.quantum_bytes


_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")

INSTRUCTION_SETS = (  # the last one that a machine has is used; for float16, the last one that multiplies it
    InstructionSet("portable", None, (), "1", lanes=(8,), pixels=6),
    InstructionSet("avx2", "x86_64", _AVX2, "HAS_AVX2", lanes=(8,), pixels=12, header="avx2.h", macro="__AVX2__"),
    InstructionSet("avx512", "x86_64", _AVX512, "HAS_AVX512", lanes=(16, 8), pixels=16, header="avx512.h", macro="__AVX512F__"),
    InstructionSet(
        "avx512vnni",
        "x86_64",
        (*_AVX512, "-mavx512vnni"),
        "HAS_AVX512 && HAS_VNNI",
        lanes=(16, 8),
        pixels=16,
        quantum_bytes=1,
        header="avx512.h",
        macro="__AVX512VNNI__",
    ),
    InstructionSet("neon", "aarch64", (), "1", lanes=(8,), pixels=8, header="neon.h", macro="__aarch64__"),
    InstructionSet(
        "neon_fp16",
        "aarch64",
        ("-march=armv8.2-a+fp16",),
        "HAS_FLOAT16",
        lanes=(8,),
        pixels=8,
        header="neon.h",
        macro="__ARM_FEATURE_FP16_VECTOR_ARITHMETIC",
        half_pixels=16,
    ),
    InstructionSet(
        "neon_dot",
        "aarch64",
        ("-march=armv8.2-a+dotprod",),
        "HAS_DOTPROD",
        lanes=(8,),
        pixels=8,
        quantum_bytes=1,
        lowest_quantum=-128,
        header="neon.h",
        macro="__ARM_FEATURE_DOTPROD",
    ),
    InstructionSet(
        "neon_i8mm",
        "aarch64",
        ("-march=armv8.2-a+dotprod+i8mm",),
        "HAS_DOTPROD && HAS_I8MM",
        lanes=(8,),
        pixels=8,
        quantum_bytes=1,
        lowest_quantum=-128,
        word_bytes=8,
        header="neon.h",
        macro="__ARM_FEATURE_MATMUL_INT8",
    ),
)

ARCHITECTURES = {"arm64": "aarch64", "AMD64": "x86_64"}  # other spellings of platform.machine()


def of_this_architecture() -> tuple[InstructionSet, ...]:
    """The rows that can be compiled here."""
    machine = platform.machine()
    return tuple(row for row in INSTRUCTION_SETS if row.architecture in (None, ARCHITECTURES.get(machine, machine)))
