"""What rounding activations costs a model: top-1 agreement and perplexity of compute_dtype "int8" and "bf16" against
"fp32", on the standard library's own documentation; and of heads in 8 and 4 bits against the head as it came.

    python scripts/measure_compute.py MODEL_DIR [--gguf-file FILE] [--tokens N] [--decode-tokens N] [--json FILE]

Weights are nf4 in groups of 64, rules are off. "prompt": rows of 512 tokens pass through the model at once. "decode":
the first tokens of the text one by one through the cache, which is how an answer is made; fewer, for it takes longer.
Agreement is the share of tokens after which the same token is the most likely one. Ends with PASS where int8 agrees on
98% or more and its perplexity is within 0.5%, and with FAIL and a status of 1 otherwise.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from _bench import at_least_one, conditions, row, say, write_json
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer
from transformers.cache_utils import DynamicCache

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.modeling import skipping

ROW = 512
LEAST_AGREEMENT, LARGEST_CHANGE = 0.98, 0.005
# Case, compute_dtype, head_dtype. The first is what the others are compared with.
CASES = [
    ("fp32", "fp32", None),
    ("bf16", "bf16", None),
    ("int8", "int8", None),
    ("fp32, head int8", "fp32", "int8"),
    ("fp32, head nf4", "fp32", "nf4"),
]


@dataclass(frozen=True)
class Reading:
    """What a model makes of a text. `first`: int64 [tokens], the most likely token after each; `losses`: float32
    [tokens - rows], the negative log likelihood of those that do follow.
    """

    first: Tensor
    losses: Tensor

    @property
    def perplexity(self) -> float:
        return math.exp(min(float(self.losses.double().mean()), 700.0))

    def agreement(self, other: Reading) -> float:
        return float((self.first == other.first).double().mean())


def read_prompts(model: Any, ids: Tensor) -> Reading:
    """`ids` int64 [tokens], in rows of ROW, each by itself."""
    first, losses = [], []
    for part in ids.split(ROW):
        logits = model(part[None], use_cache=False).logits[0].float()
        first.append(logits.argmax(dim=1))
        losses.append(cross_entropy(logits[:-1], part[1:], reduction="none"))
    return Reading(torch.cat(first), torch.cat(losses))


def read_one_by_one(model: Any, ids: Tensor) -> Reading:
    """`ids` int64 [tokens], one at a time, with those before it in the cache; the first is a prompt."""
    cache, logits = DynamicCache(config=model.config), []
    for token in ids:
        out = model(input_ids=token.view(1, 1), cache=cache, use_cache=True, logits_to_keep=1)
        logits.append(out.logits[0, -1].float())
    rows = torch.stack(logits)
    return Reading(rows.argmax(dim=1), cross_entropy(rows[:-1], ids[1:], reduction="none"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_DIR", help="a directory or a hub id")
    parser.add_argument("--gguf-file", help="name of a GGUF file in it")
    parser.add_argument("--tokens", type=at_least_one, default=2000, help="read as prompts (default 2000)")
    parser.add_argument("--decode-tokens", type=at_least_one, default=400, help="read one by one (default 400)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args()
    if min(arguments.tokens, arguments.decode_tokens) < 2:
        parser.error("--tokens, --decode-tokens: expected at least 2")

    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.model, gguf_file=arguments.gguf_file)
    most = max(arguments.tokens, arguments.decode_tokens)
    text = "".join(topics[name] for name in sorted(topics))[: 16 * most]
    ids = torch.tensor(tokenizer(text).input_ids)
    if len(ids) < most:
        parser.error(f"--tokens, --decode-tokens: the text has {len(ids)}")
    ways = {"prompt": (read_prompts, ids[: arguments.tokens])}
    ways["decode"] = (read_one_by_one, ids[: arguments.decode_tokens])

    say(f"{conditions()}; nf4 in groups of 64, rules off")
    say(
        f"prompt: {arguments.tokens} tokens in rows of {ROW}; decode: the first {arguments.decode_tokens}, one by one\n"
    )
    say(f"{'':16}  {'':6}  agreement  perplexity  change")
    references: dict[str, Reading] = {}
    rows: list[dict[str, Any]] = []
    missed = []
    for case, compute_dtype, head_dtype in CASES:
        model = SparseAutoModelForCausalLM.from_pretrained(
            arguments.model,
            gguf_file=arguments.gguf_file,
            quantization_config=WeightOnlyQuantConfig(
                weight_dtype="nf4", group_size=64, compute_dtype=compute_dtype, head_dtype=head_dtype
            ),
            max_perplexity_increase=0,
            calibration_tokens=256,
        )
        for way, (read, tokens) in ways.items():
            with torch.no_grad(), skipping("never"):
                reading = read(model, tokens)
            reference = references.setdefault(way, reading)
            agreement, change = reading.agreement(reference), reading.perplexity / reference.perplexity - 1
            say(f"{case:16}  {way}  {agreement:9.2%}  {reading.perplexity:10.3f}  {change:+7.3%}")
            rows.append(
                row(
                    f"{case}, {way}",
                    "hf_sparse",
                    "agreement",
                    [agreement],
                    str(arguments.model),
                    perplexity=reading.perplexity,
                    perplexity_change=change,
                    tokens=len(tokens),
                    native_steps=model.engine() is not None,
                )
            )
            if compute_dtype == "int8" and not (agreement >= LEAST_AGREEMENT and abs(change) <= LARGEST_CHANGE):
                missed.append(f"{way} ({agreement:.2%}, {change:+.3%})")
    write_json(arguments.json, rows)
    goal = f"int8 agrees on {LEAST_AGREEMENT:.0%} or more, perplexity within {LARGEST_CHANGE:.1%}"
    say(f"\n{'FAIL' if missed else 'PASS'}: {goal}" + (f"; missed by {', '.join(missed)}" if missed else ""))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
