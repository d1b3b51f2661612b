"""GGUF files of tiny Llamas, as llama.cpp writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import LlamaConfig

# rows are multiples of 32, so that the block formats can store them
VOCABULARY, WIDTH, NEURONS, LAYERS, HEADS, KV_HEADS = 112, 64, 160, 3, 8, 2
LLAMA = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    intermediate_size=NEURONS,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    tie_word_embeddings=False,
)

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    layer = ""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, number, stem = stem.split(".", 3)
        layer = f"blk.{number}."
    return f"{layer}{GGUF_NAMES[stem]}.weight"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of q and k."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def start_gguf(path: Path, architecture: str = "llama") -> GGUFWriter:
    writer = GGUFWriter(str(path), architecture)
    writer.add_context_length(50)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(NEURONS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_token_list([f"token{i}" for i in range(VOCABULARY)])
    writer.add_array("test.numbers", [1.5, 2.5, 3.5])
    return writer


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Where the float16 numbers are in a block: what else there is may be any bytes.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_rows(kind: GGMLQuantizationType, rows: int, cols: int, seed: int = 7) -> np.ndarray:
    """uint8 [rows, bytes of a row]: blocks of any codes, whose scales lie around 0.01 and have both signs."""
    generator = np.random.default_rng(seed)
    columns, size = GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (rows * cols // columns, size), np.uint8)
    for at in HALVES[kind.name]:
        numbers = generator.standard_normal((len(blocks), 1)) * 0.01
        blocks[:, at : at + 2] = numbers.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def write_gguf(
    path: Path,
    tensors: dict[str, torch.Tensor],
    kind: GGMLQuantizationType,
    of_others: GGMLQuantizationType | None = None,
) -> None:
    """`of_others`: kind of k, v, down and the embeddings; None: as all."""
    writer = start_gguf(path)
    for name, tensor in tensors.items():
        weight = tensor.detach().float().numpy()
        if ".q_proj" in name:
            weight = interleave(weight, HEADS)
        if ".k_proj" in name:
            weight = interleave(weight, KV_HEADS)
        other = of_others is not None and any(part in name for part in ("k_proj", "v_proj", "down", "embed", "lm_head"))
        stored_as = GGMLQuantizationType.F32 if weight.ndim != 2 else of_others if of_others and other else kind
        writer.add_tensor(gguf_name(name), quantize(weight, stored_as), raw_dtype=stored_as)
    finish(writer)
