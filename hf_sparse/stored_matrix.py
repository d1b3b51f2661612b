"""Weights as other libraries quantized them: what their codes become here, and how far that is from what they were.

A weight stays code for code where it is read along the axis that its groups lie on, and a format of
quantization/codebooks.py has its values. Scales are rounded to bfloat16, so the distance is measured there too. Other
weights are quantized again; those of projections that write to the hidden states always, since they are stored
transposed: their groups would lie across the neurons.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sparse.modeling import WeightFormat, relative_error
from hf_sparse.quantization import GROUP_SIZES, NeuronMatrix, memory, reference
from hf_sparse.quantization.codebooks import SMALLEST_SCALE, codebook

from .log import logger

CHUNK_WEIGHTS = 2**20
ROW_STEP = 8  # rows that share a word of some formats


@dataclass(frozen=True)
class Decoded:
    """Some rows: `weight` float32 [rows, cols], exactly what their library computes with. Where codes can be kept also
    `codes` (int8, or uint8 below 16) [rows, cols] and, of every group of `form`, `scales` and `offsets` float32 [rows,
    groups].
    """

    weight: Tensor
    codes: Tensor | None = None
    scales: Tensor | None = None
    offsets: Tensor | None = None


class StoredMatrix(ABC):
    """Weights [rows, cols] of a checkpoint. `bits`: of a code; `form`: weight_dtype and group size that keep its codes;
    None where there is none.
    """

    rows: int
    cols: int
    bits: int
    form: tuple[str, int] | None = None

    @abstractmethod
    def read(self) -> Callable[[int, int], Decoded]:
        """Reads the data. What it returns decodes rows start .. stop - 1, where start is a multiple of ROW_STEP."""

    def chunks(self) -> list[tuple[int, int]]:
        step = max(1, CHUNK_WEIGHTS // self.cols // ROW_STEP) * ROW_STEP
        return [(start, min(start + step, self.rows)) for start in range(0, self.rows, step)]

    def dequantize(self) -> Tensor:
        """float32 [rows, cols]."""
        decode, out = self.read(), torch.empty(self.rows, self.cols, dtype=torch.float32, device="cpu")
        for start, stop in self.chunks():
            out[start:stop] = decode(start, stop).weight
        return out


def group_size_of(*spans: int) -> int | None:
    """The largest group size of ours that divides all `spans`, which are columns that share a scale."""
    return next((size for size in reversed(GROUP_SIZES) if all(span % size == 0 for span in spans)), None)


def packed(decoded: Decoded, form: tuple[str, int]) -> NeuronMatrix:
    """The rows with their codes. Raises ValueError for scales or offsets that no bfloat16 holds."""
    weight_dtype, group_size = form
    book = codebook(weight_dtype)
    assert decoded.codes is not None and decoded.scales is not None
    rows, cols = decoded.codes.shape
    codes = F.pad(decoded.codes, (0, -cols % group_size), value=book.zero)
    # a scale below it has too few bits left, as in reference.quantize
    scales = torch.where(decoded.scales.abs() < SMALLEST_SCALE, 0.0, decoded.scales)
    largest = 128 if book.table is None else int(book.table.to(torch.int32).abs().max())
    for name, numbers, factor in (("scales", scales, largest), ("offsets", decoded.offsets, 1)):
        if numbers is not None and not bool((numbers.abs() * factor <= book.weight_limit).all()):
            raise ValueError(f"{name}: NaN, infinite or beyond +-{book.weight_limit / factor:g}")
    return NeuronMatrix(
        weight_dtype,
        group_size,
        rows,
        cols,
        codes=codes if book.table is None else reference.pack(codes),
        scales=scales.to(torch.bfloat16),
        offsets=None if decoded.offsets is None else decoded.offsets.to(torch.bfloat16),
    )


def repacked(stored: StoredMatrix, form: tuple[str, int], transposed: bool) -> tuple[NeuronMatrix, float]:
    """`stored` in `form`, by its codes where that is theirs, and the relative RMS error of that."""
    if transposed or form != stored.form:
        weight = stored.dequantize()
        weight = weight.T if transposed else weight
        matrix = NeuronMatrix.quantize(weight, *form)
        return matrix, relative_error(weight, matrix)
    decode, whole = stored.read(), dict[str, Tensor]()
    difference = total = 0.0
    for start, stop in stored.chunks():
        decoded = decode(start, stop)
        part = packed(decoded, form)
        squares = float(decoded.weight.square().sum())
        difference, total = difference + relative_error(decoded.weight, part) ** 2 * squares, total + squares
        for name, tensor in part.tensors().items():
            if name not in whole:
                whole[name] = memory.empty((stored.rows, tensor.shape[1]), tensor.dtype, tensor.device)
            whole[name][start:stop] = tensor
    matrix = NeuronMatrix(
        *form,
        stored.rows,
        stored.cols,
        codes=whole["codes"],
        scales=whole["scales"],
        offsets=whole.get("offsets"),
    )
    return matrix, (difference / total) ** 0.5 if total else 0.0


@dataclass
class Repacking:
    """What became of a checkpoint's quantized weights, to be said once."""

    kept: dict[str, float] = field(default_factory=dict)  # name -> relative RMS error
    changed: dict[str, float] = field(default_factory=dict)
    forms: set[str] = field(default_factory=set)  # of those that changed

    def repack(self, name: str, stored: StoredMatrix, form: WeightFormat, transposed: bool) -> NeuronMatrix:
        assert form.weight_dtype is not None
        wanted = (form.weight_dtype, form.group_size)
        matrix, error = repacked(stored, wanted, transposed)
        if wanted == stored.form and not transposed:
            self.kept[name] = error
        else:
            self.changed[name] = error
            self.forms.add(f"{form.weight_dtype} in groups of {form.group_size}")
        return matrix

    def say(self, where: object) -> None:
        """Logs one line: a warning where weights were quantized again."""
        if not self.kept and not self.changed:
            return
        parts = []
        if self.kept:
            parts.append(f"{len(self.kept)} keep their codes ({_spread(self.kept)})")
        if self.changed:
            forms = " and ".join(sorted(self.forms))
            parts.append(f"{len(self.changed)} were quantized again, to {forms} ({_spread(self.changed)})")
        total = len(self.kept) + len(self.changed)
        (logger.warning if self.changed else logger.info)(
            "%s: of %d quantized weights %s.", where, total, ", ".join(parts)
        )


def _spread(errors: dict[str, float]) -> str:
    worst = max(errors, key=lambda name: errors[name])
    mean = sum(errors.values()) / len(errors)
    return f"relative RMS error {mean:.2%} on average, {errors[worst]:.2%} at worst, of {worst}"
