"""Decode speed of generate(): hf_sparse in 4 bits against transformers in bf16 on the same (dequantized) weights.

Both models are loaded once, then take turns over several rounds: what else the machine does falls on both alike.

    python scripts/bench_generate.py MODEL [--gguf-file FILE] [--rounds 5] [--tokens 128] [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_sparse import SparseAutoModelForCausalLM
from hf_sparse.cli import DecodeClock
from hf_sparse.quantization import instruction_set

PROMPT = "The harbour was quiet that morning. The fishermen had left before sunrise, and the only sound was"


def dequantized(model: Any) -> PreTrainedModel:
    """The family's plain transformers model in bf16, with the weights that `model` computes with."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(model.dequantized_state_dict())
    return plain.eval()


def decode_speed(model: Any, inputs: dict[str, torch.Tensor], tokens: int) -> float:
    clock = DecodeClock()
    exactly = {"min_new_tokens": tokens, "max_new_tokens": tokens}
    model.generate(**inputs, **exactly, streamer=clock, do_sample=False, pad_token_id=0)
    return clock.tokens_per_second


def commit() -> str | None:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory or a hub id")
    parser.add_argument("--gguf-file", help="name of a GGUF file in it")
    parser.add_argument("--rounds", type=int, default=5, help="turns that each system takes (default 5)")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per turn (default 128)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args()

    source = {"pretrained_model_name_or_path": arguments.model, "gguf_file": arguments.gguf_file}
    inputs = dict(AutoTokenizer.from_pretrained(**source)(PROMPT, return_tensors="pt"))
    sparse: Any = SparseAutoModelForCausalLM.from_pretrained(**source, load_in_4bit=True)
    systems = {"hf_sparse nf4": sparse, "transformers bf16": dequantized(sparse)}
    speeds: dict[str, list[float]] = {system: [] for system in systems}
    for model in systems.values():
        decode_speed(model, inputs, 8)  # warm-up
    sparse.reset_active_fraction()
    for number in range(arguments.rounds):
        for system, model in systems.items():
            speeds[system].append(decode_speed(model, inputs, arguments.tokens))
        latest = ", ".join(f"{system} {figures[-1]:.1f}" for system, figures in speeds.items())
        print(f"round {number + 1}: {latest}", flush=True)

    medians = {system: statistics.median(figures) for system, figures in speeds.items()}
    prompt_tokens, threads = inputs["input_ids"].shape[1], torch.get_num_threads()
    print(f"\ndecode of {arguments.tokens} tokens after {prompt_tokens}, {threads} threads, {instruction_set()}:")
    for system, figures in speeds.items():
        print(f"  {system:20} {medians[system]:7.1f} tokens/s  (from {min(figures):.1f} to {max(figures):.1f})")
    ours, theirs = medians.values()
    print(f"  ratio {ours / theirs:.2f}")
    if arguments.json:
        common = {
            "case": f"decode {arguments.tokens} tokens after {prompt_tokens}",
            "threads": threads,
            "instruction_set": instruction_set(),
            "model": arguments.gguf_file or arguments.model,
            "commit": commit(),
        }
        rows = [
            {"system": system, "tokens_per_second": figures, "median": medians[system], **common}
            for system, figures in speeds.items()
        ]
        rows[0]["active_fraction"] = sparse.active_fraction()
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
