"""Soft and hard top-k over one vector of block scores, with an exact sum.

Three solvers share one backward formula: a chunked solver for the CPU (`cpu.py`), a fused kernel for CUDA (`triton.py`), and
plain tensor operations (`eager.py`), for CUDA without Triton or with SMARTPRUNE_TOPK=torch. All store the threshold as
pivot + delta. The pivot is representable in the dtype of the scores and is subtracted first: a single number loses its
fraction as soon as |score| is much larger than tau.
"""

import importlib.util
import math
import numbers
import os
from functools import lru_cache
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..core.device import require_float64
from ..core.hard import ERRORS, TAU_RANGE, check_vectors, describe_tensor, hard_topk
from ..errors import SmartpruneError
from . import cpu, eager
from .device_errors import check_device, device_flags

__all__ = ["check_device", "hard_topk", "soft_topk"]

BACKEND = os.environ.get("SMARTPRUNE_TOPK", "auto")  # auto, triton or torch; only auto uses the CPU solver


def soft_topk(
    scores: Tensor, k: float | Tensor, tau: float | Tensor, cost: Tensor | None = None, *, warm: Tensor | None = None
) -> Tensor:
    """A differentiable top-k: the mask ``sigmoid((scores - theta) / tau)`` with ``theta`` such that ``sum(cost * mask) = k``.

    The sum is met to about 5e-7 of k for float32 scores, and to rounding for float64. The gradient is Proposition 3.2 of the
    paper, ``dx = v / tau * (g - cost * sum(v g) / sum(cost v))`` with ``v = sigmoid'``. It is zero if every block is decided
    (``sum(cost v) <= 1e-20 sum(cost)``).

    Args:
        scores: A vector [N] of float64, float32, bfloat16 or float16.
        k: What the mask sums to. A tensor on a CUDA device is read there, without synchronization.
        tau: The temperature, also a number or a 0-dim tensor.
        cost: The cost of each block, [N], at least 0; ones by default. It gets no gradient.
        warm: A float64 tensor [2] of (pivot, delta) with ``theta = pivot + delta``. The solver starts there (NaN: no start) and
            writes its solution to it. A tensor [2, 2] is read in row 0 and written in row 1, so calls with the same inputs
            return the same bits.

    Returns:
        The mask [N] in [0, 1]: float64 for float64 scores, float32 otherwise, also under autocast.

    Raises:
        SmartpruneError: Scores, costs, k or tau are not finite, out of range, or of the wrong shape.

    Examples:
        >>> import smartprune as sp
        >>> scores = torch.tensor([0.1, 0.4, 0.2, 0.3], requires_grad=True)
        >>> mask = sp.soft_topk(scores, 2, tau=0.1)
        >>> mask.detach()  # two of four, so theta = 0.25 by symmetry
        tensor([0.1824, 0.8176, 0.3775, 0.6225])
        >>> mask[1].backward()
        >>> scores.grad.sum().abs() < 1e-6  # the sum is fixed
        tensor(True)
    """
    if torch.compiler.is_compiling():
        return _compiled(scores, k, tau, cost, warm)
    k, tau = _check(scores, k, tau, cost, warm)
    if scores.requires_grad and torch.is_grad_enabled():
        mask: Tensor = _SoftTopk.apply(scores, k, tau, cost, warm)  # type: ignore[no-untyped-call]
        return mask
    return _forward(scores, k, tau, cost, warm, False)[0]


class _SoftTopk(torch.autograd.Function):
    # Plain attributes instead of saved tensors: reentrant checkpointing runs forward once per segment.
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, k: float | Tensor, tau: float | Tensor, cost: Tensor | None, warm: Tensor | None
    ) -> Tensor:
        mask, ctx.saved = _forward(scores, k, tau, cost, warm, True)
        ctx.scores, ctx.version = scores, scores._version
        used = ctx.saved[2]
        shared = cost is not None and used is not None and used.data_ptr() == cost.data_ptr()  # else it is a copy
        ctx.cost = cost if shared else None
        ctx.cost_version = 0 if ctx.cost is None else ctx.cost._version
        return mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph
            return _FirstDerivative.apply(ctx, grad, ctx.scores), None, None, None, None  # type: ignore[no-untyped-call]
        return _gradient(ctx, grad), None, None, None, None


class _FirstDerivative(torch.autograd.Function):
    """The gradient as a function of scores, so that a second derivative raises instead of being zero."""

    @staticmethod
    def forward(ctx: Any, outer: Any, grad: Tensor, scores: Tensor) -> Tensor:
        return _gradient(outer, grad.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise SmartpruneError(
            "soft_topk: got a second derivative, and only the first one is supported; detach the mask from what is "
            "differentiated twice, or take gradients with respect to inputs"
        )


_Saved = tuple[ModuleType, Tensor, Tensor | None, Any]  # solver, scores and costs as it used them, its state


def _gradient(ctx: Any, grad: Tensor) -> Tensor:
    solver, x, c, state = ctx.saved
    scores: Tensor = ctx.scores
    if x is scores and ctx.version != scores._version:  # a copy cannot be modified in place
        raise SmartpruneError(
            "soft_topk: scores were modified in place between forward and backward; backward needs them "
            "unchanged: call optimizer.step() after backward()"
        )
    if ctx.cost is not None and ctx.cost_version != ctx.cost._version:
        raise SmartpruneError(
            "soft_topk: cost was modified in place between forward and backward; backward needs it unchanged: give a copy"
        )
    out: Tensor = solver.backward(x, grad if grad.is_contiguous() else grad.contiguous(), c, state)
    return _finite(out.to(scores.dtype))


def _finite(grad: Tensor) -> Tensor:
    """Replaces infinity by the largest float16 if the gradient is too large for float16. Keeps NaN."""
    return grad.nan_to_num_(math.nan) if grad.dtype is torch.float16 else grad


def _forward(
    scores: Tensor, k: float | Tensor, tau: float | Tensor, cost: Tensor | None, warm: Tensor | None, keep: bool
) -> tuple[Tensor, _Saved]:
    solver, x, c = _prepare(scores, cost)
    if solver.__name__ == _TRITON:
        mask, state = solver.forward(x, k, tau, c, warm, keep)
    else:
        mask, c, state = solver.forward(x, k, tau, c, warm)
    return mask, (solver, x, c, state)


def _prepare(scores: Tensor, cost: Tensor | None) -> tuple[ModuleType, Tensor, Tensor | None]:
    """The solver, and the scores and costs in the form that it takes."""
    if BACKEND == "auto" and scores.is_cpu:
        solver: ModuleType = cpu
    elif BACKEND == "triton" or (BACKEND == "auto" and scores.is_cuda and _has_triton()):
        solver = _triton()
    elif BACKEND in ("auto", "torch"):
        solver = eager
    else:
        raise SmartpruneError(f"soft_topk: SMARTPRUNE_TOPK={BACKEND!r} is unknown; use auto, torch or triton")
    x = scores
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    if solver.__name__ == _TRITON:
        if cost is not None and cost.dtype is not dtype:
            cost = cost.to(dtype)
    elif x.dtype is not dtype:
        x = x.to(dtype)
    if not x.is_contiguous():
        x = x.contiguous()
    if cost is not None:
        cost = cost.detach() if cost.requires_grad else cost
        cost = cost if cost.is_contiguous() else cost.contiguous()
    return solver, x, cost


_TRITON = f"{__package__}.triton"


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=1)
def _triton() -> ModuleType:
    return importlib.import_module(_TRITON)


# For torch.compile: one opaque operator, without graph breaks, and without recompilation when a tensor tau changes.


def _compiled(scores: Tensor, k: float | Tensor, tau: float | Tensor, cost: Tensor | None, warm: Tensor | None) -> Tensor:
    start, end = cpu.warm_rows(warm)
    if start is None:
        start = scores.new_full((2,), math.nan, dtype=torch.float64)
    mask: Tensor
    mask, solution, _ = _node(scores, eager.scalar(k, scores.device), eager.scalar(tau, scores.device), cost, start)
    if end is not None:
        end.copy_(solution.detach())
    return mask


@torch.library.custom_op("smartprune::soft_topk", mutates_args=())
def _node(scores: Tensor, k: Tensor, tau: Tensor, cost: Tensor | None, warm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    end = warm.clone()
    mask, (_, _, _, state) = _forward(scores, *_check(scores, k, tau, cost, end), cost, end, True)
    return mask, end, state if isinstance(state, Tensor) else torch.tensor((*state, 0.0), dtype=torch.float64, device="cpu")


@torch.library.custom_op("smartprune::soft_topk_backward", mutates_args=())
def _node_backward(scores: Tensor, grad: Tensor, cost: Tensor | None, state: Tensor) -> Tensor:
    solver, x, c = _prepare(scores, cost)
    state_of_solver = tuple(state[:3].tolist()) if solver is cpu else state
    out: Tensor = solver.backward(x, grad.contiguous(), None if c is None else c.to(grad.dtype), state_of_solver)
    return _finite(out.to(scores.dtype))


@_node.register_fake
def _(scores: Tensor, k: Tensor, tau: Tensor, cost: Tensor | None, warm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    mask = torch.empty(scores.shape, dtype=dtype, device=scores.device)
    return mask, torch.empty_like(warm), warm.new_empty(4)


@_node_backward.register_fake
def _(scores: Tensor, grad: Tensor, cost: Tensor | None, state: Tensor) -> Tensor:
    return torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[3], output[2])


def _node_gradient(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
    scores, cost, state = ctx.saved_tensors
    return _node_backward(scores, grad, cost, state), None, None, None, None


_node.register_autograd(_node_gradient, setup_context=_save)


# Checks.


def _check(
    scores: Tensor, k: float | Tensor, tau: float | Tensor, cost: Tensor | None, warm: Tensor | None
) -> tuple[float | Tensor, float | Tensor]:
    """Checks that need no CUDA memory. Returns k and tau as floats, unless they are on a CUDA device."""
    check_vectors("soft_topk", scores, cost)
    device = scores.device
    require_float64(device, "soft_topk", "move them to the CPU, or to a CUDA device")
    if warm is not None and not (
        warm.dtype is torch.float64
        and warm.shape in ((2,), (2, 2))
        and warm.device == device
        and warm.is_contiguous()
        and not warm.requires_grad
    ):
        raise SmartpruneError(
            f"soft_topk: warm is {describe_tensor(warm)}; it must be float64 [2] on {device}, or [2, 2], contiguous and without "
            "gradient: make it with torch.full((2,), math.nan, dtype=torch.float64)"
        )
    if type(k) is not float:
        k = _number("k", k, device)
    if type(tau) is not float:
        tau = _number("tau", tau, device)
    if type(tau) is float and not TAU_RANGE[0] <= tau <= TAU_RANGE[1]:
        raise SmartpruneError(f"soft_topk: tau={tau!r}: {ERRORS[2]}")
    if type(k) is float and not (0 <= k <= scores.numel() if cost is None else 0 <= k < math.inf):
        cpu.raise_k(k, scores.numel() if cost is None else None)
    if device_flags:
        flag = device_flags.get(scores.get_device())
        if flag is not None and flag[1][0]:
            check_device(device)
    return k, tau


def _number(name: str, value: float | Tensor, device: torch.device) -> float | Tensor:
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise SmartpruneError(f"soft_topk: {name} is {describe_tensor(value)}; give a number or a 0-dim tensor")
        if value.device == device and device.type != "cpu":
            return value.detach() if value.requires_grad else value
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise SmartpruneError(f"soft_topk: {name}={value!r} is not a number; give a number or a 0-dim tensor")
    return float(value)
