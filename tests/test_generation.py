"""The loop that decodes one sequence by native calls, beside transformers' own loop on the same model."""

from __future__ import annotations

import functools
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

import hf_sparse.model
from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.modeling import PagedCacheLayer, SkipRule, hybrid_blocks, magnitude
from hf_sparse.quantization import NeuronMatrix, gathered_row_product, instruction_sets
from tiny_models import prompt_ids, save_checkpoint, save_tokenizer
from workers import generate_in_a_worker

QUICK = {"calibration_tokens": 64, "max_perplexity_increase": 0}
GREEDY = {"do_sample": False, "max_new_tokens": 14, "pad_token_id": 0, "eos_token_id": None}
SAMPLED = {"do_sample": True, "max_new_tokens": 14, "pad_token_id": 0, "eos_token_id": None}

pytestmark = pytest.mark.skipif(instruction_sets() == ["torch"], reason="the kernels are not there")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    save_checkpoint("llama", made, max_position_embeddings=400)
    return made


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    return save_tokenizer(directory)


def load(directory: Path) -> Any:
    quantization = WeightOnlyQuantConfig(group_size=32)
    model = SparseAutoModelForCausalLM.from_pretrained(directory, quantization_config=quantization, **QUICK)
    for block in hybrid_blocks(model):
        if block.id.kind == "mlp":
            block.rule = magnitude(gate=0.02)
    return model


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return load(directory)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that the loop of our own ran to its end."""
    runs: list[int] = []
    decode_alone = hf_sparse.model.decode_alone

    @functools.wraps(decode_alone)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = decode_alone(*args, **kwargs)
        runs.append(1)
        return result

    monkeypatch.setattr(hf_sparse.model, "decode_alone", counted)
    return runs


@contextmanager
def transformers_loop() -> Iterator[None]:
    """Within it generate() runs transformers' own loop, whose forward passes are decode steps all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_sparse.model, "decodes_alone", lambda *args: False)
        yield


def both(model: Any, ids: Tensor, **options: Any) -> tuple[Any, Any]:
    """What our loop gives, and what transformers' does, from the same seed."""
    results = []
    for context in (contextmanager(lambda: iter([None]))(), transformers_loop()):
        with context:
            torch.manual_seed(11)
            results.append(model.generate(ids, **options))
    return results[0], results[1]


@pytest.mark.parametrize(
    "options",
    [
        GREEDY,
        GREEDY | {"repetition_penalty": 1.4},
        GREEDY | {"no_repeat_ngram_size": 2, "bad_words_ids": [[7], [9, 11]]},
        GREEDY | {"max_new_tokens": 1},
        GREEDY | {"max_new_tokens": 280},
        GREEDY | {"max_length": 20, "max_new_tokens": None},
        GREEDY | {"guidance_scale": 1.5},
        SAMPLED,
        SAMPLED | {"temperature": 0.6},
        SAMPLED | {"top_k": 5},
        SAMPLED | {"top_p": 0.7, "temperature": 1.3},
        SAMPLED | {"min_p": 0.02, "typical_p": 0.9},
        SAMPLED | {"repetition_penalty": 1.3, "temperature": 0.9, "top_k": 30, "top_p": 0.95},
        SAMPLED | {"eos_token_id": list(range(3, 90)), "max_new_tokens": 60},
        SAMPLED | {"eos_token_id": list(range(3, 90)), "min_new_tokens": 9, "max_new_tokens": 60},
        SAMPLED | {"num_return_sequences": 3},
        SAMPLED | {"use_cache": False},
    ],
    ids=lambda options: ", ".join(f"{k}={v}"[:30] for k, v in options.items() if (GREEDY | SAMPLED).get(k) != v),
)
def test_every_option_gives_what_transformers_gives(options: dict[str, Any], model: Any, alone: list[int]) -> None:
    ids = prompt_ids(1, 6)
    got, expected = both(model, ids, **options)
    assert torch.equal(got, expected)
    left = "num_return_sequences" in options or options.get("use_cache") is False
    assert len(alone) == (0 if left else 1)


def test_the_end_of_text_ends_it(model: Any, alone: list[int]) -> None:
    ids = prompt_ids(1, 6)
    whole = model.generate(ids, **GREEDY)
    end = int(whole[0, 10])
    stop = 7 + whole[0, 6:].tolist().index(end)
    got, expected = both(model, ids, **(GREEDY | {"eos_token_id": end}))
    assert torch.equal(got, expected) and got.tolist() == whole[:, :stop].tolist()
    assert len(alone) == 2


@pytest.mark.parametrize("rows", [2, 3])
def test_several_rows_are_left_to_transformers(rows: int, model: Any, alone: list[int]) -> None:
    got, expected = both(model, prompt_ids(rows, 6), **GREEDY)
    assert torch.equal(got, expected) and not alone


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_beams": 2, "num_beam_groups": 1}, {"prompt_lookup_num_tokens": 3}], ids=str
)
def test_beams_and_lookups_give_what_they_give_without_us(
    options: dict[str, Any], model: Any, alone: list[int]
) -> None:
    got, expected = both(model, prompt_ids(1, 9).repeat(1, 2), **GREEDY, **options)
    assert torch.equal(got, expected) and not alone


def test_an_assistant_and_assisting(model: Any, directory: Path, alone: list[int]) -> None:
    ids = prompt_ids(1, 6)
    expected = model.generate(ids, **GREEDY)
    alone.clear()
    assistant = load(directory)
    for _ in range(2):
        assert torch.equal(model.generate(ids, assistant_model=assistant, **GREEDY), expected)
    assert torch.equal(assistant.generate(ids, **GREEDY), expected)
    assert len(alone) == 1


def test_scores_and_logits(model: Any, alone: list[int]) -> None:
    options = SAMPLED | {"temperature": 0.7, "top_k": 9, "return_dict_in_generate": True}
    ids = prompt_ids(1, 6)
    got, expected = both(model, ids, **options, output_scores=True, output_logits=True)
    assert len(alone) == 1 and type(got) is type(expected) and got.keys() == expected.keys()
    assert torch.equal(got.sequences, expected.sequences)
    assert len(got.scores) == len(got.logits) == 14
    torch.testing.assert_close(got.scores, expected.scores, rtol=0, atol=0)
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=0)
    got, expected = both(model, ids, **options)
    assert got.scores is None and got.logits is None and got.keys() == expected.keys()
    assert got.cache.get_seq_length() == expected.cache.get_seq_length() == 19
    for mine, other in zip(got.cache.layers, expected.cache.layers, strict=True):
        assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)


def test_attentions_and_hidden_states_are_left_to_transformers(model: Any, alone: list[int]) -> None:
    options = GREEDY | {"return_dict_in_generate": True, "output_hidden_states": True, "max_new_tokens": 3}
    got, expected = both(model, prompt_ids(1, 6), **options)
    assert torch.equal(got.sequences, expected.sequences) and len(got.hidden_states) == 3 and not alone


def test_scores_that_a_processor_changes_in_place_do_not_change_the_logits(model: Any) -> None:
    class Shift(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores.clone().add_(torch.arange(331) % 5)

    options = GREEDY | {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    got, expected = both(model, prompt_ids(1, 6), logits_processor=LogitsProcessorList([Shift()]), **options)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.scores, expected.scores, rtol=0, atol=0)
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=0)


# When to stop


class AtLength(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length, self.seen = length, []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append((input_ids.tolist(), None if scores is None else len(scores)))
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("with_scores", [False, True])
def test_criteria_see_what_they_see_in_transformers(with_scores: bool, model: Any, alone: list[int]) -> None:
    options = GREEDY | {"return_dict_in_generate": with_scores, "output_scores": with_scores}
    seen, results = [], []
    for context in (contextmanager(lambda: iter([None]))(), transformers_loop()):
        criterion = AtLength(11)
        with context:
            out = model.generate(prompt_ids(1, 6), stopping_criteria=StoppingCriteriaList([criterion]), **options)
        seen.append(criterion.seen)
        results.append(out.sequences if with_scores else out)
    assert torch.equal(*results) and results[0].shape == (1, 11)
    assert seen[0] == seen[1] and len(seen[0]) == 5
    assert len(alone) == 1


def test_strings_that_stop(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    class Plain(LogitsProcessor):
        """Letters only, which each decode to themselves."""

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            letters = tokenizer.convert_tokens_to_ids(list("abcdefghij"))
            return torch.full_like(scores, -torch.inf).index_copy(1, torch.tensor(letters), scores[:, letters])

    ids = prompt_ids(1, 6)
    options = SAMPLED | {"logits_processor": LogitsProcessorList([Plain()]), "max_new_tokens": 40}
    torch.manual_seed(11)
    text = tokenizer.decode(model.generate(ids, **options)[0, 6:])
    end = text.index(text[7:9]) + 2
    got, expected = both(model, ids, **options, stop_strings=[text[7:9]], tokenizer=tokenizer)
    assert torch.equal(got, expected) and tokenizer.decode(got[0, 6:]) == text[:end]


def test_time_that_stops(model: Any, alone: list[int]) -> None:
    class Slow(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            time.sleep(0.05)
            return torch.zeros(1, dtype=torch.bool)

    options = GREEDY | {"max_new_tokens": 200, "max_time": 0.3}
    out = model.generate(prompt_ids(1, 6), stopping_criteria=StoppingCriteriaList([Slow()]), **options)
    assert 7 <= out.shape[1] <= 6 + 7 and len(alone) == 1


# Streamers


class Recorder(BaseStreamer):
    """What it is given, and how: shapes and dtypes too."""

    def __init__(self, at: int | None = None, then: Callable[[], object] | None = None) -> None:
        self.calls: list[Any] = []
        self.at, self.then = at, then

    def put(self, value: Tensor) -> None:
        self.calls.append((value.tolist(), value.dtype, str(value.device)))
        if len(self.calls) == self.at and self.then is not None:
            self.then()

    def end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize("options", [GREEDY, SAMPLED, GREEDY | {"max_new_tokens": 1}], ids=["greedy", "sampled", "one"])
def test_streamers_are_called_as_in_transformers(options: dict[str, Any], model: Any, alone: list[int]) -> None:
    recorders = [Recorder(), Recorder()]
    for recorder, context in zip(recorders, (contextmanager(lambda: iter([None]))(), transformers_loop()), strict=True):
        with context:
            torch.manual_seed(3)
            model.generate(prompt_ids(1, 6), streamer=recorder, **options)
    assert recorders[0].calls == recorders[1].calls
    assert len(recorders[0].calls) == options["max_new_tokens"] + 2 and len(alone) == 1


def test_text_streamers(model: Any, tokenizer: PreTrainedTokenizerFast, capsys: Any, alone: list[int]) -> None:
    inputs = tokenizer("for x in the", return_tensors="pt")
    text = tokenizer.decode(model.generate(**inputs, **GREEDY)[0, inputs.input_ids.shape[1] :])
    model.generate(**inputs, streamer=TextStreamer(tokenizer, skip_prompt=True), **GREEDY)
    assert capsys.readouterr().out == text + "\n"
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=model.generate, kwargs={**inputs, **GREEDY, "streamer": streamer})
    thread.start()
    assert "".join(streamer) == text
    thread.join()
    assert len(alone) == 3


def test_a_streamer_that_raises_leaves_the_model_as_it_was(model: Any, alone: list[int]) -> None:
    ids = prompt_ids(1, 6)
    expected = model.generate(ids, **GREEDY)

    def fail() -> None:
        raise KeyError("a streamer's own")

    for at in (1, 2, 7):
        with pytest.raises(KeyError, match="a streamer's own"):
            model.generate(ids, streamer=Recorder(at, fail), **GREEDY)
        assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert len(alone) == 4


def test_a_hook_set_midway_is_called_from_then_on_and_changes_no_token(model: Any, alone: list[int]) -> None:
    ids = prompt_ids(1, 6)
    expected = model.generate(ids, **GREEDY)
    calls: list[int] = []
    handles: list[Any] = []
    layer = model.get_submodule("model.layers.1")

    def hook() -> None:
        handles.append(layer.register_forward_hook(lambda *_: calls.append(1)))

    streamer = Recorder(5, hook)  # with the prompt, after the fourth of 14 tokens
    assert torch.equal(model.generate(ids, streamer=streamer, **GREEDY), expected)
    handles.pop().remove()
    assert len(calls) == 14 - 4 and len(alone) == 2

    def unhook() -> None:
        handles.pop().remove()

    calls.clear()
    hook()
    assert torch.equal(model.generate(ids, streamer=Recorder(5, unhook), **GREEDY), expected)
    assert len(calls) == 4  # the prompt, and three tokens


def test_a_rule_changed_midway_applies_from_then_on(directory: Path) -> None:
    model = load(directory)
    ids = prompt_ids(1, 6)
    nothing = magnitude(gate=1e9)

    def skip_all() -> None:
        for block in hybrid_blocks(model):
            if block.id.kind == "mlp":
                block.rule = nothing

    results = []
    for context in (contextmanager(lambda: iter([None]))(), transformers_loop()):
        for block in hybrid_blocks(model):
            if block.id.kind == "mlp":
                block.rule = SkipRule()
        with context:
            results.append(model.generate(ids, streamer=Recorder(5, skip_all), **GREEDY))
    assert torch.equal(*results)


# Caches, and one call after another


def test_a_returned_cache_is_continued_by_either_loop(model: Any, alone: list[int]) -> None:
    ids = prompt_ids(1, 6)
    options = GREEDY | {"return_dict_in_generate": True}
    whole = model.generate(ids, **options).sequences
    for first_context in (transformers_loop, lambda: contextmanager(lambda: iter([None]))()):
        for second_context in (transformers_loop, lambda: contextmanager(lambda: iter([None]))()):
            with first_context():
                first = model.generate(ids, **(options | {"max_new_tokens": 5}))
            assert all(isinstance(layer, PagedCacheLayer) for layer in first.cache.layers)
            assert first.cache.get_seq_length() == 10
            with second_context():
                rest = model.generate(first.sequences, cache=first.cache, **(options | {"max_new_tokens": 9}))
            assert torch.equal(rest.sequences, whole) and rest.cache is first.cache
            # what was said in between
            more = torch.cat((rest.sequences, prompt_ids(1, 3, seed=5)), dim=1)
            continued = model.generate(more, cache=rest.cache, **GREEDY)
            assert torch.equal(continued, model.generate(more, **GREEDY))


def test_a_cache_of_the_users_own(model: Any) -> None:
    ids = prompt_ids(1, 6)
    expected = model.generate(ids, **GREEDY)
    cache = DynamicCache(config=model.config)
    assert torch.equal(model.generate(ids, cache=cache, **GREEDY), expected)
    assert cache.get_seq_length() == 19


def test_calls_one_after_another_do_not_know_of_each_other(model: Any) -> None:
    prompts = [prompt_ids(1, length, seed=length) for length in (6, 1, 70, 6)]
    expected = [model.generate(ids, **GREEDY) for ids in prompts]
    with transformers_loop():
        assert all(torch.equal(model.generate(i, **GREEDY), e) for i, e in zip(prompts, expected, strict=True))
    assert all(torch.equal(model.generate(i, **GREEDY), e) for i, e in zip(prompts, expected, strict=True))


def test_the_share_of_neurons_is_counted_alike(model: Any) -> None:
    shares = []
    for context in (contextmanager(lambda: iter([None]))(), transformers_loop()):
        model.reset_active_fraction()
        with context:
            model.generate(prompt_ids(1, 6), **GREEDY)
        shares.append(model.active_fraction())
    assert shares[0] == shares[1] and 0 < shares[0] < 1


# Threads and processes


def _in_threads(model: Any, prompts: list[Tensor], options: dict[str, Any], connection: Any) -> None:
    """Sends what three threads at once generate, again and again."""
    torch.set_num_threads(1)  # has PyTorch settle what a fork upsets before threads come upon it
    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(3) as pool:
        for _ in range(6):
            connection.send([out.tolist() for out in pool.map(lambda ids: model.generate(ids, **options), prompts)])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_threads_that_generate_at_once_get_what_they_get_alone(model: Any) -> None:
    prompts = [prompt_ids(1, length, seed=length + n) for n, length in enumerate((5, 9, 64, 5, 5, 5))]
    options = GREEDY | {"max_new_tokens": 60}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = [model.generate(ids, **options).tolist() for ids in prompts]
        context: Any = multiprocessing.get_context("fork")  # what goes wrong here may end the process
        here, there = context.Pipe()
        process = context.Process(target=_in_threads, args=(model, prompts, options, there))
        process.start()
        there.close()
        messages = received(process, here, 6)
    finally:
        torch.set_num_threads(before)
    assert process.exitcode == 0 and messages == [expected] * 6


def received(process: Any, connection: Any, count: int) -> list[Any]:
    """That many messages, or what came until a minute was over or the process ended."""
    messages: list[Any] = []
    deadline = time.monotonic() + 60
    try:
        while len(messages) < count and time.monotonic() < deadline:
            if connection.poll(0.2):
                messages.append(connection.recv())
            elif not process.is_alive():
                break
    except EOFError:
        pass
    finally:
        process.join(5)
        if process.is_alive():
            process.kill()
    return messages


@pytest.mark.parametrize(("method", "threads"), [("fork", 1), ("fork", 2), ("spawn", 1)])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_worker_generates_too(method: str, threads: int, directory: Path, generator: torch.Generator) -> None:
    model = load(directory)
    matrix = NeuronMatrix.quantize(torch.randn(300, 1024, generator=generator), "nf4", 32)
    product = functools.partial(gathered_row_product, matrix, torch.randn(1, 1024, generator=generator))
    ids = prompt_ids(1, 6)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = [product().tolist(), *[model.generate(ids, **GREEDY).tolist()] * 2]  # OpenMP has its threads now
        context: Any = multiprocessing.get_context(method)
        here, there = context.Pipe()
        process = context.Process(target=generate_in_a_worker, args=(model, ids, GREEDY, product, there))
        process.start()
        there.close()
        messages = received(process, here, 4)
    finally:
        torch.set_num_threads(before)
    assert messages[:3] == expected, messages
    forked = [line for line in messages[3] if "was forked from one that had loaded hf_sparse" in line]
    assert len(forked) == (method == "fork"), messages[3]
