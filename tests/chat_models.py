"""Templates, tokenizers and checkpoints for tests of conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.chat import Chat
from tiny_models import VOCABULARY, save_checkpoint, save_tokenizer

MARKERS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
THINKS = (
    "{% for m in messages %}{% set said = m.content %}{% if m.role == 'assistant' and not loop.last %}"
    "{% set said = said.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + said + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEAF = "{% for m in messages if m.role != 'system' %}{{ m.content }}\n{% endfor %}"
STABLE = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL}
# No token ends an answer here, and none comes twice behind the same one, as a random model would have it.
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "no_repeat_ngram_size": 2}
QUESTIONS = ("The value of a name", "Is it assigned?", "for x in y: if z", "Why?")


def save_chat_model(directory: Path) -> None:
    save_checkpoint("llama", directory, vocab_size=VOCABULARY + len(MARKERS), max_position_embeddings=700)


def chat_tokenizer(directory: Path) -> Any:
    made = save_tokenizer(directory)
    made.add_special_tokens({"additional_special_tokens": MARKERS})
    made.chat_template = CHATML
    return made


def load(directory: Path, **options: Any) -> Any:
    quantization = WeightOnlyQuantConfig(group_size=32, compute_dtype="fp32", head_dtype=None)
    quick = {"calibration_tokens": 64, "max_perplexity_increase": 0}
    return SparseAutoModelForCausalLM.from_pretrained(directory, quantization_config=quantization, **quick, **options)


class Scripted(LogitsProcessor):
    """Has the model say these tokens, one answer after the other."""

    def __init__(self, *answers: list[int]) -> None:
        self.tokens = [token for answer in answers for token in answer]

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.tokens.pop(0)] = 0
        return forced


def scripted(tokenizer: Any, *answers: str) -> LogitsProcessorList:
    return LogitsProcessorList([Scripted(*(tokenizer(text, add_special_tokens=False).input_ids for text in answers))])


def greedy(model: Any, ids: torch.Tensor, tokens: int) -> list[int]:
    """What `generate` says behind `ids`, all of which it computes."""
    result = model.generate(ids, max_new_tokens=tokens, pad_token_id=0, **GREEDY)
    return [int(id) for id in result[0, ids.shape[1] :]]


def answer_is_as_without_a_cache(model: Any, chat: Chat) -> bool:
    said = chat.ids.shape[1] - chat.turns[-1].new_tokens
    return greedy(model, chat.ids[:, :said], chat.turns[-1].new_tokens) == chat.ids[0, said:].tolist()


class After:
    """A streamer that does something once it has got the prompt and `tokens` tokens."""

    def __init__(self, tokens: int, what: Any) -> None:
        self.left, self.what, self.got, self.ended = tokens + 1, what, list[int](), 0

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        self.got += value.flatten().tolist()
        if self.left == 0:
            self.what()

    def end(self) -> None:
        self.ended += 1


def raise_(error: BaseException) -> Any:
    raise error


def goes_on(model: Any, chat: Chat, question: str = "Why?") -> bool:
    before, columns = chat.ids.shape[1], chat.cache.columns
    assert columns <= before
    chat.send(question)
    assert len({layer.held for layer in chat.cache.layers}) == 1
    return answer_is_as_without_a_cache(model, chat)
