"""The choice of instruction set, and life without the extension."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_sparse.quantization import instruction_set, instruction_sets


@pytest.mark.parametrize("name", ["avx1024", "AVX2"])
def test_an_unknown_instruction_set_is_refused(name: str, use_instruction_set: Callable[[str], None]) -> None:
    use_instruction_set(name)
    with pytest.raises(ValueError, match=f"HF_SPARSE_ISA='{name}': this machine and installation have .*torch"):
        instruction_set()


@pytest.mark.parametrize("name", instruction_sets())
def test_the_instruction_set_asked_for_is_the_one_in_use(name: str, use_instruction_set: Callable[[str], None]) -> None:
    use_instruction_set(name)
    assert instruction_set() == name


def test_the_best_one_is_used_where_none_is_asked_for(use_instruction_set: Callable[[str], None]) -> None:
    use_instruction_set("")
    assert instruction_set() == instruction_sets()[0]


WITHOUT_EXTENSION = """
import sys
sys.modules["hf_sparse.quantization._kernels"] = None  # importing it fails from here on
import torch
from hf_sparse.quantization import NeuronMatrix, gathered_row_product, instruction_sets
print(instruction_sets())
for _ in range(2):
    matrix = NeuronMatrix.quantize(torch.ones(3, 40), "nf4", 32)
    print(gathered_row_product(matrix, torch.ones(1, 40)).tolist())
"""


@pytest.mark.parametrize("asked_for", ["", "torch"])
def test_without_the_extension_all_works_and_one_warning_says_so(asked_for: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTENSION],
        cwd=tmp_path,
        env={"HF_SPARSE_ISA": asked_for},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[0] == "['torch']"
    assert len(result.stdout.splitlines()) == 3
    assert result.stderr.count("The CPU kernels cannot be loaded") == (asked_for == "")
