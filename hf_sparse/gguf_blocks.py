"""The codes of GGUF's block formats (ggml's ggml-quants.h): those that a format of quantization/codebooks.py can hold,
with a scale for every 32 columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from .stored_matrix import Decoded, StoredMatrix

GROUP = 32
# Of every kind whose values are codes: bits of a code, and the weight_dtype that has them.
KINDS: dict[str, tuple[int, str | None]] = {
    "Q4_0": (4, "int4"),
    "Q4_1": (4, "int4_asym"),
    "Q4_K": (4, "int4_asym"),
    "IQ4_NL": (4, "iq4_nl"),
    "IQ4_XS": (4, "iq4_nl"),
    "Q5_0": (5, "int8"),
    "Q8_0": (8, "int8"),
    "Q5_1": (5, None),
    "Q2_K": (2, None),
    "Q3_K": (3, None),
    "Q5_K": (5, None),
    "Q6_K": (6, None),
    "MXFP4": (4, None),
    "NVFP4": (4, None),
    "TQ1_0": (2, None),
    "TQ2_0": (2, None),
    "IQ1_S": (2, None),
    "IQ1_M": (2, None),
    "IQ2_XXS": (2, None),
    "IQ2_XS": (2, None),
    "IQ2_S": (2, None),
    "IQ3_XXS": (3, None),
    "IQ3_S": (3, None),
}


class _Parts(NamedTuple):
    """Codes of one byte [blocks, columns], and scales and offsets float32 [blocks, columns / 32]."""

    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None = None


def _halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 number at byte `start` of every block, float32 [blocks, 1]."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(data: np.ndarray, half: int) -> np.ndarray:
    """Codes of bytes that come in runs of `half`: first the low nibbles of a run, then the high ones."""
    runs = data.reshape(len(data), -1, 1, half)
    return np.concatenate((runs & 15, runs >> 4), axis=2).reshape(len(data), -1)


def _q4_0(blocks: np.ndarray) -> _Parts:
    return _Parts(_nibbles(blocks[:, 2:], 16), _halves(blocks, 0))


def _q4_1(blocks: np.ndarray) -> _Parts:
    return _Parts(_nibbles(blocks[:, 4:], 16), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: np.ndarray) -> _Parts:
    high = np.unpackbits(blocks[:, 2:6].copy(), axis=1, bitorder="little")
    codes = _nibbles(blocks[:, 6:], 16) | high << 4
    return _Parts(codes.astype(np.int8) - np.int8(16), _halves(blocks, 0))


def _q8_0(blocks: np.ndarray) -> _Parts:
    return _Parts(blocks[:, 2:].view(np.int8), _halves(blocks, 0))


def _q4_k(blocks: np.ndarray) -> _Parts:
    # 6-bit factors of the 8 groups: of the first four in bytes of their own, whose upper bits go to the last four
    scale, least, rest = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate((scale & 63, rest & 15 | scale >> 6 << 4), axis=1)
    minima = np.concatenate((least & 63, rest >> 4 | least >> 6 << 4), axis=1)
    return _Parts(_nibbles(blocks[:, 16:], 32), _halves(blocks, 0) * scales, -_halves(blocks, 2) * minima)


def _iq4_xs(blocks: np.ndarray) -> _Parts:
    high = blocks[:, 2:4].copy().view("<u2").astype(np.int32)
    groups = np.arange(8)
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=2).reshape(len(blocks), 8)
    factors = (low | (high >> 2 * groups & 3) << 4) - 32
    return _Parts(_nibbles(blocks[:, 8:], 16), _halves(blocks, 0) * factors.astype(np.float32))


_PARTS: dict[str, Callable[[np.ndarray], _Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "IQ4_NL": _q4_0,  # the same but for what a code means
    "IQ4_XS": _iq4_xs,
    "Q5_0": _q5_0,
    "Q8_0": _q8_0,
}


class GgufMatrix(StoredMatrix):
    """A quantized tensor of a GGUF file. Row i is the stored row `order[i]`, int64 [rows]."""

    def __init__(
        self,
        kind: GGMLQuantizationType,
        shape: tuple[int, int],
        raw: Callable[[], np.ndarray],
        order: np.ndarray,
    ) -> None:
        """`raw` reads the stored bytes, uint8 [rows, bytes of a row]."""
        self._kind, self._raw, self._order = kind, raw, order
        self.rows, self.cols = shape
        self.bits, weight_dtype = KINDS[kind.name]
        self.form = None if weight_dtype is None else (weight_dtype, GROUP)

    def read(self) -> Callable[[int, int], Decoded]:
        raw, parts = self._raw(), _PARTS.get(self._kind.name)

        def decode(start: int, stop: int) -> Decoded:
            rows = raw[self._order[start:stop]]
            weight = torch.from_numpy(dequantize(rows, self._kind))
            if parts is None:
                return Decoded(weight)
            found = parts(rows.reshape(-1, GGML_QUANT_SIZES[self._kind][1]))

            def of_rows(array: np.ndarray) -> Tensor:
                return torch.from_numpy(np.ascontiguousarray(array).reshape(len(rows), -1))

            offsets = None if found.offsets is None else of_rows(found.offsets)
            return Decoded(weight, of_rows(found.codes), of_rows(found.scales), offsets)

        return decode
