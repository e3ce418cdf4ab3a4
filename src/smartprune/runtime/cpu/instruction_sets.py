"""The CPU instruction sets that the kernels are compiled for: one row each.

To add one, append a row to ``INSTRUCTION_SETS`` and, if the compiler does not do well on the portable code, add a header
with its primitives to ``csrc`` (``csrc/vectors.h`` lists them).
"""

from __future__ import annotations

import platform
from dataclasses import dataclass


@dataclass(frozen=True)
class InstructionSet:
    """One instruction set, and what the kernels and the planner need to know about it."""

    name: str
    architecture: str | None  # as platform.machine() spells it; None: any
    flags: tuple[str, ...]  # of the compiler
    probe: str  # C expression: whether this machine has it
    lanes: tuple[int, ...]  # numbers of output channels that a kernel may hold in a vector
    pixels: int  # most pixels of a tile: as many vectors as stay in registers
    quantum_bytes: int = 2  # bytes of a quantized activation: 1 where one instruction multiplies four of them
    header: str | None = None  # file in csrc with its primitives

    @property
    def definitions(self) -> tuple[str, ...]:
        """Compiler flags that describe this row to the C sources."""
        header = () if self.header is None else (f'-DISA_HEADER="{self.header}"',)
        wide = int(16 in self.lanes)
        return *header, f"-DMOST_PIXELS={self.pixels}", f"-DQUANTUM_BYTES={self.quantum_bytes}", f"-DHAS_WIDTH_16={wide}"


_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_HAS_AVX2 = '__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")'
_HAS_AVX512 = " && ".join((_HAS_AVX2, *(f'__builtin_cpu_supports("avx512{part}")' for part in ("f", "bw", "dq", "vl"))))
_HAS_VNNI = f'{_HAS_AVX512} && __builtin_cpu_supports("avx512vnni")'

INSTRUCTION_SETS = (  # the last one that a machine has is used
    InstructionSet("portable", None, (), "1", lanes=(8,), pixels=6),
    InstructionSet("avx2", "x86_64", _AVX2, _HAS_AVX2, lanes=(8,), pixels=12, header="avx2.h"),
    InstructionSet("avx512", "x86_64", _AVX512, _HAS_AVX512, lanes=(16, 8), pixels=16, header="avx512.h"),
    InstructionSet(
        "avx512vnni",
        "x86_64",
        (*_AVX512, "-mavx512vnni"),
        _HAS_VNNI,
        lanes=(16, 8),
        pixels=16,
        quantum_bytes=1,
        header="avx512.h",
    ),
)


def of_this_architecture() -> tuple[InstructionSet, ...]:
    """The rows that can be compiled here."""
    return tuple(row for row in INSTRUCTION_SETS if row.architecture in (None, platform.machine()))
