"""Conversations that are written to a file and read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_models import GREEDY, MARKERS, QUESTIONS, After, chat_tokenizer, goes_on, load, raise_, save_chat_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_sparse.chat import METADATA, Chat
from tiny_models import VOCABULARY


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat")
    save_chat_model(directory)
    return directory


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return load(directory)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return chat_tokenizer(directory)


def test_a_saved_chat_goes_on(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    chat = Chat(model, tokenizer, ctx_size=60, system="Be short", n_keep=5, max_new_tokens=20, **GREEDY)
    for question in QUESTIONS[:3]:
        chat.send(question)
    chat.save(tmp_path / "chat.safetensors")
    other = Chat(model, tokenizer, max_new_tokens=20, **GREEDY)
    other.send("Something else")
    other.load(tmp_path / "chat.safetensors")
    assert other.options == chat.options and other.messages == chat.messages and torch.equal(other.ids, chat.ids)
    assert (other.computed_tokens, other.turns, other.stats()["turns"]) == (0, [], 3)
    assert other.send("Why?") == chat.send("Why?")
    assert other.turns[-1].computed_tokens == chat.turns[-1].computed_tokens
    other.reset()
    assert other.messages == chat.messages[:1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chat.safetensors"]


def test_nothing_to_save(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    chat = Chat(model, tokenizer, max_new_tokens=5, do_sample=False)
    with pytest.raises(ValueError, match="save: nothing has been said yet"):
        chat.save(tmp_path / "chat")
    chat.send("Is it?", After(0, lambda: raise_(KeyboardInterrupt())))
    with pytest.raises(ValueError, match=r"save: after an interruption \d+ tokens are not computed yet"):
        chat.save(tmp_path / "chat")
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_the_file_that_there_was(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    chat, path = Chat(model, tokenizer, max_new_tokens=5, **GREEDY), tmp_path / "chat"
    chat.send("Is it?")
    chat.save(path)
    before = path.read_bytes()
    chat.send("Why?")
    with monkeypatch.context() as patch:
        patch.setattr("hf_sparse.modeling.streaming_cache.save_file", lambda *a, **k: raise_(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            chat.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    chat.save(path)
    assert path.read_bytes() != before


def test_files_that_are_no_chat(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    chat, path = Chat(model, tokenizer, max_new_tokens=5, **GREEDY), tmp_path / "chat"
    chat.send("Is it?")
    before = chat.ids, chat.cache, chat.messages, chat.turns
    with pytest.raises(FileNotFoundError, match="is no file"):
        chat.load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is no saved chat"):
        chat.load(path)
    chat.cache.save(path)
    with pytest.raises(ValueError, match="is no saved chat: KeyError: 'chat'"):
        chat.load(path)
    chat.save(path)
    tensors, (metadata, about) = load_file(path), metadata_of(path)
    ids, messages = about["ids"], about["messages"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": {**about["model"], "type": "opt"}}, "is a chat with another model: got {'type': 'opt'"),
        ({"model": {**about["model"], "checkpoint": "0"}}, "is a chat with another model"),
        ({"model": None}, "is a chat with another model: got None"),
        ({"messages": []}, "messages: expected a list of {role, content} that ends with an answer"),
        ({"messages": messages[:1]}, "messages: expected"),
        ({"messages": [{"role": "assistant"}]}, "messages: expected"),
        ({"messages": [{"role": "assistant", "content": 3}]}, "messages: expected"),
        ({"messages": [*messages[:1], {**messages[1], "more": "x"}]}, "messages: expected"),
        ({"messages": "assistant"}, "messages: expected"),
        ({"ids": ids[:-2]}, f"ids: got {len(ids) - 2} for a cache that has seen {chat.cache.columns} tokens"),
        ({"ids": [*ids, 5, 5]}, "expected as many or one more"),
        ({"ids": [*ids[:-1], VOCABULARY + len(MARKERS)]}, "ids: expected a list of whole numbers from 0 to 335"),
        ({"ids": [*ids[:-1], -1]}, "ids: expected a list"),
        ({"ids": [*ids[:-1], True]}, "ids: expected a list"),
        ({"ids": None}, "ids: expected a list"),
    ]
    for fields, message in wrong:
        save_file(tensors, path, metadata={**metadata, "chat": json.dumps({**about, **fields})})
        with pytest.raises(ValueError) as error:  # noqa: PT011  # the text is looked at below
            chat.load(path)
        assert message in str(error.value)
    for text in ("[]", "{", "null"):
        save_file(tensors, path, metadata={**metadata, "chat": text})
        with pytest.raises(ValueError, match="is no saved chat"):
            chat.load(path)
    assert all(now is then for now, then in zip((chat.ids, chat.cache, chat.messages, chat.turns), before, strict=True))
    save_file(tensors, path, metadata=metadata)
    chat.load(path)
    assert torch.equal(chat.ids, before[0]) and chat.messages == before[2] and goes_on(model, chat)


def metadata_of(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    return metadata, json.loads(metadata[METADATA])
