"""Caches for blocks whose KV groups live on several tiers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class TieredCacheLayer(CacheLayerMixin):
    """One layer of a transformers Cache whose KV groups are split between tiers.

    Each tier has a layer of the kind it replaces (dynamic, sliding window, static), on its own device, so keys and values never leave
    the tier that computes with them. To the outside `keys` and `values` are whole and in model order: [batch, heads, tokens, head_dim].
    """

    is_compileable = False

    def __init__(self, layer: CacheLayerMixin, groups: list[Tensor]) -> None:
        """`layer` is what the cache holds now, empty or filled; `groups[t]` are the KV groups of tier t (int, ascending)."""
        self.groups = [g.long().cpu() for g in groups]
        self.parts = [copy.copy(layer) for _ in groups]
        self.is_sliding = getattr(layer, "is_sliding", False)
        if layer.is_initialized:
            for part, heads in zip(self.parts, self._heads(layer.keys.shape[1])):
                part.keys, part.values = layer.keys[:, heads], layer.values[:, heads]

    def _heads(self, total: int) -> list[Tensor]:
        """Cached heads of each tier; a KV group may be cached as several (Falcon repeats keys for each query head)."""
        per_group = total // sum(map(len, self.groups))
        return [(g[:, None] * per_group + torch.arange(per_group)).flatten() for g in self.groups]

    def _whole(self, name: str) -> Tensor | None:
        parts = [getattr(part, name, None) for part in self.parts]
        if any(part is None for part in parts):
            return None
        order = torch.cat(self._heads(sum(part.shape[1] for part in parts))).argsort()
        return torch.cat([part.to(parts[0].device) for part in parts], dim=1)[:, order.to(parts[0].device)]

    @property
    def keys(self) -> Tensor | None:
        return self._whole("keys")

    @property
    def values(self) -> Tensor | None:
        return self._whole("values")

    @property
    def is_initialized(self) -> bool:
        return all(part.is_initialized for part in self.parts)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Whole keys and values in model order, split here: what a caller that knows no tiers does."""
        for part, heads in zip(self.parts, self._heads(key_states.shape[1])):
            part.update(key_states[:, heads], value_states[:, heads], *args, **kwargs)
        return self.keys, self.values  # type: ignore[return-value]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        for part, heads in zip(self.parts, self._heads(key_states.shape[1])):
            part.lazy_initialization(key_states[:, heads], value_states[:, heads])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.parts[0].get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self.parts[0].get_seq_length()

    def get_max_length(self) -> int:
        return self.parts[0].get_max_length()

    def _each(self, method: str, *args: Any) -> None:
        for part in self.parts:
            getattr(part, method)(*(a.to(part.keys.device) if isinstance(a, Tensor) else a for a in args))

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


class TierCacheView:
    """What the attention of one tier sees of a cache: `update` reaches that tier's part of the layer alone."""

    def __init__(self, cache: Cache, tier: int, groups: list[Tensor]) -> None:
        self.cache, self.tier, self.groups = cache, tier, groups

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        layer = _tiered(self.cache, layer_idx, self.groups)
        return layer.parts[self.tier].update(key_states, value_states, *args, **kwargs)


def _tiered(cache: Cache, layer_idx: int, groups: list[Tensor]) -> TieredCacheLayer:
    """The layer of `cache`, replaced by one that is split like the block's shards, if it is not yet."""
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= layer_idx:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[layer_idx]
    if isinstance(layer, TieredCacheLayer):
        if len(layer.groups) == len(groups) and all(torch.equal(a, b.long().cpu()) for a, b in zip(layer.groups, groups)):
            return layer
        raise ValueError(
            f"past_key_values: layer {layer_idx} was filled under another placement; start a new cache after the placement changes"
        )
    cache.layers[layer_idx] = TieredCacheLayer(layer, groups)
    return cache.layers[layer_idx]
