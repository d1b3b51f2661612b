"""`hf-sparse serve`, asked by OpenAI's own client, on a tiny llama."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from chat_models import chat_tokenizer, load, save_chat_model
from typer.testing import CliRunner

from hf_sparse.cli import app as command_line
from hf_sparse.cli_options import Loading
from hf_sparse.completion import RequestError
from hf_sparse.modeling import StreamingOptions
from hf_sparse.server import MAX_BODY, Server, bound_socket, make_app
from hf_sparse.serving import Job, Listener, Turns
from tiny_models import prompt_ids, save_checkpoint

QUESTION: Any = [{"role": "user", "content": "Is it assigned?"}]
TOOL: Any = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
TOOLS = "{% if tools %}{{ tools[0].function.name }}{% endif %}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("server") / "tiny"
    save_chat_model(directory)
    tokenizer = chat_tokenizer(directory)
    tokenizer.chat_template = TOOLS + tokenizer.chat_template
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return load(directory)


@contextlib.contextmanager
def running(model: Any, tokenizer: Any, streaming: StreamingOptions | None = None) -> Iterator[Server]:
    """A server on a port of its own."""
    bound = bound_socket("127.0.0.1", 0)
    server = Server(make_app(model, tokenizer, "tiny", streaming))
    server.port = bound.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        until(lambda: server.started)
        yield server
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(model: Any, tokenizer: Any) -> Iterator[Server]:
    with running(model, tokenizer) as server:
        yield server


def client_of(server: Server, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return client_of(server)


def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def answer_ids(model: Any, tokenizer: Any, tokens: int, messages: Any = QUESTION, **options: Any) -> tuple[int, list]:
    """How many tokens the prompt has, and what `generate` says behind it."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    options = {"do_sample": False} | options
    found = model.generate(ids, max_new_tokens=tokens, pad_token_id=0, eos_token_id=2, **options)
    return ids.shape[1], found[0, ids.shape[1] :].tolist()


def chat(client: openai.OpenAI, tokens: int | None = 40, **options: Any) -> Any:
    options = {"model": "tiny", "messages": QUESTION, "temperature": 0, "max_tokens": tokens} | options
    return client.chat.completions.create(**{name: value for name, value in options.items() if value is not None})


def pieces(stream: Any) -> list[str]:
    return [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]


def counts(answer: Any) -> tuple[int, int, int]:
    return answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens


@pytest.fixture
def gate(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    call = Listener.__call__

    def waits(self: Listener, *args: Any, **kwargs: Any) -> Any:
        assert gate.tokens.acquire(timeout=30)
        gate.jobs.append(self.job)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(Listener, "__call__", waits)
    yield gate
    gate.open()


class Gate:
    """Lets a server that is asked generate so many tokens and no more. `jobs`: whose they were."""

    def __init__(self) -> None:
        self.tokens, self.jobs = threading.Semaphore(0), list[Job]()

    def open(self, tokens: int = 10_000) -> None:
        self.tokens.release(tokens)


# Answers


def test_a_chat_is_answered_as_generate_does(client: openai.OpenAI, model: Any, tokenizer: Any) -> None:
    prompt, expected = answer_ids(model, tokenizer, 40)
    answer = chat(client)
    assert answer.choices[0].message.content == tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.choices[0].message.role == "assistant" and len(answer.choices) == 1
    assert answer.choices[0].finish_reason == ("stop" if expected[-1] == 2 else "length")
    assert answer.usage.prompt_tokens == prompt and answer.usage.completion_tokens == len(expected)
    assert answer.usage.total_tokens == prompt + len(expected) and answer.model == "tiny"
    assert answer.object == "chat.completion"


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(pieces(chunks)) == whole.choices[0].message.content
    assert len([piece for piece in pieces(chunks) if piece]) > 5
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].object == "chat.completion.chunk"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert counts(chunks[-1]) == counts(whole) and chunks[-1].choices == []
    assert {chunk.usage for chunk in chunks[:-1]} == {None} and len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None and chunk.choices for chunk in chat(client, stream=True))


def test_text_is_continued(client: openai.OpenAI, model: Any, tokenizer: Any) -> None:
    ids = tokenizer("The value of a name", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    text = tokenizer.decode(expected, skip_special_tokens=True)
    asks = {"model": "tiny", "temperature": 0}
    for prompt in ("The value of a name", ["The value of a name"], ids[0].tolist(), ids.tolist()):
        answer = client.completions.create(prompt=prompt, **asks)
        assert answer.choices[0].text == text and answer.usage.prompt_tokens == ids.shape[1]
    stream = client.completions.create(prompt="The value of a name", stream=True, **asks)
    assert "".join(chunk.choices[0].text for chunk in stream) == text


def test_it_ends_at_a_stop_string(client: openai.OpenAI, model: Any, tokenizer: Any) -> None:
    whole = chat(client).choices[0].message.content
    stop = whole[9:15]
    expected = whole[: whole.index(stop)]
    answer = chat(client, stop=["never said", stop])
    assert answer.choices[0].message.content == expected and answer.choices[0].finish_reason == "stop"
    assert "".join(pieces(chat(client, stop=stop, stream=True))) == expected
    # no more tokens than it takes to say it
    _, ids = answer_ids(model, tokenizer, 40)
    needed = next(n for n in range(1, 41) if stop in tokenizer.decode(ids[:n]))
    assert answer.usage.completion_tokens == needed


def test_it_ends_where_the_model_does(client: openai.OpenAI, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model), "_sample", _ending(type(model)._sample))
    answer = chat(client)
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == 5


def _ending(sample: Any) -> Any:
    def ends(self: Any, ids: Any, logits_processor: Any, *args: Any, **kwargs: Any) -> Any:
        def force(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == ids.shape[1] + 4:
                scores = torch.full_like(scores, -torch.inf)
                scores[:, 2] = 0
            return scores

        logits_processor.append(force)
        return sample(self, ids, logits_processor, *args, **kwargs)

    return ends


def test_sampling_is_repeated_by_a_seed_and_by_nothing_else(client: openai.OpenAI) -> None:
    def say(**options: Any) -> str:
        return chat(client, temperature=1.5, top_p=0.95, **options).choices[0].message.content

    state = torch.random.get_rng_state()
    assert say(seed=3) == say(seed=3) != say(seed=4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len({say() for _ in range(3)}) > 1
    assert chat(client, temperature=1, top_p=0).choices[0].message.content == chat(client).choices[0].message.content


def test_max_completion_tokens_and_the_default(client: openai.OpenAI, model: Any, tokenizer: Any) -> None:
    assert chat(client, None, max_completion_tokens=7).usage.completion_tokens <= 7
    prompt, ids = answer_ids(model, tokenizer, 700)
    answer = chat(client, None)
    assert answer.usage.completion_tokens == min(len(ids), 700 - prompt)
    assert answer.choices[0].finish_reason == ("length" if len(ids) > 700 - prompt else "stop")


def test_tools_and_messages_reach_the_template(client: openai.OpenAI, tokenizer: Any) -> None:
    def prompt(**options: Any) -> int:
        return chat(client, 1, **options).usage.prompt_tokens

    named = len(tokenizer("look_up", add_special_tokens=False).input_ids)
    assert prompt(tools=[TOOL]) == prompt() + named == prompt(tools=[TOOL], tool_choice="none") + named
    parts = [{"role": "user", "content": [{"type": "text", "text": "Is it "}, {"type": "text", "text": "assigned?"}]}]
    assert prompt(messages=parts) == prompt()
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"a": 1}'}}
    told = [*QUESTION, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    assert prompt(messages=told) > prompt()
    assert prompt(messages=[{"role": "developer", "content": "x"}]) == prompt(
        messages=[{"role": "system", "content": "x"}]
    )


def test_models_and_health(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist; there is 'tiny'"):
        client.models.retrieve("other")
    assert post(server, None, path="/health") == (200, {"status": "ok", "busy": False, "waiting": 0})


# What is refused


def post(server: Server, body: Any, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    headers = {"Content-Type": "application/json"} | headers
    if body is None:
        connection.request("GET", path)
    else:
        connection.request("POST", path, body, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


@pytest.mark.parametrize(
    ("fields", "param", "code", "message"),
    [
        ({"n": 2}, "n", "unsupported_value", "n: got 2, which is not supported here; expected 1"),
        ({"logprobs": True}, "logprobs", "unsupported_value", "expected false"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_value", "expected 0"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "unsupported_value", '"auto" or "none"'),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_value", '"text"'),
        ({"extra_body": {"tpo_p": 1}}, "tpo_p", "unknown_parameter", "Unknown parameter: 'tpo_p'."),
        ({"temperature": 3}, "temperature", "invalid_value", "temperature: got 3: Input should be less than or equal"),
        ({"top_p": -1}, "top_p", "invalid_value", "got -1"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value", "got 0"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "invalid_value", "expected one of them"),
        ({"stop": ["a"] * 5}, "stop", "invalid_value", "4"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value", "only with stream"),
        ({"stop": ""}, "stop", "invalid_value", "at least one character"),
        ({"messages": []}, "messages", "invalid_value", "got []"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0]", "invalid_value", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0]",
            "invalid_value",
            "parts of type text",
        ),
        ({"max_tokens": 5_000}, "messages", "context_length_exceeded", "maximum context length is 700 tokens"),
    ],
)
def test_what_is_refused_says_why(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert (caught.value.param, caught.value.code, caught.value.type) == (param, code, "invalid_request_error")
    assert message in caught.value.body["message"]


def test_a_prompt_beyond_the_positions_is_refused(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "name " * 1_000}]
    with pytest.raises(openai.BadRequestError, match=r"maximum context length is 700 tokens: messages has \d{4}"):
        chat(client, None, messages=long)
    with pytest.raises(openai.BadRequestError, match="prompt: expected token ids from 0 to 335, got 3 to 336"):
        client.completions.create(model="tiny", prompt=[3, 336])
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.completions.create(model="tiny", prompt=["one", "two"])


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("{", 400, "not valid JSON"),
        ("[1]", 400, "expected a JSON object, got [1]"),
        ("[" * 100_000, 400, "not valid JSON"),
        ('{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, "not valid JSON"),
        ('{"model": "tiny"}', 400, "Missing required parameter: 'messages'."),
        (
            '{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
            400,
            "not valid JSON",
        ),
        ('{"model": "other", "messages": [{"role": "user", "content": "x"}]}', 404, "there is 'tiny'"),
        (b" " * (MAX_BODY + 1), 413, f"at most {MAX_BODY} bytes"),
    ],
)
def test_bodies_that_are_no_request(server: Server, body: Any, status: int, message: str) -> None:
    found, answer = post(server, body)
    assert found == status and message in answer["error"]["message"]
    assert answer["error"].keys() == {"message", "type", "param", "code"}


def test_other_types_pages_and_methods(server: Server) -> None:
    assert post(server, "{}", **{"Content-Type": "text/plain"})[0] == 415
    assert post(server, None, "/v2")[0] == 404 and post(server, "{}", "/v2")[1]["error"]["code"] is None
    assert post(server, None, "/v1/completions")[0] == 405


def test_ignored_fields_are_said_once(client: openai.OpenAI, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        chat(client, 1, user="me", metadata={"a": "b"}, n=1, frequency_penalty=0)
    told = [record.message for record in caplog.records if "ignored" in record.message]
    assert told == ["user: a request has it; it is ignored", "metadata: a request has it; it is ignored"]


def test_an_error_of_the_model_is_told(client: openai.OpenAI, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "_sample", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no more")))
        with pytest.raises(openai.InternalServerError, match="MemoryError: no more"):
            chat(client)
        with pytest.raises(openai.APIError, match="MemoryError: no more"):
            list(chat(client, stream=True))
    assert chat(client).choices[0].message.content


# Several clients


def test_two_clients_at_once(client: openai.OpenAI) -> None:
    alone = chat(client).choices[0].message.content
    other = chat(client, messages=[{"role": "user", "content": "Why?"}]).choices[0].message.content
    said: dict[int, str] = {}

    def ask(i: int) -> None:
        messages = QUESTION if i % 2 else [{"role": "user", "content": "Why?"}]
        said[i] = "".join(pieces(chat(client, messages=messages, stream=True)))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert said == {i: alone if i % 2 else other for i in range(6)}


def test_the_loop_answers_while_the_model_works(client: openai.OpenAI, server: Server, gate: Gate) -> None:
    stream = chat(client, stream=True)
    gate.open(3)
    until(lambda: len(gate.jobs) == 3)
    assert post(server, None, path="/health")[1]["busy"] is True
    assert [model.id for model in client.models.list()] == ["tiny"]
    gate.open()
    assert len(pieces(stream)) > 3


@pytest.mark.parametrize("stream", [True, False])
def test_who_goes_away_is_not_worked_for(server: Server, gate: Gate, stream: bool) -> None:
    with asked(server, stream=stream, max_tokens=500):
        gate.open(3)
        until(lambda: len(gate.jobs) == 3)
    until(lambda: gate.jobs[0].gone)
    gate.open()
    until(lambda: not server.config.app.state.worker.now)
    assert len(gate.jobs) <= 4  # it may have waited for leave to hear the fourth


@pytest.mark.parametrize("stream", [True, False])
def test_who_goes_away_from_the_queue_has_no_turn(
    client: openai.OpenAI, server: Server, gate: Gate, stream: bool
) -> None:
    turns = server.config.app.state.worker.turns
    first = chat(client, 5, stream=True)
    gate.open(1)
    until(lambda: gate.jobs)
    with asked(server, stream=stream):
        until(lambda: len(turns) == 1)
    until(lambda: len(turns) == 0)
    gate.open()
    list(first)
    until(lambda: not server.config.app.state.worker.now)
    assert len(set(gate.jobs)) == 1


@contextlib.contextmanager
def asked(server: Server, path: str = "/v1/chat/completions", **fields: Any) -> Iterator[None]:
    """Someone who has asked, and goes away at the end."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = json.dumps(fields if "prompt" in fields else {"model": "tiny", "messages": QUESTION} | fields)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    with contextlib.closing(connection):
        yield


def test_turns_go_round() -> None:
    turns = Turns()
    jobs = [Job(None, client, print) for client in "aaabbc"]  # type: ignore[arg-type]
    for job in jobs:
        turns.add(job)
    turns.drop(jobs[1])
    assert [turns.take().client for _ in range(3)] == ["a", "b", "c"] and len(turns) == 2
    turns.add(Job(None, "c", print))  # type: ignore[arg-type]
    assert [turns.take() for _ in range(2)] == [jobs[2], jobs[4]]
    assert [job.client for job in turns.close()] == ["c"] and turns.take() is None
    with pytest.raises(RequestError, match="shutting down"):
        turns.add(jobs[0])


def test_too_many_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_sparse.serving.WAITING", 2)
    turns = Turns()
    for client in "ab":
        turns.add(Job(None, client, print))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="2 requests are waiting") as caught:
        turns.add(Job(None, "c", print))  # type: ignore[arg-type]
    assert caught.value.status == 503


# What is computed once


def test_a_conversation_is_not_computed_again(client: openai.OpenAI, model: Any, tokenizer: Any) -> None:
    talk = list(QUESTION)
    for question in ("Why?", "for x in y: if z"):
        first = chat(client, 11, messages=talk)
        text = first.choices[0].message.content
        assert text == tokenizer.decode(answer_ids(model, tokenizer, 11, talk)[1], skip_special_tokens=True)
        talk += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
        again = chat(client, 11, messages=talk)
        expected = answer_ids(model, tokenizer, 11, talk)[1]
        assert again.choices[0].message.content == tokenizer.decode(expected, skip_special_tokens=True)
        assert first.usage.prompt_tokens <= again.usage.prompt_tokens_details.cached_tokens < again.usage.prompt_tokens
    other = chat(client, 11, messages=[{"role": "system", "content": "Other"}, *QUESTION])
    assert other.usage.prompt_tokens_details.cached_tokens <= 4  # the template's


def test_what_slid_out_of_a_window_is_computed_again(tmp_path: Path, tokenizer: Any) -> None:
    save_checkpoint("mistral", tmp_path)
    model = load(tmp_path)
    with running(model, tokenizer) as server:
        client = client_of(server)
        for length in (5, 40, 20, 60, 6):
            prompt = prompt_ids(1, length)
            answer = client.completions.create(model="tiny", prompt=prompt[0].tolist(), temperature=0, max_tokens=9)
            expected = model.generate(prompt, max_new_tokens=9, do_sample=False, pad_token_id=0)[0, length:]
            assert answer.choices[0].text == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("streaming", [None, StreamingOptions(64, 4), StreamingOptions(50, 2, 3)])
def test_a_long_prompt_is_read_in_pieces_while_someone_listens(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, streaming: StreamingOptions | None
) -> None:
    monkeypatch.setattr("hf_sparse.serving.PIECE", 32)
    prompt = prompt_ids(1, 150)
    read: list[int] = []
    leave = threading.Semaphore(0)
    generate = type(model).generate

    def watched(self: Any, ids: Any, **options: Any) -> Any:
        assert leave.acquire(timeout=30)
        read.append(ids.shape[1])
        return generate(self, ids, **options)

    asks = {"model": "tiny", "prompt": prompt[0].tolist(), "temperature": 0, "max_tokens": 9}
    endless = {} if streaming is None else dataclasses.asdict(streaming)
    expected = model.generate(prompt, max_new_tokens=9, do_sample=False, pad_token_id=0, **endless)[0, 150:]
    monkeypatch.setattr(type(model), "generate", watched)
    with running(model, tokenizer, streaming) as server:
        worker = server.config.app.state.worker
        with asked(server, "/v1/completions", **asks):
            until(lambda: worker.now)
            leave.release()
            until(lambda: len(read) == 1)
        until(lambda: worker.now is None or worker.now.gone)
        leave.release(100)
        until(lambda: worker.now is None)
        assert read in ([32], [32, 64])
        del read[:]
        answer = client_of(server).completions.create(**asks)
        assert answer.choices[0].text == tokenizer.decode(expected, skip_special_tokens=True)
        reused = answer.usage.prompt_tokens_details.cached_tokens
        assert read == [*range(reused + 32, 150, 32), 150] and reused in (32, 64, 0)


# Texts without an end


def test_a_long_prompt_passes_with_a_cache_that_forgets(model: Any, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "name " * 300}]
    with running(model, tokenizer, StreamingOptions(64, 4)) as server:
        answer = chat(client_of(server), 9, messages=messages)
        prompt, ids = answer_ids(model, tokenizer, 9, messages, ctx_size=64)
        assert answer.choices[0].message.content == tokenizer.decode(ids, skip_special_tokens=True)
        assert answer.usage.prompt_tokens == prompt > 700
        assert chat(client_of(server), None).usage.completion_tokens <= 64


# The command


def serve(directory: Path, *options: object) -> Any:
    arguments = ["serve", directory, "--calibration-tokens", 64, "--max-perplexity-increase", 0, *options]
    return CliRunner().invoke(command_line, [str(argument) for argument in arguments])


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_it(directory: Path, model: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(Loading, "load", lambda *_: model)
    started = threading.Event()
    run = Server.run

    def runs(self: Server, sockets: Any) -> None:
        self.port = sockets[0].getsockname()[1]
        seen["server"] = self
        started.set()
        run(self, sockets)

    monkeypatch.setattr(Server, "run", runs)

    def ask_and_interrupt() -> None:
        assert started.wait(30)
        until(lambda: seen["server"].started)
        with client_of(seen["server"]) as client:
            stream = chat(client, 500, stream=True)
            gate.open(2)
            next(stream)
            os.kill(os.getpid(), signal.SIGINT)
            until(lambda: seen["server"].config.app.state.worker.turns.closed)
            gate.open()
            try:
                list(stream)
            except openai.APIError as error:
                seen["error"] = error.message

    thread = threading.Thread(target=ask_and_interrupt)
    thread.start()
    result = serve(directory, "--port", 0)
    thread.join(30)
    assert result.exit_code == 0 and result.stdout == "", result.output
    assert re.search(r"Serving tiny at http://127.0.0.1:\d+/v1; Ctrl-C ends it", result.stderr)
    assert "shutting down" in seen["error"] and len(gate.jobs) <= 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_the_extra_it_says_what_to_install(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loading, "load", lambda *_: pytest.fail("loaded"))
    monkeypatch.delitem(sys.modules, "hf_sparse.server")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    result = serve(directory)
    assert result.exit_code == 1
    assert 'error: serve: needs fastapi and uvicorn: pip install "hf_sparse[serve]"' in result.stderr


def test_what_is_refused_before_anything_is_loaded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loading, "load", lambda *_: pytest.fail("loaded"))
    with contextlib.closing(bound_socket("127.0.0.1", 0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        result = serve(directory, "--port", port)
    assert result.exit_code == 1 and f"host, port: cannot listen on 127.0.0.1:{port}" in result.stderr
    result = serve(directory, "--n-keep", 4)
    assert result.exit_code == 1 and "n_keep: only with --ctx-size" in result.stderr
