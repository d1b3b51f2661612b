"""LoRA adapters (Hu et al. 2021), as PEFT saves them, merged into weights before those are quantized.

Projections of hybrid blocks are no nn.Linear modules that PEFT could wrap, and an adapter beside packed weights would
keep every input of theirs in use. A merged one costs nothing: W + s B A, one tensor at a time, in float32.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_sparse.modeling import HybridBlock

from .checkpoint import Checkpoint
from .stored_matrix import Decoded, StoredMatrix

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor's name in an adapter
# Fields of a config that merging goes by, and those that say nothing about it. Any other that is set is refused.
USED = {"peft_type", "task_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"}
SILENT = {
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode", "lora_dropout"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "bias"),
    *("megatron_core", "qalora_group_size", "eva_config", "loftq_config"),
}
INITS = (True, False, "gaussian", "orthogonal", "eva")  # others change the base weights too
WORDS = {"weight", "bias"}


@dataclass
class _Change:
    """Of one tensor: names of what replaces it and of the factors that are added, [rank, in] and [out, rank]."""

    replacement: str | None = None
    down: str | None = None
    up: str | None = None
    embedding: bool = False  # whose factors are turned


def is_adapter(directory: str | os.PathLike[str]) -> bool:
    """Whether this is a folder that PEFT's `save_pretrained` wrote, not one of a model."""
    return (Path(directory) / CONFIG).is_file() and not (Path(directory) / "config.json").is_file()


class AdapterMerger:
    """A LoRA adapter in a local folder: plain or rank-stabilized (Kalajdzievski 2023), with ranks and alphas by module,
    modules saved whole and trained biases.

    `base_model` and `base_revision`: what it was trained on, as its config says. `targets`: names of the tensors that
    it changes, as transformers names them. `digest`: sha256, in hex, of weights and of what the config says of them.
    """

    def __init__(
        self, adapter_dir: str | os.PathLike[str], repo_id: str | None = None, revision_hash: str | None = None
    ) -> None:
        """Reads the config and the names of the tensors. `repo_id`, `revision_hash`: where on the Hub it came from.

        Raises FileNotFoundError where a file is missing, ValueError for what is no LoRA adapter that can be merged,
        DoRA among others: its norms would have to be taken of weights that are not quantized yet.
        """
        self.directory, self.repo_id, self.revision_hash = Path(adapter_dir), repo_id, revision_hash
        for name in (CONFIG, WEIGHTS):
            if not (self.directory / name).is_file():
                raise FileNotFoundError(f"adapter: {self.directory} has no {name}; pickled adapters are never read")
        self._config = self._read_config()
        self.base_model: str | None = self._config.get("base_model_name_or_path")
        self.base_revision: str | None = self._config.get("revision")
        self._file = safe_open(self.directory / WEIGHTS, "pt")
        self._changes = self._read_names()

    @property
    def targets(self) -> frozenset[str]:
        return frozenset(self._changes)

    @property
    def digest(self) -> str:
        said = {name: value for name, value in self._config.items() if name in USED}
        found = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
        with (self.directory / WEIGHTS).open("rb") as file:
            while piece := file.read(2**20):
                found.update(piece)
        return found.hexdigest()

    def check(self, names: Collection[str], tied: Collection[str] = ()) -> None:
        """Before loading: `names`, of all tensors of the checkpoint, as transformers names them; `tied`: of those that
        stand for two. Raises ValueError where the adapter changes others, so that none of it is left out.
        """
        if absent := sorted(self.targets - set(names)):
            raise self._error(
                f"it changes {_some(absent)}, which the checkpoint does not have; expected an adapter of this model, "
                "and weights that are not packed yet"
            )
        if both := sorted(self.targets & set(tied)):
            raise self._error(
                f"it changes {_some(both)}, which is embeddings and head at once: merging would change both; untie "
                "them (tie_word_embeddings=False) and save the model first"
            )

    def merge(self, name: str, tensor: Tensor) -> Tensor:
        """What the tensor `name` becomes, in its dtype; `tensor` itself where the adapter does not change it.

        Raises ValueError for shapes that do not fit.
        """
        change = self._changes.get(name)
        if change is None:
            return tensor
        merged = tensor
        if change.replacement is not None:
            merged = self._file.get_tensor(change.replacement)
            if merged.shape != tensor.shape:
                raise self._error(f"{name}: expected shape {list(tensor.shape)}, got {list(merged.shape)}")
        if change.down is not None:
            down, up = (self._file.get_tensor(str(part)).float() for part in (change.down, change.up))
            factors = (down.T, up.T) if change.embedding else (up, down)
            shape = [factors[0].shape[0], factors[1].shape[1]]
            if factors[0].shape[1] != factors[1].shape[0] or shape != list(tensor.shape):
                raise self._error(
                    f"{name}: expected factors of shape {list(tensor.shape)}, got {list(up.shape)} and "
                    f"{list(down.shape)}"
                )
            rank = factors[1].shape[0]
            merged = torch.addmm(merged.float(), *factors, alpha=self._scale(name, rank))
        return merged.to(tensor.dtype)

    def _scale(self, name: str, rank: int) -> float:
        alpha = _by_pattern(self._config.get("alpha_pattern"), name.rpartition(".")[0], self._config["lora_alpha"])
        return float(alpha) / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _read_config(self) -> dict[str, Any]:
        try:
            config = json.loads((self.directory / CONFIG).read_text(encoding="utf-8"))
            kind = config.get("peft_type")
        except (ValueError, AttributeError) as error:
            raise self._error(f"{CONFIG} is no JSON object: {error}") from error
        if kind != "LORA":
            raise self._error(f"peft_type: expected LORA, got {kind!r}")
        if config.get("task_type") not in (None, "CAUSAL_LM"):
            raise self._error(f"task_type: expected CAUSAL_LM, got {config['task_type']!r}")
        if not isinstance(config.get("lora_alpha"), int | float):
            raise self._error(f"lora_alpha: expected a number, got {config.get('lora_alpha')!r}")
        if (init := config.get("init_lora_weights", True)) not in INITS:
            raise self._error(
                f"init_lora_weights: got {init!r}, which changes the base weights; convert it to plain LoRA "
                "(path_initial_model_for_weight_conversion of PEFT's save_pretrained)"
            )
        alien = sorted(name for name, value in config.items() if value and name not in USED | SILENT)
        if alien:
            raise self._error(
                f"{', '.join(alien)}: not merged here; merge the adapter with PEFT (merge_and_unload) into the "
                "unquantized model, save that, and load it"
            )
        return dict(config)

    def _read_names(self) -> dict[str, _Change]:
        changes: dict[str, _Change] = {}
        for stored in self._file.keys():  # noqa: SIM118  # it is no mapping
            name = stored.removeprefix(PREFIX)
            module, _, leaf = name.rpartition(".")
            embedding = leaf.startswith("lora_embedding_")
            factor = leaf.removeprefix("lora_embedding_") if embedding else module.rpartition(".lora_")[2]
            if name == stored:
                raise self._error(f"{stored}: expected a name that begins with {PREFIX}")
            if embedding or (leaf == "weight" and factor in ("A", "B") and ".lora_" in module):
                owner = module if embedding else module.rpartition(".lora_")[0]
                change = changes.setdefault(f"{owner}.weight", _Change())
                change.embedding = embedding
                if factor == "A":
                    change.down = stored
                else:
                    change.up = stored
            elif leaf in WORDS and ".lora_" not in module:
                owner = module.removesuffix(".base_layer")
                changes.setdefault(f"{owner}.{leaf}", _Change()).replacement = stored
            else:
                raise self._error(f"{stored}: not merged here; expected lora_A and lora_B, or weights and biases")
        for name, change in changes.items():
            if (change.down is None) != (change.up is None):
                raise self._error(f"{name}: expected both lora_A and lora_B, got one of them")
        if not changes:
            raise self._error(f"{WEIGHTS} holds no tensors")
        return changes

    def _error(self, message: str) -> ValueError:
        return ValueError(f"adapter {self.directory}: {message}")


class _Changed(StoredMatrix):
    """Quantized weights with a change on top, which lie between the codes: none of those can stay."""

    def __init__(self, stored: StoredMatrix, change: Callable[[Tensor], Tensor]) -> None:
        self.rows, self.cols, self.bits = stored.rows, stored.cols, stored.bits
        self._stored, self._change = stored, change

    def read(self) -> Callable[[int, int], Decoded]:
        weight = self._change(self._stored.dequantize())
        return lambda start, stop: Decoded(weight[start:stop])


class MergedCheckpoint(Checkpoint):
    """A checkpoint with an adapter merged into its tensors as they are read. Its fingerprint is of both."""

    def __init__(self, base: Checkpoint, adapter: AdapterMerger, model: PreTrainedModel) -> None:
        """`model`: of the checkpoint, with or without weights. Raises ValueError as `AdapterMerger.check`."""
        super().__init__(base.files, base.config_file, adapter.repo_id, adapter.revision_hash)
        self.directory = adapter.directory  # where its plan belongs
        self.base, self.adapter = base, adapter
        self._prefix = f"{model.base_model_prefix}."
        tied = model.all_tied_weights_keys
        adapter.check({self._target(name) for name in base.names()}, {*tied, *tied.values()})

    def _target(self, name: str) -> str:
        """Of a tensor: its name in the adapter, where it may or may not have the prefix of a bare model's."""
        candidates = name, self._prefix + name, name.removeprefix(self._prefix)
        return next((candidate for candidate in candidates if candidate in self.adapter.targets), name)

    def names(self) -> list[str]:
        return self.base.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.base.shape(name)

    def stored(self, name: str) -> StoredMatrix | None:
        stored, target = self.base.stored(name), self._target(name)
        if stored is None or target not in self.adapter.targets:
            return stored
        return _Changed(stored, functools.partial(self.adapter.merge, target))

    def _read(self, name: str) -> tuple[Tensor, Path]:
        tensor, file = self.base._read(name)
        return self.adapter.merge(self._target(name), tensor), file

    def fingerprint(self) -> str:
        both = f"{self.base.fingerprint()} {self.adapter.digest}"
        return hashlib.sha256(both.encode()).hexdigest()


class Projection(nn.Module):
    """Stands in a hybrid block for one of its projections, so that PEFT finds it and shows, in its error, what to do:
    where some targets were found and others not, PEFT would leave those out without a word.
    """

    def __repr__(self) -> str:
        return "projection of a hybrid block; load adapters by SparseAutoModelForCausalLM.from_pretrained(ADAPTER)"


def show_projections(model: nn.Module) -> None:
    """Gives every hybrid block of `model` its `Projection`s."""
    for block in [module for module in model.modules() if isinstance(module, HybridBlock)]:
        for name in block.projections:
            block.add_module(name, Projection())


def _by_pattern(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    """As PEFT reads its patterns: regular expressions for the end of a module's name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
