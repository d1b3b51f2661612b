"""Checkpoints that others quantized: what their own formula gives is what is read, codes stay where they can, and what
changes is said.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from gguf_files import HALVES, LLAMA, random_rows, write_gguf
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.checkpoint import Checkpoint, SafetensorsCheckpoint
from hf_sparse.gguf_blocks import KINDS, GgufMatrix
from hf_sparse.modeling import hybrid_blocks
from hf_sparse.prequantized import PrequantizedCheckpoint, method_of
from hf_sparse.quantization import (
    NeuronMatrix,
    gathered_accumulate,
    gathered_row_product,
    instruction_sets,
    reference,
)
from hf_sparse.quantization.codebooks import codebook
from hf_sparse.stored_matrix import StoredMatrix, repacked
from tiny_models import VOCABULARY, plain_twin, prompt_ids, save_checkpoint, save_tokenizer

QUICK: dict[str, Any] = {"calibration_tokens": 64, "max_perplexity_increase": 0}
STORED = WeightOnlyQuantConfig(weight_dtype="stored", compute_dtype="fp32", head_dtype=None)
# bitsandbytes 0.50 dequantizes rows that are not whole blocks wrongly on CPUs, so models have whole ones
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
AGAIN = "int8:32"
# bfloat16 keeps 8 bits of a scale; of an offset too, which is up to 15 times as large as the step between codes
ROUNDING = {"nf4": 0.012, "fp4": 0.012, "int4": 0.004, "int8": 0.004, "iq4_nl": 0.004, "int4_asym": 0.015}


def load(directory: Path, **options: Any) -> Any:
    return SparseAutoModelForCausalLM.from_pretrained(directory, **(QUICK | options))


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(prompt_ids(2, 9) % model.config.vocab_size).logits


def off(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def assert_kept(stored: StoredMatrix, weight: Tensor) -> None:
    """Every weight is what the codes give, up to the rounding of their scales, and the error is what is said."""
    assert stored.form is not None
    weight_dtype, group_size = stored.form
    decode, book = stored.read(), codebook(weight_dtype)
    decoded = decode(0, stored.rows)
    assert decoded.codes is not None and decoded.scales is not None
    codes = decoded.codes.int()
    values = codes if book.table is None else book.table.int()[codes]
    scales, offsets = (
        None if part is None else part.repeat_interleave(group_size, 1)[:, : stored.cols]
        for part in (decoded.scales, decoded.offsets)
    )
    assert scales is not None
    exact = values * scales + (0 if offsets is None else offsets)
    # nf4 and fp4 values are whole numbers here; the others are the same numbers
    atol = 0.005 * book.divisor * scales.abs() if weight_dtype in ("nf4", "fp4") else 4e-7 * weight.abs().max()
    assert bool(((exact - weight).abs() <= atol).all())
    matrix, error = repacked(stored, stored.form, transposed=False)
    expected_codes = torch.nn.functional.pad(decoded.codes, (0, -stored.cols % group_size), value=book.zero)
    assert torch.equal(matrix.codes, expected_codes if book.table is None else reference.pack(expected_codes))
    assert torch.equal(matrix.scales, decoded.scales.bfloat16())
    assert error == pytest.approx(off(matrix.dequantize(), weight), rel=1e-3)
    assert error <= ROUNDING[weight_dtype]


def save_parts(folder: Path, parts: dict[str, Tensor]) -> SafetensorsCheckpoint:
    file = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in parts.items()}, file)
    return SafetensorsCheckpoint([file], None, None, None, weights=None)


# bitsandbytes


def bnb_fields(quant_type: str = "nf4", **fields: Any) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": quant_type} | fields


def bnb_parts(weight: Tensor, quant_type: str, blocksize: int, double: bool) -> tuple[dict[str, Tensor], Tensor]:
    """What bitsandbytes saves of a weight, and what it makes of that."""
    codes, state = bnb.quantize_4bit(weight, quant_type=quant_type, blocksize=blocksize, compress_statistics=double)
    parts = {"up.weight": codes} | {f"up.weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    state.shape = torch.Size([weight.numel()])
    expected = bnb.dequantize_4bit(codes, state).view(weight.shape)
    return {name: part.clone() for name, part in parts.items()}, expected


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(
    ("rows", "cols", "blocksize", "kept"),
    [
        (37, 64, 64, 64),
        (36, 192, 128, 64),
        (5, 96, 64, 32),
        (40, 256, 1024, 128),
        (7, 34, 64, None),
        (8, 35, 64, None),
        (1030, 1024, 64, 64),
    ],
)
def test_bitsandbytes_matrices(
    quant_type: str,
    double: bool,
    rows: int,
    cols: int,
    blocksize: int,
    kept: int | None,
    generator: torch.Generator,
    tmp_path: Path,
) -> None:
    parts, expected = bnb_parts(torch.randn(rows, cols, generator=generator) * 0.1, quant_type, blocksize, double)
    inner = save_parts(tmp_path, parts | {"up.bias": torch.ones(3)})
    checkpoint = PrequantizedCheckpoint(inner, method_of(bnb_fields(quant_type)))
    assert sorted(checkpoint.names()) == ["up.bias", "up.weight"]
    assert checkpoint.shape("up.weight") == (rows, cols)
    torch.testing.assert_close(checkpoint.tensor("up.weight"), expected, rtol=1e-6, atol=1e-8)
    assert checkpoint.stored("up.bias") is None
    stored = checkpoint.stored("up.weight")
    assert stored is not None
    assert stored.form == (None if kept is None else (quant_type, kept))
    if kept is not None:
        assert_kept(stored, expected)


def saved_by_bitsandbytes(folder: Path, **options: Any) -> Any:
    """A tiny Llama quantized by transformers; returns that model with its weights dequantized."""
    if not (folder / "plain").exists():
        save_checkpoint("llama", folder / "plain", **SIZES)
    config = BitsAndBytesConfig(**options)
    theirs = AutoModelForCausalLM.from_pretrained(folder / "plain", quantization_config=config)
    theirs.save_pretrained(folder / "quantized")
    save_tokenizer(folder / "quantized")
    theirs = AutoModelForCausalLM.from_pretrained(folder / "quantized")
    return theirs.dequantize() if config.load_in_4bit else theirs


BNB = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
}


@pytest.mark.parametrize("options", BNB)
def test_a_bitsandbytes_repository(options: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = saved_by_bitsandbytes(tmp_path, **BNB[options])
    with caplog.at_level(logging.WARNING, logger="hf_sparse"):
        model = load(tmp_path / "quantized", quantization_config=STORED)
    said = [record.getMessage() for record in caplog.records if "quantized weights" in record.getMessage()]
    assert len(said) == 1
    assert "of 21 quantized weights 15 keep their codes (relative RMS error 0." in said[0]
    assert "6 were quantized again, to int8 in groups of 32 (relative RMS error 0." in said[0]
    quant_type = str(BNB[options]["bnb_4bit_quant_type"])
    assert model.config.quantization_config == WeightOnlyQuantConfig(
        weight_dtype=quant_type,
        group_size=64,
        compute_dtype="fp32",
        head_dtype=None,
        formats={"mlp.down_proj": AGAIN, "self_attn.o_proj": AGAIN},
    )
    weights = theirs.state_dict()
    for name, weight in model.dequantized_state_dict().items():
        assert off(weight, weights[name]) < (0.01 if ".layers." in name and weight.dim() == 2 else 1e-7), name
    torch.testing.assert_close(logits(model), logits(plain_twin(model)), rtol=1e-4, atol=1e-5)
    assert off(logits(model), logits(theirs)) < 0.02


def test_llm_int8(tmp_path: Path, generator: torch.Generator) -> None:
    codes = torch.randint(-128, 128, (37, 90), generator=generator, dtype=torch.int8)
    scb = torch.rand(37, generator=generator)
    parts = {"up.weight": codes, "up.SCB": scb, "up.weight_format": torch.tensor(0, dtype=torch.uint8)}
    method = method_of({"quant_method": "bitsandbytes", "load_in_8bit": True})
    checkpoint = PrequantizedCheckpoint(save_parts(tmp_path, parts), method)
    assert checkpoint.names() == ["up.weight"]
    expected = codes.float() * (scb / 127)[:, None]
    torch.testing.assert_close(checkpoint.tensor("up.weight"), expected)
    stored = checkpoint.stored("up.weight")
    assert stored is not None and stored.form == ("int8", 128)
    assert_kept(stored, expected)


# What a loaded model is


def forms(model: Any) -> dict[str, str]:
    found = {}
    for block in hybrid_blocks(model):
        for name, matrix in block.shards[0].matrices.items():
            found[f"{block.id.layer}.{block.prefix}{name}"] = f"{matrix.weight_dtype}:{matrix.group_size}"
    return found


def test_a_saved_model_is_the_same(tmp_path: Path) -> None:
    saved_by_bitsandbytes(tmp_path, **BNB["nf4"])
    for options in ({}, {"load_in_4bit": True}):
        model = load(tmp_path / "quantized", **options)
        assert model.config.quantization_config.compute_dtype == "int8"
        assert forms(model)["1.mlp.down_proj"] == AGAIN and forms(model)["1.mlp.up_proj"] == "nf4:64"
    model.save_pretrained(tmp_path / "saved")
    save_tokenizer(tmp_path / "saved")
    for auto in (SparseAutoModelForCausalLM, AutoModelForCausalLM):
        again: Any = auto.from_pretrained(tmp_path / "saved")
        assert again.plan_directory == tmp_path / "saved" / "hf_sparse_plan"
        assert again.plan.key.quantization["formats"] == {"mlp.down_proj": AGAIN, "self_attn.o_proj": AGAIN}
        assert forms(again) == forms(model)
        assert torch.equal(logits(again), logits(model))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    for formats, message in (
        ({"mlp.dwon_proj": AGAIN}, "formats: the model has no projection 'mlp.dwon_proj', it has mlp.down_proj, "),
        ({"mlp.down_proj": "int8:48"}, r"formats\['mlp.down_proj'\]: got 'int8:48', allowed are "),
        ({"mlp down": AGAIN}, "formats: got the key 'mlp down', allowed are "),
        ([AGAIN], "formats: got "),
        ({"mlp.down_proj": "int8:64"}, "scales: expected torch.bfloat16"),
        ({}, "checkpoint lacks|expected"),
    ):
        changed = config | {"quantization_config": config["quantization_config"] | {"formats": formats}}
        (tmp_path / "saved" / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "saved")


def test_another_format_is_quantized_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = saved_by_bitsandbytes(tmp_path, **BNB["nf4"])
    with caplog.at_level(logging.WARNING, logger="hf_sparse"):
        model = load(tmp_path / "quantized", quantization_config=WeightOnlyQuantConfig(weight_dtype="int4"))
    assert set(forms(model).values()) == {"int4:64"}
    (said,) = re.findall(
        r"of 21 quantized weights 21 were quantized again, to int4 in groups of 64 \((.*)", caplog.text
    )
    weights, mine = theirs.state_dict(), model.dequantized_state_dict()
    errors = [off(mine[name], weights[name]) for name in mine if ".layers." in name and mine[name].dim() == 2]
    assert said.startswith(f"relative RMS error {sum(errors) / len(errors):.2%} on average, {max(errors):.2%} at worst")


def test_what_was_left_in_16_bits_gets_8(tmp_path: Path) -> None:
    saved_by_bitsandbytes(tmp_path, **BNB["nf4"], llm_int8_skip_modules=["model.layers.1.mlp.up_proj", "lm_head"])
    model = load(tmp_path / "quantized")
    assert model.config.quantization_config.formats["1.mlp.up_proj"] == AGAIN
    assert forms(model)["1.mlp.up_proj"] == AGAIN and forms(model)["2.mlp.up_proj"] == "nf4:64"
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(model))


def test_8_bits_are_quantized_again_for_load_in_4bit(tmp_path: Path) -> None:
    saved_by_bitsandbytes(tmp_path, load_in_8bit=True)
    assert set(forms(load(tmp_path / "quantized")).values()) == {"int8:128", AGAIN}
    assert set(forms(load(tmp_path / "quantized", load_in_4bit=True)).values()) == {"nf4:64"}


def test_an_adapter_of_a_quantized_model(tmp_path: Path) -> None:
    """QLoRA (Dettmers et al. 2023): what the adapter changes cannot keep its codes, the rest does."""
    theirs = saved_by_bitsandbytes(tmp_path, **BNB["nf4"])
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    tuned = get_peft_model(theirs, lora)
    tuned.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    base = {"base_model_name_or_path": str(tmp_path / "quantized")}
    path.write_text(json.dumps(json.loads(path.read_text()) | base))
    model = load(tmp_path / "adapter", quantization_config=STORED)
    found = forms(model)
    assert found["1.self_attn.q_proj"] == found["1.mlp.down_proj"] == AGAIN and found["1.mlp.up_proj"] == "nf4:64"
    weights = tuned.merge_and_unload().state_dict()
    for name, weight in model.dequantized_state_dict().items():
        assert off(weight, weights[name]) < 0.012, name


@pytest.mark.parametrize("resized", [False, True])
def test_a_vocabulary_larger_than_the_tokenizers(resized: bool, tmp_path: Path) -> None:
    if resized:
        plain = save_checkpoint("llama", tmp_path / "plain", **SIZES)
        plain.resize_token_embeddings(VOCABULARY + 7, pad_to_multiple_of=64)
        plain.save_pretrained(tmp_path / "plain")
    else:
        save_checkpoint("llama", tmp_path / "plain", **SIZES, vocab_size=384)
    theirs = saved_by_bitsandbytes(tmp_path, **BNB["nf4"])
    model = load(tmp_path / "quantized", quantization_config=STORED)
    assert model.config.vocab_size == 384 > VOCABULARY
    assert off(logits(model), logits(theirs)) < 0.02
    assert load(tmp_path / "quantized").generate(prompt_ids(1, 4), max_new_tokens=5).shape == (1, 9)


# GGUF


@pytest.mark.parametrize("kind", HALVES)
def test_gguf_blocks(kind: str) -> None:
    rows, cols = 37, 512
    raw = random_rows(GGMLQuantizationType[kind], rows, cols)
    expected = torch.from_numpy(gguf_dequantize(raw, GGMLQuantizationType[kind]))
    order = np.random.default_rng(3).permutation(rows)
    stored = GgufMatrix(GGMLQuantizationType[kind], (rows, cols), lambda: raw, order)
    assert torch.equal(stored.dequantize(), expected[order])
    if stored.form is not None:
        assert stored.form == (KINDS[kind][1], 32)
        assert_kept(stored, expected[order])
    else:
        matrix, error = repacked(stored, ("int8", 32), transposed=True)
        assert error == pytest.approx(off(matrix.dequantize(), expected[order].T), rel=1e-3)
        assert error < 0.01


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by gguf
def test_gguf_scales_that_are_not_finite(kind: str, number: float) -> None:
    raw = random_rows(GGMLQuantizationType[kind], 9, 256)
    raw[4, HALVES[kind][-1] :][:2] = np.array([number], np.float16).view(np.uint8)
    stored = GgufMatrix(GGMLQuantizationType[kind], (9, 256), lambda: raw, np.arange(9))
    with pytest.raises(ValueError, match="NaN, infinite or beyond"):
        repacked(stored, stored.form or ("int8", 32), transposed=False)


@pytest.fixture(scope="module")
def llama_weights() -> dict[str, Tensor]:
    torch.manual_seed(12)
    return LlamaForCausalLM(LLAMA).state_dict()


@pytest.mark.parametrize(
    ("kinds", "formats"),
    [
        (("Q4_0", None), {"": "int4:32"}),
        (("Q4_1", None), {"": "int4_asym:32"}),
        (("Q4_1", "Q5_0"), {"": "int4_asym:32", "self_attn.k_proj": AGAIN, "self_attn.v_proj": AGAIN}),
        (("Q8_0", None), {"": "nf4:64", "mlp.down_proj": "nf4:64", "self_attn.o_proj": "nf4:64"}),
    ],
)
def test_a_gguf_in_4_bits(
    kinds: tuple[str, str | None],
    formats: dict[str, str],
    llama_weights: dict[str, Tensor],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = (None if kind is None else GGMLQuantizationType[kind] for kind in kinds)
    assert first is not None
    write_gguf(tmp_path / "tiny.gguf", llama_weights, first, second)
    with caplog.at_level(logging.WARNING, logger="hf_sparse"):
        model = load(tmp_path, gguf_file="tiny.gguf", load_in_4bit=True)
    assert caplog.text.count("quantized weights") == 1
    formats = {"mlp.down_proj": AGAIN, "self_attn.o_proj": AGAIN} | formats
    for name, form in forms(model).items():
        assert form == formats.get(name.partition(".")[2], formats[""]), name
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32).state_dict()
    for name, weight in model.dequantized_state_dict().items():
        if ".layers." in name and weight.dim() == 2:
            assert off(weight, theirs[name]) < (0.12 if formats[""] == "nf4:64" else 0.01), name
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(model))


def test_a_gguf_without_arguments_is_dequantized(llama_weights: dict[str, Tensor], tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama_weights, GGMLQuantizationType.Q4_1)
    assert not hasattr(load(tmp_path, gguf_file="tiny.gguf").config, "quantization_config")
    model = load(tmp_path, gguf_file="tiny.gguf", quantization_config=STORED)
    assert forms(model)["0.mlp.up_proj"] == "int4_asym:32"


def test_codes_to_keep_where_there_are_none(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    with pytest.raises(ValueError, match=r"weight_dtype: got 'stored', but the weights of .* are not quantized"):
        load(tmp_path, quantization_config=STORED)


# GPTQ and AWQ


def in_words(values: Tensor, order: list[int]) -> Tensor:
    """int [..., n * len(order)] -> int32 [..., n]: code order[i] of each word is its i-th from the lowest bit on."""
    bits = 32 // len(order)
    words = (values.long().unflatten(-1, (-1, len(order)))[..., order] << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def gptq_parts(
    rows: int,
    cols: int,
    generator: torch.Generator,
    *,
    bits: int = 4,
    span: int = 32,
    sym: bool = True,
    less_one: bool = True,
    by_activation: bool = False,
) -> tuple[dict[str, Tensor], Tensor]:
    """Random codes, and the weights that GPTQ's formula gives: (code - zero[group]) * scale[group]."""
    group_of = torch.arange(cols) // span
    if by_activation:
        group_of = group_of[torch.randperm(cols, generator=generator)]
    groups = int(group_of.max()) + 1
    codes = torch.randint(0, 2**bits, (cols, rows), generator=generator)
    zeros = torch.randint(1, 2**bits, (groups, rows), generator=generator)
    if sym:
        zeros.fill_(2 ** (bits - 1))
    scales = (torch.rand(groups, rows, generator=generator) * 0.02 + 0.01).half()
    order = list(range(32 // bits))
    padded = torch.nn.functional.pad(zeros - int(less_one), (0, -rows % len(order)))
    parts = {
        "qweight": in_words(codes.T, order).T.contiguous(),
        "qzeros": in_words(padded, order),
        "scales": scales,
        "g_idx": group_of.int(),
    }
    return parts, ((codes - zeros[group_of]) * scales[group_of].float()).T


def gptq_fields(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True} | fields


def awq_parts(rows: int, cols: int, generator: torch.Generator, span: int = 32) -> tuple[dict[str, Tensor], Tensor]:
    group_of = torch.arange(cols) // span
    codes = torch.randint(0, 16, (cols, rows), generator=generator)
    zeros = torch.randint(0, 16, (int(group_of.max()) + 1, rows), generator=generator)
    scales = (torch.rand(zeros.shape, generator=generator) * 0.02 + 0.01).half()
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    parts = {"qweight": in_words(codes, order), "qzeros": in_words(zeros, order), "scales": scales}
    return parts, ((codes - zeros[group_of]) * scales[group_of].float()).T


@pytest.mark.parametrize(
    ("options", "fields", "kept"),
    [
        ({}, {}, ("int4", 32)),
        ({"span": 128}, {"group_size": 128}, ("int4", 128)),
        ({"span": 256}, {"group_size": -1}, ("int4", 128)),
        ({"span": 48}, {"group_size": 48}, None),
        ({"sym": False}, {"sym": False}, ("int4_asym", 32)),
        ({"less_one": False}, {"checkpoint_format": "gptq_v2"}, ("int4", 32)),
        ({"bits": 8, "span": 64}, {"bits": 8, "group_size": 64}, ("int8", 64)),
        ({"bits": 8, "sym": False}, {"bits": 8, "sym": False}, None),
        ({"by_activation": True}, {"desc_act": True}, None),
    ],
)
def test_gptq_matrices(
    options: dict[str, Any],
    fields: dict[str, Any],
    kept: tuple[str, int] | None,
    generator: torch.Generator,
    tmp_path: Path,
) -> None:
    parts, expected = gptq_parts(76, 256, generator, **options)
    inner = save_parts(tmp_path, {f"up.{name}": part for name, part in parts.items()})
    checkpoint = PrequantizedCheckpoint(inner, method_of(gptq_fields(**fields)))
    assert checkpoint.names() == ["up.weight"] and checkpoint.shape("up.weight") == (76, 256)
    torch.testing.assert_close(checkpoint.tensor("up.weight"), expected)
    stored = checkpoint.stored("up.weight")
    assert stored is not None and stored.form == kept
    if kept is not None:
        assert_kept(stored, expected)


@pytest.mark.parametrize(("span", "kept"), [(32, 32), (128, 128), (-1, 128)])
def test_awq_matrices(span: int, kept: int, generator: torch.Generator, tmp_path: Path) -> None:
    parts, expected = awq_parts(72, 256, generator, 256 if span == -1 else span)
    inner = save_parts(tmp_path, {f"up.{name}": part for name, part in parts.items()})
    method = method_of({"quant_method": "awq", "bits": 4, "group_size": span, "version": "gemm", "zero_point": True})
    checkpoint = PrequantizedCheckpoint(inner, method)
    torch.testing.assert_close(checkpoint.tensor("up.weight"), expected)
    stored = checkpoint.stored("up.weight")
    assert stored is not None and stored.form == ("int4_asym", kept)
    assert_kept(stored, expected)


Parts = Callable[[int, int, torch.Generator], tuple[dict[str, Tensor], Tensor]]
METHODS: dict[str, tuple[dict[str, Any], Parts, str]] = {
    "gptq": (gptq_fields(), gptq_parts, "int4:32"),
    "gptq, sorted": (
        gptq_fields(desc_act=True),
        lambda *sizes: gptq_parts(*sizes, by_activation=True),
        AGAIN,
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        awq_parts,
        "int4_asym:32",
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_gptq_and_awq_repositories(method: str, generator: torch.Generator, tmp_path: Path) -> None:
    fields, parts_of, kept = METHODS[method]
    theirs = save_checkpoint("llama", tmp_path, **SIZES)
    save_tokenizer(tmp_path)
    tensors, weights = {}, theirs.state_dict()
    for name, weight in list(weights.items()):
        if ".layers." in name and weight.dim() == 2:
            parts, weights[name] = parts_of(*weight.shape, generator)
            tensors |= {f"{name.removesuffix('weight')}{leaf}": part for leaf, part in parts.items()}
        else:
            tensors[name] = weight
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs.load_state_dict(weights)
    model = load(tmp_path, quantization_config=STORED)
    assert set(forms(model).values()) == {kept, AGAIN}
    assert off(logits(model), logits(theirs)) < 0.05
    for name, weight in model.dequantized_state_dict().items():
        assert off(weight, weights[name]) < 0.01, name
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(model))


# What is refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "fp8"}, "quant_method: got 'fp8', allowed are 'hf_sparse', 'bitsandbytes', 'gptq', 'awq'"),
        ({"quant_method": "compressed-tensors"}, "quant_method: got 'compressed-tensors'"),
        ({}, "quant_method: got 'None'"),
        (gptq_fields(bits=3), r"bits: got 3, allowed are 4, 8"),
        (gptq_fields(bits=True), r"bits: got True"),
        (gptq_fields(checkpoint_format="marlin"), "checkpoint_format: got 'marlin', allowed are 'gptq', 'gptq_v2'"),
        (gptq_fields(is_marlin_format=True), "is_marlin_format: got True"),
        (gptq_fields(group_size=0), "group_size: got 0, allowed are -1 and integers above 0"),
        (gptq_fields(group_size="32"), "group_size: got '32'"),
        (gptq_fields(pack_dtype="int64"), "pack_dtype: got 'int64', allowed are 'int32'"),
        (gptq_fields(dynamic={"+:lm": {"bits": 8}}), "dynamic: got"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version: got 'gemv', allowed are 'gemm'"),
        ({"quant_method": "awq", "bits": 8}, "bits: got 8, allowed are 4"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point: got False, allowed are True"),
        (bnb_fields(load_in_4bit=False), "load_in_4bit: got False"),
        (bnb_fields("int3"), "bnb_4bit_quant_type: got 'int3'"),
        (bnb_fields(bnb_4bit_quant_storage="bfloat16"), "bnb_4bit_quant_storage: got 'bfloat16', allowed are 'uint8'"),
    ],
)
def test_unsupported_variants(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^quantization_config\.{message}"):
        method_of(fields)


def read_all(checkpoint: Checkpoint) -> Iterator[Tensor]:
    for name in checkpoint.names():
        yield checkpoint.tensor(name)


def state_of(parts: dict[str, Tensor], **changes: Any) -> Tensor:
    name = "up.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(parts[name].tolist())) | changes
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


STATE = "up.weight.quant_state.bitsandbytes__nf4"
ABSMAX, NESTED = "up.weight.absmax", "up.weight.nested_absmax"
BNB_DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "fewer codes": (lambda p: p.update({"up.weight": p["up.weight"][:-1]}), "are not the 2368 4-bit codes"),
    "fewer scales": (
        lambda p: p.update({ABSMAX: p[ABSMAX][1:]}),
        r"absmax: expected shape \[37\]",
    ),
    "scales of another dtype": (
        lambda p: p.update({ABSMAX: p[ABSMAX].float()}),
        "absmax: expected",
    ),
    "no scales": (lambda p: p.pop(ABSMAX), "absmax: it is missing"),
    "nested": (lambda p: p.update({NESTED: torch.cat([p[NESTED]] * 2)}), "nested_absmax: expected shape"),
    "NaN": (lambda p: p[NESTED].fill_(float("nan")), "nested_absmax.* holds NaN"),
    "another table": (lambda p: p["up.weight.quant_map"].mul_(1.02), "quant_map: expected the values of nf4"),
    "a huge shape": (lambda p: p.update({STATE: state_of(p, shape=[2**40, 64])}), "shape: got 1099511627776"),
    "a negative shape": (lambda p: p.update({STATE: state_of(p, shape=[-37, -64])}), "shape: got -37"),
    "three dimensions": (lambda p: p.update({STATE: state_of(p, shape=[37, 8, 8])}), "expected a shape of"),
    "no block size": (lambda p: p.update({STATE: state_of(p, blocksize=0)}), "blocksize: got 0"),
    "a text": (lambda p: p.update({STATE: state_of(p, blocksize="64")}), "blocksize: got '64'"),
    "another kind": (
        lambda p: p.update({STATE: state_of(p, quant_type="fp4")}),
        "expected .* quant_type 'nf4'",
    ),
    "an offset of infinity": (
        lambda p: p.update({STATE: state_of(p, nested_offset=1e999)}),
        "nested_offset: got inf",
    ),
    "no JSON": (lambda p: p.update({STATE: p[STATE][:-1]}), "not a JSON text"),
    "a large JSON": (lambda p: p.update({STATE: torch.zeros(1 << 17, dtype=torch.uint8)}), "size: got 131072"),
}


@pytest.mark.parametrize("damage", BNB_DAMAGE)
def test_damaged_bitsandbytes_files(damage: str, generator: torch.Generator, tmp_path: Path) -> None:
    parts, _ = bnb_parts(torch.randn(37, 64, generator=generator), "nf4", 64, True)
    change, message = BNB_DAMAGE[damage]
    change(parts)
    with pytest.raises(ValueError, match=message):
        list(read_all(PrequantizedCheckpoint(save_parts(tmp_path, parts), method_of(bnb_fields()))))


GPTQ_DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "a group that there is not": (lambda p: p["g_idx"][5:6].fill_(8), r"g_idx: expected groups of 0\.\.7, got 0\.\.8"),
    "a negative group": (lambda p: p["g_idx"][5:6].fill_(-1), r"g_idx: expected groups of 0\.\.7, got -1\.\.7"),
    "fewer groups": (lambda p: p.update(scales=p["scales"][1:]), r"scales: expected shape \[8, 76\], got \[7, 76\]"),
    "fewer zeros": (lambda p: p.update(qzeros=p["qzeros"][:, 1:]), r"qzeros: expected shape \[8, 10\], got \[8, 9\]"),
    "no zeros": (lambda p: p.pop("qzeros"), "qzeros: it is missing"),
    "codes of another dtype": (lambda p: p.update(qweight=p["qweight"].long()), "qweight: expected torch.int32"),
    "flat codes": (lambda p: p.update(qweight=p["qweight"].flatten()), r"qweight: expected \[columns / 8, rows\]"),
    "fewer columns": (lambda p: p.update(qweight=p["qweight"][1:]), r"g_idx: expected shape \[248\]"),
    "infinity": (lambda p: p["scales"].fill_(float("inf")), "scales.* holds NaN or infinite"),
}


@pytest.mark.parametrize("damage", GPTQ_DAMAGE)
def test_damaged_gptq_files(damage: str, generator: torch.Generator, tmp_path: Path) -> None:
    parts, _ = gptq_parts(76, 256, generator)
    change, message = GPTQ_DAMAGE[damage]
    change(parts)
    inner = save_parts(tmp_path, {f"up.{name}": part for name, part in parts.items()})
    with pytest.raises(ValueError, match=message):
        list(read_all(PrequantizedCheckpoint(inner, method_of(gptq_fields()))))


# What the kernels meet with codes from elsewhere


@pytest.mark.parametrize("isa", instruction_sets(), indirect=True)
@pytest.mark.parametrize("weight_dtype", ["iq4_nl", "int8"])
@pytest.mark.parametrize("group_size", [32, 128])
def test_any_codes(isa: str, weight_dtype: str, group_size: int, generator: torch.Generator) -> None:
    """int8 codes of -128, which are never written here, and the table without a zero; the largest of activations."""
    rows, cols = 70, 300  # the last group is padded
    book, groups = codebook(weight_dtype), -(-cols // group_size)
    shape = (rows, groups * group_size)
    if book.table is None:
        codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
        codes[:3] = -128
    else:
        codes = reference.pack(torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8))
    scales = torch.randn(rows, groups, generator=generator).bfloat16()
    matrix = NeuronMatrix.from_tensors({"codes": codes, "scales": scales}, weight_dtype, group_size, rows, cols)
    weight = reference.dequantize(codes, scales, None, cols, book, group_size)
    assert torch.equal(matrix.dequantize(), weight)
    for count in (1, 3):
        x, a = torch.randn(count, cols, generator=generator), torch.randn(count, rows, generator=generator)
        x[0], a[0] = 1.0, -1.0
        for compute_dtype in ("fp32", "int8"):
            seen = reference.round_activations(x, compute_dtype, group_size)
            got = gathered_row_product(matrix, x, compute_dtype=compute_dtype)
            torch.testing.assert_close(got.double(), seen.double() @ weight.T.double(), rtol=0, atol=0.05)
            got = gathered_accumulate(matrix, a, compute_dtype=compute_dtype)
            torch.testing.assert_close(got.double(), a.double() @ weight.double(), rtol=0, atol=0.5)
