"""Rounding that is tuned on text, by AutoRound or GPTQ: once per model and settings, with the codes kept in a file.

What reads the hidden states is tuned. What writes to them is stored transposed here, with groups along the hidden
states, which neither library knows: it stays as it is for hf_sparse/algorithms.py. All else of the model comes from the
checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_sparse.modeling import HybridBlock, Projection

from .algorithms import require
from .calibration import calibration_rows
from .checkpoint import Checkpoint, SafetensorsCheckpoint
from .config import SparseConfig, WeightOnlyQuantConfig
from .log import logger, warn_once
from .plan import canonical_json
from .plan_store import plan_lock
from .prequantized import method_of
from .stored_matrix import StoredMatrix
from .tuning_worker import MODEL, OUT, Job
from .weights import load_weights, projections_in

STEPS = 50  # of AutoRound, as its own light recipe has it; its default of 200 takes four times as long
LOG_LINES = 15
_LEAVES = ("qweight", "qzeros", "scales", "g_idx")
_WORKERS = "GPTQMODEL_CPU_WORKERS"


class TunedCheckpoint(Checkpoint):
    """`inner`, with tuned codes of some of its weights, which lie in `codes` under their names there."""

    def __init__(self, inner: Checkpoint, codes: Path, group_size: int, folder: Any = None) -> None:
        """`folder`: a temporary one with `codes` in it, which stays as long as this does."""
        super().__init__(inner.files, inner.config_file, inner.repo_id, inner.revision_hash)
        self.directory = inner.directory
        self._inner, self._folder = inner, folder
        self._codes = SafetensorsCheckpoint([codes], None, weights=None)
        self._names = set(self._codes.names())
        self._method = method_of({"quant_method": "gptq", "bits": 4, "group_size": group_size})

    def names(self) -> list[str]:
        return self._inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(name)

    def stored(self, name: str) -> StoredMatrix | None:
        tuned = f"{name.removesuffix('weight')}qweight" in self._names
        return self._method.open(self._codes, name) if tuned else None

    def _read(self, name: str) -> tuple[Tensor, Path]:
        return self._inner._read(name)

    def fingerprint(self) -> str:
        return self._inner.fingerprint()


def tuned(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    quantization: WeightOnlyQuantConfig,
    options: SparseConfig,
    tokenizer: Callable[[], Any],
    make: Callable[[], PreTrainedModel],
) -> Checkpoint:
    """`checkpoint` with codes that `quantization.algorithm` tuned on the calibration texts, now or earlier; as it is
    where nothing is to be quantized. `model` has hybrid blocks and no weights yet; `make` makes it without such blocks,
    on the meta device.

    Raises ImportError where the library is missing, ValueError without a tokenizer or a layer that can be tuned, and
    RuntimeError, with the last that it said, where the library fails.
    """
    found = list(projections_in(model, checkpoint))
    if not found:
        return checkpoint
    wanted = {
        slot.removesuffix(".weight"): name.removesuffix("weight")
        for block, projection, name, slot in found
        if _can_be_tuned(block, projection, quantization)
    }
    if not wanted:
        raise ValueError(
            f"algorithm: got {quantization.algorithm!r}, but no layer that reads the hidden states has a width that "
            f"groups of {quantization.group_size} divide and is to be {quantization.weight_dtype}"
        )
    file = _codes_file(checkpoint, quantization, options)
    with plan_lock(file, "tuned weights"):
        if not file.is_file():
            require(quantization.algorithm)
            tensors = _run(make, checkpoint, tokenizer(), wanted, quantization, options)
            try:
                _write(tensors, file)
            except OSError as error:
                warn_once(f"{file}: tuned weights could not be kept ({error}); the next load tunes them again")
                folder = tempfile.TemporaryDirectory(prefix="hf_sparse-")
                save_file(tensors, codes := Path(folder.name, file.name))
                return TunedCheckpoint(checkpoint, codes, quantization.group_size, folder)
    return TunedCheckpoint(checkpoint, file, quantization.group_size)


def _can_be_tuned(block: HybridBlock, projection: Projection, quantization: WeightOnlyQuantConfig) -> bool:
    form = block.form_of(projection.name)
    usual = (form.weight_dtype, form.group_size) == (quantization.weight_dtype, quantization.group_size)
    return usual and not projection.writes and projection.columns % quantization.group_size == 0


def _codes_file(checkpoint: Checkpoint, quantization: WeightOnlyQuantConfig, options: SparseConfig) -> Path:
    fields, texts = quantization.to_dict(), options.calibration_settings()
    settings = [fields.get(name) for name in ("algorithm", "weight_dtype", "group_size", "formats")]
    settings += [STEPS, *(texts[name] for name in ("texts", "tokens", "seed"))]
    digest = hashlib.sha256(canonical_json([checkpoint.fingerprint(), settings]).encode()).hexdigest()
    cache = Path(huggingface_hub.constants.HF_ASSETS_CACHE).expanduser() / "hf_sparse" / "tuned"
    return cache / f"{quantization.algorithm}-{digest[:32]}.safetensors"


def _write(tensors: dict[str, Tensor], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=file.parent) as aside:
        save_file(tensors, Path(aside, file.name))
        Path(aside, file.name).replace(file)


def _run(
    make: Callable[[], PreTrainedModel],
    checkpoint: Checkpoint,
    tokenizer: Any,
    wanted: Mapping[str, str],
    quantization: WeightOnlyQuantConfig,
    options: SparseConfig,
) -> dict[str, Tensor]:
    """What another process makes of the model: codes by name in the checkpoint. `wanted`: of every layer to tune, what
    its tensors' names begin with there.
    """
    if tokenizer is None:
        raise ValueError(f"algorithm: {quantization.algorithm!r} needs a tokenizer, but there is none beside the model")
    plain: Any = make().eval()
    load_weights(plain, checkpoint)
    rows, _ = calibration_rows(plain, tokenizer, options, None)
    linear = (name for name, module in plain.named_modules() if isinstance(module, nn.Linear))
    leave = tuple(name for name in linear if name not in wanted)
    job = Job(
        quantization.algorithm,
        quantization.group_size,
        quantization.weight_dtype == "int4",
        leave,
        STEPS,
        options.calibration_seed,
    )
    with tempfile.TemporaryDirectory(prefix="hf_sparse-") as directory:
        folder = Path(directory)
        plain.save_pretrained(folder / MODEL)
        tokenizer.save_pretrained(folder / MODEL)
        del plain
        job.save(folder, rows)
        log = folder / "log.txt"
        logger.info(
            "%s tunes %d layers on %d tokens, which takes minutes to hours; what it says goes to %s",
            job.algorithm,
            len(wanted),
            rows.numel(),
            log,
        )
        with log.open("wb") as said:
            done = subprocess.run(
                [sys.executable, "-m", "hf_sparse.tuning_worker", str(folder)],
                cwd=folder,
                env={_WORKERS: str(max(2, (os.cpu_count() or 1) // 2)), **os.environ, "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                check=False,
            )
        tensors = _collected(folder / OUT, wanted) if done.returncode == 0 else {}
        if not tensors:
            last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
            raise RuntimeError(f"algorithm: {job.algorithm} failed ({done.returncode}):\n" + "\n".join(last))
    if left := [layer for layer, stem in wanted.items() if f"{stem}qweight" not in tensors]:
        logger.warning("%s left out %d of %d layers, such as %s", job.algorithm, len(left), len(wanted), left[0])
    return tensors


def _collected(out: Path, wanted: Mapping[str, str]) -> dict[str, Tensor]:
    tensors = {}
    for file in sorted(out.rglob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                layer, _, leaf = name.rpartition(".")
                if leaf in _LEAVES and layer in wanted:
                    tensors[f"{wanted[layer]}{leaf}"] = opened.get_tensor(name)
    return tensors
