"""A conversation whose cache is carried from turn to turn, so that only what is new passes through the model.

Rendering a conversation anew by its template need not give the ids that were generated: tokens merge otherwise, white
space goes, an answer was cut. The ids that the cache has seen are therefore the truth, and a turn appends what the
template says behind the last answer. A template that changes earlier turns has the whole conversation computed anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import safe_open
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_sparse.modeling import StreamingCache, StreamingOptions, max_positions

from .log import logger, warn_once

DEFAULT_CTX_SIZE = 2048
DEFAULT_NEW_TOKENS = 512
SINKS = 4
METADATA = "chat"  # where in a saved cache
OWN_OPTIONS = {
    *("inputs", "input_ids", "attention_mask", "past_key_values", "cache", "use_cache"),
    *("streamer", "return_dict_in_generate"),
}

Message = dict[str, str]


@dataclass(frozen=True)
class Turn:
    """`computed_tokens` passed through the model, `new_tokens` came out of it, `seconds` from the first of them to the
    last. `interrupted`: by Ctrl-C.
    """

    computed_tokens: int
    new_tokens: int
    seconds: float
    interrupted: bool

    @property
    def tokens_per_second(self) -> float:
        """Of decode: the first new token counts as the prompt's. NaN for less than two."""
        return decode_speed([self])


def decode_speed(turns: Iterable[Turn]) -> float:
    """Tokens per second of all `turns` together; NaN where none has two tokens."""
    decoded = [turn for turn in turns if turn.new_tokens > 1]
    seconds = sum(turn.seconds for turn in decoded)
    return sum(turn.new_tokens - 1 for turn in decoded) / seconds if seconds > 0 else float("nan")


class Chat:
    """A conversation with a loaded model, without an end: see StreamingOptions.

    `messages`: [{"role": ..., "content": ...}], those of the template. `ids`, int64 [1, tokens]: the conversation so
    far, without the token that ended the last answer. `cache`, a StreamingCache, has seen the first `cache.columns` of
    them. `computed_tokens` passed through the model in all, `turns` says how many in each turn.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        ctx_size: int | None = None,
        n_keep: int | str = SINKS,
        n_discard: int = -1,
        system: str | None = None,
        **generation: Any,
    ) -> None:
        """`model` as `SparseAutoModelForCausalLM` loads it. `ctx_size`, `n_keep`, `n_discard`: see StreamingOptions;
        None: 2048, or the model's positions; "system": all up to the end of the system message stays. `generation`: for
        `generate`; by default an answer has at most 512 tokens.

        Raises ValueError for options that do not go together, a tokenizer without a chat template and a template that
        has no place for a system message.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("tokenizer: has no chat template, which says how turns are written; set its chat_template")
        if taken := sorted(OWN_OPTIONS & generation.keys()):
            raise ValueError(f"{', '.join(taken)}: the chat sets these itself; expected other options of generate")
        self.model, self.tokenizer = model, tokenizer
        self.messages: list[Message] = [] if system is None else [_message("system", system)]
        beginning = None if system is None else self._system_text(system)
        if ctx_size is None:
            positions = max_positions(model.config.get_text_config(decoder=True))
            ctx_size = DEFAULT_CTX_SIZE if positions is None else min(DEFAULT_CTX_SIZE, positions)
        self.options = StreamingOptions(ctx_size, self._sinks(n_keep, ctx_size, beginning), n_discard)
        self.stop_ids = _stop_ids(model, tokenizer, generation)
        self.generation = self._defaults(generation) | generation
        self.reset()

    def _sinks(self, n_keep: int | str, ctx_size: int, beginning: str | None) -> int:
        if not isinstance(n_keep, str):
            return n_keep
        if n_keep != "system":
            raise ValueError(f'n_keep: got {n_keep!r}, expected a number or "system"')
        if beginning is None:
            raise ValueError('n_keep: got "system", but there is no system prompt; give one')
        count = max(SINKS, len(self._tokens(beginning)))
        if ctx_size <= count + 1:
            raise ValueError(
                f'n_keep: got "system", which is {count} tokens, with ctx_size={ctx_size}; expected a ctx_size of at '
                f"least {count + 2}, or a shorter system prompt"
            )
        return count

    def _system_text(self, system: str) -> str:
        """All up to the end of the system message, with what the template closes it with, where that can be told."""
        whole = self._render([*self.messages, _message("user", "?")])
        at = whole.find(system.strip())
        if at < 0:
            raise ValueError("system: the chat template has no place for a system message")
        with contextlib.suppress(ValueError):  # a template may want a question
            alone = self._render(self.messages, asks=False)
            if len(alone) > at and whole.startswith(alone):
                return alone
        return whole[: at + len(system.strip())]

    def _defaults(self, generation: dict[str, Any]) -> dict[str, Any]:
        pad = self.tokenizer.pad_token_id
        found: dict[str, Any] = {"pad_token_id": pad if pad is not None else next(iter(self.stop_ids), 0)}
        if self.stop_ids:
            found["eos_token_id"] = list(self.stop_ids)
        config = generation.get("generation_config") or self.model.generation_config
        unbounded = config.max_new_tokens is None and config.max_length in (None, 20)  # transformers' default, too few
        if unbounded and "max_length" not in generation:
            found["max_new_tokens"] = DEFAULT_NEW_TOKENS
        return found

    def reset(self) -> None:
        """Forgets all but the system prompt."""
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]
        self.ids = _row([])
        self.cache = self._empty_cache()
        self.turns: list[Turn] = []
        self.computed_tokens = 0

    # A turn

    def send(self, text: str, streamer: Any = None) -> str:
        """The answer to `text`; `streamer` gets its tokens as transformers' streamers do.

        Ctrl-C ends the answer after the token that is being computed, a second one at once: what came so far is the
        answer. Raises what `generate` raises, and ValueError for a message that the template refuses: the conversation
        is then what it was before.
        """
        ids, cache = self._prompt(text)
        heard, stop, before = _Heard(streamer), _Stop(), _passed(cache)
        with stop.on_interrupt():
            try:
                self._generate(ids, cache, heard, stop)
            except KeyboardInterrupt:
                stop.told = stop.over = True
            except BaseException:
                if cache is self.cache:
                    self.cache = self._settled(cache, self.ids.shape[1])
                raise
            finally:
                stop.over = True
                computed = max(0, _passed(cache) - before)
                self.computed_tokens += computed
            new = heard.tokens
            said = new[:-1] if new and new[-1] in self.stop_ids else new  # the template says how an answer ends
            answer: str = self.tokenizer.decode(said, skip_special_tokens=True)
            self.ids = torch.cat((ids, _row(said)), dim=1)
            self.cache = self._settled(cache, self.ids.shape[1])
            self.messages = [*self.messages, _message("user", text), _message("assistant", answer)]
            self.turns.append(Turn(computed, len(new), heard.seconds, stop.told))
            heard.end()
        return answer

    def _generate(self, ids: Tensor, cache: StreamingCache, heard: _Heard, stop: _Stop) -> None:
        ids = ids.to(self.model.device)
        options = dataclasses.asdict(self.options) | self.generation
        options["stopping_criteria"] = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), stop])
        mask = torch.ones_like(ids)
        self.model.generate(
            ids, attention_mask=mask, cache=cache, streamer=heard, return_dict_in_generate=False, **options
        )

    def _prompt(self, text: str) -> tuple[Tensor, StreamingCache]:
        """The ids of the conversation with `text`, int64 [1, tokens], and the cache that has seen the first of them."""
        whole = self._render([*self.messages, _message("user", text)])
        if self.ids.shape[1] == 0:
            return _row(self._tokens(whole)), self.cache
        more = continuation(whole, self._render(self.messages[:-1]), self.messages[-1]["content"])
        if more is not None:
            return torch.cat((self.ids, _row(self._tokens(more))), dim=1), self.cache
        warn_once(
            "messages: the chat template changes earlier turns, so that what was computed of them is of no use: the "
            "whole conversation is computed anew"
        )
        return _row(self._tokens(whole)), self._empty_cache()

    def _render(self, messages: list[Message], asks: bool = True) -> str:
        """`asks`: with the beginning of an answer. Raises ValueError for messages that the template refuses."""
        try:
            text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"messages: the chat template refuses those of {roles}: {error}") from error
        return text

    def _tokens(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def _settled(self, cache: StreamingCache, tokens: int) -> StreamingCache:
        """`cache`, of which all layers have then seen the same, at most the first `tokens` of the conversation. An
        empty one where an interruption left what cannot be mended: the conversation is then computed anew.
        """
        parts: list[Any] = cache.parts()
        common = min([tokens, *(0 if part.held is None else part.held.columns for part in parts)])
        if common == 0:
            return self._empty_cache()
        surplus = [part.held.columns - common for part in parts]
        rows = [(row, count) for part, count in zip(parts, surplus, strict=True) for row in part.held.rows]
        if all(not row.evicted or row.held - count >= self.options.n_keep for row, count in rows):
            for part, count in zip(parts, surplus, strict=True):
                part.crop(-count)
            if len({(part.held, part.stale) for part in parts}) == 1:
                return cache
        logger.info("The cache was left incomplete: the conversation is computed anew with the next message")
        return self._empty_cache()

    def _empty_cache(self) -> StreamingCache:
        made: StreamingCache = self.model.streaming_cache(self.options)
        return made

    def stats(self) -> dict[str, int | float]:
        """What /stats shows, by its name there; tokens are counted."""
        return {
            "turns": sum(message["role"] == "assistant" for message in self.messages),
            "tokens computed": self.computed_tokens,
            "tokens in the conversation": self.ids.shape[1],
            "tokens held": self.held,
            "tokens evicted": self.evicted,
            "tokens/s of decode": decode_speed(self.turns),
            "n_keep": self.options.n_keep,
            "ctx_size": self.options.ctx_size,
        }

    @property
    def held(self) -> int:
        """Tokens that the cache holds."""
        return sum(self.cache.held)

    @property
    def evicted(self) -> int:
        """Tokens that have gone from it."""
        return sum(self.cache.evicted)

    # Saving

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the conversation, cache and all, to one safetensors file, aside and then renamed.

        Raises ValueError where nothing has been said, an interruption has left the cache behind, or positions are
        learned.
        """
        missing = self.ids.shape[1] - self.cache.columns
        if self.ids.shape[1] == 0:
            raise ValueError("save: nothing has been said yet")
        if missing > 1:
            raise ValueError(f"save: after an interruption {missing} tokens are not computed yet; send a message first")
        if self.cache.positions_are == "learned":
            raise ValueError("save: a cache of learned positions is not saved")
        about = {"model": self._identity(), "messages": self.messages, "ids": self.ids[0].tolist()}
        self.cache.save(path, metadata={METADATA: json.dumps(about)})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Goes on with the conversation that `save` wrote, with its `ctx_size`, `n_keep` and `n_discard`; counters
        begin anew. Raises ValueError for a file that is something else or was written with another model,
        FileNotFoundError where there is none; the conversation is then what it was.
        """
        path = Path(path)
        about = _about(path)
        ours, theirs = self._identity(), about.get("model")
        if theirs != ours:
            raise ValueError(
                f"path: {path} is a chat with another model: got {_short(theirs)}, expected {_short(ours)}"
            )
        messages: Any = about.get("messages")
        ids: Any = about.get("ids")
        if not _are_messages(messages):
            raise ValueError(
                f"path: {path}: messages: expected a list of {{role, content}} that ends with an answer of the "
                f"assistant, got {_short(messages)}"
            )
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < vocabulary for id in ids):
            raise ValueError(f"path: {path}: ids: expected a list of whole numbers from 0 to {vocabulary - 1}")
        cache = StreamingCache.load(path, self.model, dtype=self.model.cache_dtype)
        if len(cache.held) != 1 or not 0 <= len(ids) - cache.columns <= 1:
            raise ValueError(
                f"path: {path}: ids: got {len(ids)} for a cache that has seen {cache.columns} tokens in "
                f"{len(cache.held)} rows, expected as many or one more, of one row"
            )
        self.options, self.cache, self.messages = cache.options, cache, messages
        self.ids = _row(ids)
        self.turns, self.computed_tokens = [], 0

    def _identity(self) -> dict[str, Any]:
        """Of the model: keys and values fit no other, not even one of the same weights in another precision."""
        config, key = self.model.config, self.model.plan.key
        return {"type": config.model_type, "checkpoint": key.checkpoint, "quantization": key.quantization}


def continuation(whole: str, seen: str, answer: str) -> str | None:
    """What the conversation `whole` says behind `seen` and `answer`, which follow each other at its beginning, but for
    white space around the answer, which templates add and take; None where they do not: earlier turns were changed.
    """
    if not whole.startswith(seen):
        return None
    rest = whole[len(seen) :]
    for text in (answer, answer.lstrip(), answer.strip()):
        at = rest.find(text)
        if text and at >= 0 and not rest[:at].strip():
            return rest[at + len(text) :]
    return None if answer.strip() else rest


class _Heard:
    """A streamer that keeps what it hands on; the prompt comes first."""

    def __init__(self, streamer: Any) -> None:
        self.streamer, self.tokens, self.ended = streamer, list[int](), False
        self._times: list[float] | None = None

    def put(self, value: Tensor) -> None:
        if self._times is None:
            self._times = []
        else:
            self.tokens += value.flatten().tolist()
            self._times.append(time.perf_counter())
        if self.streamer is not None:
            self.streamer.put(value)

    def end(self) -> None:
        """Once: an interruption may come before `generate` says it."""
        if self.streamer is not None and not self.ended:
            self.ended = True
            self.streamer.end()

    @property
    def seconds(self) -> float:
        return self._times[-1] - self._times[0] if self._times else 0.0


class _Stop(StoppingCriteria):
    """Ends an answer once it was `told` to; `over`: it has ended."""

    told = False
    over = False

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), self.told, device=input_ids.device)

    @contextlib.contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """Ctrl-C tells it, a second one is a KeyboardInterrupt, but for an answer that is over. In other threads, which
        get no signals, and where they are ignored all stays as it is.
        """
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            yield
            return

        def tell(*_: Any) -> None:
            if self.over:
                return
            if self.told:
                raise KeyboardInterrupt
            self.told = True

        before = signal.signal(signal.SIGINT, tell)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _row(ids: list[int]) -> Tensor:
    return torch.tensor([ids], dtype=torch.int64)


def _are_messages(messages: Any) -> bool:
    if not isinstance(messages, list) or not messages:
        return False
    for message in messages:
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            return False
        if not all(isinstance(text, str) for text in message.values()):
            return False
    return bool(messages[-1]["role"] == "assistant")


def _stop_ids(model: Any, tokenizer: Any, generation: dict[str, Any]) -> tuple[int, ...]:
    """Tokens that end an answer: as given, else those of the model and of its tokenizer, which may know of turns."""
    if "eos_token_id" in generation:
        found: list[Any] = [generation["eos_token_id"]]
    else:
        config = generation.get("generation_config") or model.generation_config
        found = [config.eos_token_id, tokenizer.eos_token_id]
    each = (torch.as_tensor(ids).flatten().tolist() for ids in found if ids is not None)
    return tuple(dict.fromkeys(int(id) for ids in each for id in ids))


def _passed(cache: StreamingCache) -> int:
    """Tokens that passed through the model for `cache`."""
    return cache.columns + cache.reevaluated_tokens


def _about(path: Path) -> dict[str, Any]:
    """What `Chat.save` says beside the cache."""
    if not path.is_file():
        raise FileNotFoundError(f"path: {path} is no file")
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})[METADATA])
        if not isinstance(about, dict):
            raise TypeError(f"expected fields, got {_short(about)}")
    except Exception as error:  # safetensors has errors of its own
        raise ValueError(f"path: {path} is no saved chat: {type(error).__name__}: {error}") from error
    return about


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
