"""How good a model is: perplexity under its rules and without them, and what each step away from the original weights
costs: skipping neurons, and storing weights in few bits.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor
from torch.nn.functional import nll_loss
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from hf_sparse.modeling import HybridMLP, PackedHead, Skipping, hybrid_blocks, skipping

from .log import logger, warn_once
from .report import format_bytes
from .texts import read_texts, token_stream

WINDOW = 512
PIECE = 64  # positions whose distributions over the vocabulary are held in float32 at a time
PAIRS = (("sparse", "dense"), ("sparse", "full_precision"), ("dense", "full_precision"))
LAYERS_PER_ROW = 10


def vocabulary_size(model: PreTrainedModel) -> int:
    """Rows of the input embeddings, which may be more than the tokenizer has tokens."""
    weight: Any = model.get_input_embeddings().weight
    return weight.shape[0]


def batches(rows: Tensor, model: PreTrainedModel) -> Iterator[Tensor]:
    """`rows` in batches whose logits take about 32 MB, at least a row."""
    vocabulary = vocabulary_size(model)
    yield from rows.split(max(1, (1 << 23) // (vocabulary * rows.shape[1])))


def perplexity(model: PreTrainedModel, rows: Tensor, mode: Skipping) -> float:
    """exp of the mean negative log likelihood of tokens 1.. of each row; `mode` as in `modeling.skipping`."""
    total, count = 0.0, 0
    with torch.no_grad(), skipping(mode):
        for batch in batches(rows, model):
            logits = model(batch, use_cache=False).logits[:, :-1]
            for row, targets in zip(logits, batch[:, 1:], strict=True):
                total += float(torch.nn.functional.cross_entropy(row.float(), targets, reduction="sum"))
                count += targets.numel()
    return exponential(total / count)


def bytes_per_token(model: PreTrainedModel, rules: bool = True) -> int:
    """Of weights that are read to decode one token alone: head, attention, MLPs, predictors. With `rules`, of blocks
    that counted any (`HybridBlock.counters`) the share that was kept. Not in it: the cache, norms, the embedding of
    the token, and the gates that a predictor asked for in vain.
    """
    head: Any = model.get_output_embeddings()
    total = float(head.matrix.nbytes if isinstance(head, PackedHead) else head.weight.nbytes)
    for block in hybrid_blocks(model):
        total += block.read_bytes() if rules else block.weight_bytes
    return round(total)


# Models beside each other


@dataclass(frozen=True)
class Difference:
    """How `model` differs from `reference`. `same_top1`: share of tokens after which both hold the same token for the
    likeliest; `kl`: mean KL divergence of the model from the reference in nats, the sum of p log(p / q) with p the
    reference's distribution and q the model's.
    """

    model: str
    reference: str
    same_top1: float
    kl: float


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found; rich prints it as a table. `perplexity`: by model ("sparse", "dense", "full_precision"),
    on the same `tokens` predicted tokens. `active_fraction`: share of the MLP neurons that the rules computed, by
    layer, and 1 where none applied. `read_share`: by layer, share of the bytes of its weights that a token read, its
    predictors' added. `bytes_per_token`: of weights, "sparse" and "dense", see the function of that name.
    `seconds`: what all of it took.
    """

    texts: str
    tokens: int
    window: int
    weights: str
    perplexity: dict[str, float]
    differences: tuple[Difference, ...]
    active_fraction: dict[int, float]
    read_share: dict[int, float]
    bytes_per_token: dict[str, int]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON values. A number that is not finite, which JSON has no word for, is a text that float() reads."""
        return json_values(asdict(self))

    def __rich__(self) -> Group:
        table = Table(title=f"{self.tokens:,} tokens of {self.texts}, in windows of {self.window}")
        for heading in ("model", "perplexity", "against", "change", "top-1", "KL, nats"):
            table.add_column(heading, justify="left" if heading in ("model", "against") else "right", no_wrap=True)
        for name, value in self.perplexity.items():
            cells = [_label(name), f"{value:.4g}" if value >= 1000 else f"{value:.3f}"]
            for difference in (d for d in self.differences if d.model == name):
                change = value / self.perplexity[difference.reference] - 1
                against = (_label(difference.reference), f"{change:+.2%}")
                table.add_row(*cells, *against, f"{difference.same_top1:.1%}", f"{difference.kl:.4f}")
                cells = ["", ""]
            if cells[0]:
                table.add_row(*cells)
        sparse, dense = self.bytes_per_token["sparse"], self.bytes_per_token["dense"]
        mean = sum(self.active_fraction.values()) / len(self.active_fraction)
        share = sum(self.read_share.values()) / len(self.read_share)
        reads = (
            f"Weights: {self.weights}. {mean:.1%} of the MLP neurons computed, {share:.1%} of the layers' weights "
            f"read; with the head, a decoded token reads {format_bytes(sparse)}, {sparse / dense:.1%} of the "
            f"{format_bytes(dense)} of all."
        )
        computed = _by_layer("MLP neurons computed, by layer, in %", self.active_fraction)
        return Group(table, computed, _by_layer("Weights read, by layer, in %", self.read_share), reads)


def _by_layer(title: str, shares: dict[int, float]) -> Table:
    table = Table(title=title, box=None, show_header=False)
    by_layer = list(shares.items())
    for start in range(0, len(by_layer), LAYERS_PER_ROW):
        row = by_layer[start : start + LAYERS_PER_ROW]
        table.add_row(f"{row[0][0]} to {row[-1][0]}", *(f"{100 * share:.1f}" for _, share in row))
    return table


def evaluate(
    model: Any,
    tokenizer: Any,
    texts: str | os.PathLike[str] | Sequence[str] | None = None,
    *,
    tokens: int = 4096,
    window: int | None = None,
    reference: PreTrainedModel | None = None,
) -> Evaluation:
    """Compares, on the same tokens, `model` with its rules applied to every token ("sparse"), the same weights without
    rules ("dense"), and `reference`, the model that it was made from ("full_precision"), if it is given. So "sparse"
    against "dense" is what skipping costs, "dense" against "full_precision" what packing does.

    All pass through the text side by side: logits of one batch are held, never those of the text, and both models are
    in memory at once.

    Args:
        model: a model that `SparseAutoModelForCausalLM` loaded.
        texts: a list of texts, the path of a .txt file or of a .jsonl file ("text" of each line), or a dataset's name;
            None: documentation of the Python that runs (`pydoc_data.topics`), which calibration does not see unless
            told to.
        tokens: how many to read at most; what does not fill a window is left out.
        window: tokens that are read together, each window by itself; where the tokenizer begins texts with a token of
            its own, so does each window. None: 512, or as many as the model has positions.
        reference: see `full_precision`; any causal language model with this vocabulary.

    Raises:
        ValueError: texts, tokens or window that do not do, or a reference with another vocabulary.
        OSError, ImportError: texts that cannot be read.
    """
    began = time.perf_counter()
    vocabulary = vocabulary_size(model)
    if reference is not None and vocabulary_size(reference) != vocabulary:
        raise ValueError(f"reference: has {vocabulary_size(reference)} tokens, expected the model's {vocabulary}")
    length = _window(model, window, tokens)
    text, rows = _rows(tokenizer, texts, tokens, length, vocabulary)
    mlps = {block.id.layer: block for block in hybrid_blocks(model) if isinstance(block, HybridMLP)}
    counted = [(block, block.counters.clone()) for block in hybrid_blocks(model)]
    model.reset_active_fraction()
    try:
        perplexities, differences = _compare(model, reference, rows)
        active = {layer: 1.0 if mlp.active_fraction is None else mlp.active_fraction for layer, mlp in mlps.items()}
        shares = _read_shares(model)
        read = {"sparse": bytes_per_token(model), "dense": bytes_per_token(model, rules=False)}
    finally:
        for block, counts in counted:
            block.counters.copy_(counts)  # generation's counts go on from where they were
    if not perplexities["dense"] <= vocabulary:
        logger.warning(
            "The dense model's perplexity on these texts is %.4g, worse than guessing among its %d tokens: "
            "model or tokenizer are broken, or the texts are nothing that the model knows.",
            perplexities["dense"],
            vocabulary,
        )
    return Evaluation(
        texts=text,
        tokens=rows[:, 1:].numel(),
        window=length,
        weights=weights_of(model),
        perplexity=perplexities,
        differences=differences,
        active_fraction=active,
        read_share=shares,
        bytes_per_token=read,
        seconds=round(time.perf_counter() - began, 2),
    )


def _read_shares(model: Any) -> dict[int, float]:
    read: dict[int, float] = {}
    whole: dict[int, int] = {}
    for block in hybrid_blocks(model):
        layer = block.id.layer
        read[layer] = read.get(layer, 0.0) + block.read_bytes()
        whole[layer] = whole.get(layer, 0) + block.weight_bytes
    return {layer: read[layer] / whole[layer] for layer in read}


def full_precision(name: str, gguf_file: str | None = None, *, dtype: torch.dtype | None = None) -> Any:
    """The weights of `name` as they came, in `dtype`, in transformers' own model: a `reference` for `evaluate`. None,
    and it is said once, where they are packed already: a folder that `save_pretrained` wrote lacks the original.
    """
    source: dict[str, Any] = {"use_safetensors": True} if gguf_file is None else {"gguf_file": gguf_file}
    if gguf_file is None and getattr(AutoConfig.from_pretrained(name), "quantization_config", None) is not None:
        warn_once(f"full precision is left out: {name} holds packed weights, not those they were made from")
        return None
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto", **source).eval()


def _window(model: PreTrainedModel, window: int | None, tokens: int) -> int:
    positions = getattr(model.config, "max_position_embeddings", None) or WINDOW
    if window is None:
        window = min(WINDOW, positions)
    elif type(window) is not int or not 2 <= window <= positions:
        raise ValueError(f"window: got {window!r}, allowed are integers from 2 to the model's {positions} positions")
    if type(tokens) is not int or tokens < window:
        raise ValueError(f"tokens: got {tokens!r}, expected at least a window of {window}")
    return window


def text_stream(tokenizer: Any, texts: Any, tokens: int, vocabulary: int) -> tuple[str, Tensor]:
    """What the text is, and its token ids int64 [about `tokens` or more], as far as it goes."""
    if texts is None:
        from pydoc_data.topics import topics

        # more than enough: a token has about four characters
        found = ["".join(topics[name] for name in sorted(topics))[: 8 * tokens]]
        text = f"Python {'.'.join(platform.python_version_tuple()[:2])}'s documentation"
    else:
        found = read_texts(texts, name="texts", tokens=tokens)
        text = os.fspath(texts) if isinstance(texts, (str, os.PathLike)) else f"{len(found)} texts"
    return text, token_stream(found, tokenizer, vocabulary=vocabulary, name="texts", special=False)


def _rows(tokenizer: Any, texts: Any, tokens: int, window: int, vocabulary: int) -> tuple[str, Tensor]:
    """What the text is, and its token ids int64 [windows, window]."""
    text, stream = text_stream(tokenizer, texts, tokens, vocabulary)
    begins = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    new = window - begins
    if len(stream) < new:
        raise ValueError(f"texts: expected at least {new} tokens, a window, got {len(stream)}")
    rows = stream[: min(len(stream), tokens) // new * new].view(-1, new)
    return text, torch.nn.functional.pad(rows, (1, 0), value=tokenizer.bos_token_id) if begins else rows


@torch.no_grad()
def _compare(
    model: Any, reference: PreTrainedModel | None, rows: Tensor
) -> tuple[dict[str, float], tuple[Difference, ...]]:
    """Perplexities, and differences of those PAIRS that are there, on tokens 1.. of each of `rows`."""
    loss = dict.fromkeys(("sparse", "dense", *(() if reference is None else ("full_precision",))), 0.0)
    pairs = [pair for pair in PAIRS if pair[1] in loss]
    agreed, divergence = dict.fromkeys(pairs, 0), dict.fromkeys(pairs, 0.0)
    with transformers_logging.tqdm(total=rows.numel(), unit="token", desc="Evaluating", leave=False) as progress:
        for batch in batches(rows, model):
            logits = {"sparse": _logits(model, batch, "always"), "dense": _logits(model, batch, "never")}
            if reference is not None:
                logits["full_precision"] = _logits(reference, batch, "never").to(model.device)
            targets = batch[:, 1:].flatten().to(model.device)
            for start in range(0, len(targets), PIECE):
                piece = slice(start, start + PIECE)
                log_probs = {name: values[piece].float().log_softmax(-1) for name, values in logits.items()}
                for name, log_p in log_probs.items():
                    loss[name] += float(nll_loss(log_p, targets[piece], reduction="sum"))
                for pair in pairs:
                    log_q, log_p = (log_probs[name] for name in pair)
                    agreed[pair] += int((log_q.argmax(-1) == log_p.argmax(-1)).sum())
                    divergence[pair] += float((log_p.exp() * (log_p - log_q)).sum())
            progress.update(batch.numel())
    count = rows[:, 1:].numel()
    differences = []
    for pair in pairs:
        kl = divergence[pair] / count
        differences.append(Difference(*pair, math.nan if math.isnan(kl) else agreed[pair] / count, kl))
    return {name: exponential(total / count) for name, total in loss.items()}, tuple(differences)


def _logits(model: Any, batch: Tensor, mode: Skipping) -> Tensor:
    """[tokens that have a next one, vocabulary]"""
    with skipping(mode):
        return model(batch.to(model.device), use_cache=False).logits[:, :-1].flatten(0, 1)


def exponential(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def weights_of(model: PreTrainedModel) -> str:
    form = getattr(model.config, "quantization_config", None)
    return "as they came" if form is None else f"{form.weight_dtype} in groups of {form.group_size}"


def _label(name: str) -> str:
    return name.replace("_", " ")


def json_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): json_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
