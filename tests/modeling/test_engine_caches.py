"""Decode steps in one native call on caches of every kind, and what may happen to a cache between them."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.cache_utils import DynamicCache, StaticCache

from engine_steps import Save, assert_near, at_once, decoded, load, needs_kernels, pages_of, through_modules
from hf_sparse.modeling import PagedCacheLayer
from tiny_models import plain_twin, prompt_ids

pytestmark = needs_kernels


@pytest.mark.parametrize("case", ["llama", "gemma2"])
@pytest.mark.parametrize(("cache_dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2), ("int8", 5e-2)])
def test_cache_dtypes(case: str, cache_dtype: str, tolerance: float, saved: Save, native_steps: list[int]) -> None:
    model = load(saved(case), cache_dtype=cache_dtype)
    ids = prompt_ids(1, 100)
    cache = pages_of(model, model.cache_dtype)
    steps = decoded(model, ids, cache=cache)
    assert len(native_steps) == 97
    assert {layer.dtype for layer in cache.layers} == {model.cache_dtype}
    assert_near(steps, at_once(plain_twin(model), ids), tolerance)
    with through_modules(model):
        others = pages_of(model, model.cache_dtype)
        # A key or value that lies between two that a page can hold may be stored as either.
        assert_near(steps, decoded(model, ids, cache=others), 1e-5 if cache_dtype == "fp32" else 5e-3)
    assert len(native_steps) == 97
    for mine, other in zip(cache.layers, others.layers, strict=True):
        assert_near(mine.keys, other.keys, tolerance)
        assert_near(mine.values, other.values, tolerance)


@pytest.mark.parametrize("cache_dtype", ["fp32", "bf16", "int8"])
def test_one_step_on_the_same_pages_equals_modules(cache_dtype: str, saved: Save, native_steps: list[int]) -> None:
    model = load(saved("qwen3"), cache_dtype=cache_dtype)
    ids = prompt_ids(1, 300)
    cache = pages_of(model, model.cache_dtype)
    with torch.no_grad(), through_modules(model):
        model(input_ids=ids[:, :299], cache=cache)
        other = copy.deepcopy(cache)
        expected = model(input_ids=ids[:, 299:], cache=other).logits
    assert_near(model(input_ids=ids[:, 299:], cache=cache).logits, expected, 1e-5 if cache_dtype == "fp32" else 1e-3)
    assert native_steps == [299]


def test_a_cache_goes_to_and_fro_between_native_code_and_modules(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("qwen2"))
    ids = prompt_ids(1, 140)
    expected = at_once(plain_twin(model), ids, 0)
    cache = DynamicCache()
    parts = [decoded(model, ids[:, :40], prompt=0, cache=cache)]  # an empty cache is left to modules
    assert native_steps == list(range(1, 40))
    with through_modules(model):
        parts.append(decoded(model, ids[:, 40:70], prompt=0, cache=cache))
    assert len(native_steps) == 39
    with torch.no_grad():
        parts.append(model(input_ids=ids[:, 70:130], cache=cache).logits)  # several tokens
    parts.append(decoded(model, ids[:, 130:], prompt=0, cache=cache))
    assert native_steps[39:] == list(range(130, 140))
    assert_near(torch.cat(parts, dim=1), expected)
    assert all(isinstance(layer, PagedCacheLayer) for layer in cache.layers)


def test_a_cropped_cache_is_continued(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    ids, others = prompt_ids(1, 300), prompt_ids(1, 300, seed=9)
    expected = at_once(plain_twin(model), ids)
    cache = DynamicCache()
    decoded(model, torch.cat((ids[:, :200], others[:, 200:]), dim=1), cache=cache)
    cache.crop(-100)
    assert cache.get_seq_length() == 200
    assert_near(decoded(model, ids[:, 200:], prompt=0, cache=cache), expected[:, 197:])
    assert native_steps == [*range(3, 300), *range(200, 300)]


def test_a_reordered_cache_of_one_row_and_a_reset_one(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(1, 20)
    cache = DynamicCache()
    first = decoded(model, ids[:, :10], cache=cache)
    cache.reorder_cache(torch.tensor([0]))
    rest = decoded(model, ids[:, 10:], prompt=0, cache=cache)
    expected = at_once(plain_twin(model), ids)
    assert_near(torch.cat((first, rest), dim=1), expected)
    cache.reset()
    assert_near(decoded(model, ids, cache=cache), expected)
    assert len(native_steps) == 2 * 17


def test_two_caches_take_turns(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    ids = [prompt_ids(1, 70, seed=seed) for seed in (1, 2)]
    caches, parts = [DynamicCache(), DynamicCache()], [[], []]
    for which in (0, 1):
        decoded(model, ids[which][:, : 4 + which], prompt=3, cache=caches[which])
    for at in range(4, 69):
        for which in (0, 1):
            step = ids[which][:, at + which : at + which + 1]
            with torch.no_grad():
                parts[which].append(model(input_ids=step, cache=caches[which]).logits)
    for which in (0, 1):
        expected = at_once(plain_twin(model), ids[which], 4 + which)[:, : len(parts[which])]
        assert_near(torch.cat(parts[which], dim=1)[:, : expected.shape[1]], expected)
    assert len(native_steps) == 1 + 2 + 2 * 65


def test_a_static_cache_is_left_to_modules(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(1, 20)
    cache = StaticCache(config=model.config, max_cache_len=32)
    assert_near(decoded(model, ids, cache=cache), at_once(plain_twin(model), ids))
    assert not native_steps


def test_a_cache_of_sliding_windows_that_dropped_tokens_is_left_to_modules(
    saved: Save, native_steps: list[int]
) -> None:
    model = load(saved("mistral"))
    ids = prompt_ids(1, 20)
    cache = DynamicCache(config=model.config)
    assert_near(decoded(model, ids, prompt=12, cache=cache), at_once(plain_twin(model), ids, 12))
    assert not native_steps and not any(isinstance(layer, PagedCacheLayer) for layer in cache.layers)
    assert_near(decoded(model, ids, cache=DynamicCache(config=model.config)), at_once(plain_twin(model), ids))
    assert len(native_steps) == 17
