"""Opens what `from_pretrained` was given (a folder, a Hub id, a GGUF file) and reads it one tensor at a time.

Nothing stays mapped: a tensor lies in memory of its own, so resident memory falls when it is freed and a file that is
replaced later harms nobody. Pickled weights (pytorch_model.bin) are never opened. Not here: which tensor goes where,
and what it becomes.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quant_shape_to_byte_shape
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_SUPPORTED_ARCHITECTURES,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from transformers.utils.hub import cached_file, cached_files, extract_commit_hash, has_file, resolve_revision

from .gguf_blocks import KINDS, GgufMatrix
from .gguf_header import GgufTensor, read_gguf_header
from .log import logger
from .stored_matrix import StoredMatrix

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Checkpoint(ABC):
    """The weights of one model, named as transformers names them (GGUF) or as they are stored (safetensors).

    `directory` is where the files lie, `files` are the weight files sorted by name, `config_file` the config.json
    beside them, if any. `repo_id` and `revision_hash` (the commit) are set for what came from the Hub.
    """

    def __init__(
        self, files: list[Path], config_file: Path | None, repo_id: str | None = None, revision_hash: str | None = None
    ) -> None:
        self.files = sorted(files, key=lambda file: file.name)
        self.directory = self.files[0].parent
        self.config_file = config_file
        self.repo_id = repo_id
        self.revision_hash = revision_hash
        self._fingerprint: str | None = None

    @abstractmethod
    def names(self) -> list[str]:
        """Names of all tensors."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, known without reading it. Raises KeyError where there is no tensor of that name."""

    def stored(self, name: str) -> StoredMatrix | None:
        """The tensor as another library quantized it; None where it consists of numbers."""
        return None

    @abstractmethod
    def _read(self, name: str) -> tuple[Tensor, Path]:
        """The tensor in memory of its own, and the file it came from."""

    def tensor(self, name: str) -> Tensor:
        """Reads one tensor, on the CPU, in memory of its own.

        Raises KeyError where there is no tensor of that name, ValueError naming tensor and file where it holds NaN or
        infinities or cannot be decoded, OSError where the file cannot be read.
        """
        tensor, file = self._read(name)
        if tensor.is_floating_point() and tensor.numel():
            least, most = torch.aminmax(tensor)  # one pass, no temporary; NaN comes out on both sides
            if not (math.isfinite(least) and math.isfinite(most)):
                raise ValueError(f"{file}: tensor {name!r} holds NaN or infinite values")
        return tensor

    def fingerprint(self) -> str:
        """sha256, in hex, over name, size and content of every weight file and of config.json, where there is one.

        The same for a Hub id and for a copy of it in a folder. Computed once per object.
        """
        if self._fingerprint is None:
            files = [*self.files, *([self.config_file] if self.config_file else [])]
            with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
                digests = list(pool.map(self._content_digest, files))
            lines = [
                f"{file.name} {file.stat().st_size} {digest}\n" for file, digest in zip(files, digests, strict=True)
            ]
            self._fingerprint = hashlib.sha256("".join(lines).encode()).hexdigest()
        return self._fingerprint

    def _content_digest(self, file: Path) -> str:
        blob = file.resolve()
        if self.repo_id is not None and blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name):
            return blob.name  # the Hub's cache names large files by their sha256
        digest = hashlib.sha256()
        chunk = memoryview(bytearray(1 << 20))
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(chunk):
                digest.update(chunk[:count])
        return digest.hexdigest()


def open_checkpoint(
    name_or_path: str | os.PathLike[str],
    *,
    model: PreTrainedModel,
    gguf_file: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    force_download: bool = False,
    proxies: dict[str, str] | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    subfolder: str = "",
    variant: str | None = None,
) -> Checkpoint:
    """Finds the weights of a local folder or a Hub id, downloading what the cache lacks, and reads their headers.

    `model` is the transformers model, on the meta device; its names and shapes are what a GGUF is read to. The other
    arguments mean what they mean to transformers' `from_pretrained`.

    Raises OSError where files are missing or cannot be had, or are pickled only; ValueError where a file is corrupt,
    an index and its shards disagree, or a GGUF is of an architecture that transformers cannot map. Each names the
    file.
    """
    _require_folder_or_repo(name_or_path)
    name = str(name_or_path)
    hub: dict[str, Any] = {
        "cache_dir": cache_dir,
        "force_download": force_download,
        "proxies": proxies,
        "token": token,
        "local_files_only": local_files_only,
        "subfolder": subfolder or "",
    }
    # one commit for all files, even if the repository moves on meanwhile
    hub["revision"] = resolve_revision(
        name, revision, token=token, local_files_only=local_files_only, cache_dir=cache_dir
    )
    config_file = _find(name, CONFIG_NAME, hub)
    weights: dict[str, Path] | None = None
    if gguf_file is not None:
        located = cached_file(name, gguf_file, **hub)
        assert located is not None  # it raises where there is none
        files = [Path(located)]
    elif single := _find(name, _with_variant(SAFE_WEIGHTS_NAME, variant), hub):
        files = [single]
    elif index := _find(name, _with_variant(SAFE_WEIGHTS_INDEX_NAME, variant), hub):
        weights = _read_index(name, index, hub)
        files = sorted(set(weights.values()))
    else:
        raise _no_weights(name, variant, hub)
    repo_id, revision_hash = None, None
    if not Path(name).is_dir():
        repo_id, revision_hash = name, extract_commit_hash(str(files[0]), None)
    if gguf_file is not None:
        return GgufCheckpoint(files, config_file, repo_id, revision_hash, model=model)
    return SafetensorsCheckpoint(files, config_file, repo_id, revision_hash, weights=weights)


def _require_folder_or_repo(name_or_path: str | os.PathLike[str]) -> None:
    name, path = str(name_or_path), Path(name_or_path)
    if path.is_file():
        raise OSError(f"{name} is a file: give the folder it lies in (and gguf_file={path.name!r} for a GGUF)")
    is_path = isinstance(name_or_path, os.PathLike) or name.startswith(("/", ".", "~")) or name.count("/") > 1
    if is_path and not path.is_dir():
        raise OSError(f"{name}: there is no such folder")


def _find(name: str, filename: str, hub: Mapping[str, Any]) -> Path | None:
    found = cached_file(name, filename, _raise_exceptions_for_missing_entries=False, **hub)
    return None if found is None else Path(found)


def _with_variant(filename: str, variant: str | None) -> str:
    stem, suffix = filename.rsplit(".", 1)
    return filename if variant is None else f"{stem}.{variant}.{suffix}"


def _no_weights(name: str, variant: str | None, hub: Mapping[str, Any]) -> OSError:
    wanted = [_with_variant(file, variant) for file in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)]
    where = {key: hub[key] for key in ("revision", "proxies", "token", "local_files_only", "cache_dir")}
    for pickled in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        pickled = _with_variant(pickled, variant)
        if has_file(name, str(PurePosixPath(hub["subfolder"]) / pickled), **where):
            return OSError(
                f"{name} has {pickled} but no {wanted[0]}: hf_sparse never unpickles weights, since a pickle can run "
                "any code. If you trust the file, convert it once with transformers and load the folder it saves: "
                f"AutoModelForCausalLM.from_pretrained({name!r}, use_safetensors=False).save_pretrained(folder)"
            )
    try:
        cached_file(name, wanted[0], **hub)  # asked once more, so that transformers says why
    except OSError as error:
        return OSError(f"{name}: found neither {wanted[0]} nor {wanted[1]}: {error}")
    return OSError(f"{name}: {wanted[0]} appeared while it was looked for, try again")


def _read_index(name: str, index: Path, hub: Mapping[str, Any]) -> dict[str, Path]:
    """Tensor names and the shards they lie in, as a model.safetensors.index.json says; fetches the shards."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{index}: not an index of safetensors shards ({type(error).__name__}: {error})") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map must map tensor names to shards, got {weight_map!r:.80}")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or Path(shard).name != shard:
            raise ValueError(
                f"{index}: weight_map[{tensor!r}] is {shard!r}, expected a .safetensors file in the same folder"
            )
    shards = sorted(set(weight_map.values()))
    try:
        paths = cached_files(name, shards, **hub)
    except OSError as error:
        raise OSError(f"{index} names {len(shards)} shards, of which one is missing: {error}") from error
    assert paths is not None  # it raises where one is missing
    path_of = {shard: Path(path) for shard, path in zip(shards, paths, strict=True)}
    return {tensor: path_of[shard] for tensor, shard in weight_map.items()}


class _Span(NamedTuple):
    """Where the bytes of a tensor of a safetensors file lie."""

    file: Path
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


class SafetensorsCheckpoint(Checkpoint):
    """model.safetensors, or the shards that `weights` (tensor name -> file) spreads the model over."""

    def __init__(self, *source: Any, weights: Mapping[str, Path] | None) -> None:
        super().__init__(*source)
        stored = [(name, span) for file in self.files for name, span in _read_safetensors_header(file).items()]
        if weights is None:
            self._spans = dict(stored)
            return
        self._spans = {name: span for name, span in stored if weights.get(name) == span.file}
        for name, file in weights.items():
            if name not in self._spans:
                raise ValueError(f"{file}: the index places tensor {name!r} in this shard, which does not hold it")
        if ignored := sorted({name for name, _ in stored} - set(weights)):
            logger.warning(
                "%s: %d tensors are not in the index and are ignored, such as %r",
                self.directory,
                len(ignored),
                ignored[0],
            )

    def names(self) -> list[str]:
        return list(self._spans)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._spans[name].shape

    def _read(self, name: str) -> tuple[Tensor, Path]:
        span = self._spans[name]
        if span.dtype not in _SAFETENSORS_DTYPES:
            raise ValueError(
                f"{span.file}: tensor {name!r} has dtype {span.dtype}, allowed are {', '.join(_SAFETENSORS_DTYPES)}"
            )
        data = _read_bytes(span.file, span.offset, span.nbytes)
        return data.view(_SAFETENSORS_DTYPES[span.dtype]).reshape(span.shape), span.file


def _allocate(nbytes: int) -> Tensor:
    """uint8 [nbytes] of the operating system's pages, which go back to it when the tensor is freed.

    malloc keeps aligned blocks of up to 32 MB and reuses them badly: tensor after tensor of one size, its heap grows.
    """
    pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]


def _read_bytes(file: Path, offset: int, nbytes: int) -> Tensor:
    """uint8 [nbytes]. Read, not mapped: a mapping would keep the pages of the file resident."""
    data = _allocate(nbytes)
    with file.open("rb") as stream:
        stream.seek(offset)
        count = stream.readinto(data.numpy().data)
    if count != nbytes:
        raise OSError(f"{file}: ended {nbytes - count} bytes early, it was changed while it was read")
    return data


def _read_safetensors_header(file: Path) -> dict[str, _Span]:
    """Where the tensors of a file lie. Raises ValueError naming the file where it is no whole safetensors file."""
    try:
        # safetensors checks the header: names, dtypes, shapes, and offsets that cover the file without a gap
        with safe_open(file, framework="pt") as opened:
            shape_of = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.offset_keys()}
    except SafetensorError as error:
        raise ValueError(f"{file}: truncated, corrupt, or not a safetensors file ({error}); fetch it again") from error
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(header_size))
    spans = {}
    for name, shape in shape_of.items():
        first, last = header[name]["data_offsets"]
        spans[name] = _Span(file, 8 + header_size + first, last - first, shape, header[name]["dtype"])
    return spans


class GgufCheckpoint(Checkpoint):
    """A GGUF file, dequantized to float32, named and permuted as transformers does for `model`.

    Of transformers: the name map and the processor of each architecture. Not of it: its reader, which keeps the whole
    model in float32, and the `gguf` package's, which takes seconds for a vocabulary.
    """

    def __init__(self, *source: Any, model: PreTrainedModel) -> None:
        super().__init__(*source)
        file = self.files[0]
        metadata, tensors = read_gguf_header(file)
        architecture = metadata["general.architecture"]
        known = sorted(set(GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer"})
        if _letters(architecture) not in map(_letters, known):
            raise ValueError(
                f"{file}: architecture {architecture!r}, transformers reads GGUF files of {', '.join(known)}"
            )
        if metadata.get("split.count") not in (None, 0, 1):
            raise ValueError(
                f"{file}: one of {metadata['split.count']} parts; merge them with llama.cpp's gguf-split --merge"
            )
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
        try:
            self._name_of = get_gguf_hf_weights_map(_without_layers(model), self._processor)
        except NotImplementedError as error:
            raise ValueError(f"{file}: no map of names for model type {model.config.model_type!r} ({error})") from error
        self._sources: dict[str, list[tuple[str, GgufTensor]]] = {}
        left_out = []
        of_model = model.state_dict()
        for stored_name, stored in tensors.items():
            # fused experts are mapped without the suffix
            name = self._name_of.get(stored_name) or self._name_of.get(stored_name.removesuffix(".weight"))
            if name in of_model:
                self._sources.setdefault(name, []).append((stored_name, stored))
            else:
                left_out.append(stored_name)
        if left_out:
            logger.warning(
                "%s: the model has no place for %s; left out, as transformers does", file, ", ".join(left_out)
            )
        self._shapes = {name: tuple(of_model[name].shape) for name in self._sources}
        for name, sources in self._sources.items():
            elements = sum(math.prod(stored.shape) for _, stored in sources)
            if elements != math.prod(self._shapes[name]):
                raise ValueError(
                    f"{file}: tensor {name!r} has {elements} elements, the model expects {list(self._shapes[name])}"
                )

    def names(self) -> list[str]:
        return list(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def stored(self, name: str) -> StoredMatrix | None:
        shape, sources = self._shapes[name], self._sources[name]
        stored_name, stored = sources[0]
        if len(sources) > 1 or len(shape) != 2 or stored.shape != shape or stored.kind.name not in KINDS:
            return None
        order = self._row_order(stored_name, shape)
        if order is None:
            return None
        return GgufMatrix(stored.kind, (shape[0], shape[1]), lambda: _read_rows(self.files[0], stored), order)

    def _row_order(self, stored_name: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """Which stored row the processor makes each row of; None where it does more than to order rows."""
        numbered = np.broadcast_to(np.arange(shape[0])[:, None], shape)
        result = self._processor.process(
            weights=numbered,
            name=stored_name,
            tensor_key_mapping=self._name_of,
            parsed_parameters={"tensors": {}},
        )
        ordered = result.weights
        if result.name is None or ordered.shape != shape or not bool((ordered == ordered[:, :1]).all()):
            return None
        order = ordered[:, 0].copy()
        return order if np.array_equal(np.sort(order), numbered[:, 0]) else None

    def _read(self, name: str) -> tuple[Tensor, Path]:
        file = self.files[0]
        fused: dict[str, dict[str, Tensor]] = {"tensors": {}}  # where processors put what they make of several tensors
        for stored_name, stored in self._sources[name]:
            result = self._processor.process(
                weights=_read_dequantized(file, stored_name, stored),
                name=stored_name,
                tensor_key_mapping=self._name_of,
                parsed_parameters=fused,
            )
        if result.name is None:
            tensor = fused["tensors"][name]
        else:
            tensor = torch.from_numpy(np.ascontiguousarray(result.weights))
        if tuple(tensor.shape) != self._shapes[name]:
            raise ValueError(
                f"{file}: tensor {name!r} has shape {list(tensor.shape)}, the model expects {list(self._shapes[name])}"
            )
        return tensor, file


def _without_layers(model: PreTrainedModel) -> SimpleNamespace:
    """What `get_gguf_hf_weights_map` needs to see: the model and its base model, after which some files are named.

    Given the model itself, it goes on to every submodule and builds a table of all layers for each.
    """
    base = SimpleNamespace(config=model.config, state_dict=model.base_model.state_dict, named_children=list)
    children = [(model.base_model_prefix, base)]
    return SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=lambda: children)


def _letters(architecture: str) -> str:
    # "qwen2moe" in a file is "qwen2_moe" to transformers, "gpt-oss" is "gpt_oss"
    return re.sub("[-_]", "", architecture)


def _in_rows(raw: np.ndarray, stored: GgufTensor) -> np.ndarray:
    return raw.reshape(-1, quant_shape_to_byte_shape(stored.shape, stored.kind)[-1])


def _read_rows(file: Path, stored: GgufTensor) -> np.ndarray:
    """uint8 [rows, bytes of a row]."""
    return _in_rows(_read_bytes(file, stored.offset, stored.nbytes).numpy(), stored)


def _read_dequantized(file: Path, name: str, stored: GgufTensor) -> np.ndarray:
    """The values of a tensor, float32 of its stored shape. Decoded in chunks of rows: temporaries stay small."""
    raw = _read_bytes(file, stored.offset, stored.nbytes).numpy()
    if stored.kind == GGMLQuantizationType.F32:
        return raw.view(np.float32).reshape(stored.shape)
    raw = _in_rows(raw, stored)
    values = _allocate(4 * math.prod(stored.shape)).numpy().view(np.float32).reshape(len(raw), -1)
    step = max(1, (1 << 20) // stored.shape[-1])
    try:
        for start in range(0, len(raw), step):
            values[start : start + step] = dequantize(raw[start : start + step], stored.kind)
    except NotImplementedError as error:
        raise ValueError(f"{file}: tensor {name!r} is stored as {stored.kind.name}: {error}") from error
    return values.reshape(stored.shape)
