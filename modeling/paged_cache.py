"""A cache layer in pages of fixed size, whose addresses native code can read and write."""

from __future__ import annotations

import copy
import itertools
import operator
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from .pages import CODES, Pages

NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.int8)  # of pages that native code attends to


class PagedCacheLayer(CacheLayerMixin):
    """A layer of a transformers Cache that never copies what it holds as it grows: keys and values lie in pages
    [batch, kv_heads, PAGE_TOKENS, head_dim], int8 ones with a float32 scale per vector [batch, kv_heads, PAGE_TOKENS].

    To the outside it behaves as a DynamicLayer. Native code finds the pages in `table()`, writes tokens behind
    `get_seq_length()` into what `reserve` made room for, and counts them with `advance`. No gradient flows through
    what is stored.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """`dtype` of the pages: None keeps that of the states, torch.int8 quantizes every vector on its own."""
        if dtype is not None and dtype not in CODES:
            known = ", ".join(map(str, CODES))
            raise ValueError(f"dtype: {dtype!r} is none of {known}, None")
        self.dtype = dtype
        self._keys: Pages | None = None
        self._values: Pages | None = None
        self._table: tuple[tuple[int, int], Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}  # addresses mean nothing elsewhere

    def __copy__(self) -> PagedCacheLayer:
        # Two layers that write into the same pages would spoil each other's tokens; DynamicLayers would not.
        return copy.deepcopy(self)

    def initialize(
        self,
        batch: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        states_dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Makes the layer an empty one for states of these sizes; what it holds is dropped."""
        device = torch.device(device)
        dtype = self.dtype or states_dtype
        self._keys = Pages((batch, kv_heads, key_dim), dtype, states_dtype, device)
        self._values = Pages((batch, kv_heads, value_dim), dtype, states_dtype, device)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Sizes, dtypes and device of `key_states`, `value_states` [batch, kv_heads, any, head_dim]; stores nothing."""
        self._keys, self._values = (
            self._pages_for("key_states", key_states),
            self._pages_for("value_states", value_states),
        )

    def _pages_for(self, name: str, states: Tensor) -> Pages:
        if states.dim() != 4:
            raise ValueError(f"{name}: shape {list(states.shape)} is not [batch, kv_heads, tokens, head_dim]")
        batch, heads, _, dim = states.shape
        return Pages((batch, heads, dim), self.dtype or states.dtype, states.dtype, states.device)

    def _fitting(self, name: str, pages: Pages | None, states: Tensor) -> Pages:
        """`pages`, or others where they are empty and made for other states."""
        made = self._pages_for(name, states)
        if pages is not None and pages.accepts(states):
            return pages
        if pages is not None and pages.tokens:
            raise ValueError(
                f"{name}: batch, kv_heads, head_dim {list(made.sizes)}, {made.states_dtype}, {made.device}, "
                f"but the cache holds {list(pages.sizes)}, {pages.states_dtype}, {pages.device}"
            )
        return made

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self._keys is not None and self._values is not None

    @property
    def keys(self) -> Tensor | None:
        """[batch, kv_heads, tokens, head_dim], a copy."""
        return None if self._keys is None else self._keys.whole()

    @keys.setter
    def keys(self, states: Tensor | None) -> None:
        self._keys = self._refilled("keys", self._keys, states)

    @property
    def values(self) -> Tensor | None:
        """[batch, kv_heads, tokens, head_dim], a copy."""
        return None if self._values is None else self._values.whole()

    @values.setter
    def values(self, states: Tensor | None) -> None:
        self._values = self._refilled("values", self._values, states)

    def _refilled(self, name: str, pages: Pages | None, states: Tensor | None) -> Pages | None:
        if states is None:
            return None
        made = self._pages_for(name, states)
        if pages is None or not pages.accepts(states):
            pages = made
        pages.tokens = 0
        pages.write(states)
        return pages

    @property
    def device(self) -> torch.device | None:
        """Where the states come from; None before initialization."""
        return None if self._keys is None else self._keys.device

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends `key_states`, `value_states` [batch, kv_heads, new, head_dim]; returns whole keys and values."""
        # Both are checked before one is written.
        keys = self._fitting("key_states", self._keys, key_states)
        values = self._fitting("value_states", self._values, value_states)
        if key_states.shape[2] != value_states.shape[2]:
            raise ValueError(f"value_states: {value_states.shape[2]} tokens, but key_states has {key_states.shape[2]}")
        self._keys, self._values = keys, values
        # Pages that hold the states as they are need not be read back. Of others (int8), prompt and decode shall see
        # the same numbers.
        as_they_are = [not pages.tokens and pages.dtype == pages.states_dtype for pages in (keys, values)]
        keys.write(key_states)
        values.write(value_states)
        return (
            key_states if as_they_are[0] else keys.whole(),
            value_states if as_they_are[1] else values.whole(),
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self._keys is None else self._keys.tokens

    def get_max_length(self) -> int:
        return -1

    def _sides(self) -> list[Pages]:
        return [pages for pages in (self._keys, self._values) if pages is not None]

    def reset(self) -> None:
        self._keys = self._values = self._table = None

    def crop(self, tokens_to_remove: int) -> None:
        """Takes `-tokens_to_remove` tokens off the end."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"Calling `crop` with a positive value (`{tokens_to_remove}`) is not supported. "
                "Please use a negative integer to remove that number of tokens from the cache instead."
            )
        for pages in self._sides():
            pages.crop(-int(tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(lambda rows: rows[indices, ...])

    def _select(self, rows: Callable[[Tensor], Tensor]) -> None:
        for pages in self._sides():
            pages.select(rows)

    def offload(self) -> None:
        for pages in self._sides():
            pages.move(torch.device("cpu"))

    def prefetch(self) -> None:
        for pages in self._sides():
            pages.move(pages.device)

    def _both(self, caller: str) -> tuple[Pages, Pages]:
        if self._keys is None or self._values is None:
            raise ValueError(f"{caller}: the layer is not initialized")
        keys, values = self._keys, self._values
        if (keys.sizes[:2], keys.dtype, keys.tokens) != (values.sizes[:2], values.dtype, values.tokens):
            raise ValueError(
                f"{caller}: batch, kv_heads {list(keys.sizes[:2])}, {keys.dtype}, {keys.tokens} tokens of keys, but "
                f"{list(values.sizes[:2])}, {values.dtype}, {values.tokens} tokens of values"
            )
        return keys, values

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """batch, kv_heads, head_dim of keys, head_dim of values."""
        keys, values = self._both("sizes")
        return *keys.sizes, values.sizes[2]

    @property
    def code(self) -> int:
        """What the pages hold: 0 float32, 1 bfloat16, 2 int8 with scales, 3 float16."""
        dtype = self.dtype or self._both("code")[0].dtype
        if dtype not in CODES:
            raise ValueError(f"code: native code knows no pages of {dtype}")
        return CODES[dtype]

    @property
    def capacity(self) -> int:
        """Tokens that the pages have room for, those that they hold included."""
        return min((pages.capacity for pages in self._sides()), default=0)

    def reserve(self, tokens: int) -> None:
        """Makes room for that many tokens more than the layer holds. Room is lost when the batch changes its size."""
        for pages in self._both("reserve"):
            pages.reserve(tokens)

    def advance(self, count: int = 1) -> None:
        """Counts tokens that native code has written behind the last one."""
        sides = self._both("advance")
        room = self.capacity - self.get_seq_length()
        if not 0 <= count <= room:
            raise ValueError(f"advance: {count} tokens, but there is room for {room}")
        for pages in sides:
            pages.tokens += int(count)

    def is_at(self, state: Any) -> bool:
        """Whether `state`, a number of tokens, is what the layer holds."""
        return self._keys is not None and self._values is not None and self._keys.tokens == state == self._values.tokens

    def wrote_one(self, slot: int, state: Any) -> None:
        """Native code has written a token to `slot`, where `state` was what the layer held."""
        for pages in self._sides():
            pages.tokens = max(pages.tokens, slot + 1)

    def table(self) -> Tensor:
        """int64 [pages, 4]: addresses of keys, values, scales of keys and scales of values (0 where there are none) of
        every page, the empty ones that `reserve` added too. The same tensor until pages change.
        """
        keys, values = self._both("table")
        for pages in (keys, values):
            pages.reserve(max(keys.capacity, values.capacity) - pages.tokens)
        version = keys.version, values.version
        if self._table is None or self._table[0] != version:
            columns = [keys.pages, values.pages, keys.scales, values.scales]
            for tensor in itertools.chain(*columns):
                if tensor.device.type != "cpu" or not tensor.is_contiguous():
                    raise ValueError(
                        f"table: a page is on {tensor.device}, strides {tensor.stride()}; native code "
                        "reads contiguous ones on the CPU"
                    )
            addresses = [[tensor.data_ptr() for tensor in column] or [0] * len(keys.pages) for column in columns]
            self._table = (
                version,
                torch.tensor(addresses, dtype=torch.int64, device="cpu").view(4, len(keys.pages)).T.contiguous(),
            )
        return self._table[1]

    @classmethod
    def from_layer(cls, layer: CacheLayerMixin, dtype: torch.dtype | None = None) -> PagedCacheLayer:
        """A paged layer with what `layer` holds: a DynamicLayer, or a DynamicSlidingWindowLayer that has dropped
        nothing yet. ValueError for others.
        """
        reason = _why_not(layer)
        if reason is not None:
            raise ValueError(f"layer: {reason}")
        made = cls(dtype)
        if layer.is_initialized:
            keys, values = layer.keys, layer.values
            assert keys is not None and values is not None
            if keys.dim() == 4:  # initialized without states, it holds tensors without a shape
                made.lazy_initialization(keys, values)
                made.keys, made.values = keys, values
        return made


def _why_not(layer: Any) -> str | None:
    """Why a paged layer cannot take over from `layer`; None if it can."""
    if type(layer) is DynamicLayer:
        return None
    if type(layer) is not DynamicSlidingWindowLayer:
        return f"a {type(layer).__name__} cannot be held in pages"
    keys = layer.keys
    held = keys.shape[-2] if keys is not None and keys.dim() == 4 else 0
    if held != layer.cumulative_length:
        return f"it has dropped {layer.cumulative_length - held} of {layer.cumulative_length} tokens"
    return None


def use_pages(cache: Cache, layers: int, dtype: torch.dtype | None = None) -> bool:
    """Gives a DynamicCache (with offloading off) at least `layers` paged layers, in place, with what it holds. False,
    and nothing is changed, where a layer is of a kind that cannot be held in pages, has dropped tokens, or has pages of
    another `dtype` option.
    """
    PagedCacheLayer(dtype)  # an unknown dtype is an error, whatever the cache is
    if type(cache) not in (Cache, DynamicCache) or cache.offloading:
        return False
    if len(cache.layers) < layers and cache.layer_class_to_replicate not in (DynamicLayer, PagedCacheLayer):
        return False
    for layer in cache.layers:
        if isinstance(layer, PagedCacheLayer):
            if layer.dtype != dtype:
                return False
        elif _why_not(layer) is not None:
            return False
    for position, layer in enumerate(cache.layers):
        if isinstance(layer, CacheLayerMixin) and not isinstance(layer, PagedCacheLayer):
            # One at a time: the memory of a layer that was replaced is free for the next.
            cache.layers[position] = PagedCacheLayer.from_layer(layer, dtype)
    cache.layers.extend(PagedCacheLayer(dtype) for _ in range(layers - len(cache.layers)))
    cache.layer_class_to_replicate = None
    return True


class PageTables:
    """The pages of all layers of a cache as native code takes them: int64 [layers, 2] in `array`, the address of each
    layer's `table()` and its `code`. Made anew only where pages have changed.
    """

    def __init__(self, cache: Cache) -> None:
        self.layers: list[Any] = list(cache.layers)
        self.array = array("q", [0] * (2 * len(self.layers)))
        self._known: list[tuple[int, int, int] | None] = [None] * len(self.layers)  # versions, capacity
        self._kept: list[Tensor | None] = [None] * len(self.layers)

    def belongs_to(self, cache: Cache) -> bool:
        return len(cache.layers) == len(self.layers) and all(map(operator.is_, cache.layers, self.layers))

    def make_room(self, slot: int, state: Any, sizes: Sequence[tuple[int, int, int]]) -> bool:
        """Whether every layer holds `state` (see `is_at`) of `sizes` (batch, kv_heads, head_dim) in pages that native
        code reads; makes room for one more token, at `slot`, in each.
        """
        for i, layer in enumerate(self.layers):
            if not layer.is_at(state):
                return False
            keys, values = layer._keys, layer._values
            known = self._known[i]
            if known is None or known[0] != keys.version or known[1] != values.version or known[2] <= slot:
                if keys.sizes != sizes[i] or values.sizes != sizes[i] or keys.dtype not in NATIVE_DTYPES:
                    return False
                layer.reserve(1)
                table = self._kept[i] = layer.table()
                self._known[i] = (keys.version, values.version, layer.capacity)
                self.array[2 * i], self.array[2 * i + 1] = table.data_ptr(), layer.code
        return True

    def advance(self, slot: int, state: Any) -> None:
        """Counts the token that native code has written to `slot` of every layer."""
        for layer in self.layers:
            layer.wrote_one(slot, state)
