"""From a config to a model whose weights are in place: the skeleton on the meta device, then one tensor at a time."""

from __future__ import annotations

import ctypes
import functools
import math
import platform
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings
from transformers.utils import logging as transformers_logging

from hf_sparse.modeling import HybridBlock, PackedHead, Projection, WeightFormat, hybrid_blocks
from hf_sparse.quantization import NeuronMatrix

from .algorithms import packed_by
from .checkpoint import Checkpoint
from .log import logger
from .stored_matrix import Repacking

PACKED_LEAVES = ("codes", "scales", "offsets")
HEAD_ERRORS = {"int8": 0.01}  # relative to the weights; a head that packing would change more stays as it is
HEAD_ERROR = 0.15  # of 4-bit formats
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def skeleton(
    config: Any, dtype: Any, attn_implementation: str | None, trust_remote_code: bool | None
) -> PreTrainedModel:
    """The family's model with parameters on the meta device, and buffers that no checkpoint holds (rotary frequencies)
    computed.
    """
    if dtype in (None, "auto"):
        dtype = config.dtype or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected 'auto', {', '.join(map(str, DTYPES))}, got {dtype!r}")
    attention = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code, **attention)
    for module in model.modules():
        computed = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in computed:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        if computed:
            model._init_weights(module)
    return model


def take_dtype_of(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """Where neither user nor config say so, parameters have the dtype of the checkpoint's (of its smallest tensor)."""
    name = min(checkpoint.names(), key=lambda name: math.prod(checkpoint.shape(name)))
    dtype = checkpoint.tensor(name).dtype
    if dtype in DTYPES and dtype != model.dtype:
        for module in model.modules():
            for local, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[local] = nn.Parameter(parameter.to(dtype), requires_grad=False)
        model.config.dtype = dtype


def load_weights(
    model: PreTrainedModel, checkpoint: Checkpoint, head: WeightFormat | None = None, algorithm: str = "RTN"
) -> dict[str, Any]:
    """Streams every tensor of the checkpoint to its block or parameter. Returns transformers' loading info. `head`: how
    the language modeling head is stored; None: as it comes. `algorithm`: of WeightOnlyQuantConfig.
    """
    _check_exceptions(model)
    legacy_names = [t for t in get_model_conversion_mapping(model) if isinstance(t, WeightRenaming)]
    packer = _HeadPacker(model, {apply_renamings(name, legacy_names) for name in checkpoint.names()}, head)
    slots = _slots(model)
    renamed, unexpected = _matched(model, checkpoint, slots)
    missing = _missing(model, slots, set(renamed.values()))
    if missing:
        raise ValueError(
            f"{checkpoint.directory}: the checkpoint lacks {len(missing)} tensors of the model: {_some(missing)}"
        )

    bar = transformers_logging.tqdm(renamed.items(), desc="Packing weights")
    repacking = Repacking()
    with torch.no_grad():
        for name, slot in bar:
            owner, local = slots[slot]
            if isinstance(owner, HybridBlock) and (
                matrix := _repacked(checkpoint, name, owner, local, repacking, algorithm)
            ):
                owner.load(local, matrix)
                _return_freed_memory()
                continue
            tensor = checkpoint.tensor(name)
            packed = local.rpartition(".")[2] in PACKED_LEAVES
            if not (packed or tensor.is_floating_point()):
                raise ValueError(f"{name}: expected floating numbers, got {tensor.dtype}, and no quantization_config")
            try:
                if isinstance(owner, HybridBlock):
                    owner.load(local, tensor if packed else _packed(tensor.to(model.dtype), owner, local, algorithm))
                elif isinstance(owner, PackedHead) and packed:
                    owner.load(local, tensor)
                else:
                    _set_parameter(owner, local, slot, tensor)
                    packer.see(slot)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            del tensor
            _return_freed_memory()
    repacking.say(checkpoint.directory)
    absent = set(slots) - set(renamed.values())
    model.tie_weights(
        missing_keys={name for name in absent if not isinstance(slots[name][0], HybridBlock)}, recompute_mapping=False
    )
    packer.pack_tied()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    unexpected = [name for name in unexpected if not any(re.search(pattern, name) for pattern in ignored)]
    if unexpected:
        logger.warning(
            "%s: %d tensors of the checkpoint have no place in the model: %s",
            checkpoint.directory,
            len(unexpected),
            _some(unexpected),
        )
    return {"missing_keys": set(), "unexpected_keys": set(unexpected), "mismatched_keys": set(), "error_msgs": []}


def _check_exceptions(model: PreTrainedModel) -> None:
    """Raises ValueError where a block's format names a projection that the model does not have."""
    blocks = list(hybrid_blocks(model))
    there = {(block.id.layer, f"{block.prefix}{name}") for block in blocks for name in block.projections}
    names = {name for _, name in there} | {f"{layer}.{name}" for layer, name in there}
    if alien := sorted({name for block in blocks for name in block.weights.exceptions} - names):
        usual = sorted({name for _, name in there})
        raise ValueError(f"formats: the model has no projection {alien[0]!r}, it has {', '.join(usual)}")


def _matched(
    model: PreTrainedModel, checkpoint: Checkpoint, slots: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """Which tensor of the checkpoint goes to which slot, and those that go nowhere."""
    legacy_names = [t for t in get_model_conversion_mapping(model) if isinstance(t, WeightRenaming)]
    prefix = f"{model.base_model_prefix}."
    renamed = {}
    unexpected = []
    for name in checkpoint.names():
        current = apply_renamings(name, legacy_names)
        candidates = (current, prefix + current, current.removeprefix(prefix))
        slot = next((candidate for candidate in candidates if candidate in slots), None)
        if slot is None:
            unexpected.append(name)
        else:
            renamed[name] = slot
    return renamed, unexpected


def projections_in(
    model: PreTrainedModel, checkpoint: Checkpoint
) -> Iterator[tuple[HybridBlock, Projection, str, str]]:
    """Of every projection of the hybrid blocks that comes as a weight: its block, and the tensor's names in the
    checkpoint and in the model.
    """
    slots = _slots(model)
    for name, slot in _matched(model, checkpoint, slots)[0].items():
        owner, local = slots[slot]
        projection, _, leaf = local.rpartition(".")
        if isinstance(owner, HybridBlock) and leaf == "weight":
            yield owner, owner.projections[projection], name, slot


def _packed(tensor: torch.Tensor, block: HybridBlock, local: str, algorithm: str) -> torch.Tensor | NeuronMatrix:
    """The tensor, packed where `algorithm` does that otherwise than the block."""
    projection, _, leaf = local.rpartition(".")
    pack = packed_by(algorithm, block.form_of(projection)) if leaf == "weight" else None
    if pack is None:
        return tensor
    return pack(tensor.T if block.projections[projection].writes else tensor)


def _repacked(
    checkpoint: Checkpoint, name: str, block: HybridBlock, local: str, repacking: Repacking, algorithm: str
) -> NeuronMatrix | None:
    """The weight as the block stores it, where another library quantized it and it is not to become plain numbers."""
    projection, _, leaf = local.rpartition(".")
    if leaf != "weight" or block.form_of(projection).weight_dtype is None:
        return None
    try:
        stored = checkpoint.stored(name)
        if stored is None:
            return None
        form, writes = block.form_of(projection), block.projections[projection].writes
        if packed_by(algorithm, form) and (writes or stored.form != (form.weight_dtype, form.group_size)):
            return None  # its codes cannot stay: the algorithm quantizes the numbers
        return repacking.repack(name, stored, form, writes)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


class _HeadPacker:
    """Packs the language modeling head as soon as its weight has come, so that both never lie in memory for long."""

    def __init__(self, model: PreTrainedModel, names: Collection[str], form: WeightFormat | None) -> None:
        """`names`: of the checkpoint's tensors, as the model calls them."""
        self._model, self._form = model, form
        linear = model.get_output_embeddings()
        self._path = next((path for path, module in model.named_modules() if module is linear), None)
        if form is None or type(linear) is not nn.Linear or self._path is None:
            self._form = None
        elif f"{self._path}.codes" in names:
            model.set_submodule(self._path, PackedHead(linear, form, tied=False))
            self._form = None

    def see(self, slot: str) -> None:
        if self._form is not None and slot == f"{self._path}.weight" and slot not in self._model.all_tied_weights_keys:
            self._pack(tied=False)

    def pack_tied(self) -> None:
        if self._form is not None:
            self._pack(tied=True)

    def _pack(self, tied: bool) -> None:
        assert self._form is not None and self._path is not None
        linear: Any = self._model.get_output_embeddings()
        head = PackedHead(linear, self._form, tied)
        error, bound = head.pack(linear.weight), HEAD_ERRORS.get(str(self._form.weight_dtype), HEAD_ERROR)
        if error <= bound:
            self._model.set_submodule(self._path, head)
        else:
            logger.warning(
                "%s in %s would be %.1f%% off (at most %.0f%% are allowed): it stays unpacked.",
                self._path,
                self._form.weight_dtype,
                100 * error,
                100 * bound,
            )
        self._form = None


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL("libc.so.6") if platform.libc_ver()[0] == "glibc" else None


def _return_freed_memory() -> None:
    """glibc keeps what was freed for later use, which would count as much as a third of the model towards the peak."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _slots(model: PreTrainedModel) -> dict[str, tuple[nn.Module, str]]:
    """Full tensor name -> (block or module that takes it, its name there)."""
    slots: dict[str, tuple[nn.Module, str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, HybridBlock):
            layer = path.removesuffix(module.path)
            for quantized in (True, False):
                slots.update(
                    {f"{layer}{module.prefix}{name}": (module, name) for name in module.expected_tensors(quantized)}
                )
        if isinstance(module, PackedHead):
            slots.update({f"{path}.{leaf}": (module, leaf) for leaf in module.form.packed_leaves})
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slots[f"{path}.{name}" if path else name] = (module, name)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                slots[f"{path}.{name}" if path else name] = (module, name)
    return slots


def _missing(model: PreTrainedModel, slots: Mapping[str, tuple[nn.Module, str]], found: set[str]) -> list[str]:
    tied = {**model.all_tied_weights_keys, **{v: k for k, v in model.all_tied_weights_keys.items()}}
    missing = []
    for name, (owner, local) in slots.items():
        base, _, leaf = name.rpartition(".")
        if isinstance(owner, HybridBlock) and leaf in (*PACKED_LEAVES, "weight"):
            # a projection comes as a weight, or as codes and scales: of what it comes as, everything must be there
            packed = any(f"{base}.{part}" in found for part in PACKED_LEAVES)
            needed = (leaf != "weight") == packed
        else:
            needed = local not in owner._buffers
        if needed and name not in found and tied.get(name) not in found:
            missing.append(name)
    return missing


def _set_parameter(owner: nn.Module, local: str, name: str, tensor: torch.Tensor) -> None:
    place: dict[str, Any] = owner._parameters if local in owner._parameters else owner._buffers
    old = place[local]
    if old.shape != tensor.shape:
        raise ValueError(f"{name}: expected shape {list(old.shape)}, got {list(tensor.shape)}")
    tensor = tensor.to(old.dtype)
    place[local] = nn.Parameter(tensor, requires_grad=False) if place is owner._parameters else tensor


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
