"""Triton kernels for prompts: matrix products with weights that are unpacked tile by tile. See triton_kernels.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernels import listed, tile


@triton.jit
def _to_bfloat16_and_back(values):
    """To the nearest, half to even; the interpreter's conversion would cut."""
    bits = values.to(tl.float32).to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def many_row_product(
    x,
    codes,
    scales,
    offsets,
    table,
    index,
    out,
    n,
    maximum,
    cols,
    x_stride,
    code_stride,
    scale_stride,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    FULL: tl.constexpr,
    INTERPRETED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """out [n, maximum] = x @ W[index].T; grid (positions / ROWS, n / TOKENS). FULL: in float32, else in bfloat16.

    INTERPRETED: Triton's interpreter multiplies the bits of bfloat16 as whole numbers, so they go there as float32.
    """
    at, rows, within = listed(index, index, maximum, tl.program_id(0) * ROWS, ROWS, HAS_INDEX, False)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in range(0, cols, WIDTH):
        column = start + tl.arange(0, WIDTH)
        weights = tile(
            codes,
            scales,
            offsets,
            table,
            rows,
            column,
            within[:, None] & (column < cols)[None, :],
            code_stride,
            scale_stride,
            GROUP,
            FORMAT,
            HAS_OFFSET,
        )
        seen = tl.load(
            x + token[:, None] * x_stride + column[None, :],
            mask=(token < n)[:, None] & (column < cols)[None, :],
            other=0.0,
        )
        if FULL:
            total += tl.dot(seen.to(tl.float32), tl.trans(weights), input_precision="ieee")
        elif INTERPRETED:
            rounded = tl.trans(_to_bfloat16_and_back(weights))
            total += tl.dot(_to_bfloat16_and_back(seen), rounded, input_precision="ieee")
        else:
            total += tl.dot(seen.to(tl.bfloat16), tl.trans(weights.to(tl.bfloat16)))
    tl.store(out + token[:, None] * maximum + at[None, :], total, mask=(token < n)[:, None] & (at < maximum)[None, :])


@triton.jit
def many_accumulate(
    a,
    codes,
    scales,
    offsets,
    table,
    index,
    out,
    n,
    maximum,
    cols,
    a_stride,
    code_stride,
    scale_stride,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    FULL: tl.constexpr,
    INTERPRETED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """out [n, cols] = a @ W[index]; grid (columns / WIDTH, n / TOKENS)."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    total = tl.zeros([TOKENS, WIDTH], tl.float32)
    for start in range(0, maximum, ROWS):
        at, rows, within = listed(index, index, maximum, start, ROWS, HAS_INDEX, False)
        weights = tile(
            codes,
            scales,
            offsets,
            table,
            rows,
            column,
            within[:, None] & (column < cols)[None, :],
            code_stride,
            scale_stride,
            GROUP,
            FORMAT,
            HAS_OFFSET,
        )
        factors = tl.load(
            a + token[:, None] * a_stride + at[None, :], mask=(token < n)[:, None] & within[None, :], other=0.0
        )
        if FULL:
            total += tl.dot(factors.to(tl.float32), weights, input_precision="ieee")
        elif INTERPRETED:
            rounded = _to_bfloat16_and_back(weights)
            total += tl.dot(_to_bfloat16_and_back(factors), rounded, input_precision="ieee")
        else:
            total += tl.dot(factors.to(tl.bfloat16), weights.to(tl.bfloat16))
    tl.store(out + token[:, None] * cols + column[None, :], total, mask=(token < n)[:, None] & (column < cols)[None, :])
