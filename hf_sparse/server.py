"""An HTTP server that speaks OpenAI's protocol: chat and text completions of one model, streamed or whole.

The event loop only carries bytes: prompts are made into tokens in a thread of their own, text is generated in that of a
Worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ipaddress
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hf_sparse.modeling import StreamingOptions, max_positions

from .log import logger

try:
    import uvicorn
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import StreamingResponse
    from starlette.exceptions import HTTPException
except ImportError as error:
    raise ImportError('serve: needs fastapi and uvicorn: pip install "hf_sparse[serve]"') from error

from . import completion as asked_for
from .completion import ChatRequest, Completion, Preparer, RequestError, TextRequest, failure
from .serving import Finished, GoneError, Job, Worker

MAX_BODY = 4 * 2**20  # bytes
FAREWELL = 5  # seconds that open connections have to end in
CLIENT_GONE = 499  # nobody reads it


class Server(uvicorn.Server):
    """uvicorn's, whose signals also end the answers that are being given. `run()` returns when they have come."""

    def __init__(self, app: FastAPI, **options: Any) -> None:
        quiet: dict[str, Any] = {"access_log": False, "log_level": "warning"}
        config = uvicorn.Config(app, timeout_graceful_shutdown=FAREWELL, **(quiet | options))
        super().__init__(config)
        self._app = app
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: Any) -> None:
        super().handle_exit(sig, frame)
        if self._loop is not None:  # not from within a signal: it may have come while a lock was held
            self._loop.call_soon_threadsafe(self._app.state.worker.close)


def bound_socket(host: str, port: int) -> socket.socket:
    """Bound, not listening yet, so that a port that is taken is told before a model is loaded. Raises OSError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        raise OSError(f"host, port: cannot listen on {host}:{port}: {error}") from error
    if not ipaddress.ip_address(address[0]).is_loopback:
        logger.warning("host: %s is seen by other machines, and the server asks nobody for a key", host)
    return made


def make_app(model: Any, tokenizer: Any, name: str, streaming: StreamingOptions | None = None) -> FastAPI:
    """The server's app for a loaded `model`, which is called `name`. `streaming`: texts without an end.

    GET /health, /v1/models; POST /v1/chat/completions, /v1/completions.
    """
    config = model.config.get_text_config(decoder=True)
    positions = max_positions(config) if streaming is None else None
    endless = None if streaming is None else streaming.ctx_size
    preparer = Preparer(copy.deepcopy(tokenizer), config.vocab_size, positions, endless)  # threads share none
    worker = Worker(model, tokenizer, streaming)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        with ThreadPoolExecutor(1, "hf_sparse prompts") as app.state.prompts:
            yield
            await asyncio.to_thread(worker.join)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.worker = worker
    made = int(time.time())
    about = {"id": name, "object": "model", "created": made, "owned_by": "hf_sparse"}

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return _json(error.to_dict(), error.status)

    @app.exception_handler(HTTPException)
    async def no_such_page(request: Request, error: HTTPException) -> Response:
        return _json(RequestError(f"{request.method} {request.url.path}: {error.detail}").to_dict(), error.status_code)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return _json(failure(error).to_dict(), 500)

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok", "busy": worker.now is not None, "waiting": len(worker.turns)})

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [about]})

    @app.get("/v1/models/{id:path}")
    async def one_model(id: str) -> Response:
        _check_model(id, name)
        return _json(about)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, ChatRequest, _ChatShape(name))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, TextRequest, _TextShape(name))

    async def answer(request: Request, kind: type[ChatRequest] | type[TextRequest], shape: _Shape) -> Response:
        body = await _body(request)
        loop = asyncio.get_running_loop()

        def prepare() -> tuple[asked_for.Request, Completion]:
            parsed = asked_for.parse(kind, body)
            _check_model(parsed.model, name)
            return parsed, preparer.completion(parsed)

        parsed, completion = await loop.run_in_executor(app.state.prompts, prepare)
        worker.turns.check_room()
        shape.prompt_tokens = len(completion.prompt)
        answered = _events(worker, completion, request)
        if parsed.stream:
            lines = _server_sent(answered, shape, parsed.includes_usage)
            return StreamingResponse(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        text: list[str] = []
        try:
            async for event in answered:
                if isinstance(event, Finished):
                    return _json(shape.whole("".join(text), event))
                text.append(event)
        except GoneError:
            pass
        return Response(status_code=CLIENT_GONE)

    return app


async def _events(worker: Worker, completion: Completion, request: Request) -> AsyncIterator[str | Finished]:
    """Pieces of text, then Finished. Raises RequestError, and GoneError where the client went away."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[str | Finished | Exception] = asyncio.Queue()

    def deliver(event: str | Finished | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is there any more
            loop.call_soon_threadsafe(events.put_nowait, event)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        events.put_nowait(GoneError())

    job = Job(completion, _client(request), deliver)
    worker.turns.add(job)
    watcher = asyncio.create_task(watch())
    try:
        while True:
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            yield event
            if isinstance(event, Finished):
                return
    finally:
        watcher.cancel()
        worker.turns.drop(job)


async def _server_sent(
    events: AsyncIterator[str | Finished], shape: _Shape, includes_usage: bool
) -> AsyncIterator[str]:
    def line(fields: dict[str, Any]) -> str:
        return f"data: {json.dumps(fields)}\n\n"

    usage = {"usage": None} if includes_usage else {}
    first = True
    try:
        async for event in events:
            for choice in shape.beginning() if first else ():
                yield line(shape.head() | {"choices": [choice]} | usage)
            first = False
            yield line(shape.head() | {"choices": [shape.part(event)]} | usage)
            if isinstance(event, Finished) and includes_usage:
                yield line(shape.head() | {"choices": [], "usage": shape.usage(event)})
        yield "data: [DONE]\n\n"
    except GoneError:
        return
    except RequestError as error:  # the status has been sent
        yield line(error.to_dict())


class _Shape:
    """How an answer is written."""

    kind, prefix = "", ""

    def __init__(self, model: str) -> None:
        self.id, self.created, self.model = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time()), model
        self.prompt_tokens = 0

    def head(self, chunk: bool = True) -> dict[str, Any]:
        return {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}

    def usage(self, finished: Finished) -> dict[str, Any]:
        total = self.prompt_tokens + finished.tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": finished.tokens,
            "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": finished.reused},
        }

    def whole(self, text: str, finished: Finished) -> dict[str, Any]:
        choice = self.choice(text) | {"finish_reason": finished.reason}
        return self.head(chunk=False) | {"choices": [choice], "usage": self.usage(finished)}

    def choice(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def beginning(self) -> list[dict[str, Any]]:
        return []

    def part(self, event: str | Finished) -> dict[str, Any]:
        raise NotImplementedError


class _ChatShape(_Shape):
    kind, prefix = "chat.completion", "chatcmpl"

    def head(self, chunk: bool = True) -> dict[str, Any]:
        return super().head() | {"object": f"{self.kind}.chunk" if chunk else self.kind}

    def choice(self, text: str) -> dict[str, Any]:
        return {"index": 0, "message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": None}

    def beginning(self) -> list[dict[str, Any]]:
        return [self._delta({"role": "assistant", "content": ""})]

    def part(self, event: str | Finished) -> dict[str, Any]:
        return self._delta({}, event.reason) if isinstance(event, Finished) else self._delta({"content": event})

    @staticmethod
    def _delta(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


class _TextShape(_Shape):
    kind, prefix = "text_completion", "cmpl"

    def choice(self, text: str) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None}

    def part(self, event: str | Finished) -> dict[str, Any]:
        if isinstance(event, Finished):
            return self.choice("") | {"finish_reason": event.reason}
        return self.choice(event) | {"finish_reason": None}


async def _body(request: Request) -> bytes:
    """Raises RequestError for one that is too long, and other types, which pages of other sites could send unasked."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise RequestError(f"Content-Type: expected application/json, got {kind!r}", status=415)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise RequestError(f"The body is too long: at most {MAX_BODY} bytes are allowed", status=413)
    return bytes(body)


def _client(request: Request) -> str:
    """Who takes turns with others: a key, where clients have keys of their own, else an address."""
    address = request.client.host if request.client is not None else ""
    return request.headers.get("authorization") or address


def _check_model(asked: str, name: str) -> None:
    if asked != name:
        raise RequestError(f"The model {asked!r} does not exist; there is {name!r}", "model", "model_not_found", 404)


def _json(fields: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(fields), status, media_type="application/json")
