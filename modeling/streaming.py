"""StreamingCache: texts without an end in a cache of fixed size (StreamingLLM, Xiao et al. 2024).

The first `n_keep` tokens, the attention sinks, stay; when the cache is full the oldest `n_discard` of the others go.
Positions are slots in the cache: attention must see no distance longer than the cache.

No key is ever moved or turned for that. What attention sees is differences of positions, so the tokens that stay keep
the positions at which they came, and it is the few sinks that follow them: their keys lie at the positions at which
they came first, and are turned by as many tokens as have gone, from there, whenever they are read. Native code turns
the query back instead (quantization/cpu/decode.h). The others lie in a ring, where a new token takes the slot of one
that has gone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .paged_cache import PagedCacheLayer
from .pages import ALL_ROWS, Pages
from .rotation import Rotation

PROMPT_SHARE = 4  # of the ring, 1 / PROMPT_SHARE goes at once at least while a prompt is read


@dataclass(frozen=True)
class StreamingOptions:
    """`ctx_size`: tokens that the cache holds. `n_keep`: how many of the first ones stay. `n_discard`: how many of the
    oldest others go when it is full; -1: half of them.

    Raises ValueError unless n_keep >= 0, ctx_size > n_keep + 1 and n_discard is -1 or 1 to ctx_size - n_keep.
    """

    ctx_size: int
    n_keep: int = 4
    n_discard: int = -1

    def __post_init__(self) -> None:
        values = self.ctx_size, self.n_keep, self.n_discard
        if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
            raise ValueError(f"{self}: expected whole numbers")
        if self.n_keep < 0 or self.ctx_size <= self.n_keep + 1:
            raise ValueError(f"{self}: expected n_keep >= 0 and ctx_size > n_keep + 1")
        if self.n_discard != -1 and not 1 <= self.n_discard <= self.ring:
            raise ValueError(f"{self}: expected n_discard of -1 (half), or of 1 to ctx_size - n_keep = {self.ring}")

    def __str__(self) -> str:
        return f"ctx_size={self.ctx_size!r}, n_keep={self.n_keep!r}, n_discard={self.n_discard!r}"

    @property
    def ring(self) -> int:
        """Tokens that are not sinks."""
        return self.ctx_size - self.n_keep

    def discarded(self, prompting: bool) -> int:
        """How many tokens go at once. While a prompt is read more may go than asked for, since what is read in one
        piece has to fit what has become free.
        """
        asked = max(1, self.ring // 2) if self.n_discard == -1 else self.n_discard
        return max(asked, self.ring // PROMPT_SHARE) if prompting else asked

    def slots(self, first: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """(slot, tokens) of the tokens [start, stop) that a cache holds, where the oldest that is no sink lies `first`
        places behind the sinks."""
        if start < self.n_keep and start < stop:
            yield start, min(stop, self.n_keep) - start
            start = min(stop, self.n_keep)
        while start < stop:
            place = (first + start - self.n_keep) % self.ring
            count = min(stop - start, self.ring - place)
            yield self.n_keep + place, count
            start += count


@dataclass(frozen=True)
class Row:
    """What the cache holds of one row of a batch: `held` tokens, the oldest that is no sink `first` places behind the
    sinks; `evicted` tokens have gone.
    """

    held: int = 0
    first: int = 0
    evicted: int = 0

    @property
    def position(self) -> int:
        """Of the next token."""
        return self.evicted + self.held


@dataclass(frozen=True)
class Held:
    """What a layer holds. `columns`: of the batch's text so far, padding included."""

    rows: tuple[Row, ...]
    columns: int = 0

    @functools.cached_property
    def longest(self) -> int:
        return max(row.held for row in self.rows)

    @functools.cached_property
    def uniform(self) -> bool:
        return all(row == self.rows[0] for row in self.rows)


@functools.lru_cache(maxsize=1024)
def stored(options: StreamingOptions, row: Row, count: int, prompting: bool) -> tuple[tuple[Any, ...], Row]:
    """Where `count` tokens go, one after the other: (the first of them, slot, how many), and what the row holds then.
    When the cache has become full the oldest have gone already.
    """
    held, first, evicted, done = row.held, row.first, row.evicted, 0
    runs = []
    while done < count:
        part = min(count - done, options.ctx_size - held)
        for slot, tokens in options.slots(first, held, held + part):
            runs.append((done, slot, tokens))
            done += tokens
        held += part
        if held == options.ctx_size:
            gone = options.discarded(prompting)
            held, first, evicted = held - gone, (first + gone) % options.ring, evicted + gone
    return tuple(runs), Row(held, first, evicted)


@functools.lru_cache(maxsize=1024)
def after(options: StreamingOptions, held: Held, count: int, pads: tuple[int, ...], prompting: bool) -> Held:
    """What is held once `count` columns more have come, of which `pads` of each row are padding."""
    rows = zip(held.rows, pads, strict=True)
    return Held(
        tuple(stored(options, row, count - padding, prompting)[1] for row, padding in rows), held.columns + count
    )


class StreamingLayer(PagedCacheLayer):
    """One layer of a StreamingCache. What `update` returns, and `keys` and `values` are, is what the rows hold in the
    order of their texts, aligned at the right: [batch, kv_heads, tokens of the longest row, head_dim], zeros at the
    left of the others. Keys are at the positions of their tokens, those of sinks as many tokens later as have gone.
    """

    def __init__(
        self,
        options: StreamingOptions,
        rotation: Rotation | None,
        by_position: bool,
        dtype: torch.dtype | None = None,
        learned: bool = False,
    ) -> None:
        """`rotation`: how keys of this layer were turned; None: not at all. `by_position`: whether the model counts
        positions from `get_seq_length`, not slots. `learned`: keys are good for their slots only; when some are evicted
        the others are `stale`.
        """
        super().__init__(dtype)
        self.options, self.rotation, self.by_position = options, rotation, by_position
        self.learned, self.stale = learned, False
        self.held: Held | None = None
        self.pads: tuple[int, ...] | None = None  # of the columns that come next
        self.prompting = False

    def reset(self) -> None:
        super().reset()
        self.held, self.pads, self.stale = None, None, False

    def restart(self) -> None:
        """Forgets keys and values, not how many tokens there were: those that are held come again."""
        if self.held is not None:
            rows = tuple(Row(evicted=row.evicted) for row in self.held.rows)
            self.held, self.stale = Held(rows, self.held.columns - self.held.longest), False

    def get_seq_length(self) -> int:
        return 0 if self.held is None else self.held.columns if self.by_position else self.held.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (0 if self.held is None else self.held.longest) + query_length, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes `key_states`, `value_states` [batch, kv_heads, new, head_dim]; returns those that there were with the
        new ones behind them. If the cache has become full, the oldest are gone afterwards.

        Raises ValueError for states of other sizes, and where what is held is `stale`.
        """
        if self.stale:
            raise ValueError(
                "past_key_values: positions are learned, and the tokens that stayed have to be computed again; only "
                "hf_sparse's generate does so"
            )
        keys = self._fitting("key_states", self._keys, key_states)
        values = self._fitting("value_states", self._values, value_states)
        count = key_states.shape[2]
        if count != value_states.shape[2]:
            raise ValueError(f"value_states: {value_states.shape[2]} tokens, but key_states has {count}")
        held = self.held or Held((Row(),) * len(key_states))
        pads = self.pads or (0,) * len(key_states)
        if any(padding and row.held for padding, row in zip(pads, held.rows, strict=True)):
            raise ValueError(
                "attention_mask: padding may come before a row's first token only; where no mask is given transformers "
                "takes every pad_token_id of the text for padding"
            )
        self._keys, self._values, self.held = keys, values, held
        new = keys.as_stored(key_states), values.as_stored(value_states)
        whole = new if held.longest == 0 else (self._whole(keys, True, new[0]), self._whole(values, False, new[1]))
        for rows, row, padding in self._rows(held, pads):
            for done, slot, tokens in stored(self.options, row, count - padding, self.prompting)[0]:
                chosen = slice(padding + done, padding + done + tokens)
                keys.put(slot, key_states[rows, :, chosen], rows)
                values.put(slot, value_states[rows, :, chosen], rows)
        self.held, self.pads = after(self.options, held, count, pads, self.prompting), None
        self.stale = self.learned and any(
            now.evicted > row.evicted for now, row in zip(self.held.rows, held.rows, strict=True)
        )
        return whole

    @staticmethod
    def _rows(held: Held, pads: Sequence[int] | None = None) -> Iterator[tuple[slice, Row, int]]:
        """Rows that are alike, what each holds, and its padding."""
        of_rows = [0] * len(held.rows) if pads is None else list(pads)
        if held.uniform and len(set(of_rows)) == 1:
            yield ALL_ROWS, held.rows[0], of_rows[0]
            return
        for i, row in enumerate(held.rows):
            yield slice(i, i + 1), row, of_rows[i]

    def _whole(self, pages: Pages, turned: bool, new: Tensor | None = None) -> Tensor:
        """What `pages` hold of the rows, then `new`; keys of sinks are `turned`."""
        held = self.held
        assert held is not None
        out = pages.empty(held.longest + (0 if new is None else new.shape[2]))
        if new is not None:
            out[:, :, held.longest :] = new
        for rows, row, _ in self._rows(held):
            start = held.longest - row.held
            out[rows, :, :start] = 0
            of_rows, at = out[rows, :, start : held.longest], 0
            for slot, tokens in self.options.slots(row.first, 0, row.held):
                pages.take(slot, of_rows[:, :, at : at + tokens], rows)
                at += tokens
            if turned and row.evicted and self.rotation is not None:
                sinks = of_rows[:, :, : self.options.n_keep]
                sinks.copy_(self.rotation.turn(sinks, row.evicted))
        return out

    @property  # type: ignore[misc]  # nobody sets them
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return None if self._keys is None or self.held is None else self._whole(self._keys, turned=True)

    @property  # type: ignore[misc]
    def values(self) -> Tensor | None:  # type: ignore[override]
        return None if self._values is None or self.held is None else self._whole(self._values, turned=False)

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.held is not None and super().is_initialized

    def crop(self, tokens_to_remove: int) -> None:
        """Takes `-tokens_to_remove` tokens off the end. Raises ValueError where some have been evicted and fewer are
        left behind the sinks: what follows a sink in the text is gone.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: expected 0 or less, got {tokens_to_remove}")
        if self.held is None:
            return
        count = -int(tokens_to_remove)
        left = [row.held - self.options.n_keep for row in self.held.rows if row.evicted]
        if min(left, default=count) < count:
            raise ValueError(f"tokens_to_remove: {count} tokens, but behind the sinks the cache holds {min(left)}")
        rows = tuple(replace(row, held=max(0, row.held - count)) for row in self.held.rows)
        self.held = Held(rows, max(0, self.held.columns - count))

    def _select(self, rows: Callable[[Tensor], Tensor]) -> None:
        super()._select(rows)
        if self.held is not None:
            chosen = rows(torch.arange(len(self.held.rows))).tolist()
            self.held = replace(self.held, rows=tuple(self.held.rows[i] for i in chosen))

    @property
    def state(self) -> tuple[Any, ...]:
        """What `went_back` brings back."""
        return self.held, self.pads, self.stale

    def went_back(self, state: tuple[Any, ...]) -> bool:
        """Makes the layer one that holds what it held at `state`. False where that has been written over, which a pass
        through a model does only if it has more tokens than there is room.
        """
        then, now = state[0], self.held
        if then is not None and now is not None:
            came = now.columns - then.columns
            if any(row.held + came > self.options.ctx_size for row in then.rows):
                return False
        self.held, self.pads, self.stale = state
        return True

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """What assisted decoding asks before it takes tokens back, as it does at every step: where some were evicted in
        between, what is left is not what there was. `crop` does what it can."""
        return False

    # For native code and for tiers

    def is_at(self, state: Any) -> bool:
        return self.held is state or (state is not None and self.held == state)

    def wrote_one(self, slot: int, state: Any) -> None:
        super().wrote_one(slot, state)
        self.held = after(self.options, state, 1, (0,), self.prompting)

    def stored_tensors(self) -> dict[str, Tensor]:
        """What is held, as it lies: `keys`, `values` [batch, kv_heads, slots, head_dim], int8 ones with `keys_scales`,
        `values_scales` [batch, kv_heads, slots]."""
        tensors = {}
        for name, pages in zip(("keys", "values"), self._both("stored_tensors"), strict=True):
            values, scales = pages.stored()
            tensors[name] = values
            if scales is not None:
                tensors[f"{name}_scales"] = scales
        return tensors

    def take_tensors(self, tensors: dict[str, Tensor], held: Held, states_dtype: torch.dtype, where: str) -> None:
        """What `stored_tensors` gave, of rows that held `held`. Raises ValueError, which begins with `where`, for what
        does not go together."""
        dtype = self.dtype or states_dtype
        runs = (run for row in held.rows for run in self.options.slots(row.first, 0, row.held))
        batch, used = len(held.rows), max((slot + count for slot, count in runs), default=0)
        shape = tensors["keys"].shape
        for name in ("keys", "values"):
            values, scales = tensors[name], tensors.get(f"{name}_scales")
            if values.dtype != dtype or (scales is None) != (dtype != torch.int8):
                raise ValueError(f"{where}: expected {name} of {dtype}, got {values.dtype}")
            if values.dim() != 4 or (values.shape[0], values.shape[1:3]) != (batch, shape[1:3]):
                raise ValueError(f"{where}: expected {name} of {batch} rows, got {list(values.shape)}")
            if not used <= values.shape[2] <= self.options.ctx_size:
                raise ValueError(f"{where}: expected {used} to {self.options.ctx_size} slots, got {values.shape[2]}")
            if scales is not None and (scales.dtype, scales.shape) != (torch.float32, values.shape[:3]):
                raise ValueError(f"{where}: expected a scale per vector of {name}, got {list(scales.shape)}")
            setattr(self, f"_{name}", Pages.of_stored(values, scales, states_dtype))
        self.held = held

    def of_heads(self, heads: Tensor, device: torch.device) -> StreamingLayer:
        """A layer with the KV heads `heads` of this one, on `device`."""
        made = StreamingLayer(self.options, self.rotation, self.by_position, self.dtype, self.learned)
        made.held, made.pads, made.stale, made.prompting = self.held, self.pads, self.stale, self.prompting
        for name in ("_keys", "_values"):
            pages = getattr(self, name)
            setattr(made, name, None if pages is None else pages.of_heads(heads, device))
        return made

    @classmethod
    def joined(cls, parts: Sequence[StreamingLayer], order: Tensor, device: torch.device) -> StreamingLayer:
        """One layer with the KV heads of all `parts`, one behind the other, in `order`, on `device`."""
        made = parts[0].of_heads(torch.arange(0), device)
        for name in ("_keys", "_values"):
            pages = [getattr(part, name) for part in parts]
            setattr(made, name, None if pages[0] is None else Pages.joined(pages, order, device))
        return made
