"""The C++ kernels of `cpu/`: which instruction set is used, and typed calls that hand over addresses and sizes.

The kernels check nothing but the index: callers have checked every shape, dtype and device before they come here.
"""

from __future__ import annotations

import functools
import logging
import os

import torch  # before the extension: both then share the OpenMP pool that torch loads
from torch import Tensor

from .codebooks import Codebook

_IMPORT_ERROR: ImportError | None = None
try:
    # Absolute: a failing `from . import` would blame a circular import.
    import hf_sparse.quantization._kernels as _kernels
except ImportError as error:
    _IMPORT_ERROR = error

logger = logging.getLogger(__name__)

_VARIABLE = "HF_SPARSE_ISA"


def instruction_sets() -> list[str]:
    """What this machine can use, best first. The last one is always "torch", the reference operators."""
    return [*(() if _IMPORT_ERROR else _kernels.levels()), "torch"]


@functools.cache
def instruction_set() -> str:
    """What is in use: the best of `instruction_sets()`, or the one that the environment variable HF_SPARSE_ISA names
    (read at first use). Raises ValueError where this machine has no such thing.
    """
    available = instruction_sets()
    wanted = os.environ.get(_VARIABLE)
    if wanted and wanted not in available:
        raise ValueError(f"{_VARIABLE}={wanted!r}: this machine and installation have {', '.join(available)}")
    if not wanted and _IMPORT_ERROR:
        logger.warning(
            "The CPU kernels cannot be loaded (%s): slow PyTorch operators stand in. Reinstall hf_sparse where a C++17 "
            "compiler is found to have the kernels built.",
            _IMPORT_ERROR,
        )
    return wanted or available[0]


@functools.cache
def _level_of(name: str) -> int | None:
    return None if _IMPORT_ERROR else _kernels.levels().get(name)


def level() -> int | None:
    """The number by which the kernels know the instruction set in use; None where the reference operators are."""
    return _level_of(instruction_set())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def quantize(level: int, weight: Tensor, book: Codebook, group_size: int, codes: Tensor, scales: Tensor) -> None:
    """`reference.quantize` of a contiguous float32 CPU tensor, bit for bit, into `codes` and `scales`."""
    rows, cols = weight.shape
    thresholds, threads = _address(book.thresholds), torch.get_num_threads()
    packed = (codes.data_ptr(), scales.data_ptr())
    rule = (thresholds, book.divisor, book.signed_peak)
    if not _kernels.quantize(level, weight.data_ptr(), rows, cols, group_size, *rule, *packed, threads):
        raise ValueError("weight: NaN, infinite or beyond +-2**127")


class PackedRows:
    """Packed CPU weights as the kernels take them. Holds addresses: the tensors behind them must live as long."""

    __slots__ = ("_arguments", "_rows")

    def __init__(self, codes: Tensor, scales: Tensor, cols: int, book: Codebook, group_size: int) -> None:
        self._rows = codes.shape[0]
        self._arguments = (codes.data_ptr(), scales.data_ptr(), _address(book.table), self._rows, cols, group_size)

    def _rows_argument(self, index: Tensor | None) -> tuple[int, int]:
        return (0, self._rows) if index is None else (index.data_ptr(), index.shape[0])

    # Each returns whether `index` (int64, contiguous; None for all rows) is strictly ascending and within the rows; if
    # not, `out` (contiguous) is left as it was.

    def dequantize(self, level: int, index: Tensor | None, out: Tensor) -> bool:
        """`out`: float32 or bfloat16 [rows, cols]."""
        is_bf16 = out.dtype == torch.bfloat16
        threads = torch.get_num_threads()
        return _kernels.dequantize(
            level, *self._arguments, *self._rows_argument(index), out.data_ptr(), is_bf16, threads
        )

    def row_product(self, level: int, x: Tensor, index: Tensor | None, integer: bool, out: Tensor) -> bool:
        """`x`: float32 [n, cols], contiguous; `out`: float32 [n, rows]."""
        threads = torch.get_num_threads()
        rows = self._rows_argument(index)
        return _kernels.row_product(
            level, *self._arguments, *rows, x.data_ptr(), x.shape[0], integer, out.data_ptr(), threads
        )

    def accumulate(self, level: int, a: Tensor, index: Tensor | None, out: Tensor) -> bool:
        """`a`: float32 [n, rows], contiguous; `out`: float32 [n, cols]."""
        threads = torch.get_num_threads()
        rows = self._rows_argument(index)
        return _kernels.accumulate(level, *self._arguments, *rows, a.data_ptr(), a.shape[0], out.data_ptr(), threads)
