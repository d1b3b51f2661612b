"""The C++ kernels of `cpu/`: which instruction set is used, and typed calls that hand over addresses and sizes.

The kernels check nothing but the index: callers have checked every shape, dtype and device before they come here.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from typing import Any

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


class Lock:
    """A lock that is free in a forked process, whoever held it in the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        if self._lock.locked():  # a fork within may have freed it
            self._lock.release()


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()
_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True
    _free_locks()


def _free_locks() -> None:
    for lock in _locks:
        lock._lock = threading.Lock()


os.register_at_fork(after_in_child=_note_fork)


@functools.cache
def _warn_of_fork() -> None:
    logger.warning(
        "This process was forked from one that had loaded hf_sparse: OpenMP's threads do not survive that, so the CPU "
        "kernels use one thread here. Start workers with the spawn method to have all."
    )


def threads() -> int:
    """How many threads the kernels use: torch's setting, which follows the CPUs that the process may use."""
    if _forked:
        _warn_of_fork()
        return 1
    return torch.get_num_threads()


def address(tensor: Tensor | None) -> int:
    """Of the first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


COMPUTE_CODES = {"fp32": 0, "bf16": 1, "int8": 2}


def quantize(
    level: int, weight: Tensor, book: Codebook, group_size: int, codes: Tensor, scales: Tensor, offsets: Tensor | None
) -> None:
    """`reference.quantize` of a contiguous float32 CPU tensor, bit for bit, into `codes`, `scales` and `offsets`."""
    rows, cols = weight.shape
    rule = _kernels.Rule(address(book.thresholds), book.divisor, book.signed_peak, book.offset)
    out = (codes.data_ptr(), scales.data_ptr(), address(offsets))
    if not _kernels.quantize(level, weight.data_ptr(), rows, cols, group_size, rule, *out, threads()):
        raise ValueError(f"weight: NaN, infinite or beyond +-{book.weight_limit:g}")


def turn(level: int, codes: Tensor, packed: bool, cols: int, out: Tensor) -> None:
    """`codes` [rows, bytes] of `cols` columns -> those of the columns as rows, [cols, bytes], all of it written."""
    sizes = codes.shape[0], cols, codes.shape[1]
    _kernels.turn(level, codes.data_ptr(), packed, *sizes, out.data_ptr(), out.shape[1], threads())


class NativeMatrix:
    """Weights on the CPU as the kernels take them: packed, or bfloat16 numbers. Holds addresses: the tensors behind
    them must live as long.
    """

    __slots__ = ("handle", "rows")

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor | None,
        offsets: Tensor | None,
        table: Tensor | None,
        rows: int,
        cols: int,
        group_size: int,
        by_input: bool = False,
    ) -> None:
        self.rows = rows
        addresses = (codes.data_ptr(), address(scales), address(offsets), address(table))
        self.handle = _kernels.Matrix(*addresses, rows, cols, group_size, by_input)

    def _selection(self, index: Tensor | None) -> tuple[int, int]:
        return (0, self.rows) if index is None else (index.data_ptr(), index.shape[0])

    # Each returns whether `index` (int64, contiguous; None for all rows) is strictly ascending and within the rows; if
    # not, `out` (contiguous) is left as it was.

    def dequantize(self, level: int, index: Tensor | None, out: Tensor) -> bool:
        """`out`: float32 or bfloat16 [rows, cols]."""
        is_bf16 = out.dtype == torch.bfloat16
        return _kernels.dequantize(level, self.handle, *self._selection(index), out.data_ptr(), is_bf16, threads())

    def row_product(self, level: int, x: Tensor, index: Tensor | None, compute_dtype: str, out: Tensor) -> bool:
        """`x`: float32 [n, cols], contiguous; `out`: float32 [n, rows]."""
        compute = COMPUTE_CODES[compute_dtype]
        return _kernels.row_product(
            level, self.handle, *self._selection(index), x.data_ptr(), x.shape[0], compute, out.data_ptr(), threads()
        )

    def accumulate(self, level: int, a: Tensor, index: Tensor | None, compute_dtype: str, out: Tensor) -> bool:
        """`a`: float32 [n, rows], contiguous; `out`: float32 [n, cols]."""
        compute = COMPUTE_CODES[compute_dtype]
        return _kernels.accumulate(
            level, self.handle, *self._selection(index), a.data_ptr(), a.shape[0], compute, out.data_ptr(), threads()
        )

    def input_product(self, level: int, x: Tensor, index: Tensor, compute_dtype: str, out: Tensor) -> bool:
        """Of weights by input, whose inputs `index` lists; `x`: float32 [cols]; `out`: float32 [padded rows]."""
        selection, compute = (index.data_ptr(), index.shape[0]), COMPUTE_CODES[compute_dtype]
        return _kernels.input_product(level, self.handle, *selection, x.data_ptr(), compute, out.data_ptr(), threads())

    def many_row_product(self, level: int, x: Tensor, index: Tensor | None, out: Tensor) -> bool:
        """As `row_product`, where `has_many(level)`: in bfloat16, made for many rows of activations."""
        rows = self._selection(index)
        return _kernels.many_row_product(level, self.handle, *rows, x.data_ptr(), x.shape[0], out.data_ptr(), threads())

    def many_accumulate(self, level: int, a: Tensor, index: Tensor | None, out: Tensor) -> bool:
        """As `accumulate`, where `has_many(level)`: in bfloat16, made for many rows of activations."""
        rows = self._selection(index)
        return _kernels.many_accumulate(level, self.handle, *rows, a.data_ptr(), a.shape[0], out.data_ptr(), threads())


@functools.cache
def has_many(level: int) -> bool:
    """Whether the instruction set has matrix products for many rows of activations (AMX)."""
    return _kernels.has_many(level)


def active_neurons(
    level: int, fc1: NativeMatrix, fc2: NativeMatrix, bias: Tensor, x: Tensor, compute_dtype: str
) -> Tensor:
    """int64, ascending: rows of `fc2` whose score fc2 @ relu(fc1 @ x) + bias is above zero. All contiguous float32."""
    predictor = _kernels.Predictor(fc1.handle, fc2.handle, bias.data_ptr())
    index = torch.empty(fc2.rows, dtype=torch.int64, device="cpu")
    count = _kernels.active_neurons(
        level, predictor, x.data_ptr(), COMPUTE_CODES[compute_dtype], index.data_ptr(), threads()
    )
    return index[:count]


def kernels() -> Any:
    """The extension module, for modeling/engine.py, which builds the structures it decodes with."""
    return _kernels
