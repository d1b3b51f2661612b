"""Caches for blocks whose KV groups live on several tiers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from .paged_cache import PagedCacheLayer
from .streaming import StreamingLayer
from .tiers import all_to_device

# KV groups of one tier (int, ascending), and its device
CachePart = tuple[Tensor, torch.device]


class TieredCacheLayer(CacheLayerMixin):
    """One layer of a transformers Cache whose KV groups are split between tiers.

    Each tier has a layer of the kind it replaces (dynamic, sliding window, static), on its own device, so keys and
    values never leave the tier that computes with them. To the outside `keys` and `values` are whole and in model
    order: [batch, heads, tokens, head_dim].
    """

    def __init__(self, layer: CacheLayerMixin, parts: Sequence[CachePart]) -> None:
        """`layer` is what the cache holds now, empty or filled, perhaps split another way."""
        self.groups = [groups.long().cpu() for groups, _ in parts]
        self.is_sliding = getattr(layer, "is_sliding", False)
        self.parts: list[Any]
        if isinstance(_first_part(layer), StreamingLayer):  # whose keys are more than what `keys` shows
            whole: Any = layer.joined(parts[0][1]) if isinstance(layer, TieredCacheLayer) else layer
            heads_of = self._heads(whole.sizes[1]) if whole.is_initialized else self.groups
            self.parts = [whole.of_heads(of, device) for of, (_, device) in zip(heads_of, parts, strict=True)]
            return
        self.parts = [_copy_without_states(layer) for _ in parts]
        if layer.is_initialized:
            keys, values = layer.keys, layer.values
            assert keys is not None and values is not None
            for part, heads, (_, device) in zip(self.parts, self._heads(keys.shape[1]), parts, strict=True):
                _fill(part, keys[:, heads.to(keys.device)], values[:, heads.to(values.device)], device)

    def _heads(self, total: int) -> list[Tensor]:
        """Cached heads of each tier; a KV group may be cached as several (Falcon repeats keys for each query head)."""
        per_group = total // sum(map(len, self.groups))
        return [(g[:, None] * per_group + torch.arange(per_group)).flatten() for g in self.groups]

    def joined(self, device: torch.device) -> Any:
        """The StreamingLayer that this is the parts of, on `device`."""
        heads = sum(part.sizes[1] for part in self.parts) if self.is_initialized else sum(map(len, self.groups))
        return StreamingLayer.joined(self.parts, torch.cat(self._heads(heads)).argsort(), device)

    def _merged(self, parts: Sequence[Tensor]) -> Tensor:
        """Keys or values of the tiers, [batch, heads of the tier, tokens, head_dim], in model order on the first tier's
        device.
        """
        order = torch.cat(self._heads(sum(part.shape[1] for part in parts))).argsort()
        return torch.cat([part.to(parts[0].device) for part in parts], dim=1)[:, order.to(parts[0].device)]

    def _states(self, name: str) -> Tensor | None:
        return self._merged([getattr(part, name) for part in self.parts]) if self.is_initialized else None

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return self._states("keys")

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self._states("values")

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Also tells transformers that a static layer has empty slots, which masks must cover."""
        return all(part.is_compileable for part in self.parts)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return all(part.is_croppable for part in self.parts)

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return all(part.is_initialized for part in self.parts)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Whole keys and values in model order, split here: what a caller that knows no tiers does."""
        results = [
            part.update(key_states[:, heads], value_states[:, heads], *args, **kwargs)
            for part, heads in zip(self.parts, self._heads(key_states.shape[1]), strict=True)
        ]
        return self._merged([keys for keys, _ in results]), self._merged([values for _, values in results])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        for part, heads in zip(self.parts, self._heads(key_states.shape[1]), strict=True):
            part.lazy_initialization(key_states[:, heads], value_states[:, heads])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.parts[0].get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self.parts[0].get_seq_length()

    def get_max_length(self) -> int:
        return self.parts[0].get_max_length()

    def _each(self, method: str, *args: Any) -> None:
        for part in self.parts:
            getattr(part, method)(
                *all_to_device(args, part.keys.device if part.keys is not None else torch.device("cpu"))
            )

    def reset(self) -> None:
        self._each("reset")

    def offload(self) -> None:
        self._each("offload")

    def prefetch(self) -> None:
        self._each("prefetch")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._each("reorder_cache", beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        self._each("crop", tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each("batch_select_indices", indices)

    def activate_past_recording(self) -> None:
        self._each("activate_past_recording")


def _copy_without_states(layer: CacheLayerMixin) -> CacheLayerMixin:
    """A layer with the counters of `layer` as its own (a static layer counts in a tensor) and its keys and values still
    shared.
    """
    layer = _first_part(layer)
    part = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, Tensor) and name not in ("keys", "values"):
            setattr(part, name, value.clone())
    return part


def _first_part(layer: CacheLayerMixin) -> CacheLayerMixin:
    return layer.parts[0] if isinstance(layer, TieredCacheLayer) else layer


def _fill(layer: Any, keys: Tensor, values: Tensor, device: torch.device) -> None:
    layer.keys, layer.values = keys.to(device), values.to(device)
    if "device" in vars(layer):
        layer.device = device


class TierCacheView:
    """What the attention of one tier sees of a cache whose layer is split: `update` reaches that tier's part of the
    layer alone.
    """

    def __init__(self, cache: Cache, tier: int) -> None:
        self.cache, self.tier = cache, tier

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self.cache.layers[layer_idx]
        assert isinstance(layer, TieredCacheLayer)
        return layer.parts[self.tier].update(key_states, value_states, *args, **kwargs)


def settle_cache(cache: Cache, layer_idx: int, parts: Sequence[CachePart]) -> None:
    """Makes the layer of `cache` one that is split like `parts`, or whole where there is one; what it holds moves with
    it, whatever it was split like before.

    Raises ValueError where the layer holds no keys and values.
    """
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= layer_idx:
            cache.layers.append(cache.layer_class_to_replicate())
    layer: Any = cache.layers[layer_idx]
    device = parts[0][1]
    if isinstance(layer, TieredCacheLayer):
        if len(layer.groups) == len(parts) and all(
            torch.equal(groups, part.long().cpu()) for groups, (part, _) in zip(layer.groups, parts, strict=True)
        ):
            return
        if len(parts) == 1:
            if isinstance(layer.parts[0], StreamingLayer):
                cache.layers[layer_idx] = layer.joined(device)
                return
            whole = _copy_without_states(layer)
            if layer.is_initialized:
                assert layer.keys is not None and layer.values is not None
                _fill(whole, layer.keys, layer.values, device)
            cache.layers[layer_idx] = whole
            return
    elif isinstance(layer, StreamingLayer) and len(parts) == 1:
        if layer.is_initialized and layer.device != device:
            cache.layers[layer_idx] = layer.of_heads(torch.arange(layer.sizes[1]), device)
        return
    elif isinstance(layer, PagedCacheLayer) and layer.device in (None, device) and len(parts) == 1:
        return  # `keys` would be a copy
    elif len(parts) == 1:
        keys = getattr(layer, "keys", None) if getattr(layer, "is_initialized", False) else None
        if isinstance(keys, Tensor) and keys.device != device:
            _fill(layer, keys, layer.values, device)
        return
    if not isinstance(layer, CacheLayerMixin):
        raise ValueError(
            f"past_key_values: layer {layer_idx} is a {type(layer).__name__}, which holds no keys and values"
        )
    cache.layers[layer_idx] = TieredCacheLayer(layer, parts)


class CacheStates:
    """What a cache holds before a forward pass, so that one that fails halfway can be taken back. Costs no memory but
    where a layer drops tokens as it goes (a sliding window).
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._layers: list[Any] = list(cache.layers)
        self._states = [[_state_of(part) for part in parts_of(layer)] for layer in self._layers]

    def restore(self) -> bool:
        """False where a layer cannot forget: one that overwrites a window in place."""
        # Layers that the pass has added go, those that it has split another way come back as they were.
        self._cache.layers[:] = self._layers
        found = True
        for layer, states in zip(self._layers, self._states, strict=True):
            for part, state in zip(parts_of(layer), states, strict=True):
                found &= _restored(part, state)
        return found


_State = tuple[Any, "dict[str, Any] | None"]  # how many tokens, and all attributes where they cannot be cut off again


def parts_of(layer: Any) -> list[Any]:
    return layer.parts if isinstance(layer, TieredCacheLayer) else [layer]


def _state_of(part: Any) -> _State:
    if isinstance(part, StreamingLayer):
        return part.state, None
    return int(part.get_seq_length()), dict(vars(part)) if isinstance(part, DynamicSlidingWindowLayer) else None


def _restored(part: Any, state: _State) -> bool:
    tokens, attributes = state
    if attributes is not None:
        vars(part).clear()
        vars(part).update(attributes)
        return True
    if isinstance(part, StreamingLayer):
        return part.went_back(tokens)
    more = int(part.get_seq_length()) - tokens
    if more and part.is_croppable:
        part.crop(-more)
    return more == 0 or part.is_croppable
