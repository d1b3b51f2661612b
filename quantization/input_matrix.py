"""InputMatrix: the weights of a linear layer stored by input, so that an input that is left out is not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import native
from .codebooks import BLOCK_COLUMNS, codebook
from .neuron_matrix import NeuronMatrix

PADDED_ROWS = 128  # rows are padded to a multiple of it, with scales of zero


class InputMatrix:
    """The same packed weights [rows, cols] as a NeuronMatrix, code for code and scale for scale; only where they lie
    differs: `codes` uint8 [padded cols, padded rows / 2] or int8 [padded cols, padded rows], `scales` and, with
    "int4_asym", `offsets` bfloat16 [groups of `group_size` columns, padded rows]. Immutable by convention.
    """

    __slots__ = ("_native", "codes", "cols", "group_size", "offsets", "rows", "scales", "weight_dtype")

    def __init__(self, weight_dtype: str, group_size: int, rows: int, cols: int, tensors: Mapping[str, Tensor]) -> None:
        """For tensors known to fit; `by_input` is the way in for others."""
        self.weight_dtype, self.group_size, self.rows, self.cols = weight_dtype, group_size, rows, cols
        self.codes, self.scales, self.offsets = tensors["codes"], tensors["scales"], tensors.get("offsets")
        self._native: native.NativeMatrix | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies, which have addresses of their own."""
        return InputMatrix, (self.weight_dtype, self.group_size, self.rows, self.cols, self.tensors())

    @classmethod
    def by_input(cls, matrix: NeuronMatrix) -> InputMatrix:
        """Raises ValueError for a matrix that is not packed."""
        codes, scales, _ = matrix.packed()
        assert matrix.weight_dtype is not None
        padded = matrix.group_size * scales.shape[1]  # with them, so that the inverse gives the same bits
        turned = _transposed(codes, matrix.weight_dtype, matrix.rows, padded, PADDED_ROWS)
        tensors = {"codes": turned, "scales": _padded(scales.T)}
        if matrix.offsets is not None:
            tensors["offsets"] = _padded(matrix.offsets.T)
        return cls(matrix.weight_dtype, matrix.group_size, matrix.rows, matrix.cols, tensors)

    def by_neuron(self) -> NeuronMatrix:
        """The inverse of `by_input`."""
        codes = _transposed(self.codes, self.weight_dtype, len(self.codes), self.rows, self.group_size)
        scales, offsets = (None if t is None else t.T[: self.rows].contiguous() for t in (self.scales, self.offsets))
        return NeuronMatrix(
            self.weight_dtype, self.group_size, self.rows, self.cols, codes=codes, scales=scales, offsets=offsets
        )

    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by name and without a copy."""
        named = {"codes": self.codes, "scales": self.scales, "offsets": self.offsets}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def native(self) -> native.NativeMatrix | None:
        """For the kernels; None where there are none, or they do not take it."""
        if native.level() is None or self.device.type != "cpu":
            return None
        if self._native is None:
            stored = (self.codes, self.scales, self.offsets, codebook(self.weight_dtype).table)
            self._native = native.NativeMatrix(*stored, self.rows, self.cols, self.group_size, by_input=True)
        return self._native

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights as numbers, [rows, cols] of `dtype`."""
        return self.by_neuron().dequantize(dtype)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


def _transposed(codes: Tensor, weight_dtype: str, rows: int, cols: int, multiple: int) -> Tensor:
    """Codes of `rows` rows of `cols` weights -> those of their columns as rows, padded to a multiple of weights."""
    four_bit = codebook(weight_dtype).table is not None
    level = native.level() if codes.device.type == "cpu" else None
    if level is not None:
        padded = -(-rows // multiple) * multiple
        out = torch.empty(cols, padded // 2 if four_bit else padded, dtype=codes.dtype, device="cpu")
        native.turn(level, codes.contiguous(), four_bit, cols, out)
        return out
    if four_bit:
        blocks = codes.unflatten(1, (-1, 1, BLOCK_COLUMNS // 2))
        codes = torch.cat((blocks & 15, blocks >> 4), dim=2).flatten(1)
    padding = -rows % multiple
    turned = F.pad(codes[:, :cols].T, (0, padding))
    if four_bit:
        low, high = turned.unflatten(1, (-1, 2, BLOCK_COLUMNS // 2)).unbind(dim=2)
        turned = (low | (high << 4)).flatten(1)
    return turned.contiguous()


def _padded(scales: Tensor) -> Tensor:
    return F.pad(scales, (0, -scales.shape[1] % PADDED_ROWS)).contiguous()
