"""soft_topk on the CPU: a few passes over chunks that fit into the cache. Also the limits and tolerances of all solvers."""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..core.hard import ERRORS
from ..errors import SmartpruneError

FLIP = 0.8  # if a larger share is kept, sums run over what is dropped
FLOAT32 = (1e-25, 1e25)  # costs outside are rescaled before they become float32, so that their sums fit, too
LIMIT = 60.0  # |z| is clamped: exp(-60) is still a normal float32, and denormals are half as fast
VANISHED = 1e-20  # if sum(cost * v) is below this share of sum(cost), every block is decided and the gradient is zero
# Tolerances of the sum. First: a share of min(k, sum(cost) - k), more if |z| is large, because the sum then moves in
# steps of |z| ulp. Second, for few undecided blocks: a share of sum(cost * v), which bounds the error of one element.
# Third: the rounding error of the sum, as a share like the first.
TOLERANCES = {torch.float32: (5e-7, 1e-4, 2e-8), torch.float64: (1e-12, 1e-9, 1e-14)}

State = tuple[float, float, float]  # pivot, delta, tau

_CHUNK = 1 << 18  # bytes per tensor of one chunk: three of them stay in the second-level cache
_SAMPLE = 1 << 14


def warm_rows(warm: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Where a search reads its start and writes its end: the same (pivot, delta), or the two rows of warm."""
    return (warm[0], warm[1]) if warm is not None and warm.dim() == 2 else (warm, warm)


def raise_k(k: float, total: float | None) -> None:
    """Raises the error for a k outside [0, total]; None stands for the sum of costs that are not known here."""
    end = "sum(cost)" if total is None else f"{total:g}"
    raise SmartpruneError(f"soft_topk: k={k!r} is outside [0, {end}]; give the number (or the cost) to keep")


def forward(x: Tensor, k: float, tau: float, cost: Tensor | None, warm: Tensor | None) -> tuple[Tensor, Tensor | None, State]:
    """Mask [N], the costs in the dtype of x, and the state for backward."""
    low, high = (float(v) for v in torch.aminmax(x))
    if not math.isfinite(low) or not math.isfinite(high):
        raise SmartpruneError(f"soft_topk: {ERRORS[1]}")
    c, target, total = None, k, float(x.numel())
    if cost is not None:
        total = float(cost.sum(dtype=torch.float64))
        if not math.isfinite(total) or float(cost.min()) < 0:
            raise SmartpruneError(f"soft_topk: {ERRORS[8]}")
        if k > total * (1 + 1e-6):  # the float32 sum of the same costs may be a little larger
            raise_k(k, total)
        largest = float(cost.max())
        if largest > 0 and not FLOAT32[0] <= largest <= FLOAT32[1] and x.dtype is torch.float32:
            cost, target, total = cost / largest, k / largest, total / largest  # only the ratios of costs matter
        c = cost.to(x.dtype).contiguous()
        if c.dtype != cost.dtype:
            rounded = float(c.sum(dtype=torch.float64))
            target, total = target * (rounded / total if total else 1.0), rounded
    soft = 0 < target < total
    begin, end = warm_rows(warm)
    mask = torch.empty_like(x) if soft else torch.full_like(x, float(target > 0))
    theta = (math.inf if target <= 0 else -math.inf, 0.0)
    if soft:
        start = None
        if begin is not None:
            pivot, delta = begin.tolist()
            start = (pivot, delta) if math.isfinite(pivot + delta) else None
        theta = _solve(x, target, tau, c, total, (low, high), mask, start)
    if end is not None:
        end.copy_(torch.tensor(theta if soft else (math.nan, math.nan), dtype=torch.float64, device="cpu"))
    return mask, c, (*theta, tau)


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
    """Solves for theta by a safeguarded third-order Newton iteration on z -> z + u. Fills mask, returns (pivot, delta)."""
    rounding = np.float64 if x.dtype == torch.float64 else np.float32
    logit = math.log(k) - math.log(total - k)
    loose, fine, noise = TOLERANCES[x.dtype]
    loose, noise = loose * min(k, total - k) * (1 + abs(logit) / 4), noise * min(k, total - k)
    flip = k > FLIP * total  # the dropped share would vanish in the rounding error of the kept sum
    slack, bias = 1e-6 * (span[1] - span[0]) + tau, tau * logit
    located = start is None
    pivot, delta = _locate(x, k, tau, c, total, span) if start is None else start
    if not span[0] - bias - slack < pivot + delta < span[1] - bias + slack:
        pivot, delta = 0.5 * span[0] + 0.5 * span[1], -bias
    # relative to the pivot, like delta: absolute ends that are a few tau apart could be equal after rounding
    low, high = span[0] - pivot - bias - slack, span[1] - pivot - bias + slack
    step, before, stride = math.inf, math.inf, 8 * tau
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
        if abs(u) > 1 and not located:  # a bad warm start: two passes locate theta better than ten steps
            located, moved = True, pivot
            pivot, new = _locate(x, k, tau, c, total, span)
            delta, low, high, left = delta + (moved - pivot), low + (moved - pivot), high + (moved - pivot), math.inf
        if not low < new < high or abs(new - delta) > 0.5 * before:
            # step towards the middle, a short way at first: the bracket may span all scores, and halving it takes too many steps
            new, left, stride = min(max(0.5 * low + 0.5 * high, delta - stride), delta + stride), math.inf, 8 * stride
        if new in (delta, low, high):
            break
        before, step, delta, stale = step, abs(new - delta), new, True
        if left <= 0.5 * tolerance:
            break
    if stale:
        _sums(x, c, pivot, delta, tau, mask, cut, None)
    return pivot, delta


def _newton(r: float, A: float, B: float, k: float, total: float) -> tuple[float, float]:
    """Step u towards sum(c sigmoid(z + u)) = k, and a bound on the residual after it.

    Since |sigmoid'''| <= sigmoid', the residual at the exact root of the quadratic is at most A (e^|u| - 1 - |u| - u^2 / 2).
    Far from the solution, Newton runs on the logit of the mean, which is exact for equal scores.
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

    If flip is None, only the mask is computed. v = m (1 - m).
    """
    F = A = M = 0.0
    tau = -tau if flip else tau
    shift = torch.tensor(-delta / tau, dtype=x.dtype, device="cpu")
    size = _chunk(x)
    buffer = torch.empty(min(size, x.numel()), dtype=x.dtype, device="cpu")
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
    """Sum in float32 over runs of 256 elements, and in float64 over the runs: nearly as exact as float64, four times as fast."""
    whole = x.numel() & ~255
    total = x[:whole].view(-1, 256).sum(1).sum(dtype=torch.float64).item()
    return total + x[whole:].sum(dtype=torch.float64).item() if whole < x.numel() else total


def _z(x: Tensor, pivot: float, shift: Tensor, tau: float, cut: bool, out: Tensor) -> Tensor:
    torch.sub(x, pivot, out=out)
    torch.add(shift, out, alpha=1 / tau, out=out)
    return out.clamp_(-LIMIT, LIMIT) if cut else out


def _chunk(x: Tensor) -> int:
    return _CHUNK // x.element_size() * torch.get_num_threads()


def _locate(x: Tensor, k: float, tau: float, c: Tensor | None, total: float, span: tuple[float, float]) -> tuple[float, float]:
    """The start of a search without warm start. For many scores, a sample brackets theta, and few scores lie in the bracket."""
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
    # theta may lie log(N) tau beyond the outermost score, and 50 tau further a mask is certainly 0 or 1.
    below, above = a - 70 * tau, b + 70 * tau
    if int(((xs >= below) & (xs <= above)).sum()) > _SAMPLE // 5:
        ks = min(max(share * totals, 1e-9 * totals), (1 - 1e-9) * totals)
        return _solve(xs, ks, tau, cs, totals, _span(xs), torch.empty_like(xs), None)
    parts: list[Tensor] = []
    costs: list[Tensor] = []
    base = 0.0
    size = _chunk(x)
    flags = torch.empty(2, size, dtype=torch.bool, device="cpu")
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
    jitter = torch.rand(_SAMPLE, dtype=torch.float64, generator=torch.Generator().manual_seed(0), device="cpu")
    return ((torch.arange(_SAMPLE, device="cpu") + jitter) * (n / _SAMPLE)).long().clamp_(max=n - 1)


def _span(x: Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(x)
    return float(low), float(high)


def _tail(x: Tensor, c: Tensor | None, weight: float, total: float, span: tuple[float, float]) -> float:
    """The score such that the scores above it have the given weight."""
    if weight <= 0 or weight >= total:
        return span[1] if weight <= 0 else span[0]
    if c is None:
        return float(x.kthvalue(x.numel() - min(int(weight), x.numel() - 1)).values)
    order = x.argsort(descending=True)
    at = int(torch.searchsorted(c[order].double().cumsum(0), weight))
    return float(x[order[min(at, x.numel() - 1)]])


def _quantile(x: Tensor, k: float, tau: float, c: Tensor | None, total: float, span: tuple[float, float]) -> tuple[float, float]:
    """A start from all scores: mean and logit for a large tau, else the middle of the last kept and the first dropped score."""
    if span[1] - span[0] <= 4 * tau:
        mean = x.double().mean() if c is None else (x.double() * c).sum() / total
        return float(mean) - tau * (math.log(k) - math.log(total - k)), 0.0
    slack = 1e-6 * min(k, total - k)
    last, first = _tail(x, c, k - slack, total, span), _tail(x, c, k + slack, total, span)
    return 0.5 * last + 0.5 * first, 0.0


def backward(x: Tensor, g: Tensor, c: Tensor | None, state: State) -> Tensor:
    """Gradient [N] in the dtype of x."""
    pivot, delta, tau = state
    if not math.isfinite(pivot):
        return torch.zeros_like(x)
    out = torch.empty_like(x)
    shift = torch.tensor(-delta / tau, dtype=x.dtype, device="cpu")
    size = _chunk(x)
    buffer = torch.empty(min(size, x.numel()), dtype=x.dtype, device="cpu")
    vg = cv = total = 0.0
    for i in range(0, x.numel(), size):
        v = out[i : i + size]
        work = buffer[: v.numel()]
        # v = s (1 - s) with s = sigmoid(-|z|) <= 1/2 is accurate in both tails, m (1 - m) is not
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
