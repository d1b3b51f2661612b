"""Calibration: texts in; activation profile, skip rules and predictors out.

Half of the tokens train (profile, thresholds, predictors), the other half is held out and decides how much may be
skipped: perplexity stays within `max_perplexity_increase` of the same quantized weights computed densely.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from hf_sparse.modeling import BlockId, HybridBlock, HybridMLP, Place, SkipRule, has_exact_zeros, hybrid_blocks

from . import __version__
from .activation_profile import ActivationProfile, row_bytes, thresholds
from .config import SparseConfig
from .evaluation import perplexity, vocabulary_size
from .head_prediction import Foretold, foretell_heads
from .log import logger
from .model import SparseMixin, decoder_of
from .plan import BlockProfile, PlacementPlan, PlanKey, PlannedPredictor
from .plan_store import keep_aside
from .predictor_training import train_predictors
from .probing import probed
from .texts import read_texts, token_stream

ROW_TOKENS = 256
TARGET_TOLERANCE = 0.02  # of a share
TEXT_ASIDE, PROFILE_ASIDE = "calibration_text.safetensors", "calibration_profile.safetensors"


def calibrate(
    model: SparseMixin, tokenizer: Any, options: SparseConfig, key: PlanKey, directory: Path | None = None
) -> PlacementPlan:
    """Measures `model`, whose blocks lie whole on the CPU, and returns its plan; leaves its rules and predictors off.
    What it measures is kept in `directory` meanwhile, so that a killed calibration goes on there.

    Raises ValueError where the texts are too short, or where the model computes NaN.
    """
    began = time.perf_counter()
    logger.info(
        "Calibrating on %d tokens, which pass through the model about six times: this can take minutes, and is "
        "done once for this checkpoint and these settings.",
        options.calibration_tokens,
    )
    mlps = {block.id: block for block in hybrid_blocks(model) if isinstance(block, HybridMLP)}
    with torch.no_grad(), _progress(model, options.calibration_tokens) as progress:
        progress.set_description("Calibrating (text)")
        rows, generated = calibration_rows(model, tokenizer, options, directory, key.checkpoint)
        training, held_out = rows[0::2], rows[1::2]
        progress.set_description("Calibrating (profile)")
        profile = ActivationProfile(model)
        aside = None if directory is None else directory / PROFILE_ASIDE
        profile.measure(training, generated[0::2], aside, key.checkpoint)
        dense = perplexity(model, held_out, "never")
        _check_dense(dense, vocabulary_size(model))
        progress.set_description("Calibrating (rules)")
        rules = {id: SkipRule("exact") for id, block in mlps.items() if has_exact_zeros(block)}
        predictors: dict[BlockId, PlannedPredictor] = {}
        limit = dense * (1 + options.max_perplexity_increase)
        search = Search(model, profile, rules, held_out)
        if (wanted := options.target_sparsity) is not None:
            rules, predictors = search.run(lambda perplexity, unread: unread <= wanted, training, saves=False)
        elif options.max_perplexity_increase > 0:
            rules, predictors = search.run(lambda perplexity, unread: perplexity <= limit, training, saves=True)
            if exact := {id: mlps[id] for id in rules if rules[id].kind == "exact"}:
                progress.set_description("Calibrating (predictors)")
                _set_rules(model, rules, predictors)
                tell = lambda text: progress.set_description(f"Calibrating ({text})")  # noqa: E731
                trained, predicted = train_predictors(
                    model, exact, training, held_out, limit, options.calibration_seed, tell
                )
                rules |= predicted
                predictors |= trained
        rules |= {id: SkipRule() for id in mlps if id not in rules}
        _set_rules(model, rules, predictors)
        model.reset_active_fraction()
        with _counting(model) as counts:
            sparse = perplexity(model, held_out, "always")
        read = model.read_share() or 1.0
        if wanted is not None and abs(1 - read - wanted) > TARGET_TOLERANCE:
            logger.warning(
                "target_sparsity: asked %.0f%%, but the rules leave %.0f%% of the weights of the blocks unread: layers "
                "that have exact zeros keep the exact rule, and weights that are not packed are read whole.",
                100 * wanted,
                100 * (1 - read),
            )
        report: dict[str, Any] = {
            "tokens": rows.numel(),
            "held_out_tokens": held_out.numel(),
            "seconds": round(time.perf_counter() - began, 2),
            "dense_perplexity": dense,
            "sparse_perplexity": sparse,
            "max_perplexity_increase": None if options.target_sparsity else options.max_perplexity_increase,
            "target_sparsity": options.target_sparsity,
            "bytes_read_share": read,
            "curve": search.curve(),
            "read_shares": {
                str(block.id): round(block.read_bytes() / block.weight_bytes, 4) for block in hybrid_blocks(model)
            },
            "quantiles": _quantiles(profile),
            "heads": _heads(profile),
        }
        blocks = {
            block.id: BlockProfile(
                profile.impact(block),
                counts[block.id] / held_out.numel()
                if block.id in mlps and rules[block.id].kind != "none"
                else torch.ones(block.neurons),
            )
            for block in hybrid_blocks(model)
        }
        _set_rules(model, {}, {})
    if directory is not None:
        with suppress(OSError):  # where it could not be written it is not there
            (directory / TEXT_ASIDE).unlink()
    logger.info(
        "Calibrated in %.0f s: perplexity on the calibration text %.2f dense, %.2f with the rules (%+.2f%%), which "
        "leave %.0f%% of the weights of the blocks unread.",
        report["seconds"],
        dense,
        sparse,
        100 * (sparse / dense - 1),
        100 * (1 - read),
    )
    return PlacementPlan(
        key=key,
        model_type=model.config.model_type,
        blocks=blocks,
        rules=rules,
        predictors=predictors,
        calibration_report=report,
        library_version=__version__,
    )


def _check_dense(perplexity: float, vocabulary: int) -> None:
    """Raises ValueError for one that is not finite; warns of a model that knows nothing of its text."""
    if not math.isfinite(perplexity):
        raise ValueError(
            f"the model's perplexity on its calibration text is {perplexity}: its weights or activations are broken"
        )
    if perplexity > vocabulary:
        logger.warning(
            "The dense model's perplexity on the calibration text is %.4g, worse than guessing among its %d tokens: "
            "model or tokenizer are broken, or the text is nothing that the model knows. Its rules are worth no more.",
            perplexity,
            vocabulary,
        )


@contextmanager
def _counting(model: SparseMixin) -> Iterator[dict[BlockId, Tensor]]:
    """For each MLP, how many of the tokens that pass meanwhile every neuron's rows of up are read for: float32
    [neurons].
    """
    mlps = [block for block in hybrid_blocks(model) if isinstance(block, HybridMLP)]
    counts = {block.id: torch.zeros(block.neurons) for block in mlps}

    def look(block: HybridBlock, place: Place, values: Tensor) -> Tensor:
        if place == "hidden":
            counts[block.id] += (values != 0).sum(0)
        return values

    with probed(mlps, look):
        yield counts


def _quantiles(profile: ActivationProfile) -> dict[str, list[float]]:
    return {
        f"{block.id}.{place}": [float(f"{q:.4g}") for q in profile.at(block.id, place).quantiles]
        for block, place in profile.places()
    }


def _heads(profile: ActivationProfile) -> dict[str, list[float]]:
    """Of each attention block, what its query heads hand to the output projection."""
    heads = getattr(profile.model.config, "num_attention_heads", None)
    if heads is None:
        return {}
    blocks = [block for block in hybrid_blocks(profile.model) if block.id.kind == "attention"]
    return {str(b.id): [float(f"{v:.4g}") for v in profile.heads(b, b.width_of("output") // heads)] for b in blocks}


# Texts


def calibration_rows(
    model: SparseMixin, tokenizer: Any, options: SparseConfig, directory: Path | None, checkpoint: str = ""
) -> tuple[Tensor, Tensor]:
    """Token ids int64 [rows, tokens], at least two rows: the user's texts, or the shipped prompts completed by the
    model itself; and which of them a model wrote, bool. The latter are kept in `directory`, for a calibration of the
    same `checkpoint` that is killed.
    """
    positions = getattr(model.config, "max_position_embeddings", None) or ROW_TOKENS
    length = max(2, min(ROW_TOKENS, positions, options.calibration_tokens // 2))
    name, source = "calibration_texts", options.calibration_texts
    if source is None:
        settings = options.calibration_settings() | {"checkpoint": checkpoint}
        stream, generated = _kept_aside(directory, settings, lambda: _self_generated(model, tokenizer, options, length))
    else:
        texts = read_texts(source, name=name, tokens=options.calibration_tokens)
        stream = token_stream(texts, tokenizer, vocabulary=vocabulary_size(model), name=name)
        generated = torch.zeros_like(stream, dtype=torch.bool)
    stream = stream[: max(options.calibration_tokens, 2 * length)]
    if len(stream) < 2 * length:
        length = len(stream) // 2
    if length < 2:
        raise ValueError(f"calibration_texts: expected at least 4 tokens of text, got {len(stream)}")
    whole = len(stream) // length * length
    return stream[:whole].view(-1, length), generated[:whole].view(-1, length)


def _kept_aside(directory: Path | None, of: dict[str, Any], make: Callable[[], Any]) -> tuple[Tensor, Tensor]:
    """What `make` gives, or gave to a calibration of these settings that was killed."""
    settings = json.dumps(of, sort_keys=True)
    file = None if directory is None else directory / TEXT_ASIDE
    if file is not None and file.exists():
        try:
            with safe_open(file, "pt") as kept:
                if (kept.metadata() or {}).get("settings") == settings:
                    logger.info("Calibration goes on with the text in %s", file)
                    return kept.get_tensor("stream"), kept.get_tensor("generated")
        except (OSError, SafetensorError) as error:
            logger.warning("The text of an earlier calibration in %s cannot be read: %s", file, error)
    stream, generated = make()
    if file is not None:
        keep_aside(file, {"stream": stream, "generated": generated}, {"settings": settings}, "text")
    return stream, generated


def _self_generated(model: SparseMixin, tokenizer: Any, options: SparseConfig, length: int) -> tuple[Tensor, Tensor]:
    """One stream of tokens: prompts and what the model makes of them, sampled at temperature 0.7 from a fixed seed; and
    which the model made.
    """
    prompts = _prompts(model, tokenizer, options.calibration_seed)
    count = max(1, min(len(prompts), options.calibration_tokens // length))
    prompts = prompts[:count]
    start = min(length // 2, min(map(len, prompts)))
    ids = torch.tensor([prompt[-start:] for prompt in prompts])
    if isinstance(model, SparseMixin):
        # a model that computes NaN is named by layer here, before sampling stumbles over it
        ActivationProfile(model).measure(ids[:2], torch.zeros_like(ids[:2], dtype=torch.bool))
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
    made = torch.zeros_like(out, dtype=torch.bool)
    made[:, start:] = True
    return out.flatten(), made.flatten()


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


# Rules


def _set_rules(model: SparseMixin, rules: dict[BlockId, SkipRule], predictors: dict[BlockId, PlannedPredictor]) -> None:
    for block in hybrid_blocks(model):
        block.rule = rules.get(block.id, SkipRule())
        planned = predictors.get(block.id)
        block.predictor = None if planned is None else planned.build(torch.device("cpu"))


class Search:
    """Finds the level of `activation_profile.thresholds` that the budget allows; exact rules stay beside them."""

    def __init__(
        self, model: SparseMixin, profile: ActivationProfile, exact: dict[BlockId, SkipRule], held_out: Tensor
    ) -> None:
        self.model, self.profile, self.exact, self.held_out = model, profile, exact, held_out
        self.tried: dict[float, tuple[float, float]] = {}  # level -> perplexity, share of the bytes left unread
        self.heads: dict[BlockId, Foretold] = {}

    def run(
        self, fits: Callable[[float, float], bool], training: Tensor, *, saves: bool
    ) -> tuple[dict[BlockId, SkipRule], dict[BlockId, PlannedPredictor]]:
        """What `find` gives; with heads left out too, where that pays at the level found without, and then turns out to
        be better: leaves more bytes unread (`saves`), or as many at a lower perplexity.
        """
        level = self.find(fits)
        if level == 0:
            return self.rules(level), {}
        perplexity, unread = self.cost(level)
        _set_rules(self.model, {}, {})
        foretold = foretell_heads(self.model, self.profile, training, self.held_out, level)
        exact = {id.layer for id in self.exact}
        self.heads = {id: found for id, found in foretold.items() if id.layer not in exact}
        if self.predictors(level):
            self.tried = {}
            level_with_heads = self.find(fits, level)
            found, unread_too = self.cost(level_with_heads)
            if unread_too > unread if saves else found < perplexity and unread_too > unread - TARGET_TOLERANCE / 4:
                level = level_with_heads
            else:
                self.heads = {}
        return self.rules(level), self.predictors(level)

    def predictors(self, level: float) -> dict[BlockId, PlannedPredictor]:
        """Of heads."""
        found = {id: foretold.at(level) for id, foretold in self.heads.items()} if level > 0 else {}
        return {id: planned for id, planned in found.items() if planned is not None}

    def rules(self, level: float) -> dict[BlockId, SkipRule]:
        if level == 0:
            return dict(self.exact)
        layers = {id.layer for id in self.exact}  # whose neurons are exactly zero: a predictor serves them
        found = {id: b for id, b in thresholds(self.profile, level).items() if id.layer not in layers}
        rules = {id: SkipRule("magnitude", below) for id, below in found.items()}
        for id in self.predictors(level):
            rules[id] = SkipRule("predicted", {"output": found[id]["output"]})
        return self.exact | rules

    def cost(self, level: float) -> tuple[float, float]:
        """Held-out perplexity, all tokens sparsified, and the share of the blocks' bytes left unread."""
        if level not in self.tried:
            _set_rules(self.model, self.rules(level), self.predictors(level))
            self.model.reset_active_fraction()
            found = perplexity(self.model, self.held_out, "always")
            self.tried[level] = found, 1 - (self.model.read_share() or 1.0)
        return self.tried[level]

    def curve(self) -> list[list[float]]:
        """Of every level tried: share of the blocks' bytes left unread, perplexity."""
        return sorted([round(unread, 6), found] for found, unread in self.tried.values() if math.isfinite(found))

    def find(self, fits: Callable[[float, float], bool], start: float | None = None) -> float:
        """The highest level at which `fits(perplexity, share unread)` holds, within 2%: both grow with it."""
        low, high, level = 0.0, math.inf, self._start() if start is None else start
        if self.rules(level).keys() == self.exact.keys():
            return 0.0  # every layer has exact zeros
        while high == math.inf or high > 1.02 * low:
            if fits(*self.cost(level)):
                low = level
            else:
                high = level
            if low == 0 and high < 1e-3 * self._start():
                return 0.0
            level = low * 1.5 if high == math.inf else high / 1.5 if low == 0 else math.sqrt(low * high)
            if level > 1e6 * self._start():
                return low  # nothing left to leave out
        return low

    def _start(self) -> float:
        """The level at which the mean entry of a place costs what it saves."""
        levels = []
        for block, place in self.profile.places():
            if saved := row_bytes(block, place):
                found = self.profile.at(block.id, place)
                levels.append(float((found.mean * found.sensitivity).mean()) / math.sqrt(saved))
        return sorted(levels)[len(levels) // 2] / 3 or 1e-6


@contextmanager
def _progress(model: SparseMixin, tokens: int) -> Iterator[Any]:
    """A bar that counts the tokens that pass through the model: those of the text, then about five times as many to
    measure on.
    """
    left = total = 6 * tokens
    with transformers_logging.tqdm(total=total, unit="token", leave=False) as bar:

        def count(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal left  # a bar that is switched off counts nothing
            step = min(output[0].shape[:2].numel(), left)
            left -= step
            bar.update(step)

        handle = decoder_of(model).register_forward_hook(count)
        try:
            yield bar
        finally:
            handle.remove()
