"""generate() with ctx_size, n_keep and n_discard."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from streaming_reference import Reference, reference_greedy
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, TextStreamer
from transformers.cache_utils import DynamicCache

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.log import warn_once
from hf_sparse.modeling import HybridMLP, SimulatedTier, StreamingCache, Tier, hybrid_blocks
from tiny_models import plain_twin, prompt_ids, save_checkpoint, save_tokenizer

QUICK = {"calibration_tokens": 64, "max_perplexity_increase": 0}
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
STREAM = {"ctx_size": 24, "n_keep": 4, "n_discard": -1}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def of(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp(case)
            save_checkpoint(case, made[case])  # with 160 positions
        return made[case]

    return of


def load(directory: Path, **options: Any) -> Any:
    quantization = WeightOnlyQuantConfig(group_size=32, compute_dtype="fp32", head_dtype=None)
    return SparseAutoModelForCausalLM.from_pretrained(directory, quantization_config=quantization, **QUICK, **options)


@pytest.fixture(scope="module")
def model(directories: Any) -> Any:
    return load(directories("llama"))


def streamed(model: Any, ids: Tensor, new_tokens: int = 60, **options: Any) -> Tensor:
    result: Tensor = model.generate(ids, max_new_tokens=new_tokens, **GREEDY, **(STREAM | options))
    return result


@pytest.mark.parametrize("n_discard", [-1, 1, 7])
@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_a_thousand_tokens_as_with_keys_turned_anew_at_every_step(directories: Any, case: str, n_discard: int) -> None:
    model = load(directories(case))
    twin, ids = plain_twin(model), prompt_ids(1, 9)
    expected = reference_greedy(twin, ids, 1000, Reference(twin, 40, 4, n_discard))
    found = streamed(model, ids, 1000, ctx_size=40, n_discard=n_discard)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("case", ["qwen2", "falcon-7b", "bloom", "gpt_neox"])
@pytest.mark.parametrize("length", [3, 24, 25, 90])
def test_prompts_of_any_length(directories: Any, case: str, length: int) -> None:
    """Shorter than the sinks, as long as the cache, longer: in pieces as if token by token."""
    model = load(directories(case))
    twin, ids = plain_twin(model), prompt_ids(1, length)
    expected = reference_greedy(twin, ids, 30, Reference(twin, 24, 4, -1))
    assert torch.equal(streamed(model, ids, 30), expected)


def test_one_warning_says_that_a_prompt_is_read_in_pieces(model: Any, caplog: Any) -> None:
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="hf_sparse"):
        streamed(model, prompt_ids(1, 24), 3)
        assert not caplog.text
        streamed(model, prompt_ids(1, 200), 3)  # beyond the model's 160 positions too
        streamed(model, prompt_ids(1, 200), 3)
    assert (
        caplog.text.count("200 tokens are more than ctx_size=24, n_keep=4, n_discard=-1: they are read in pieces") == 1
    )
    assert caplog.text.count("\n") == 1, caplog.text


@pytest.mark.parametrize("n_discard", [-1, 1, 7])
@pytest.mark.parametrize("case", ["llama", "bloom", "opt", "gemma2", "falcon-rw"])
def test_rows_of_a_batch_equal_their_solo_runs(directories: Any, case: str, n_discard: int) -> None:
    model = load(directories(case))
    rows = [prompt_ids(1, length, seed=length) for length in (5, 31, 23, 70)]
    longest = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (longest - row.shape[1], 0)) for row in rows])
    found = streamed(model, ids, attention_mask=mask, n_discard=n_discard)[:, longest:]
    for row, text in zip(rows, found, strict=True):
        assert torch.equal(streamed(model, row, n_discard=n_discard)[0, row.shape[1] :], text)


@pytest.mark.parametrize("case", ["opt", "opt-350m"])
def test_learned_positions_are_evaluated_again(directories: Any, case: str) -> None:
    """Beside a plain model that computes what is kept, and nothing else, from nothing whenever some has gone."""
    model = load(directories(case))
    twin, ids = plain_twin(model), prompt_ids(1, 9)
    text, kept, cache = ids, ids, DynamicCache(config=twin.config)
    for _ in range(60):
        with torch.no_grad():
            logits = twin(kept[:, cache.get_seq_length() :], past_key_values=cache).logits[:, -1]
        token = logits.argmax(-1, keepdim=True)
        if kept.shape[1] == 24:
            kept = torch.cat((kept[:, :4], kept[:, 14:]), dim=1)
            cache = DynamicCache(config=twin.config)
        kept, text = torch.cat((kept, token), dim=1), torch.cat((text, token), dim=1)
    result = model.generate(ids, max_new_tokens=60, return_dict_in_generate=True, **GREEDY, **STREAM)
    assert torch.equal(result.sequences, text)
    long = prompt_ids(1, 200)  # more than there are positions
    config = GenerationConfig(max_new_tokens=3, **GREEDY, **STREAM)
    assert torch.equal(model.generate(long, config), model.generate(long, generation_config=config))
    assert result.past_key_values.reevaluated_tokens == 14 * (result.past_key_values.evicted[0] // 10)


def test_the_articles_call(directories: Any, capsys: Any) -> None:
    """Nothing is evaluated again: as many tokens pass through the model as there are."""
    tokenizer, model = save_tokenizer(directories("llama")), load(directories("llama"))
    passed = 0

    def count(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal passed
        passed += kwargs["input_ids"].shape[1]

    model.model.register_forward_pre_hook(count, with_kwargs=True)
    ids = prompt_ids(1, 10)
    streamer = TextStreamer(tokenizer)
    options = {"ctx_size": 100, "n_keep": 4, "n_discard": -1}
    result = model.generate(
        ids, streamer=streamer, max_new_tokens=300, return_dict_in_generate=True, **GREEDY, **options
    )
    assert result.sequences.shape[1] == 310 and passed == 309
    cache = result.past_key_values
    assert cache.evicted == (240,) and cache.held == (69,) and cache.reevaluated_tokens == 0
    assert len(capsys.readouterr().out) > 100


def test_a_cache_goes_on(model: Any) -> None:
    """In the next call, with the whole text or with what is new, and through transformers' own generate."""
    ids = prompt_ids(1, 30)
    expected = streamed(model, ids, 90)
    first = model.generate(ids, max_new_tokens=40, return_dict_in_generate=True, **GREEDY, **STREAM)
    cache = first.past_key_values
    second = model.generate(first.sequences, past_key_values=cache, max_new_tokens=30, **GREEDY)
    assert torch.equal(second, expected[:, :100]) and cache.columns == 99
    mask = torch.ones_like(second)
    third = model.generate(second[:, -1:], past_key_values=cache, attention_mask=mask, max_new_tokens=20, **GREEDY)
    assert torch.equal(third, expected[:, 99:120])
    with pytest.raises(ValueError, match="the cache has seen 119 tokens, with at least one token more"):
        model.generate(second, past_key_values=cache, max_new_tokens=3, **GREEDY)
    with pytest.raises(ValueError, match="was made for ctx_size=24, n_keep=4, n_discard=-1, got ctx_size=30"):
        model.generate(expected, past_key_values=cache, max_new_tokens=3, ctx_size=30, **GREEDY)


def test_a_plain_model_takes_one(model: Any) -> None:
    twin, ids = plain_twin(model), prompt_ids(1, 20)
    cache = StreamingCache(twin, 24, 4, 3)
    found = twin.generate(ids, past_key_values=cache, max_new_tokens=50, **GREEDY)
    assert torch.equal(found, streamed(model, ids, 50, n_discard=3))
    more = twin.generate(found, past_key_values=cache, max_new_tokens=20, **GREEDY)
    assert torch.equal(more, streamed(model, ids, 70, n_discard=3))


def test_what_a_filled_cache_does_not_go_with(model: Any) -> None:
    twin, ids = plain_twin(model), prompt_ids(1, 9)
    with pytest.raises(ValueError, match="requires a cache that can be cropped"):
        twin.generate(ids, past_key_values=StreamingCache(twin, 24), prompt_lookup_num_tokens=3, **GREEDY)
    cache = StreamingCache(model, 24)
    text = model.generate(ids, past_key_values=cache, max_new_tokens=3, **GREEDY)
    with pytest.raises(ValueError, match="past_key_values: the cache holds 1 rows, the batch has 3"):
        model.generate(text, past_key_values=cache, num_beams=3, max_new_tokens=3, **GREEDY)
    longer = torch.cat((text, torch.tensor([[5, 0, 7]])), dim=1)  # with the pad token in it
    with pytest.raises(ValueError, match="transformers takes every pad_token_id of the text for padding"):
        model.generate(longer, past_key_values=cache, max_new_tokens=3, **GREEDY)


def test_options_in_a_generation_config(model: Any, tmp_path: Path) -> None:
    ids = prompt_ids(1, 9)
    expected = streamed(model, ids)
    config = GenerationConfig(max_new_tokens=60, **GREEDY, **STREAM)
    config.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert (loaded.ctx_size, loaded.n_keep, loaded.n_discard) == (24, 4, -1)
    assert torch.equal(model.generate(ids, generation_config=loaded), expected)
    assert torch.equal(
        model.generate(ids, generation_config=GenerationConfig(max_new_tokens=60, **GREEDY), **STREAM), expected
    )


def test_options_as_defaults_of_the_model(directories: Any, tmp_path: Path) -> None:
    model, ids = load(directories("llama")), prompt_ids(1, 9)
    expected, unstreamed = streamed(model, ids), model.generate(ids, max_new_tokens=60, **GREEDY)
    assert not torch.equal(expected, unstreamed)
    model.generation_config.ctx_size = 24
    assert torch.equal(model.generate(ids, max_new_tokens=60, **GREEDY), expected)
    assert torch.equal(model.generate(ids, max_new_tokens=60, ctx_size=None, **GREEDY), unstreamed)
    model.save_pretrained(tmp_path)
    again = SparseAutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.generate(ids, max_new_tokens=60, **GREEDY), expected)


def test_beams_and_samples(model: Any) -> None:
    ids = torch.cat((prompt_ids(1, 20), prompt_ids(1, 20, seed=3)))
    for options in ({"num_beams": 3, "do_sample": False}, {"num_beams": 2, "num_return_sequences": 2}):
        whole = model.generate(ids, max_new_tokens=40, eos_token_id=None, pad_token_id=0, **options)
        fits = model.generate(ids, max_new_tokens=40, eos_token_id=None, pad_token_id=0, ctx_size=80, **options)
        assert torch.equal(whole, fits)
    twin = plain_twin(model)
    beams = {"num_beams": 3, "max_new_tokens": 40} | GREEDY
    expected = twin.generate(ids, past_key_values=StreamingCache(twin, 24, 4, 5), **beams)
    assert torch.equal(model.generate(ids, ctx_size=24, n_discard=5, **beams), expected)
    torch.manual_seed(1)
    samples = {
        "do_sample": True,
        "max_new_tokens": 40,
        "eos_token_id": None,
        "pad_token_id": 0,
        "num_return_sequences": 2,
    }
    first = model.generate(ids, **samples, **STREAM)
    torch.manual_seed(1)
    assert torch.equal(first, model.generate(ids, **samples, **STREAM)) and first.shape == (4, 60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ctx_size": 5, "n_keep": 4},
            r"ctx_size=5, n_keep=4, n_discard=-1: expected n_keep >= 0 and ctx_size > n_keep",
        ),
        ({"ctx_size": 24, "n_discard": 0}, "ctx_size=24, n_keep=4, n_discard=0: expected n_discard of -1"),
        ({"ctx_size": 200}, "ctx_size=200, n_keep=4, n_discard=-1: expected a ctx_size of at most the model's 160"),
        ({"n_keep": 4}, "ctx_size: expected one with n_keep=4, got None"),
        ({"ctx_size": 24, "use_cache": False}, "use_cache=False"),
        ({"ctx_size": 24, "cache_implementation": "static"}, "cache_implementation='static'"),
        ({"ctx_size": 24, "prompt_lookup_num_tokens": 3}, "assisted decoding takes tokens back"),
        ({"ctx_size": 24, "past_key_values": DynamicCache()}, "expected a StreamingCache, got a DynamicCache"),
        ({"ctx_size": 24, "attention_mask": torch.tensor([[1] * 8 + [0]])}, "expected padding on the left only"),
    ],
)
def test_options_that_are_refused(model: Any, options: dict[str, Any], message: str) -> None:
    ids = prompt_ids(1, 9)
    with pytest.raises(ValueError, match=message):
        model.generate(ids, max_new_tokens=3, **GREEDY, **options)
    assert torch.equal(streamed(model, ids, 3), model.generate(ids, max_new_tokens=3, **GREEDY))


@pytest.mark.parametrize("case", ["llama", "bloom"])
def test_memory_runs_out_in_the_middle_of_a_stream(directories: Any, case: str, monkeypatch: Any) -> None:
    tiers = (SimulatedTier("gpu", budget=100_000, bandwidth=1e12), Tier("cpu"))
    model, ids = load(directories(case), tiers=tiers), prompt_ids(1, 9)
    expected = streamed(load(directories(case)), ids)
    calls, forward = 0, HybridMLP.forward

    def fails_at_times(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 37 == 36 and any(len(block.shards) > 1 for block in hybrid_blocks(model)):
            raise torch.OutOfMemoryError("GPU 0")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(HybridMLP, "forward", fails_at_times)
    assert torch.equal(streamed(model, ids), expected) and calls > 36


def test_off_it_is_transformers_own(model: Any) -> None:
    twin, ids = plain_twin(model), prompt_ids(2, 20)
    for options in ({}, {"ctx_size": None}, {"ctx_size": None, "n_keep": None}):
        found = model.generate(ids, max_new_tokens=30, **GREEDY, **options)
        assert torch.equal(found, twin.generate(ids, max_new_tokens=30, **GREEDY))


def test_memory_stays_and_so_do_tokens(directories: Any) -> None:
    """Keys and values take what `ctx_size` tokens take, however long the text gets."""
    model = load(directories("llama"))
    cache = StreamingCache(model, 24)
    streamed_so_far = prompt_ids(1, 9)
    for _ in range(4):
        streamed_so_far = model.generate(streamed_so_far, past_key_values=cache, max_new_tokens=100, **GREEDY)
        pages = [page for layer in cache.layers for pages in (layer._keys, layer._values) for page in pages.pages]
        assert len(pages) == 2 * 3 and all(page.shape[2] == 256 for page in pages)
    assert AutoModelForCausalLM and cache.evicted[0] > 380


def test_a_pass_that_fails_halfway(directories: Any, monkeypatch: Any) -> None:
    """The cache is not what any text gives, and says so instead of going on."""
    model, ids = load(directories("bloom")), prompt_ids(1, 30)
    cache = StreamingCache(model, 24)
    text = model.generate(ids, past_key_values=cache, max_new_tokens=5, **GREEDY)
    forward = HybridMLP.forward

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.id.layer == 1:
            raise RuntimeError("a cable")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(HybridMLP, "forward", fails)
    with pytest.raises(RuntimeError, match="a cable"):
        model.generate(text, past_key_values=cache, max_new_tokens=5, **GREEDY)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="a pass through the model has failed halfway"):
        model.generate(text, past_key_values=cache, max_new_tokens=5, **GREEDY)
