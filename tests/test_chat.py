"""Chat: a conversation of several turns on one cache, with templates as models have them."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_models import (
    CHATML,
    DEAF,
    GREEDY,
    LLAMA3,
    MARKERS,
    MISTRAL,
    QUESTIONS,
    STABLE,
    THINKS,
    After,
    Scripted,
    answer_is_as_without_a_cache,
    chat_tokenizer,
    goes_on,
    load,
    raise_,
    save_chat_model,
    scripted,
)
from transformers import GenerationConfig, LogitsProcessorList

from hf_sparse.chat import Chat, continuation
from hf_sparse.log import warn_once
from hf_sparse.modeling import SimulatedTier, Tier
from tiny_models import VOCABULARY, save_checkpoint

pytestmark = pytest.mark.usefixtures("interruptible")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat")
    save_chat_model(directory)
    return directory


@pytest.fixture(scope="module")
def loaded(directory: Path) -> Any:
    return load(directory)


@pytest.fixture
def model(loaded: Any) -> Iterator[Any]:
    """Without the hooks of another test."""
    yield loaded
    loaded.model._forward_pre_hooks.clear()


@pytest.fixture
def tokenizer(directory: Path) -> Any:
    return chat_tokenizer(directory)


def passed(model: Any) -> list[torch.Tensor]:
    """What passes through the model from now on."""
    seen: list[torch.Tensor] = []
    model.model.register_forward_pre_hook(lambda m, a, k: seen.append(k["input_ids"].clone()), with_kwargs=True)
    return seen


@pytest.mark.parametrize("template", STABLE.values(), ids=STABLE)
def test_a_turn_computes_what_is_new_and_says_what_it_would_without_a_cache(
    model: Any, tokenizer: Any, template: str
) -> None:
    tokenizer.chat_template = template
    chat = Chat(model, tokenizer, max_new_tokens=9, **GREEDY)
    assert chat.options.ctx_size == 700
    cache, fed = chat.cache, 0
    for turn, question in enumerate(QUESTIONS):
        before, seen = chat.ids, passed(model)
        answer = chat.send(question)
        computed = sum(ids.shape[1] for ids in seen)
        model.model._forward_pre_hooks.clear()
        assert torch.equal(torch.cat(seen, dim=1), chat.ids[:, fed : fed + computed])  # each once, in order
        assert torch.equal(chat.ids[:, : before.shape[1]], before)
        fed += computed
        assert chat.turns[turn].computed_tokens == computed and chat.computed_tokens == fed == chat.cache.columns
        assert answer_is_as_without_a_cache(model, chat)
        assert chat.messages[-2:] == [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    assert chat.cache is cache
    assert chat.evicted == 0 and chat.stats()["turns"] == len(QUESTIONS)


# what the model says, how the conversation reads in the end
@pytest.mark.parametrize(
    "said", ["It is.</s>", "It is.", "It is. \n", " It is\n\n</s>", "</s>", "\n", "if <|eot_id|>x"]
)
@pytest.mark.parametrize("template", STABLE.values(), ids=STABLE)
def test_the_template_closes_what_was_said(model: Any, tokenizer: Any, template: str, said: str) -> None:
    tokenizer.chat_template = template
    answers = (said, "Yes</s>")
    cut = len(tokenizer(said, add_special_tokens=False).input_ids)
    chat = Chat(model, tokenizer, logits_processor=scripted(tokenizer, *answers), max_new_tokens=cut, do_sample=False)
    chat.send("Is it?")
    prompt = tokenizer.apply_chat_template(chat.messages[:1], tokenize=False, add_generation_prompt=True)
    kept = said.removesuffix("</s>")
    assert tokenizer.decode(chat.ids[0]) == prompt + kept
    assert chat.messages[-1]["content"] == kept.replace("<|eot_id|>", "")
    chat.generation["max_new_tokens"] = 8
    if "<|eot_id|>" in said:  # which is no part of the text
        chat.generation["logits_processor"] = scripted(tokenizer, "Yes</s>")
    chat.send("Why?")
    closing = {CHATML: "<|im_end|>\n", LLAMA3: "<|eot_id|>", MISTRAL: "</s>"}[template]
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "Why?"}], tokenize=False)
    asked = whole.removeprefix("<s>")
    begin = {
        CHATML: "<|im_start|>assistant\n",
        LLAMA3: "<|start_header_id|>assistant<|end_header_id|>\n\n",
        MISTRAL: "",
    }
    white = " " if template == MISTRAL and not kept else ""  # nobody can tell it from an answer's own
    assert tokenizer.decode(chat.ids[0]) == f"{prompt}{kept}{white}{closing}{asked}{begin[template]}Yes"


def test_tokens_stay_as_they_were_generated(model: Any, tokenizer: Any) -> None:
    """Letter by letter, where the tokenizer would merge them."""
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "statement"]
    assert tokenizer("statement").input_ids != letters
    script = LogitsProcessorList([Scripted(letters, [5, 2])])
    chat = Chat(model, tokenizer, logits_processor=script, max_new_tokens=len(letters), do_sample=False)
    assert chat.send("What?") == "statement"
    assert chat.ids[0, -len(letters) :].tolist() == letters
    at, columns = chat.ids.shape[1], chat.cache.columns
    chat.send("And?")
    assert chat.ids[0, at - len(letters) : at].tolist() == letters
    assert chat.turns[-1].computed_tokens == chat.cache.columns - columns < 40


def test_a_template_that_changes_earlier_turns(model: Any, tokenizer: Any, caplog: Any) -> None:
    tokenizer.chat_template = THINKS
    script = scripted(tokenizer, "Mm</think>Yes</s>", "if</think>No</s>", "For</s>", "if</s>")
    chat = Chat(model, tokenizer, logits_processor=script, max_new_tokens=30, do_sample=False)
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="hf_sparse"):
        assert chat.send("Is it?") == "Mm</think>Yes"
        assert not caplog.text
        for question in ("Why?", "How?", "What?"):
            at = chat.ids.shape[1]
            chat.send(question)
            prompt = tokenizer.apply_chat_template(chat.messages[:-1], tokenize=False, add_generation_prompt=True)
            assert tokenizer.decode(chat.ids[0]) == prompt + chat.messages[-1]["content"]
            whole = chat.cache.columns == chat.turns[-1].computed_tokens
            assert whole == (question != "What?")  # "For" was no thinking: that turn goes on
    assert caplog.text.count("the chat template changes earlier turns") == 1 and caplog.text.count("\n") == 1
    assert chat.ids.shape[1] > at and chat.computed_tokens > chat.cache.columns


def test_what_is_said_after_everything_was_computed_anew(model: Any, tokenizer: Any) -> None:
    """The prompt changes under the conversation, as one with the time of day does."""
    chat = Chat(model, tokenizer, max_new_tokens=7, **GREEDY)
    chat.send("Is it?")
    tokenizer.chat_template = LLAMA3  # its own rendering of the first turn is what the second goes on from
    before = chat.ids
    chat.send("Why?")
    assert torch.equal(chat.ids[:, : before.shape[1]], before)
    assert answer_is_as_without_a_cache(model, chat)


@pytest.mark.parametrize(
    ("whole", "seen", "answer", "more"),
    [
        ("AB c<e>D", "AB ", "c", "<e>D"),
        ("A c <e>D", "A", "c ", "<e>D"),
        ("Ac<e>D", "A", " c\n", "<e>D"),
        ("A c<e>D", "A", "c", "<e>D"),
        ("A\n\nU: D", "A", "", "\n\nU: D"),
        ("A\n\nU: D", "A", " ", "\n\nU: D"),
        ("A \n<e>D", "A", "\n", "<e>D"),
        ("Ac\nd e<e>c", "A", " c\nd e ", "<e>c"),
        ("Ac<e>D", "B", "c", None),
        ("Ad<e>D", "A", "<t>c</t>d", None),
        ("A", "AB", "", None),
    ],
)
def test_continuation(whole: str, seen: str, answer: str, more: str | None) -> None:
    assert continuation(whole, seen, answer) == more


# Interruptions


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("after", [3, 1, 0])
def test_ctrl_c_ends_an_answer(model: Any, tokenizer: Any, after: int) -> None:
    chat = Chat(model, tokenizer, max_new_tokens=40, **GREEDY)
    handler, streamer = signal.getsignal(signal.SIGINT), After(after, interrupt)
    answer = chat.send("Is it?", streamer)
    assert signal.getsignal(signal.SIGINT) is handler
    new = chat.turns[-1].new_tokens
    assert new == after + 1 and chat.turns[-1].interrupted and streamer.ended == 1  # one was being computed
    assert streamer.got == chat.ids[0].tolist()
    assert answer == tokenizer.decode(streamer.got[-new:], skip_special_tokens=True) == chat.messages[-1]["content"]
    assert goes_on(model, chat) and not chat.turns[-1].interrupted and chat.turns[-1].new_tokens > 4


@pytest.mark.parametrize("after", [3, 0])
def test_a_second_ctrl_c_does_not_wait(model: Any, tokenizer: Any, after: int) -> None:
    chat = Chat(model, tokenizer, max_new_tokens=40, **GREEDY)

    def twice() -> None:
        interrupt()
        interrupt()

    streamer = After(after, twice)
    chat.send("Is it?", streamer)
    assert chat.turns[-1].new_tokens == after and chat.turns[-1].interrupted and streamer.ended == 1
    assert streamer.got == chat.ids[0].tolist() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert goes_on(model, chat)


def test_ctrl_c_after_the_answer_breaks_nothing(model: Any, tokenizer: Any, monkeypatch: Any) -> None:
    decode = tokenizer.decode
    chat = Chat(model, tokenizer, max_new_tokens=5, **GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "decode", lambda *a, **k: (interrupt(), interrupt(), decode(*a, **k))[-1])
        chat.send("Is it?")
    assert chat.turns[-1].new_tokens == 5 and not chat.turns[-1].interrupted
    assert goes_on(model, chat)


def test_ctrl_c_is_ignored_where_it_was(model: Any, tokenizer: Any) -> None:
    chat, before = Chat(model, tokenizer, max_new_tokens=5, **GREEDY), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        chat.send("Is it?", After(2, interrupt))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert chat.turns[-1].new_tokens == 5 and not chat.turns[-1].interrupted


def breaks_in_layer(model: Any, layer: int, at_pass: int) -> Any:
    """Ctrl-C within a pass, when some layers have seen its tokens and others have not."""
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at_pass:
            raise KeyboardInterrupt

    return model.model.layers[layer].register_forward_pre_hook(hook)


@pytest.mark.parametrize("ctx_size", [700, 24], ids=["all held", "evicting"])
@pytest.mark.parametrize("at_pass", [1, 2, 5, 9, 10, 14])
def test_an_interruption_between_layers(model: Any, tokenizer: Any, at_pass: int, ctx_size: int) -> None:
    chat = Chat(model, tokenizer, ctx_size=ctx_size, max_new_tokens=16, **GREEDY)
    chat.send("Is it?")
    hook = breaks_in_layer(model, 1, at_pass)
    chat.send("How is it?")
    hook.remove()
    assert chat.turns[-1].interrupted and chat.turns[-1].new_tokens < 16
    columns, tokens = chat.cache.columns, chat.ids.shape[1]
    assert columns <= tokens and len({layer.held for layer in chat.cache.layers}) == 1
    chat.send("Why?")
    assert chat.cache.columns == chat.ids.shape[1] - 1
    computed = chat.turns[-1].computed_tokens
    assert computed == chat.cache.columns - columns
    if ctx_size == 700:
        assert columns > 0 and tokens - columns < 60
        prompt = chat.ids[:, :-16]
        again = model.generate(prompt, max_new_tokens=16, pad_token_id=0, **GREEDY)
        assert torch.equal(again, chat.ids)


def test_an_interruption_of_a_split_model(directory: Path, tokenizer: Any) -> None:
    model = load(directory, tiers=(SimulatedTier("gpu", budget=100_000, bandwidth=1e12), Tier("cpu")))
    chat = Chat(model, tokenizer, max_new_tokens=9, **GREEDY)
    chat.send("Is it?")
    hook = breaks_in_layer(model, 2, 4)
    chat.send("How?")
    hook.remove()
    chat.send("Why?")
    assert answer_is_as_without_a_cache(model, chat)


def test_another_thread_answers_too(model: Any, tokenizer: Any) -> None:
    chat, answers = Chat(model, tokenizer, max_new_tokens=5, **GREEDY), []
    thread = threading.Thread(target=lambda: answers.append(chat.send("Is it?")))
    thread.start()
    thread.join()
    assert answers == [chat.messages[-1]["content"]] and goes_on(model, chat)


@pytest.mark.parametrize("after", [0, 3])
def test_an_error_leaves_the_conversation_as_it_was(model: Any, tokenizer: Any, after: int) -> None:
    chat = Chat(model, tokenizer, max_new_tokens=9, **GREEDY)
    chat.send("Is it?")
    before = chat.ids, chat.cache.columns, list(chat.messages), list(chat.turns)
    with pytest.raises(OSError, match="full"):
        chat.send("How?", After(after, lambda: raise_(OSError("full"))))
    assert torch.equal(chat.ids, before[0]) and (chat.messages, chat.turns) == before[2:]
    assert before[1] <= chat.cache.columns <= chat.ids.shape[1]
    assert goes_on(model, chat)


def test_a_streamer_that_cannot_end(model: Any, tokenizer: Any) -> None:
    """An interruption, and then nowhere to write to: the answer is there."""
    chat, streamer = Chat(model, tokenizer, max_new_tokens=9, **GREEDY), After(3, lambda: raise_(KeyboardInterrupt()))
    streamer.end = lambda: raise_(OSError("full"))  # type: ignore[method-assign]
    with pytest.raises(OSError, match="full"):
        chat.send("How?", streamer)
    assert chat.turns[-1].new_tokens == 3 and len(chat.messages) == 2
    assert goes_on(model, chat)


# Endless


def test_a_long_conversation_holds_ctx_size_tokens(model: Any, tokenizer: Any) -> None:
    chat = Chat(model, tokenizer, ctx_size=40, system="Be short", n_keep="system", max_new_tokens=20, **GREEDY)
    beginning = tokenizer("<|im_start|>system\nBe short<|im_end|>\n").input_ids
    assert chat.options.n_keep == len(beginning)
    for turn in range(9):
        columns, seen = chat.cache.columns, passed(model)
        chat.send(QUESTIONS[turn % 4])
        assert sum(ids.shape[1] for ids in seen) == chat.turns[-1].computed_tokens == chat.cache.columns - columns
        model.model._forward_pre_hooks.clear()
    assert chat.ids[0, : len(beginning)].tolist() == beginning
    assert chat.held < 40 and chat.held + chat.evicted == chat.cache.columns and chat.evicted > 200
    stats = chat.stats()
    assert stats.pop("tokens/s of decode") > 0
    assert stats == {
        "turns": 9,
        "tokens computed": chat.cache.columns,
        "tokens in the conversation": chat.ids.shape[1],
        "tokens held": chat.held,
        "tokens evicted": chat.evicted,
        "n_keep": len(beginning),
        "ctx_size": 40,
    }


def test_learned_positions(tmp_path: Path, tokenizer: Any) -> None:
    """What stays is computed again whenever some tokens go, which counts."""
    save_checkpoint("opt", tmp_path, vocab_size=VOCABULARY + len(MARKERS))
    model = load(tmp_path)
    chat, seen = Chat(model, tokenizer, ctx_size=50, max_new_tokens=20, **GREEDY), list[int]()
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    for question in QUESTIONS:
        chat.send(question)
    assert sum(seen) == chat.computed_tokens == sum(turn.computed_tokens for turn in chat.turns) > chat.cache.columns
    assert chat.evicted > 0
    with pytest.raises(ValueError, match="save: a cache of learned positions is not saved"):
        chat.save(tmp_path / "chat")
    assert not (tmp_path / "chat").exists()


def test_the_system_prompt_in_other_templates(model: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = LLAMA3
    chat = Chat(model, tokenizer, system=" Be short ", n_keep="system")
    text = "<s><|start_header_id|>system<|end_header_id|>\n\nBe short<|eot_id|>"
    assert chat.options.n_keep == len(tokenizer(text).input_ids)
    tokenizer.chat_template = (  # in the first question, and only there
        "{% if messages | length == 1 and messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}"
        "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    )
    chat = Chat(model, tokenizer, system="Be short", n_keep="system")
    assert chat.options.n_keep == len(tokenizer("[Be short").input_ids)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert Chat(model, tokenizer, system="a", n_keep="system").options.n_keep == 4


def test_reset_forgets_all_but_the_system_prompt(model: Any, tokenizer: Any) -> None:
    chat = Chat(model, tokenizer, system="Be short", max_new_tokens=6, do_sample=False)
    first = [chat.send(question) for question in QUESTIONS[:2]]
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be short"}]
    assert (chat.ids.shape, chat.cache.columns, chat.computed_tokens, chat.turns) == ((1, 0), 0, 0, [])
    assert [chat.send(question) for question in QUESTIONS[:2]] == first


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (None, {}, "tokenizer: has no chat template"),
        (MISTRAL, {"system": "Be short"}, "the chat template refuses those of system, user: roles must alternate"),
        (DEAF, {"system": "Be short"}, "system: the chat template has no place for a system message"),
        (CHATML, {"n_keep": "system"}, 'n_keep: got "system", but there is no system prompt'),
        (CHATML, {"n_keep": "all"}, "n_keep: got 'all', expected a number or \"system\""),
        (CHATML, {"n_keep": 40, "ctx_size": 41}, "ctx_size=41, n_keep=40, n_discard=-1: expected n_keep >= 0 and"),
        (CHATML, {"ctx_size": 701}, "at most the model's 700 positions"),
        (CHATML, {"past_key_values": None, "streamer": None}, "past_key_values, streamer: the chat sets these itself"),
    ],
)
def test_what_is_refused(model: Any, tokenizer: Any, template: Any, options: Any, message: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Chat(model, tokenizer, **options)


def test_a_system_prompt_that_leaves_no_room(model: Any, tokenizer: Any) -> None:
    count = len(tokenizer("<|im_start|>system\nBe short<|im_end|>\n").input_ids)
    with pytest.raises(ValueError, match=f"is {count} tokens, with ctx_size={count + 1}; expected .* {count + 2}"):
        Chat(model, tokenizer, system="Be short", n_keep="system", ctx_size=count + 1)
    assert Chat(model, tokenizer, system="Be short", n_keep="system", ctx_size=count + 2).options.n_keep == count


def test_options_of_generate(model: Any, tokenizer: Any) -> None:
    assert Chat(model, tokenizer).generation == {"pad_token_id": 0, "eos_token_id": [2], "max_new_tokens": 512}
    config = GenerationConfig(max_new_tokens=3, eos_token_id=7)
    chat = Chat(model, tokenizer, generation_config=config, do_sample=False)
    assert chat.stop_ids == (7, 2) and "max_new_tokens" not in chat.generation
    chat.send("Is it?")
    assert chat.turns[-1].new_tokens <= 3
    assert "max_new_tokens" not in Chat(model, tokenizer, max_length=400).generation
    assert Chat(model, tokenizer, eos_token_id=None).stop_ids == ()
    with pytest.raises(ValueError, match="temperature"):
        Chat(model, tokenizer, do_sample=True, temperature=-1.0).send("Is it?")
