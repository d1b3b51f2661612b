"""The card of a published plan: what it is, what was measured, how to load it. Its template is in model_cards/."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from huggingface_hub import ModelCard, ModelCardData

from hf_sparse.modeling import BlockId, skipping

from .log import warn_once
from .plan import PLAN_JSON, PLAN_TENSORS, PlacementPlan
from .probes import cpu_model
from .report import format_bytes

if TYPE_CHECKING:
    from .model import SparseMixin

TEMPLATE = "plan_card.md.jinja"
_TOKENS, _ROUNDS = 48, 5


@dataclass(frozen=True)
class Speed:
    """Decode of one sequence in tokens/s, with the plan's rules and with every neuron, on `machine`."""

    machine: str
    sparse: float
    dense: float


def measure_speed(model: SparseMixin) -> Speed:
    """Medians of rounds that take turns, so that a machine that gets slower is unfair to neither."""
    start = torch.full((1, 4), model.config.bos_token_id or 0, device=model.device)
    rates: dict[Literal["always", "never"], list[float]] = {"always": [], "never": []}
    for round in range(_ROUNDS + 1):
        for mode, found in rates.items():
            times: list[float] = []
            with skipping(mode):
                model.generate(
                    start, max_new_tokens=_TOKENS, min_new_tokens=_TOKENS, do_sample=False, streamer=_Times(times)
                )
            if round:  # the first one warms up
                found.append((len(times) - 1) / (times[-1] - times[0]))
    gpus = dict.fromkeys(
        torch.cuda.get_device_name(tier.device) for tier in model.placement.tiers if tier.device.type == "cuda"
    )
    machine = ", ".join([*gpus, f"{cpu_model()}, {torch.get_num_threads()} threads"])
    return Speed(machine, *(statistics.median(found) for found in rates.values()))


class _Times:
    """A streamer that keeps when tokens came."""

    def __init__(self, times: list[float]) -> None:
        self._times, self._prompt = times, True

    def put(self, value: Any) -> None:
        if not self._prompt:
            self._times.append(time.perf_counter())
        self._prompt = False

    def end(self) -> None:
        """Nothing is left to say."""


def draw_plots(model: SparseMixin, folder: Path) -> dict[str, str]:
    """Draws the report's plots into `folder`/plots. Returns file name -> what it shows; nothing, and a warning says so,
    where there is no matplotlib.
    """
    from .html_report import figure_bytes, figure_texts

    try:
        drawn, texts = figure_bytes(model), figure_texts(model)
    except ImportError as error:
        warn_once(f"The card has no plots: {error}")
        return {}
    (folder / "plots").mkdir(exist_ok=True)
    for name, png in drawn.items():
        (folder / "plots" / f"{name}.png").write_bytes(png)
    return {f"plots/{name}.png": texts[name] for name in drawn}


def plan_card(
    plan: PlacementPlan,
    folder: Path,
    repo_id: str,
    *,
    loaded_by: str | None,
    model_bytes: int,
    license: str | None = None,
    speed: Speed | None = None,
    plots: dict[str, str] | None = None,
) -> ModelCard:
    """The card of `plan`, which lies in `folder`. `loaded_by`: the id by which the model that it fits is loaded;
    None: from a folder. `plots`: file name -> what it shows.
    """
    base = plan.base_model
    report = plan.calibration_report
    plan_bytes = sum((folder / file).stat().st_size for file in (PLAN_JSON, PLAN_TENSORS))
    dense, sparse = report["dense_perplexity"], report["sparse_perplexity"]
    quantization = {k: v for k, v in plan.key.quantization.items() if k not in ("quant_method", "format_version")}
    settings = plan.key.calibration
    asked = (
        f"asked: at most +{100 * report['max_perplexity_increase']:g}%"
        if report.get("max_perplexity_increase") is not None
        else f"asked: {report.get('target_sparsity'):.0%} of the weights unread, whatever that costs"
    )
    data = ModelCardData(
        base_model=base,
        library_name="hf_sparse",
        license=license,
        tags=["hf_sparse", "activation-sparsity", "placement-plan"],
        pipeline_tag="text-generation",
        model_name=repo_id.rpartition("/")[2],
    )
    return ModelCard.from_template(
        data,
        template_path=str(_template()),
        title=repo_id.rpartition("/")[2],
        repo_id=repo_id,
        base=f"`{base}`" if base else f"a {plan.model_type} model in a folder",
        loading=_loading(loaded_by, plan),
        file=plan.gguf_file,
        revision=plan.base_model_revision,
        fingerprint=plan.key.checkpoint,
        stored=", ".join(f"{k} {v}" for k, v in quantization.items()) or "the checkpoint has them, not quantized",
        plan_bytes=format_bytes(plan_bytes),
        plan_share=f"{plan_bytes / model_bytes:.1%}",
        model_bytes=format_bytes(model_bytes),
        calibrated_on=f"{report['tokens']:,} tokens ({_texts(settings.get('texts'))})",
        library_version=plan.library_version,
        held_out=f"{report['held_out_tokens']:,}",
        dense=f"{dense:.4f}",
        sparse=f"{sparse:.4f}",
        increase=f"{sparse / dense - 1:+.2%}",
        asked=asked,
        read=f"{report['bytes_read_share']:.1%}" if "bytes_read_share" in report else "an unknown share",
        predictors=len(plan.predictors),
        machine=None if speed is None else speed.machine,
        speed=None if speed is None else f"{speed.sparse:.1f}",
        dense_speed=None if speed is None else f"{speed.dense:.1f}",
        speed_tokens=_TOKENS,
        speed_rounds=_ROUNDS,
        layers=_layers(plan),
        plots=[{"file": file, "text": text} for file, text in (plots or {}).items()],
    )


def _template() -> Path:
    installed, in_the_source_tree = Path(__file__).with_name("model_cards"), Path(__file__).parents[1] / "model_cards"
    return (installed if installed.is_dir() else in_the_source_tree) / TEMPLATE


def _texts(texts: str | None) -> str:
    return "written by the model itself" if texts == "default" else "the user's own texts"


def _loading(name: str | None, plan: PlacementPlan) -> str:
    """The arguments of from_pretrained before `plan`, in Python."""
    lines = [json.dumps(name or "FOLDER_OF_THE_MODEL")]
    if plan.gguf_file is not None:
        lines.append(f"gguf_file={json.dumps(plan.gguf_file)}")
    if quantization := {k: v for k, v in plan.key.quantization.items() if k != "format_version"}:
        fields = "".join(f"        {json.dumps(k)}: {_as_python(v)},\n" for k, v in quantization.items())
        lines.append(f"quantization_config={{\n{fields}    }}")
    return ",\n    ".join(lines)


def _as_python(value: object) -> str:
    return "None" if value is None else json.dumps(value)


def _layers(plan: PlacementPlan) -> list[list[str]]:
    shares = plan.calibration_report.get("read_shares", {})

    def share(id: BlockId) -> str:
        return f"{shares[str(id)]:.0%}" if str(id) in shares else ""

    rows = []
    for id, profile in plan.blocks.items():
        if id.kind == "mlp":
            rule = plan.rules[id]
            places = f" ({', '.join(sorted(rule.below))})" if rule.below else ""
            active = f"{float(profile.active_fraction.mean()):.0%}"
            heads = BlockId(id.layer, "attention")
            rows.append([str(id.layer), share(id), active, share(heads), f"{rule.kind}{places}"])
    return sorted(rows, key=lambda row: int(row[0]))
