"""Where every activation lies in memory: sizes, margins, concatenations, and reuse of memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import fx

from ...errors import SmartpruneError
from ..lower.steps import Shape, Step
from . import abi
from .entries import LANES
from .instruction_sets import InstructionSet

ALIGN = 64
MOST_ELEMENTS = 2**31 - 1  # offsets are 32-bit numbers


@dataclass(eq=False)
class Value:
    """An activation: its size, its margin, and its position. A part of a concatenation lies inside the whole."""

    images: int
    channels: int
    height: int
    width: int
    rows: bool = False  # the caller's tensor has its channels in the last axis
    margin: list[int] = field(default_factory=lambda: [0, 0, 0, 0])  # top, left, bottom, right
    whole: Value | None = None
    block: int = 0  # first block of channels in the whole
    born: int = -1  # the step that writes it
    dies: int = -1  # the last step that reads it
    type: int = abi.FLOAT32
    scale: float = 1.0
    zero: int = 0
    address: int = 0  # of the corner of the margin, in bytes from the start of the arena

    @property
    def blocks(self) -> int:
        return -(-self.channels // LANES)

    @property
    def root(self) -> Value:
        return self if self.whole is None else self.whole.root

    @property
    def row(self) -> int:
        return (self.width + self.margin[1] + self.margin[3]) * LANES

    @property
    def plane(self) -> int:
        return (self.height + self.margin[0] + self.margin[2]) * self.row

    @property
    def image(self) -> int:
        return self.root.blocks * self.plane

    @property
    def first_pixel(self) -> int:
        """Elements from the corner of the margin to the first pixel."""
        return self.margin[0] * self.row + self.margin[1] * LANES

    @property
    def elements(self) -> int:
        return self.images * self.image

    @property
    def layout(self) -> tuple[int, ...]:
        """Values with equal layouts can share memory: their margins lie at the same place and hold the same number."""
        return (self.images, self.blocks, self.height, self.width, *self.margin, self.type, self.zero)


def dimensions(shape: Shape, rows: bool) -> tuple[int, int, int, int]:
    """The size of a tensor as (images, channels, height, width)."""
    if rows:
        return 1, shape[-1], 1, math.prod(shape[:-1])
    if len(shape) == 3:
        return shape[0], shape[1], 1, shape[2]
    images, channels, height, width = (*shape, 1, 1)[:4]
    return images, channels, height, width


class Arena:
    """The memory of all activations of a program."""

    def __init__(
        self, values: Mapping[fx.Node, Value], steps: Sequence[Step], outputs: Sequence[fx.Node], isa: InstructionSet
    ) -> None:
        self._isa = isa
        _set_lifetimes(values, steps, outputs)
        _set_margins(values, steps)
        _nest_concatenations(values, steps)
        roots = _merge_parts(values)
        self.size = self._assign_addresses(values, steps, roots)
        self.memory = np.zeros(self.size + 2 * ALIGN, np.uint8)
        self.base = -(-self.memory.ctypes.data // ALIGN) * ALIGN
        self.margins = sorted({(v.address, v.elements, v.zero) for v in roots if v.zero})  # zero has this value in the margin too
        for address, elements, zero in self.margins:
            start = address + self.base - self.memory.ctypes.data
            self.memory[start : start + elements * isa.quantum_bytes].view(isa.quantum)[:] = zero

    def copied(self) -> tuple[npt.NDArray[np.uint8], int]:
        """Memory of another arena, and the distance of its numbers from those of this one in bytes."""
        memory = np.zeros_like(self.memory)
        base = -(-memory.ctypes.data // ALIGN) * ALIGN
        first, other = self.base - self.memory.ctypes.data, base - memory.ctypes.data
        memory[other : other + self.size] = self.memory[first : first + self.size]
        return memory, base - self.base

    def element_bytes(self, value: Value) -> int:
        return {abi.FLOAT32: 4, abi.FLOAT16: 2, abi.QUANTUM: self._isa.quantum_bytes}[value.type]

    def tensor(self, value: Value) -> abi.Tensor:
        """The value as the kernels see it."""
        first = value.first_pixel + value.block * value.plane
        whole = value.whole
        while whole is not None:
            first += whole.block * whole.plane
            whole = whole.whole
        return abi.Tensor(
            self.base + value.root.address + first * self.element_bytes(value),
            *(value.image, value.plane, value.row),
            *(value.images, value.blocks, value.height, value.width, value.channels, value.type),
            *(value.scale, value.zero),
        )

    def _assign_addresses(self, values: Mapping[fx.Node, Value], steps: Sequence[Step], roots: Sequence[Value]) -> int:
        """Gives every value an address, and returns the size of the arena. Memory is reused only by values of the same layout,
        so margins stay zero."""
        free: dict[tuple[int, ...], list[int]] = {}
        ends: dict[int, list[Value]] = {}
        for value in roots:
            ends.setdefault(value.dies, []).append(value)
        released: set[Value] = set()
        top, step = 0, -1
        for value in roots:
            while step < value.born:
                for old in ends.get(step, []):
                    if old not in released:
                        free.setdefault(old.layout, []).append(old.address)
                        released.add(old)
                step += 1
            if (source := _overwritable(value, values, steps)) is not None and source not in released:
                value.address = source.address
                released.add(source)
            elif addresses := free.get(value.layout):
                value.address = addresses.pop()
            else:
                if value.elements > MOST_ELEMENTS:
                    raise SmartpruneError(
                        f"accelerate: an activation has {value.elements:,} numbers, which is more than {MOST_ELEMENTS:,}; "
                        "use a smaller batch"
                    )
                value.address = top
                top += -(-value.elements * self.element_bytes(value) // ALIGN) * ALIGN + ALIGN
        return top


def _set_lifetimes(values: Mapping[fx.Node, Value], steps: Sequence[Step], outputs: Sequence[fx.Node]) -> None:
    for number, step in enumerate(steps):
        values[step.node].born = number
        for source in step.inputs:
            values[source].dies = number
    for node in outputs:
        values[node].dies = len(steps)


def _set_margins(values: Mapping[fx.Node, Value], steps: Sequence[Step]) -> None:
    """Every margin is as wide as the convolutions that read the value need."""
    for step in steps:
        if step.kind in ("conv", "depthwise"):
            x, y, k = values[step.inputs[0]], values[step.node], step.window
            need = (
                k["ph"],
                k["pw"],
                (y.height - 1) * k["sh"] + (k["kh"] - 1) * k["dh"] + 1 - k["ph"] - x.height,
                (y.width - 1) * k["sw"] + (k["kw"] - 1) * k["dw"] + 1 - k["pw"] - x.width,
            )
            x.margin = [max(a, b) for a, b in zip(x.margin, need, strict=True)]


def _nest_concatenations(values: Mapping[fx.Node, Value], steps: Sequence[Step]) -> None:
    """Places the parts of a concatenation inside the result, where a part starts at a block and a step computes it."""
    computed = {step.node for step in steps if step.kind != "cat"}
    for step in steps:
        if step.kind != "cat":
            continue
        whole, channel = values[step.node], 0
        for source in step.inputs:
            part = values[source]
            same_type = (part.type, part.scale, part.zero) == (whole.type, whole.scale, whole.zero)
            once = source in computed and step.inputs.count(source) == 1
            if channel % LANES == 0 and part.whole is None and same_type and once:
                part.whole, part.block = whole, channel // LANES
            channel += part.channels


def _merge_parts(values: Mapping[fx.Node, Value]) -> list[Value]:
    """Gives all parts of a concatenation one margin and one lifetime. Returns the values that need memory, in order of birth."""
    unique = list(dict.fromkeys(value.root for value in values.values()))
    for root in unique:
        parts = [value for value in values.values() if value.root is root]
        margin = [max(part.margin[i] for part in parts) for i in range(4)]
        for part in parts:
            part.margin = margin
        root.born, root.dies = min(part.born for part in parts), max(part.dies for part in parts)
    return sorted(unique, key=lambda value: value.born)


def _overwritable(value: Value, values: Mapping[fx.Node, Value], steps: Sequence[Step]) -> Value | None:
    """The operand that the step of this value adds, if the result may overwrite it: the step is its last reader and reads every
    number just before it writes there."""
    if not 0 <= value.born < len(steps):
        return None
    step = steps[value.born]
    if step.addition == "none" or values[step.node] is not value:
        return None
    added = values[step.inputs[-1]]
    others = {values[source].root for source in step.inputs[:-1]}
    fits = added.root is added and added not in others and added.dies == value.born and added.layout == value.layout
    return added if fits else None
