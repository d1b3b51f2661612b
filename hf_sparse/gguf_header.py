"""Where the tensors of a GGUF file lie. The format is described in ggml's docs/gguf.md.

The `gguf` package's reader makes an array of every entry of the vocabulary, which takes seconds; this one steps over
them.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGMLQuantizationType
from gguf.quants import quant_shape_to_byte_shape

_GGUF_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9


class GgufTensor(NamedTuple):
    """`nbytes` bytes at `offset` of the file hold a tensor of `shape` (slowest dimension first), stored as `kind`."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    kind: GGMLQuantizationType


def read_gguf_header(file: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Metadata (scalars and texts; arrays are stepped over) and where the tensors of a GGUF file lie.

    Raises ValueError naming the file where it is no whole little-endian GGUF file of version 2 or 3.
    """
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(data).parse()
    except (ValueError, KeyError, TypeError, OverflowError, struct.error) as error:
        raise ValueError(f"{file}: truncated, corrupt, or not a GGUF file ({error}); fetch it again") from error


class _Walk:
    """One pass over the bytes of a header; nothing is trusted to lie within the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not start with the letters GGUF")
        self._position = 4
        version, tensor_count, metadata_count = self._unpack("<IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version}, expected 2 or 3 in little-endian order")
        metadata = {}
        for _ in range(metadata_count):
            key = self._text()
            metadata[key] = self._value(*self._unpack("<I"))
        if not isinstance(metadata.get("general.architecture"), str):
            raise ValueError("general.architecture is missing")
        table = [self._table_row() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}, expected an integer > 0")
        data_start = -(-self._position // alignment) * alignment
        spans: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in table:
            nbytes = math.prod(quant_shape_to_byte_shape(shape, kind))
            if name in spans:
                raise ValueError(f"tensor {name!r} is there twice")
            if data_start + offset + nbytes > len(self._data):
                raise ValueError(f"tensor {name!r} ends at byte {data_start + offset + nbytes} of {len(self._data)}")
            spans[name] = GgufTensor(data_start + offset, nbytes, shape, kind)
        return metadata, spans

    def _table_row(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._text()
        (dimensions,) = self._unpack("<I")
        if not 1 <= dimensions <= 4:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions, expected 1 to 4")
        shape = self._unpack(f"<{dimensions}Q")[::-1]  # stored with the fastest running one first
        if min(shape) < 1:
            raise ValueError(f"tensor {name!r} has shape {list(shape)}, expected sizes > 0")
        kind, offset = self._unpack("<IQ")
        return name, shape, GGMLQuantizationType(kind), offset

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._position)
        self._position += struct.calcsize(layout)
        return values

    def _text(self) -> str:
        (size,) = self._unpack("<Q")
        text = self._data[self._position : self._position + size]
        if len(text) != size:
            raise ValueError(f"a text of {size} bytes at byte {self._position} of {len(self._data)}")
        self._position += size
        return text.decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind in _GGUF_SCALARS:
            return self._unpack(_GGUF_SCALARS[kind])[0]
        if kind == _GGUF_STRING:
            return self._text()
        if kind != _GGUF_ARRAY:
            raise ValueError(f"metadata of unknown type {kind}")
        item, count = self._unpack("<IQ")
        if item in _GGUF_SCALARS:
            self._position += count * struct.calcsize(_GGUF_SCALARS[item])
        elif item == _GGUF_STRING:
            for _ in range(count):
                (size,) = self._unpack("<Q")
                self._position += size
        else:
            raise ValueError(f"a metadata array of type {item}")
        return None
