"""The command line: `hf-sparse report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_options import (
    CacheTokens,
    CalibrationTexts,
    CalibrationTokens,
    ComputeDtype,
    GgufFile,
    GpuBudget,
    GroupSize,
    HeadDtype,
    MaxPerplexityIncrease,
    Model,
    TargetSparsity,
    WeightDtype,
    find_source,
    load,
    stdout,
)

Output = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the page.")]


def report(
    model: Model,
    output: Output = Path("report.html"),
    gguf_file: GgufFile = None,
    gpu_budget: GpuBudget = None,
    cache_tokens: CacheTokens = None,
    weight_dtype: WeightDtype = "nf4",
    compute_dtype: ComputeDtype = None,
    group_size: GroupSize = None,
    head_dtype: HeadDtype = None,
    max_perplexity_increase: MaxPerplexityIncrease = 0.01,
    target_sparsity: TargetSparsity = None,
    calibration_texts: CalibrationTexts = None,
    calibration_tokens: CalibrationTokens = 8192,
) -> None:
    """Writes one HTML page that shows the plan: activation frequencies, placement, predicted time, quality."""
    from .html_report import check_output, write_report

    check_output(output)  # said now, not after minutes of loading
    source = find_source(model, gguf_file)
    calibration = max_perplexity_increase, target_sparsity, calibration_texts, calibration_tokens
    sparse = load(source, gpu_budget, cache_tokens, weight_dtype, compute_dtype, group_size, head_dtype, *calibration)
    folder = Path(model)
    name = folder.resolve().name if folder.exists() else model
    write_report(sparse, output, name=sparse.plan.base_model or name)
    stdout.print(f"Written to {output}", highlight=False, markup=False, soft_wrap=True)
