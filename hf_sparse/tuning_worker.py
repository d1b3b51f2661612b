"""The process in which AutoRound or GPTQModel tunes a model: `python -m hf_sparse.tuning_worker FOLDER`.

A process of its own, because both change transformers and safetensors when they are imported, and exit() on errors.
FOLDER has the model (transformers' own format), job.json and rows.safetensors; a checkpoint in GPTQ's format, version
1, comes to lie in its folder "out".
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MODEL, OUT, _JOB, _ROWS = "model", "out", "job.json", "rows.safetensors"
BATCH_ROWS = 8


@dataclass(frozen=True)
class Job:
    """`leave`: names of the linear layers that stay as they are; `steps`: of AutoRound, per decoder layer."""

    algorithm: str
    group_size: int
    symmetric: bool
    leave: tuple[str, ...]
    steps: int
    seed: int

    def save(self, folder: Path, rows: Tensor) -> None:
        """`rows`: token ids int64 [rows, tokens]."""
        (folder / _JOB).write_text(json.dumps(asdict(self)))
        save_file({"rows": rows.contiguous()}, folder / _ROWS)


def _auto_round(folder: Path, job: Job, rows: Tensor, device: str) -> None:
    """Signed gradient descent on how weights are rounded, layer by layer (Cheng et al. 2023, "Optimize Weight Rounding
    via Signed Gradient Descent for the Quantization of LLMs").
    """
    from auto_round import AutoRound, SignRoundConfig
    from transformers import AutoTokenizer

    rounding: Any = AutoRound(
        str(folder / MODEL),
        AutoTokenizer.from_pretrained(folder / MODEL),
        alg_configs=SignRoundConfig(iters=job.steps, lr=5e-3),  # of its light recipe
        scheme={"bits": 4, "group_size": job.group_size, "sym": job.symmetric, "data_type": "int"},
        scale_dtype="bf16",  # what they are stored in here
        layer_config={name: {"bits": 16} for name in job.leave},
        dataset=[row[None] for row in rows],
        nsamples=len(rows),
        seqlen=rows.shape[1],
        batch_size=min(BATCH_ROWS, len(rows)),
        seed=job.seed,
        device_map=device,
        enable_torch_compile=False,
    )
    rounding.quantize_and_save(str(folder / OUT), format="auto_gptq")


def _gptq(folder: Path, job: Job, rows: Tensor, device: str) -> None:
    """Column by column, with what rounding one costs made up for in the next (Frantar et al. 2022, "GPTQ")."""
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(
        bits=4,
        group_size=job.group_size,
        sym=job.symmetric,
        desc_act=False,  # columns keep their order
        dynamic={f"-:^{re.escape(name)}$": {} for name in job.leave},
        device=device,
    )
    model = GPTQModel.load(str(folder / MODEL), config)
    ones = [1] * rows.shape[1]
    model.quantize(
        [{"input_ids": row, "attention_mask": ones} for row in rows.tolist()], batch_size=min(BATCH_ROWS, len(rows))
    )
    model.save(str(folder / OUT))


def main(folder: Path) -> None:
    job = Job(**json.loads((folder / _JOB).read_text()))
    rows = load_file(folder / _ROWS)["rows"]
    torch.manual_seed(job.seed)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    {"AutoRound": _auto_round, "GPTQ": _gptq}[job.algorithm](folder, job, rows, device)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
