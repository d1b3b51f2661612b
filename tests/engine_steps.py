"""What the tests of the engine share: models of one's own, their steps, natively or by modules, and what to expect."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.modeling import HybridMLP, Predictor, SkipRule, hybrid_blocks, magnitude, use_pages
from hf_sparse.quantization import instruction_sets

QUICK = {"calibration_tokens": 64, "max_perplexity_increase": 0}
GREEDY = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}

needs_kernels = pytest.mark.skipif(set(instruction_sets()) == {"torch"}, reason="the kernels are not there")

Save = Callable[..., Path]


@functools.cache
def _loaded(directory: Path, **options: Any) -> Any:
    fields = {name: options.pop(name) for name in ("weight_dtype", "compute_dtype", "head_dtype") if name in options}
    quantization = WeightOnlyQuantConfig(group_size=32, **fields)  # which 48 columns do not fill
    return SparseAutoModelForCausalLM.from_pretrained(directory, quantization_config=quantization, **QUICK, **options)


def load(directory: Path, weight_dtype: str = "nf4", compute_dtype: str = "fp32", **options: Any) -> Any:
    """A model of one's own; loaded once."""
    return copy.deepcopy(_loaded(directory, weight_dtype=weight_dtype, compute_dtype=compute_dtype, **options))


@contextmanager
def through_modules(model: Any) -> Iterator[None]:
    """Hooks on a part of every MLP have everything computed by modules and their operators, one by one."""
    handles = [block.activation.register_forward_hook(lambda *_: None) for block in mlps(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def decoded(model: Any, ids: Tensor, prompt: int = 3, cache: Cache | None = None, **options: Any) -> Tensor:
    """Logits [rows, tokens after the prompt, vocabulary] of `ids` [rows, tokens]: the prompt at once, then one token at
    a time.
    """
    cache = DynamicCache() if cache is None else cache
    if prompt:
        model(input_ids=ids[:, :prompt], cache=cache, **options)
    steps = ids[:, prompt:].split(1, dim=1)
    return torch.cat([model(input_ids=step, cache=cache, **options).logits for step in steps], dim=1)


@torch.no_grad()
def at_once(reference: Any, ids: Tensor, prompt: int = 3) -> Tensor:
    return reference(ids).logits[:, prompt:]


def assert_near(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """`tolerance` is relative to the largest number."""
    error = (got.float() - expected.float()).abs().max()
    assert error <= tolerance * expected.abs().max() + 1e-6, f"{error / expected.abs().max():.2e} off"


def mlps(model: Any) -> list[HybridMLP]:
    return [block for block in hybrid_blocks(model) if isinstance(block, HybridMLP)]


def pages_of(model: Any, dtype: torch.dtype | None) -> DynamicCache:
    cache = DynamicCache()
    assert use_pages(cache, model.config.num_hidden_layers, dtype)
    return cache


def predictor_of(block: HybridMLP, seed: int) -> Predictor:
    generator = torch.Generator().manual_seed(seed)
    columns = block.projections[block.names.up].columns
    return Predictor(
        torch.randn(12, columns, generator=generator),
        torch.randn(block.neurons, 12, generator=generator),
        torch.randn(block.neurons, generator=generator),
    )


RULES: dict[str, tuple[SkipRule, bool, str]] = {  # rule, with a predictor, activation
    "magnitude": (magnitude(gate=0.02), False, "silu"),
    "everything": (magnitude(gate=0.0), False, "silu"),
    "nothing": (magnitude(gate=1e9), False, "silu"),
    "exact": (SkipRule("exact"), False, "relu"),
    "predicted": (SkipRule("predicted"), True, "relu"),
    "predicted, silu": (SkipRule("predicted"), True, "silu"),
    "predicted and magnitude": (magnitude(gate=0.02), True, "silu"),
}


def set_rule(model: Any, name: str) -> None:
    rule, with_predictor, _ = RULES[name]
    for number, block in enumerate(mlps(model)):
        block.predictor = predictor_of(block, number) if with_predictor else None
        block.rule = rule
