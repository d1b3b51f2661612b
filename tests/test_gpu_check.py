"""The check of a GPU runs, on one that is played by the CPU, and notices what is wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"
SIZES = {"layers": 1, "shrink": 32, "rows": 40, "cols": 64, "prompt": 5, "repeats": 1, "rounds": 1, "tokens": 2}
SMALL = [part for name, size in SIZES.items() for part in (f"--{name}", str(size))]

MISSING = [name for name in ("triton", "bitsandbytes") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} are not installed")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_it_runs_on_a_simulated_gpu(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run("--simulate", *SMALL, "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout and "0 failed" in done.stdout
    rows = json.loads(report.read_text())
    systems = {row["system"] for row in rows}
    assert {"cuBLAS bf16", "bitsandbytes nf4", "hf_sparse nf4, 10%", "hf_sparse", "accelerate bf16"} <= systems
    budgets = [row["case"] for row in rows if row["system"] == "hf_sparse"]
    assert budgets == ["budget 100%", "budget 50%", "budget 25%"]
    assert all(row["device"] == "a simulated GPU" and min(row["figures"]) > 0 for row in rows)


def test_a_wrong_kernel_is_noticed(script_module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    module = script_module("gpu_check")
    failures: list[str] = []
    accumulate = module.triton_ops.accumulate
    monkeypatch.setattr(module.triton_ops, "runs_on", lambda device: True)  # what the script sets is put back
    monkeypatch.setattr(module.triton_ops, "accumulate", lambda *args, **kwargs: 1.01 * accumulate(*args, **kwargs))
    monkeypatch.setattr(module, "FORMATS", ("nf4",))
    count = module.check_operators(module.Machine(simulate=True), failures)
    assert 4 <= len(failures) < count  # where no row was drawn there is nothing to be wrong
    assert all("accumulate, nf4" in failure or "rows, nf4" in failure for failure in failures)


def test_without_a_gpu_it_says_so() -> None:
    done = run(*SMALL, CUDA_VISIBLE_DEVICES="")
    assert done.returncode != 0 and "there is no CUDA device; --simulate plays one" in done.stderr
