"""NeuronMatrix: the weights of a block, stored along the axis that is skipped, so that a neuron is one contiguous run
of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import memory, native, reference
from .codebooks import Codebook, check_group_size, code_bytes, codebook, group_count

_FLOATING = (torch.float32, torch.bfloat16, torch.float16)
_CHUNK_WEIGHTS = 2**20  # weights packed or unpacked at a time: 4 MB in float32, 16 MB with the reference's temporaries


def row_chunks(rows: int, cols: int) -> Iterator[tuple[int, int]]:
    """Spans [start, stop) of rows whose weights in float32 take about 4 MB, at least one row each."""
    step = max(1, _CHUNK_WEIGHTS // cols)
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def index_fault(index: Tensor | None, rows: int) -> str | None:
    """What is wrong with the numbers in `index`, which should be strictly ascending rows of `rows`, in words; None
    where nothing is.
    """
    if index is None or not index.numel():
        return None
    lowest, highest = int(index.min()), int(index.max())
    if lowest < 0 or highest >= rows:
        return f"index: expected rows of 0..{rows - 1}, got {lowest}..{highest}"
    if not bool((index[1:] > index[:-1]).all()):
        return "index: expected strictly ascending rows, got unsorted or repeated ones"
    return None


class NeuronMatrix:
    """Weights [rows, cols]: a row is what an index selects. Immutable by convention.

    Packed (`weight_dtype` "nf4", "fp4", "int4", "int8"): `codes` uint8 [rows, padded cols / 2] or int8 [rows, padded
    cols], `scales` and, with "int4_asym", `offsets` bfloat16 [rows, groups of `group_size` columns], as codebooks.py
    describes. Unpacked
    (`weight_dtype` None): `weight` float32, bfloat16 or float16 [rows, cols].
    """

    __slots__ = ("_native", "codes", "cols", "group_size", "offsets", "rows", "scales", "weight", "weight_dtype")

    def __init__(
        self,
        weight_dtype: str | None,
        group_size: int,
        rows: int,
        cols: int,
        *,
        codes: Tensor | None = None,
        scales: Tensor | None = None,
        offsets: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> None:
        """For tensors known to fit; `quantize` and `from_tensors` are the ways in for others."""
        self.weight_dtype = weight_dtype
        self.group_size = group_size
        self.rows = rows
        self.cols = cols
        self.codes = codes
        self.scales = scales
        self.offsets = offsets
        self.weight = weight
        self._native: native.NativeMatrix | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies, which have addresses of their own."""
        return _rebuilt, (self.weight_dtype, self.group_size, self.rows, self.cols, self.tensors())

    @classmethod
    def quantize(cls, weight: Tensor, weight_dtype: str | None, group_size: int = 64) -> NeuronMatrix:
        """Packs `weight` [rows, cols], float32, bfloat16 or float16, with any strides, a few rows at a time.

        Raises ValueError for another shape or dtype and for a weight that is NaN, infinite or (packed) beyond +-2**127
        (2**126 for int4_asym).
        """
        check_group_size(group_size)
        if weight.dim() != 2 or weight.shape[1] == 0 or weight.dtype not in _FLOATING:
            raise ValueError(
                "weight: expected float32, bfloat16 or float16 [rows, cols] with cols > 0, "
                f"got {weight.dtype} {list(weight.shape)}"
            )
        rows, cols = weight.shape
        weight = weight.detach()
        if weight_dtype is None:
            for start, stop in row_chunks(rows, cols):
                if not bool(weight[start:stop].isfinite().all()):
                    raise ValueError("weight: NaN or infinite")
            return cls(None, group_size, rows, cols, weight=memory.settled(weight))
        book = codebook(weight_dtype)
        level = native.level() if weight.device.type == "cpu" else None
        code_dtype = torch.int8 if book.table is None else torch.uint8
        codes = memory.empty((rows, code_bytes(cols, book, group_size)), code_dtype, weight.device)
        of_groups = (rows, group_count(cols, group_size))
        scales = memory.empty(of_groups, torch.bfloat16, weight.device)
        offsets = memory.empty(of_groups, torch.bfloat16, weight.device) if book.offset else None
        for start, stop in row_chunks(rows, cols):
            chunk = weight[start:stop].to(torch.float32).contiguous()
            if level is None:
                codes[start:stop], scales[start:stop], part = reference.quantize(chunk, book, group_size)
                if offsets is not None and part is not None:
                    offsets[start:stop] = part
            else:
                part = None if offsets is None else offsets[start:stop]
                native.quantize(level, chunk, book, group_size, codes[start:stop], scales[start:stop], part)
        return cls(weight_dtype, group_size, rows, cols, codes=codes, scales=scales, offsets=offsets)

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], weight_dtype: str | None, group_size: int, rows: int, cols: int
    ) -> NeuronMatrix:
        """The inverse of `tensors()`, for tensors from outside. Raises ValueError where a name, dtype or shape is not
        what the other arguments ask for, or a scale is not finite.
        """
        check_group_size(group_size)
        if rows < 0 or cols < 1:
            raise ValueError(f"rows, cols: expected rows >= 0 and cols >= 1, got {rows} and {cols}")
        expected: dict[str, tuple[tuple[torch.dtype, ...], tuple[int, int]]]
        if weight_dtype is None:
            expected = {"weight": (_FLOATING, (rows, cols))}
        else:
            book = codebook(weight_dtype)
            code_dtype = torch.int8 if book.table is None else torch.uint8
            expected = {"codes": ((code_dtype,), (rows, code_bytes(cols, book, group_size)))}
            for name in ("scales", "offsets") if book.offset else ("scales",):
                expected[name] = ((torch.bfloat16,), (rows, group_count(cols, group_size)))
        if tensors.keys() != expected.keys():
            raise ValueError(
                f"tensors: expected {sorted(expected)} for weight_dtype {weight_dtype!r}, got {sorted(tensors)}"
            )
        if len({tensor.device for tensor in tensors.values()}) > 1:
            raise ValueError("tensors: expected all on one device")
        for name, (dtypes, shape) in expected.items():
            tensor = tensors[name]
            if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
                wanted = " or ".join(map(str, dtypes))
                raise ValueError(f"{name}: expected {wanted} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise ValueError(f"{name}: holds NaN or infinite numbers")
        held = {name: memory.settled(tensor.detach()) for name, tensor in tensors.items()}
        return cls(weight_dtype, group_size, rows, cols, **held)

    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by name and without a copy: "codes", "scales" and, with "int4_asym", "offsets"; or
        "weight".
        """
        named = {"codes": self.codes, "scales": self.scales, "offsets": self.offsets, "weight": self.weight}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def packed(self) -> tuple[Tensor, Tensor, Codebook]:
        """Codes, scales and codebook of a packed matrix. Raises ValueError for an unpacked one."""
        if self.codes is None or self.scales is None or self.weight_dtype is None:
            raise ValueError("this matrix is not packed: weight_dtype is None")
        return self.codes, self.scales, codebook(self.weight_dtype)

    def native(self) -> native.NativeMatrix | None:
        """For the kernels of `cpu/`; None where there are none, or they do not take it: another device, or float32 or
        float16 numbers.
        """
        if native.level() is None:
            return None
        if self._native is None and self.device.type == "cpu" and self.dtype in (None, torch.bfloat16):
            table = None if self.weight_dtype is None else codebook(self.weight_dtype).table
            codes = self.codes if self.weight is None else self.weight
            assert codes is not None
            self._native = native.NativeMatrix(
                codes, self.scales, self.offsets, table, self.rows, self.cols, self.group_size
            )
        return self._native

    def _with(self, rows: int, tensors: Mapping[str, Tensor]) -> NeuronMatrix:
        return NeuronMatrix(self.weight_dtype, self.group_size, rows, self.cols, **tensors)

    def select(self, index: Tensor) -> NeuronMatrix:
        """A copy of rows `index`, int64 [n] in any order. Raises ValueError for another dtype or shape or a row out of
        range.
        """
        if index.dtype != torch.int64 or index.dim() != 1:
            raise ValueError(f"index: expected int64 [n], got {index.dtype} {list(index.shape)}")
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.rows:
            raise ValueError(f"index: expected rows of 0..{self.rows - 1}, got {int(index.min())}..{int(index.max())}")
        index = index.to(self.device)
        return self._with(len(index), {name: memory.settled(tensor[index]) for name, tensor in self.tensors().items()})

    def narrow(self, start: int, length: int) -> NeuronMatrix:
        """Rows start .. start + length - 1 as a view. Raises ValueError where they are not all there."""
        if start < 0 or length < 0 or start + length > self.rows:
            raise ValueError(f"start, length: {start} and {length} do not fit {self.rows} rows")
        return self._with(length, {name: tensor[start : start + length] for name, tensor in self.tensors().items()})

    @staticmethod
    def scatter(parts: Sequence[tuple[Tensor, NeuronMatrix]]) -> NeuronMatrix:
        """The inverse of `select`, on the CPU: row k of a part's matrix becomes row index[k]. `index` is int64 [rows of
        the part].

        Raises ValueError where the parts differ in format or their indices do not cover every row exactly once.
        """
        if not parts:
            raise ValueError("parts: expected at least one")
        first = parts[0][1]
        form = (first.weight_dtype, first.group_size, first.cols, first.dtype)
        for position, (index, matrix) in enumerate(parts):
            if (matrix.weight_dtype, matrix.group_size, matrix.cols, matrix.dtype) != form:
                raise ValueError(f"parts[{position}]: weight_dtype, group_size, cols or dtype differ from parts[0]")
            if index.dtype != torch.int64 or index.shape != (matrix.rows,):
                raise ValueError(
                    f"parts[{position}]: expected an int64 index of its {matrix.rows} rows, "
                    f"got {index.dtype} {list(index.shape)}"
                )
        indices = [index.cpu() for index, _ in parts]
        rows = sum(matrix.rows for _, matrix in parts)
        if not torch.equal(torch.cat(indices).sort().values, torch.arange(rows, device="cpu")):
            raise ValueError(f"parts: their indices must cover each of 0..{rows - 1} exactly once")
        merged = {
            name: memory.empty((rows, tensor.shape[1]), tensor.dtype, torch.device("cpu"))
            for name, tensor in first.tensors().items()
        }
        for index, (_, matrix) in zip(indices, parts, strict=True):
            for name, tensor in matrix.tensors().items():
                merged[name][index] = tensor.cpu()
        return first._with(rows, merged)

    def dequantize(self, dtype: torch.dtype = torch.float32, index: Tensor | None = None) -> Tensor:
        """The weights as numbers, [rows, cols] of `dtype`; with `index` (int64 [n], strictly ascending) of those rows
        only.

        Raises ValueError for an index that does not fit and for a `dtype` other than float32, bfloat16 and float16.
        """
        if dtype not in _FLOATING:
            raise ValueError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
        if index is not None and (index.dtype != torch.int64 or index.dim() != 1 or index.device != self.device):
            raise ValueError(
                f"index: expected int64 [n] on {self.device}, got {index.dtype} {list(index.shape)} on {index.device}"
            )
        level, packed = native.level(), None if self.weight_dtype is None else self.native()
        if level is None or packed is None:
            return self._dequantize_in_torch(dtype, index)
        stored = dtype if dtype == torch.bfloat16 else torch.float32
        out = torch.empty(self.rows if index is None else len(index), self.cols, dtype=stored, device="cpu")
        if not packed.dequantize(level, None if index is None else index.contiguous(), out):
            raise ValueError(index_fault(index, self.rows))
        return out.to(dtype)

    def _dequantize_in_torch(self, dtype: torch.dtype, index: Tensor | None) -> Tensor:
        if fault := index_fault(index, self.rows):
            raise ValueError(fault)
        chosen = self if index is None else self.select(index)
        if chosen.weight is not None:
            return chosen.weight.to(dtype)
        codes, scales, book = chosen.packed()
        out = torch.empty(chosen.rows, self.cols, dtype=dtype, device=self.device)
        for start, stop in row_chunks(chosen.rows, self.cols):
            offsets = None if chosen.offsets is None else chosen.offsets[start:stop]
            form = (self.cols, book, self.group_size)
            out[start:stop] = reference.dequantize(codes[start:stop], scales[start:stop], offsets, *form)
        return out

    def to(self, device: torch.device | str) -> NeuronMatrix:
        """The same matrix on `device`; itself where it is there already."""
        if torch.device(device) == self.device:
            return self
        return self._with(self.rows, {name: tensor.to(device) for name, tensor in self.tensors().items()})

    @property
    def device(self) -> torch.device:
        stored = self.weight if self.codes is None else self.codes
        assert stored is not None
        return stored.device

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the unpacked weight; None where packed."""
        return None if self.weight is None else self.weight.dtype

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @staticmethod
    def row_nbytes(cols: int, weight_dtype: str | None, group_size: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of one stored row; `dtype` is that of the weights where `weight_dtype` is None."""
        if weight_dtype is None:
            return cols * dtype.itemsize
        check_group_size(group_size)
        book = codebook(weight_dtype)
        return code_bytes(cols, book, group_size) + (4 if book.offset else 2) * group_count(cols, group_size)

    def __repr__(self) -> str:
        form = self.dtype if self.weight_dtype is None else f"{self.weight_dtype}, groups of {self.group_size}"
        return f"NeuronMatrix([{self.rows}, {self.cols}], {form}, {self.device})"


def _rebuilt(
    weight_dtype: str | None, group_size: int, rows: int, cols: int, tensors: Mapping[str, Tensor]
) -> NeuronMatrix:
    return NeuronMatrix(weight_dtype, group_size, rows, cols, **tensors)
