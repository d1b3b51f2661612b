"""load_predictors: predictors that were trained elsewhere, in the form in which PowerInfer publishes its own."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_sparse.modeling import BlockId, HybridMLP, SkipRule, family_of, has_exact_zeros, hybrid_blocks
from hf_sparse.quantization import WEIGHT_DTYPES

from .log import logger, warn_once
from .model import SparseMixin
from .plan import FLOATS, LARGEST_WEIGHT, PlannedPredictor

_FILE = re.compile(r"model_(\d+)\.(safetensors|pt)")


def load_predictors(
    path: str | os.PathLike[str],
    model: SparseMixin,
    *,
    reads: Literal["residual", "block"] = "residual",
    weight_dtype: str = "int8",
) -> None:
    """Puts the predictors in folder `path` on the MLPs of `model`, whose rule becomes "predicted"; `model.plan` holds
    them from then on. Nothing is calibrated: what they miss is not known, see `evaluate`.

    For each layer a file `model_{layer}.safetensors`, or `model_{layer}.pt` with a state dict, of which nothing but
    tensors is unpickled: `fc1.weight` [r, d_model] and `fc2.weight` [neurons, r], floating. A neuron is active where
    fc2 @ relu(fc1 @ input) is above `sparse_threshold` of a `config.json` beside them, 0 without one (PowerInfer,
    SOSP'24, section 5.1; its converter reads these names).

    Args:
        reads: what their input is. "block": what the MLP itself reads. "residual": the hidden states before the norm in
            front of the MLP, which PowerInfer feeds them; the norm's weight is then divided out of fc1, which is exact
            for an RMS norm and a threshold of 0, and refused for another norm.
        weight_dtype: what they are stored in, such as "int8" or "nf4".

    Raises ValueError, naming file, tensor and shape, for what does not fit, and OSError for what cannot be read; the
    model is then as before.
    """
    if reads not in ("residual", "block"):
        raise ValueError(f"reads: got {reads!r}, allowed are 'residual', 'block'")
    if weight_dtype not in list(WEIGHT_DTYPES):
        raise ValueError(f"weight_dtype: got {weight_dtype!r}, allowed are {', '.join(WEIGHT_DTYPES)}")
    folder = Path(path)
    mlps = {block.id: block for block in hybrid_blocks(model) if isinstance(block, HybridMLP)}
    files = _files(folder, [id.layer for id in mlps])
    threshold = _threshold(folder)
    if threshold and reads == "residual":
        warn_once(
            f"{folder}: sparse_threshold {threshold} is taken for 0: it applies to states before the norm, whose "
            "size a predictor behind it does not see"
        )
        threshold = 0.0
    planned: dict[BlockId, PlannedPredictor] = {}
    for id, block in mlps.items():
        if not has_exact_zeros(block):
            raise ValueError(
                f"model: predictors serve activations that are exactly zero, as ReLU; layer {id.layer}'s is not"
            )
        tensors = _read(files[id.layer], block, model.config.hidden_size)
        if reads == "residual":
            tensors["fc1"] = _behind_norm(tensors["fc1"], model, id.layer, files[id.layer])
        tensors["bias"] = torch.full((block.neurons,), -threshold)
        made = PlannedPredictor(tensors, weight_dtype, 0)
        planned[id] = dataclasses.replace(made, nbytes=made.build(torch.device("cpu")).nbytes)
    rules = model.plan.rules | dict.fromkeys(planned, SkipRule("predicted"))
    plan = dataclasses.replace(model.plan, rules=rules, predictors=model.plan.predictors | planned)
    model.use_plan(plan)
    logger.info("Using the predictors in %s", folder)


def _files(folder: Path, layers: list[int]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for file in sorted(folder.iterdir()):  # .pt before .safetensors, which takes its place
        if match := _FILE.fullmatch(file.name):
            layer = int(match[1])
            if layer in found and found[layer].stem != file.stem:
                raise ValueError(
                    f"{folder}: got {found[layer].name} and {file.name}, expected one file for layer {layer}"
                )
            found[layer] = file
    if missing := sorted(set(layers) - set(found)):
        raise ValueError(
            f"{folder}: got no model_{missing[0]}.safetensors or .pt, expected one for each of {len(layers)} layers"
        )
    if more := sorted(set(found) - set(layers)):
        raise ValueError(f"{found[more[0]]}: the model has no layer {more[0]}, expected {len(layers)} layers")
    return found


def _threshold(folder: Path) -> float:
    file = folder / "config.json"
    if not file.exists():
        return 0.0
    try:
        value = json.loads(file.read_text(encoding="utf-8")).get("sparse_threshold")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: expected a JSON object: {error}") from error
    if value is None:
        return 0.0
    if type(value) not in (int, float) or not abs(value) <= LARGEST_WEIGHT:
        raise ValueError(f"{file}: sparse_threshold: got {value!r:.100}, expected a number within +-{LARGEST_WEIGHT:g}")
    return float(value)


def _read(file: Path, block: HybridMLP, hidden_size: int) -> dict[str, Tensor]:
    try:
        held = (
            load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True, mmap=False)
        )
    except OSError:
        raise
    except Exception as error:  # torch.load raises whatever the bytes lead it to
        raise ValueError(f"{file}: cannot be read as tensors alone: {error}") from error
    names = {"fc1.weight", "fc2.weight"}
    if not isinstance(held, dict) or set(held) != names:
        got = sorted(map(str, held)) if isinstance(held, dict) else type(held).__name__
        raise ValueError(f"{file}: got {got}, expected the tensors {', '.join(sorted(names))}")
    fc1, fc2 = (held[name] for name in sorted(names))
    width = len(fc1) if isinstance(fc1, Tensor) and fc1.dim() == 2 else 0
    for name, tensor, shape in (
        ("fc1.weight", fc1, [width or "r", hidden_size]),
        ("fc2.weight", fc2, [block.neurons, width or "r"]),
    ):
        fits = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
        fits = fits and tensor.dtype in FLOATS and list(tensor.shape) == shape
        if not fits or not bool((tensor.abs() <= LARGEST_WEIGHT).all()):
            got = f"{tensor!r:.100}"
            if isinstance(tensor, Tensor):
                kind = "" if tensor.layout == torch.strided and tensor.device.type == "cpu" else "sparse or absent "
                got = f"{kind}{tensor.dtype} {list(tensor.shape)}"
            expected = f"float32, bfloat16 or float16 {shape} within +-{LARGEST_WEIGHT:g}".replace("'", "")
            raise ValueError(f"{file}: {name}: got {got}, expected {expected}")
    return {"fc1": fc1, "fc2": fc2}


def _behind_norm(fc1: Tensor, model: SparseMixin, layer: int, file: Path) -> Tensor:
    """`fc1` for what the norm in front of the MLP makes of its input. An RMS norm divides a token by one number, which
    no sign depends on, and multiplies by its weight.
    """
    family = family_of(model.config.model_type)
    if family.decoding is None:
        raise ValueError(
            f"reads: 'residual' needs an RMS norm in front of the MLP, which {model.config.model_type} lacks; "
            "allowed is 'block', for predictors that were trained so"
        )
    if (name := family.decoding.norms[2]) is None:
        return fc1
    norm: Any = model.get_submodule(f"{family.layers}.{layer}.{name}")
    scale = norm.weight.detach().float().cpu() + float(family.decoding.one_plus)
    behind = (fc1.float() / scale).to(fc1.dtype)
    if not bool(behind.isfinite().all()):
        raise ValueError(
            f"{file}: fc1.weight: cannot be divided by the weight of layer {layer}'s {name}, which has zeros"
        )
    return behind
