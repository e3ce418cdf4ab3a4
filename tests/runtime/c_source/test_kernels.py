"""The kernels in one text: what a network does not use is left out, and names of the units do not collide."""

from __future__ import annotations

import re

import pytest

from smartprune.runtime.c_source.kernels import Tile, kernels
from smartprune.runtime.cpu import abi
from smartprune.runtime.cpu.instruction_sets import INSTRUCTION_SETS, InstructionSet

CONV, ADD = abi.OPERATION["conv"], abi.OPERATION["add"]


def test_indices_of_tiles() -> None:
    assert Tile.of(1) == Tile(1, 1, 1)
    assert Tile.of((1 * 4 + 3) * 32 + 2) == Tile(8, 2, 2)
    assert str(Tile(2, 6, 1)) == "F(2, 6, 1)"


@pytest.mark.parametrize("isa", INSTRUCTION_SETS, ids=lambda isa: isa.name)
def test_every_unit_has_its_own_names_and_leaves_no_macro(isa: InstructionSet) -> None:
    tiles = {(lanes, number): [1] for lanes in isa.lanes for number in (abi.FLOAT32, abi.QUANTUM)} | {(8, abi.FLOAT16): [1]}
    text = kernels(isa, tiles, [CONV, ADD])
    units = re.split(r"^/\* ---- .*\*/$", text, flags=re.M)[1:]
    assert len(units) == 2 * len(isa.lanes) + 2
    for unit in units:
        defined = set(re.findall(r"^\s*#\s*define (\w+)", unit, re.M))
        removed = set(re.findall(r"^#undef (\w+)", unit, re.M))
        assert defined <= removed
        assert {"vfloat", "vint", "all", "choose"} <= removed
    renamed = [set(re.findall(r"^#define \w+ (\w+_(?:f32_8|f32_16|i8_8|i8_16|f16_8|ops))$", unit, re.M)) for unit in units]
    assert sum(len(names) for names in renamed) == len(set().union(*renamed))
    assert not re.search(r'^#include "', text, re.M)


def test_only_used_parts_are_written() -> None:
    isa = INSTRUCTION_SETS[0]
    text = kernels(isa, {(8, 0): [1, 5]}, [CONV])
    assert "#define TILES(F) F(1, 1, 1) F(1, 5, 1)\n" in text
    assert f"#define USES(kind) (({1 << CONV:#x} >> (kind)) & 1)\n" in text
    assert "conv.c, i8_8" not in text
    without = kernels(isa, {}, [ADD])
    assert "/* ---- conv.c" not in without
    assert "static Kernel sp_kernel_f32_8(int index) { return (void)index, (Kernel)0; }" in without


def test_another_target_is_an_error_of_the_compiler() -> None:
    (avx2,) = (row for row in INSTRUCTION_SETS if row.name == "avx2")
    assert "#ifndef __AVX2__\n#error" in kernels(avx2, {}, [ADD])
    assert "#error" not in kernels(INSTRUCTION_SETS[0], {}, [ADD]).split("runtime.h")[0]
