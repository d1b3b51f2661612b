"""What the modules of the command line share: options, each described once, and how a model is loaded by them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from .model import SparseMixin

stdout, stderr = Console(), Console(stderr=True)

LOADING, GENERATION, EVALUATION = "Weights and placement", "Generation", "Evaluation"
STREAMING = "Endless texts"
WeightDtype = Annotated[
    str,
    typer.Option(
        metavar="TYPE", help="nf4, fp4, int4, int4_asym, int8, or none: as they came.", rich_help_panel=LOADING
    ),
]
GroupSize = Annotated[
    int | None,
    typer.Option(metavar="SIZE", help="32, 64 or 128 weights share a scale. Default: 64.", rich_help_panel=LOADING),
]
# Defaults that depend on something else are None here and said in the help.
Model = Annotated[str, typer.Argument(help="A directory, a hub id, or the path of a .gguf file.")]
GgufFile = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A GGUF file in the directory or repository MODEL.", rich_help_panel=LOADING),
]
GpuBudget = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES",
        help='Memory on the GPU: "11GB", "10GiB", "80%". Default: 90% of what is free.',
        rich_help_panel=LOADING,
    ),
]
CacheTokens = Annotated[
    int | None,
    typer.Option(
        metavar="COUNT",
        help="Tokens whose keys and values the budget has room for. Default: 2048, or the model's positions.",
        rich_help_panel=LOADING,
    ),
]
ComputeDtype = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE", help="int8, bf16 or fp32 activations in products. Default: int8.", rich_help_panel=LOADING
    ),
]
HeadDtype = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE", help="Of the head: as weights, or none: as it came. Default: int8.", rich_help_panel=LOADING
    ),
]
TargetSparsity = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Instead: share of the blocks' weights to leave unread, whatever that costs.",
        rich_help_panel=LOADING,
    ),
]
CalibrationTexts = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Text to calibrate on: .txt, .jsonl or a dataset's name. Default: what the model writes itself.",
        rich_help_panel=LOADING,
    ),
]
CalibrationTokens = Annotated[
    int, typer.Option(metavar="COUNT", help="Tokens to calibrate on.", rich_help_panel=LOADING)
]
MaxPerplexityIncrease = Annotated[
    float,
    typer.Option(
        metavar="SHARE", help="What skipping may cost: 0.01 is 1%; 0 skips exact zeros only.", rich_help_panel=LOADING
    ),
]
Prompt = Annotated[str, typer.Option("--prompt", "-p", metavar="TEXT", help="What the model answers or continues.")]
MaxNewTokens = Annotated[
    int, typer.Option(min=1, metavar="COUNT", help="Where to stop at the latest.", rich_help_panel=GENERATION)
]
DoSample = Annotated[
    bool | None,
    typer.Option(help="Sample, or take the likeliest token. Default: the model's own.", rich_help_panel=GENERATION),
]
Temperature = Annotated[
    float | None, typer.Option(metavar="VALUE", help="Of sampling, which it turns on.", rich_help_panel=GENERATION)
]
Seed = Annotated[
    int | None, typer.Option(metavar="NUMBER", help="Makes sampling repeatable.", rich_help_panel=GENERATION)
]
NKeep = Annotated[
    int | None,
    typer.Option(
        metavar="COUNT",
        help="How many of the first tokens stay when the cache is full. Default: 4.",
        rich_help_panel=STREAMING,
    ),
]
NDiscard = Annotated[
    int | None,
    typer.Option(
        metavar="COUNT",
        help="How many of the oldest others go at once; -1: half. Default: -1.",
        rich_help_panel=STREAMING,
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(help="Use the tokenizer's chat template. Default: if it has one.", rich_help_panel=GENERATION),
]


def check_parent(json_file: Path | None) -> None:
    if json_file is not None and not json_file.parent.is_dir():
        raise NotADirectoryError(f"json: got {json_file}, but there is no directory {json_file.parent}")


def write_json(json_file: Path | None, fields: dict[str, Any]) -> None:
    if json_file is not None:
        aside = json_file.with_name(f".{json_file.name}.{os.getpid()}")
        aside.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
        aside.replace(json_file)


def find_source(model: str, gguf_file: str | None) -> dict[str, Any]:
    """The arguments by which transformers finds `model`."""
    if not (model.endswith(".gguf") and Path(model).is_file()):
        if model.endswith(".gguf") and gguf_file is None:
            raise FileNotFoundError(f"MODEL: there is no file {model}")
        return {"pretrained_model_name_or_path": model, "gguf_file": gguf_file}
    if gguf_file is not None:
        raise ValueError(f"gguf_file: got {gguf_file!r}, but MODEL is a GGUF file already: {model}")
    return {"pretrained_model_name_or_path": str(Path(model).parent), "gguf_file": Path(model).name}


def load(
    source: dict[str, Any],
    gpu_budget: str | None,
    cache_tokens: int | None,
    weight_dtype: str,
    compute_dtype: str | None,
    group_size: int | None,
    head_dtype: str | None,
    max_perplexity_increase: float,
    target_sparsity: float | None,
    calibration_texts: str | None,
    calibration_tokens: int,
) -> SparseMixin:
    from .auto import SparseAutoModelForCausalLM
    from .config import WeightOnlyQuantConfig

    options = given(compute_dtype=compute_dtype, group_size=group_size, head_dtype=head_dtype)
    if weight_dtype == "none" and options:
        raise ValueError(f"{', '.join(options)}: needs quantized weights, but weight_dtype is 'none'")
    if head_dtype == "none":
        options["head_dtype"] = None
    quantization = None if weight_dtype == "none" else WeightOnlyQuantConfig(weight_dtype=weight_dtype, **options)
    model: Any = SparseAutoModelForCausalLM.from_pretrained(
        **source,
        quantization_config=quantization,
        gpu_budget=gpu_budget,
        cache_tokens=cache_tokens,
        max_perplexity_increase=max_perplexity_increase,
        target_sparsity=target_sparsity,
        calibration_texts=calibration_texts,
        calibration_tokens=calibration_tokens,
    )
    return model


def given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
