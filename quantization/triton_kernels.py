"""The Triton kernels behind triton_ops.py. Importing this imports triton.

A matrix is four addresses and three strides; see codebooks.py for how codes lie. FORMAT: 0 packed in 4 bits, 1 in 8
bits, 2 numbers. `rows` are the stored rows that a program reads, and what `kept` leaves out of them is not read: masked
loads cost no memory traffic.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scaled(values, scales, offsets, at, mask, HAS_OFFSET: tl.constexpr):
    weights = values.to(tl.float32) * tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        weights += tl.load(offsets + at, mask=mask, other=0.0).to(tl.float32)
    return weights


@triton.jit
def tile(
    codes,
    scales,
    offsets,
    table,
    rows,
    cols,
    mask,
    code_stride,
    scale_stride,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):
    """Weights float32 [rows, cols] of any columns."""
    at = rows[:, None] * scale_stride + (cols // GROUP)[None, :]
    if FORMAT == 0:
        byte = (cols // 32) * 16 + cols % 16
        pairs = tl.load(codes + rows[:, None] * code_stride + byte[None, :], mask=mask, other=0).to(tl.int32)
        values = tl.load(table + ((pairs >> ((cols % 32) // 16 * 4)[None, :]) & 15))
        return _scaled(values, scales, offsets, at, mask, HAS_OFFSET)
    values = tl.load(codes + rows[:, None] * code_stride + cols[None, :], mask=mask, other=0)
    if FORMAT == 1:
        return _scaled(values, scales, offsets, at, mask, HAS_OFFSET)
    return values.to(tl.float32)


@triton.jit
def _halves(
    codes,
    scales,
    offsets,
    table,
    rows,
    byte,
    mask,
    code_stride,
    scale_stride,
    GROUP: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):
    """Of 4-bit codes the weights in the low and in the high halves of bytes: columns that are 16 apart."""
    pairs = tl.load(codes + rows[:, None] * code_stride + byte[None, :], mask=mask, other=0).to(tl.int32)
    at = rows[:, None] * scale_stride + (byte // 16 * 32 // GROUP)[None, :]
    low = _scaled(tl.load(table + (pairs & 15)), scales, offsets, at, mask, HAS_OFFSET)
    high = _scaled(tl.load(table + (pairs >> 4)), scales, offsets, at, mask, HAS_OFFSET)
    return low, high


@triton.jit
def _dots(
    x,
    codes,
    scales,
    offsets,
    table,
    rows,
    kept,
    cols,
    code_stride,
    scale_stride,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """float32 [ROWS]: <x, row> of the rows that are kept. Where none is, nothing is computed."""
    total = tl.zeros([ROWS], tl.float32)
    some = tl.max(kept.to(tl.int32), axis=0)
    if FORMAT == 0:
        nbytes = (cols + 31) // 32 * 16
        for start in range(0, nbytes * some, WIDTH):
            byte = start + tl.arange(0, WIDTH)
            mask = kept[:, None] & (byte < nbytes)[None, :]
            low, high = _halves(
                codes, scales, offsets, table, rows, byte, mask, code_stride, scale_stride, GROUP, HAS_OFFSET
            )
            at = byte // 16 * 32 + byte % 16
            x_low = tl.load(x + at, mask=at < cols, other=0.0).to(tl.float32)
            x_high = tl.load(x + at + 16, mask=at + 16 < cols, other=0.0).to(tl.float32)
            total += tl.sum(low * x_low[None, :] + high * x_high[None, :], axis=1)
    else:
        for start in range(0, cols * some, WIDTH):
            at = start + tl.arange(0, WIDTH)
            mask = kept[:, None] & (at < cols)[None, :]
            weights = tile(
                codes, scales, offsets, table, rows, at, mask, code_stride, scale_stride, GROUP, FORMAT, HAS_OFFSET
            )
            total += tl.sum(weights * tl.load(x + at, mask=at < cols, other=0.0).to(tl.float32)[None, :], axis=1)
    return total


@triton.jit
def listed(index, count, maximum, first, LENGTH: tl.constexpr, HAS_INDEX: tl.constexpr, HAS_COUNT: tl.constexpr):
    """Positions first .. first + LENGTH - 1 of a selection: the rows there, and which are within it."""
    at = first + tl.arange(0, LENGTH)
    stop = maximum
    if HAS_COUNT:
        stop = tl.minimum(tl.load(count), maximum)
    within = at < stop
    rows = at
    if HAS_INDEX:
        rows = tl.load(index + at, mask=within, other=0)
    return at, rows.to(tl.int64), within


@triton.jit
def row_product(
    x,
    codes,
    scales,
    offsets,
    table,
    index,
    count,
    out,
    maximum,
    cols,
    x_stride,
    code_stride,
    scale_stride,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """out [n, maximum]; grid (positions / ROWS, n)."""
    n = tl.program_id(1)
    at, rows, within = listed(index, count, maximum, tl.program_id(0) * ROWS, ROWS, HAS_INDEX, HAS_COUNT)
    total = _dots(
        x + n * x_stride,
        codes,
        scales,
        offsets,
        table,
        rows,
        within,
        cols,
        code_stride,
        scale_stride,
        GROUP,
        FORMAT,
        HAS_OFFSET,
        ROWS,
        WIDTH,
    )
    tl.store(out + n * maximum + at, total, mask=at < maximum)


@triton.jit
def accumulate(
    a,
    codes,
    scales,
    offsets,
    table,
    index,
    count,
    partial,
    maximum,
    cols,
    a_stride,
    code_stride,
    scale_stride,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    BY_ROW: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """partial [n, SPLITS, cols]: sums over each split's share of the positions; grid (columns / width, SPLITS, n).
    BY_ROW: `a` has an entry for every row of the matrix, not for every position. Rows whose entry is 0 are not read.
    """
    split, n = tl.program_id(1), tl.program_id(2)
    stop = maximum
    if HAS_COUNT:
        stop = tl.minimum(tl.load(count), maximum)
    share = (stop + SPLITS - 1) // SPLITS
    first, last = split * share, tl.minimum((split + 1) * share, stop)
    unit = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)  # bytes of 4-bit codes, else columns
    low_sum = tl.zeros([WIDTH], tl.float32)
    high_sum = tl.zeros([WIDTH], tl.float32)
    units = cols
    if FORMAT == 0:
        units = (cols + 31) // 32 * 16
    for start in range(first, last, ROWS):
        at = start + tl.arange(0, ROWS)
        within = at < last
        rows = at
        if HAS_INDEX:
            rows = tl.load(index + at, mask=within, other=0)
        rows = rows.to(tl.int64)
        entries = at
        if BY_ROW:
            entries = rows
        factors = tl.load(a + n * a_stride + entries, mask=within, other=0.0).to(tl.float32)
        mask = (within & (factors != 0))[:, None] & (unit < units)[None, :]
        if FORMAT == 0:
            low, high = _halves(
                codes, scales, offsets, table, rows, unit, mask, code_stride, scale_stride, GROUP, HAS_OFFSET
            )
            low_sum += tl.sum(tl.where(mask, low * factors[:, None], 0.0), axis=0)
            high_sum += tl.sum(tl.where(mask, high * factors[:, None], 0.0), axis=0)
        else:
            weights = tile(
                codes, scales, offsets, table, rows, unit, mask, code_stride, scale_stride, GROUP, FORMAT, HAS_OFFSET
            )
            low_sum += tl.sum(tl.where(mask, weights * factors[:, None], 0.0), axis=0)
    out = partial + (n * SPLITS + split) * cols
    if FORMAT == 0:
        columns = unit // 16 * 32 + unit % 16
        tl.store(out + columns, low_sum, mask=columns < cols)
        tl.store(out + columns + 16, high_sum, mask=columns + 16 < cols)
    else:
        tl.store(out + unit, low_sum, mask=unit < cols)


@triton.jit
def _activated(value, ACTIVATION: tl.constexpr):
    """In the order of modeling/native_mlp.py: silu, gelu, gelu_tanh, relu, relu_squared."""
    if ACTIVATION == 0:
        return value / (1.0 + tl.exp(-value))
    if ACTIVATION == 1:
        return 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    if ACTIVATION == 2:
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        return value / (1.0 + tl.exp(-2.0 * inner))  # (1 + tanh(inner)) / 2
    positive = tl.where(value <= 0.0, 0.0, value)  # NaN stays
    if ACTIVATION == 3:
        return positive
    return positive * positive


@triton.jit
def gate_up(
    x,
    x_gate,
    gate_codes,
    gate_scales,
    gate_offsets,
    gate_bias,
    up_codes,
    up_scales,
    up_offsets,
    up_bias,
    table,
    index,
    count,
    gates_below,
    hidden_below,
    hidden,
    kept_gates,
    maximum,
    cols,
    code_stride,
    scale_stride,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_UP: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    SKIPS: tl.constexpr,
    HAS_GATES_BELOW: tl.constexpr,
    HAS_HIDDEN_BELOW: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """hidden [maximum]: act(<x_gate, gate row> + bias) * (<x, up row> + bias), 0 where left out; kept_gates int8
    [maximum]. SKIPS: where the activated gate is 0, or below its threshold, the row of up is not read.
    """
    at, rows, within = listed(index, count, maximum, tl.program_id(0) * ROWS, ROWS, HAS_INDEX, HAS_COUNT)
    gate = _dots(
        x_gate,
        gate_codes,
        gate_scales,
        gate_offsets,
        table,
        rows,
        within,
        cols,
        code_stride,
        scale_stride,
        GROUP,
        FORMAT,
        HAS_OFFSET,
        ROWS,
        WIDTH,
    )
    if HAS_GATE_BIAS:
        gate += tl.load(gate_bias + rows, mask=within, other=0.0).to(tl.float32)
    value = _activated(gate, ACTIVATION)
    kept = within
    if SKIPS:
        if HAS_GATES_BELOW:
            kept = within & ~(tl.abs(value) < tl.load(gates_below + rows, mask=within, other=0.0))
        else:
            kept = within & (value != 0.0)
    if HAS_UP:
        factor = _dots(
            x,
            up_codes,
            up_scales,
            up_offsets,
            table,
            rows,
            kept,
            cols,
            code_stride,
            scale_stride,
            GROUP,
            FORMAT,
            HAS_OFFSET,
            ROWS,
            WIDTH,
        )
        if HAS_UP_BIAS:
            factor += tl.load(up_bias + rows, mask=kept, other=0.0).to(tl.float32)
        value = value * factor
    stays = kept
    if HAS_HIDDEN_BELOW:
        stays = kept & ~(tl.abs(value) < tl.load(hidden_below + rows, mask=within, other=0.0))
    tl.store(hidden + at, tl.where(stays, value, 0.0), mask=at < maximum)
    tl.store(kept_gates + at, (kept.to(tl.int8) + stays.to(tl.int8)), mask=at < maximum)


@triton.jit
def count_set(scores, bias, counts, length, HAS_BIAS: tl.constexpr, TILE: tl.constexpr):
    """counts [tiles]: scores (with bias) of each tile that are above zero, or NaN."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    value = tl.load(scores + at, mask=at < length, other=-1.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + at, mask=at < length, other=0.0).to(tl.float32)
    chosen = (at < length) & ~(value <= 0.0)
    tl.store(counts + tl.program_id(0), tl.sum(chosen.to(tl.int32), axis=0))


@triton.jit
def place_set(
    scores, bias, counts, index, count, length, tiles, HAS_BIAS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr
):
    """index: where those scores are, ascending; count: how many. Each tile begins where the ones before it end."""
    tile = tl.program_id(0)
    others = tl.arange(0, TILES)
    found = tl.load(counts + others, mask=others < tiles, other=0)
    before = tl.sum(tl.where(others < tile, found, 0), axis=0)
    if tile == 0:
        tl.store(count, tl.sum(found, axis=0))
    at = tile * TILE + tl.arange(0, TILE)
    value = tl.load(scores + at, mask=at < length, other=-1.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + at, mask=at < length, other=0.0).to(tl.float32)
    chosen = (at < length) & ~(value <= 0.0)
    place = before + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(index + place, at, mask=chosen)
