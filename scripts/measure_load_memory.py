"""Peak memory of loading: hf_sparse in 4 bits, beside transformers with bitsandbytes and transformers in bf16.

Writes a checkpoint of random bf16 weights (llama architecture, one shard per layer), loads it in a fresh process per
system, computes one token, and measures how far resident memory rises over what the process has after `import torch,
transformers`. hf_sparse passes when that is at most its quantized size + the two largest full-precision tensors + 300
MB.

    python scripts/measure_load_memory.py [--gigabytes 1.6] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ALLOWANCE = 300_000_000
SYSTEMS = {
    "hf_sparse": "hf_sparse nf4",
    "bitsandbytes": "transformers + bitsandbytes nf4",
    "transformers": "transformers bf16",
}


# The checkpoint


def write_checkpoint(directory: Path, gigabytes: float) -> list[int]:
    """At least `gigabytes` (1e9 bytes) of weights, one shard in memory at a time. Returns the bytes of each tensor."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    hidden, intermediate, heads, vocabulary = (2048, 5632, 32, 32000) if gigabytes >= 1 else (256, 640, 4, 600)
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 4, hidden),
        "self_attn.v_proj": (hidden // 4, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    ends = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden), "model.norm": (hidden,)}
    layer_bytes, end_bytes = (sum(2 * math.prod(shape) for shape in shapes.values()) for shapes in (layer, ends))
    layers = max(2, math.ceil((gigabytes * 1e9 - end_bytes) / layer_bytes))
    shards = [ends, *({f"model.layers.{i}.{name}": shape for name, shape in layer.items()} for i in range(layers))]

    LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        vocab_size=vocabulary,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype="bfloat16",
    ).save_pretrained(directory)
    generator = torch.Generator().manual_seed(0)
    weight_map, sizes = {}, []
    for number, shapes in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name, shape in shapes.items():
            tensor = torch.ones(shape) if len(shape) == 1 else torch.empty(shape).normal_(0, 0.02, generator=generator)
            tensors[f"{name}.weight"] = tensor.bfloat16()
            weight_map[f"{name}.weight"] = file
            sizes.append(2 * tensor.numel())
        save_file(tensors, directory / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return sizes


# In the fresh process


def resident(field: str) -> int:
    """Bytes of this process: `VmRSS` (now) or `VmHWM` (highest)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def load_and_measure(system: str, directory: str) -> dict[str, Any]:
    import torch
    import transformers

    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts anew from here
    began = time.perf_counter()
    held = None
    model: Any
    if system == "hf_sparse":
        from hf_sparse import SparseAutoModelForCausalLM

        model = SparseAutoModelForCausalLM.from_pretrained(directory, load_in_4bit=True, calibration_tokens=64)
        held = sum(tier.nbytes for tier in model.placement_summary().tiers)
    elif system == "bitsandbytes":
        quantization = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, quantization_config=quantization, device_map="cpu"
        )
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    seconds = time.perf_counter() - began
    with torch.no_grad():
        model(torch.tensor([[1]]))  # a file that was only mapped so far is read now
    return {"peak_increase": resident("VmHWM") - before, "seconds": round(seconds, 1), "held": held, "imported": before}


def in_fresh_process(system: str, directory: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--load", system, str(directory)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


# The report


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.6, help="checkpoint size in 1e9 bytes (default 1.6)")
    parser.add_argument("--directory", type=Path, help="folder that holds the checkpoint meanwhile (default: /tmp)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--load", nargs=2, metavar=("SYSTEM", "DIRECTORY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        print(json.dumps(load_and_measure(*arguments.load)))
        return 0

    with tempfile.TemporaryDirectory(prefix="hf_sparse-", dir=arguments.directory) as temporary:
        sizes = write_checkpoint(Path(temporary), arguments.gigabytes)
        print(f"checkpoint          {megabytes(sum(sizes)):>10}  in {len(sizes)} bf16 tensors", flush=True)
        figures: dict[str, dict[str, Any]] = {}
        for system, name in SYSTEMS.items():
            if importlib.util.find_spec(system) is None:
                print(f"{name}: not measured, {system} is not installed")
                continue
            try:
                figures[system] = {"system": name, **in_fresh_process(system, Path(temporary))}
            except subprocess.CalledProcessError as error:
                if system == "hf_sparse":
                    raise
                print(f"{name}: not measured, it ended with exit status {error.returncode}")

    ours = figures["hf_sparse"]
    largest = sum(sorted(sizes)[-2:])
    bound = ours["held"] + largest + ALLOWANCE
    passed = ours["peak_increase"] <= bound
    ours |= {"two_largest_tensors": largest, "bound": bound, "passed": passed}
    print(f"quantized           {megabytes(ours['held']):>10}  all that the loaded model holds")
    print(f"two largest tensors {megabytes(largest):>10}")
    print(f"bound               {megabytes(bound):>10}  quantized + two largest + {megabytes(ALLOWANCE)}")
    print("\npeak over the process's size after import torch, transformers:")
    for row in figures.values():
        row["checkpoint_bytes"] = sum(sizes)
        ratio = f"{row['peak_increase'] / sum(sizes):.2f} x checkpoint"
        print(f"  {row['system']:32} {megabytes(row['peak_increase']):>10}  {ratio}  {row['seconds']:6.1f} s")
    verdict = "PASS" if passed else "FAIL"
    print(f"\n{verdict}: {megabytes(ours['peak_increase'])} is {ours['peak_increase'] / bound:.2f} x the bound")
    if arguments.json:
        arguments.json.write_text(json.dumps(list(figures.values()), indent=2) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
