"""scripts/relufy.py makes a ReLU checkpoint that both libraries load, goes on after a kill as if nothing had happened,
and says what is wrong with what it is given.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sparse import SparseAutoModelForCausalLM
from hf_sparse.modeling import HybridMLP, hybrid_blocks
from tiny_models import prompt_ids, save_checkpoint, save_tokenizer

SCRIPTS = Path(__file__).parents[1] / "scripts"
STEPS = 14
SMALL = ("--row-tokens", 24, "--batch-rows", 5, "--steps", STEPS, "--generated-tokens", 400)


@pytest.fixture(scope="module")
def parts(script_module: Callable[[str], Any]) -> Any:
    return script_module("_relufy")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    save_checkpoint("llama", directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(topics["for"] + topics["while"] + topics["with"], encoding="utf-8")
    return file


def command(source: Path, output: Path, text: Path, *more: object) -> list[str]:
    options = (source, output, "--texts", text, *SMALL, *more)
    return [sys.executable, str(SCRIPTS / "relufy.py"), *map(str, options)]


def relufy(source: Path, output: Path, text: Path, *more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(source, output, text, *more), capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def whole(source: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed; its report lies beside."""
    output = tmp_path_factory.mktemp("whole") / "relu"
    report = output.with_name("report.json")
    run = relufy(source, output, text, "--evaluate-minutes", 0, "--target-zeros", 0.9, "--json", report)
    assert run.returncode == 0, run.stderr
    return output


def test_makes_an_ordinary_checkpoint_with_many_zeros(whole: Path, source: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(whole)
    assert model.config.hidden_act == "relu" and model.config.mlp_bias
    assert AutoTokenizer.from_pretrained(whole)("for a in").input_ids
    before = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    embeddings = model.get_input_embeddings().weight
    assert torch.equal(embeddings.float(), before.get_input_embeddings().weight.float())
    assert not torch.equal(
        model.model.layers[1].self_attn.q_proj.weight, before.model.layers[1].self_attn.q_proj.weight
    )

    rows = json.loads(whole.with_name("report.json").read_text())
    kinds = {(row["case"], row["system"]): row for row in rows}
    for case in ("texts, held out", "generated, held out"):
        original, relu = kinds[case, "original"], kinds[case, "relu"]
        assert original["zeros"] == 0 and len(relu["zeros_by_layer"]) == 3
        assert 0.6 < relu["zeros"] < 1  # ReLU alone: half
        assert relu["change"] == pytest.approx(relu["median"] / original["median"] - 1)
    log = [json.loads(line) for line in (whole.with_name("relu.work") / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(STEPS + 1))
    assert log[-1]["tokens"] == rows[-1]["tokens_trained"] == STEPS * 5 * 24


def test_hf_sparse_runs_it_by_the_exact_rule(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path))
    model = SparseAutoModelForCausalLM.from_pretrained(
        whole, load_in_4bit=True, max_perplexity_increase=0, calibration_tokens=128
    )
    blocks = [block for block in hybrid_blocks(model) if isinstance(block, HybridMLP)]
    assert [block.rule.kind for block in blocks] == ["exact"] * 3
    out = model.generate(prompt_ids(1, 5), max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 11)


def test_goes_on_after_a_kill_as_if_there_had_been_none(whole: Path, source: Path, text: Path, tmp_path: Path) -> None:
    output, log = tmp_path / "relu", tmp_path / "relu.work" / "log.jsonl"
    often = ("--evaluate-minutes", 0, "--save-minutes", 0, "--target-zeros", 0.9)
    first = subprocess.Popen(command(source, output, text, *often), stderr=subprocess.PIPE)
    while first.poll() is None and not (log.exists() and len(log.read_bytes().splitlines()) > 4):
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    _, errors = first.communicate()
    assert first.returncode == -signal.SIGKILL, errors
    assert not output.exists()

    second = relufy(source, output, text, *often)
    assert second.returncode == 0, second.stderr
    assert "goes on from step" in second.stdout
    for name, tensor in load_file(whole / "model.safetensors").items():
        assert torch.equal(load_file(output / "model.safetensors")[name], tensor), name
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == list(range(STEPS + 1))

    other = relufy(source, tmp_path / "other", text, *often, "--work", tmp_path / "relu.work", "--seed", 5)
    assert other.returncode == 1 and "seed: the run in" in other.stderr and "--restart" in other.stderr


def test_refuses_what_it_cannot_convert(source: Path, text: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("for a in b", encoding="utf-8")
    run = relufy(source, tmp_path / "out", short)
    assert run.returncode == 1 and "--texts: expected at least 192 tokens" in run.stderr
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    run = relufy(source, full, text)
    assert run.returncode == 2 and "OUTPUT: expected a new or empty directory" in run.stderr


def test_names_what_a_model_lacks(parts: Any, tmp_path: Path) -> None:
    model = save_checkpoint("opt", tmp_path / "opt")
    with pytest.raises(ValueError, match="got 'opt'"):
        parts.convert(model, "relu")
    model = save_checkpoint("llama", tmp_path / "relu", hidden_act="relu")
    with pytest.raises(ValueError, match="got 'relu'"):
        parts.convert(model, "relu")


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_start_has_the_zeros_asked_for_and_fitted_outputs(parts: Any, source: Path, activation: str) -> None:
    teacher, _ = parts.load(str(source), None)
    student = parts.convert(teacher, activation)
    rows = prompt_ids(7, 32)
    inputs: list[Any] = []
    with torch.no_grad(), parts.watching(teacher, lambda layer, x, output: inputs.append((layer, x))):
        wanted = teacher.base_model(rows, use_cache=False).last_hidden_state.float()

    def error() -> float:
        with torch.no_grad():
            return float((student.base_model(rows, use_cache=False).last_hidden_state.float() - wanted).square().mean())

    parts.set_thresholds(student, teacher, rows, 0.8)
    gates = [parts.mlps(student)[layer].gate_proj(x) for layer, x in inputs]
    zeros = sum(float((gate <= 0).float().mean()) for gate in gates) / len(gates)
    assert zeros == pytest.approx(0.8, abs=0.02)
    before = error()
    parts.fit_outputs(student, teacher, rows)
    assert error() < 0.7 * before


def test_pressure_is_the_gradient_of_what_it_says(parts: Any, source: Path) -> None:
    teacher, _ = parts.load(str(source), None)
    student = parts.convert(teacher, "relu")
    pressure = parts.Pressure(student, target=0.9, strength=0.5, width=0.02)
    gate = parts.mlps(student)[1].gate_proj
    x = torch.randn(3, 7, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    (gate(x) * 0).sum().backward()
    pressed = gate.bias.grad.float()
    open_ = F.linear(x, gate.weight.detach())
    bias = torch.zeros(88, requires_grad=True)
    (0.5 * ((open_ + bias).relu() / 0.02).clamp_max(1).sum(dim=-1).mean()).backward()
    assert bias.grad is not None and bias.grad.abs().max() > 0
    torch.testing.assert_close(pressed, bias.grad, rtol=0.02, atol=0.02)
    share = float((open_[:, ::8] <= 0).float().mean())
    assert pressure.settle(gain=2.0) == pytest.approx(share) and pressure.strength > 0.5
