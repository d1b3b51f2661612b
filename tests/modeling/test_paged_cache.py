import copy
import ctypes
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    QuantizedCache,
    StaticCache,
    StaticLayer,
)

from hf_sparse.modeling import TieredCacheLayer
from hf_sparse.modeling.paged_cache import PagedCacheLayer, use_pages
from hf_sparse.modeling.pages import PAGE_TOKENS, quantize_tokens

HEADS, KEY_DIM, VALUE_DIM = 2, 5, 3


def states(tokens, seed=0, batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, HEADS, tokens, dim, generator=generator).to(dtype) for dim in (KEY_DIM, VALUE_DIM)]


def assert_same(layer, expected):
    assert layer.get_seq_length() == expected.get_seq_length()
    assert layer.get_mask_sizes(3) == expected.get_mask_sizes(3)
    assert torch.equal(layer.keys, expected.keys) and torch.equal(layer.values, expected.values)


def pages_of(layer):
    return [tensor for side in (layer._keys, layer._values) for tensor in (*side.pages, *side.scales)]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 600)),
        st.tuples(st.just("crop"), st.integers(0, 600)),
        st.tuples(st.just("reorder"), st.none()),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
        st.tuples(st.just("select"), st.integers(1, 3)),
        st.tuples(st.just("assign"), st.integers(1, 300)),
        st.tuples(st.just("copy"), st.booleans()),
        st.tuples(st.just("reset"), st.none()),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=100, deadline=None)
@given(
    batch=st.integers(1, 3),
    first=st.integers(1, 600),
    operations=OPERATIONS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_a_paged_layer_behaves_as_a_dynamic_one(batch, first, operations, dtype):
    plain, paged = DynamicLayer(), PagedCacheLayer()
    for seed, (name, value) in enumerate([("update", first), *operations]):
        rows = plain.keys.shape[0] if plain.get_seq_length() else batch
        if name == "copy":
            paged = copy.deepcopy(paged) if value else pickle.loads(pickle.dumps(paged))
        elif name == "reset":
            plain.reset()
            paged.reset()
        elif name == "update":
            if plain.is_initialized and not plain.get_seq_length():
                plain.reset()  # cropped to nothing, it would insist on the old batch
            expected = plain.update(*states(value, seed, rows, dtype))
            got = paged.update(*states(value, seed, rows, dtype))
            assert torch.equal(expected[0], got[0]) and torch.equal(expected[1], got[1])
        elif plain.is_initialized:
            for layer in (plain, paged):
                if name == "crop":
                    layer.crop(-value)
                elif name == "reorder":
                    layer.reorder_cache(torch.tensor([(row * 7 + seed) % rows for row in range(rows)]))
                elif name == "repeat":
                    layer.batch_repeat_interleave(value)
                elif name == "select":
                    layer.batch_select_indices(torch.tensor([(row + seed) % rows for row in range(value)]))
                elif name == "assign":
                    layer.keys, layer.values = layer.keys[:, :, -value:], layer.values[:, :, -value:]
        assert paged.get_seq_length() == plain.get_seq_length()
        if plain.get_seq_length():
            assert_same(paged, plain)
            assert len(paged.table()) >= -(-paged.get_seq_length() // PAGE_TOKENS)


def test_growth_copies_nothing():
    layer = PagedCacheLayer()
    for tokens in (PAGE_TOKENS - 1, 1, 1, 2 * PAGE_TOKENS, 3):
        before = [tensor.data_ptr() for side in (layer._keys, layer._values) if side for tensor in side.pages]
        rows = layer.table()[:, :2].clone() if layer.is_initialized else torch.empty(0, 2, dtype=torch.int64)
        layer.update(*states(tokens))
        after = layer.table()
        assert torch.equal(after[: len(rows), :2], rows)
        assert set(before) <= set(after[:, :2].flatten().tolist())
    assert len(layer.table()) == 4


def test_the_first_states_come_back_as_they_are_and_later_ones_are_apart_from_the_pages():
    layer = PagedCacheLayer()
    first = states(4)
    got = layer.update(*first)
    assert got[0] is first[0] and got[1] is first[1]
    whole, _ = layer.update(*states(1, seed=1))
    kept = whole.clone()
    layer.crop(-2)
    layer.update(*states(2, seed=2))
    assert torch.equal(whole, kept)
    assert torch.equal(layer.keys[:, :, :3], kept[:, :, :3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_pages_are_within_half_a_step(dtype):
    layer = PagedCacheLayer(torch.int8)
    expected = DynamicLayer()
    for seed, tokens in enumerate((300, 1, 1)):
        got = layer.update(*states(tokens, seed, dtype=dtype))
        whole = expected.update(*states(tokens, seed, dtype=dtype))
        for stored, exact in zip(got, whole, strict=True):
            assert stored.dtype == dtype
            step = exact.float().abs().amax(dim=-1, keepdim=True) / 127
            rounding = torch.finfo(dtype).eps * exact.float().abs().amax(dim=-1, keepdim=True)
            assert ((stored.float() - exact.float()).abs() <= step * 0.5001 + rounding).all()
    assert torch.equal(layer.keys, got[0]) and torch.equal(layer.values, got[1])
    page, scales = layer._keys.pages[0], layer._keys.scales[0]
    assert (page.shape, page.dtype) == ((2, HEADS, PAGE_TOKENS, KEY_DIM), torch.int8)
    assert (scales.shape, scales.dtype) == ((2, HEADS, PAGE_TOKENS), torch.float32)


def test_values_of_int8_pages():
    vectors = torch.tensor(
        [[127, 0.5, 1.5, -2.5], [0, 0, 0, 0], [1e-45, 0, 0, -1e-45], [3, -3, 0, 1.5], [0, 2.66e-43, 0, 0]]
    )
    codes, scales = quantize_tokens(vectors[None, None])
    assert codes[0, 0].tolist() == [[127, 0, 2, -2], [0] * 4, [0] * 4, [127, -127, 0, 64], [0, 127, 0, 0]]
    assert torch.equal(scales[0, 0], torch.tensor([1, 0, 0, 3 / 127, 1e-45]))
    for bad in (torch.nan, torch.inf, -torch.inf):
        layer = PagedCacheLayer(torch.int8)
        keys = torch.tensor([[1, bad, 2], [1, 3, 2]])[None, None]
        assert quantize_tokens(keys)[1].isnan().tolist() == [[[True, False]]]
        keys, values = layer.update(keys, keys)
        assert keys[0, 0, 0].isnan().all() and values[0, 0, 1].isfinite().all()


def test_int8_layers_keep_scales_with_their_tokens():
    layer = PagedCacheLayer(torch.int8)
    layer.update(*states(300, batch=3))
    keys = layer.keys
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(layer.keys, keys[[2, 0, 0]])
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0, 5]))
    assert torch.equal(layer.keys, keys[[2, 0]])
    layer.crop(-50)
    layer.update(*states(20, seed=1))
    assert torch.equal(layer.keys[:, :, :250], keys[[2, 0], :, :250])
    for twin in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin.keys, layer.keys) and torch.equal(twin.values, layer.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pages_of_another_dtype_round_the_states(dtype):
    layer = PagedCacheLayer(dtype)
    keys, values = states(3, dtype=torch.float32)
    got, _ = layer.update(keys, values)
    assert got.dtype == torch.float32 and torch.equal(got, keys.to(dtype).float())
    assert layer._values.pages[0].dtype == dtype


def test_crop_keeps_pages_for_what_comes():
    layer = PagedCacheLayer()
    layer.update(*states(2 * PAGE_TOKENS + 1))
    table = layer.table()
    layer.crop(-2 * PAGE_TOKENS)
    layer.crop(0)
    assert layer.get_seq_length() == 1 and layer.capacity == 3 * PAGE_TOKENS
    layer.update(*states(2 * PAGE_TOKENS, seed=1))
    assert layer.table() is table
    layer.crop(-10_000)
    assert layer.get_seq_length() == 0 and layer.keys.shape == (2, HEADS, 0, KEY_DIM)
    layer.update(*states(3, batch=1))  # an empty layer takes any batch
    assert layer.keys.shape == (1, HEADS, 3, KEY_DIM)


def test_native_code_finds_and_fills_pages():
    layer = PagedCacheLayer()
    layer.initialize(2, HEADS, KEY_DIM, VALUE_DIM, torch.float32)
    assert (layer.sizes, layer.code, layer.capacity, len(layer.table())) == ((2, HEADS, KEY_DIM, VALUE_DIM), 0, 0, 0)
    keys, values = states(PAGE_TOKENS + 2)
    layer.reserve(PAGE_TOKENS + 2)
    table = layer.table()
    assert table.shape == (2, 4) and table.dtype == torch.int64 and table.is_contiguous()
    for page, (key_address, value_address, *scales) in enumerate(table.tolist()):
        assert scales == [0, 0]
        for address, whole in ((key_address, keys), (value_address, values)):
            part = whole[:, :, page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
            padded = torch.zeros(2, HEADS, PAGE_TOKENS, part.shape[3])
            padded[:, :, : part.shape[2]] = part
            ctypes.memmove(address, padded.data_ptr(), padded.nbytes)
    layer.advance(PAGE_TOKENS)
    layer.advance()
    layer.advance()
    assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    layer.reserve(1)
    assert layer.table() is table
    layer.reserve(PAGE_TOKENS)
    assert len(layer.table()) == 3 and torch.equal(layer.table()[:2], table)


def test_the_table_of_int8_pages_has_scales():
    layer = PagedCacheLayer(torch.int8)
    assert layer.code == 2
    layer.update(*states(PAGE_TOKENS + 1))
    keys, values = layer._keys, layer._values
    columns = [
        [tensor.data_ptr() for tensor in side] for side in (keys.pages, values.pages, keys.scales, values.scales)
    ]
    assert layer.table().T.tolist() == columns


def test_the_table_follows_every_change_of_pages():
    layer = PagedCacheLayer()
    layer.update(*states(10))
    table = layer.table()
    layer.reorder_cache(torch.tensor([1, 0]))
    layer.keys = layer.keys[:, :, 1:]
    layer.values = layer.values[:, :, 1:]
    assert layer.table() is table and table[0, 0] == layer._keys.pages[0].data_ptr()
    layer.reserve(PAGE_TOKENS)
    assert len(layer.table()) == 2
    layer.batch_repeat_interleave(2)
    assert layer.table() is not table and len(layer.table()) == 1  # the empty page was for the old batch
    assert layer.table()[0, :2].tolist() == [side.pages[0].data_ptr() for side in (layer._keys, layer._values)]


@pytest.mark.parametrize("twin_of", [copy.deepcopy, copy.copy, lambda layer: pickle.loads(pickle.dumps(layer))])
@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_a_copy_has_its_own_pages_and_addresses(twin_of, dtype):
    layer = PagedCacheLayer(dtype)
    layer.update(*states(300))
    layer.table()
    with torch.inference_mode():
        twin = twin_of(layer)
    assert_same(twin, layer)
    addresses = {int(address) for address in layer.table().flatten() if address}
    assert not addresses & {int(address) for address in twin.table().flatten() if address}
    assert twin.table()[0, 0] == twin._keys.pages[0].data_ptr()
    before = layer.keys
    twin.crop(-50)
    twin.update(*states(1, seed=1))
    assert torch.equal(layer.keys, before)


def test_keys_and_values_have_as_many_pages():
    layer = PagedCacheLayer()
    layer.keys = states(2 * PAGE_TOKENS + 1)[0]
    layer.crop(-2 * PAGE_TOKENS)
    layer.values = states(1)[1]
    assert layer.capacity == PAGE_TOKENS
    assert layer.table().shape == (3, 4) and layer.table()[:, :2].all() and layer.capacity == 3 * PAGE_TOKENS


def test_what_inference_mode_filled_can_be_written_outside_it():
    layer, plain = PagedCacheLayer(), DynamicLayer()
    with torch.inference_mode():
        for each in (layer, plain):
            each.update(*states(250))
            each.batch_repeat_interleave(2)
    for each in (layer, plain):
        each.update(*states(10, seed=1, batch=4))
        each.reorder_cache(torch.tensor([3, 2, 1, 0]))
    assert_same(layer, plain)
    assert not any(page.is_inference() for page in pages_of(layer))


def test_states_that_require_grad_are_stored_without_their_graph():
    layer = PagedCacheLayer()
    keys, values = (s.requires_grad_() for s in states(4))
    for _ in range(2):
        layer.update(keys, values)
    assert not any(page.requires_grad for page in pages_of(layer))
    copy.deepcopy(layer)


def test_assigned_states_set_sizes_anew():
    layer = PagedCacheLayer()
    layer.keys, layer.values = states(4, batch=1)
    assert layer.is_initialized and layer.get_seq_length() == 4
    layer.keys, layer.values = states(9, batch=3, dtype=torch.bfloat16)
    assert layer.sizes == (3, HEADS, KEY_DIM, VALUE_DIM) and layer.code == 1
    assert torch.equal(layer.values, states(9, batch=3, dtype=torch.bfloat16)[1])
    layer.keys = layer.values = None
    assert not layer.is_initialized


def test_offloading_and_reset():
    layer = PagedCacheLayer()
    layer.update(*states(4))
    table, keys = layer.table(), layer.keys
    layer.offload()
    layer.prefetch()
    assert layer.table() is table and torch.equal(layer.keys, keys) and layer.device == torch.device("cpu")
    layer.reset()
    assert not layer.is_initialized and layer.keys is None and layer.get_seq_length() == 0 and layer.capacity == 0
    assert layer.device is None and layer.get_max_length() == -1 and layer.get_mask_sizes(5) == (5, 0)


def test_errors():
    for wrong in ("int8", torch.float64, torch.uint8):
        with pytest.raises(ValueError, match=r"^dtype:"):
            PagedCacheLayer(wrong)
    layer = PagedCacheLayer()
    for call in (layer.table, layer.advance, lambda: layer.reserve(1), lambda: layer.code, lambda: layer.sizes):
        with pytest.raises(ValueError, match="not initialized"):
            call()
    layer.update(*states(4))
    with pytest.raises(ValueError, match="Calling `crop` with a positive value"):
        layer.crop(1)
    for wrong in (states(1, batch=1), states(1, dtype=torch.bfloat16), [s.to("meta") for s in states(1)]):
        with pytest.raises(ValueError, match=r"^key_states: .* but the cache holds"):
            layer.update(*wrong)
    with pytest.raises(ValueError, match=r"^value_states: 2 tokens"):
        layer.update(states(1)[0], states(2)[1])
    with pytest.raises(ValueError, match=r"^keys: shape"):
        layer.keys = torch.zeros(2)
    assert layer.get_seq_length() == 4  # nothing of that was stored
    for count in (-1, PAGE_TOKENS - 3):
        with pytest.raises(ValueError, match=r"^advance: .* room for 252"):
            layer.advance(count)
    layer.keys = layer.keys[:, :, 1:]
    with pytest.raises(ValueError, match=r"3 tokens of keys, but .* 4 tokens of values"):
        layer.table()
    layer.initialize(1, 1, 4, 4, torch.float32, "meta")
    layer.reserve(1)
    with pytest.raises(ValueError, match=r"^table: a page is on meta"):
        layer.table()
    layer.initialize(1, 1, 4, 4, torch.float64)
    with pytest.raises(ValueError, match=r"^code: "):
        _ = layer.code


@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_taking_over_what_other_layers_hold(dtype):
    empty = PagedCacheLayer.from_layer(DynamicLayer(), dtype)
    assert not empty.is_initialized and empty.dtype == dtype
    fresh = DynamicLayer()
    fresh.lazy_initialization(*states(0))  # holds tensors without a shape
    assert not PagedCacheLayer.from_layer(fresh, dtype).is_initialized
    for layer in (DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=301)):
        layer.update(*states(300))
        expected = PagedCacheLayer(dtype)
        expected.update(*states(300))
        assert_same(PagedCacheLayer.from_layer(layer, dtype), expected)


def test_what_cannot_be_taken_over():
    window = DynamicSlidingWindowLayer(sliding_window=7)
    window.update(*states(7))
    static = StaticLayer(max_cache_len=8)
    whole = [(torch.arange(HEADS), torch.device("cpu"))]
    others = [window, static, DynamicIndexedLayer(), TieredCacheLayer(DynamicLayer(), whole)]
    for layer in others:
        with pytest.raises(ValueError, match=r"^layer: "):
            PagedCacheLayer.from_layer(layer)
        cache = Cache(layers=[DynamicLayer(), layer])
        before = list(cache.layers)
        assert not use_pages(cache, 2)
        assert all(a is b for a, b in zip(cache.layers, before, strict=True))
    assert not use_pages(Cache(layers=[DynamicLayer(), LinearAttentionLayer()]), 2)
    assert not use_pages(Cache(layers=[DynamicLayer()]), 2)  # made for one layer
    assert not use_pages(DynamicCache(offloading=True), 2)


def test_using_pages(llama):
    cache = DynamicCache()
    cache.update(*states(4), 0)
    assert use_pages(cache, 3)
    assert len(cache) == 3 and cache.layer_class_to_replicate is None and not cache.is_compileable
    assert cache.is_sliding == [False] * 3 and cache.is_croppable and cache.get_seq_length() == 4
    assert torch.equal(cache.layers[0].keys, states(4)[0])
    before = list(cache.layers)
    assert use_pages(cache, 3) and all(a is b for a, b in zip(cache.layers, before, strict=True))
    assert not use_pages(cache, 3, torch.int8)
    assert not use_pages(StaticCache(config=llama.config, max_cache_len=8), 3)
    mixed = Cache(layers=[PagedCacheLayer(torch.int8), DynamicLayer()])
    assert use_pages(mixed, 2, torch.int8) and mixed.layers[1].code == 2
    with pytest.raises(ValueError, match=r"^dtype:"):
        use_pages(cache, 3, torch.float64)


def test_quantized_caches_stay_as_they_are(llama, monkeypatch):
    monkeypatch.setattr(QuantizedCache, "__init__", lambda self: Cache.__init__(self, layers=[DynamicLayer()]))
    assert not use_pages(QuantizedCache(), 1)


def test_early_initialization():
    cache = DynamicCache()
    use_pages(cache, 2)
    cache.early_initialization(2, HEADS, KEY_DIM, torch.bfloat16, torch.device("cpu"))
    assert cache.is_initialized and cache.layers[1].sizes == (2, HEADS, KEY_DIM, KEY_DIM)
    assert cache.get_seq_length() == 0 and cache.layers[0].code == 1


def test_tiers_of_a_paged_layer():
    layer, plain = PagedCacheLayer(), DynamicLayer()
    layer.update(*states(4))
    plain.update(*states(4))
    tiered = TieredCacheLayer(layer, [(torch.tensor([group]), torch.device("cpu")) for group in (1, 0)])
    assert_same(tiered, plain)
    tiered.update(*states(1, seed=1))
    plain.update(*states(1, seed=1))
    assert_same(tiered, plain)
