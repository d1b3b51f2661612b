"""Models on caches of pages: generation, and pages in the place of sliding windows."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

from hf_sparse.modeling.paged_cache import PagedCacheLayer, use_pages
from hf_sparse.modeling.pages import PAGE_TOKENS
from tiny_models import prompt_ids, save_checkpoint

GREEDY = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"num_return_sequences": 2, "num_beams": 2}])
@pytest.mark.parametrize("length", [5, PAGE_TOKENS - 10])
def test_generation_gives_the_same_tokens(llama, options, length):
    ids = prompt_ids(2, length)
    results = []
    for paged in (False, True):
        cache = DynamicCache()
        if paged:
            assert use_pages(cache, llama.config.num_hidden_layers)
        sequences = llama.generate(ids, cache=cache, **GREEDY, **options)
        assert isinstance(cache.layers[-1], PagedCacheLayer) == paged
        assert cache.get_seq_length() == sequences.shape[1] - 1
        results.append(llama.generate(sequences, cache=cache, **GREEDY) if not options else sequences)
    assert torch.equal(*results)


def test_assisted_generation_crops_pages(llama):
    ids = prompt_ids(1, 9).repeat(1, 3)  # n-grams of the prompt are proposed and mostly rejected
    cache = DynamicCache()
    use_pages(cache, llama.config.num_hidden_layers)
    assert torch.equal(
        llama.generate(ids, cache=cache, prompt_lookup_num_tokens=4, **GREEDY), llama.generate(ids, **GREEDY)
    )


def test_int8_pages_change_logits_little(llama):
    ids = prompt_ids(1, 40)
    cache = DynamicCache()
    use_pages(cache, llama.config.num_hidden_layers, torch.int8)
    with torch.no_grad():
        exact = llama(ids).logits
        chunks = torch.cat([llama(part, cache=cache).logits for part in ids.split([30, 1, 9], dim=1)], dim=1)
        again = DynamicCache()
        use_pages(again, llama.config.num_hidden_layers, torch.int8)
        whole = llama(ids, cache=again).logits
    assert (whole - exact).norm() < 0.05 * exact.norm()
    # A prompt sees what is stored of itself: in one piece or in several, the numbers are the same.
    assert torch.allclose(whole, chunks, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("case", "implementation"),
    [(case, attention) for case in ("mistral", "gemma3", "qwen2", "phi3") for attention in ("sdpa", "eager")]
    + [("gemma2", "eager")],  # softcaps: it has no other
)
def test_full_pages_stand_in_for_sliding_windows(case, implementation, tmp_path):
    options = {"sliding_window": 8, "attn_implementation": implementation}
    if case == "qwen2":
        options |= {"use_sliding_window": True, "max_window_layers": 1}
    model = save_checkpoint(case, tmp_path, **options)
    windows = DynamicCache(config=model.config)
    assert any(windows.is_sliding)
    pages = DynamicCache(config=model.config)
    assert use_pages(pages, model.config.num_hidden_layers) and not any(pages.is_sliding)
    padded = torch.ones(2, 41, dtype=torch.long)
    padded[1, :3] = 0
    ids = prompt_ids(2, 41)
    seen = 0
    with torch.no_grad():
        without = model(ids, attention_mask=padded, use_cache=False).logits
        for count in (5, *[1] * 12, 11, 1, 12):  # into the window, beyond it token by token, chunks longer than it
            part, mask = ids[:, seen : seen + count], padded[:, : seen + count]
            expected = model(part, attention_mask=mask, cache=windows).logits
            got = model(part, attention_mask=mask, cache=pages).logits
            kept = mask[:, seen:].bool()
            torch.testing.assert_close(got[kept], expected[kept], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(got[kept], without[:, seen : seen + count][kept], atol=1e-4, rtol=1e-4)
            seen += count
    assert pages.get_seq_length() == windows.get_seq_length() == 41


def test_a_window_that_has_dropped_nothing_goes_on_in_pages(tmp_path):
    model = save_checkpoint("mistral", tmp_path, sliding_window=8)
    ids = prompt_ids(1, 30)
    with torch.no_grad():
        for first, works in ((7, True), (8, False)):
            cache = DynamicCache(config=model.config)
            model(ids[:, :first], cache=cache)
            assert use_pages(cache, 3) == works
            rest = model(ids[:, first:], cache=cache).logits
            torch.testing.assert_close(rest, model(ids, use_cache=False).logits[:, first:], atol=1e-4, rtol=1e-4)
