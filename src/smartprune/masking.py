"""Masks on weights: every layer's ``weight * mask`` in one differentiable step, and how a layer comes to use it.

The multiply expands the mask along a weight's inner axes only (one value per column of a row of blocks) and broadcasts it over
the rows of a block, so it runs near the speed of a plain elementwise product; its backward gives the weights' gradient and the
per-block sums that the scores need (paper, equation 6, in the form of Algorithm 1).

A layer uses masked weights because its class is exchanged for a subclass whose ``weight`` is a property. The parameter itself
stays where it was: same object, same name, same place in ``parameters()``, ``state_dict()`` and every optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .block import Grid, spread
from .errors import SmartpruneError

CHUNK = 1 << 22  # elements: layers are multiplied in runs of about this size, so that gradients become ready in pieces


class Rows:
    """One weight seen as rows of blocks in the order in which it lies in memory."""

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
        """The axes from the slowest to the fastest in memory; plain order unless that is another dense layout."""
        axes = tuple(range(weight.dim()))
        if weight.is_contiguous():
            return axes
        order = tuple(sorted(axes, key=lambda i: -weight.stride(i)))
        return order if order[0] == 0 and weight.permute(order).is_contiguous() else axes

    def view(self, tensor: Tensor) -> Tensor:
        """[parts, length, width], without a copy where the tensor lies in this order."""
        return tensor.permute(self.order).reshape(self.parts, self.length, self.width)

    def columns(self, mask: Tensor) -> Tensor:
        """The mask of this layer, [n], as one value per row of blocks and column: [parts, count, width]."""
        out = mask.reshape(self.stored).permute(self.order)
        for i in range(1, len(self.grid.axes)):
            out = spread(out, i, self.grid.axes[i])
        return out.reshape(self.parts, self.count, self.width)

    def multiply(self, tensor: Tensor, columns: Tensor, out: Tensor) -> None:
        """``out = tensor * columns``, row by row of blocks; all [parts, length, width] but columns."""
        edge = self.full * self.step
        if self.full:
            split = (self.full, self.step)
            torch.mul(
                tensor[:, :edge].unflatten(1, split), columns[:, : self.full, None], out=out[:, :edge].unflatten(1, split)
            )
        if edge < self.length:
            torch.mul(tensor[:, edge:], columns[:, self.full :], out=out[:, edge:])

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """Sum of ``a * b`` over every block, [n]; a and b are [parts, length, width]."""
        dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
        product = a.to(dtype) * b.to(dtype)
        edge = self.full * self.step
        sums = product[:, :edge].unflatten(1, (self.full, self.step)).sum(2)
        if edge < self.length:
            sums = torch.cat([sums, product[:, edge:].sum(1, keepdim=True)], 1)
        out = sums.reshape(self.grid.axes[0].count, *(axis.size for axis in self.grid.axes[1:]))
        tail = Grid((type(self.grid.axes[0])(1, out.shape[0], 1), *self.grid.axes[1:]))
        return tail.sum(out).reshape(self.grid.shape).permute(self.back).reshape(-1)


class Masking:
    """The masked multiply of a list of weights."""

    def __init__(self, grids: Sequence[Grid]) -> None:
        self.grids = list(grids)
        self.starts = [0]
        for grid in self.grids:
            self.starts.append(self.starts[-1] + grid.n)
        self.chunks = self._chunks()
        self._rows: dict[tuple[int, tuple[int, ...]], Rows] = {}

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

    def piece(self, mask: Tensor, i: int) -> Tensor:
        return mask[self.starts[i] : self.starts[i + 1]]

    def apply(self, mask: Tensor, weights: Sequence[Tensor], through: bool = False) -> list[Tensor]:
        """``weight * mask`` for every weight, differentiable in both; mask: [n].

        With ``through``, a weight's gradient is that of the product, unmasked (straight-through).
        """
        out: list[Tensor] = []
        for first, last in self.chunks:
            piece = mask[self.starts[first] : self.starts[last]]
            out += _Multiply.apply(piece, self, first, through, *weights[first:last])
        return out

    def hold(self, mask: Tensor, weights: Sequence[Tensor], idle: Sequence[Tensor] = ()) -> list[Tensor]:
        """Weights whose removed blocks are zero already: passed on as they are, with gradients for kept blocks only.

        ``idle`` tensors get a gradient of zero: DDP wants one for every parameter.
        """
        out: list[Tensor] = []
        for first, last in self.chunks:
            piece = mask[self.starts[first] : self.starts[last]]
            held = _Hold.apply(piece, self, first, last - first, *weights[first:last], *(idle if first == 0 else ()))
            out += held
        return out

    @torch.no_grad()
    def multiply_(self, mask: Tensor, weights: Sequence[Tensor]) -> None:
        """``weight *= mask`` in place."""
        for i, weight in enumerate(weights):
            self.multiply_one_(self.piece(mask, i), i, weight)

    @torch.no_grad()
    def multiply_one_(self, piece: Tensor, i: int, weight: Tensor) -> None:
        """``weight *= piece`` in place, for the weight number i; piece: the mask of its blocks."""
        rows = self.rows(i, weight)
        piece = piece.to(weight.device)
        view = rows.view(weight.detach())
        if view.data_ptr() == weight.data_ptr():
            rows.multiply(view, rows.columns(piece), view)
        else:
            weight.mul_(self.grids[i].expand(piece))

    def block_inner(self, a: Sequence[Tensor | None], b: Sequence[Tensor]) -> Tensor:
        """Sum of ``a * b`` over every block of every weight, [n]; None counts as zero."""
        parts = []
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            if x is None:
                parts.append(torch.zeros(self.grids[i].n, device=y.device))
            else:
                rows = self.rows(i, y)
                parts.append(rows.inner(rows.view(x), rows.view(y)).to(torch.float32))
        return torch.cat(parts)


class _Multiply(torch.autograd.Function):
    """weight * mask for a run of layers. What backward needs is kept on ctx, not in saved tensors, so that backward may pass
    more than once (reentrant activation checkpointing does, once per segment)."""

    @staticmethod
    def forward(ctx: Any, mask: Tensor, masking: Masking, first: int, through: bool, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.masking, ctx.first, ctx.through = masking, first, through
        ctx.weights = [weight.detach() for weight in weights]
        ctx.versions = [weight._version for weight in weights]
        ctx.columns = []
        out = []
        for j, weight in enumerate(weights):
            rows = masking.rows(first + j, weight)
            start = masking.starts[first + j] - masking.starts[first]
            columns = rows.columns(mask[start : start + rows.grid.n])
            out.append(_masked_like(rows, rows.view(weight), columns, weight))
            ctx.columns.append(columns if ctx.needs_input_grad[4 + j] and not through else None)
        return tuple(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        masking: Masking = ctx.masking
        sums: list[Tensor] = []
        out: list[Tensor | None] = []
        for j, (grad, weight) in enumerate(zip(grads, ctx.weights, strict=True)):
            i = ctx.first + j
            if weight._version != ctx.versions[j]:
                raise SmartpruneError(
                    f"weight {i} of the pruned layers was changed in place between forward and backward, so its gradient would "
                    "be wrong; call backward() before optimizer.step()"
                )
            if grad is None:
                out.append(None)
                if ctx.needs_input_grad[0]:
                    sums.append(torch.zeros(masking.grids[i].n, device=weight.device))
                continue
            rows = masking.rows(i, weight)
            view = rows.view(grad)
            if ctx.needs_input_grad[0]:
                sums.append(rows.inner(view, rows.view(weight)).to(torch.float32))
            if not ctx.needs_input_grad[4 + j]:
                out.append(None)
            elif ctx.through:
                out.append(grad)
            else:
                out.append(_masked_like(rows, view, ctx.columns[j], weight))
        return (torch.cat(sums) if sums else None, None, None, None, *out)


class _Hold(torch.autograd.Function):
    """Passes weights on unchanged; gradients of removed blocks are zero."""

    @staticmethod
    def forward(ctx: Any, mask: Tensor, masking: Masking, first: int, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.masking, ctx.first, ctx.mask = masking, first, mask
        ctx.like = [tensor.detach() for tensor in tensors[:count]]
        ctx.idle = [tensor.detach() for tensor in tensors[count:]]
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        out: list[Tensor | None] = []
        for j, grad in enumerate(grads):
            if grad is None or not ctx.needs_input_grad[4 + j]:
                out.append(None)
                continue
            rows = ctx.masking.rows(ctx.first + j, ctx.like[j])
            start = ctx.masking.starts[ctx.first + j] - ctx.masking.starts[ctx.first]
            columns = rows.columns(ctx.mask[start : start + rows.grid.n])
            out.append(_masked_like(rows, rows.view(grad), columns, ctx.like[j]))
        return (None, None, None, None, *out, *(torch.zeros_like(tensor) for tensor in ctx.idle))


def _masked_like(rows: Rows, view: Tensor, columns: Tensor, like: Tensor) -> Tensor:
    """``view * columns`` as a tensor that lies in memory as ``like`` does."""
    out = torch.empty_like(like)
    target = rows.view(out)
    if target.data_ptr() != out.data_ptr():  # an unusual layout: no view of it in rows
        out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        target = rows.view(out)
    rows.multiply(view, columns, target)
    return out


class Source(Protocol):
    """Where a masked layer gets its weights from: the pruner."""

    def masked(self, index: int) -> Tensor: ...


LINK = "_smartprune_link"  # attribute of a masked module: (source, {attribute: index of the weight})
_classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def put_on(module: nn.Module, source: Source, index: dict[str, int]) -> None:
    """From now on the module's attributes named in ``index`` read as masked weights of ``source``."""
    module.__dict__[LINK] = (source, dict(index))
    module.__class__ = masked_class(type(module), tuple(sorted(index)))


def take_off(module: nn.Module) -> None:
    """The module is as it was before :func:`put_on`; copies of it are not touched."""
    module.__dict__.pop(LINK)
    module.__class__ = type(module)._smartprune_class  # type: ignore[attr-defined]


def is_masked(module: nn.Module) -> bool:
    return LINK in module.__dict__


def masked_class(cls: type[nn.Module], attributes: tuple[str, ...]) -> type[nn.Module]:
    """The stand-in for a module class in which ``attributes`` are masked. It is never changed once made, so copies that share
    it are safe, and it is pickled as the user's class plus the attribute names."""
    made = _classes.get((cls, attributes))
    if made is None:
        body: dict[str, Any] = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "__reduce_ex__": _reduce,
            "_smartprune_class": cls,
            "_smartprune_attributes": attributes,
        }
        for attribute in attributes:
            body[attribute] = property(_getter(attribute))
        made = _classes[cls, attributes] = type(cls.__name__, (cls,), body)
    return made


def _getter(attribute: str) -> Any:
    def get(self: nn.Module) -> Tensor:
        source, index = self.__dict__[LINK]
        masked: Tensor = source.masked(index[attribute])
        return masked

    return get


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    state = object.__reduce_ex__(self, 2)[2]
    return _rebuild, (type(self)._smartprune_class, type(self)._smartprune_attributes), state


def _rebuild(cls: type[nn.Module], attributes: tuple[str, ...]) -> nn.Module:
    made = masked_class(cls, attributes)
    return made.__new__(made)
