"""Requests of several clients, answered one after the other by one thread that has the model to itself.

The model decodes one sequence at a time. Clients take turns, whatever the number of requests that each has waiting; the
requests of one client are answered in the order they came. Who goes away gives up the turn, within a token if it has
begun.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_sparse.modeling import StreamingCache, StreamingOptions

from .chat import _stop_ids
from .completion import Completion, RequestError, failure
from .log import logger

WAITING = 64  # requests at most
PIECE = 512  # tokens of a prompt that are read at once: who goes away is not read for any longer
REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Finished:
    """The end of an answer: `reason` is "stop" or "length", `tokens` were generated, the one that ends it included.
    `reused`: of the prompt, computed for the text before.
    """

    reason: str
    tokens: int
    reused: int = 0


class GoneError(Exception):
    """The client went away."""


@dataclass(eq=False)
class Job:
    """`deliver`, called in the thread that generates, gets pieces of text and at last Finished or an exception."""

    completion: Completion
    client: str
    deliver: Callable[[str | Finished | Exception], None]
    gone: bool = False


class Turns:
    """Jobs that wait, by client."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Job]] = {}
        self._changed = threading.Condition()
        self.closed = False

    def __len__(self) -> int:
        with self._changed:
            return sum(map(len, self._waiting.values()))

    def check_room(self) -> None:
        """Raises RequestError where no more may wait."""
        if self.closed:
            raise RequestError("The server is shutting down.", status=503)
        if len(self) >= WAITING:
            raise RequestError(f"The server is busy: {WAITING} requests are waiting; try again later.", status=503)

    def add(self, job: Job) -> None:
        """Raises RequestError where no more may wait."""
        self.check_room()
        with self._changed:
            self._waiting.setdefault(job.client, deque()).append(job)
            self._changed.notify()

    def drop(self, job: Job) -> None:
        """What has begun ends with its next token, what waits is never begun."""
        job.gone = True
        with self._changed:
            queue = self._waiting.get(job.client)
            if queue is not None and job in queue:
                queue.remove(job)
                if not queue:
                    del self._waiting[job.client]

    def take(self) -> Job | None:
        """The next one, waiting for it; None once it is closed. Its client goes to the end of the line."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.closed)
            if self.closed:
                return None
            client = next(iter(self._waiting))
            queue = self._waiting.pop(client)
            job = queue.popleft()
            if queue:
                self._waiting[client] = queue
            return job

    def close(self) -> list[Job]:
        """Those that will not have their turn."""
        with self._changed:
            self.closed = True
            left = [job for queue in self._waiting.values() for job in queue]
            self._waiting.clear()
            self._changed.notify_all()
            return left


class Kept:
    """What was computed of the last text, for the next one that begins alike: a conversation goes on most of the time.

    What has been evicted from a cache, or slid out of a window, is not brought back: such a text is computed anew.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._cache: Any = None

    def take(self, prompt: list[int]) -> tuple[Any, int]:
        """A cache that has seen so many of the first tokens of `prompt`, not all of them; None and 0 where there is
        none.
        """
        ids, cache = self._ids, self._cache
        self._ids, self._cache = [], None
        pairs = enumerate(zip(ids, prompt[:-1], strict=False))
        common = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(ids), len(prompt) - 1))
        if common == 0:
            return None, 0
        try:
            if common < len(ids):
                cache.crop(common - len(ids))
        except (RuntimeError, ValueError):  # of a window that slid
            return None, 0
        return cache, common

    def keep(self, sequence: Tensor, cache: Any) -> None:
        """`sequence`, int64 [1, tokens]: a text of which `cache` has seen the beginning."""
        if isinstance(cache, StreamingCache):
            seen = 0 if any(cache.evicted) or cache.stale else cache.columns
        else:
            seen = cache.get_seq_length()
        if 0 < seen <= sequence.shape[1]:
            self._ids, self._cache = sequence[0, :seen].tolist(), cache


class Worker:
    """The thread that generates. `now`: for whom."""

    def __init__(self, model: Any, tokenizer: Any, streaming: StreamingOptions | None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.turns = Turns()
        self.now: Job | None = None
        self._kept = Kept()
        self._stop_ids = _stop_ids(model, tokenizer, {})
        self._options = self._fixed(streaming)
        self._thread = threading.Thread(target=self._work, name="hf_sparse generation", daemon=True)

    def _fixed(self, streaming: StreamingOptions | None) -> dict[str, Any]:
        pad = self.tokenizer.pad_token_id
        options: dict[str, Any] = {} if streaming is None else dataclasses.asdict(streaming)
        options["pad_token_id"] = pad if pad is not None else next(iter(self._stop_ids), 0)
        if self._stop_ids:
            options["eos_token_id"] = list(self._stop_ids)
        return options | {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": True}

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends what is being generated with its next token and refuses what waits; may be called again."""
        for job in self.turns.close():
            job.deliver(RequestError("The server is shutting down.", status=503))
        if (now := self.now) is not None:
            now.gone = True

    def join(self) -> None:
        self.close()
        self._thread.join()

    def _work(self) -> None:
        while (job := self.turns.take()) is not None:
            self.now = job
            if self.turns.closed:  # meanwhile
                job.gone = True
            try:
                outcome: Finished | Exception = self._generate(job)
            except Exception as error:
                logger.exception("A request failed")
                outcome = failure(error)
            self.now = None
            job.deliver(RequestError("The server is shutting down.", status=503) if job.gone else outcome)

    def _generate(self, job: Job) -> Finished:
        asked = job.completion
        ids = torch.tensor([asked.prompt], dtype=torch.int64, device=self.model.device)
        cache, reused = self._kept.take(asked.prompt)
        for stop in range(reused + PIECE, ids.shape[1], PIECE):
            cache = self._continue(ids[:, :stop], cache, max_new_tokens=1, do_sample=False).cache
            if job.gone:
                self._kept.keep(ids, cache)
                return Finished("stop", 0)
        sampling = dict(asked.sampling)
        if sampling.get("do_sample") and self.model.generation_config.top_k is None:
            sampling["top_k"] = 0  # transformers' default is 50, OpenAI's all
        listener = Listener(self.tokenizer, ids.shape[1], asked.stop, job)
        options = {"max_new_tokens": asked.max_tokens, "stopping_criteria": StoppingCriteriaList([listener])}
        with torch.random.fork_rng(enabled=asked.seed is not None):
            if asked.seed is not None:
                torch.manual_seed(asked.seed)
            found = self._continue(ids, cache, **options, **sampling)
        self._kept.keep(found.sequences, found.cache)
        listener.end()
        ended = listener.stopped or (listener.ids and listener.ids[-1] in self._stop_ids)
        return Finished("stop" if ended else "length", len(listener.ids), reused)

    def _continue(self, ids: Tensor, cache: Any, **options: Any) -> Any:
        """`ids` [1, tokens], of which `cache`, if any, has seen the beginning."""
        seen = {} if cache is None else {"cache": cache}
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), **seen, **self._options, **options)


class Listener(StoppingCriteria):
    """Hears every token as it comes, hands on its text, and ends an answer at a stop string or when nobody listens.

    It is a stopping criterion, not a streamer, since it then decides about the token that it has just heard.
    """

    def __init__(self, tokenizer: Any, prompt_tokens: int, stop: tuple[str, ...], job: Job) -> None:
        self.tokenizer, self.stop, self.job = tokenizer, stop, job
        self.ids: list[int] = []
        self.stopped = False
        self._prompt_tokens = prompt_tokens
        self._held = ""  # may be the beginning of a stop string
        # Text of ids[first:] is written anew with every token, that of ids[first:told] has been handed on before.
        self._first = self._told = 0
        self._handed = 0  # characters of it beyond that, where the last one is not whole yet

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.ids += input_ids[0, self._prompt_tokens + len(self.ids) :].tolist()
        if not self.job.gone:
            self._hand_on(self._new_text())
        return torch.full((len(input_ids),), self.stopped or self.job.gone, device=input_ids.device)

    def end(self) -> None:
        """Hands on what was held."""
        if self.stopped or self.job.gone:
            return
        self._hand_on(self._new_text(whole=True))
        if self._held and not self.stopped:
            self.job.deliver(self._held)

    def _new_text(self, whole: bool = False) -> str:
        """Without an unfinished character at its end, unless `whole`."""
        before = len(self._decode(self.ids[self._first : self._told])) + self._handed
        text = self._decode(self.ids[self._first :])
        # of one character of UTF-8 at most three bytes, each of which may show as one replacement
        sure = max(len(text.rstrip(REPLACEMENT)), len(text) - 3)
        if whole or sure == len(text):
            self._first, self._told, self._handed = self._told, len(self.ids), 0
            return text[before:]
        self._handed += max(0, sure - before)
        return text[before:sure]

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _hand_on(self, text: str) -> None:
        self._held += text
        found = [at for stop in self.stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held, ready = "", self._held[: min(found)]
        else:
            keep = max((_overlap(self._held, stop) for stop in self.stop), default=0)
            ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if ready:
            self.job.deliver(ready)


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` begins with, all of it but the last one at most."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
