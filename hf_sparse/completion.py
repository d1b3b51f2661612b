"""What an OpenAI-style request asks of the model: its fields checked, its prompt in tokens.

What is not done is refused by name, and so are unknown fields; fields that change nothing in a text are ignored and
said once in the log.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from .log import warn_once

COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
# What these may say at most: that they are not used.
ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "store": (False,),
}
IGNORED = (
    *("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "reasoning_effort", "verbosity", "parallel_tool_calls"),
)


class RequestError(Exception):
    """A request that is not answered: an HTTP status and OpenAI's fields of an error."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    def to_dict(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def failure(error: Exception) -> RequestError:
    """Where it is the server's fault."""
    return RequestError(f"{type(error).__name__}: {error}", status=500)


@dataclass(frozen=True)
class Completion:
    """What to generate: behind the token ids `prompt` at most `max_tokens`, up to any string of `stop`.

    `sampling`: arguments of `generate`; empty: the model's own. `seed`: of sampling, None: whatever comes.
    """

    prompt: list[int]
    max_tokens: int
    stop: tuple[str, ...]
    sampling: dict[str, Any]
    seed: int | None


Count = Annotated[int, Field(ge=1, lt=2**31)]
TokenIds = Annotated[list[int], Field(min_length=1)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False


class Request(BaseModel):
    """The fields that both endpoints know."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] = []
    max_tokens: Count | None = None
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] = "auto"
    max_completion_tokens: Count | None = None


class TextRequest(Request):
    """POST /v1/completions."""

    prompt: str | TokenIds | Annotated[list[str] | list[TokenIds], Field(min_length=1, max_length=1)]


AnyRequest = TypeVar("AnyRequest", bound=Request)


def parse(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """The request in a JSON `body`; null is as good as absent. Raises RequestError."""
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(f"The body: expected a JSON object, got {_short(fields)}")
    fields = {name: value for name, value in fields.items() if value is not None}
    for name, allowed in ONLY.items():
        if name in fields and not any(value == fields[name] for value in allowed):
            ways = " or ".join(json.dumps(value) for value in allowed) or "not to be there"
            message = f"{name}: got {_short(fields[name])}, which is not supported here; expected {ways}"
            raise RequestError(message, name, "unsupported_value")
    for name in IGNORED:
        if fields.pop(name, None) is not None:
            warn_once(f"{name}: a request has it; it is ignored")
    kept = {name: value for name, value in fields.items() if name in kind.model_fields or name not in ONLY}
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> RequestError:
    """By the first of its faults, as OpenAI would say it."""
    fault = error.errors()[0]
    name = str(fault["loc"][0])
    if fault["type"] == "extra_forbidden":
        where = ".".join(str(part) for part in fault["loc"])
        return RequestError(f"Unknown parameter: '{where}'.", where, "unknown_parameter")
    if fault["type"] == "missing":
        return RequestError(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    what = {item["msg"]: None for item in error.errors() if item["loc"][0] == name}
    return RequestError(f"{name}: got {_short(fault['input'])}: {'; '.join(what)}", name, "invalid_value")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


class Preparer:
    """Makes Completions of requests.

    `positions`: what prompt and answer may take together, None: no limit. `endless`: the default of `max_tokens` where
    there is none, since texts go on as their beginnings are forgotten.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, positions: int | None, endless: int | None) -> None:
        self.tokenizer, self.vocabulary, self.positions, self.endless = tokenizer, vocabulary, positions, endless

    def completion(self, request: Request) -> Completion:
        """Raises RequestError."""
        asked = request.max_tokens
        if isinstance(request, ChatRequest):
            prompt, of = self._chat_prompt(request), "messages"
            if asked is not None and request.max_completion_tokens is not None:
                raise RequestError(
                    "max_tokens, max_completion_tokens: expected one of them", "max_tokens", "invalid_value"
                )
            asked = request.max_completion_tokens or asked
        else:
            assert isinstance(request, TextRequest)
            prompt, of = self._text_prompt(request), "prompt"
            asked = asked or COMPLETION_TOKENS
        if request.stream_options is not None and not request.stream:
            raise RequestError("stream_options: only with stream", "stream_options", "invalid_value")
        stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
        if "" in stop:
            raise RequestError('stop: got "", expected strings of at least one character', "stop", "invalid_value")
        sampling: dict[str, Any] = {}
        if request.temperature == 0:
            sampling["do_sample"] = False
        elif request.temperature is not None or request.top_p is not None:
            sampling["do_sample"] = True
            given = {"temperature": request.temperature, "top_p": request.top_p}
            sampling |= {name: value for name, value in given.items() if value is not None}
        return Completion(prompt, self._max_tokens(len(prompt), asked, of), stop, sampling, request.seed)

    def _max_tokens(self, prompt: int, asked: int | None, of: str) -> int:
        if self.positions is None:
            return asked or self.endless or 2048
        left = self.positions - prompt
        if left < (asked or 1):
            wanted = "" if asked is None else f" and max_tokens is {asked}"
            raise RequestError(
                f"This model's maximum context length is {self.positions} tokens: {of} has {prompt}{wanted}; at most "
                f"{self.positions} are allowed together, with one of them for the answer at least",
                of,
                "context_length_exceeded",
            )
        return asked or left

    def _text_prompt(self, request: TextRequest) -> list[int]:
        prompt: Any = request.prompt
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            prompt = prompt[0]
        ids: list[int] = self._tokens(prompt, special=True) if isinstance(prompt, str) else prompt
        if not ids:
            raise RequestError('prompt: got "", expected at least one token', "prompt", "invalid_value")
        if not all(0 <= id < self.vocabulary for id in ids):
            message = f"prompt: expected token ids from 0 to {self.vocabulary - 1}, got {min(ids)} to {max(ids)}"
            raise RequestError(message, "prompt", "invalid_value")
        return ids

    def _chat_prompt(self, request: ChatRequest) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise RequestError("messages: the tokenizer has no chat template; use /v1/completions", "messages")
        messages = [_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)]
        tools = request.tools if request.tools and request.tool_choice != "none" else None
        try:
            text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(
                f"messages: the chat template refuses them: {error}", "messages", "invalid_value"
            ) from error
        ids = self._tokens(text, special=False)
        if not ids:
            raise RequestError("messages: the chat template makes nothing of them", "messages", "invalid_value")
        return ids

    def _tokens(self, text: str, special: bool) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return found


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """As chat templates want it: content as one text, arguments of tool calls as objects. Raises RequestError."""

    def refused(what: str) -> RequestError:
        return RequestError(f"{where}.{what}", where, "invalid_value")

    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise refused(f"role: expected a string, got {_short(role)}")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise refused(f"content: expected parts of type text, the model reads nothing else; got {_short(part)}")
        content = "".join(part["text"] for part in content)
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise refused(f"content: expected a string or parts of type text, got {_short(content)}")
    made = message | {"role": "system" if role == "developer" else role, "content": content}
    if calls := message.get("tool_calls"):
        try:
            made["tool_calls"] = [call | {"function": _parsed(call["function"])} for call in calls]
        except (TypeError, KeyError, ValueError) as error:
            raise refused("tool_calls: expected [{id, type, function: {name, arguments: JSON text}}]") from error
    return made


def _parsed(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return function | {"arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}
