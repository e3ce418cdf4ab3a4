"""How a batch is divided into parts: a few images that run through all operations before the next ones start.

The activations of a part stay in the second-level cache, and threads that work on different parts need not wait for each other
after every operation. A part should not be too small either: all weights are read once per part, and a tile of pixels shares them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence

import numpy as np
from torch import fx

from ..lower.steps import Shape, Step
from . import abi
from .compiled import Compiled

FULL_TILE = 8  # pixels: with fewer, kernels wait for weights
ALLOWED = 1.05  # time of the products, relative to that with full tiles


def images_of_part(
    steps: Sequence[Step], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node], shapes: Mapping[fx.Node, Shape]
) -> tuple[int, int]:
    """The number of images of the batch and, as a divisor of it, that of a part. They are 1 if the batch is not to be divided.

    They do not depend on the number of threads, because the tiles of a part decide in which order float32 sums are added.
    """
    nodes = {*inputs, *outputs, *(node for step in steps for node in (step.node, *step.inputs))}
    batches = {shapes[node][0] if len(shapes[node]) > 1 else 0 for node in nodes}
    batch = max(batches, default=0)
    if len(batches) != 1 or batch < 2 or any(step.rows or step.kind == "gather" for step in steps):
        return 1, 1
    weights, activations, products = 0, 0, []
    for step in steps:
        activations += sum(math.prod(shapes[node][1:]) for node in (step.node, *step.inputs))
        if step.weight is not None:
            kept = int(np.count_nonzero(step.weight))
            weights += kept
            products.append((kept, math.prod(shapes[step.node][2:])))
    least = max(1.0, weights / max(1, activations))  # reads at most as many weights as activations
    sizes = (n for n in range(1, batch) if batch % n == 0 and n >= least and _slowdown(products, n) <= ALLOWED)
    return batch, next(sizes, batch)


def _slowdown(products: Sequence[tuple[int, int]], images: int) -> float:
    """The time of the products, of kept weights and pixels, relative to that with full tiles."""
    full = sum(kept * pixels for kept, pixels in products)
    return sum(kept * pixels * max(1.0, FULL_TILE / (images * pixels)) for kept, pixels in products) / full if full else 1.0


class Parts:
    """The parts of a batch as the kernels see them. Threads that work on different parts have an arena each."""

    def __init__(self, compiled: Compiled, parts: int, images: int, threads: int, externals: int) -> None:
        arenas = min(parts, threads) if 2 * parts >= threads else 1  # with fewer parts, all threads divide every operation
        operations = list(compiled.operations)
        self._memory = [compiled.arena.memory]
        for _ in range(arenas - 1):
            memory, distance = compiled.arena.copied()
            self._memory.append(memory)
            operations += [_moved(operation, distance) for operation in compiled.operations]
        self._operations = (abi.Op * len(operations))(*operations)
        self._scratch = (abi.External * (arenas * externals))()
        self.fields = abi.Parts(
            ctypes.addressof(self._operations),
            ctypes.addressof(self._scratch),
            *(len(compiled.operations), arenas, externals, parts, images),
            together=parts // arenas * arenas if arenas > 1 else 0,
        )

    def operation(self, number: int) -> int:
        """The address of an operation."""
        return ctypes.addressof(self._operations) + number * ctypes.sizeof(abi.Op)

    def tensors(self, part: int, whole: ctypes.Array[abi.External]) -> int:
        """The address of the tensors of a part, from those of the batch."""
        for own, external in zip(self._scratch, whole, strict=False):
            own.data = external.data + 4 * part * self.fields.images * external.image
            own.image, own.channel, own.row, own.column = external.image, external.channel, external.row, external.column
        return ctypes.addressof(self._scratch)


def _moved(operation: abi.Op, distance: int) -> abi.Op:
    """The operation in an arena that lies ``distance`` bytes after the first one."""
    out = abi.Op.from_buffer_copy(operation)
    for tensor in (out.x, out.y, out.z):
        if tensor.data:
            tensor.data += distance
    return out
