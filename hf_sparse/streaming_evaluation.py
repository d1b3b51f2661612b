"""Perplexity over a long text, one token at a time, of caches that forget: StreamingLLM's protocol (Xiao et al. 2024,
section 4.1), beside the whole text and beside a window of tokens that is computed anew for every token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache
from transformers.utils import logging as transformers_logging

from hf_sparse.modeling import StreamingOptions, max_positions, skipping

from .evaluation import exponential, json_values, text_stream, vocabulary_size, weights_of

STRETCH = 1000  # tokens of which a running perplexity is the mean
WINDOWS_AT_ONCE = 8


@dataclass(frozen=True)
class Curve:
    """What one way to remember gave: `losses`, the negative log likelihoods, in nats, of the tokens at `places`."""

    name: str
    places: tuple[int, ...]
    losses: tuple[float, ...]
    seconds: float

    def perplexity(self, start: int = 0, stop: int | None = None) -> float:
        """Of the tokens at places start .. stop - 1; NaN where there is none."""
        chosen = [
            x for at, x in zip(self.places, self.losses, strict=True) if at >= start and (stop is None or at < stop)
        ]
        return exponential(sum(chosen) / len(chosen)) if chosen else math.nan


@dataclass(frozen=True)
class StreamingEvaluation:
    """What `evaluate_streaming` found; rich prints it as a table."""

    texts: str
    tokens: int
    ctx_size: int
    n_discard: int
    weights: str
    curves: tuple[Curve, ...]

    def of(self, name: str) -> Curve:
        return next(curve for curve in self.curves if curve.name == name)

    def _beside_window(self, curve: Curve) -> float:
        """Its perplexity by that of the window that is computed anew, on tokens that both predicted; NaN without."""
        window = next((c for c in self.curves if c.name == "window"), None)
        if window is None or curve is window:
            return math.nan
        of_curve = dict(zip(curve.places, curve.losses, strict=True))
        pairs = [(of_curve[at], x) for at, x in zip(window.places, window.losses, strict=True) if at in of_curve]
        return exponential(sum(a - b for a, b in pairs) / len(pairs)) if pairs else math.nan

    def to_dict(self) -> dict[str, Any]:
        """JSON values: the table's figures and the running perplexities. A number that is not finite, which JSON has no
        word for, is a text that float() reads.
        """
        rows = [
            {
                "name": curve.name,
                "tokens": len(curve.losses),
                "perplexity": curve.perplexity(),
                "first_quarter": curve.perplexity(*self.quarter(0)),
                "last_quarter": curve.perplexity(*self.quarter(3)),
                "by_window": self._beside_window(curve),
                "seconds": curve.seconds,
                "running": [[at, value] for at, value in self.running(curve)],
            }
            for curve in self.curves
        ]
        fields = {field: getattr(self, field) for field in ("texts", "tokens", "ctx_size", "n_discard", "weights")}
        result: dict[str, Any] = json_values({**fields, "rows": rows})
        return result

    def quarter(self, which: int) -> tuple[int, int]:
        """Places of a quarter of the text, after as many tokens as the cache holds."""
        rest = self.tokens - self.ctx_size
        return self.ctx_size + rest * which // 4, self.ctx_size + rest * (which + 1) // 4

    def running(self, curve: Curve) -> list[tuple[int, float]]:
        """(place, perplexity of the STRETCH tokens before it), as far as the curve goes."""
        step = max(1, curve.places[-1] // len(curve.places))
        ends = [end for end in range(STRETCH, self.tokens + 1, STRETCH // 2) if end <= curve.places[-1] + step]
        found = [(end, curve.perplexity(end - STRETCH, end)) for end in ends]
        return [(end, value) for end, value in found if not math.isnan(value)]

    def __rich__(self) -> Table:
        options = f"ctx_size={self.ctx_size}, n_discard={self.n_discard}"
        title = f"{self.tokens:,} tokens of {self.texts}, one at a time; {options}"
        table = Table(
            title=title, caption=f"weights: {self.weights}, no rules; by window: on the tokens that both predicted"
        )
        for heading in ("cache", "tokens", "perplexity", "by window", "first 1/4", "last 1/4", "tokens/s"):
            table.add_column(heading, justify="left" if heading == "cache" else "right", no_wrap=True)
        for curve in self.curves:
            figures = (curve.perplexity(), curve.perplexity(*self.quarter(0)), curve.perplexity(*self.quarter(3)))
            whole, first, last = ("" if math.isnan(x) else f"{x:.2f}" if x < 1000 else f"{x:.3g}" for x in figures)
            by_window = self._beside_window(curve)
            beside = "" if math.isnan(by_window) else f"{by_window:.3f} x"
            speed = f"{len(curve.losses) / curve.seconds:.0f}"
            table.add_row(curve.name, f"{len(curve.losses):,}", whole, beside, first, last, speed)
        return table

    def plot(self, file: Path) -> None:
        """Writes the running perplexities as a picture. Raises ImportError without matplotlib."""
        try:
            from matplotlib.figure import Figure
            from matplotlib.ticker import LogFormatter
        except ImportError as error:
            raise ImportError("plot: needs matplotlib: pip install 'hf_sparse[plots]'") from error
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        for curve in self.curves:
            points = self.running(curve)
            axes.plot([at for at, _ in points], [value for _, value in points], label=curve.name)
        axes.set(
            xlabel="token",
            ylabel=f"perplexity of the last {STRETCH:,} tokens",
            title=f"Running perplexity, cache of {self.ctx_size} tokens",
            yscale="log",
        )
        for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            axis(LogFormatter(minor_thresholds=(2, 1)))  # 20, not 2 x 10^1
        axes.grid(alpha=0.3, which="both")
        axes.legend()
        aside = file.with_name(f".{file.name}")
        figure.savefig(aside, format=file.suffix.removeprefix(".") or "png", dpi=150)
        aside.replace(file)


@torch.no_grad()
def evaluate_streaming(
    model: Any,
    tokenizer: Any,
    texts: Any = None,
    *,
    tokens: int = 20_000,
    ctx_size: int = 256,
    n_keep: Sequence[int] = (0, 1, 4),
    n_discard: int = -1,
    window_step: int = 16,
    dense: bool = True,
) -> StreamingEvaluation:
    """Feeds one text token by token, rules off, to caches of `ctx_size` tokens with each of `n_keep` sinks; as far as
    the model has positions, to one that keeps all (`dense`); and, at one token in `window_step` (0: none), computes the
    last `ctx_size` - 1 tokens anew.

    Args:
        model: a model that `SparseAutoModelForCausalLM` loaded.
        texts: as in `evaluate`. tokens: how many to read.

    Raises ValueError for options that do not go together and texts that are too short; OSError, ImportError for texts
    that cannot be read.
    """
    every = [StreamingOptions(ctx_size, keep, n_discard) for keep in n_keep]
    caches = [model.streaming_cache(options) for options in every]  # whose errors are said before anything is computed
    if type(tokens) is not int or tokens <= ctx_size:
        raise ValueError(f"tokens: expected more than ctx_size={ctx_size}, got {tokens!r}")
    if type(window_step) is not int or window_step < 0:
        raise ValueError(f"window_step: expected 0 or more, got {window_step!r}")
    text, stream = text_stream(tokenizer, texts, tokens, vocabulary_size(model))
    if len(stream) < tokens:
        raise ValueError(f"texts: expected at least {tokens} tokens, got {len(stream)}")
    ids = stream[:tokens].to(model.device)
    ways: list[tuple[str, int, Callable[[Any], tuple[list[int], list[float]]]]] = []
    if dense:
        seen = min(tokens, max_positions(model.config) or tokens)
        ways.append(("dense", seen, lambda bar: _one_by_one(model, ids[:seen], DynamicCache(config=model.config), bar)))
    if window_step:
        ways.append(("window", tokens, lambda bar: _windows(model, ids, ctx_size, window_step, bar)))
    for options, cache in zip(every, caches, strict=True):
        name = f"{options.n_keep} sink{'' if options.n_keep == 1 else 's'}"
        ways.append((name, tokens, lambda bar, cache=cache: _one_by_one(model, ids, cache, bar)))  # type: ignore[misc]
    curves = []
    total = sum(count for _, count, _ in ways)
    with skipping("never"), transformers_logging.tqdm(total=total, unit="token", leave=False) as bar:
        for name, _, run in ways:
            bar.set_description(f"Streaming ({name})")
            began = time.perf_counter()
            places, losses = run(bar)
            curves.append(Curve(name, tuple(places), tuple(losses), time.perf_counter() - began))
    return StreamingEvaluation(text, tokens, ctx_size, n_discard, weights_of(model), tuple(curves))


def _one_by_one(model: Any, ids: Tensor, cache: Any, bar: Any) -> tuple[list[int], list[float]]:
    """Of each token but the first, given those that `cache` still has."""
    losses = []
    for place in range(len(ids) - 1):
        logits = model.native_logits(ids[None, place : place + 1], cache)
        if logits is None:
            inputs = model.prepare_inputs_for_generation(ids[None, : place + 1], next_sequence_length=1, cache=cache)
            logits = model(**inputs).logits[:, -1].float()
        losses.append(float(logits[0].logsumexp(0) - logits[0, ids[place + 1]]))
        bar.update()
    return list(range(1, len(ids))), losses


def _windows(model: Any, ids: Tensor, ctx_size: int, step: int, bar: Any) -> tuple[list[int], list[float]]:
    """Of every `step`-th token, given the `ctx_size` - 1 tokens before it and nothing else."""
    places = list(range(ctx_size, len(ids), step))
    losses: list[float] = []
    for start in range(0, len(places), WINDOWS_AT_ONCE):
        some = places[start : start + WINDOWS_AT_ONCE]
        rows = torch.stack([ids[at - ctx_size + 1 : at] for at in some])
        logits = model(input_ids=rows, use_cache=False, logits_to_keep=1).logits[:, -1].float()
        losses += (logits.logsumexp(1) - logits.gather(1, ids[some][:, None])[:, 0]).tolist()
        bar.update(len(some) * step)
    return places, losses
