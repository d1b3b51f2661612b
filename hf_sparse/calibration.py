"""Calibration: texts in; activation profile, skip rules and predictors out.

Half of the tokens train (thresholds, profile, predictors), the other half is held out and decides what may be skipped:
rules stay only within `max_perplexity_increase` of the same quantized weights computed densely.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from hf_sparse.modeling import BlockId, HybridAttention, HybridMLP, SkipRule, has_exact_zeros, hybrid_blocks, skipping

from . import __version__
from .config import SparseConfig
from .evaluation import batches, perplexity, vocabulary_size
from .log import logger
from .model import SparseMixin
from .plan import BlockProfile, PlacementPlan, PlanKey
from .predictor_training import train_predictors
from .texts import read_texts, token_stream

ROW_TOKENS = 256
# Shares of neurons that a magnitude threshold leaves out, from none upwards: what the search chooses from, for all
# layers alike.
SKIPPED_SHARES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
SAMPLES_PER_LAYER = 1 << 16


def calibrate(model: SparseMixin, tokenizer: Any, options: SparseConfig, key: PlanKey) -> PlacementPlan:
    """Measures `model`, whose blocks lie whole on the CPU, and returns its plan; leaves its rules and predictors off.

    Raises ValueError where the texts are too short, or where the model computes NaN.
    """
    began = time.perf_counter()
    logger.info(
        "Calibrating on %d tokens, which pass through the model about five times: this can take minutes, and is "
        "done once for this checkpoint and these settings.",
        options.calibration_tokens,
    )
    mlps = {block.id: block for block in hybrid_blocks(model) if isinstance(block, HybridMLP)}
    with torch.no_grad(), _progress(model, options.calibration_tokens) as progress:
        progress.set_description("Calibrating (text)")
        rows = calibration_rows(model, tokenizer, options)
        training, held_out = rows[0::2], rows[1::2]
        progress.set_description("Calibrating (profile)")
        profile = Profile(model)
        profile.measure(training)
        dense = perplexity(model, held_out, "never")
        if not math.isfinite(dense):
            raise ValueError(
                f"the model's perplexity on its calibration text is {dense}: its weights or activations are broken"
            )
        progress.set_description("Calibrating (rules)")
        rules = {id: SkipRule("exact") if has_exact_zeros(block) else SkipRule() for id, block in mlps.items()}
        predictors: dict[BlockId, dict[str, Tensor]] = {}
        limit = dense * (1 + options.max_perplexity_increase)
        if options.max_perplexity_increase > 0:
            smooth = [id for id in mlps if rules[id].kind == "none"]
            if smooth:
                rules.update(_search_thresholds(model, mlps, profile, smooth, held_out, limit))
            if len(smooth) < len(mlps):
                progress.set_description("Calibrating (predictors)")
                exact = {id: block for id, block in mlps.items() if rules[id].kind == "exact"}
                predictors, predicted = train_predictors(
                    model, exact, training, held_out, limit, options.calibration_seed
                )
                rules.update(predicted)
        _set_rules(mlps, rules)
        sparse = perplexity(model, held_out, "always") if any(r.kind != "none" for r in rules.values()) else dense
        profile.measure_rules(training)
        _set_rules(mlps, {})
    seconds = time.perf_counter() - began
    report = {
        "tokens": rows.numel(),
        "held_out_tokens": held_out.numel(),
        "seconds": round(seconds, 2),
        "dense_perplexity": dense,
        "sparse_perplexity": sparse,
        "max_perplexity_increase": options.max_perplexity_increase,
    }
    logger.info(
        "Calibrated in %.0f s: perplexity on the calibration text %.2f dense, %.2f with the rules.",
        seconds,
        dense,
        sparse,
    )
    return PlacementPlan(
        key=key,
        model_type=model.config.model_type,
        blocks=profile.blocks(),
        rules={id: rule.to_dict() for id, rule in rules.items()},
        predictors=predictors,
        calibration_report=report,
        library_version=__version__,
    )


# Texts


def calibration_rows(model: SparseMixin, tokenizer: Any, options: SparseConfig) -> Tensor:
    """Token ids int64 [rows, tokens]: the user's texts, or the shipped prompts completed by the model itself. At least
    two rows.
    """
    positions = getattr(model.config, "max_position_embeddings", None) or ROW_TOKENS
    length = max(2, min(ROW_TOKENS, positions, options.calibration_tokens // 2))
    name, source = "calibration_texts", options.calibration_texts
    if source is None:
        stream = _self_generated(model, tokenizer, options, length)
    else:
        texts = read_texts(source, name=name, tokens=options.calibration_tokens)
        stream = token_stream(texts, tokenizer, vocabulary=vocabulary_size(model), name=name)
    stream = stream[: max(options.calibration_tokens, 2 * length)]
    if len(stream) < 2 * length:
        length = len(stream) // 2
    if length < 2:
        raise ValueError(f"calibration_texts: expected at least 4 tokens of text, got {len(stream)}")
    return stream[: len(stream) // length * length].view(-1, length)


def _self_generated(model: SparseMixin, tokenizer: Any, options: SparseConfig, length: int) -> Tensor:
    """One stream of tokens: prompts and what the model makes of them, sampled at temperature 0.7 from a fixed seed."""
    prompts = _prompts(model, tokenizer, options.calibration_seed)
    count = max(1, min(len(prompts), options.calibration_tokens // length))
    prompts = prompts[:count]
    start = min(length // 2, min(map(len, prompts)))
    ids = torch.tensor([prompt[-start:] for prompt in prompts])
    Profile(model).measure(ids)  # a model that computes NaN is named by layer here, before sampling stumbles over it
    new_tokens = max(1, min(math.ceil(options.calibration_tokens / count), length) - start)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.calibration_seed)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=0.7,
            top_k=50,
            top_p=1.0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
    return out.flatten()


def _prompts(model: SparseMixin, tokenizer: Any, seed: int) -> list[list[int]]:
    if tokenizer is not None:
        texts = json.loads(resources.files("hf_sparse").joinpath("prompts.json").read_text(encoding="utf-8"))
        vocabulary = vocabulary_size(model)
        ids = [tokenizer(text).input_ids for text in texts]
        if all(ids) and max(map(max, ids)) < vocabulary:
            return ids
        logger.warning(
            "The tokenizer does not fit the model's vocabulary of %d; calibrating from random first tokens.", vocabulary
        )
    else:
        logger.warning("There is no tokenizer beside the model: calibrating on what it makes of random first tokens.")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary_size(model), (32, 4), generator=generator).tolist()


# Measuring


class Profile:
    """What calibration measures of each block: how often a neuron is computed and how much it contributes."""

    def __init__(self, model: SparseMixin) -> None:
        self.model = model
        self.contribution: dict[BlockId, Tensor] = {}
        self.active: dict[BlockId, Tensor] = {}
        self.gates: dict[BlockId, list[Tensor]] = {}
        self.tokens = 0

    def measure(self, rows: Tensor) -> None:
        """Contribution of every neuron, dense: mean over tokens of |hidden| times the norm of its column of down, and
        for a KV group the mean norm of what it hands to the output projection.
        """
        handles = []
        for block in hybrid_blocks(self.model):
            self.contribution[block.id] = torch.zeros(block.neurons)
            if isinstance(block, HybridMLP):
                self.gates[block.id] = []
                block.observer = lambda x, gate, hidden, id=block.id: self._observe(id, gate, hidden)
            elif isinstance(block, HybridAttention):
                hook = lambda module, args, id=block.id: self._observe_heads(id, args[0])  # noqa: E731
                handles.append(block.output_linear.register_forward_pre_hook(hook))
        self._run(rows, "never")
        for handle in handles:
            handle.remove()
        for block in hybrid_blocks(self.model):
            if isinstance(block, HybridMLP):
                self.contribution[block.id] *= _column_norms(block)
            self.contribution[block.id] /= self.tokens

    def measure_rules(self, rows: Tensor) -> None:
        """How often each neuron is computed under the rules that the blocks have now."""
        ruled = [b for b in hybrid_blocks(self.model) if isinstance(b, HybridMLP) and b.rule.kind != "none"]
        self.active = {block.id: torch.ones(block.neurons) for block in hybrid_blocks(self.model)}
        for block in ruled:
            self.active[block.id].zero_()
            block.observer = lambda x, gate, hidden, id=block.id: self._count(id, hidden)
        if ruled:
            self._run(rows, "always")
        for block in ruled:
            self.active[block.id] /= self.tokens

    def _run(self, rows: Tensor, mode: Any) -> None:
        self.tokens = rows.numel()
        try:
            with skipping(mode):
                for batch in batches(rows, self.model):
                    self.model.base_model(batch, use_cache=False)
        finally:
            for block in hybrid_blocks(self.model):
                if isinstance(block, HybridMLP):
                    block.observer = None

    def _observe(self, id: BlockId, gate: Tensor, hidden: Tensor) -> None:
        size = hidden.abs().sum(0)
        if not bool(torch.isfinite(size).all()):
            raise ValueError(f"layer {id.layer}: the MLP computes NaN or infinite activations on the calibration text")
        self.contribution[id] += size
        values = gate.abs().flatten()
        step = max(1, values.numel() * 4 // SAMPLES_PER_LAYER)
        self.gates[id].append(values[::step].clone())

    def _observe_heads(self, id: BlockId, heads: Tensor) -> None:
        groups = heads.reshape(-1, len(self.contribution[id]), heads.shape[-1] // len(self.contribution[id]))
        self.contribution[id] += groups.float().norm(dim=-1).sum(0)

    def _count(self, id: BlockId, hidden: Tensor) -> None:
        self.active[id] += (hidden != 0).sum(0)

    def threshold(self, id: BlockId, share: float) -> float:
        """The |activated gate| that `share` of the sampled values lie below."""
        values = torch.cat(self.gates[id])
        return float(values.kthvalue(max(1, round(share * len(values)))).values) if share else 0.0

    def blocks(self) -> dict[BlockId, BlockProfile]:
        return {id: BlockProfile(impact, self.active[id]) for id, impact in self.contribution.items()}


def _column_norms(block: HybridMLP) -> Tensor:
    (shard,) = block.shards
    matrix = shard.matrices[block.names.down]
    norms = [matrix.narrow(i, min(256, matrix.rows - i)).dequantize().norm(dim=1) for i in range(0, matrix.rows, 256)]
    return torch.cat(norms)


# Rules


def _set_rules(mlps: dict[BlockId, HybridMLP], rules: dict[BlockId, SkipRule]) -> None:
    for id, block in mlps.items():
        block.rule = rules.get(id, SkipRule())
        if not rules:
            block.predictor = None


def _search_thresholds(
    model: SparseMixin,
    mlps: dict[BlockId, HybridMLP],
    profile: Profile,
    smooth: Sequence[BlockId],
    held_out: Tensor,
    limit: float,
) -> dict[BlockId, SkipRule]:
    """The largest share of neurons, the same in every layer, whose loss on held-out text stays within `limit`: a
    bisection, since the loss grows with the share.
    """

    def rules(share: float) -> dict[BlockId, SkipRule]:
        return {id: SkipRule("magnitude", profile.threshold(id, share)) if share else SkipRule() for id in smooth}

    best, too_much = 0, len(SKIPPED_SHARES)
    while too_much - best > 1:
        middle = (best + too_much) // 2
        _set_rules(mlps, rules(SKIPPED_SHARES[middle]))
        if perplexity(model, held_out, "always") <= limit:
            best = middle
        else:
            too_much = middle
    return rules(SKIPPED_SHARES[best])


@contextmanager
def _progress(model: SparseMixin, tokens: int) -> Iterator[Any]:
    """A bar that counts the tokens that pass through the model: those of the text, then about four times as many to
    measure on.
    """
    left = total = 5 * tokens
    with transformers_logging.tqdm(total=total, unit="token", leave=False) as bar:

        def count(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal left  # a bar that is switched off counts nothing
            step = min(output[0].shape[:2].numel(), left)
            left -= step
            bar.update(step)

        handle = model.base_model.register_forward_hook(count)
        try:
            yield bar
        finally:
            handle.remove()
