import pytest
import torch
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from hf_sparse.modeling import CacheStates, PagedCacheLayer, TieredCacheLayer
from hf_sparse.modeling.cache import TierCacheView, settle_cache

BATCH, HEADS, HEAD_DIM = 2, 6, 5
CPU = torch.device("cpu")
# of three KV groups
PARTS = [(torch.tensor([0, 2], dtype=torch.int32), CPU), (torch.tensor([1], dtype=torch.int32), CPU)]
WHOLE = [(torch.arange(3, dtype=torch.int32), CPU)]


def states(tokens, seed, heads=HEADS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(BATCH, heads, tokens, HEAD_DIM, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("make", [DynamicLayer, lambda: DynamicSlidingWindowLayer(sliding_window=7)])
def test_a_tiered_layer_behaves_as_the_layer_it_replaces(make):
    plain, tiered = make(), TieredCacheLayer(make(), PARTS)
    for tokens, seed in ((4, 0), (1, 1), (6, 2), (1, 3)):
        expected, got = plain.update(*states(tokens, seed)), tiered.update(*states(tokens, seed))
        assert torch.equal(expected[0], got[0]) and torch.equal(expected[1], got[1])
        assert plain.get_seq_length() == tiered.get_seq_length()
        assert plain.get_mask_sizes(3) == tiered.get_mask_sizes(3)
    order = torch.tensor([1, 0])
    for layer in (plain, tiered):
        layer.reorder_cache(order)
        layer.batch_repeat_interleave(3)
        layer.batch_select_indices(torch.tensor([0, 4]))
    assert torch.equal(plain.keys, tiered.keys) and torch.equal(plain.values, tiered.values)


def test_a_static_layer_counts_its_tokens_once():
    plain, tiered = StaticLayer(max_cache_len=11), TieredCacheLayer(StaticLayer(max_cache_len=11), PARTS)
    for tokens, seed in ((4, 0), (1, 1), (5, 2)):
        expected, got = plain.update(*states(tokens, seed)), tiered.update(*states(tokens, seed))
        assert torch.equal(expected[0], got[0]) and torch.equal(expected[1], got[1])
        assert int(plain.get_seq_length()) == int(tiered.get_seq_length())


def test_cropping_a_tiered_layer():
    plain, tiered = DynamicLayer(), TieredCacheLayer(DynamicLayer(), PARTS)
    for layer in (plain, tiered):
        layer.update(*states(9, 0))
        layer.crop(-4)
    assert torch.equal(plain.keys, tiered.keys)


def test_a_filled_cache_is_split_when_a_tier_first_writes_to_it():
    cache = DynamicCache()
    keys, values = states(4, 0)
    cache.update(keys, values, 0)
    new_keys, new_values = states(1, 1)
    settle_cache(cache, 0, PARTS)
    for tier, heads in enumerate(([0, 1, 4, 5], [2, 3])):
        got, _ = TierCacheView(cache, tier).update(new_keys[:, heads], new_values[:, heads], 0)
        assert torch.equal(got, torch.cat([keys, new_keys], dim=2)[:, heads])
    assert torch.equal(cache.layers[0].keys, torch.cat([keys, new_keys], dim=2))


def cache_of(layer):
    cache = DynamicCache()
    cache.layers, cache.layer_class_to_replicate = [layer], None
    return cache


@pytest.mark.parametrize("make", [DynamicCache, lambda: cache_of(PagedCacheLayer())])
def test_what_a_cache_holds_moves_with_the_groups(make):
    cache, plain = make(), DynamicLayer()
    splits = [
        WHOLE,
        PARTS,
        [PARTS[1], PARTS[0]],
        [(g, CPU) for g in torch.arange(3, dtype=torch.int32).split(1)],
        WHOLE,
    ]
    for step, parts in enumerate(splits):
        settle_cache(cache, 0, parts)
        settle_cache(cache, 0, parts)
        assert isinstance(cache.layers[0], TieredCacheLayer) == (len(parts) > 1)
        expected, got = plain.update(*states(2, step)), cache.layers[0].update(*states(2, step))
        assert torch.equal(expected[0], got[0]) and torch.equal(expected[1], got[1])
    assert cache.get_seq_length() == 10


def test_a_pass_that_failed_halfway_is_taken_back():
    cache = DynamicCache()
    for layer in range(3):
        cache.update(*states(4, layer), layer)
    settle_cache(cache, 1, PARTS)
    before = [layer.keys.clone() for layer in cache.layers]
    states_before = CacheStates(cache)
    cache.update(*states(1, 7), 0)
    TierCacheView(cache, 1).update(*states(1, 8, heads=2), 1)  # one tier, and then no memory
    assert states_before.restore()
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))


def test_layers_that_a_failed_pass_added_are_emptied():
    cache = DynamicCache()
    before = CacheStates(cache)
    cache.update(*states(4, 0), 0)
    assert before.restore()
    assert cache.get_seq_length() == 0


def test_a_window_that_has_moved_on_comes_back():
    cache = cache_of(DynamicSlidingWindowLayer(sliding_window=3))
    cache.update(*states(4, 0), 0)
    for parts in (WHOLE, PARTS):
        settle_cache(cache, 0, parts)
        keys, before = cache.layers[0].keys.clone(), CacheStates(cache)
        cache.update(*states(1, 1), 0)
        assert before.restore()
        assert torch.equal(cache.layers[0].keys, keys) and cache.get_seq_length() == 4


def test_a_layer_that_the_pass_split_comes_back_whole():
    cache = DynamicCache()
    cache.update(*states(4, 0), 0)
    layer, before = cache.layers[0], CacheStates(cache)
    settle_cache(cache, 0, PARTS)
    cache.update(*states(1, 1), 0)
    assert before.restore()
    assert cache.layers == [layer] and layer.get_seq_length() == 4


def test_a_layer_that_cannot_forget_says_so():
    cache = cache_of(StaticSlidingWindowLayer(max_cache_len=8, sliding_window=3))
    cache.update(*states(4, 0), 0)
    before = CacheStates(cache)
    cache.update(*states(1, 1), 0)
    assert not before.restore()


def test_a_layer_without_keys_is_an_error():
    cache = cache_of(object())
    with pytest.raises(ValueError, match="layer 0 is a object, which holds no keys and values"):
        settle_cache(cache, 0, PARTS)
