"""The scripts run, and what the README, .ci/run and the scripts say agrees."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

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


def test_quickstart_and_bench_generate(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    save_tokenizer(tmp_path)
    quickstart = run_script("quickstart.py", tmp_path, "--prompt", "for a in")
    assert quickstart.returncode == 0, quickstart.stderr
    assert quickstart.stdout.startswith("for a in")

    report = tmp_path / "report.json"
    bench = run_script("bench_generate.py", tmp_path, "--rounds", 2, "--tokens", 5, "--json", report)
    assert bench.returncode == 0, bench.stderr
    assert "ratio" in bench.stdout
    rows = json.loads(report.read_text())
    assert [row["system"] for row in rows] == ["hf_sparse nf4", "transformers bf16"]
    assert all(len(row["tokens_per_second"]) == 2 and min(row["tokens_per_second"]) > 0 for row in rows)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    commands = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci" / "run").read_text()


def test_quickstart_is_the_code_of_the_readme() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = (ROOT / "scripts" / "quickstart.py").read_text()
    assert [line for line in code.splitlines() if "import" in line and line not in script] == []
    assert all(call in script for call in re.findall(r"\w+\.\w+\(", code))
