"""Tiny random checkpoints of every family, saved to disk by transformers itself, and a tiny tokenizer trained on real
text.
"""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hf_sparse.modeling import PackedHead

VOCABULARY = 331
_BASE: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 160,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GATED = _BASE | {"intermediate_size": 88}

# case: (model_type, config). Widths 48 and 88 are multiples of no group of weights; every size differs from the others.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GATED | {"num_key_value_heads": 3}),
    "llama-tied-bias": (
        "llama",
        _GATED | {"num_key_value_heads": 2, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("mistral", _GATED | {"num_key_value_heads": 2, "sliding_window": 7}),
    "qwen2": ("qwen2", _GATED | {"num_key_value_heads": 2}),
    "qwen3": ("qwen3", _GATED | {"num_key_value_heads": 2, "head_dim": 10}),
    "gemma2": ("gemma2", _GATED | {"num_key_value_heads": 2, "head_dim": 10, "sliding_window": 8}),
    "gemma3": ("gemma3_text", _GATED | {"num_key_value_heads": 3, "head_dim": 10, "sliding_window": 8}),
    "phi3": ("phi3", _GATED | {"num_key_value_heads": 3}),
    "opt": ("opt", _BASE | {"ffn_dim": 88, "word_embed_proj_dim": 48}),
    "opt-350m": ("opt", _BASE | {"ffn_dim": 88, "word_embed_proj_dim": 24, "do_layer_norm_before": False}),
    "falcon-7b": ("falcon", _BASE | {"multi_query": True, "parallel_attn": True, "alibi": False}),
    "falcon-40b": ("falcon", _BASE | {"new_decoder_architecture": True, "num_kv_heads": 3, "alibi": False}),
    "falcon-rw": ("falcon", _BASE | {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True}),
    "gpt_neox": ("gpt_neox", _GATED),
    "bloom": ("bloom", _BASE | {"n_layer": 3, "n_head": 6}),
    "nemotron": ("nemotron", _GATED | {"num_key_value_heads": 2, "head_dim": 8}),
    "olmo2": ("olmo2", _GATED | {"num_key_value_heads": 2}),
    "smollm3": ("smollm3", _GATED | {"num_key_value_heads": 2, "no_rope_layer_interval": 2}),
}


def save_checkpoint(case: str, directory: Path, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Saves a random model of `case` with transformers and returns it; norms and biases are random too."""
    model_type, fields = CASES[case]
    config = AutoConfig.for_model(model_type, **(fields | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    return model


def learn(model: PreTrainedModel, rows: torch.Tensor, steps: int = 25) -> PreTrainedModel:
    """Has a random model learn `rows`, int64 [rows, tokens], by heart, so that what is left out of it costs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    with torch.enable_grad():
        for _ in range(steps):
            optimizer.zero_grad()
            model(rows, labels=rows).loss.backward()
            optimizer.step()
    return model


def save_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCABULARY` tokens, trained on the standard library's own documentation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics["assignment"], topics["for"], topics["if"]], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(directory)
    return fast


def prompt_ids(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def plain_twin(model: PreTrainedModel) -> PreTrainedModel:
    """transformers' own model with the dequantized weights of `model`."""
    config = type(model.config).from_dict(
        {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    )
    if isinstance(model.get_output_embeddings(), PackedHead):
        config.tie_word_embeddings = False  # a packed head is not what the embeddings are
    twin = AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
    twin.load_state_dict(model.dequantized_state_dict())
    return twin
