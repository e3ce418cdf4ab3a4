"""Kernels of the masked multiplication. ``multiply_triton.py`` launches them, ``multiply_tables.py`` makes their work lists.

Addresses of weights and gradients arrive as tuples of integers, plus one. Triton does not specialize on an odd number, so an
unaligned tensor causes no new compilation, and the kernel itself selects wide or narrow accesses.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from .multiply_tables import EVEN, FIELDS, PITCH

NOTHING = 1 << 62  # the address of a gradient that does not exist

_EVEN = tl.constexpr(EVEN)
_FIELDS = tl.constexpr(FIELDS)
_PITCH = tl.constexpr(PITCH)
_NOTHING = tl.constexpr(NOTHING)
_FEW = tl.constexpr(1)  # rows at once if accesses are narrow, since an address per element needs many registers


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _address(addresses, number):  # type: ignore[no-untyped-def]
    out = addresses[0]
    for i in tl.static_range(1, len(addresses)):
        out = tl.where(number == i, addresses[i], out)
    return out - 1


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _stretch(line, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """First row, begin, end and width of a program. If WIDE, the compiler learns what they are multiples of."""
    row = tl.load(line + 1)
    begin = tl.load(line + 3).to(tl.int32)
    end = tl.load(line + 4).to(tl.int32)
    width = tl.load(line + 5).to(tl.int32)
    if WIDE:
        begin = begin // _EVEN * _EVEN
        end = end // _EVEN * _EVEN
        width = width // _EVEN * _EVEN
    return row, begin, end, width


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _pointer(address, DT: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    out = address.to(tl.pointer_type(DT))
    if WIDE:
        out = tl.multiple_of(out, 16)
    return out


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _factors(line, index_ptr, mask_ptr, columns, inside):  # type: ignore[no-untyped-def]
    """The mask of every column."""
    block = tl.load(index_ptr + tl.load(line + 7) + columns, mask=inside, other=0)
    return tl.load(mask_ptr + tl.load(line + 6) + block, mask=inside, other=0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _product(  # type: ignore[no-untyped-def]
    line, w_address, index_ptr, mask_ptr, out_ptr, W: tl.constexpr, IN_PLACE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, begin, end, width = _stretch(line, WIDE)
    rows = tl.load(line + 2).to(tl.int32)
    w_ptr = _pointer(w_address, W, WIDE)
    out_ptr += tl.load(line + 11) * _PITCH
    for at in range(begin, end, COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        inside = columns < end
        m = _factors(line, index_ptr, mask_ptr, columns, inside)
        for r in range(0, rows, ROWS):
            lines = r + tl.arange(0, ROWS)
            here = (lines < rows)[:, None] & inside[None, :]
            base = (row + r) * width
            offsets = tl.arange(0, ROWS)[:, None] * width + columns[None, :]
            w = tl.load(w_ptr + base + offsets, mask=here, other=0.0)
            product = w.to(tl.float32) * m[None, :]
            if IN_PLACE:  # weights that do not change are not written
                product = product.to(W)
                tl.store(w_ptr + base + offsets, product, mask=here & (product != w))
            else:
                tl.store(out_ptr + base + offsets, product, mask=here)


@triton.jit(do_not_specialize_on_alignment=["mask_ptr"])  # type: ignore[untyped-decorator,unused-ignore]
def forward_kernel(  # type: ignore[no-untyped-def]
    weights, table_ptr, index_ptr, mask_ptr, out_ptr, W: tl.constexpr, IN_PLACE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    line = table_ptr + tl.program_id(0) * _FIELDS
    w = _address(weights, tl.load(line))
    if (tl.load(line + 13) != 0) & (w % 16 == 0):
        _product(line, w, index_ptr, mask_ptr, out_ptr, W, IN_PLACE, ROWS, COLUMNS, True)
    else:
        _product(line, w, index_ptr, mask_ptr, out_ptr, W, IN_PLACE, _FEW, COLUMNS, False)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gradient(  # type: ignore[no-untyped-def]
    line, w_address, g_address, index_ptr, mask_ptr, out_ptr, space_ptr, W: tl.constexpr, G: tl.constexpr,
    WRITE: tl.constexpr, THROUGH: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Writes grad * mask, and sums of grad * weight: per column, or as the return value if the stretch is one block."""
    row, begin, end, width = _stretch(line, WIDE)
    rows = tl.load(line + 2).to(tl.int32)
    rows = tl.where(g_address == _NOTHING, 0, rows)
    alone = tl.load(line + 10) == 1
    g_ptr = _pointer(g_address, G, WIDE)
    w_ptr = _pointer(w_address, W, WIDE)
    out_ptr += tl.load(line + 11) * _PITCH
    total = tl.full([], 0.0, tl.float32)
    for at in range(begin, end, COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        inside = columns < end
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        if WRITE and not THROUGH:
            m = _factors(line, index_ptr, mask_ptr, columns, inside)
        for r in range(0, rows, ROWS):
            lines = r + tl.arange(0, ROWS)
            here = (lines < rows)[:, None] & inside[None, :]
            base = (row + r) * width
            offsets = tl.arange(0, ROWS)[:, None] * width + columns[None, :]
            g = tl.load(g_ptr + base + offsets, mask=here, other=0.0).to(tl.float32)
            if SUMS:
                sums += g * tl.load(w_ptr + base + offsets, mask=here, other=0.0).to(tl.float32)
            if WRITE:
                if not THROUGH:
                    g *= m[None, :]
                tl.store(out_ptr + base + offsets, g, mask=here)
        if SUMS:
            column = tl.sum(sums, 0)
            if alone:
                total += tl.sum(column)
            else:
                tl.store(space_ptr + tl.load(line + 12) + columns - begin, column, mask=inside)
    return total


@triton.jit(do_not_specialize_on_alignment=["mask_ptr"])  # type: ignore[untyped-decorator,unused-ignore]
def backward_kernel(  # type: ignore[no-untyped-def]
    weights, grads, table_ptr, index_ptr, mask_ptr, out_ptr, space_ptr, sums_ptr, W: tl.constexpr, G: tl.constexpr,
    WRITE: tl.constexpr, THROUGH: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    line = table_ptr + tl.program_id(0) * _FIELDS
    number = tl.load(line)
    w = _address(weights, number)
    g = _address(grads, number)
    if (tl.load(line + 13) != 0) & (w % 16 == 0) & (g % 16 == 0):
        total = _gradient(line, w, g, index_ptr, mask_ptr, out_ptr, space_ptr, W, G, WRITE, THROUGH, SUMS, ROWS, COLUMNS, True)
    else:
        total = _gradient(line, w, g, index_ptr, mask_ptr, out_ptr, space_ptr, W, G, WRITE, THROUGH, SUMS, _FEW, COLUMNS, False)
    if SUMS:
        sums_ptr += tl.load(line + 6)
        starts_ptr = index_ptr + tl.load(line + 8)
        blocks_ptr = index_ptr + tl.load(line + 9)
        slots = tl.load(line + 10).to(tl.int32)
        if slots == 1:
            tl.store(sums_ptr + tl.load(blocks_ptr), total)
        else:
            tl.debug_barrier()  # the column sums of this program are written; only this program reads them
            space_ptr += tl.load(line + 12) - tl.load(line + 3)
            for s in range(0, slots, SLOTS):
                slot = s + tl.arange(0, SLOTS)
                real = slot < slots
                start = tl.load(starts_ptr + slot, mask=real, other=0)
                length = tl.load(starts_ptr + slot + 1, mask=real, other=0) - start
                part = tl.zeros([SLOTS, MEMBERS], tl.float32)
                for j in range(0, tl.max(length, 0), MEMBERS):
                    member = j + tl.arange(0, MEMBERS)
                    here = member[None, :] < length[:, None]
                    column = tl.load(index_ptr + start[:, None] + member[None, :], mask=here, other=0)
                    part += tl.load(space_ptr + column, mask=here, other=0.0)
                block = tl.load(blocks_ptr + slot, mask=real, other=0)
                tl.store(sums_ptr + block, tl.sum(part, 1), mask=real)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def measure_kernel(  # type: ignore[no-untyped-def]
    mask_ptr, before_ptr, side_ptr, parts_ptr, n, edge, scale, COMPARE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    pid = tl.program_id(0)
    undecided = tl.zeros([BLOCK], tl.float32)
    changed = tl.zeros([BLOCK], tl.float32)
    gap = tl.zeros([BLOCK], tl.float32)
    for at in range(pid * BLOCK, n, tl.num_programs(0) * BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        inside = offsets < n
        mask = tl.load(mask_ptr + offsets, mask=inside, other=0.0)
        side = (mask > 0.5).to(tl.int8)
        away = tl.minimum(mask, 1.0 - mask)
        undecided += tl.where(away > edge, 1.0, 0.0)
        gap += away
        if COMPARE:
            before = tl.load(before_ptr + offsets, mask=inside, other=0).to(tl.int8)
            changed += tl.where(before != side, 1.0, 0.0)
        tl.store(side_ptr + offsets, side, mask=inside)
    parts_ptr += pid * 3
    tl.store(parts_ptr, tl.sum(undecided))
    tl.store(parts_ptr + 1, tl.sum(changed))
    tl.store(parts_ptr + 2, tl.sum(gap) / scale)
