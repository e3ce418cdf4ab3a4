"""Soft and hard top-k over one vector of block scores, with an exact sum.

Three solvers share one backward formula: a chunked one for the CPU, a fused kernel for CUDA (`topk_triton.py`), and
plain tensor operations with a fixed number of steps, used on CUDA where Triton is missing or SMARTPRUNE_TOPK=torch.
All keep the threshold as pivot + delta: the pivot is representable in the dtype of the scores and subtracted first,
because a threshold alone loses its fraction as soon as |score| is much larger than tau.
"""

import importlib.util
import math
import os
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .errors import SmartpruneError

FLIP = 0.8
LIMIT = 60.0  # |z| is cut here: exp(-60) is still a normal float32, and denormals cost a factor of two
VANISHED = 1e-20  # sum(cost * v) below this share of sum(cost) means every block is decided: the gradient is zero
# The sum may miss k by the first share of min(k, sum(cost) - k), more if |z| is large because the sum then moves in
# steps of |z| ulp. Where few blocks are undecided it may miss by the second share of sum(cost * v), which bounds the
# error of one element. Below the third share lies the noise of the sum.
TOLERANCES = {torch.float32: (5e-7, 1e-4, 2e-8), torch.float64: (1e-12, 1e-9, 1e-14)}
TAU_RANGE = (1e-30, 1e30)
BACKEND = os.environ.get("SMARTPRUNE_TOPK", "auto")  # auto, triton or torch; the CPU solver serves auto only

_CHUNK = 1 << 18  # bytes per tensor of one chunk: three of them stay in the second-level cache
_SAMPLE = 1 << 14
_FACTS = {
    1: "scores hold NaN or infinity; scores must be finite: lower their learning rate or clip their gradient",
    2: f"tau is outside [{TAU_RANGE[0]:g}, {TAU_RANGE[1]:g}] or NaN; give a positive temperature",
    4: "k is outside [0, sum(cost)] or NaN; give the number (or the cost) to keep",
    8: "cost holds a negative number, NaN or infinity; costs must be finite and >= 0: correct the cost of those blocks",
}


def soft_topk(
    scores: Tensor, k: float | Tensor, tau: float | Tensor, cost: Tensor | None = None, *, warm: Tensor | None = None
) -> Tensor:
    """Mask in [0, 1] with an exact sum: mask = sigmoid((scores - theta) / tau), sum(cost * mask) = k.

    scores [N] may be float64, float32, bfloat16 or float16; the mask is float64 for float64 scores and float32
    otherwise, also under autocast. cost [N] >= 0 defaults to ones and gets no gradient. k and tau are numbers or
    0-dim tensors; tensors on a CUDA device are read there, without waiting. The gradient is Proposition 3.2,
    dx = v / tau * (g - cost * sum(v g) / sum(cost v)) with v = sigmoid'(z), and zero where every block is decided
    (sum(cost v) <= 1e-20 sum(cost)). warm, a float64 tensor [2] holding (pivot, delta) with theta = pivot + delta,
    is where the search starts (NaN: nowhere) and receives the solution.

    >>> scores = torch.tensor([0.1, 0.4, 0.2, 0.3], requires_grad=True)
    >>> mask = soft_topk(scores, 2, tau=0.1)
    >>> mask.detach()  # two of four; theta = 0.25 by symmetry
    tensor([0.1824, 0.8176, 0.3775, 0.6225])
    >>> mask[1].backward()
    >>> scores.grad.sum().abs() < 1e-6  # what one block gains the others lose
    tensor(True)
    """
    if torch.compiler.is_compiling():
        return _compiled(scores, k, tau, cost, warm)
    k, tau = _check(scores, k, tau, cost, warm)
    mask: Tensor = _SoftTopk.apply(scores, k, tau, cost, warm)  # type: ignore[no-untyped-call]
    return mask


class _SoftTopk(torch.autograd.Function):
    # What backward needs lives in plain attributes: reentrant checkpointing passes here once per segment.
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, k: float | Tensor, tau: float | Tensor, cost: Tensor | None, warm: Tensor | None
    ) -> Tensor:
        mask, ctx.x, ctx.c, ctx.state = _forward(scores.detach(), k, tau, cost, warm)
        # A kept copy cannot be modified in place, a kept view can: hence the version.
        ctx.version = scores._version if ctx.x.data_ptr() == scores.data_ptr() else None
        ctx.scores = scores.detach()
        return mask

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.version is not None and ctx.version != ctx.scores._version:
            raise SmartpruneError(
                "soft_topk: scores were modified in place between forward and backward; backward must see them "
                "unchanged: call optimizer.step() after backward()"
            )
        return _backward(ctx.x, grad.contiguous(), ctx.c, ctx.state).to(ctx.scores.dtype), None, None, None, None


_State = tuple[float, float, float]  # pivot, delta, tau; a tensor of these and sum(cost) where a device holds them


def _forward(
    scores: Tensor, k: float | Tensor, tau: float | Tensor, cost: Tensor | None, warm: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, _State | Tensor]:
    solver = _solver(scores)
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    if solver == "triton":
        from . import topk_triton

        x, c = scores.contiguous(), None if cost is None else cost.detach().to(dtype).contiguous()
        mask, state = topk_triton.forward(x, k, tau, c, warm)
        return mask, x, c, state
    x = scores.to(dtype).contiguous()
    if solver == "torch":
        return _forward_plain(x, k, tau, cost, warm)
    return _forward_cpu(x, float(k), float(tau), cost, warm)


def _backward(x: Tensor, g: Tensor, c: Tensor | None, state: _State | Tensor) -> Tensor:
    if not isinstance(state, Tensor):
        return _backward_cpu(x, g, c, state)
    if _solver(x) == "torch":
        return _backward_plain(x, g, c, state)
    from . import topk_triton

    return topk_triton.backward(x, g, c, state)


# Under torch.compile: one opaque node, no graph break, and nothing to recompile while tau cools in a tensor.


def _compiled(
    scores: Tensor, k: float | Tensor, tau: float | Tensor, cost: Tensor | None, warm: Tensor | None
) -> Tensor:
    start = scores.new_full((2,), math.nan, dtype=torch.float64) if warm is None else warm
    mask: Tensor
    mask, end, _ = _node(scores, _scalar(k, scores.device), _scalar(tau, scores.device), cost, start)
    if warm is not None:
        warm.copy_(end.detach())
    return mask


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


@torch.library.custom_op("smartprune::soft_topk", mutates_args=())
def _node(scores: Tensor, k: Tensor, tau: Tensor, cost: Tensor | None, warm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    end = warm.clone()
    mask, _, _, state = _forward(scores, *_check(scores, k, tau, cost, end), cost, end)
    return mask, end, state if isinstance(state, Tensor) else torch.tensor((*state, 0.0), dtype=torch.float64)


@torch.library.custom_op("smartprune::soft_topk_backward", mutates_args=())
def _node_backward(scores: Tensor, grad: Tensor, cost: Tensor | None, state: Tensor) -> Tensor:
    known = tuple(state[:3].tolist()) if _solver(scores) == "cpu" else state
    x = scores.contiguous() if _solver(scores) == "triton" else scores.to(grad.dtype).contiguous()
    c = None if cost is None else cost.to(grad.dtype).contiguous()
    return _backward(x, grad.contiguous(), c, known).to(scores.dtype)


@_node.register_fake
def _(scores: Tensor, k: Tensor, tau: Tensor, cost: Tensor | None, warm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    mask = torch.empty(scores.shape, dtype=dtype, device=scores.device)
    return mask, torch.empty_like(warm), warm.new_empty(4)


@_node_backward.register_fake
def _(scores: Tensor, grad: Tensor, cost: Tensor | None, state: Tensor) -> Tensor:
    return torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[3], output[2])


def _node_gradient(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
    scores, cost, state = ctx.saved_tensors
    return _node_backward(scores, grad, cost, state), None, None, None, None


_node.register_autograd(_node_gradient, setup_context=_keep)


def _solver(scores: Tensor) -> str:
    if BACKEND not in ("auto", "torch", "triton"):
        raise SmartpruneError(f"soft_topk: SMARTPRUNE_TOPK={BACKEND!r} is unknown; use auto, torch or triton")
    if BACKEND != "auto":
        return BACKEND
    if scores.device.type == "cpu":
        return "cpu"
    return "triton" if scores.device.type == "cuda" and _has_triton() else "torch"


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


# CPU: a few passes over chunks that stay in cache.


def _forward_cpu(
    x: Tensor, k: float, tau: float, cost: Tensor | None, warm: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, _State]:
    low, high = (float(v) for v in torch.aminmax(x))
    if not math.isfinite(low) or not math.isfinite(high):
        raise SmartpruneError(f"soft_topk: {_FACTS[1]}")
    c, target, total = None, k, float(x.numel())
    if cost is not None:
        total = float(cost.sum(dtype=torch.float64))
        if not math.isfinite(total) or float(cost.min()) < 0:
            raise SmartpruneError(f"soft_topk: {_FACTS[8]}")
        if k > total * (1 + 1e-6):  # a float32 sum of the same costs may end up a little above ours
            _refuse_k(k, total)
        c = cost.to(x.dtype).contiguous()
        if c.dtype != cost.dtype:
            rounded = float(c.sum(dtype=torch.float64))
            target, total = k * (rounded / total if total else 1.0), rounded
    edge = 0 < target < total
    mask = torch.empty_like(x) if edge else torch.full_like(x, float(target > 0))
    theta = (math.inf if target <= 0 else -math.inf, 0.0)
    if edge:
        start = None
        if warm is not None:
            pivot, delta = warm.tolist()
            start = (pivot, delta) if math.isfinite(pivot + delta) else None
        theta = _solve(x, target, tau, c, total, (low, high), mask, start)
    if warm is not None:
        warm.copy_(torch.tensor(theta if edge else (math.nan, math.nan), dtype=torch.float64))
    return mask, x, c, (*theta, tau)


def _solve(
    x: Tensor,
    k: float,
    tau: float,
    c: Tensor | None,
    total: float,
    span: tuple[float, float],
    mask: Tensor,
    start: tuple[float, float] | None,
) -> tuple[float, float]:
    """Safeguarded third-order Newton on z -> z + u; fills mask and returns (pivot, delta)."""
    rounding = np.float64 if x.dtype == torch.float64 else np.float32
    logit = math.log(k) - math.log(total - k)
    loose, fine, noise = TOLERANCES[x.dtype]
    loose, noise = loose * min(k, total - k) * (1 + abs(logit) / 4), noise * min(k, total - k)
    flip = k > FLIP * total  # nearly all are kept: sum what is dropped, the sum of what is kept would round it away
    slack = 1e-6 * (span[1] - span[0]) + tau
    low, high = span[0] - tau * logit - slack, span[1] - tau * logit + slack
    located = start is None
    pivot, delta = _locate(x, k, tau, c, total, span) if start is None else start
    if not low < pivot + delta < high:
        pivot, delta = 0.5 * low + 0.5 * high, 0.0
    low, high = low - pivot, high - pivot  # from here on: offsets from the pivot, like delta
    step, before = math.inf, math.inf
    stale = cut = True
    for _ in range(100):
        moved = float(rounding(pivot + delta))
        shift = pivot - moved
        pivot, delta, low, high = moved, delta + shift, low + shift, high + shift
        cut = max(span[1] - pivot, pivot - span[0]) > (LIMIT - 1) * tau
        F, A, B = _sums(x, c, pivot, delta, tau, mask, cut, flip)
        r, B = (total - k - F, -B) if flip else (F - k, B)
        stale = flip
        tolerance = max(min(loose, fine * A), noise)
        if abs(r) <= tolerance:
            break
        low, high = (delta, high) if r > 0 else (low, delta)
        u, left = _newton(r, A, B, k, total)
        new = delta - tau * u
        if abs(u) > 1 and not located:  # the warm start is off: two passes locate theta better than ten steps
            located = True
            p, d = _locate(x, k, tau, c, total, span)
            new, left = (p - pivot) + d, math.inf
        if not low < new < high or abs(new - delta) > 0.5 * before:
            new, left = 0.5 * low + 0.5 * high, math.inf
        if new in (delta, low, high):
            break
        before, step, delta, stale = step, abs(new - delta), new, True
        if left <= 0.5 * tolerance:
            break
    if stale:
        _sums(x, c, pivot, delta, tau, mask, cut, None)
    return pivot, delta


def _newton(r: float, A: float, B: float, k: float, total: float) -> tuple[float, float]:
    """Step u towards sum(c sigmoid(z + u)) = k, and a bound on what is left of the residual r after it.

    |sigmoid'''| <= sigmoid', hence after the exact root of the quadratic at most A (e^|u| - 1 - |u| - u^2 / 2) is
    left. Far away Newton runs on the logit of the mean, which is exact for equal scores.
    """
    F = k + r
    if A <= 0 or not 0 < F < total:
        return math.copysign(math.inf, -r), math.inf
    root = A * A - 2 * r * B
    if abs(r) <= 0.5 * A and root >= 0:
        u = -2 * r / (A + math.sqrt(root))
        return u, A * abs(u) ** 3 / 6 * math.exp(abs(u))
    logits = math.log(F) - math.log(total - F) - math.log(k) + math.log(total - k)
    return -logits * F * (1 - F / total) / A, math.inf


def _sums(
    x: Tensor, c: Tensor | None, pivot: float, delta: float, tau: float, mask: Tensor, cut: bool, flip: bool | None
) -> tuple[float, float, float]:
    """One pass: writes m = sigmoid(z), or of -z if flip; returns sum(c m), sum(c v) and sum(c v (1 - 2 m)).

    flip None: the mask alone, no sums. v = m (1 - m).
    """
    F = A = M = 0.0
    tau = -tau if flip else tau
    shift = torch.tensor(-delta / tau, dtype=x.dtype)
    size = _chunk(x)
    buffer = torch.empty(min(size, x.numel()), dtype=x.dtype)
    for i in range(0, x.numel(), size):
        m = mask[i : i + size]
        _z(x[i : i + size], pivot, shift, tau, cut, m).sigmoid_()
        if flip is None:
            continue
        v = buffer[: m.numel()]
        if c is None:
            F += _total(m)
            torch.addcmul(m, m, m, value=-1, out=v)
        else:
            torch.mul(m, c[i : i + size], out=v)
            F += _total(v)
            v.addcmul_(v, m, value=-1)
        A += v.sum().item()
        M += torch.dot(v, m).item()
    return F, A, A - 2 * M


def _total(x: Tensor) -> float:
    """Sum with float32 runs of 256 elements, the rest in float64: nearly as exact as float64, four times as fast."""
    whole = x.numel() & ~255
    total = x[:whole].view(-1, 256).sum(1).sum(dtype=torch.float64).item()
    return total + x[whole:].sum(dtype=torch.float64).item() if whole < x.numel() else total


def _z(x: Tensor, pivot: float, shift: Tensor, tau: float, cut: bool, out: Tensor) -> Tensor:
    torch.sub(x, pivot, out=out)
    torch.add(shift, out, alpha=1 / tau, out=out)
    return out.clamp_(-LIMIT, LIMIT) if cut else out


def _chunk(x: Tensor) -> int:
    return _CHUNK // x.element_size() * torch.get_num_threads()


def _locate(
    x: Tensor, k: float, tau: float, c: Tensor | None, total: float, span: tuple[float, float]
) -> tuple[float, float]:
    """Start for a cold search. Many scores: a sample says where theta lies; if few scores lie there, solve on those."""
    if x.numel() <= 2 * _SAMPLE:
        return _quantile(x, k, tau, c, total, span)
    index = _sample_index(x.numel())
    xs, cs = x[index], None if c is None else c[index]
    totals = float(_SAMPLE) if cs is None else float(cs.sum(dtype=torch.float64))
    if totals <= 0:
        return _quantile(x, k, tau, c, total, span)
    count = totals if cs is None else totals**2 / float(cs.double().square().sum())
    share = k / total
    margin = 4 * math.sqrt(share * (1 - share) / count) + 4 / count
    a = _tail(xs, cs, (share + margin) * totals, totals, span)
    b = _tail(xs, cs, (share - margin) * totals, totals, span)
    # theta may lie log(N) tau beyond the outermost score; 50 tau further out a mask is 0 or 1 for certain.
    below, above = a - 70 * tau, b + 70 * tau
    if int(((xs >= below) & (xs <= above)).sum()) > _SAMPLE // 5:
        ks = min(max(share * totals, 1e-9 * totals), (1 - 1e-9) * totals)
        return _solve(xs, ks, tau, cs, totals, _span(xs), torch.empty_like(xs), None)
    parts: list[Tensor] = []
    costs: list[Tensor] = []
    base = 0.0
    size = _chunk(x)
    flags = torch.empty(2, size, dtype=torch.bool)
    for i in range(0, x.numel(), size):
        piece = x[i : i + size]
        over, inside = flags[:, : piece.numel()]
        torch.gt(piece, above, out=over)
        torch.ge(piece, below, out=inside)
        inside.logical_xor_(over)
        where = inside.nonzero().squeeze(1)
        parts.append(piece[where])
        if c is None:
            base += over.sum().item()
        else:
            costs.append(c[i : i + size][where])
            base += (c[i : i + size] * over).sum().item()
    xw, cw = torch.cat(parts), None if c is None else torch.cat(costs)
    rest = k - base
    totalw = float(xw.numel()) if cw is None else float(cw.sum(dtype=torch.float64))
    if 0 < rest < totalw:
        pivot, delta = _solve(xw, rest, tau, cw, totalw, _span(xw), torch.empty_like(xw), None)
        inner = (below <= span[0] or pivot + delta >= a - 20 * tau, above >= span[1] or pivot + delta <= b + 20 * tau)
        if all(inner):
            return pivot, delta
    return _quantile(x, k, tau, c, total, span)


@lru_cache(maxsize=8)
def _sample_index(n: int) -> Tensor:
    jitter = torch.rand(_SAMPLE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return ((torch.arange(_SAMPLE) + jitter) * (n / _SAMPLE)).long().clamp_(max=n - 1)


def _span(x: Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(x)
    return float(low), float(high)


def _tail(x: Tensor, c: Tensor | None, weight: float, total: float, span: tuple[float, float]) -> float:
    """The score above which the given weight lies."""
    if weight <= 0 or weight >= total:
        return span[1] if weight <= 0 else span[0]
    if c is None:
        return float(x.kthvalue(x.numel() - min(int(weight), x.numel() - 1)).values)
    order = x.argsort(descending=True)
    at = int(torch.searchsorted(c[order].double().cumsum(0), weight))
    return float(x[order[min(at, x.numel() - 1)]])


def _quantile(
    x: Tensor, k: float, tau: float, c: Tensor | None, total: float, span: tuple[float, float]
) -> tuple[float, float]:
    """Start from all the scores: mean + logit where tau is large, else between the last kept and the first dropped."""
    if span[1] - span[0] <= 4 * tau:
        mean = x.double().mean() if c is None else (x.double() * c).sum() / total
        return float(mean) - tau * (math.log(k) - math.log(total - k)), 0.0
    slack = 1e-6 * min(k, total - k)
    last, first = _tail(x, c, k - slack, total, span), _tail(x, c, k + slack, total, span)
    return 0.5 * last + 0.5 * first, 0.0


def _backward_cpu(x: Tensor, g: Tensor, c: Tensor | None, state: _State) -> Tensor:
    pivot, delta, tau = state
    if not math.isfinite(pivot):
        return torch.zeros_like(x)
    out = torch.empty_like(x)
    shift = torch.tensor(-delta / tau, dtype=x.dtype)
    size = _chunk(x)
    buffer = torch.empty(min(size, x.numel()), dtype=x.dtype)
    vg = cv = total = 0.0
    for i in range(0, x.numel(), size):
        v = out[i : i + size]
        work = buffer[: v.numel()]
        # v = s (1 - s) with s = sigmoid(-|z|) <= 1/2 keeps its digits in both tails, m (1 - m) does not
        _z(x[i : i + size], pivot, shift, tau, True, v).abs_().neg_().sigmoid_()
        v.addcmul_(v, v, value=-1)
        vg += torch.mul(v, g[i : i + size], out=work).sum().item()
        if c is None:
            cv += v.sum().item()
        else:
            cv += torch.mul(v, c[i : i + size], out=work).sum().item()
            total += c[i : i + size].sum().item()
    if not cv > VANISHED * (total if c is not None else x.numel()):
        return out.zero_()
    for i in range(0, x.numel(), size):
        v = out[i : i + size]
        work = buffer[: v.numel()]
        if c is None:
            torch.sub(g[i : i + size], vg / cv, out=work)
        else:
            torch.add(g[i : i + size], c[i : i + size], alpha=-vg / cv, out=work)
        v.mul_(work.mul_(1 / tau))
    return out


# Plain tensor operations: nothing waits for the device, so the number of steps is fixed.

STEPS = 64


def _forward_plain(
    x: Tensor, k: float | Tensor, tau: float | Tensor, cost: Tensor | None, warm: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    kept, heat = _scalar(k, x.device), _scalar(tau, x.device)
    total = _scalar(x.numel(), x.device) if cost is None else cost.sum(dtype=torch.float64)
    low, high = torch.aminmax(x)
    code = (~(torch.isfinite(low) & torch.isfinite(high))).int()
    code = code + 2 * (~((heat >= TAU_RANGE[0]) & (heat <= TAU_RANGE[1]))).int()
    code = code + 4 * (~((kept >= 0) & (kept <= total * (1 + (0 if cost is None else 1e-6))))).int()
    c = None
    if cost is not None:
        code = code + 8 * (~(torch.isfinite(total) & (cost.min() >= 0))).int()
        c = cost.to(x.dtype).contiguous()
        rounded = c.sum(dtype=torch.float64)
        kept, total = kept * (rounded / total), rounded
    if x.device.type == "cpu":
        _raise(int(code), "soft_topk: ")
    else:
        # The codes pile up on the device: a later, correct call must not wipe out one the host has not seen yet.
        pinned, _, codes = device_flag(x.device)
        pinned.copy_(codes.bitwise_or_(code), non_blocking=True)
    goal = torch.minimum(torch.maximum(kept, 1e-9 * total), (1 - 1e-9) * total)
    logit = torch.log(goal) - torch.log(total - goal)
    loose, fine, noise = TOLERANCES[x.dtype]
    smaller = torch.minimum(goal, total - goal)
    flip = goal > FLIP * total
    sign = torch.where(flip, -1.0, 1.0).to(x.dtype)
    bias = heat * logit
    slack = 1e-6 * (high.double() - low.double()) + heat
    down, up = low - bias - slack, high - bias + slack
    pivot, delta = 0.5 * down + 0.5 * up, torch.zeros_like(down)
    if warm is not None:
        use = (warm.sum() > down) & (warm.sum() < up)
        pivot, delta = torch.where(use, warm[0], pivot), torch.where(use, warm[1], delta)
    down, up = down - pivot, up - pivot
    step = before = up - down
    mask = x
    for _ in range(STEPS):
        moved = (pivot + delta).to(x.dtype).double()
        shift = pivot - moved
        pivot, delta, down, up = moved, delta + shift, down + shift, up + shift
        mask = _z_plain(x, pivot, delta, heat).mul_(sign).sigmoid_()
        weighted = mask if c is None else mask * c
        amount = weighted.sum(dtype=torch.float64)
        r = torch.where(flip, total - goal - amount, amount - goal)
        slope = (weighted * (1 - mask)).sum(dtype=torch.float64)
        down, up = torch.where(r > 0, delta, down), torch.where(r > 0, up, delta)
        new = delta + heat * r / slope
        safe = (new > down) & (new < up) & ((new - delta).abs() <= 0.5 * before)
        new = torch.where(safe, new, 0.5 * down + 0.5 * up)
        tolerance = torch.minimum(loose * smaller * (1 + logit.abs() / 4), fine * slope)
        new = torch.where(r.abs() <= torch.maximum(tolerance, noise * smaller), delta, new)
        before, step, delta = step, (new - delta).abs(), new
    mask = _z_plain(x, pivot, delta, heat).sigmoid_()
    none, every = kept <= 0, kept >= total
    mask = mask.masked_fill_(none, 0.0).masked_fill_(every & ~none, 1.0).masked_fill_(code > 0, math.nan)
    if warm is not None:
        unsolved = none | every | (code > 0)
        warm.copy_(torch.stack((pivot, delta)).masked_fill_(unsolved, math.nan))
    pivot = pivot.masked_fill(every, -math.inf).masked_fill_(none, math.inf)
    return mask, x, c, torch.stack((pivot, delta, heat, total))


def _z_plain(x: Tensor, pivot: Tensor, delta: Tensor, tau: Tensor) -> Tensor:
    return (x - pivot.to(x.dtype)).mul_((1 / tau).to(x.dtype)).sub_((delta / tau).to(x.dtype)).clamp_(-LIMIT, LIMIT)


def _backward_plain(x: Tensor, g: Tensor, c: Tensor | None, state: Tensor) -> Tensor:
    pivot, delta, tau, total = state
    s = _z_plain(x, pivot, delta, tau).abs_().neg_().sigmoid_()
    v = s * (1 - s)
    cv = (v if c is None else v * c).sum(dtype=torch.float64)
    mean = ((v * g).sum(dtype=torch.float64) / cv).to(x.dtype)
    out = v.mul_(g - mean if c is None else g - c * mean).mul_((1 / tau).to(x.dtype))
    return out.masked_fill_(cv <= VANISHED * total, 0.0)


# Errors. A CUDA call cannot raise without waiting for the device: it returns NaN and a code; the next call raises.

_flags: dict[int, tuple[Tensor, Any, Tensor]] = {}


def device_flag(device: torch.device) -> tuple[Tensor, Any, Tensor]:
    """A pinned int32 per CUDA device that receives error codes, the same memory as an array, and an int32 there."""
    index = _index(device)
    if index not in _flags:
        pinned = torch.zeros(1, dtype=torch.int32, pin_memory=index >= 0)
        _flags[index] = (pinned, pinned.numpy(), torch.zeros(1, dtype=torch.int32, device=device))
    return _flags[index]


def _index(device: torch.device) -> int:
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def check_device(device: torch.device | str | int | None = None) -> None:
    """Raise if an earlier soft_topk on this CUDA device (None: on any) saw bad values; never waits for the device."""
    if device is None:
        indices = list(_flags)
    else:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        indices = [_index(found)]
    for index in indices:
        if index in _flags and _flags[index][1][0]:
            code = int(_flags[index][1][0])
            _flags[index][1][0] = 0
            _flags[index][2].zero_()
            _raise(code, f"soft_topk: in an earlier call on cuda:{index} (its mask is NaN) ")


def _raise(code: int, where: str) -> None:
    if code:
        raise SmartpruneError(where + "; ".join(text for bit, text in _FACTS.items() if code & bit))


def _refuse_k(k: float, total: float | None) -> None:
    end = "sum(cost)" if total is None else f"{total:g}"
    raise SmartpruneError(f"soft_topk: k={k!r} is outside [0, {end}]; give the number (or the cost) to keep")


def _kind(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"


def _check_vectors(where: str, scores: Tensor, cost: Tensor | None) -> None:
    if scores.dim() != 1 or scores.numel() == 0 or not scores.is_floating_point() or scores.element_size() == 1:
        raise SmartpruneError(
            f"{where}: scores are {_kind(scores)}; they must be one non-empty vector of float64, float32, bfloat16 or "
            "float16: flatten the scores of all layers into it"
        )
    if cost is not None and (cost.shape != scores.shape or cost.device != scores.device or cost.is_complex()):
        raise SmartpruneError(
            f"{where}: cost is {_kind(cost)}; it must be real, {list(scores.shape)} and on {scores.device}, one cost "
            "per score"
        )


def _check(
    scores: Tensor, k: float | Tensor, tau: float | Tensor, cost: Tensor | None, warm: Tensor | None
) -> tuple[float | Tensor, float | Tensor]:
    """Everything that can be known without reading CUDA memory; k and tau as float unless they live there."""
    _check_vectors("soft_topk", scores, cost)
    device = scores.device
    if warm is not None and (warm.shape != (2,) or warm.dtype != torch.float64 or warm.device != device):
        raise SmartpruneError(
            f"soft_topk: warm is {_kind(warm)}; it must be float64 [2] on {device}: "
            "make it with torch.full((2,), math.nan, dtype=torch.float64)"
        )
    k, tau = _number("k", k, device), _number("tau", tau, device)
    if not isinstance(tau, Tensor) and not TAU_RANGE[0] <= tau <= TAU_RANGE[1]:
        raise SmartpruneError(f"soft_topk: tau={tau!r}: {_FACTS[2]}")
    if not isinstance(k, Tensor) and not (0 <= k <= scores.numel() if cost is None else 0 <= k < math.inf):
        _refuse_k(k, scores.numel() if cost is None else None)
    if device.type == "cuda":
        check_device(device)
    return k, tau


def _number(name: str, value: float | Tensor, device: torch.device) -> float | Tensor:
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise SmartpruneError(f"soft_topk: {name} is {_kind(value)}; give a number or a 0-dim tensor")
        if value.device == device and device.type != "cpu":
            return value.detach()
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SmartpruneError(f"soft_topk: {name}={value!r} is not a number; give a number or a 0-dim tensor")
    return float(value)


# Hard selection.


def hard_topk(
    scores: Tensor,
    k: float,
    cost: Tensor | None = None,
    floor: float | Tensor | None = None,
    layer: Tensor | None = None,
) -> Tensor:
    """Mask [N] of the blocks with the highest scores: exactly k of them, or as many as the cost k pays for.

    Equal scores go to the lower index. With cost the total never exceeds k, and every block left out costs more than
    what is left of k. floor keeps blocks in every layer (layer [N] says where a block lives) before the ranking is
    global: a share in [0, 1], rounded up per layer in exact arithmetic, or an integer tensor [L] of counts. Integer
    costs, and costs with a short binary fraction, are added exactly; others in float64.

    >>> scores = torch.tensor([5.0, 4.0, 3.0, 3.0])
    >>> hard_topk(scores, 3)
    tensor([ True,  True,  True, False])
    >>> hard_topk(scores, 2, layer=torch.tensor([0, 0, 1, 1]), floor=0.5)
    tensor([ True, False,  True, False])
    >>> hard_topk(scores, 6, cost=torch.tensor([4, 3, 2, 1]))
    tensor([ True, False,  True, False])
    """
    _check_vectors("hard_topk", scores, cost)
    scores, n = scores.detach(), scores.numel()
    if not bool(torch.isfinite(scores).all()):
        raise SmartpruneError(f"hard_topk: {_FACTS[1]}")
    limit = k.item() if isinstance(k, Tensor) else k
    if isinstance(limit, bool) or not isinstance(limit, int | float) or math.isnan(limit):
        raise SmartpruneError(f"hard_topk: k={k!r} is not a number; give the number (or the cost) of blocks to keep")
    forced = _forced(scores, floor, layer)
    if cost is None:
        if limit != int(limit) or not 0 <= limit <= n:
            raise SmartpruneError(f"hard_topk: k={limit!r} is not an integer in [0, {n}]; give the number to keep")
        least = int(forced.sum())
        if least > limit:
            raise SmartpruneError(
                f"hard_topk: floor={_shown(floor)} keeps {least} blocks but k={limit!r}; "
                f"lower floor or keep at least {least}"
            )
        return forced | _best(scores.masked_fill(forced, -math.inf), int(limit) - least)
    if not bool(torch.isfinite(cost).all()) or float(cost.min()) < 0:
        raise SmartpruneError(f"hard_topk: {_FACTS[8]}")
    if limit < 0:
        raise SmartpruneError(f"hard_topk: k={limit!r} is negative; give the cost that may be spent")
    price, room, unit = _exact(cost, limit)
    spent = price[forced].sum().item()
    if spent > room:
        raise SmartpruneError(
            f"hard_topk: floor={_shown(floor)} costs {spent / unit:g} but k={limit!r}; "
            f"lower floor or spend at least {spent / unit:g}"
        )
    room -= spent
    order = scores.masked_fill(forced, math.inf).sort(descending=True, stable=True).indices[int(forced.sum()) :]
    mask = forced.clone()
    # A block that does not fit now never fits later; every round drops at least one distinct cost.
    while True:
        order = order[price[order] <= room]
        if order.numel() == 0:
            return mask
        running = price[order].cumsum(0)
        taken = int((running <= room).sum())
        mask[order[:taken]] = True
        room -= running[taken - 1].item()
        order = order[taken:]


def _best(scores: Tensor, k: int) -> Tensor:
    if k == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    last = scores.topk(k).values[-1]
    mask = scores > last
    tied = (scores == last).nonzero().squeeze(1)
    mask[tied[: k - int(mask.sum())]] = True
    return mask


def _forced(scores: Tensor, floor: float | Tensor | None, layer: Tensor | None) -> Tensor:
    forced = torch.zeros_like(scores, dtype=torch.bool)
    if floor is None:
        return forced
    if layer is None or layer.shape != scores.shape or layer.is_floating_point() or int(layer.min()) < 0:
        given = "missing" if layer is None else _kind(layer)
        raise SmartpruneError(
            f"hard_topk: floor={_shown(floor)} but layer is {given}; floor needs layer, {list(scores.shape)} integers "
            ">= 0 saying which layer each block belongs to"
        )
    layer = layer.to(scores.device, torch.long)
    sizes = torch.bincount(layer)
    if isinstance(floor, Tensor):
        if floor.is_floating_point() or floor.dim() != 1 or floor.numel() < sizes.numel() or bool((floor < 0).any()):
            raise SmartpruneError(
                f"hard_topk: floor is {_kind(floor)}; it must be one count >= 0 for each of the {sizes.numel()} layers"
            )
        least = floor.to(scores.device, torch.long)[: sizes.numel()]
        if bool((least > sizes).any()):
            worst = int((least - sizes).argmax())
            raise SmartpruneError(
                f"hard_topk: floor asks for {int(least[worst])} blocks of layer {worst}, which has "
                f"{int(sizes[worst])}; lower it to at most that"
            )
    else:
        if isinstance(floor, bool) or not 0 <= floor <= 1:
            raise SmartpruneError(f"hard_topk: floor={floor!r} is outside [0, 1]; give a share such as 0.02")
        share = Fraction(str(floor))  # 0.02 * 150 is more than 3 in binary
        counts = [math.ceil(share * size) for size in sizes.tolist()]
        least = torch.tensor(counts, dtype=torch.long, device=scores.device)
    order = scores.sort(descending=True, stable=True).indices
    order = order[layer[order].sort(stable=True).indices]
    first = sizes.cumsum(0) - sizes
    home = layer[order]
    rank = torch.arange(order.numel(), device=scores.device) - first[home]
    forced[order] = rank < least[home]
    return forced


def _shown(floor: float | Tensor | None) -> str:
    return str(floor.tolist()) if isinstance(floor, Tensor) else repr(floor)


def _exact(cost: Tensor, limit: float) -> tuple[Tensor, float, float]:
    """Costs and limit in a common unit of 2^-bits where that makes them integers that add without rounding."""
    if not cost.is_floating_point():
        price, top = cost.long(), int(cost.sum())
        return price, min(math.floor(limit) if math.isfinite(limit) else top, top), 1.0
    wide = cost.double()
    for bits in (0, 8, 16, 24, 32):
        scaled = wide * 2.0**bits
        if float(scaled.sum()) >= 2.0**62:
            break
        if bool((scaled == scaled.round()).all()):
            price = scaled.long()
            top = int(price.sum())
            return price, min(math.floor(Fraction(limit) * 2**bits) if math.isfinite(limit) else top, top), 2.0**bits
    return wide, limit, 1.0
