"""The masked multiplication on CUDA: one launch per run of layers in the forward pass, one in the backward pass.

Weights and gradients are separate allocations, so a launch gets their addresses as a tuple of integers. Products and gradients are
written into one flat allocation per run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from ..core.memory import address_of, check_memory
from ..errors import SmartpruneError
from .autograd import once_differentiable
from .multiply_kernels import NOTHING, backward_kernel, forward_kernel, measure_kernel
from .multiply_tables import Place, Work

if TYPE_CHECKING:
    from .multiply import BlockMultiplier

INTERPRETED = bool(triton.knobs.runtime.interpret)
WARPS, REGISTERS = 8, 128  # two programs share a multiprocessor
MOST = 32  # layers per launch
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def measure(mask: Tensor, before: Tensor | None, edge: float, scale: float) -> tuple[Tensor, Tensor]:
    """Returns per program the number of blocks that are further than ``edge`` from their side, the number that changed sides, and
    the distance to the hard mask over ``scale``, [programs, 3]; and the sides, bool [n]."""
    n = mask.numel()
    programs = min(128, -(-n // 1024))
    parts = torch.empty(programs, 3, device=mask.device)
    side = torch.empty(n, dtype=torch.bool, device=mask.device)
    if before is not None and before.device != mask.device:
        before = before.to(mask.device)
    with _device_of(mask):
        measure_kernel[(programs,)](
            mask, (side if before is None else before).view(torch.uint8), side.view(torch.uint8), parts, n, edge, scale,
            before is not None, 1024,
        )  # fmt: skip
    return parts, side


class Run:
    """Layers of equal dtypes in one launch. ``layers`` are their indices in the list of weights."""

    def __init__(self, layers: Sequence[int], weights: Sequence[Tensor], places: Sequence[Place], outer: torch.dtype) -> None:
        self.layers = list(layers)
        self.inner, self.outer = weights[0].dtype, outer  # dtypes of the weights and of the products
        self.work = Work(places, weights[0].device)
        self.shapes = [weight.shape for weight in weights]
        self.strides = [weight.stride() for weight in weights]
        self.orders = [place.order for place in places]
        self.pad = (NOTHING + 1,) * (-len(self.layers) % 8)  # few different lengths need few compilations
        self.grid = (self.work.count,)
        self.options: dict[str, Any] = {} if INTERPRETED else {"num_warps": WARPS, "maxnreg": REGISTERS}

    def empty(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """One flat allocation, and a view of it for every layer with the memory layout of its weight."""
        work = self.work
        flat = torch.empty(work.size, dtype=dtype, device=work.table.device)
        return flat, list(map(flat.as_strided, self.shapes, self.strides, work.offsets))

    def addresses(self, pointers: Sequence[int]) -> tuple[int, ...]:
        return (*[pointers[i] + 1 for i in self.layers], *self.pad)

    def forward(self, pointers: Sequence[int], mask: Tensor, out: Tensor | None) -> None:
        """Writes products to ``out``, flat, or in place if that is None."""
        work = self.work
        forward_kernel[self.grid](
            self.addresses(pointers), work.table, work.index, mask, work.index if out is None else out,
            DTYPES[self.inner], out is None, work.rows, work.columns, **self.options,
        )  # fmt: skip

    def backward(
        self, pointers: Sequence[int], grads: Sequence[int], mask: Tensor, out: Tensor | None, sums: Tensor | None,
        straight_through: bool,
    ) -> None:  # fmt: skip
        """Writes gradients to ``out``, flat, and the sums of grad * weight over every block to ``sums``."""
        work, none = self.work, self.work.index
        space = none if sums is None else torch.empty(work.space, dtype=torch.float32, device=sums.device)
        backward_kernel[self.grid](
            self.addresses(pointers), self.addresses(grads), work.table, work.index, mask, none if out is None else out,
            space, none if sums is None else sums, DTYPES[self.inner], DTYPES[self.outer], out is not None, straight_through,
            sums is not None, work.rows, work.columns, work.slots, work.members, **self.options,
        )  # fmt: skip

    def dense(self, j: int, grad: Tensor) -> Tensor:
        """The gradient of the run's layer j, with the memory layout of its weight."""
        same = grad.stride() == self.strides[j] or grad.permute(self.orders[j]).is_contiguous()
        if same and grad.dtype == self.outer and grad.data_ptr():  # a gradient of zeros may have no memory
            return grad
        out = torch.empty_strided(self.shapes[j], self.strides[j], dtype=self.outer, device=grad.device)
        return out.copy_(grad)


def runs(
    multiplier: BlockMultiplier, layers: Sequence[int], weights: Sequence[Tensor], dtypes: Sequence[torch.dtype | None] | None,
    origin: int,
) -> list[Run] | None:  # fmt: skip
    """The launches that multiply these layers by a mask that starts at layer ``origin``. None if the kernels cannot."""
    kinds = None if dtypes is None else tuple(dtypes)
    key = (tuple(layers), kinds, origin, *[(weight.get_device(), weight.dtype, weight.stride()) for weight in weights])
    if key not in multiplier.kernel_cache:
        multiplier.kernel_cache[key] = _runs(multiplier, layers, weights, kinds, origin)
    cached: list[Run] | None = multiplier.kernel_cache[key]
    return cached


def _runs(
    multiplier: BlockMultiplier, layers: Sequence[int], weights: Sequence[Tensor], dtypes: Sequence[torch.dtype | None] | None,
    origin: int,
) -> list[Run] | None:  # fmt: skip
    groups: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    places = []
    for j, (i, weight) in enumerate(zip(layers, weights, strict=True)):
        outer = (dtypes[j] if dtypes is not None else None) or weight.dtype
        check_memory(weight, "a pruned weight")
        order = multiplier.rows(i, weight).order
        if weight.dtype not in DTYPES or outer not in DTYPES or weight.device != weights[0].device:
            return None
        if not weight.permute(order).is_contiguous() or weight.numel() // weight.shape[0] >= 1 << 27:
            return None
        places.append(Place(multiplier.grids[i], order, multiplier.starts[i] - multiplier.starts[origin]))
        groups.setdefault((weight.dtype, outer), []).append(j)
    out = []
    for (_, outer), members in groups.items():
        for k in range(0, len(members), MOST):
            some = members[k : k + MOST]
            out.append(Run(some, [weights[j] for j in some], [places[j] for j in some], outer))
    return out


def multiply_(run_list: Sequence[Run], mask: Tensor, weights: Sequence[Tensor]) -> None:
    """``weight *= mask`` in place."""
    pointers = _pointers(weights)
    with _device_of(mask):
        for run in run_list:
            run.forward(pointers, mask, None)
    torch.autograd.graph.increment_version(weight for weight in weights if not weight.is_inference())


class Fused(torch.autograd.Function):
    """weight * mask for a run of layers, like ``_Multiply`` and ``_MaskGradients`` of multiply.py.

    With ``is_zeroed``, removed blocks are zero already: weights are cast at most, and the mask gets no gradient. What backward
    needs is kept on ctx, not in saved tensors, so that several backward passes are possible.
    """

    @staticmethod
    def forward(
        ctx: Any, mask: Tensor, run_list: list[Run], first: int, straight_through: bool, is_zeroed: bool, count: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        weights = tensors[:count]
        ctx.mask, ctx.runs, ctx.first, ctx.straight_through, ctx.is_zeroed = mask, run_list, first, straight_through, is_zeroed
        ctx.weights, ctx.idle = weights, tensors[count:]
        ctx.pointers = _pointers(weights)
        ctx.seen = [(weight._version, pointer) for weight, pointer in zip(weights, ctx.pointers, strict=True)]
        out: list[Any] = [None] * count
        with _device_of(mask):
            for run in run_list:
                if is_zeroed and run.inner == run.outer:
                    for i in run.layers:
                        out[i] = weights[i].view_as(weights[i])
                    continue
                flat, views = run.empty(run.outer)
                run.forward(ctx.pointers, mask, flat)
                for i, view in zip(run.layers, views, strict=True):
                    out[i] = view
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        weights = ctx.weights
        now = [(weight._version, weight.data_ptr()) for weight in weights]
        if now != ctx.seen and not ctx.is_zeroed:
            changed = next(i for i, (new, old) in enumerate(zip(now, ctx.seen, strict=True)) if new != old)
            raise SmartpruneError(
                f"weight {ctx.first + changed} of the pruned layers was changed in place between forward and backward, "
                "so its gradient would be wrong; call backward() before optimizer.step()"
            )
        needs = ctx.needs_input_grad[6:]
        summed = ctx.needs_input_grad[0] and not ctx.is_zeroed
        sums = torch.empty(ctx.mask.numel(), device=ctx.mask.device) if summed else None
        out: list[Tensor | None] = [None] * len(weights)
        dense: list[Tensor | None] = list(grads)
        for run in ctx.runs:
            for j, i in enumerate(run.layers):
                grad = grads[i]
                if grad is not None:
                    dense[i] = run.dense(j, grad)
        pointers = [NOTHING if grad is None else grad.data_ptr() for grad in dense]
        with _device_of(ctx.mask):
            for run in ctx.runs:
                wanted = [i for i in run.layers if needs[i] and grads[i] is not None]
                unchanged = ctx.straight_through and run.inner == run.outer  # the gradient itself is the result
                flat, views = run.empty(run.inner) if wanted and not unchanged else (None, [])
                if flat is not None or sums is not None:
                    run.backward(ctx.pointers, pointers, ctx.mask, flat, sums, ctx.straight_through)
                source = grads if unchanged else dict(zip(run.layers, views, strict=bool(views)))
                for i in wanted:
                    out[i] = source[i]
        return (sums, None, None, None, None, None, *out, *(torch.zeros_like(tensor) for tensor in ctx.idle))


def _pointers(weights: Sequence[Tensor]) -> list[int]:
    """The addresses of the weights. Raises if the memory of one was freed, because the kernels would read other memory."""
    pointers = [weight.data_ptr() for weight in weights]
    if 0 in pointers:
        address_of(weights[pointers.index(0)], "a pruned weight")
    return pointers


def _device_of(tensor: Tensor) -> Any:
    """Makes the tensor's device the current one, which launches go to."""
    index = tensor.get_device()
    return nullcontext() if index < 0 or index == torch.cuda.current_device() else torch.cuda.device(index)
