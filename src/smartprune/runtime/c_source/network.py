"""A compiled network as C: its arrays, its operations, and the function that runs them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from ..cpu import abi
from ..cpu.compiled import Compiled, as_map
from ..cpu.instruction_sets import InstructionSet
from ..lower.steps import Shape
from .kernels import Variant, kernels

PER_LINE = 16
RULE = "/* " + "-" * 100 + " */"


@dataclass(frozen=True)
class Network:
    """A network that is compiled for an instruction set, and the shapes and nodes of its inputs and outputs."""

    compiled: Compiled
    isa: InstructionSet
    inputs: Sequence[tuple[fx.Node, Shape]]
    outputs: Sequence[tuple[fx.Node, Shape]]

    @property
    def memory(self) -> int:
        """Bytes of the activations."""
        return self.compiled.arena.size

    @property
    def constants(self) -> int:
        """Bytes of the weights and tables."""
        arrays = _Arrays(self.compiled, self.isa)
        for op in self.compiled.operations:
            arrays.operation(op, None)
        return arrays.bytes

    def source(self, name: str) -> str:
        """The text of the C file, after its first comment and the include of its header."""
        operations = {op.kind for op in self.compiled.operations}
        arrays = _Arrays(self.compiled, self.isa)
        table = "".join(f"  {arrays.operation(op, self.compiled.layers.get(i))}\n" for i, op in enumerate(self.compiled.operations))
        return "".join(
            (
                f"{RULE}\n/* Kernels for {self.isa.name}. */\n\n",
                kernels(self.isa, self.tiles(), operations, {op.activation for op in self.compiled.operations}),
                f"\n{RULE}\n/* Weights and tables. */\n\n",
                *arrays.definitions(),
                f"\n{RULE}\n/* The network. */\n\n",
                f"static char arena[{self.memory or 1}] __attribute__((aligned(64)));\n\n",
                f"static const Op operations[{len(self.compiled.operations)}] = {{\n{table}}};\n\n",
                self._function(name),
            )
        )

    def header(self, name: str, comment: str) -> str:
        """The text of the header."""
        upper = name.upper()
        sizes = [
            *zip(_names("input", self.inputs), self.inputs, strict=True),
            *zip(_names("output", self.outputs), self.outputs, strict=True),
        ]
        macros = "".join(
            f"#define {upper}_{label.upper()}_SIZE {int(np.prod(shape))} /* floats, in the order {' x '.join(map(str, shape))} */\n"
            for label, (_, shape) in sizes
        )
        return (
            f'{comment}#ifndef {upper}_H\n#define {upper}_H\n\n{macros}\n#ifdef __cplusplus\nextern "C" {{\n#endif\n\n'
            "/* Computes the outputs. Returns 0, or -1 if an argument is NULL. Memory is static: calls must not overlap. */\n"
            f"{self.signature(name)};\n\n#ifdef __cplusplus\n}}\n#endif\n#endif\n"
        )

    def tiles(self) -> dict[Variant, set[int]]:
        """The kernels of the convolutions: tile numbers by lanes and arithmetic."""
        out: dict[Variant, set[int]] = {}
        arrays = _Arrays(self.compiled, self.isa)
        for op in self.compiled.operations:
            if op.kind == abi.OPERATION["conv"]:
                runs = arrays.array_at(op.run).reshape(-1, 3)
                out.setdefault((op.lanes, op.x.type), set()).update(int(index) for index in runs[:, 0])
        return out

    def signature(self, name: str) -> str:
        arguments = [f"const float *{label}" for label in _names("input", self.inputs)]
        arguments += [f"float *{label}" for label in _names("output", self.outputs)]
        return f"int {name}_run({', '.join(arguments)})"

    def _function(self, name: str) -> str:
        labels = [*_names("input", self.inputs), *_names("output", self.outputs)]
        tensors = []
        for label, (node, shape) in zip(labels, [*self.inputs, *self.outputs], strict=True):
            tensor = as_map(torch.empty(shape, device="meta"), self.compiled.values[node].rows)
            image, channel, row, column = (*tensor.stride(), 0, 0)[:4]
            tensors.append(f"    {{{label}, {image}, {channel}, {row}, {column}}},\n")
        return (
            f"{self._margins()}{self.signature(name)} {{\n"
            f"  const External external[{len(labels)}] = {{\n{''.join(tensors)}  }};\n"
            f"  for (int i = 0; i < {len(labels)}; i++)\n    if (!external[i].data) return -1;\n"
            f"{'  fill_margins();' + chr(10) if self.compiled.arena.margins else ''}"
            f"  for (int i = 0; i < {len(self.compiled.operations)}; i++)\n"
            "    for (int item = 0; item < operations[i].items; item++) sp_work(&operations[i], item, external);\n"
            "  return 0;\n}\n"
        )

    def _margins(self) -> str:
        """The function that writes the zero points of quantized activations to their margins; empty if all are zero."""
        margins = self.compiled.arena.margins
        if not margins:
            return ""
        rows = "".join(f"  {{{address}, {elements}, {zero}}},\n" for address, elements, zero in margins)
        return (
            f"static const int32_t margins[{len(margins)}][3] = {{ /* position in the arena, quanta, zero point */\n{rows}}};\n\n"
            "static void fill_margins(void) {\n  static int done;\n  if (done) return;\n"
            f"  for (int i = 0; i < {len(margins)}; i++)\n"
            "    for (int k = 0; k < margins[i][1]; k++) ((quantum *)(arena + margins[i][0]))[k] = (quantum)margins[i][2];\n"
            "  done = 1;\n}\n\n"
        )


def _names(kind: str, nodes: Sequence[object]) -> list[str]:
    return [kind] if len(nodes) == 1 else [f"{kind}{number}" for number in range(len(nodes))]


class _Arrays:
    """The arrays of a compiled network, found by their addresses."""

    def __init__(self, compiled: Compiled, isa: InstructionSet) -> None:
        self._arena, self._isa = compiled.arena, isa
        self._sorted = sorted(compiled.arrays, key=lambda array: int(array.ctypes.data))
        self._starts = [int(array.ctypes.data) for array in self._sorted]
        self._numbers: dict[int, int] = {}  # address -> number of a definition
        self._types: list[tuple[Any, str]] = []  # what is defined, and its C type

    def array_at(self, address: int) -> Any:
        """The rest of the array from this address on."""
        index = bisect_right(self._starts, address) - 1
        array = self._sorted[index]
        flat = array.reshape(-1)
        offset = address - self._starts[index]
        assert 0 <= offset <= flat.nbytes
        return flat[offset // flat.itemsize :]

    def operation(self, op: abi.Op, layer: str | None) -> str:
        """An operation as an initializer."""
        fields = [f".kind = {abi.OPERATIONS[op.kind].upper()}"]
        for name in OP_FIELDS[1:]:
            value = getattr(op, name)
            if isinstance(value, abi.Tensor):
                if value.data:
                    fields.append(f".{name} = {self._tensor(value)}")
            elif name in POINTERS:
                if value:
                    fields.append(f".{name} = {self._reference(name, value, op)}")
            elif name == "activation":
                fields.append(f".activation = {abi.ACTIVATIONS[value].upper()}")
            elif name == "addition":
                fields.append(f".addition = {abi.ADDITIONS[value].upper()}")
            elif value:
                fields.append(f".{name} = {_number(value)}")
        return f"{{{', '.join(fields)}}},{'' if layer is None else f' /* {layer} */'}"

    def _tensor(self, tensor: abi.Tensor) -> str:
        values = [getattr(tensor, name) for name in TENSOR_FIELDS[1:]]
        values[-3] = abi.TYPES[values[-3]].upper()
        shown = ", ".join(value if isinstance(value, str) else _number(value) for value in values)
        return f"{{arena + {tensor.data - self._arena.base}, {shown}}}"

    def _reference(self, field: str, address: int, op: abi.Op) -> str:
        if address not in self._numbers:
            array, kind = self.array_at(address), POINTERS[field]
            if field == "weight":
                stored = op.x.type if op.inner > 0 else abi.FLOAT32
                kind, dtype = WEIGHTS[stored]
                if array.dtype == np.uint8:  # aligned, with bytes after the end
                    array = array[: self._weight_bytes(op)]
                array = array.reshape(-1).view(dtype)
            self._numbers[address] = len(self._types)
            self._types.append((array, kind))
        name = f"data{self._numbers[address]}"
        return f"(const char *){name}" if field == "weight" else name

    def _weight_bytes(self, op: abi.Op) -> int:
        entries = int(self.array_at(op.group_start)[op.groups])
        word = {abi.FLOAT32: 4, abi.FLOAT16: 2, abi.QUANTUM: self._isa.word_bytes}[op.x.type]
        return int(entries * op.inner * op.lanes * word)

    @property
    def bytes(self) -> int:
        """The size of all arrays that operations refer to."""
        return sum(int(array.nbytes) for array, _ in self._types)

    def definitions(self) -> Iterator[str]:
        """The definitions of all arrays that operations refer to."""
        for number, (array, kind) in enumerate(self._types):
            yield f"static const {kind} data{number}[{max(1, array.size)}] __attribute__((aligned(64))) = {{\n"
            yield from _lines(array, kind)
            yield "};\n"


OP_FIELDS, TENSOR_FIELDS = ([field[0] for field in structure._fields_] for structure in (abi.Op, abi.Tensor))
POINTERS = {
    **dict.fromkeys(
        ("group_start", "entry_offset", "initial_sum", "run", "chunk_start", "x_start", "y_start", "z_start"), "int32_t"
    ),
    **dict.fromkeys(("bias", "scale"), "float"),
    "weight": "",
}
WEIGHTS = {  # C types, and how their values are read
    abi.FLOAT32: ("float", np.float32),
    abi.QUANTUM: ("int32_t", np.uint32),
    abi.FLOAT16: ("uint16_t", np.uint16),
}


def _lines(array: Any, kind: str) -> Iterator[str]:
    pattern = "%.9gf" if kind == "float" else "0x%x" if array.dtype in (np.uint32, np.uint16) else "%d"
    values = array.tolist() or [0]
    for start in range(0, len(values), PER_LINE):
        part = values[start : start + PER_LINE]
        if kind == "float":
            yield f"{','.join(map(_number, part))},\n"
        else:
            yield f"{','.join(pattern % value for value in part)},\n"


def _number(value: float) -> str:
    """A number as C: floats have float32 precision."""
    if isinstance(value, int):
        return str(value)
    if value != value:
        return "NAN"
    if value in (float("inf"), float("-inf")):
        return "INFINITY" if value > 0 else "-INFINITY"
    text = f"{value:.9g}"
    return f"{text if '.' in text or 'e' in text else text + '.0'}f"
