"""The Triton kernel of a block-sparse convolution: an implicit GEMM over the kept blocks.

A program computes a tile of output pixels for some rows of output blocks, one after the other. It goes through the kept blocks
of a row, STEP blocks at a time. A block stands for DEEP input channels at one kernel position. For every pixel it reads DEEP
neighbouring numbers (channels-last), that is 2 DEEP bytes for DEEP * WIDE multiply-adds.

Read from the L2 cache, this reached about 40 TFLOP/s on an H200 with every kind of pipelining that was tried. Therefore the
kernel uses plain loads, because asynchronous copies bypass the L1 cache, and computes several rows per program, which find their
pixels in that cache. The loads of the next step run during the multiplication of the current one.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def gather(  # type: ignore[no-untyped-def]
    x, start, reach, channel, jump, place, DEEP: tl.constexpr, PADDED: tl.constexpr, RAGGED: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """The inputs of the blocks of one step, [PIXELS, STEP * DEEP]; zeros outside the image and for blocks that pad a row."""
    offset = start[:, None] + (jump + channel)[None, :]
    if not RAGGED:
        offset = tl.max_contiguous(tl.multiple_of(offset, (1, DEEP)), (1, DEEP))
    known = (reach != 0)[:, None] & (place >= 0)[None, :]
    if PADDED:
        known = ((reach[:, None] >> (place & PLACES)[None, :]) & 1) != 0
    if RAGGED:  # the last input block is partial: places hold its number of channels
        known = known & (channel < (place >> 8))[None, :]
    if not RAGGED:
        known = tl.max_constancy(known, (1, DEEP))
    return tl.load(x + offset, mask=known, other=0.0)


SIZES = ["images", "in_height", "in_width", "out_height", "out_width", "groups"]  # their values do not need a specialized kernel


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def conv_kernel(  # type: ignore[no-untyped-def]
    x, weights, begins, finished, jumps, places, bias, residual, out,
    images, in_height, in_width, in_channels, out_height, out_width, out_channels, groups,
    KERNEL_HEIGHT: tl.constexpr, KERNEL_WIDTH: tl.constexpr, STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr,
    PAD_Y: tl.constexpr, PAD_X: tl.constexpr, DILATE_Y: tl.constexpr, DILATE_X: tl.constexpr,
    PIXELS: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, STEP: tl.constexpr, PADDED: tl.constexpr,
    RAGGED: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    PRECISION: tl.constexpr, LARGE: tl.constexpr,
):  # fmt: skip
    """begins: [groups + 1], in steps; finished: [steps], the row that ends with a step, or -1; jumps, places: [steps * STEP], the
    distance of a block from the first input of a pixel in elements, and its kernel position; weights: [steps * STEP * DEEP, WIDE].
    ADD: 0 none, 1 before, 2 after the activation; ACTIVATION: 0 none, 1 clamp to LOW and HIGH, 2 SiLU."""
    group = tl.program_id(0) % groups
    tile = tl.program_id(0) // groups
    pixel = tile * PIXELS + tl.arange(0, PIXELS)
    inside = pixel < images * out_height * out_width
    image = pixel // (out_height * out_width)
    rest = pixel % (out_height * out_width)
    top = (rest // out_width) * STRIDE_Y - PAD_Y
    left = (rest % out_width) * STRIDE_X - PAD_X
    if LARGE:
        image, pixel = image.to(tl.int64), pixel.to(tl.int64)
    start = ((image * in_height + top) * in_width + left) * in_channels
    if PADDED:  # which kernel positions of a pixel lie inside the image, one bit each
        reach = tl.zeros((PIXELS,), tl.int64 if KERNEL_HEIGHT * KERNEL_WIDTH > 31 else tl.int32)
        for y in tl.static_range(KERNEL_HEIGHT):
            for z in tl.static_range(KERNEL_WIDTH):
                down, right = top + y * DILATE_Y, left + z * DILATE_X
                good = inside & (down >= 0) & (down < in_height) & (right >= 0) & (right < in_width)
                reach |= good.to(reach.dtype) << (y * KERNEL_WIDTH + z)
    else:
        reach = inside.to(tl.int32)
    PLACES: tl.constexpr = 63 if KERNEL_HEIGHT * KERNEL_WIDTH > 31 else 31
    deep = tl.arange(0, STEP * DEEP)
    block, channel = deep // DEEP, deep % DEEP
    wide = tl.arange(0, WIDE)
    begin, end = tl.load(begins + group), tl.load(begins + group + 1)
    table = begin * STEP + block
    inputs = gather(x, start, reach, channel, tl.load(jumps + table), tl.load(places + table), DEEP, PADDED, RAGGED, PLACES)
    pointers = weights + (begin * STEP * DEEP + deep)[:, None] * WIDE + wide[None, :]
    factors = tl.load(pointers)
    jump, place = tl.load(jumps + table + STEP), tl.load(places + table + STEP)
    total = tl.zeros((PIXELS, WIDE), tl.float32)
    for step in range(begin, end):  # one loop over several rows keeps the pipeline full
        next_inputs = gather(x, start, reach, channel, jump, place, DEEP, PADDED, RAGGED, PLACES)
        pointers += STEP * DEEP * WIDE
        next_factors = tl.load(pointers)
        table += STEP
        jump, place = tl.load(jumps + table + STEP), tl.load(places + table + STEP)
        total = tl.dot(inputs, factors, total, input_precision=PRECISION)
        inputs, factors = next_inputs, next_factors
        row = tl.load(finished + step)  # the row that ends with this step, or -1
        if row >= 0:
            lane = row * WIDE + wide
            real = inside[:, None] & (lane < out_channels)[None, :]
            value = total + tl.load(bias + lane, mask=lane < out_channels, other=0.0)[None, :]
            goal = pixel[:, None] * out_channels + lane[None, :]
            if ADD == 1:
                value += tl.load(residual + goal, mask=real, other=0.0).to(tl.float32)
            if ACTIVATION == 1:
                value = tl.minimum(tl.maximum(value, LOW), HIGH)
            elif ACTIVATION == 2:
                value = value * tl.sigmoid(value)
            if ADD == 2:
                value += tl.load(residual + goal, mask=real, other=0.0).to(tl.float32)
            tl.store(out + goal, value.to(out.dtype.element_ty), mask=real)
            total = tl.zeros((PIXELS, WIDE), tl.float32)
