"""StreamingCache: the cache of a whole model. See streaming.py for how it keeps what it keeps."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .attention import cached_heads
from .cache import parts_of
from .rotation import Rotation, rotations_of, turn_exactly
from .streaming import Held, Row, StreamingLayer, StreamingOptions

ROTARY = (
    *("llama", "mistral", "smollm3", "olmo2", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma3", "phi3", "nemotron"),
    *("gpt_neox", "phi", "cohere", "glm", "glm4"),
)
ALIBI = ("bloom", "mpt")  # and falcon, if its config says so
LEARNED = ("opt", "gpt2")
FORMAT = "hf_sparse.streaming_cache.1"
MOST_TOKENS = 1 << 48  # of a text: positions stay exact in float64


class StreamingCache(Cache):
    """A transformers Cache for texts without an end; see StreamingOptions for what it holds and StreamingLLM (Xiao et
    al. 2024, section 3) for why.

    `model.generate(..., ctx_size=...)` of hf_sparse makes one by itself. A plain transformers model with rotary
    positions takes one as `past_key_values`, in `generate` or in a loop of one's own: positions go on as if nothing had
    been evicted, and what has more tokens than there is room is computed in one pass before some go. Rows with padding
    need hf_sparse's `generate`.
    """

    def __init__(
        self,
        model: Any,
        ctx_size: int,
        n_keep: int = 4,
        n_discard: int = -1,
        dtype: torch.dtype | None = None,
        reevaluates: bool = False,
    ) -> None:
        """For `model`, of which nothing is kept; it gets hooks that see to exact angles and look at masks, and do
        nothing with other caches. `dtype`: of what is cached, as in PagedCacheLayer. `reevaluates`: the
        caller sees to learned positions, see `stale`.

        Raises ValueError for options that do not go together, a `ctx_size` beyond the model's positions and a model
        whose positions are not known to stream.
        """
        self.options = StreamingOptions(ctx_size, n_keep, n_discard)
        config = model.config.get_text_config(decoder=True)
        self.positions_are = positions_of(config)
        positions = max_positions(config)
        if positions is not None and ctx_size > positions:
            raise ValueError(f"{self.options}: expected a ctx_size of at most the model's {positions} positions")
        if self.positions_are == "learned" and not reevaluates:
            raise ValueError(
                f"model: {config.model_type} has learned positions, which its keys cannot be rid of; models that "
                "hf_sparse loads are streamed by generate(ctx_size=...), which computes the kept tokens anew"
            )
        turn_exactly(model)
        if not any(_before_pass in module._forward_pre_hooks.values() for module in model.modules()):
            watch_passes(model.base_model)
        count = config.num_hidden_layers
        self.rotations: dict[str | None, Rotation] = {}
        of_layers: list[Rotation | None] = [None] * count
        if self.positions_are == "rotary":
            attention = _attention_modules(model, count)
            self.rotations = rotations_of(model, ctx_size, attention[0])
            for i, module in enumerate(attention):
                if _turns(module):
                    of_layers[i] = self.rotations[None if None in self.rotations else config.layer_types[i]]
        by_position, learned = self.positions_are == "rotary", self.positions_are == "learned"
        self.reevaluated_tokens = 0
        super().__init__(
            [StreamingLayer(self.options, rotation, by_position, dtype, learned) for rotation in of_layers]
        )

    def __repr__(self) -> str:
        return f"StreamingCache({self.options}, held={self.held}, evicted={self.evicted}, layers={len(self.layers)})"

    def parts(self) -> list[StreamingLayer]:
        """The layers, and of those that are split between tiers the parts."""
        return [part for layer in self.layers for part in parts_of(layer)]

    @property
    def state(self) -> Held | None:
        """What all layers hold; None before the first token."""
        return self.parts()[0].held

    @property
    def held(self) -> tuple[int, ...]:
        """Tokens that the cache holds, by row."""
        return () if self.state is None else tuple(row.held for row in self.state.rows)

    @property
    def evicted(self) -> tuple[int, ...]:
        """Tokens that have gone, by row. None of those that stayed was computed again, but where positions are learned
        (`reevaluated_tokens`)."""
        return () if self.state is None else tuple(row.evicted for row in self.state.rows)

    @property
    def columns(self) -> int:
        """Of the text so far, padding included."""
        return 0 if self.state is None else self.state.columns

    @property
    def room(self) -> int:
        """Tokens that every row can take in one piece before some are evicted."""
        return self.options.ctx_size - max(self.held, default=0)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        held = self.parts()[layer_idx].held if layer_idx < len(self.layers) else None
        return 0 if held is None else held.longest

    # What a caller sees to who knows of padding and of prompts

    @contextlib.contextmanager
    def reads_a_prompt(self) -> Iterator[None]:
        """While this is on, more may be evicted at once than was asked for, so that what follows fits.

        Raises ValueError where layers hold different tokens.
        """
        self._check_whole()
        self.prompting = True
        try:
            yield
        finally:
            for part in self.parts():
                part.pads, part.prompting = None, False

    @property
    def prompting(self) -> bool:
        return self.parts()[0].prompting

    @prompting.setter
    def prompting(self, value: bool) -> None:
        for part in self.parts():
            part.prompting = value

    def expect(self, pads: Sequence[int], prompting: bool) -> None:
        """The next pass has `pads` columns of padding, by row, before the tokens; `prompting`: see `reads_a_prompt`.

        Raises ValueError where the cache holds another number of rows.
        """
        if self.state is not None and len(self.state.rows) != len(pads):
            raise ValueError(f"past_key_values: the cache holds {len(self.state.rows)} rows, the batch has {len(pads)}")
        for part in self.parts():
            part.pads, part.prompting = tuple(pads), prompting

    def positions(self, columns: int, batch: int) -> Tensor:
        """int64 [batch, columns]: of the tokens that come next, after what `expect` was told; 0 for padding."""
        part = self.parts()[0]
        rows = (Row(),) * batch if part.held is None else part.held.rows
        pads = part.pads or (0,) * batch
        starts = torch.tensor([row.position - padding for row, padding in zip(rows, pads, strict=True)])
        return (starts[:, None] + torch.arange(columns)).clamp_min(0)

    def mask(self, columns: int, batch: int) -> Tensor | None:
        """bool [batch, held + columns], as an attention mask: false where rows are shorter than the longest. None where
        none is.
        """
        part = self.parts()[0]
        held = part.held or Held((Row(),) * batch)
        pads = part.pads or (0,) * batch
        if held.uniform and not any(pads):
            return None
        total = held.longest + columns
        seen = torch.tensor([row.held + columns - padding for row, padding in zip(held.rows, pads, strict=True)])
        return torch.arange(total) >= total - seen[:, None]

    def before_pass(self, mask: Any) -> None:
        """Raises ValueError where layers hold different tokens, and, if `expect` was told nothing of the pass that
        comes, where `mask` has padding or there was some: positions are then not what a caller takes them for.
        """
        self._check_whole()
        held = self.state
        if self.parts()[0].pads is not None:
            return
        uneven = held is not None and (not held.uniform or held.rows[0].position != held.columns)
        if uneven or (isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all())):
            raise ValueError(
                "attention_mask: rows with padding stream in generate() of a model that hf_sparse loaded only"
            )

    def _check_whole(self) -> None:
        parts = self.parts()
        if any(part.held != parts[0].held for part in parts):
            raise ValueError("past_key_values: a pass through the model has failed halfway: begin with a new cache")

    def crop(self, tokens_to_remove: int) -> None:
        """Takes `-tokens_to_remove` tokens off the end, see StreamingLayer."""
        self._check_whole()
        super().crop(tokens_to_remove)

    @property
    def stale(self) -> bool:
        """Whether positions are learned, and the tokens that stay have to be computed at their new ones."""
        return self.parts()[0].stale

    def reevaluated(self, past: Tensor, new: Tensor, mask: Tensor | None, pads: Sequence[int]) -> Tensor:
        """Forgets all and returns the ids to go on with: of the text `past` [batch, columns], with `mask` [batch,
        columns or more], those that the cache holds, then `new`, in which `pads` columns are padding; padded on the
        left, as `expect` has been told.
        """
        state = self.state
        assert state is not None
        columns, keep, kept = past.shape[1], self.options.n_keep, []
        for i, row in enumerate(state.rows):
            real = past[i, 0 if mask is None else columns - int(mask[i, :columns].sum()) :]
            kept.append(torch.cat((real[:keep][: row.held], real[keep + row.evicted : row.position])))
        padded = past.new_zeros(len(past), state.longest)
        for i, ids in enumerate(kept):
            padded[i, state.longest - len(ids) :] = ids
        self.reevaluated_tokens += sum(map(len, kept))
        for part in self.parts():
            part.restart()
        self.expect(
            [state.longest - len(ids) + padding for ids, padding in zip(kept, pads, strict=True)], self.prompting
        )
        return torch.cat((padded, new), dim=1)

    # Saving

    def save(self, path: str | os.PathLike[str], metadata: dict[str, str] | None = None) -> None:
        """Writes what the cache holds to one safetensors file, aside and then renamed. `metadata`: further texts."""
        if self.state is None:
            raise ValueError("save: the cache is empty")
        self._check_whole()
        if self.positions_are == "learned":
            raise ValueError("save: a cache of learned positions is good for nothing once a token has gone")
        tensors: dict[str, Tensor] = {}
        for i, layer in enumerate(self.layers):
            whole: Any = layer
            if hasattr(whole, "parts"):
                whole = whole.joined(torch.device("cpu"))
            tensors.update({f"{i}.{name}": tensor for name, tensor in whole.stored_tensors().items()})
        about = {
            "options": dataclasses.asdict(self.options),
            "rows": [dataclasses.asdict(row) for row in self.state.rows],
            "columns": self.state.columns,
        }
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=target.parent) as aside:
            file = Path(aside) / target.name
            save_file(tensors, file, metadata={**(metadata or {}), "format": FORMAT, "cache": json.dumps(about)})
            os.replace(file, target)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any, dtype: torch.dtype | None = None) -> StreamingCache:
        """What `save` wrote, for the same model. `dtype` as it was there. Raises ValueError for a file that is
        something else or does not fit `model`, FileNotFoundError where there is none.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"path: {path} is no file")
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
        except Exception as error:
            raise ValueError(f"path: {path} is no safetensors file: {error}") from error
        if metadata.get("format") != FORMAT:
            raise ValueError(f"path: {path} is no streaming cache of this version ({FORMAT})")
        options, held = _read(metadata.get("cache", ""), path)
        made = cls(model, **dataclasses.asdict(options), dtype=dtype, reevaluates=True)
        expected = {f"{i}.{name}" for i in range(len(made.layers)) for name in ("keys", "values")}
        scales = {f"{name}_scales" for name in expected} if dtype == torch.int8 else set()
        if tensors.keys() != expected | scales:
            raise ValueError(
                f"path: {path} holds other tensors than {len(made.layers)} layers of {dtype or 'any dtype'}"
            )
        for i, layer in enumerate(made.parts()):
            of_layer = {name.partition(".")[2]: t for name, t in tensors.items() if name.partition(".")[0] == str(i)}
            where, sizes = f"path: {path}, layer {i}", _kv_sizes(model)
            for found in (tuple(of_layer[name].shape[1::2]) for name in ("keys", "values")):
                if found != sizes:
                    raise ValueError(f"{where}: expected KV heads and head_dim {sizes} of the model, got {found}")
            layer.take_tensors(of_layer, held, model.dtype, where)
        return made


def positions_of(config: Any) -> str:
    """ "rotary", "alibi" or "learned". Raises ValueError for a family of which it is not known."""
    kind: str = config.model_type
    if kind in LEARNED:
        return "learned"
    if kind in ALIBI or (kind == "falcon" and config.alibi):
        return "alibi"
    if kind in ROTARY or kind == "falcon":
        return "rotary"
    known = ", ".join((*ROTARY, "falcon", *ALIBI))
    raise ValueError(f"model: it is not known how positions of {kind!r} stream; expected one of {known}")


def max_positions(config: Any) -> int | None:
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), None)


def _attention_modules(model: nn.Module, count: int) -> list[Any]:
    """By layer, as transformers made them."""
    found: dict[int, Any] = {}
    for module in model.modules():
        original = getattr(module, "_template", [module])[0]  # of a HybridAttention
        layer = getattr(original, "layer_idx", None)
        if isinstance(layer, int) and "Attention" in type(original).__name__:
            found.setdefault(layer, original)
    if sorted(found) != list(range(count)):
        raise ValueError(f"model: expected attention modules with layer_idx 0 to {count - 1}, got {sorted(found)}")
    return [found[i] for i in range(count)]


def _turns(attention: Any) -> bool:
    """Whether a layer has positions (SmolLM3 has layers that do not)."""
    return bool(getattr(attention, "use_rope", True))


def watch_passes(decoder: nn.Module) -> None:
    """From now on what is passed to `decoder` with a StreamingCache is looked at: see `StreamingCache.before_pass`."""
    decoder.register_forward_pre_hook(_before_pass, with_kwargs=True)


def _before_pass(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if not isinstance(cache, StreamingCache):
        return None
    cache.before_pass(mask := kwargs.get("attention_mask"))
    if isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all()):
        kwargs["attention_mask"] = None  # it may be as long as the text
    return args, kwargs


_before_pass.of_hf_sparse = True  # type: ignore[attr-defined]  # see Engine.observed


def _kv_sizes(model: Any) -> tuple[int, int]:
    """KV heads and head_dim of what the model caches."""
    config = model.config.get_text_config(decoder=True)
    heads: int = config.num_attention_heads
    return cached_heads(config, heads), getattr(config, "head_dim", None) or config.hidden_size // heads


def _read(text: str, path: Path) -> tuple[StreamingOptions, Held]:
    """Checked: what a file says may be anything."""
    try:
        about = json.loads(text)
        options = StreamingOptions(**about["options"])
        rows = tuple(Row(**row) for row in about["rows"])
        numbers = [n for row in rows for n in dataclasses.astuple(row)] + [about["columns"]]
        if not rows or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError("expected whole numbers of at least 0")
        if any(row.held >= options.ctx_size or row.first >= options.ring for row in rows):
            raise ValueError("a row holds more than ctx_size")
        if about["columns"] > MOST_TOKENS or any(row.position > about["columns"] for row in rows):
            raise ValueError("a row is longer than the text, or than any")
        if any(row.first != row.evicted % options.ring or row.held < options.n_keep for row in rows if row.evicted):
            raise ValueError("what a row holds does not follow from what it evicted")
        if any(row.first for row in rows if not row.evicted):
            raise ValueError("a row that evicted nothing does not begin at the beginning")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"path: {path} says nothing sensible of a cache: {error}") from error
    return options, Held(rows, about["columns"])
