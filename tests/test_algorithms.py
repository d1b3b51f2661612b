"""Better ways to quantize than rounding: what they gain, that it survives saving, and how they are refused."""

from __future__ import annotations

import json
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig, algorithms, log, tuning
from hf_sparse.algorithms import quantize_hqq
from hf_sparse.config import ALGORITHMS
from hf_sparse.modeling import hybrid_blocks
from hf_sparse.quantization import NeuronMatrix
from tiny_models import prompt_ids, save_checkpoint, save_tokenizer

QUICK: dict[str, Any] = {"calibration_tokens": 64, "max_perplexity_increase": 0}
TEXTS = ["for a in range(9): yield a\n" * 30, "import this, and that; if not: return None\n" * 30]
# Groups of 32 fit 64 columns; k and v have 32 rows.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"num_hidden_layers": 1}  # the tuners take seconds for each

missing = {name: find_spec(module) is None for name, module in (("AutoRound", "auto_round"), ("GPTQ", "gptqmodel"))}
both = [
    pytest.param(name, marks=pytest.mark.skipif(missing[name], reason=f"the package of {name} is not installed"))
    for name in missing
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An assets cache of the test's own."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    return tmp_path / "assets" / "hf_sparse" / "tuned"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    save_checkpoint("llama", directory, **SIZES)
    save_tokenizer(directory)
    return directory


def load(directory: Path, *args: Any, **kwargs: Any) -> Any:
    texts = {"calibration_texts": TEXTS} | QUICK
    return SparseAutoModelForCausalLM.from_pretrained(directory, *args, **(texts | kwargs))


def matrices(model: Any) -> dict[str, NeuronMatrix]:
    return {
        f"{block.id.layer}.{name}": block.shards[0].by_neuron(name)
        for block in hybrid_blocks(model)
        for name in block.projections
    }


def error(matrix: NeuronMatrix, weight: Tensor) -> float:
    return float((matrix.dequantize() - weight).norm() / weight.norm())


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(prompt_ids(2, 9)).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_hqq_comes_closer_than_rounding(group_size: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    weight = torch.randn(70, 300, generator=generator).to(dtype)  # 300: no multiple of a group
    matrix, rounded = quantize_hqq(weight, group_size), NeuronMatrix.quantize(weight, "int4_asym", group_size)
    NeuronMatrix.from_tensors(matrix.tensors(), "int4_asym", group_size, 70, 300)
    assert error(matrix, weight.float()) < 0.99 * error(rounded, weight.float())
    transposed = quantize_hqq(weight.T, group_size)
    assert (transposed.rows, transposed.cols) == (300, 70)
    assert error(transposed, weight.T.float()) < error(
        NeuronMatrix.quantize(weight.T, "int4_asym", group_size), weight.T.float()
    )


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-5, 1e-3, 1e4, 1e37])
def test_hqq_takes_weights_of_any_size(scale: float, generator: torch.Generator) -> None:
    weight = torch.randn(5, 96, generator=generator) * scale
    weight[2] = 0.25 * scale  # a group of one value
    weight[3, :32] = 0
    matrix, rounded = quantize_hqq(weight, 32), NeuronMatrix.quantize(weight, "int4_asym", 32)
    assert float((matrix.dequantize() - weight).norm()) <= 1.01 * float((rounded.dequantize() - weight).norm())


@pytest.mark.parametrize("bad", [torch.full((3, 32), torch.nan), torch.full((3, 32), 2.0**127), torch.ones(3)])
def test_hqq_refuses_what_rounding_refuses(bad: Tensor) -> None:
    with pytest.raises(ValueError, match=r"^weight: "):
        quantize_hqq(bad, 32)


def test_a_model_by_hqq(folder: Path, tmp_path: Path) -> None:
    plain = matrices(load(folder))
    config = WeightOnlyQuantConfig(algorithm="HQQ", group_size=32, formats={"mlp.up_proj": "int8:32"})
    model = load(folder, quantization_config=config)
    rounded = matrices(load(folder, quantization_config=WeightOnlyQuantConfig(weight_dtype="int4_asym", group_size=32)))
    for name, matrix in matrices(model).items():
        weight = plain[name].dequantize()
        if name.endswith("up_proj"):
            assert matrix.weight_dtype == "int8"
        else:  # down and o are stored transposed: that they are as close says that they were quantized so
            assert matrix.weight_dtype == "int4_asym" and error(matrix, weight) < error(rounded[name], weight)

    model.save_pretrained(tmp_path / "saved")
    stored = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert (stored["algorithm"], stored["format_version"]) == ("HQQ", 3)
    for again in (load(tmp_path / "saved"), AutoModelForCausalLM.from_pretrained(tmp_path / "saved")):
        assert torch.equal(logits(again), logits(model))
        assert again.config.quantization_config == config
    of_transformers = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    assert torch.equal(logits(of_transformers), logits(model))


def test_plans_of_two_algorithms_are_two(folder: Path) -> None:
    for algorithm in ("RTN", "HQQ"):
        load(folder, quantization_config=WeightOnlyQuantConfig(weight_dtype="int4_asym", algorithm=algorithm))
    plans = [json.loads(path.read_text()) for path in folder.glob("hf_sparse_plan/*/plan.json")]
    assert len(plans) == 2


@pytest.mark.parametrize("algorithm", both)
def test_a_model_tuned_on_text(
    algorithm: str,
    folder: Path,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tuning, "STEPS", 3)
    caplog.set_level(logging.INFO, logger="hf_sparse")
    plain = matrices(load(folder))
    config = WeightOnlyQuantConfig(algorithm=algorithm, group_size=32)
    model = load(folder, quantization_config=config)
    (file,) = cache.glob("*.safetensors")
    codes = load_file(file)
    layers = {name.rpartition(".")[0] for name in codes}
    reads = [f"mlp.{name}_proj" for name in ("gate", "up")] + [f"self_attn.{name}_proj" for name in "qkv"]
    assert layers == {f"model.layers.{layer}.{name}" for layer in range(1) for name in reads}
    for name, matrix in matrices(model).items():
        weight = plain[name].dequantize()
        assert matrix.weight_dtype == "int4_asym" and 0.01 < error(matrix, weight) < 0.15
        if name.endswith(("down_proj", "o_proj")):
            assert torch.equal(matrix.dequantize(), quantize_hqq(weight, 32).dequantize())
    # codes as the library chose them, their scales rounded to bfloat16
    assert "5 quantized weights 5 keep their codes" in caplog.text

    monkeypatch.setattr(tuning, "_run", None)  # what is kept is used
    assert torch.equal(logits(load(folder, quantization_config=config)), logits(model))
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model)) and again.config.quantization_config == config
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits(model))


def test_a_tuner_that_fails_is_quoted(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "_MODULES", {})
    monkeypatch.setattr(tuning, "OUT", "elsewhere")
    monkeypatch.setattr(tuning.Job, "save", lambda job, directory, rows: None)
    config = WeightOnlyQuantConfig(algorithm="AutoRound", group_size=32)
    with pytest.raises(RuntimeError, match=r"(?s)algorithm: AutoRound failed \(1\).*job\.json"):
        load(folder, quantization_config=config)
    assert not list(cache.glob("*.safetensors"))


def test_tuned_weights_that_cannot_be_kept(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Codes 0 with scale 1 and zero 8: weights of -8."""
    log.warn_once.cache_clear()
    names = [f"model.layers.{layer}.self_attn.q_proj." for layer in range(1)]
    leaves = {
        "qweight": torch.zeros(8, 64, dtype=torch.int32),
        "qzeros": torch.full((2, 8), 0x77777777, dtype=torch.int32),
        "scales": torch.ones(2, 64, dtype=torch.float16),
    }
    monkeypatch.setattr(tuning, "_run", lambda *_: {n + leaf: t.clone() for n in names for leaf, t in leaves.items()})
    monkeypatch.setattr(algorithms, "_MODULES", {})
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    config = WeightOnlyQuantConfig(algorithm="GPTQ", weight_dtype="int4", group_size=32)
    found = matrices(load(folder, quantization_config=config))
    assert all(bool((found[f"{layer}.q_proj"].dequantize() == -8).all()) for layer in range(1))
    assert "the next load tunes them again" in caplog.text


def test_what_cannot_be_tuned_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "_MODULES", {})
    config = WeightOnlyQuantConfig(algorithm="AutoRound", group_size=128)
    with pytest.raises(ValueError, match=r"algorithm: got 'AutoRound', but no layer .* groups of 128"):
        load(folder, quantization_config=config)
    save_checkpoint("llama", tmp_path / "bare", **SIZES)
    config = WeightOnlyQuantConfig(algorithm="GPTQ", group_size=32)
    with pytest.raises(ValueError, match="algorithm: 'GPTQ' needs a tokenizer"):
        load(tmp_path / "bare", quantization_config=config)
    with pytest.raises(ValueError, match=r"algorithm: got 'GPTQ', .*SparseAutoModelForCausalLM"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


@pytest.mark.parametrize("algorithm", ["HQQ", "AutoRound", "GPTQ"])
def test_a_missing_package_is_named(algorithm: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms.importlib.util, "find_spec", lambda name: None)
    config = WeightOnlyQuantConfig(algorithm=algorithm, group_size=32)
    with pytest.raises(ImportError, match=rf'^algorithm: {algorithm!r} needs .*pip install "hf_sparse\[\w+\]"$'):
        load(folder, quantization_config=config)


def test_which_formats_an_algorithm_makes() -> None:
    assert WeightOnlyQuantConfig().weight_dtype == "nf4"
    assert WeightOnlyQuantConfig(algorithm="HQQ") == WeightOnlyQuantConfig(algorithm="HQQ", weight_dtype="int4_asym")
    for algorithm in ALGORITHMS.keys() - {"RTN"}:
        with pytest.raises(ValueError, match=f"weight_dtype: got 'nf4', allowed with algorithm '{algorithm}' are 'int"):
            WeightOnlyQuantConfig(algorithm=algorithm, weight_dtype="nf4")
    with pytest.raises(ValueError, match="algorithm: got 'AWQ', allowed are 'RTN', 'HQQ', 'AutoRound', 'GPTQ'"):
        WeightOnlyQuantConfig(algorithm="AWQ")


@pytest.mark.parametrize(
    ("options", "keys", "version"),
    [
        ({}, set(), 1),
        ({"formats": {"mlp.up_proj": "int8:64"}}, {"formats"}, 2),
        ({"algorithm": "AutoRound"}, {"algorithm"}, 3),
        ({"algorithm": "HQQ", "formats": {"mlp.up_proj": "int8:64"}}, {"algorithm", "formats"}, 3),
    ],
)
def test_a_config_says_no_more_than_it_must(options: dict[str, Any], keys: set[str], version: int) -> None:
    config = WeightOnlyQuantConfig(**options)
    fields = config.to_dict()
    always = {"quant_method", "format_version", "weight_dtype", "compute_dtype", "group_size", "head_dtype"}
    assert fields.keys() == always | keys and fields["format_version"] == version
    assert WeightOnlyQuantConfig.from_dict(fields) == config
