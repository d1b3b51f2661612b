"""The definition of every operator in plain PyTorch, on any device: what the kernels are compared with, and what runs
where there is no kernel. With weight = dequantize(...), the row product is round_activations(x) @ weight.T and the
accumulation a @ weight, in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .codebooks import BLOCK_COLUMNS, SMALLEST_SCALE, WHOLE_LIMIT, Codebook, group_count


def quantize(weight: Tensor, book: Codebook, group_size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Packs `weight` [rows, cols], floating. Returns codes (uint8 [rows, padded cols / 2] or int8 [rows, padded cols]),
    scales and, where the codebook has them, offsets (bfloat16 [rows, groups]). Raises ValueError where a weight is NaN,
    infinite or beyond the codebook's limit.
    """
    rows, cols = weight.shape
    groups = group_count(cols, group_size)
    grouped = F.pad(weight.to(torch.float32), (0, groups * group_size - cols)).view(rows, groups, group_size)
    highest, lowest = grouped.amax(dim=2), grouped.amin(dim=2)
    absmax = torch.maximum(highest, -lowest)
    if not bool((absmax <= book.weight_limit).all()):
        raise ValueError(f"weight: NaN, infinite or beyond +-{book.weight_limit:g}")
    offsets = lowest.to(torch.bfloat16) if book.offset else None
    if offsets is not None:
        grouped = grouped - offsets.to(torch.float32).unsqueeze(2)
        peak = (highest - offsets.to(torch.float32)).clamp_min(0)
    else:
        peak = torch.where(highest >= -lowest, highest, lowest) if book.signed_peak else absmax
    scales = (peak / book.divisor).to(torch.bfloat16)
    scales = torch.where(scales.abs() < SMALLEST_SCALE, torch.zeros_like(scales), scales)
    # Codes are chosen against the scale as it is stored.
    divisor = scales.to(torch.float32).unsqueeze(2)
    ratio = torch.where(divisor == 0, torch.zeros_like(grouped), grouped / divisor).flatten(1)
    if book.thresholds is None:
        return ratio.round().clamp(-127, 127).to(torch.int8), scales, None
    codes = torch.bucketize(ratio, book.thresholds.to(weight.device), out_int32=True).to(torch.uint8)
    return pack(codes), scales, offsets


def pack(codes: Tensor) -> Tensor:
    """4-bit codes, uint8 [rows, padded cols], two to a byte: [rows, padded cols / 2]."""
    low, high = codes.unflatten(1, (-1, 2, BLOCK_COLUMNS // 2)).unbind(dim=2)
    return (low | (high << 4)).flatten(1)


def dequantize(
    codes: Tensor, scales: Tensor, offsets: Tensor | None, cols: int, book: Codebook, group_size: int
) -> Tensor:
    """The inverse of `quantize`: float32 [rows, cols]."""
    rows, groups = scales.shape
    if book.table is None:
        values = codes.to(torch.float32)
    else:
        blocks = codes.unflatten(1, (-1, 1, BLOCK_COLUMNS // 2))
        indices = torch.cat((blocks & 15, blocks >> 4), dim=2).flatten(1)
        values = book.table.to(codes.device, torch.float32)[indices.to(torch.int32)]
    weight = values.view(rows, groups, group_size) * scales.to(torch.float32).unsqueeze(2)
    if offsets is not None:
        weight = weight + offsets.to(torch.float32).unsqueeze(2)
    return weight.flatten(1)[:, :cols]


def fake_quantize(x: Tensor, group_size: int) -> Tensor:
    """`x` [n, cols] as an int8 kernel sees it: float32, every group of columns rounded to whole multiples of
    absmax / 32512, half to even, for which two signed bytes serve. A row that holds a NaN or an infinity becomes NaN as
    a whole.
    """
    n, cols = x.shape
    groups = group_count(cols, group_size)
    grouped = F.pad(x.to(torch.float32), (0, groups * group_size - cols)).view(n, groups, group_size)
    scale = grouped.abs().amax(dim=2, keepdim=True) / WHOLE_LIMIT
    scale = torch.where(scale < SMALLEST_SCALE, torch.zeros_like(scale), scale)
    ratio = torch.where(scale == 0, torch.zeros_like(grouped), grouped / scale)
    rounded = (ratio.round().clamp(-WHOLE_LIMIT, WHOLE_LIMIT) * scale).flatten(1)[:, :cols]
    return torch.where(x.isfinite().all(dim=1, keepdim=True), rounded, torch.full_like(rounded, torch.nan))


def round_activations(x: Tensor, compute_dtype: str, group_size: int) -> Tensor:
    """`x` as the row product at `compute_dtype` sees it, float32."""
    if compute_dtype == "int8":
        return fake_quantize(x, group_size)
    return (x.to(torch.bfloat16) if compute_dtype == "bf16" else x).to(torch.float32)
