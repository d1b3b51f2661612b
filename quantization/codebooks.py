"""The number formats: which values a code stands for, how a group's scale is chosen, how codes are laid out.

    weight[r, c] = value[code[r, c]] * scale[r, c // group_size] (+ offset[r, c // group_size], int4_asym only)

A value is a whole number of -128..127, a scale a bfloat16: their product is exact in float32, so every kernel, at every
compute dtype, multiplies by the same weight (an offset adds one rounding).

Layout of a row: columns are padded to a whole group with the code of zero. 8-bit codes take one signed byte each. 4-bit
codes come in blocks of 32 columns = 16 bytes: byte j holds column j in its low and column j + 16 in its high nibble, so
that one mask and one shift give two runs of consecutive columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZES = (32, 64, 128)
COMPUTE_DTYPES = ("int8", "bf16", "fp32")

BLOCK_COLUMNS = 32  # columns that share the 16 bytes of a 4-bit block
WEIGHT_LIMIT = 2.0**127  # larger weights could overflow to infinity when value * scale is formed; half with offsets
WHOLE_LIMIT = 127 * 256  # rounded activations are whole numbers up to this, held in two signed bytes
SMALLEST_SCALE = 2.0**-126  # a smaller scale has too few bits left to mean anything: the group is stored as zeros


@dataclass(frozen=True, eq=False)
class Codebook:
    """A weight format. `table` is int8 [16] ascending, or None where the code is the value (int8).

    A group's scale is its peak / `divisor`. The peak is the largest magnitude or, with `signed_peak`, the element of
    largest magnitude with its sign (the positive one of a tie); with `offset` the distance from the offset, which is
    the group's smallest weight in bfloat16, to its largest. The code is the nearest one, the lower of a tie.
    """

    name: str
    divisor: float
    signed_peak: bool = False
    table: Tensor | None = None
    offset: bool = False
    thresholds: Tensor | None = None  # float32 [15]: a code is the number of thresholds that weight / scale exceeds

    @property
    def weight_limit(self) -> float:
        return WEIGHT_LIMIT / 2 if self.offset else WEIGHT_LIMIT

    @property
    def bits(self) -> int:
        return 8 if self.table is None else 4

    @property
    def zero(self) -> int:
        """The code nearest to zero, with which rows are padded."""
        return 0 if self.table is None else int(self.table.abs().argmin())


def _four_bit(
    name: str, values: tuple[int, ...], divisor: float, signed_peak: bool = False, offset: bool = False
) -> Codebook:
    # The device is named, or a module first imported under `with torch.device("meta")` would hold no numbers.
    table = torch.tensor(values, dtype=torch.int8, device="cpu")
    exact = table.to(torch.float32)
    middles = (exact[1:] + exact[:-1]) / 2
    # Of two codes of one value the lower is written: one more threshold where its own upper one is.
    thresholds = torch.where(exact[1:] == exact[:-1], middles.roll(-1), middles)
    return Codebook(name, divisor, signed_peak, table, offset, thresholds)


_CODEBOOKS = {
    book.name: book
    for book in (
        # round(127 * v) of the 16 quantiles v of QLoRA (Dettmers et al. 2023, appendix E).
        _four_bit("nf4", (-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127), 127.0),
        # Sign, two exponent bits, one mantissa bit as bitsandbytes has them: +-12 * {0, 1/192, 1/6, 1/4, 1/3, 1/2, 2/3,
        # 1}. Times 10 all are whole but the smallest (0.625, taken as 1). Zero has two codes, the lower one is written.
        _four_bit("fp4", (-120, -80, -60, -40, -30, -20, -1, 0, 0, 1, 20, 30, 40, 60, 80, 120), 120.0),
        _four_bit("int4", tuple(range(-8, 8)), -8.0, signed_peak=True),
        # Counts up from the smallest weight of the group, as GGUF's Q4_1 does.
        _four_bit("int4_asym", tuple(range(16)), 15.0, offset=True),
        # GGUF's IQ4_NL. It has no zero: 1 is the nearest.
        _four_bit(
            "iq4_nl",
            (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
            -127.0,
            signed_peak=True,
        ),
        Codebook("int8", 127.0),
    )
}

# Formats to quantize to: iq4_nl is there for codes that are kept.
WEIGHT_DTYPES = tuple(name for name in _CODEBOOKS if name != "iq4_nl")


def codebook(weight_dtype: str) -> Codebook:
    """The codebook of that name. Raises ValueError for an unknown one."""
    if weight_dtype not in _CODEBOOKS:
        raise ValueError(f"weight_dtype {weight_dtype!r}: expected one of {', '.join(_CODEBOOKS)}, or None")
    return _CODEBOOKS[weight_dtype]


def check_group_size(group_size: int) -> None:
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size {group_size!r}: expected one of {', '.join(map(str, GROUP_SIZES))}")


def group_count(cols: int, group_size: int) -> int:
    """Groups of a row of `cols` columns; the last may be padded."""
    return -(-cols // group_size)


def code_bytes(cols: int, book: Codebook, group_size: int) -> int:
    """Bytes of the codes of one row."""
    return group_count(cols, group_size) * group_size * book.bits // 8
