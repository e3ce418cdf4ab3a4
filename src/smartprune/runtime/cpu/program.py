"""From steps to a program: where every activation lies, which tiles every convolution is made of, and the one call."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from ...errors import SmartpruneError
from ..lower.steps import Shape, Step
from . import native
from .entries import LANES, Entries, cut

SLAB = 256 << 10  # bytes of input that one chunk of a convolution reads: they stay in the second-level cache
LIGHT = 20_000  # vector operations below which an operation is not shared between threads
ALIGN = 64
CPU = torch.device("cpu")
MOST_ELEMENTS = 2**31 - 1  # places are 32-bit numbers


class Misfit(Exception):  # noqa: N818 - it is no error of anybody's
    """A program was given a tensor that it was not made for."""


@dataclass(eq=False)
class Value:
    """An activation: its size, its margin, and where it lies. A part of a concatenation lies inside the whole."""

    images: int
    channels: int
    height: int
    width: int
    rows: bool = False  # for the caller it has its channels last
    margin: list[int] = field(default_factory=lambda: [0, 0, 0, 0])  # top, left, bottom, right
    whole: Value | None = None
    block: int = 0  # where it begins in the whole, in blocks of channels
    born: int = -1
    dies: int = -1
    type: int = native.FLOAT32
    scale: float = 1.0
    zero: int = 0
    address: int = 0  # bytes into the arena, of the corner of the margin

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
    def inside(self) -> int:
        """Elements from the corner of the margin to the first pixel."""
        return self.margin[0] * self.row + self.margin[1] * LANES

    @property
    def elements(self) -> int:
        return self.images * self.image


def size(shape: Shape, rows: bool) -> tuple[int, int, int, int]:
    """A tensor's size as (images, channels, height, width)."""
    if rows:
        return 1, shape[-1], 1, math.prod(shape[:-1])
    images, channels, height, width = (*shape, 1, 1)[:4]
    return images, channels, height, width


class Program:
    """A stretch of the network that runs in one call. Not for two threads at once: it has one arena."""

    def __init__(
        self,
        steps: Sequence[Step],
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        shapes: Mapping[fx.Node, Shape],
        library: native.Library,
        threads: int,
        packed: dict[Any, Any],
        ranges: Mapping[fx.Node, tuple[float, float]] | None = None,
    ) -> None:
        self.library, self.threads, self.packed = library, threads, packed
        self.inputs, self.outputs = list(inputs), list(outputs)
        self.names: list[str] = []
        self._held: list[Any] = []  # arrays that the operations point to
        self._light: list[bool] = []
        self._ops: list[native.Op] = []
        self.values: dict[fx.Node, Value] = {}
        rows = {node for step in steps if step.rows for node in (step.node, *step.inputs)}
        for node in (*inputs, *(step.node for step in steps)):
            self.values[node] = Value(*size(shapes[node], node in rows), rows=node in rows)
        self.shapes = {node: shapes[node] for node in (*inputs, *outputs)}
        if ranges is not None:
            from .quantize import assign  # only int8 needs it

            assign(self.values, steps, ranges)
        self._place(steps)
        for port, node in enumerate(inputs):
            self._add("import", str(node), y=self.values[node], port=port)
        for step in steps:
            self._emit(step)
        for port, node in enumerate(outputs):
            self._add("export", str(node), x=self.values[node], port=len(inputs) + port)
        self._finish()

    # ---- where everything lies

    def _place(self, steps: Sequence[Step]) -> None:
        values = self.values
        last = len(steps)
        for step_number, step in enumerate(steps):
            y = values[step.node]
            y.born = step_number
            for source in step.inputs:
                values[source].dies = step_number
            if step.kind in ("conv", "depthwise"):
                x, k = values[step.inputs[0]], step.window
                need = (
                    k["ph"],
                    k["pw"],
                    (y.height - 1) * k["sh"] + (k["kh"] - 1) * k["dh"] + 1 - k["ph"] - x.height,
                    (y.width - 1) * k["sw"] + (k["kw"] - 1) * k["dw"] + 1 - k["pw"] - x.width,
                )
                x.margin = [max(a, b) for a, b in zip(x.margin, need, strict=True)]
        for node in self.outputs:
            values[node].dies = last
        made = {step.node for step in steps if step.kind != "cat"}
        for step in steps:
            if step.kind == "cat":
                self._nest(step, made)
        for root in {id(v.root): v.root for v in values.values()}.values():
            parts = [v for v in values.values() if v.root is root]
            margin = [max(v.margin[i] for v in parts) for i in range(4)]
            for v in parts:
                v.margin = margin
            root.born, root.dies = min(v.born for v in parts), max(v.dies for v in parts)
        self._slots(steps)

    def _nest(self, step: Step, made: set[fx.Node]) -> None:
        """Lets the parts of a concatenation lie where they will be read, if each begins at a block's border."""
        whole, at = self.values[step.node], 0
        for source in step.inputs:
            part = self.values[source]
            alike = (part.type, part.scale, part.zero) == (whole.type, whole.scale, whole.zero)
            if at % LANES == 0 and part.whole is None and source in made and alike and step.inputs.count(source) == 1:
                part.whole, part.block = whole, at // LANES
            at += part.channels

    def _slots(self, steps: Sequence[Step]) -> None:
        """Gives every value a place. Values of one geometry share places, so that a margin once zero stays zero."""
        free: dict[tuple[int, ...], list[int]] = {}
        top = 0
        roots = sorted({id(v): v.root for v in self.values.values()}.values(), key=lambda v: v.born)
        roots = list({id(v): v for v in roots}.values())
        ends: dict[int, list[Value]] = {}
        for v in roots:
            ends.setdefault(v.dies, []).append(v)

        def key(v: Value) -> tuple[int, ...]:
            return (v.images, v.blocks, v.height, v.width, *v.margin, v.type, v.zero)

        done: set[int] = set()
        moment = -1
        for v in roots:
            while moment < v.born:  # what was last read before this moment is free
                for old in ends.get(moment, []):
                    if id(old) not in done:
                        free.setdefault(key(old), []).append(old.address)
                        done.add(id(old))
                moment += 1
            if 0 <= v.born < len(steps) and steps[v.born].adding != "none" and self.values[steps[v.born].node] is v:
                side = self.values[steps[v.born].inputs[-1]].root  # its last reader may write over it, number by number
                others = {id(self.values[s].root) for s in steps[v.born].inputs[:-1]}
                alone = side is self.values[steps[v.born].inputs[-1]] and id(side) not in others and id(side) not in done
                if alone and side.dies == v.born and key(side) == key(v):
                    v.address = side.address
                    done.add(id(side))
                    continue
            if places := free.get(key(v)):
                v.address = places.pop()
            else:
                if v.elements > MOST_ELEMENTS:
                    raise SmartpruneError(f"accelerate: an activation of {v.elements:,} numbers is too large; use a smaller batch")
                v.address = top
                top += -(-v.elements * self._bytes(v) // ALIGN) * ALIGN + ALIGN
        memory = np.zeros(top + 2 * ALIGN, np.uint8)
        self._held.append(memory)
        self._base = -(-memory.ctypes.data // ALIGN) * ALIGN
        for v in roots:
            if v.zero:  # the margin means zero too
                kind = np.uint8 if self._bytes(v) == 1 else np.uint16
                start = v.address + self._base - memory.ctypes.data
                memory[start : start + v.elements * self._bytes(v)].view(kind)[:] = v.zero
        self.arena = top

    def _bytes(self, v: Value) -> int:
        return 4 if v.type == native.FLOAT32 else self.library.quantum_bytes

    def _tensor(self, v: Value) -> native.Tensor:
        at = v.inside + v.block * v.plane
        w = v.whole
        while w is not None:
            at += w.block * w.plane
            w = w.whole
        return native.Tensor(
            self._base + v.root.address + at * self._bytes(v),
            *(v.image, v.plane, v.row),
            *(v.images, v.blocks, v.height, v.width, v.channels, v.type),
            *(v.scale, v.zero),
        )

    # ---- operations

    def _hold(self, array: Any) -> int:
        """The address of an array, which lives as long as the program."""
        array = np.ascontiguousarray(array)
        self._held.append(array)
        return int(array.ctypes.data)

    def _add(
        self,
        kind: str,
        name: str,
        x: Value | None = None,
        y: Value | None = None,
        z: Value | None = None,
        work: int = 0,
        **more: Any,
    ) -> None:
        op = native.Op(kind=native.KIND[kind], low=-math.inf, high=math.inf)
        for key, value in (("x", x), ("y", y), ("z", z)):
            if value is not None:
                setattr(op, key, self._tensor(value))
        main = y or x
        assert main is not None
        op.items = main.images * main.blocks
        for key, value in more.items():
            setattr(op, key, value)
        work = work or main.images * main.blocks * main.height * main.width * max(1, op.kh * op.kw)
        self._light.append(work < LIGHT)
        self._ops.append(op)
        self.names.append(f"{kind} {name}")

    def _emit(self, step: Step) -> None:
        x, y = self.values[step.inputs[0]], self.values[step.node]
        z = self.values[step.inputs[-1]] if len(step.inputs) > 1 else None
        a = step.activation
        common: dict[str, Any] = {"activation": native.ACTIVATION[a.name], "low": a.low, "high": a.high, "slope": a.slope}
        common |= step.window
        name = str(step.node)
        if step.kind == "conv":
            self._conv(step, x, y, z, common)
        elif step.kind == "depthwise":
            assert step.weight is not None
            assert step.bias is not None
            _, kh, kw = step.weight.shape
            weight = np.zeros((y.blocks * LANES, kh * kw), np.float32)
            weight[: y.channels] = step.weight.reshape(y.channels, -1)
            bias, scale = padded(step.bias, y.blocks * LANES), 0
            if x.type == native.QUANTUM:
                from .quantize import weight_scales

                steps_of = padded(weight_scales(step.weight), y.blocks * LANES, 1.0)
                weight = np.rint(weight / steps_of[:, None]).astype(np.float32)
                bias = (bias - weight.sum(axis=1, dtype=np.float64) * steps_of * (x.scale * x.zero)).astype(np.float32)
                scale = self._hold(steps_of * np.float32(x.scale))
            turned = weight.reshape(y.blocks, LANES, kh * kw).transpose(0, 2, 1)
            self._add("depthwise", name, x, y, weight=self._hold(turned), bias=self._hold(bias), scale=scale, **common)
        elif step.kind == "affine":
            arrays: dict[str, Any] = {
                "scale": self._hold(padded(step.scale, y.blocks * LANES)),
                "bias": self._hold(padded(step.bias, y.blocks * LANES)),
            }
            self._add("affine", name, x, y, **arrays, **common)
        elif step.kind == "cat":
            at = 0
            for source in step.inputs:
                part = self.values[source]
                if part.whole is not y:
                    self._copy(name, part, y, at)
                at += part.channels
        elif step.kind == "alias":
            self._copy(name, x, y, 0)
        elif step.kind == "bilinear":
            self._add("bilinear", name, x, y, scale=self._hold(step.scale), **common)
        else:
            self._add(step.kind, name, x, y, z, **common)

    def _copy(self, name: str, part: Value, y: Value, at: int) -> None:
        """Copies a value into the channels of another that begin at ``at``."""
        if at % LANES == 0 and (part.channels % LANES == 0 or at + part.channels == y.channels):
            view = Value(y.images, part.channels, y.height, y.width, margin=y.margin, whole=y, block=at // LANES)
            view.type, view.scale, view.zero = y.type, y.scale, y.zero
            self._add("copy", name, part, view)
        else:
            self._add("shift", name, part, y, port=at, items=part.images)

    def _conv(self, step: Step, x: Value, y: Value, z: Value | None, common: dict[str, Any]) -> None:
        assert step.weight is not None
        assert step.bias is not None
        per_word, more = 1, dict(common)
        if x.type == native.QUANTUM:
            from .quantize import pack

            q = pack(step, x, y, z, self.library, self.packed)
            entries, words, bias = q.entries, q.words, q.bias
            per_word = 4 // self.library.quantum_bytes
            lanes = entries.groups * entries.lanes
            more |= {"low": q.low, "high": q.high, "scale": self._hold(padded(q.scale, lanes))}
            more["begin"] = self._hold(padded(q.begin, lanes))
        else:
            key = (step.node, "float32")
            if key not in self.packed:
                self.packed[key] = cut(step.weight, self.library.lanes)
            entries, bias = self.packed[key], step.bias
            words = entries.values
        k = step.window
        channel = entries.channel.astype(np.int64)
        offset = entries.row * (k["dh"] * x.row) + entries.column * (k["dw"] * LANES)
        offset = offset + channel // LANES * x.plane + channel % LANES
        runs, chunks, segments = self._tiles(step, x, y, z)
        parts = self._parts(len(chunks) - 1, entries)
        work = int(entries.cost * y.images * y.height * y.width) + y.images * y.blocks * y.height * y.width
        more |= {
            "adding": native.ADDING[step.adding],
            "inner": entries.inner // per_word,
            "lanes": entries.lanes,
            "groups": entries.groups,
            "groups_per_item": -(-entries.groups // parts),
            "chunks": len(chunks) - 1,
            "start": self._hold(entries.start),
            "offset": self._hold((offset // per_word).astype(np.int32)),
            "weight": self._aligned(words),
            "bias": self._hold(padded(bias, entries.groups * entries.lanes)),
            "run": self._hold(np.asarray(runs, np.int32)),
            "chunk": self._hold(np.asarray(chunks, np.int32)),
            **{key: self._hold(array) for key, array in segments.items()},
        }
        self._add("conv", str(step.node), x, y, z, work=work, **more)
        op = self._ops[-1]
        op.items = op.chunks * -(-op.groups // op.groups_per_item)

    def _aligned(self, array: Any) -> int:
        """Like :meth:`_hold`, on a cache line: a vector of weights is one line."""
        raw = np.empty(array.nbytes + ALIGN, np.uint8)
        start = -raw.ctypes.data % ALIGN
        raw[start : start + array.nbytes] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        self._held.append(raw)
        return int(raw.ctypes.data) + start

    def _parts(self, chunks: int, entries: Entries) -> int:
        """Into how many parts the groups are divided so that all threads find work to the end."""
        if self.threads == 1:
            return 1
        return min(entries.groups, max(1, -(-6 * self.threads // chunks)))

    def _tiles(
        self, step: Step, x: Value, y: Value, z: Value | None
    ) -> tuple[list[tuple[int, int, int]], list[int], dict[str, Any]]:
        """The tiles of a convolution: runs of equal ones, the first run of every chunk, and where all stretches begin."""
        k = step.window
        most = self.library.pixels
        widest = most if k["sw"] == 1 else min(most, 8) if k["sw"] == 2 else 1
        pieces = -(-y.width // widest)
        edges = [y.width * i // pieces for i in range(pieces + 1)]
        tall = max(t for t in (8, 4, 2, 1) if t == 1 or t * -(-y.width // pieces) <= most)
        row_bytes = x.blocks * x.width * LANES * self._bytes(x) * k["sh"]
        per_chunk = max(tall, SLAB // row_bytes // tall * tall)
        rows = y.images * y.height
        if self.threads > 1:
            per_chunk = min(per_chunk, max(tall, -(-rows // (4 * self.threads)) // tall * tall))
        image, row = np.divmod(np.arange(rows, dtype=np.int64), y.height)
        places = {
            "in_": (image * x.image + (row * k["sh"] - k["ph"]) * x.row - k["pw"] * LANES, k["sw"] * LANES),
            "out": (image * y.image + row * y.row, LANES),
        }
        if step.adding != "none":
            assert z is not None
            places["side"] = (image * z.image + row * z.row, LANES)
        stride = k["sw"] if k["sw"] <= 2 else 1
        runs: list[tuple[int, int, int]] = []
        chunks = [0]
        order: list[Any] = []  # (row, left edge) of every stretch
        count = 0
        lefts, widths = np.asarray(edges[:-1]), np.diff(edges)
        for first in range(0, rows, per_chunk):
            last = min(rows, first + per_chunk)
            while first < last:  # bands of rows, each from left to right, so that neighbours in memory follow each other
                height = max(t for t in (8, 4, 2, 1) if t <= min(tall, last - first))
                equal = bool((widths == widths[0]).all())
                bands = (last - first) // height if equal else 1
                for some in [slice(0, pieces)] if equal else [widths == w for w in np.unique(widths)]:
                    left = lefts[some]
                    row_of = np.arange(first, first + bands * height).reshape(bands, 1, height)
                    order.append(np.broadcast_arrays(row_of, left[None, :, None]))
                    index = ((stride - 1) * 4 + height.bit_length() - 1) * 32 + int(widths[some][0])
                    runs.append((index, count, bands * len(left)))
                    count += bands * len(left) * height
                first += bands * height
            chunks.append(len(runs))
        row_at = np.concatenate([r.reshape(-1) for r, _ in order])
        left_at = np.concatenate([c.reshape(-1) for _, c in order])
        segments = {name: (begin[row_at] + left_at * pixel).astype(np.int32) for name, (begin, pixel) in places.items()}
        return runs, chunks, segments

    # ---- running

    def _finish(self) -> None:
        self._array = (native.Op * len(self._ops))(*self._ops)
        self._flags = np.asarray(self._light, np.uint8)
        self._external = (native.External * (len(self.inputs) + len(self.outputs)))()
        self._call = self.library.code.sp_run
        self._fixed = (ctypes.addressof(self._array), len(self._ops), self._flags.ctypes.data, ctypes.addressof(self._external))
        self._sources = [(port, torch.Size(self.shapes[node]), self.values[node].rows) for port, node in enumerate(self.inputs)]
        self._targets = [(len(self.inputs) + i, self.shapes[node], self.values[node].rows) for i, node in enumerate(self.outputs)]

    def run(self, pool: int, tensors: Sequence[torch.Tensor], seconds: Any = None) -> list[torch.Tensor]:
        """Computes the outputs from float32 tensors on the CPU, of any strides. Raises :class:`Misfit` if they are anything
        else than what the program was made for: the kernels read as much as they were told to."""
        external = self._external
        alive = []  # views must outlive the call
        for (port, shape, rows), tensor in zip(self._sources, tensors, strict=True):
            if not fits(tensor, shape):
                raise Misfit
            if tensor.is_neg():  # its memory holds the numbers without their sign
                tensor = tensor.resolve_neg()
                alive.append(tensor)
            if rows:
                tensor = as_map(tensor)
                alive.append(tensor)
            point(external[port], tensor)
        out = []
        for port, size, rows in self._targets:
            tensor = torch.empty(size, dtype=torch.float32, device=CPU)  # whatever the default is
            out.append(tensor)
            point(external[port], as_map(tensor) if rows else tensor)
        self._call(pool, *self._fixed, None if seconds is None else seconds.ctypes.data)
        return out


def fits(tensor: Any, shape: Shape) -> bool:
    """Whether a value is an ordinary float32 tensor of this shape in memory."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype is torch.float32
        and tensor.shape == shape
        and tensor.is_cpu
        and tensor.layout is torch.strided
    )


def as_map(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with its channels last as one image of one row."""
    return tensor.reshape(1, -1, tensor.shape[-1]).transpose(1, 2).unsqueeze(2)


def point(place: native.External, tensor: torch.Tensor) -> None:
    place.data = tensor.data_ptr()
    place.image, place.channel, place.row, place.column = (*tensor.stride(), 0, 0)[:4]


def padded(array: Any, length: int, fill: float = 0.0) -> Any:
    out = np.full(length, fill, np.asarray(array).dtype)
    out[: len(array)] = array
    return out
