"""Masks on weights: ``weight * mask`` for all layers in one differentiable operation.

The mask is expanded along the inner axes of a weight only (one value per column of a row of blocks) and broadcast over the rows of
a block, so the product is about as fast as an elementwise one. The backward pass gives the gradients of the weights, and the sums
per block that the scores need (paper, equation 6, in the form of Algorithm 1). On CUDA, ``multiply_triton.py`` does the same.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.block import Grid, spread
from ..core.sharding import is_sharded, local_rows, local_tensor
from ..errors import SmartpruneError
from .autograd import once_differentiable

CHUNK = 1 << 22  # elements: layers are multiplied in runs of about this size, so that gradients become ready in pieces
BACKEND = os.environ.get("SMARTPRUNE_MASKING", "auto")  # auto (fused kernels on CUDA), torch or triton


class Rows:
    """One weight seen as rows of blocks, with its axes in the order of memory."""

    def __init__(self, grid: Grid, order: tuple[int, ...]) -> None:
        self.grid = Grid(tuple(grid.axes[i] for i in order))
        self.stored = grid.shape
        self.order = order
        self.back = tuple(order.index(i) for i in range(len(order)))
        first = self.grid.axes[0]
        self.parts, self.length, self.step, self.count = first.parts, first.length, first.step, first.per_part
        self.width = math.prod(axis.size for axis in self.grid.axes[1:])
        self.full = self.length // self.step

    @staticmethod
    def order_of(weight: Tensor) -> tuple[int, ...]:
        """The axes from the slowest to the fastest in memory; the plain order unless the weight has another dense layout."""
        axes = tuple(range(weight.dim()))
        if weight.is_contiguous():
            return axes
        stride = weight.stride()
        order = tuple(sorted(axes, key=lambda i: -stride[i]))
        return order if order[0] == 0 and weight.permute(order).is_contiguous() else axes

    def view(self, tensor: Tensor) -> Tensor:
        """[parts, length, width], without a copy if the tensor has this memory order."""
        return tensor.permute(self.order).reshape(self.parts, self.length, self.width)

    def columns(self, mask: Tensor) -> Tensor:
        """The mask of this layer, [n], as one value per row of blocks and column: [parts, count, width]."""
        out = mask.reshape(self.stored).permute(self.order)
        for i in range(1, len(self.grid.axes)):
            out = spread(out, i, self.grid.axes[i])
        return out.reshape(self.parts, self.count, self.width)

    def multiply(self, tensor: Tensor, columns: Tensor, out: Tensor) -> None:
        """``out = tensor * columns``, row by row of blocks. Tensor and out are [parts, length, width]."""
        edge = self.full * self.step
        if self.full:
            split = (self.full, self.step)
            torch.mul(
                tensor[:, :edge].unflatten(1, split),
                columns[:, : self.full, None],
                out=out[:, :edge].unflatten(1, split),
            )
        if edge < self.length:
            torch.mul(tensor[:, edge:], columns[:, self.full :], out=out[:, edge:])

    def block_sums(self, a: Tensor, b: Tensor) -> Tensor:
        """The sum of ``a * b`` over every block, [n]; a and b are [parts, length, width]."""
        dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
        product = a.to(dtype) * b.to(dtype)
        edge = self.full * self.step
        sums = product[:, :edge].unflatten(1, (self.full, self.step)).sum(2)
        if edge < self.length:
            sums = torch.cat([sums, product[:, edge:].sum(1, keepdim=True)], 1)
        out = sums.reshape(self.grid.axes[0].count, *(axis.size for axis in self.grid.axes[1:]))
        inner = Grid((type(self.grid.axes[0])(1, out.shape[0], 1), *self.grid.axes[1:]))
        return inner.sum(out).reshape(self.grid.shape).permute(self.back).reshape(-1)


class BlockMultiplier:
    """Multiplies a list of weights by a block vector."""

    def __init__(self, grids: Sequence[Grid]) -> None:
        self.grids = list(grids)
        self.starts = [0]
        for grid in self.grids:
            self.starts.append(self.starts[-1] + grid.n)
        self.chunks = self._chunks()
        self._rows: dict[tuple[int, tuple[int, ...]], Rows] = {}
        self.kernel_cache: dict[Any, Any] = {}  # launches that multiply_triton.py has prepared

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kernel_cache": {}}

    def _chunks(self) -> list[tuple[int, int]]:
        out, first, size = [], 0, 0
        for i, grid in enumerate(self.grids):
            size += math.prod(grid.weight_shape)
            if size >= CHUNK or i == len(self.grids) - 1:
                out.append((first, i + 1))
                first, size = i + 1, 0
        return out

    def rows(self, i: int, weight: Tensor) -> Rows:
        order = Rows.order_of(weight)
        rows = self._rows.get((i, order))
        if rows is None:
            rows = self._rows[i, order] = Rows(self.grids[i], order)
        return rows

    def layer_mask(self, mask: Tensor, i: int) -> Tensor:
        """The part of the mask that belongs to layer i."""
        return mask[self.starts[i] : self.starts[i + 1]]

    def multiply(
        self,
        mask: Tensor,
        weights: Sequence[Tensor],
        straight_through: bool = False,
        dtypes: Sequence[torch.dtype | None] | None = None,
    ) -> list[Tensor]:
        """``weight * mask`` for every weight, differentiable in both; mask: [n].

        With ``straight_through``, a weight gets the gradient of the product, without the mask. ``dtypes`` are the dtypes of the
        products if they differ from the weights. Products are rounded once.
        """
        fused = _fused(mask, weights)
        masks = mask.split([self.starts[last] - self.starts[first] for first, last in self.chunks]) if fused else ()
        out: list[Tensor] = []
        for k, (first, last) in enumerate(self.chunks):
            chunk, chunk_dtypes = weights[first:last], None if dtypes is None else dtypes[first:last]
            runs = fused.runs(self, range(first, last), chunk, chunk_dtypes, first) if fused else None
            if runs is not None:
                out += fused.Fused.apply(masks[k], runs, first, straight_through, False, len(chunk), *chunk)
            else:
                chunk_mask = mask[self.starts[first] : self.starts[last]]
                products = _Multiply.apply(chunk_mask, self, first, straight_through, *chunk)  # type: ignore[no-untyped-call]
                out += _cast(products, chunk_dtypes)
        return out

    def multiply_layer(self, mask: Tensor, i: int, weight: Tensor, straight_through: bool, is_zeroed: bool) -> Tensor:
        """:meth:`multiply` for weight i alone, or :meth:`mask_gradients` if its removed blocks are zero already."""
        layer_mask = self.layer_mask(mask, i)
        if is_zeroed:
            out: tuple[Tensor, ...] = _MaskGradients.apply(layer_mask, self, i, 1, weight)  # type: ignore[no-untyped-call]
        else:
            out = _Multiply.apply(layer_mask, self, i, straight_through, weight)  # type: ignore[no-untyped-call]
        return out[0]

    def mask_gradients(
        self,
        mask: Tensor,
        weights: Sequence[Tensor],
        idle: Sequence[Tensor] = (),
        dtypes: Sequence[torch.dtype | None] | None = None,
    ) -> list[Tensor]:
        """Returns weights whose removed blocks are zero already unchanged; only kept blocks get gradients.

        ``idle`` tensors get gradients of zero, since DDP waits for one of every parameter. ``dtypes`` as in :meth:`multiply`.
        """
        fused = _fused(mask, weights)
        out: list[Tensor] = []
        for first, last in self.chunks:
            chunk_mask = mask[self.starts[first] : self.starts[last]]
            chunk, chunk_dtypes = weights[first:last], None if dtypes is None else dtypes[first:last]
            chunk_idle = idle if first == 0 else ()
            runs = fused.runs(self, range(first, last), chunk, chunk_dtypes, first) if fused else None
            if runs is not None:
                out += fused.Fused.apply(chunk_mask, runs, first, False, True, len(chunk), *chunk, *chunk_idle)
            else:
                unchanged = _MaskGradients.apply(chunk_mask, self, first, last - first, *chunk, *chunk_idle)  # type: ignore[no-untyped-call]
                out += _cast(unchanged, chunk_dtypes)
        return out

    @torch.no_grad()
    def multiply_(self, mask: Tensor, weights: Sequence[Tensor], layers: Sequence[int] | None = None) -> None:
        """``weight *= mask`` in place; the weights belong to ``layers``, by default all. The mask has all blocks, [n]."""
        layers = range(len(weights)) if layers is None else layers
        fused = _fused(mask, weights)
        runs = fused.runs(self, layers, weights, None, 0) if fused and not is_sharded(weights[0]) else None
        if runs is not None:
            fused.multiply_(runs, mask, weights)
            return
        for i, weight in zip(layers, weights, strict=True):
            self.multiply_layer_(self.layer_mask(mask, i), i, weight)

    @torch.no_grad()
    def multiply_layer_(self, layer_mask: Tensor, i: int, weight: Tensor) -> None:
        """``weight *= layer_mask`` in place, for weight i."""
        layer_mask = layer_mask.to(weight.device)
        if is_sharded(weight):
            local_tensor(weight).mul_(self.grids[i].expand(layer_mask)[local_rows(weight)])
            return
        rows = self.rows(i, weight)
        view = rows.view(weight.detach())
        if view.data_ptr() == weight.data_ptr():
            rows.multiply(view, rows.columns(layer_mask), view)
        else:
            weight.mul_(self.grids[i].expand(layer_mask))

    def block_sums(self, a: Sequence[Tensor | None], b: Sequence[Tensor]) -> Tensor:
        """The sum of ``a * b`` over every block of every weight, [n]; None counts as zero."""
        parts = []
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            if x is None:
                parts.append(torch.zeros(self.grids[i].n, device=y.device))
            else:
                rows = self.rows(i, y)
                parts.append(rows.block_sums(rows.view(x), rows.view(y)).to(torch.float32))
        return torch.cat(parts)


class _Multiply(torch.autograd.Function):
    """weight * mask for a run of layers. What backward needs is kept on ctx, not in saved tensors, so that several backward passes
    are possible (reentrant activation checkpointing has one per segment)."""

    @staticmethod
    def forward(
        ctx: Any, mask: Tensor, multiplier: BlockMultiplier, first: int, straight_through: bool, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.multiplier, ctx.first, ctx.straight_through = multiplier, first, straight_through
        ctx.weights = [weight.detach() for weight in weights]
        ctx.versions = [weight._version for weight in weights]
        ctx.columns = []
        out = []
        for j, weight in enumerate(weights):
            rows = multiplier.rows(first + j, weight)
            start = multiplier.starts[first + j] - multiplier.starts[first]
            columns = rows.columns(mask[start : start + rows.grid.n])
            out.append(_multiply_like(rows, rows.view(weight), columns, weight))
            ctx.columns.append(columns if ctx.needs_input_grad[4 + j] and not straight_through else None)
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        multiplier: BlockMultiplier = ctx.multiplier
        sums: list[Tensor] = []
        out: list[Tensor | None] = []
        for j, (grad, weight) in enumerate(zip(grads, ctx.weights, strict=True)):
            i = ctx.first + j
            if weight._version != ctx.versions[j]:
                raise SmartpruneError(
                    f"weight {i} of the pruned layers was changed in place between forward and backward, so its gradient would be "
                    "wrong; call backward() before optimizer.step(), pruner.step() and pruner.freeze()"
                )
            if grad is None:
                out.append(None)
                if ctx.needs_input_grad[0]:
                    sums.append(torch.zeros(multiplier.grids[i].n, device=weight.device))
                continue
            rows = multiplier.rows(i, weight)
            view = rows.view(grad)
            if ctx.needs_input_grad[0]:
                sums.append(rows.block_sums(view, rows.view(weight)).to(torch.float32))
            if not ctx.needs_input_grad[4 + j]:
                out.append(None)
            elif ctx.straight_through:
                out.append(grad)
            else:
                out.append(_multiply_like(rows, view, ctx.columns[j], weight))
        return (torch.cat(sums) if sums else None, None, None, None, *out)


class _MaskGradients(torch.autograd.Function):
    """Returns weights unchanged; gradients of removed blocks are zero."""

    @staticmethod
    def forward(
        ctx: Any, mask: Tensor, multiplier: BlockMultiplier, first: int, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.multiplier, ctx.first, ctx.mask = multiplier, first, mask
        ctx.weights = [tensor.detach() for tensor in tensors[:count]]
        ctx.idle = [tensor.detach() for tensor in tensors[count:]]
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        multiplier: BlockMultiplier = ctx.multiplier
        out: list[Tensor | None] = []
        for j, grad in enumerate(grads):
            if grad is None or not ctx.needs_input_grad[4 + j]:
                out.append(None)
                continue
            rows = multiplier.rows(ctx.first + j, ctx.weights[j])
            start = multiplier.starts[ctx.first + j] - multiplier.starts[ctx.first]
            columns = rows.columns(ctx.mask[start : start + rows.grid.n])
            out.append(_multiply_like(rows, rows.view(grad), columns, ctx.weights[j]))
        return (None, None, None, None, *out, *(torch.zeros_like(tensor) for tensor in ctx.idle))


def _multiply_like(rows: Rows, view: Tensor, columns: Tensor, like: Tensor) -> Tensor:
    """``view * columns`` as a tensor with the memory layout of ``like``."""
    out = torch.empty_like(like)
    target = rows.view(out)
    if target.data_ptr() != out.data_ptr():  # an unusual layout, which has no view in rows
        out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        target = rows.view(out)
    rows.multiply(view, columns, target)
    return out


def _cast(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype | None] | None) -> Sequence[Tensor]:
    if dtypes is None:
        return tensors
    return [tensor.to(dtype or tensor.dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]


def kernels(mask: Tensor) -> Any:
    """The module with the fused kernels if they support this mask, else None. On the CPU they are only interpreted."""
    if BACKEND not in ("auto", "torch", "triton"):
        raise SmartpruneError(f"SMARTPRUNE_MASKING={BACKEND!r} is unknown; use auto, torch or triton")
    if BACKEND == "torch" or not (mask.is_cuda or BACKEND == "triton"):
        return None
    if mask.dtype not in (torch.float32, torch.bool) or not mask.is_contiguous():
        return None
    module = _import_kernels()
    return module if module is not None and (mask.is_cuda or module.INTERPRETED) else None


def _fused(mask: Tensor, weights: Sequence[Tensor]) -> Any:
    return kernels(mask) if weights and mask.device == weights[0].device else None


@lru_cache(maxsize=1)
def _import_kernels() -> Any:
    if importlib.util.find_spec("triton") is None:
        return None
    from . import multiply_triton

    return multiply_triton
