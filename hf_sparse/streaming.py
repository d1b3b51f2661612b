"""generate() with the options of StreamingLLM: `ctx_size`, `n_keep`, `n_discard`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, MaxLengthCriteria

from .log import warn_once
from .modeling import StreamingCache, StreamingOptions

OPTIONS = ("ctx_size", "n_keep", "n_discard")
MODES = ("greedy_search", "sample", "beam_search", "beam_sample")


def resolve_options(config: Any) -> StreamingOptions | None:
    """The options in a GenerationConfig; None where there is no `ctx_size`. Raises ValueError as StreamingOptions."""
    values = {name: getattr(config, name, None) for name in OPTIONS}
    if values["ctx_size"] is None:
        return None
    return StreamingOptions(**{name: value for name, value in values.items() if value is not None})


class StreamingMixin(GenerationMixin):
    """What a model needs to generate with a StreamingCache, in batches with padding too."""

    def _prepare_generation_config(self, generation_config: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        theirs: Any = super()._prepare_generation_config  # type: ignore[misc]
        config, model_kwargs = theirs(generation_config, **kwargs)
        for name in OPTIONS:  # a GenerationConfig of the user's need not know them
            setattr(config, name, given.get(name, getattr(config, name, None)))
        alone = {name: value for name, value in given.items() if value is not None}
        if config.ctx_size is None and alone:
            raise ValueError(
                f"ctx_size: expected one with {', '.join(f'{n}={v!r}' for n, v in alone.items())}, got None"
            )
        resolve_options(config)
        return config, model_kwargs

    def streams(self, arguments: dict[str, Any]) -> bool:
        """Whether `generate`, called with these keyword arguments, goes on without an end."""
        config = arguments.get("generation_config") or self.generation_config
        caches = (arguments.get(name) for name in ("past_key_values", "cache"))
        ctx_size = arguments.get("ctx_size", getattr(config, "ctx_size", None))
        return ctx_size is not None or any(isinstance(cache, StreamingCache) for cache in caches)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
        options, cache = resolve_options(generation_config), model_kwargs.get("cache")
        if options is not None or isinstance(cache, StreamingCache):
            self._check_streaming(generation_config, options, cache, args[0])
        if options is not None and cache is None:
            model_kwargs["cache"] = self.streaming_cache(options)
        theirs: Any = super()._prepare_cache_for_generation  # type: ignore[misc]
        return theirs(generation_config, model_kwargs, *args)

    def streaming_cache(self, options: StreamingOptions) -> StreamingCache:
        """An empty cache for this model, in the dtype that it caches in."""
        dtype = getattr(self, "cache_dtype", None)
        return StreamingCache(self, options.ctx_size, options.n_keep, options.n_discard, dtype, reevaluates=True)

    @staticmethod
    def _check_streaming(config: Any, options: StreamingOptions | None, cache: Any, mode: Any) -> None:
        about = str(options or cache.options)
        if mode not in MODES:
            raise ValueError(
                f"{about}: expected greedy decoding, sampling or beams, got {getattr(mode, 'value', mode)}; assisted "
                "decoding takes tokens back, and what was evicted for them could not come back"
            )
        if config.use_cache is False or config.cache_implementation is not None:
            raise ValueError(
                f"{about}: the cache is a StreamingCache, got use_cache={config.use_cache!r}, "
                f"cache_implementation={config.cache_implementation!r}"
            )
        if cache is not None and not isinstance(cache, StreamingCache):
            raise ValueError(f"past_key_values: with {about} expected a StreamingCache, got a {type(cache).__name__}")
        if cache is not None and options is not None and cache.options != options:
            raise ValueError(f"past_key_values: the cache was made for {cache.options}, got {options}")

    def _get_stopping_criteria(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        theirs: Any = super()._get_stopping_criteria  # type: ignore[misc]
        criteria = theirs(generation_config, *args, **kwargs)
        if generation_config.ctx_size is not None:
            for criterion in criteria:
                if isinstance(criterion, MaxLengthCriteria):
                    criterion.max_position_embeddings = None  # it would warn of texts that are longer
        return criteria

    # Between forward passes

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, next_sequence_length: int | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        theirs: Any = super().prepare_inputs_for_generation
        cache = kwargs.get("cache")
        if not isinstance(cache, StreamingCache):
            result: dict[str, Any] = theirs(input_ids, next_sequence_length=next_sequence_length, **kwargs)
            return result
        mask = kwargs.pop("attention_mask", None)
        kwargs.pop("position_ids", None)
        columns = input_ids.shape[1] if next_sequence_length is None else next_sequence_length
        new = input_ids[:, input_ids.shape[1] - columns :]
        if cache.stale:
            if input_ids.shape[1] - columns < cache.columns:
                raise ValueError("inputs: expected the whole text, some of whose tokens have to be computed again")
            pads = _padding(mask, cache.columns, new)
            new = cache.reevaluated(input_ids[:, : input_ids.shape[1] - columns], new, mask, pads)
        else:
            cache.expect(_padding(mask, cache.columns, new), cache.prompting)
        batch, columns = new.shape
        inputs: dict[str, Any] = theirs(new, **kwargs)
        seen = cache.mask(columns, batch)
        if seen is not None:
            inputs["attention_mask"] = seen.to(new.device, torch.int64)
        if cache.positions_are == "rotary":
            inputs["position_ids"] = cache.positions(columns, batch).to(new.device)
        return inputs

    def _prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], is_first_iteration: bool = True
    ) -> Any:
        theirs: Any = super()._prefill  # type: ignore[misc]
        cache = model_kwargs.get("cache")
        if not isinstance(cache, StreamingCache):
            return theirs(input_ids, generation_config, model_kwargs, is_first_iteration)
        if model_kwargs.get("inputs_embeds") is not None:
            raise ValueError(f"inputs_embeds: with {cache.options} expected input_ids, whose tokens may go one by one")
        with cache.reads_a_prompt():
            return self._read(cache, input_ids, generation_config, model_kwargs, is_first_iteration)

    def _read(
        self,
        cache: StreamingCache,
        input_ids: Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        first: bool,
    ) -> Any:
        """What of the text `input_ids` the cache has not seen, in pieces for which there is room; the last output."""
        mask = model_kwargs.get("attention_mask")  # where all of it is ones, `generate` has dropped it
        masked = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", input_ids.shape[1])
        new = input_ids.shape[1] - (cache.columns if masked == input_ids.shape[1] else 0)
        if new < 1:
            raise ValueError(
                f"inputs: expected the whole text, of which the cache has seen {cache.columns} tokens, with at least "
                f"one token more, or an attention_mask for all of it; got {input_ids.shape[1]} tokens"
            )
        if new > cache.options.ctx_size:
            warn_once(
                f"inputs: {new} tokens are more than {cache.options}: they are read in pieces, and of those read the "
                "oldest that are no sinks are forgotten"
            )
        outputs = None
        for start, stop in _pieces(cache, input_ids.shape[1] - new, input_ids.shape[1]):
            inputs = self.prepare_inputs_for_generation(
                input_ids[:, :stop], next_sequence_length=stop - start, is_first_iteration=first, **model_kwargs
            )
            outputs = self(**inputs, return_dict=True)  # type: ignore[operator]
        return outputs


def _pieces(cache: StreamingCache, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Columns [start, stop) of a text in pieces for which `cache` has room."""
    while start < stop:
        piece = min(cache.room, stop - start)
        yield start, start + piece
        start += piece


def _padding(mask: Tensor | None, seen: int, new: Tensor) -> list[int]:
    """By row, how many of the columns of `new` are padding, by the mask of the text whose first `seen` columns the
    cache knows. Raises ValueError for padding behind a row's first token.
    """
    if mask is None:
        return [0] * len(new)
    of_new = mask[:, seen : seen + new.shape[1]].bool()
    pads = of_new.shape[1] - of_new.sum(dim=1)
    if not torch.equal(of_new, torch.arange(of_new.shape[1], device=of_new.device) >= pads[:, None]):
        raise ValueError(
            "attention_mask: expected padding on the left only, since tokens are appended on the right; where none is "
            "given transformers takes every pad_token_id of the text for padding"
        )
    return pads.tolist()
