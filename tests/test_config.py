"""Options: what is accepted, what it becomes, and that each refusal names the argument and what came."""

import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import BitsAndBytesConfig, LlamaConfig

from hf_sparse import log
from hf_sparse.config import SparseConfig, WeightOnlyQuantConfig, parse_bytes
from hf_sparse.modeling.neurons import Tier


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    log.warn_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="hf_sparse")
    return caplog


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1234, 1234),
        (0, 0),
        ("1234", 1234),
        ("11GB", 11 * 10**9),
        ("11gb", 11 * 10**9),  # bytes, never bits
        ("10 GiB", 10 * 2**30),
        (" 512MB ", 512 * 10**6),
        ("3mib", 3 * 2**20),
        ("7KB", 7000),
        ("2TiB", 2 * 2**40),
        ("0.1GB", 10**8),  # exact, although 0.1 is no binary fraction
        ("1.5 kib", 1536),
        ("0", 0),
        ("9B", 9),
    ],
)
def test_budgets_are_bytes(value: int | str, expected: int) -> None:
    assert parse_bytes(value) == expected


def test_percentages_are_of_the_total() -> None:
    assert parse_bytes("80%", total=1234567) == 987653
    assert parse_bytes("12.5 %", total=800) == 100
    assert parse_bytes("100%", total=77) == 77
    with pytest.raises(ValueError, match=r"speed: got '80%', but a percentage needs"):
        parse_bytes("80%", name="speed")
    with pytest.raises(ValueError, match=r"gpu_budget: got '101%', allowed are percentages"):
        parse_bytes("101%", total=1000)


@pytest.mark.parametrize(
    "value",
    [
        -1,
        "-5GB",
        "nan",
        "inf",
        "11 potatoes",
        "11Gbit",
        "11G",
        "",
        "GB",
        True,
        1.5,
        float("nan"),
        None,
        "1e9",
        "٣GB",
        b"1",
    ],
)
def test_what_is_no_budget_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^memory: got ") as refusal:
        parse_bytes(value, name="memory")  # type: ignore[arg-type]
    assert repr(value) in str(refusal.value)
    assert "11GB" in str(refusal.value)


def test_quantization_config_survives_config_json(tmp_path: Path) -> None:
    config = WeightOnlyQuantConfig(weight_dtype="int4", compute_dtype="bf16", group_size=128)
    assert config.quant_method == "hf_sparse"
    stored = json.loads(json.dumps(config.to_dict()))
    assert stored == {
        "quant_method": "hf_sparse",
        "format_version": 1,
        "weight_dtype": "int4",
        "compute_dtype": "bf16",
        "group_size": 128,
        "head_dtype": "int8",
    }
    assert WeightOnlyQuantConfig.from_dict(stored) == config

    model_config = LlamaConfig(hidden_size=48, num_attention_heads=6, num_hidden_layers=3)
    model_config.quantization_config = config
    model_config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["quantization_config"] == stored


def test_quantization_configs_compare_and_print_by_value() -> None:
    assert WeightOnlyQuantConfig() == WeightOnlyQuantConfig(weight_dtype="nf4", compute_dtype="int8", group_size=64)
    for other in ({"weight_dtype": "fp4"}, {"compute_dtype": "bf16"}, {"group_size": 32}):
        assert WeightOnlyQuantConfig() != WeightOnlyQuantConfig(**other)
    text = repr(WeightOnlyQuantConfig(group_size=32))
    assert "weight_dtype='nf4'" in text
    assert "group_size=32" in text


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("weight_dtype", "nf5"),
        ("weight_dtype", None),
        ("compute_dtype", "fp16"),
        ("group_size", 48),
        ("group_size", 64.0),
        ("group_size", "64"),
    ],
)
def test_quantization_options_are_checked(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{option}: got {value!r}, allowed are "):
        WeightOnlyQuantConfig(**{option: value})  # type: ignore[arg-type]


def test_quantization_config_takes_no_unknown_argument() -> None:
    with pytest.raises(TypeError, match="bits"):
        WeightOnlyQuantConfig(bits=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 4}, r"unknown keys \['bits'\]"),
        ({"format_version": 4}, "format_version: got 4"),
        ({"format_version": "1"}, "format_version: got '1'"),
        ({"format_version": True}, "format_version: got True"),
        ({"quant_method": "gptq"}, "quant_method: got 'gptq'"),
        ({"group_size": 17}, "group_size: got 17"),
    ],
)
def test_stored_quantization_configs_are_checked(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightOnlyQuantConfig.from_dict(WeightOnlyQuantConfig().to_dict() | change)


def test_from_dict_keeps_the_contract_of_transformers() -> None:
    stored = WeightOnlyQuantConfig().to_dict()
    config, unused = WeightOnlyQuantConfig.from_dict(stored, return_unused_kwargs=True, group_size=32, color="red")
    assert config == WeightOnlyQuantConfig(group_size=32)
    assert unused == {"color": "red"}


def test_resolve_plain_arguments() -> None:
    assert WeightOnlyQuantConfig.resolve(None, False) is None
    assert WeightOnlyQuantConfig.resolve(None, True) == WeightOnlyQuantConfig(weight_dtype="nf4")
    config = WeightOnlyQuantConfig(weight_dtype="int4", group_size=32)
    for load_in_4bit in (False, True):
        assert WeightOnlyQuantConfig.resolve(config, load_in_4bit) is config
        assert WeightOnlyQuantConfig.resolve(config.to_dict(), load_in_4bit) == config


@pytest.mark.parametrize(
    ("dtype", "compute"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "bf16"), (None, "fp32")]
)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_resolve_bitsandbytes_4bit(
    kind: str, dtype: torch.dtype | None, compute: str, warnings: pytest.LogCaptureFixture
) -> None:
    bnb = BitsAndBytesConfig(bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype)
    bnb._load_in_4bit = True  # set afterwards: the constructor wants bitsandbytes installed
    expected = WeightOnlyQuantConfig(weight_dtype=kind, compute_dtype=compute, group_size=64)
    for load_in_4bit in (False, True):
        assert WeightOnlyQuantConfig.resolve(bnb, load_in_4bit) == expected
    said = [record.getMessage().split(":")[0] for record in warnings.records]
    assert said == ["bnb_4bit_compute_dtype float16"] * (dtype == torch.float16)


def test_resolve_bitsandbytes_8bit_and_ignored_options(warnings: pytest.LogCaptureFixture) -> None:
    bnb = BitsAndBytesConfig(load_in_8bit=True, bnb_4bit_use_double_quant=True, llm_int8_skip_modules=["lm_head"])
    for _ in range(2):
        assert WeightOnlyQuantConfig.resolve(bnb, False) == WeightOnlyQuantConfig(weight_dtype="int8")
    said = [record.getMessage() for record in warnings.records]
    assert len(said) == 2  # each once
    assert "bnb_4bit_use_double_quant" in said[0]
    assert "llm_int8_skip_modules" in said[1]


def test_resolve_refuses_contradictions_and_strangers() -> None:
    for eight in (WeightOnlyQuantConfig(weight_dtype="int8"), BitsAndBytesConfig(load_in_8bit=True)):
        with pytest.raises(ValueError, match="load_in_4bit: got True"):
            WeightOnlyQuantConfig.resolve(eight, True)
    with pytest.raises(ValueError, match="neither load_in_4bit nor load_in_8bit"):
        WeightOnlyQuantConfig.resolve(BitsAndBytesConfig(), False)
    with pytest.raises(ValueError, match=r"quantization_config: got a int, .*BitsAndBytesConfig"):
        WeightOnlyQuantConfig.resolve(4, False)
    with pytest.raises(ValueError, match="load_in_4bit: got 'yes'"):
        WeightOnlyQuantConfig.resolve(None, "yes")  # type: ignore[arg-type]
    bnb = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float64)
    bnb._load_in_4bit = True
    with pytest.raises(ValueError, match=r"bnb_4bit_compute_dtype: got torch.float64"):
        WeightOnlyQuantConfig.resolve(bnb, False)


def test_sparse_config_keeps_what_was_given() -> None:
    by_device: dict[str, int | str] = {"cuda:0": "11GB", "cuda:1": 5 * 10**9}
    for budget in (None, 0, "11GB", "80%", by_device):
        assert SparseConfig(gpu_budget=budget).gpu_budget == budget
    tiers = (Tier("fast", budget=900), Tier("cpu"))
    assert SparseConfig(tiers=tiers).tiers == tiers
    with pytest.raises(AttributeError):
        SparseConfig().gpu_budget = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_budget": "11 potatoes"}, "^gpu_budget: got '11 potatoes'"),
        ({"gpu_budget": -3}, "^gpu_budget: got -3"),
        ({"gpu_budget": "120%"}, "^gpu_budget: got '120%'"),
        ({"gpu_budget": {}}, "^gpu_budget: got an empty mapping"),
        ({"gpu_budget": {"cuda:0": "many"}}, r"^gpu_budget\['cuda:0'\]: got 'many'"),
        ({"gpu_budget": {"cuda:0": None}}, r"^gpu_budget\['cuda:0'\]: got None"),
        ({"gpu_budget": {"toaster:0": "1GB"}}, "^gpu_budget: got the key 'toaster:0'"),
        ({"max_perplexity_increase": -0.1}, "^max_perplexity_increase: got -0.1"),
        ({"max_perplexity_increase": float("nan")}, "^max_perplexity_increase: got nan"),
        ({"max_perplexity_increase": float("inf")}, "^max_perplexity_increase: got inf"),
        ({"max_perplexity_increase": True}, "^max_perplexity_increase: got True"),
        ({"max_perplexity_increase": "1%"}, "^max_perplexity_increase: got '1%'"),
        ({"target_sparsity": 0.0}, "^target_sparsity: got 0.0"),
        ({"target_sparsity": 1.0}, "^target_sparsity: got 1.0"),
        ({"target_sparsity": 1}, "^target_sparsity: got 1"),
        ({"target_sparsity": float("nan")}, "^target_sparsity: got nan"),
        ({"target_sparsity": "50%"}, "^target_sparsity: got '50%'"),
        ({"calibration_tokens": 0}, "^calibration_tokens: got 0"),
        ({"calibration_tokens": 10.0}, "^calibration_tokens: got 10.0"),
        ({"calibration_seed": -1}, "^calibration_seed: got -1"),
        ({"calibration_seed": False}, "^calibration_seed: got False"),
        ({"calibration_texts": []}, r"^calibration_texts: got \[\]"),
        ({"calibration_texts": ["fine", " \n"]}, r"^calibration_texts\[1\]: got ' \\n'"),
        ({"calibration_texts": ["fine", 7]}, r"^calibration_texts\[1\]: got 7"),
        ({"calibration_texts": 7}, "^calibration_texts: got 7"),
        ({"calibration_texts": ""}, "^calibration_texts: got ''"),
        ({"calibration_texts": "no/such/file.txt"}, "^calibration_texts: got 'no/such/file.txt'"),
        ({"calibration_texts": Path("wikitext")}, "^calibration_texts: got 'wikitext'"),
        ({"calibration_texts": "Once upon a time. " * 900}, "^calibration_texts: got 'Once"),
        ({"tiers": ()}, r"^tiers: got \(\)"),
        ({"tiers": (Tier("cpu"), "cpu")}, "^tiers: got "),
        ({"tiers": (Tier("cpu"), Tier("cpu"))}, r"^tiers: got the names \['cpu', 'cpu'\]"),
        ({"tiers": (Tier("cpu"),), "gpu_budget": "1GB"}, "^gpu_budget: got '1GB' together with tiers"),
    ],
)
def test_sparse_options_are_checked(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseConfig(**options)


def test_calibration_settings_follow_the_content(tmp_path: Path) -> None:
    settings = SparseConfig(
        calibration_tokens=333, calibration_seed=5, max_perplexity_increase=0
    ).calibration_settings()
    expected = {"texts": "default", "tokens": 333, "seed": 5, "max_perplexity_increase": 0.0, "target_sparsity": None}
    assert settings == expected
    assert SparseConfig(target_sparsity=0.4).calibration_settings()["target_sparsity"] == 0.4
    assert json.dumps(settings) == json.dumps(json.loads(json.dumps(settings)))

    (tmp_path / "a.txt").write_text("one text")
    (tmp_path / "b.txt").write_text("one text")
    (tmp_path / "c.txt").write_text("another text")
    (tmp_path / "a.jsonl").write_text("one text")

    def key(texts: object) -> str:
        return SparseConfig(calibration_texts=texts).calibration_settings()["texts"]  # type: ignore[arg-type]

    assert key(tmp_path / "a.txt") == key(str(tmp_path / "b.txt"))  # the content, not the name
    assert key(["ab", "c"]) == key(("ab", "c"))
    assert key("Salesforce/wikitext") == "dataset:Salesforce/wikitext"
    others = [tmp_path / "a.txt", tmp_path / "c.txt", tmp_path / "a.jsonl", ["abc"], ["ab", "c"], ["a", "bc"], None]
    assert len({key(texts) for texts in others}) == len(others)


def test_calibration_settings_leave_the_budget_out() -> None:
    assert (
        SparseConfig(gpu_budget="1GB").calibration_settings() == SparseConfig(gpu_budget="2GB").calibration_settings()
    )
