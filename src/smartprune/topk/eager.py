"""soft_topk by plain tensor operations, used on CUDA where Triton is missing; and the error codes of CUDA devices.

Nothing waits for the device, so the number of steps is fixed. Sorting says in which score, or between which two, the
sum crosses k; theta then lies within 34 tau of them, and nearly always a few Newton steps suffice. Everything
is float64 and relative to a pivot near theta, and costs are shares of their sum.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..core.hard import ERRORS, TAU_RANGE
from ..errors import SmartpruneError
from .cpu import VANISHED, rows

STEPS = 10  # of Newton: random problems needed at most 8; where a step leaves the bracket, the bracket is halved instead
SLACK = (1e-12, 4e-15)  # rounding of the crossing, as shares of min(k, sum(cost) - k) and of sum(cost)
REACH = 34.0  # in tau: a score that far above theta counts as kept but for less than the slack, one below as dropped
WINDOW = 2.0  # scores within this many tau of the crossing are taken as equal to guess theta
NOISE = 4e-15  # of a sum, as a share of it: a step from less, where nothing is soft, leads anywhere


def forward(
    x: Tensor, k: float | Tensor, tau: float | Tensor, cost: Tensor | None, warm: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Mask [N], the costs in float64, and what backward reads. warm is only written: sorting finds a better start."""
    wide, c = x.double(), None if cost is None else cost.double()
    kept, heat = scalar(k, x.device), scalar(tau, x.device)
    total = torch.full_like(kept, x.numel()) if c is None else c.sum()
    code = _code(x, k, tau, c, kept, heat, total)
    open_ = (kept > 0) & (kept < total) & (code == 0)
    goal = torch.where(open_, kept / total, 0.5)
    weight = None if c is None else c / total
    pivot, d, low, high = _start(x, weight, goal, heat)
    y = (wide - pivot) / heat
    sums = wide.new_empty(2, x.numel())
    share, spread = sums  # c m and c m (1 - m)
    m = share if weight is None else torch.empty_like(wide)
    base = wide.new_full((2,), 1e-300)  # so that no slope is zero
    for _ in range(STEPS):
        torch.sub(y, d, out=m).sigmoid_()
        if weight is not None:
            torch.mul(m, weight, out=share)
        torch.addcmul(share, share, m, value=-1, out=spread)
        kept_share, slope = torch.addcdiv(base, sums.mean(1) if weight is None else sums.sum(1), goal)
        # a step on the logarithm of the sum: on the sum itself it gains one tau at most where far too much is kept
        r = torch.nn.functional.hardshrink(torch.xlogy(kept_share, kept_share), NOISE)
        more = r > 0
        low, high = torch.where(more, d, low), torch.where(more, high, d)
        new = torch.addcdiv(d, r, slope)
        d = torch.where(new.clamp(low, high) == new, new, torch.lerp(low, high, 0.5))
    fixed = torch.where(code > 0, math.nan, (kept > 0).double())
    mask = torch.where(open_, torch.sub(y, d, out=m).sigmoid_(), fixed).to(x.dtype)
    delta = d * heat
    _, last = rows(warm)
    if last is not None:
        last.copy_(torch.where(open_, torch.stack((pivot, delta)), math.nan))
    pivot = torch.where(open_, pivot, (0.5 - fixed) * math.inf)
    return mask, c, torch.stack((pivot, delta, heat, total))


def _start(x: Tensor, weight: Tensor | None, goal: Tensor, heat: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pivot, and in units of tau from there: a guess of theta, and ends between which theta lies."""
    n = x.numel()
    order = x.sort()
    values = order.values.double()
    if weight is None:
        below = torch.linspace(0, 1, n + 1, dtype=torch.float64, device=x.device)
    else:
        # Integers add to the same bits in any order, as a parallel running sum of floats does not.
        units = (weight[order.indices] * 2.0**61).long().cumsum(0)
        below = torch.nn.functional.pad(units.double() / units[-1], (1, 0))
    drop = 1 - goal
    slack = torch.minimum(goal, drop) * SLACK[0] + SLACK[1]
    crossing = torch.searchsorted(below, torch.stack((drop - slack, drop + slack)))
    ends = values.take((crossing - 1).clamp_(0, n - 1))
    middle = ends.mean()
    pivot = middle.to(x.dtype).double()
    first, last = (ends - pivot) / heat
    # Scores near the crossing as one: theta lies the logit of their kept share below them.
    i = torch.searchsorted(values, torch.sub(middle, heat, alpha=WINDOW).view(1))
    j = torch.searchsorted(values, torch.add(middle, heat, alpha=WINDOW).view(1), right=True)
    under, upto = below.take(torch.cat((i, j)))
    part = ((upto - drop) / (upto - under)).nan_to_num_(0.5, 0.5, 0.5)
    return pivot, torch.lerp(first, last, 0.5) - torch.logit(part, 1e-12), first - REACH, last + REACH


def backward(x: Tensor, g: Tensor, c: Tensor | None, state: Tensor) -> Tensor:
    """Gradient [N] in the dtype of x."""
    pivot, delta, tau, total = state
    s = ((x.double() - pivot) - delta).div_(tau).abs_().neg_().sigmoid_()
    v = s.addcmul_(s, s, value=-1)
    c = None if c is None else c.double()
    cv = v.sum() if c is None else torch.dot(v, c)
    mean = torch.dot(v, g.double()) / cv
    out = v.mul_(g - mean if c is None else g - c * mean).div_(tau)
    return torch.where(cv <= VANISHED * total, 0.0, out).to(x.dtype)


def scalar(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


# Errors. A CUDA call cannot raise without waiting for the device: it returns NaN and a code; the next call raises.

flags: dict[int, tuple[Tensor, Any, Tensor]] = {}


def _code(x: Tensor, k: float | Tensor, tau: float | Tensor, c: Tensor | None, kept: Tensor, heat: Tensor, total: Tensor) -> Tensor:
    """0, or the sum of the keys of ERRORS that hold; numbers given by the host were looked at there."""
    low, high = torch.aminmax(x)
    code = torch.where(high.double() - low < math.inf, 0, 1)
    if isinstance(tau, Tensor):
        code = code + torch.where(heat.clamp(*TAU_RANGE) == heat, 0, 2)
    if isinstance(k, Tensor) or c is not None:
        most = total if c is None else total * (1 + 1e-6)  # a float32 sum of the same costs may end up a little above
        code = code + torch.where((kept >= 0) & (kept <= most), 0, 4)
    if c is not None:
        code = code + torch.where((total < math.inf) & (c.min() >= 0), 0, 8)
    if x.device.type == "cpu":
        raise_code(int(code), "soft_topk: ")
    else:
        # The codes pile up on the device: a later, correct call must not wipe out one the host has not seen yet.
        pinned, _, codes = device_flag(x.device)
        pinned.copy_(codes.bitwise_or_(code), non_blocking=True)
    return code


def device_flag(device: torch.device) -> tuple[Tensor, Any, Tensor]:
    """A pinned int32 per CUDA device that receives error codes, the same memory as an array, and an int32 there."""
    index = _index(device)
    if index not in flags:
        with torch.inference_mode(False):  # the first call may be an evaluation's: later ones could not write to what is made there
            pinned = torch.zeros(1, dtype=torch.int32, pin_memory=index >= 0, device="cpu")
            flags[index] = (pinned, pinned.numpy(), torch.zeros(1, dtype=torch.int32, device=device))
    return flags[index]


def _index(device: torch.device) -> int:
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def check_device(device: torch.device | str | int | None = None) -> None:
    """Raise if an earlier soft_topk on this CUDA device (None: on any) saw bad values; never waits for the device."""
    if device is None:
        indices = list(flags)
    else:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        indices = [_index(found)]
    for index in indices:
        if index in flags and flags[index][1][0]:
            code = int(flags[index][1][0])
            flags[index][1][0] = 0
            flags[index][2].zero_()
            raise_code(code, f"soft_topk: in an earlier call on cuda:{index} (its mask is NaN) ")


def raise_code(code: int, where: str) -> None:
    if code:
        raise SmartpruneError(where + "; ".join(text for bit, text in ERRORS.items() if code & bit))
