"""Convolutions and linear layers on a GPU: dense ones in torch, and sparse ones that skip zero blocks with a Triton kernel."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import text
from ...errors import SmartpruneError
from ..lower.steps import IDENTITY, Activation, Shape, Step

DEEP = 8  # input channels of a block of the kernel: 16 bytes of half-precision activations
WIDE = 16  # output channels of a row of blocks: the least that a matrix unit takes
MOST_PLACES = 63  # most kernel positions: a mask of 64 bits holds one bit each, and one for padding
ADDITION = {"none": 0, "before": 1, "after": 2}
TORCH_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # the kernel does not compute these
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "tanh": torch.tanh,
    "mish": F.mish,
}


@dataclass(frozen=True)
class Tile:
    """The work of one program of the kernel: output pixels, blocks per matrix product, warps, and rows of output blocks, which
    it computes one after the other from the same pixels in the L1 cache."""

    pixels: int
    step: int
    warps: int
    rows: int


TILES = (*(Tile(64, 4, 2, rows) for rows in (1, 2, 4, 8)), Tile(128, 4, 4, 8))  # each was the fastest for some layer on an H200


class KeptBlocks:
    """The kept blocks of a weight [out, in, height, width], in the order of the kernel."""

    def __init__(self, weight: Tensor) -> None:
        out, channels, height, width = weight.shape
        self.shape = (out, channels, height, width)
        self.rows, self.columns = -(-out // WIDE), -(-channels // DEEP)
        padded = weight.new_zeros(self.rows * WIDE, self.columns * DEEP, height, width)
        padded[:out, :channels] = weight
        blocks = padded.view(self.rows, WIDE, self.columns, DEEP, height * width).permute(0, 4, 2, 3, 1)
        mask = (blocks != 0).any(-1).any(-1)  # [rows, places, columns]
        self.share = float(mask.float().mean())
        self.blocks = blocks[mask]  # [kept, DEEP, WIDE]
        self.row, self.place, self.column = mask.nonzero(as_tuple=True)
        self.counts = mask.sum((1, 2)).tolist()

    def table(self, step: int, group: int) -> tuple[Tensor, ...]:
        """The tables of the kernel, in steps of ``step`` blocks: the first step of every group of rows, the row that every step
        finishes (or -1), the kernel position and column of every block, and the weights.

        Each row is padded with zero blocks that read nothing (place -1) to whole steps, at least one. Two more steps follow,
        because the kernel reads ahead.
        """
        begins = [0]
        for count in self.counts:
            begins.append(begins[-1] + max(1, -(-count // step)))
        total = (begins[-1] + 2) * step
        finished = torch.full((begins[-1],), -1)
        finished[torch.tensor(begins[1:]) - 1] = torch.arange(self.rows)
        rank = torch.cat([torch.arange(count) for count in self.counts])
        where = torch.tensor(begins)[self.row] * step + rank
        place, column = torch.full((total,), -1), torch.zeros(total, dtype=torch.int64)
        place[where], column[where] = self.place, self.column
        weights = self.blocks.new_zeros(total, DEEP, WIDE)
        weights[where] = self.blocks
        return torch.tensor([*begins[:-1:group], begins[-1]]), finished, place, column, weights


class Layer(nn.Module, ABC):
    """A convolution or linear layer with the activation after it, and with an addition before or after the activation."""

    weight: Tensor
    bias: Tensor

    def __init__(self, step: Step, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        assert step.weight is not None and step.bias is not None  # noqa: PT018
        self.flat = len(shape) == 2
        self.rows = step.rows
        self.addition, self.activation = step.addition, step.activation
        w = step.window
        self.stride, self.padding, self.dilation = (w["sh"], w["sw"]), (w["ph"], w["pw"]), (w["dh"], w["dw"])
        self.kernel, self.channels = (w["kh"], w["kw"]), step.weight.shape[0 if step.kind == "depthwise" else 1]
        self.groups = step.weight.shape[0] if step.kind == "depthwise" else 1
        weight = torch.from_numpy(np.ascontiguousarray(step.weight))
        self.register_buffer("weight", (weight[:, None] if step.kind == "depthwise" else weight).to(dtype))
        self.register_buffer("bias", torch.from_numpy(np.ascontiguousarray(step.bias)))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        shape, lead = x.shape, self._lead(x)
        x = self._map(x)
        size = self.size(x) if x.dim() == 4 and x.shape[1] == self.channels else torch.Size((0,))
        if min(size[2:], default=0) < 1 or (lead is not None and size[2:] != (1, 1)):  # the kernel does not check
            raise SmartpruneError(
                f"accelerate: a layer of {self.channels} channels and a {text.format_shape(self.kernel)} kernel got an input of "
                f"{text.format_shape(shape)}; batch and image sizes may differ from those of the example only if the model "
                "accepts them"
            )
        whole = size if lead is None else torch.Size((*lead, size[1]))
        if other is None:
            return self.compute(x, None).reshape(whole)
        added = self._map(other) if lead is None else other if self._lead(other) == other.shape[:-1] else other.flatten(1)
        if added.shape != whole:  # equal in the example, but now torch broadcasts one of them
            return finish(self.compute(x, None, bare=True).reshape(whole), added, self)
        return self.compute(x, added.reshape(size)).reshape(whole)

    def size(self, x: Tensor) -> torch.Size:
        """The size of the result for a map of pixels."""
        sides = zip(x.shape[2:], self.padding, self.dilation, self.kernel, self.stride, strict=True)
        return torch.Size((x.shape[0], len(self.bias), *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in sides)))

    def _lead(self, x: Tensor) -> Sequence[int] | None:
        """All axes of the result but the last one, if that one holds the channels. Layers with such results also accept a map
        that becomes a single pixel."""
        return None if not (self.rows or self.flat) else x.shape[:1] if self.flat and x.dim() == 4 else x.shape[:-1]

    def _map(self, x: Tensor) -> Tensor:
        """The input as [images, channels, height, width]; a map of one pixel may lack its last two axes."""
        if self.rows or (self.flat and x.dim() != 4):
            return x.reshape(-1, x.shape[-1], 1, 1)
        return x[:, :, None, None] if x.dim() == 2 else x

    @abstractmethod
    def compute(self, x: Tensor, other: Tensor | None, bare: bool = False) -> Tensor:
        """Computes the layer on a map [images, channels, height, width]; ``bare`` leaves out activation and addition."""


class Dense(Layer):
    """A layer that torch computes."""

    def __init__(self, step: Step, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__(step, shape, dtype)
        self.weight = self.weight.contiguous(memory_format=torch.channels_last)
        self.bias = self.bias.to(dtype)

    def compute(self, x: Tensor, other: Tensor | None, bare: bool = False) -> Tensor:
        out = F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        return out if bare else finish(out, other, self)


class Sparse(Layer):
    """A layer that the kernel computes: it reads and multiplies only kept blocks. Inputs and outputs are channels-last."""

    def __init__(self, step: Step, shape: Shape, dtype: torch.dtype, tile: Tile = TILES[0]) -> None:
        super().__init__(step, shape, dtype)
        self.kept = KeptBlocks(self.weight)
        self.bias = self.bias.float()
        self.tile = tile
        self.tables: dict[Any, tuple[Tensor, ...]] = {}
        self.padded = any(self.padding) or self.kept.shape[1] % DEEP != 0
        self.fused = self.activation.name in ("clamp", "silu")
        self.kind = 2 if self.activation.name == "silu" else int(not self.activation.is_identity and self.fused)
        del self.weight

    @staticmethod
    def fits(step: Step) -> bool:
        assert step.weight is not None
        return step.kind == "conv" and math.prod(step.weight.shape[2:]) <= MOST_PLACES

    def compute(self, x: Tensor, other: Tensor | None, bare: bool = False) -> Tensor:
        from .kernel import conv_kernel

        tile, (out_channels, channels, kh, kw) = self.tile, self.kept.shape
        x = x.contiguous(memory_format=torch.channels_last)
        images, _, height, width = x.shape
        size = self.size(x)
        high, wide = size[2:]
        out = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        if other is not None:
            other = other.contiguous(memory_format=torch.channels_last)
        fused_other = other if self.fused else None
        groups = -(-self.kept.rows // tile.rows)
        programs = -(-images * high * wide // tile.pixels) * groups
        if programs:
            conv_kernel[(programs,)](
                x, *self._table(width, x.device), self.bias, out if fused_other is None else fused_other, out,
                images, height, width, channels, high, wide, out_channels, groups,
                kh, kw, *self.stride, *self.padding, *self.dilation,
                tile.pixels, WIDE, DEEP, tile.step, self.padded, channels % DEEP != 0,
                0 if fused_other is None else ADDITION[self.addition], 0 if bare else self.kind,
                self.activation.low, self.activation.high,
                "tf32" if x.dtype == torch.float32 else "ieee", max(x.numel(), out.numel()) >= 1 << 31,
                num_warps=tile.warps, num_stages=1,
            )  # fmt: skip
        return out if self.fused or bare else finish(out, other, self)

    def _table(self, width: int, device: torch.device) -> tuple[Tensor, ...]:
        key = (width, self.tile, device)
        if key not in self.tables:
            _, channels, _, kw = self.kept.shape
            begins, finished_row, place, column, weights = self.kept.table(self.tile.step, self.tile.rows)
            real = place.clamp(min=0)
            jump = ((real // kw) * self.dilation[0] * width + (real % kw) * self.dilation[1]) * channels + column * DEEP
            jump = torch.where(place < 0, 0, jump)
            if channels % DEEP:
                place = torch.where(place < 0, MOST_PLACES, place | ((channels - column * DEEP).clamp(max=DEEP) << 8))
            elif self.padded:
                place = torch.where(place < 0, MOST_PLACES, place)
            known = self.tables.copy().items()  # other threads may add tables
            same = next((table for other, table in known if other[1:] == key[1:]), None)
            if same is None:
                same = (weights.to(device), *(t.to(device, torch.int32) for t in (begins, finished_row, jump, place)))
            # Tables for other widths share everything but the distances in memory, most of all the weights.
            self.tables[key] = (*same[:3], jump.to(device, torch.int32), same[4])
        return self.tables[key]


def finish(out: Tensor, other: Tensor | None, layer: Layer) -> Tensor:
    """Applies activation and addition in torch."""
    if layer.addition == "before" and other is not None:
        out = out + other
    out = activate(out, layer.activation)
    return out + other if layer.addition == "after" and other is not None else out


def activate(x: Tensor, activation: Activation) -> Tensor:
    if activation == IDENTITY:
        return x
    if activation.name == "clamp":
        return x.clamp_(activation.low, activation.high)
    if activation.name == "silu":
        return F.silu(x)
    if activation.name == "leaky":
        return F.leaky_relu(x, activation.slope)
    if activation.name == "elu":
        return F.elu(x, activation.slope)
    return TORCH_ACTIVATIONS[activation.name](x)
