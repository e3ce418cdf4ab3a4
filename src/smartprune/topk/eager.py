"""soft_topk by plain tensor operations. CUDA uses it where Triton is missing.

Nothing waits for the device, so the number of steps is fixed. Sorting finds the score, or the two scores, at which the
sum crosses k. Then theta lies within 34 tau of it, and a few Newton steps nearly always suffice. All values are float64
and relative to a pivot near theta, and costs are shares of their sum.
"""

import math

import torch
from torch import Tensor

from ..core.hard import TAU_RANGE
from .cpu import VANISHED, warm_rows
from .device_errors import device_flag, raise_code

STEPS = 10  # of Newton; random problems needed at most 8. A step that would leave the bracket halves it instead
SLACK = (1e-12, 4e-15)  # rounding error of the crossing, as shares of min(k, sum(cost) - k) and of sum(cost)
REACH = 34.0  # in tau: a mask that far from theta is 0 or 1 up to the slack
WINDOW = 2.0  # in tau: scores this close to the crossing count as equal in the first guess of theta
NOISE = 4e-15  # relative error of a sum: a smaller residual is zero, or a step where no block is soft would be arbitrary


def forward(
    x: Tensor, k: float | Tensor, tau: float | Tensor, cost: Tensor | None, warm: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Mask [N], the costs in float64, and the state for backward. warm is only written: sorting finds a better start."""
    wide, c = x.double(), None if cost is None else cost.double()
    kept, heat = scalar(k, x.device), scalar(tau, x.device)
    total = torch.full_like(kept, x.numel()) if c is None else c.sum()
    code = _error_code(x, k, tau, c, kept, heat, total)
    open_ = (kept > 0) & (kept < total) & (code == 0)
    goal = torch.where(open_, kept / total, 0.5)
    weight = None if c is None else c / total
    pivot, d, low, high = _start(x, weight, goal, heat)
    y = (wide - pivot) / heat
    sums = wide.new_empty(2, x.numel())
    share, spread = sums  # c m and c m (1 - m)
    m = share if weight is None else torch.empty_like(wide)
    base = wide.new_full((2,), 1e-300)  # keeps every slope above zero
    for _ in range(STEPS):
        torch.sub(y, d, out=m).sigmoid_()
        if weight is not None:
            torch.mul(m, weight, out=share)
        torch.addcmul(share, share, m, value=-1, out=spread)
        kept_share, slope = torch.addcdiv(base, sums.mean(1) if weight is None else sums.sum(1), goal)
        # Newton on the logarithm of the sum: on the sum itself, a step is at most one tau where far too much is kept
        r = torch.nn.functional.hardshrink(torch.xlogy(kept_share, kept_share), NOISE)
        more = r > 0
        low, high = torch.where(more, d, low), torch.where(more, high, d)
        new = torch.addcdiv(d, r, slope)
        d = torch.where(new.clamp(low, high) == new, new, torch.lerp(low, high, 0.5))
    fixed = torch.where(code > 0, math.nan, (kept > 0).double())
    mask = torch.where(open_, torch.sub(y, d, out=m).sigmoid_(), fixed).to(x.dtype)
    delta = d * heat
    _, end = warm_rows(warm)
    if end is not None:
        end.copy_(torch.where(open_, torch.stack((pivot, delta)), math.nan))
    pivot = torch.where(open_, pivot, (0.5 - fixed) * math.inf)
    return mask, c, torch.stack((pivot, delta, heat, total))


def _start(x: Tensor, weight: Tensor | None, goal: Tensor, heat: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pivot, and relative to it in units of tau: a first guess of theta, and a bracket that contains theta."""
    n = x.numel()
    order = x.sort()
    values = order.values.double()
    if weight is None:
        below = torch.linspace(0, 1, n + 1, dtype=torch.float64, device=x.device)
    else:
        # Integer sums do not depend on the order of a parallel scan, as floating-point sums do.
        units = (weight[order.indices] * 2.0**61).long().cumsum(0)
        below = torch.nn.functional.pad(units.double() / units[-1], (1, 0))
    drop = 1 - goal
    slack = torch.minimum(goal, drop) * SLACK[0] + SLACK[1]
    crossing = torch.searchsorted(below, torch.stack((drop - slack, drop + slack)))
    ends = values.take((crossing - 1).clamp_(0, n - 1))
    middle = ends.mean()
    pivot = middle.to(x.dtype).double()
    first, last = (ends - pivot) / heat
    # If the scores near the crossing were equal, theta would lie the logit of their kept share below them.
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
    """A number as a float64 tensor on the device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


def _error_code(
    x: Tensor, k: float | Tensor, tau: float | Tensor, c: Tensor | None, kept: Tensor, heat: Tensor, total: Tensor
) -> Tensor:
    """0, or the sum of the keys of ERRORS that apply. Numbers from the host were checked there."""
    low, high = torch.aminmax(x)
    code = torch.where(high.double() - low < math.inf, 0, 1)
    if isinstance(tau, Tensor):
        code = code + torch.where(heat.clamp(*TAU_RANGE) == heat, 0, 2)
    if isinstance(k, Tensor) or c is not None:
        most = total if c is None else total * (1 + 1e-6)  # the float32 sum of the same costs may be a little larger
        code = code + torch.where((kept >= 0) & (kept <= most), 0, 4)
    if c is not None:
        code = code + torch.where((total < math.inf) & (c.min() >= 0), 0, 8)
    if x.device.type == "cpu":
        raise_code(int(code), "soft_topk: ")
    else:
        # Codes accumulate on the device: a later, valid call must not overwrite a code that the host has not read yet.
        pinned, _, codes = device_flag(x.device)
        pinned.copy_(codes.bitwise_or_(code), non_blocking=True)
    return code
