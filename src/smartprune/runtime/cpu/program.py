"""A part of a network that runs in one call into C."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ...core.memory import NoMemoryError, address_of
from ..lower.steps import Shape, Step
from . import abi
from .build import Library
from .compiled import Compiled, as_map
from .emit import Packed
from .parts import Parts, images_of_part

CPU = torch.device("cpu")
WHERE = "accelerated model"  # in errors


class InputMismatch(Exception):  # noqa: N818 - control flow: the caller then runs the nodes in torch
    """A program was called with a tensor of another kind, shape, dtype or device than it was compiled for."""


class Program:
    """A part of a network that runs in one call. It has one arena, so only one thread may run it at a time."""

    def __init__(
        self,
        steps: Sequence[Step],
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        shapes: Mapping[fx.Node, Shape],
        library: Library,
        threads: int,
        packed: Packed,
        dtype: str = "float32",
        ranges: Mapping[fx.Node, tuple[float, float]] | None = None,
    ) -> None:
        self.inputs, self.outputs = list(inputs), list(outputs)
        batch, images = images_of_part(steps, inputs, outputs, shapes)
        part = {node: (images, *shape[1:]) for node, shape in shapes.items()} if images < batch else shapes
        compiled = Compiled(steps, inputs, outputs, part, library.isa, threads, packed, dtype, ranges)
        self._compiled, self.layers = compiled, compiled.layers
        self._count = len(compiled.operations)
        self._parts = Parts(compiled, batch // images, images, threads, len(inputs) + len(outputs))
        self._light = np.asarray(compiled.light, np.uint8)
        self._external = (abi.External * (len(inputs) + len(outputs)))()
        self._run_operations = library.code.sp_run
        self._run_parts: Callable[[int, int, int, int], None] = library.code.sp_run_parts
        self._arguments = ctypes.addressof(self._parts.fields), self._light.ctypes.data, ctypes.addressof(self._external)
        self._sources = [(i, torch.Size(shapes[node]), compiled.values[node].rows) for i, node in enumerate(inputs)]
        self._targets = [(i, shapes[node], compiled.values[node].rows) for i, node in enumerate(outputs, len(inputs))]

    def run(self, pool: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Computes the outputs from float32 tensors on the CPU with arbitrary strides.

        Raises :class:`InputMismatch` for any other tensor, because the kernels do not check what they read, and an error for a
        tensor whose memory was freed.
        """
        try:
            _views, outputs = self._set_externals(tensors)  # views must exist until the call returns
        except NoMemoryError:
            raise InputMismatch from None
        self._run_parts(pool, *self._arguments)
        return outputs

    @contextmanager
    def timer(self) -> Iterator[list[int]]:
        """While it is open, operations run one by one, and the list has the nanoseconds of the fastest run of each, for the whole
        batch."""
        run, fastest = self._run_parts, [sys.maxsize] * self._count

        def timed(pool: int, _: int, light: int, external: int) -> None:
            times = [0] * self._count
            for part in range(self._parts.fields.parts):
                tensors = self._parts.tensors(part, self._external)
                for i in range(self._count):
                    start = time.perf_counter_ns()
                    self._run_operations(pool, self._parts.operation(i), 1, light + i, tensors)
                    times[i] += time.perf_counter_ns() - start
            fastest[:] = map(min, fastest, times)

        self._run_parts = timed
        try:
            yield fastest
        finally:
            self._run_parts = run

    def _set_externals(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Stores the addresses of inputs and new outputs for the kernels. Returns the views of inputs that it made, and the
        outputs."""
        external = self._external
        views = []
        for (number, shape, rows), tensor in zip(self._sources, tensors, strict=True):
            if not _matches(tensor, shape):
                raise InputMismatch
            if rows or tensor.is_neg():
                address_of(tensor, WHERE)  # torch may copy it below
            if tensor.is_neg():  # its memory holds the negated numbers
                tensor = tensor.resolve_neg()
                views.append(tensor)
            if rows or len(shape) == 3:
                tensor = as_map(tensor, rows)
                views.append(tensor)
            _set_external(external[number], tensor, address_of(tensor, WHERE))
        outputs = []
        for number, size, rows in self._targets:
            tensor = torch.empty(size, dtype=torch.float32, device=CPU)  # whatever the default dtype and device are
            outputs.append(tensor)
            if type(tensor) is not Tensor or not tensor.data_ptr():  # a mode of torch replaces new tensors
                raise InputMismatch
            if rows or len(size) == 3:
                tensor = as_map(tensor, rows)
            _set_external(external[number], tensor, tensor.data_ptr())
        return views, outputs


def _matches(tensor: Any, shape: Shape) -> bool:
    """Whether a value is an ordinary float32 tensor of this shape in CPU memory."""
    return (
        isinstance(tensor, Tensor)
        and tensor.dtype is torch.float32
        and tensor.shape == shape
        and tensor.is_cpu
        and tensor.layout is torch.strided
    )


def _set_external(external: abi.External, tensor: Tensor, address: int) -> None:
    external.data = address
    external.image, external.channel, external.row, external.column = (*tensor.stride(), 0, 0)[:4]
