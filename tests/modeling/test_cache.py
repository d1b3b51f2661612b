import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from hf_sparse.modeling import TieredCacheLayer
from hf_sparse.modeling.cache import TierCacheView

BATCH, HEADS, HEAD_DIM = 2, 6, 5
GROUPS = [torch.tensor([0, 2], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)]  # of three KV groups


def states(tokens, seed, heads=HEADS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(BATCH, heads, tokens, HEAD_DIM, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("make", [DynamicLayer, lambda: DynamicSlidingWindowLayer(sliding_window=7)])
def test_a_tiered_layer_behaves_as_the_layer_it_replaces(make):
    plain, tiered = make(), TieredCacheLayer(make(), GROUPS)
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
    plain, tiered = StaticLayer(max_cache_len=11), TieredCacheLayer(StaticLayer(max_cache_len=11), GROUPS)
    for tokens, seed in ((4, 0), (1, 1), (5, 2)):
        expected, got = plain.update(*states(tokens, seed)), tiered.update(*states(tokens, seed))
        assert torch.equal(expected[0], got[0]) and torch.equal(expected[1], got[1])
        assert int(plain.get_seq_length()) == int(tiered.get_seq_length())


def test_cropping_a_tiered_layer():
    plain, tiered = DynamicLayer(), TieredCacheLayer(DynamicLayer(), GROUPS)
    for layer in (plain, tiered):
        layer.update(*states(9, 0))
        layer.crop(-4)
    assert torch.equal(plain.keys, tiered.keys)


def test_a_filled_cache_is_split_when_a_tier_first_writes_to_it():
    cache = DynamicCache()
    keys, values = states(4, 0)
    cache.update(keys, values, 0)
    new_keys, new_values = states(1, 1)
    for tier, heads in enumerate(([0, 1, 4, 5], [2, 3])):
        got, _ = TierCacheView(cache, tier, GROUPS).update(new_keys[:, heads], new_values[:, heads], 0)
        assert torch.equal(got, torch.cat([keys, new_keys], dim=2)[:, heads])
    assert torch.equal(cache.layers[0].keys, torch.cat([keys, new_keys], dim=2))


def test_another_placement_is_an_error_not_a_mixture():
    cache = DynamicCache()
    TierCacheView(cache, 0, GROUPS).update(*states(1, 0, heads=4), 0)
    with pytest.raises(ValueError, match="another placement"):
        TierCacheView(cache, 0, GROUPS[::-1]).update(*states(1, 0, heads=2), 0)
