"""What placing neurons is worth over placing layers, by the cost model, on the two machines of PowerInfer's paper
(SOSP'24, section 8.1): RTX 4090 with an i9-13900K, and RTX 2080 Ti with an i7-12700K.

Profiles are power laws with the skew that the paper reports (section 2.2). Speeds are public figures times what kernels
reach of them; nothing is measured here. The baseline is what llama.cpp does: whole layers on the GPU, as many as fit,
and every neuron computed for every token.

    python scripts/paper_machines.py [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path
from typing import Any

from _bench import row, say, write_json
from transformers import AutoConfig

from hf_sparse.catalogue import known_device
from hf_sparse.config import parse_bytes
from hf_sparse.estimate import Activity, as_text, layer_split, model_blocks, neuron_split, table, tiers_of
from hf_sparse.modeling import Tier, WeightFormat

MACHINES = {
    "PC-High": ("NVIDIA GeForce RTX 4090", "24GB", "i9-13900K", "192GB"),
    "PC-Low": ("NVIDIA GeForce RTX 2080 Ti", "11GB", "i7-12700K", "64GB"),
}
OPT = Activity(0.1, 0.26, 0.8, predicted=True)
REGLU = Activity(0.2, 0.43, 0.8, predicted=True)
_OPT = {"vocab_size": 50272, "max_position_embeddings": 2048, "do_layer_norm_before": True}
MODELS: dict[str, tuple[str, dict[str, Any], Activity]] = {
    "OPT-6.7B": (
        "opt",
        _OPT
        | {"hidden_size": 4096, "word_embed_proj_dim": 4096, "ffn_dim": 16384}
        | {"num_hidden_layers": 32, "num_attention_heads": 32},
        OPT,
    ),
    "OPT-30B": (
        "opt",
        _OPT
        | {"hidden_size": 7168, "word_embed_proj_dim": 7168, "ffn_dim": 28672}
        | {"num_hidden_layers": 48, "num_attention_heads": 56},
        OPT,
    ),
    "Falcon(ReLU)-40B": (
        "falcon",
        {"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8}
        | {"vocab_size": 65024, "new_decoder_architecture": True, "ffn_hidden_size": 32768},
        OPT,
    ),
    "LLaMA(ReGLU)-70B": (
        "llama",
        {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
        | {"intermediate_size": 28672, "vocab_size": 32000, "hidden_act": "relu"},
        REGLU,
    ),
}
FORMATS = {
    "FP16": (WeightFormat(), None),
    "INT4": (WeightFormat("int4", 32), WeightFormat("int8", 32)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()

    rows: list[dict[str, Any]] = []
    loads: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for machine, (gpu, budget, cpu, memory) in MACHINES.items():
        for name in arguments.models:
            kind, fields, activity = MODELS[name]
            config = AutoConfig.for_model(kind, **fields)
            for form, (weights, head) in FORMATS.items():
                blocks = model_blocks(config, weights, head, activity)
                total = sum(block.bytes_per_neuron * block.neurons for block in blocks)
                tiers: tuple[Tier, ...] = tiers_of([(known_device(gpu), parse_bytes(budget))], known_device(cpu))
                tiers = (*tiers[:-1], dataclasses.replace(tiers[-1], budget=parse_bytes(memory)))
                if total > sum(tier.budget or 0 for tier in tiers):
                    say(f"{name}, {form}, {machine}: {total / 1e9:.0f} GB, more than the machine has\n")
                    continue
                if total <= parse_bytes(budget):
                    say(f"{name}, {form}, {machine}: {total / 1e9:.0f} GB, the GPU holds it whole\n")
                    continue
                ours, solution = neuron_split(blocks, tiers)
                found = [layer_split(blocks, tiers, True), layer_split(blocks, tiers, False), ours]
                title = f"{name}, {form}, {total / 1e9:.0f} GB, on {machine}: {gpu} ({budget}), {cpu}"
                print(as_text(table(title, found, str(solution))), flush=True)
                print(flush=True)
                loads.setdefault((machine, form), []).append((found[0].load, ours.load))
                for one in found:
                    figures = {"load_on_gpu": one.load, "waits_for": one.binds, "gap": solution.gap}
                    case = f"{machine}, {form}, {one.name}"
                    rows.append(row(case, "cost model", "tokens/s", [one.tokens_per_second], name, **figures))
                rows.append(
                    row(f"{machine}, {form}", "speed-up", "x", [found[0].token_seconds / ours.token_seconds], name)
                )
    for (machine, form), pairs in loads.items():
        before, after = (statistics.mean(side) for side in zip(*pairs, strict=True))
        say(f"{machine}, {form}: the GPU's share of the neuron load goes from {before:.0%} by layer to {after:.0%}")
        rows.append(row(f"{machine}, {form}", "share of the neuron load", "share", [before, after], "all"))
    ratios = [made["median"] for made in rows if made["system"] == "speed-up"]
    if ratios:
        say(f"Speed-up over layers with all neurons: {min(ratios):.1f} x to {max(ratios):.1f} x")
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
