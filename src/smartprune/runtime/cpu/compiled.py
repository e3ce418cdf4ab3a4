"""A part of a network as operations of the kernels, for one instruction set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, fx

from ..lower.steps import Shape, Step
from . import half, quantize
from .arena import Arena, Value, dimensions
from .emit import Emitter, Packed
from .instruction_sets import InstructionSet


class Compiled:
    """The operations, the arrays that they point to, and the memory of the activations.

    Nothing here needs the compiled kernels, so the instruction set may be that of another machine.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        shapes: Mapping[fx.Node, Shape],
        isa: InstructionSet,
        threads: int,
        packed: Packed,
        dtype: str = "float32",
        ranges: Mapping[fx.Node, tuple[float, float]] | None = None,
    ) -> None:
        rows = {node for step in steps for node in step.rows_values}
        rows |= {node for node in inputs if len(shapes[node]) > 4}  # that are gathered from
        self.values: dict[fx.Node, Value] = {}
        for node in (*inputs, *(step.node for step in steps)):
            self.values[node] = Value(*dimensions(shapes[node], node in rows), rows=node in rows)
        if dtype != "float32":
            assert ranges is not None
            if dtype == "int8":
                quantize.assign_types(self.values, steps, ranges, isa)
            else:
                half.assign_types(self.values, steps, ranges)
        self.arena = Arena(self.values, steps, outputs, isa)
        emitter = Emitter(self.values, self.arena, isa, threads, packed)
        self.layers: dict[int, str] = {}  # number of an operation -> the module of the network whose weight it has
        for number, node in enumerate(inputs):
            emitter.emit_import(node, number)
        for step in steps:
            emitted = len(emitter.operations)
            emitter.emit(step)
            if step.weight is not None and step.layer:
                self.layers |= dict.fromkeys(range(emitted, len(emitter.operations)), step.layer)
        for number, node in enumerate(outputs, len(inputs)):
            emitter.emit_export(node, number)
        self.operations, self.light, self.arrays = emitter.operations, emitter.light, emitter.arrays


def as_map(tensor: Tensor, rows: bool) -> Tensor:
    """A tensor of the caller with the axes of a map. ``rows``: its last axis holds the channels of one image with one row."""
    if rows:
        return tensor.reshape(1, -1, tensor.shape[-1]).transpose(1, 2).unsqueeze(2)
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor
