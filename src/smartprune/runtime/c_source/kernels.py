"""The kernels of the CPU runtime as one text, with the parts that a network needs.

The runtime compiles ``conv.c`` once per vector width and arithmetic, and ``ops.c``. In one file their names would collide, so
macros rename what each of these units defines, and are removed after it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from ..cpu import abi
from ..cpu.build import SOURCES
from ..cpu.instruction_sets import HALF_LANES, InstructionSet

LOCAL_HEADERS = ("vectors.h", "values.h", "windows.h")
_INCLUDE = re.compile(r'^#include\s+(?:"([^"]+)"|<([^>]+)>|(ISA_HEADER)).*\n', re.M)
_MACRO = re.compile(r"^#\s*define\s+(\w+)", re.M)
_FUNCTION = re.compile(r"^(?:INLINE|static)\s[^;={}]*?\b(?!sp_)(\w+)\([^;]*?\)\s*\{", re.M)
_TYPE = re.compile(r"^typedef\s[^;{}()]*?\b(\w+)\s*;", re.M)
_ATTRIBUTE = re.compile(r"__attribute__\(\(.*?\)\)(?=[ ;])")
_CHOOSER = re.compile(r"^typedef Kernel \(\*(\w+)\)", re.M)


# Vectors are passed only to functions that are inlined, and a network does not use all functions.
PRAGMAS = '#pragma GCC diagnostic ignored "-Wpsabi"\n#pragma GCC diagnostic ignored "-Wunused-function"\n'


@dataclass(frozen=True)
class Tile:
    """A tile of a convolution, as in conv.c."""

    rows: int
    columns: int
    step: int

    @staticmethod
    def of(index: int) -> Tile:
        """The tile with this index, see ``conv.c``."""
        rest, columns = divmod(index, 32)
        step, rows = divmod(rest, 4)
        return Tile(1 << rows, columns, step + 1)

    def __str__(self) -> str:
        return f"F({self.rows}, {self.columns}, {self.step})"


Variant = tuple[int, int]  # lanes, and the type of the numbers: one of abi.TYPES
SUFFIXES = {abi.FLOAT32: "f32", abi.QUANTUM: "i8", abi.FLOAT16: "f16"}  # of the names of kernels


def kernels(
    isa: InstructionSet,
    tiles: Mapping[Variant, Collection[int]],
    operations: Collection[int],
    activations: Collection[int] = range(len(abi.ACTIVATIONS)),
) -> str:
    """The source of the kernels: convolutions for these tiles, these operations, and these activations."""
    types = sorted({abi.FLOAT32, *(number for _, number in tiles)})
    definitions = dict(flag[2:].partition("=")[::2] for flag in isa.definitions)
    definitions |= {"LOCAL": "static", "USES(kind)": _is_one_of(operations), "APPLIES(kind)": _is_one_of(activations)}
    definitions |= {"WITH_INT8": str(int(abi.QUANTUM in types)), "WITH_FLOAT16": str(int(abi.FLOAT16 in types))}
    runtime = (SOURCES / "runtime.h").read_text()
    units = []
    for number in types:
        for lanes in HALF_LANES if number == abi.FLOAT16 else isa.lanes:
            used = tiles.get((lanes, number))
            suffix = f"{SUFFIXES[number]}_{lanes}"
            if used:
                listed = " ".join(str(Tile.of(index)) for index in sorted(used))
                arithmetic = {"QUANT": str(int(number == abi.QUANTUM)), "HALF": str(int(number == abi.FLOAT16))}
                given = {"WIDTH": str(lanes), **arithmetic, "TILES(F)": listed}
                units.append(_unit("conv.c", suffix, isa, given))
            else:
                units.append(f"static Kernel sp_kernel_{suffix}(int index) {{ return (void)index, (Kernel)0; }}\n")
    units.append(_unit("ops.c", "ops", isa, {}))
    texts = [_defines(definitions), runtime, *units]
    system = sorted({match[2] for text in texts for match in _INCLUDE.finditer(text) if match[2]} | _headers_of(isa))
    includes = "".join(f"#include <{name}>\n" for name in system)
    return f"{_guard(isa)}{PRAGMAS}{includes}" + "".join(_INCLUDE.sub("", text) for text in texts)


def _guard(isa: InstructionSet) -> str:
    """An error of the compiler, if it does not get the flags of the instruction set."""
    if not isa.macro:
        return ""
    return f'#ifndef {isa.macro}\n#error "compile this file for {isa.name}, as its first comment says"\n#endif\n'


def _is_one_of(numbers: Collection[int]) -> str:
    """The body of a macro that is 1 for these numbers."""
    assert all(number in range(32) for number in numbers)
    return f"(({sum(1 << number for number in numbers):#x} >> (kind)) & 1)"


def _headers_of(isa: InstructionSet) -> set[str]:
    return {match[2] for match in _INCLUDE.finditer(_primitives(isa)) if match[2]}


def _primitives(isa: InstructionSet) -> str:
    """The header with the primitives of an instruction set, and those that it includes."""
    return "" if isa.header is None else _expanded(isa.header, isa, set())


def _expanded(name: str, isa: InstructionSet, seen: set[str]) -> str:
    """A source with the text of the project's own headers in the place of their first ``#include``, without ``runtime.h``."""

    def include(match: re.Match[str]) -> str:
        header = match[1] or (isa.header if match[3] else None)
        if match[2]:
            return match[0]
        if header is None or header in seen or header == "runtime.h":
            return ""
        seen.add(header)
        return _expanded(header, isa, seen)

    return _INCLUDE.sub(include, (SOURCES / name).read_text())


def _unit(source: str, suffix: str, isa: InstructionSet, given: Mapping[str, str]) -> str:
    """A source with its headers, whose names end in ``suffix``, and which leaves no macro behind."""
    text = _expanded(source, isa, set())
    names = list(dict.fromkeys(_names(text)))
    macros = dict.fromkeys((*(name.partition("(")[0] for name in given), *_MACRO.findall(text)))
    renames = "".join(f"#define {name} {name}_{suffix}\n" for name in names)
    removes = "".join(f"#undef {name}\n" for name in (*names, *macros))
    return f"\n/* ---- {source}, {suffix} */\n{_defines(given)}{renames}{text}{removes}"


def _names(text: str) -> Iterator[str]:
    """The functions and types that a unit defines, except those that it names after ``KERNEL_OF``."""
    plain = _ATTRIBUTE.sub("", text)
    for pattern in (_TYPE, _FUNCTION, _CHOOSER):
        yield from pattern.findall(plain)


def _defines(macros: Mapping[str, str]) -> str:
    return "".join(f"#define {name} {value}\n" for name, value in macros.items())
