"""The CUDA kernels of soft_topk: one solves and writes the mask, one computes the gradient. `triton.py` launches them.

Each launch has at most one program per multiprocessor, started cooperatively so that all of them run at once and may
wait for each other. A pass writes one row of float64 partial sums per program. After a barrier every program adds the
same rows in the same order, so all programs decide alike, and the result does not depend on timing. The forward kernel is
long because one launch does it all: each further launch would cost more than the passes.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from ..core.hard import TAU_RANGE
from .cpu import FLIP, LIMIT, VANISHED

_FLIP = tl.constexpr(FLIP)
_LIMIT = tl.constexpr(LIMIT)
_VANISHED = tl.constexpr(VANISHED)
_COLDEST = tl.constexpr(TAU_RANGE[0])
_HOTTEST = tl.constexpr(TAU_RANGE[1])
_RUN = tl.constexpr(16)  # float32 sums are added to float64 after this many tiles
_ROWS = tl.constexpr(8)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _barrier(count_ptr):  # type: ignore[no-untyped-def]
    # The count grows by the number of programs per barrier and is never reset, so a CUDA graph can replay it.
    programs = tl.num_programs(0).to(tl.int64)
    tl.debug_barrier()
    before = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")
    goal = (before // programs + 1) * programs
    now = before + 1
    while now < goal:
        now = tl.atomic_add(count_ptr, 0, sem="acq_rel", scope="gpu")
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _logistic(x, p, scale, shift):  # type: ignore[no-untyped-def]
    """z >= 0, e = exp(-|z|) and r = 1 / (1 + e): sigmoid(z) is r or e r, its slope e r r, without cancellation."""
    z = tl.minimum(tl.maximum((x - p) * scale - shift, -_LIMIT), _LIMIT)
    e = tl.exp(-tl.abs(z))
    return z >= 0, e, 1.0 / (1.0 + e)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _soft(  # type: ignore[no-untyped-def]
    x_ptr, c_ptr, n, pivot, delta, tau, flip, part_ptr, WEIGHTED: tl.constexpr, FIRST: tl.constexpr, DT: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Partial sums of c m (c (1 - m) if flip), c v and c v (1 - 2 m).

    The first pass adds sum(c), min, max, a code for bad values, and the sum of c (1 - m).
    """
    pid = tl.program_id(0)
    stride = tl.num_programs(0) * BLOCK
    p, scale, shift = pivot.to(DT), (1.0 / tau).to(DT), (delta / tau).to(DT)
    F = tl.full([], 0.0, tl.float64)
    A = tl.full([], 0.0, tl.float64)
    B = tl.full([], 0.0, tl.float64)
    W = tl.full([], 0.0, tl.float64)
    Q = tl.full([], 0.0, tl.float64)
    least = tl.full([BLOCK], float("inf"), DT)
    most = tl.full([BLOCK], float("-inf"), DT)
    bad = tl.full([BLOCK], 0, tl.int32)
    for base in range(pid * BLOCK, n, stride * _RUN):
        f = tl.zeros([BLOCK], DT)
        a = tl.zeros([BLOCK], DT)
        b = tl.zeros([BLOCK], DT)
        w = tl.zeros([BLOCK], DT)
        q = tl.zeros([BLOCK], DT)
        for at in range(base, tl.minimum(base + stride * _RUN, n), stride):
            offs = at + tl.arange(0, BLOCK)
            inside = offs < n
            x = tl.load(x_ptr + offs, mask=inside, other=0.0).to(DT)
            positive, e, r = _logistic(x, p, scale, shift)
            m = tl.where(positive != flip, r, e * r)
            v = e * r * r
            t = tl.where(positive, e - 1.0, 1.0 - e) * r
            c = inside.to(DT)
            if WEIGHTED:
                c = tl.load(c_ptr + offs, mask=inside, other=0.0).to(DT)
            v = tl.where(inside, c * v, 0.0)
            f += tl.where(inside, c * m, 0.0)
            a += v
            b += v * t
            if FIRST:
                w += c
                q += tl.where(inside, c * tl.where(positive, e * r, r), 0.0)
                finite = (x == x) & (tl.abs(x) != float("inf"))
                bad |= tl.where(inside & ~finite, 1, 0)
                if WEIGHTED:
                    bad |= tl.where(inside & ~((c >= 0) & (c != float("inf"))), 8, 0)
                least = tl.where(inside & (x < least), x, least)
                most = tl.where(inside & (x > most), x, most)
        F += tl.sum(f.to(tl.float64))
        A += tl.sum(a.to(tl.float64))
        B += tl.sum(b.to(tl.float64))
        if FIRST:
            W += tl.sum(w.to(tl.float64))
            Q += tl.sum(q.to(tl.float64))
    tl.store(part_ptr + pid, F)
    tl.store(part_ptr + LANES + pid, A)
    tl.store(part_ptr + 2 * LANES + pid, B)
    if FIRST:
        tl.store(part_ptr + 3 * LANES + pid, W)
        tl.store(part_ptr + 4 * LANES + pid, tl.min(least).to(tl.float64))
        tl.store(part_ptr + 5 * LANES + pid, tl.max(most).to(tl.float64))
        tl.store(part_ptr + 6 * LANES + pid, (tl.max(bad & 1) + tl.max(bad & 8)).to(tl.float64))
        tl.store(part_ptr + 7 * LANES + pid, Q)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _hard(  # type: ignore[no-untyped-def]
    x_ptr, c_ptr, n, t1, t2, t3, part_ptr, WEIGHTED: tl.constexpr, DT: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Partial sums of the cost above three thresholds."""
    pid = tl.program_id(0)
    stride = tl.num_programs(0) * BLOCK
    p1, p2, p3 = t1.to(DT), t2.to(DT), t3.to(DT)
    H1, H2, H3 = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    for base in range(pid * BLOCK, n, stride * _RUN):
        h1, h2, h3 = tl.zeros([BLOCK], DT), tl.zeros([BLOCK], DT), tl.zeros([BLOCK], DT)
        for at in range(base, tl.minimum(base + stride * _RUN, n), stride):
            offs = at + tl.arange(0, BLOCK)
            inside = offs < n
            x = tl.load(x_ptr + offs, mask=inside, other=0.0).to(DT)
            c = inside.to(DT)
            if WEIGHTED:
                c = tl.load(c_ptr + offs, mask=inside, other=0.0).to(DT)
            h1 += tl.where(x > p1, c, 0.0)
            h2 += tl.where(x > p2, c, 0.0)
            h3 += tl.where(x > p3, c, 0.0)
        H1 += tl.sum(h1.to(tl.float64))
        H2 += tl.sum(h2.to(tl.float64))
        H3 += tl.sum(h3.to(tl.float64))
    tl.store(part_ptr + pid, H1)
    tl.store(part_ptr + LANES + pid, H2)
    tl.store(part_ptr + 2 * LANES + pid, H3)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _narrow(t, above, k, a, b, over_a, over_b):  # type: ignore[no-untyped-def]
    """Moves one end of the bracket (a, b) to t, where the hard sum is `above`."""
    rise = (above > k) & (t > a)
    fall = (above < k) & (t < b)
    over_a, over_b = tl.where(rise, above, over_a), tl.where(fall, above, over_b)
    return tl.where(rise, t, a), tl.where(fall, t, b), over_a, over_b


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _newton(r, A, B, k, total):  # type: ignore[no-untyped-def]
    """The step and bound of the CPU solver, without branches."""
    F = k + r
    root = A * A - 2.0 * r * B
    near = (tl.abs(r) <= 0.5 * A) & (root >= 0)
    u = -2.0 * r / (A + tl.sqrt(tl.maximum(root, 0.0)))
    left = A * tl.abs(u * u * u) / 6.0 * tl.exp(tl.minimum(tl.abs(u), 1.0))
    known = (A > 0) & (F > 0) & (total > F)
    G = tl.where(known, F, k)
    logits = tl.log(G) - tl.log(total - G) - tl.log(k) + tl.log(total - k)
    far = -logits * G * (1.0 - G / total) / tl.where(A > 0, A, 1.0)
    far = tl.where(known, far, tl.where(r > 0, -1e300, 1e300))
    return tl.where(near, u, far), tl.where(near, left, 1e300)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _update(r, A, B, k, total, tau, loose, noise, FINE: tl.constexpr, delta, low, high, step, before):  # type: ignore[no-untyped-def]
    """One safeguarded step: Newton while it stays in the bracket and halves every second time, else the middle of the bracket."""
    tolerance = tl.maximum(tl.minimum(loose, A * FINE), noise)
    hit = tl.abs(r) <= tolerance
    low = tl.where(r > 0, delta, low)
    high = tl.where(r > 0, high, delta)
    u, left = _newton(r, A, B, k, total)
    new = delta - tau * u
    safe = (new > low) & (new < high) & (tl.abs(new - delta) <= 0.5 * before)
    new = tl.where(safe, new, 0.5 * low + 0.5 * high)
    stuck = (new == delta) | (new == low) | (new == high)
    new = tl.where(hit | stuck, delta, new)
    ready = hit | stuck | (safe & (left <= 0.5 * tolerance))
    before = step
    step = tl.abs(new - delta)
    return new, low, high, step, before, ready, u


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sum3(part_ptr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, LANES)
    inside = lane < tl.num_programs(0)
    a = tl.sum(tl.load(part_ptr + lane, mask=inside, other=0.0, cache_modifier=".cg"))
    b = tl.sum(tl.load(part_ptr + LANES + lane, mask=inside, other=0.0, cache_modifier=".cg"))
    c = tl.sum(tl.load(part_ptr + 2 * LANES + lane, mask=inside, other=0.0, cache_modifier=".cg"))
    return a, b, c


@triton.jit(do_not_specialize=["k_ptr", "tau_ptr", "warm_ptr", "k_bits", "tau_bits"])  # type: ignore[untyped-decorator,unused-ignore]
def forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, c_ptr, mask_ptr, state_ptr, k_ptr, tau_ptr, warm_ptr, flag_ptr, count_ptr, part_ptr, n, k_bits, tau_bits,
    K_TENSOR: tl.constexpr, TAU_TENSOR: tl.constexpr, WEIGHTED: tl.constexpr, WARM: tl.constexpr, DT: tl.constexpr,
    LOOSE: tl.constexpr, FINE: tl.constexpr, NOISE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """WARM is 0 without a start, 1 if the end overwrites the start, and 2 if the end goes to the second row."""
    pid = tl.program_id(0)
    k = tl.load(k_ptr).to(tl.float64) if K_TENSOR else k_bits.to(tl.float64, bitcast=True)
    tau = tl.load(tau_ptr).to(tl.float64) if TAU_TENSOR else tau_bits.to(tl.float64, bitcast=True)
    usable = (tau >= _COLDEST) & (tau <= _HOTTEST)
    code = tl.where(usable, 0, 2)
    tau = tl.where(usable, tau, 1.0)

    pivot = tl.load(x_ptr).to(tl.float64)
    delta = tl.full([], 0.0, tl.float64)
    if WARM:
        p = tl.load(warm_ptr)
        d = tl.load(warm_ptr + 1)
        started = tl.abs(p + d) < 1e300
        pivot = tl.where(started, p, pivot)
        delta = tl.where(started, d, delta)
    moved = (pivot + delta).to(DT).to(tl.float64)
    delta += pivot - moved
    pivot = moved

    _soft(x_ptr, c_ptr, n, pivot, delta, tau, False, part_ptr, WEIGHTED, True, DT, BLOCK, LANES)
    _barrier(count_ptr)
    F, A, B = _sum3(part_ptr, LANES)
    lane = tl.arange(0, LANES)
    inside = lane < tl.num_programs(0)
    total = tl.sum(tl.load(part_ptr + 3 * LANES + lane, mask=inside, other=0.0, cache_modifier=".cg"))
    least = tl.min(tl.load(part_ptr + 4 * LANES + lane, mask=inside, other=float("inf"), cache_modifier=".cg"))
    most = tl.max(tl.load(part_ptr + 5 * LANES + lane, mask=inside, other=float("-inf"), cache_modifier=".cg"))
    bad = tl.load(part_ptr + 6 * LANES + lane, mask=inside, other=0.0, cache_modifier=".cg").to(tl.int32)
    Q = tl.sum(tl.load(part_ptr + 7 * LANES + lane, mask=inside, other=0.0, cache_modifier=".cg"))
    side = 1  # two sets of rows alternate: a program may still read one while another program writes the next

    code += tl.max(bad & 1) + tl.max(bad & 8)
    fits = (k >= 0) & (k <= total * 1.000001)
    if not WEIGHTED:
        fits = (k >= 0) & (k <= total)
    code += tl.where(fits | (code > 7), 0, 4)
    none = k <= 0
    every = k >= total
    open_ = (code == 0) & (k > 0) & (k < total)
    kept = tl.where(open_, k, 1.0)
    full = tl.where(open_, total, 2.0)

    logit = tl.log(kept) - tl.log(full - kept)
    smaller = tl.minimum(kept, full - kept)
    loose = LOOSE * smaller * (1.0 + 0.25 * tl.abs(logit))
    noise = NOISE * smaller
    flip = kept > full * _FLIP
    bias = tau * logit
    slack = 1e-6 * (most - least) + tau
    low = least - pivot - bias - slack
    high = most - pivot - bias + slack
    step = 4.0 * (high - low)
    before = step
    lowest = low
    highest = high
    r = tl.where(flip, (full - kept) - Q, F - kept)
    new, low, high, step, before, ready, u = _update(r, A, B, kept, full, tau, loose, noise, FINE, delta, low, high, step, before)
    far = open_ & (~ready) & (tl.abs(u) > 1.0)

    # Far from the solution, with tau small against the spread: find the score where the hard sum crosses k, with three
    # thresholds per pass. With a small spread the bracket is short in units of tau, and soft steps suffice.
    section = far & (most - least > 8.0 * tau)
    a = least - tl.abs(least) * 1e-6 - tau
    b = most
    over_a = full  # the hard sums at a and b
    over_b = tl.full([], 0.0, tl.float64)
    guess = a
    hit = code < 0
    trusting = code < 0
    rounds = 0
    searching = section
    while searching:
        width = b - a
        middle = a + width * tl.minimum(tl.maximum((over_a - kept) / (over_a - over_b), 0.02), 0.98)
        reach = tl.where(trusting, width * 0.02, width * 0.25)
        middle = tl.where(trusting, middle, a + 0.5 * width)
        t1 = tl.maximum(middle - reach, a + 0.005 * width).to(DT).to(tl.float64)
        t2 = middle.to(DT).to(tl.float64)
        t3 = tl.minimum(middle + reach, b - 0.005 * width).to(DT).to(tl.float64)
        _hard(x_ptr, c_ptr, n, t1, t2, t3, part_ptr + side * _ROWS * LANES, WEIGHTED, DT, BLOCK, LANES)
        _barrier(count_ptr)
        h1, h2, h3 = _sum3(part_ptr + side * _ROWS * LANES, LANES)
        side = 1 - side
        trusting = (h1 > kept) & (h3 < kept)
        hit1, hit2, hit3 = tl.abs(h1 - kept) <= noise, tl.abs(h2 - kept) <= noise, tl.abs(h3 - kept) <= noise
        hit = hit1 | hit2 | hit3
        guess = tl.where(hit2, t2, tl.where(hit1, t1, t3))
        before_a, before_b = a, b
        a, b, over_a, over_b = _narrow(t1, h1, kept, a, b, over_a, over_b)
        a, b, over_a, over_b = _narrow(t2, h2, kept, a, b, over_a, over_b)
        a, b, over_a, over_b = _narrow(t3, h3, kept, a, b, over_a, over_b)
        rounds += 1
        searching = (~hit) & (b - a > 0.5 * tau) & ((a > before_a) | (b < before_b)) & (rounds < 40)
    inner = 1e-9 * (over_a - over_b)
    share = tl.log(tl.maximum(kept - over_b, inner)) - tl.log(tl.maximum(over_a - kept, inner))
    guess = tl.where(hit, guess, b)
    rest = tl.where(hit, 0.0, -tau * share)
    new = tl.where(section, (guess - pivot) + rest, new)
    new = tl.where(section & ~((new > low) & (new < high)), 0.5 * low + 0.5 * high, new)
    step = tl.where(section, 4.0 * (highest - lowest), step)
    before = tl.where(section, step, before)
    delta = tl.where(open_, new, delta)

    searching = open_ & ~ready
    rounds = 0
    while searching:
        moved = (pivot + delta).to(DT).to(tl.float64)
        shift = pivot - moved
        pivot = moved
        delta += shift
        low += shift
        high += shift
        _soft(x_ptr, c_ptr, n, pivot, delta, tau, flip, part_ptr + side * _ROWS * LANES, WEIGHTED, False, DT, BLOCK, LANES)
        _barrier(count_ptr)
        F, A, B = _sum3(part_ptr + side * _ROWS * LANES, LANES)
        side = 1 - side
        r = tl.where(flip, (full - kept) - F, F - kept)
        delta, low, high, step, before, ready, u = _update(
            r, A, B, kept, full, tau, loose, noise, FINE, delta, low, high, step, before
        )
        rounds += 1
        searching = (~ready) & (rounds < 60)
    moved = (pivot + delta).to(DT).to(tl.float64)
    delta += pivot - moved
    pivot = moved

    if pid == 0:
        nan = float("nan")
        end = tl.where(none, float("inf"), tl.where(every, float("-inf"), pivot))
        tl.store(state_ptr, tl.where(code == 0, end, nan))
        tl.store(state_ptr + 1, delta)
        tl.store(state_ptr + 2, tau)
        tl.store(state_ptr + 3, total)
        if WARM:
            end_ptr = warm_ptr + 2 * (WARM - 1)
            tl.store(end_ptr, tl.where(open_, pivot, nan))
            tl.store(end_ptr + 1, tl.where(open_, delta, nan))
        tl.store(flag_ptr, code, mask=code > 0)

    p, scale, move = pivot.to(DT), (1.0 / tau).to(DT), (delta / tau).to(DT)
    fixed = tl.where(code == 0, tl.where(none, 0.0, 1.0), float("nan")).to(DT)
    for at in range(pid * BLOCK, n, tl.num_programs(0) * BLOCK):
        offs = at + tl.arange(0, BLOCK)
        within = offs < n
        x = tl.load(x_ptr + offs, mask=within, other=0.0).to(DT)
        positive, e, part = _logistic(x, p, scale, move)
        tl.store(mask_ptr + offs, tl.where(open_, tl.where(positive, part, e * part), fixed), mask=within)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def backward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, c_ptr, g_ptr, out_ptr, state_ptr, flag_ptr, count_ptr, part_ptr, n, WEIGHTED: tl.constexpr,
    DT: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    stride = tl.num_programs(0) * BLOCK
    pivot = tl.load(state_ptr)
    delta = tl.load(state_ptr + 1)
    tau = tl.load(state_ptr + 2)
    total = tl.load(state_ptr + 3)
    p, scale, move = pivot.to(DT), (1.0 / tau).to(DT), (delta / tau).to(DT)
    S, V = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    for base in range(pid * BLOCK, n, stride * _RUN):
        s, w = tl.zeros([BLOCK], DT), tl.zeros([BLOCK], DT)
        for at in range(base, tl.minimum(base + stride * _RUN, n), stride):
            offs = at + tl.arange(0, BLOCK)
            inside = offs < n
            x = tl.load(x_ptr + offs, mask=inside, other=0.0).to(DT)
            g = tl.load(g_ptr + offs, mask=inside, other=0.0).to(DT)
            _, e, r = _logistic(x, p, scale, move)
            v = tl.where(inside, e * r * r, 0.0)
            s += v * g
            if WEIGHTED:
                v *= tl.load(c_ptr + offs, mask=inside, other=0.0).to(DT)
            w += v
        S += tl.sum(s.to(tl.float64))
        V += tl.sum(w.to(tl.float64))
    tl.store(part_ptr + pid, S)
    tl.store(part_ptr + LANES + pid, V)
    _barrier(count_ptr)
    lane = tl.arange(0, LANES)
    here = lane < tl.num_programs(0)
    vg = tl.sum(tl.load(part_ptr + lane, mask=here, other=0.0, cache_modifier=".cg"))
    cv = tl.sum(tl.load(part_ptr + LANES + lane, mask=here, other=0.0, cache_modifier=".cg"))
    mean = (vg / cv).to(DT)
    decided = cv <= total * _VANISHED
    for at in range(pid * BLOCK, n, stride):
        offs = at + tl.arange(0, BLOCK)
        inside = offs < n
        x = tl.load(x_ptr + offs, mask=inside, other=0.0).to(DT)
        g = tl.load(g_ptr + offs, mask=inside, other=0.0).to(DT)
        _, e, r = _logistic(x, p, scale, move)
        v = e * r * r * scale
        if WEIGHTED:
            g -= mean * tl.load(c_ptr + offs, mask=inside, other=0.0).to(DT)
        else:
            g -= mean
        tl.store(out_ptr + offs, tl.where(decided, 0.0, v * g), mask=inside)
