"""Checkpoints that bitsandbytes (4 and 8 bits), GPTQ or AWQ quantized, seen as plain ones: a weight has its usual name
and shape, and `stored` gives its codes. Every size, shape and index is checked before it is used.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_sparse.quantization.codebooks import codebook

from .checkpoint import Checkpoint
from .stored_matrix import Decoded, StoredMatrix, group_size_of

WHOLE_ROW = 128  # group size where one scale serves a whole row
TABLE_TOLERANCE = 0.005  # of table entries, which are at most 1: ours are rounded to multiples of 1/127 or 1/120
JSON_BYTES = 1 << 16
MOST_WEIGHTS = 1 << 40
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _allowed(name: str, value: object, allowed: Collection[object]) -> None:
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise ValueError(f"{name}: got {value!r}, allowed are {', '.join(map(repr, allowed))}")


def _size(name: str, value: object, most: int = MOST_WEIGHTS) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{name}: got {value!r}, allowed are integers from 1 to {most}")
    return value


def _part(
    checkpoint: Checkpoint, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...] | None = None
) -> Tensor:
    """One tensor. Raises ValueError where it is missing or has another dtype, or a size (None: any) that differs."""
    try:
        got = checkpoint.shape(name)
    except KeyError:
        raise ValueError(f"{name}: it is missing") from None
    wanted = got if shape is None else shape
    if len(got) != len(wanted) or any(w is not None and g != w for g, w in zip(got, wanted, strict=True)):
        raise ValueError(f"{name}: expected shape {['any' if w is None else w for w in wanted]}, got {list(got)}")
    tensor = checkpoint.tensor(name)
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    return tensor


class Method(ABC):
    """How a library stores weights; made of its quantization_config. `bits`: of a code."""

    bits: int

    @abstractmethod
    def find(self, names: Collection[str]) -> dict[str, list[str]]:
        """Of every quantized weight, under the name it has in the model, what it is stored as."""

    @abstractmethod
    def open(self, checkpoint: Checkpoint, name: str) -> StoredMatrix:
        """The weight that `find` named. Raises ValueError naming the tensor that is not as it should be."""


# bitsandbytes


class _Bitsandbytes(Method):
    def __init__(self, fields: Mapping[str, Any]) -> None:
        where = "quantization_config"
        if not (fields.get("load_in_4bit") or fields.get("load_in_8bit")):
            raise ValueError(f"{where}.load_in_4bit: got {fields.get('load_in_4bit')!r}, allowed is True, or 8 bits")
        self.bits = 4 if fields.get("load_in_4bit") else 8
        if self.bits == 4:
            _allowed(f"{where}.bnb_4bit_quant_type", fields.get("bnb_4bit_quant_type", "fp4"), ("nf4", "fp4"))
            _allowed(f"{where}.bnb_4bit_quant_storage", fields.get("bnb_4bit_quant_storage", "uint8"), ("uint8",))

    def find(self, names: Collection[str]) -> dict[str, list[str]]:
        if self.bits == 8:
            stems = {name.removesuffix("SCB") for name in names if name.endswith(".SCB")}
            return {f"{s}weight": [f"{s}weight", f"{s}SCB", f"{s}weight_format"] for s in stems}
        weights = {name.rpartition(".quant_state.bitsandbytes__")[0] for name in names if ".quant_state.b" in name}
        states = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
        leaves = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *states)
        return {weight: [weight, *(f"{weight}.{leaf}" for leaf in leaves)] for weight in weights}

    def open(self, checkpoint: Checkpoint, name: str) -> StoredMatrix:
        return _Bits8(checkpoint, name) if self.bits == 8 else _Bits4(checkpoint, name)


class _Bits8(StoredMatrix):
    """LLM.int8: a row's codes times its SCB / 127."""

    bits = 8
    form = ("int8", WHOLE_ROW)

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name
        self._scb = f"{name.removesuffix('weight')}SCB"
        if len(checkpoint.shape(name)) != 2:
            raise ValueError(f"{name}: expected [rows, columns], got {list(checkpoint.shape(name))}")
        self.rows, self.cols = checkpoint.shape(name)
        layout = f"{name}_format"
        if layout in checkpoint.names():
            value = int(_part(checkpoint, layout, (torch.uint8,)).flatten()[:1].sum())
            _allowed(layout, value, (0,))  # rows, in their order

    def read(self) -> Callable[[int, int], Decoded]:
        codes = _part(self._checkpoint, self._name, (torch.int8,))
        scales = _part(self._checkpoint, self._scb, FLOATS, (self.rows,)).to(torch.float32) / 127
        groups = -(-self.cols // WHOLE_ROW)

        def decode(start: int, stop: int) -> Decoded:
            part, of_rows = codes[start:stop], scales[start:stop, None]
            return Decoded(part.to(torch.float32) * of_rows, part, of_rows.expand(-1, groups))

        return decode


class _Bits4(StoredMatrix):
    """nf4 and fp4: blocks of the flattened matrix share a scale; of two codes in a byte the first is the high one."""

    bits = 4

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name
        state = self._state()
        kind, self._block = state["quant_type"], _size(f"{name} blocksize", state.get("blocksize"))
        shape = state.get("shape")
        if not isinstance(shape, list) or len(shape) != 2:
            raise ValueError(f"{name}: expected a shape of [rows, columns], got {shape!r}")
        self.rows, self.cols = (_size(f"{name} shape", size, 1 << 30) for size in shape)
        self._weights = _size(f"{name} weights", self.rows * self.cols)
        stored = math.prod(checkpoint.shape(name))
        if stored != -(-self._weights // 2):
            raise ValueError(f"{name}: {stored} bytes are not the {self._weights} 4-bit codes of its shape {shape}")
        self._values = _part(checkpoint, f"{name}.quant_map", (torch.float32,), (16,))
        book = codebook(kind)
        assert book.table is not None
        self._divisor = book.divisor
        distance = (self._values[:, None] - book.table.to(torch.float32) / book.divisor).abs()
        nearest = distance.min(dim=1)
        if not bool((nearest.values <= TABLE_TOLERANCE).all()):
            raise ValueError(f"{name}.quant_map: expected the values of {kind}, got {self._values.tolist()}")
        self._ours = nearest.indices.to(torch.uint8)
        self._nested = self._nested_from(state) if "nested_blocksize" in state else None
        size = group_size_of(self._block, self.cols)
        self.form = None if size is None else (kind, size)

    def _state(self) -> dict[str, Any]:
        for kind in ("nf4", "fp4"):
            part = f"{self._name}.quant_state.bitsandbytes__{kind}"
            if part not in self._checkpoint.names():
                continue
            _size(f"{part} size", math.prod(self._checkpoint.shape(part)), JSON_BYTES)
            try:
                state = json.loads(bytes(_part(self._checkpoint, part, (torch.uint8,)).flatten().tolist()))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{part}: not a JSON text ({error})") from error
            if not isinstance(state, dict) or state.get("quant_type") != kind:
                raise ValueError(f"{part}: expected an object with quant_type {kind!r}, got {state!r:.200}")
            return state
        raise ValueError(f"{self._name}: no quant_state of nf4 or fp4")

    def _nested_from(self, state: Mapping[str, Any]) -> tuple[int, float]:
        offset = state.get("nested_offset")
        if isinstance(offset, bool) or not isinstance(offset, int | float) or not math.isfinite(offset):
            raise ValueError(f"{self._name}: nested_offset: got {offset!r}, allowed are finite numbers")
        return _size(f"{self._name} nested_blocksize", state["nested_blocksize"]), float(offset)

    def _scales(self) -> Tensor:
        """float32 [blocks]."""
        name, blocks = f"{self._name}.absmax", -(-self._weights // self._block)
        if self._nested is None:
            return _part(self._checkpoint, name, (torch.float32,), (blocks,))
        span, offset = self._nested
        codes = _part(self._checkpoint, name, (torch.uint8,), (blocks,))
        table = _part(self._checkpoint, f"{self._name}.nested_quant_map", (torch.float32,), (256,))
        outer = _part(self._checkpoint, f"{self._name}.nested_absmax", (torch.float32,), (-(-blocks // span),))
        return table[codes.to(torch.int32)] * outer.repeat_interleave(span)[:blocks] + offset

    def read(self) -> Callable[[int, int], Decoded]:
        data, scales = _part(self._checkpoint, self._name, (torch.uint8,)).flatten(), self._scales()

        def decode(start: int, stop: int) -> Decoded:
            first, last = start * self.cols, stop * self.cols
            pairs = data[first // 2 : -(-last // 2)]
            codes = torch.stack((pairs >> 4, pairs & 15), dim=1).flatten()[first % 2 :][: last - first]
            of_weights = scales[torch.arange(first, last) // self._block]
            weight = (self._values[codes.to(torch.int32)] * of_weights).view(-1, self.cols)
            if self.form is None:
                return Decoded(weight)
            ours = self._ours[codes.to(torch.int32)].view(-1, self.cols)
            return Decoded(weight, ours, of_weights.view(-1, self.cols)[:, :: self.form[1]] / self._divisor)

        return decode


# GPTQ and AWQ: whole numbers with a scale and a zero for every group of inputs, inputs first, in words of 32 bits.


class _InGroups(StoredMatrix):
    """`zeros` int32 [groups, rows], `group_of` int64 [cols]: in which group a column is."""

    def __init__(self, bits: int, group_size: int, zeros: Tensor, group_of: Tensor) -> None:
        self.bits, self._span = bits, group_size
        self.rows, self.cols = zeros.shape[1], len(group_of)
        self._zeros, self._group_of = zeros, group_of
        groups = len(zeros)
        size = WHOLE_ROW if groups == 1 else group_size_of(group_size)
        middle = 1 << (bits - 1)
        symmetric = bool((zeros == middle).all())
        weight_dtype = {(4, True): "int4", (4, False): "int4_asym", (8, True): "int8"}.get((bits, symmetric))
        in_order = torch.equal(group_of, torch.arange(self.cols) // group_size)  # not if columns were sorted first
        if in_order and size is not None and weight_dtype is not None:
            self.form = (weight_dtype, size)

    @abstractmethod
    def _data(self) -> tuple[Callable[[int, int], Tensor], Tensor]:
        """What gives codes [columns, rows] of rows start .. stop - 1, and the scales [groups, rows]."""

    def read(self) -> Callable[[int, int], Decoded]:
        unpack, all_scales = self._data()
        all_scales = all_scales.to(torch.float32)

        def decode(start: int, stop: int) -> Decoded:
            codes = unpack(start, stop).T.contiguous()
            scales, zeros = all_scales[:, start:stop].T, self._zeros[:, start:stop].T.to(torch.float32)
            weight = (codes.to(torch.float32) - zeros[:, self._group_of]) * scales[:, self._group_of]
            if self.form is None:
                return Decoded(weight)
            ours = self._group_of[:: self.form[1]]
            if self.form[0] == "int8":
                return Decoded(weight, (codes - 128).to(torch.int8), scales[:, ours])
            offsets = -(scales * zeros)[:, ours] if self.form[0] == "int4_asym" else None
            return Decoded(weight, codes.to(torch.uint8), scales[:, ours], offsets)

        return decode


def _unpacked(words: Tensor, shifts: Tensor, bits: int) -> Tensor:
    """int32 [..., n] -> [..., n, codes of a word]."""
    return (words[..., None] >> shifts) & ((1 << bits) - 1)


def _group_span(fields: Mapping[str, Any]) -> int | None:
    """Columns of a group; None: all."""
    value = fields.get("group_size", 128)
    if value == -1:
        return None
    if type(value) is not int or value < 1:
        raise ValueError(f"quantization_config.group_size: got {value!r}, allowed are -1 and integers above 0")
    return value


class _Gptq(Method):
    def __init__(self, fields: Mapping[str, Any]) -> None:
        where = "quantization_config"
        self.bits = fields.get("bits", 4)
        _allowed(f"{where}.bits", self.bits, (4, 8))
        layout = fields.get("checkpoint_format") or fields.get("format") or "gptq"
        _allowed(f"{where}.checkpoint_format", layout, ("gptq", "gptq_v2"))
        _allowed(f"{where}.is_marlin_format", bool(fields.get("is_marlin_format")), (False,))
        _allowed(f"{where}.pack_dtype", str(fields.get("pack_dtype") or "int32").removeprefix("torch."), ("int32",))
        if fields.get("dynamic"):
            raise ValueError(f"{where}.dynamic: got {fields['dynamic']!r:.100}, allowed is None: one form for all")
        self.less_one = layout == "gptq"  # the first version stores zeros minus one
        self.span = _group_span(fields)

    def find(self, names: Collection[str]) -> dict[str, list[str]]:
        stems = [name.removesuffix("qweight") for name in names if name.endswith(".qweight")]
        return {f"{s}weight": [f"{s}{leaf}" for leaf in ("qweight", "qzeros", "scales", "g_idx")] for s in stems}

    def open(self, checkpoint: Checkpoint, name: str) -> StoredMatrix:
        return _GptqMatrix(self, checkpoint, name.removesuffix("weight"))


class _GptqMatrix(_InGroups):
    def __init__(self, method: _Gptq, checkpoint: Checkpoint, stem: str) -> None:
        bits, count = method.bits, 32 // method.bits
        self._checkpoint, self._stem, self._shifts = checkpoint, stem, torch.arange(0, 32, bits, dtype=torch.int32)
        stored = checkpoint.shape(f"{stem}qweight")
        if len(stored) != 2 or 0 in stored:
            raise ValueError(f"{stem}qweight: expected [columns / {count}, rows], got {list(stored)}")
        cols, rows = stored[0] * count, stored[1]
        span = cols if method.span is None else method.span
        groups = -(-cols // span)
        words = _part(checkpoint, f"{stem}qzeros", (torch.int32,), (groups, -(-rows // count)))
        zeros = _unpacked(words, self._shifts, bits).flatten(1)[:, :rows]
        zeros = (zeros + method.less_one) & ((1 << bits) - 1)
        index = f"{stem}g_idx"
        if index in checkpoint.names():
            group_of = _part(checkpoint, index, (torch.int32, torch.int64), (cols,)).to(torch.int64)
            if int(group_of.min()) < 0 or int(group_of.max()) >= groups:
                raise ValueError(f"{index}: expected groups of 0..{groups - 1}, got {group_of.min()}..{group_of.max()}")
        else:
            group_of = torch.arange(cols) // span
        super().__init__(bits, span, zeros, group_of)

    def _data(self) -> tuple[Callable[[int, int], Tensor], Tensor]:
        words = _part(self._checkpoint, f"{self._stem}qweight", (torch.int32,))
        scales = _part(self._checkpoint, f"{self._stem}scales", FLOATS, tuple(self._zeros.shape))

        def unpack(start: int, stop: int) -> Tensor:
            return _unpacked(words[:, start:stop], self._shifts, self.bits).transpose(1, 2).flatten(0, 1)

        return unpack, scales


class _Awq(Method):
    bits = 4

    def __init__(self, fields: Mapping[str, Any]) -> None:
        where = "quantization_config"
        _allowed(f"{where}.bits", fields.get("bits", 4), (4,))
        layout = fields.get("version") or fields.get("format") or "gemm"
        _allowed(f"{where}.version", str(layout).lower(), ("gemm",))
        _allowed(f"{where}.zero_point", fields.get("zero_point", True), (True,))
        self.span = _group_span(fields)

    def find(self, names: Collection[str]) -> dict[str, list[str]]:
        stems = [name.removesuffix("qweight") for name in names if name.endswith(".qweight")]
        return {f"{s}weight": [f"{s}{leaf}" for leaf in ("qweight", "qzeros", "scales")] for s in stems}

    def open(self, checkpoint: Checkpoint, name: str) -> StoredMatrix:
        return _AwqMatrix(self, checkpoint, name.removesuffix("weight"))


class _AwqMatrix(_InGroups):
    def __init__(self, method: _Awq, checkpoint: Checkpoint, stem: str) -> None:
        self._checkpoint, self._stem = checkpoint, stem
        # the nibbles of a word, from the lowest, are its rows 0, 2, 4, 6, 1, 3, 5, 7
        self._shifts = 4 * torch.tensor((0, 4, 1, 5, 2, 6, 3, 7), dtype=torch.int32)
        stored = checkpoint.shape(f"{stem}qweight")
        if len(stored) != 2 or 0 in stored:
            raise ValueError(f"{stem}qweight: expected [columns, rows / 8], got {list(stored)}")
        cols = stored[0]
        span = cols if method.span is None else method.span
        words = _part(checkpoint, f"{stem}qzeros", (torch.int32,), (-(-cols // span), stored[1]))
        zeros = _unpacked(words, self._shifts, 4).flatten(1)
        super().__init__(4, span, zeros, torch.arange(cols) // span)

    def _data(self) -> tuple[Callable[[int, int], Tensor], Tensor]:
        words = _part(self._checkpoint, f"{self._stem}qweight", (torch.int32,))
        scales = _part(self._checkpoint, f"{self._stem}scales", FLOATS, tuple(self._zeros.shape))

        def unpack(start: int, stop: int) -> Tensor:
            return _unpacked(words[:, start // 8 : -(-stop // 8)], self._shifts, 4).flatten(1)[:, : stop - start]

        return unpack, scales


_METHODS: dict[str, Callable[[Mapping[str, Any]], Method]] = {
    "bitsandbytes": _Bitsandbytes,
    "gptq": _Gptq,
    "awq": _Awq,
}


def method_of(fields: Mapping[str, Any]) -> Method:
    """How weights are stored, by what config.json says as "quantization_config". Raises ValueError, with the field and
    what is allowed, for what cannot be read.
    """
    name = str(getattr(fields.get("quant_method"), "value", fields.get("quant_method")))
    _allowed("quantization_config.quant_method", name, ("hf_sparse", *_METHODS))
    return _METHODS[name](fields)


class PrequantizedCheckpoint(Checkpoint):
    """`checkpoint`, whose quantized weights are stored by `method`, with their usual names."""

    def __init__(self, checkpoint: Checkpoint, method: Method) -> None:
        super().__init__(checkpoint.files, checkpoint.config_file, checkpoint.repo_id, checkpoint.revision_hash)
        self._inner, self._method = checkpoint, method
        found = method.find(checkpoint.names())
        parts = {part for of_weight in found.values() for part in of_weight}
        self._names = [name for name in checkpoint.names() if name not in parts] + sorted(found)
        self._quantized = set(found)

    def names(self) -> list[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if (stored := self.stored(name)) is not None:
            return stored.rows, stored.cols
        return self._inner.shape(name)

    def stored(self, name: str) -> StoredMatrix | None:
        return self._method.open(self._inner, name) if name in self._quantized else None

    def _read(self, name: str) -> tuple[Tensor, Path]:
        stored = self.stored(name)
        return self._inner._read(name) if stored is None else (stored.dequantize(), self.files[0])
