"""transformers' own AutoModelForCausalLM, after `import hf_sparse`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from tiny_models import prompt_ids, save_checkpoint, save_tokenizer

QUICK = {"calibration_tokens": 64, "max_perplexity_increase": 0}


def saved(case: str, directory: Path) -> tuple[Any, Path]:
    """A model, and the folder that it was saved in."""
    save_checkpoint(case, directory)
    save_tokenizer(directory)
    model = SparseAutoModelForCausalLM.from_pretrained(directory, load_in_4bit=True, **QUICK)
    model.save_pretrained(directory / "saved")
    return model, directory / "saved"


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(prompt_ids(2, 9)).logits


@pytest.mark.parametrize("case", ["llama", "llama-tied-bias", "opt", "falcon-7b"])
@pytest.mark.parametrize("device_map", [None, "auto"])
def test_a_saved_model_is_the_same(case: str, device_map: str | None, tmp_path: Path) -> None:
    model, directory = saved(case, tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, device_map=device_map)
    assert type(loaded).__mro__[1] is type(model).__mro__[1]
    assert torch.equal(logits(loaded), logits(model))
    ids = prompt_ids(1, 5)
    assert torch.equal(
        loaded.generate(ids, max_new_tokens=6, ctx_size=8, do_sample=False),
        model.generate(ids, max_new_tokens=6, ctx_size=8, do_sample=False),
    )
    assert loaded.plan_directory == directory / "hf_sparse_plan"
    loaded.save_pretrained(tmp_path / "again")
    before, after = (load_file(folder / "model.safetensors") for folder in (directory, tmp_path / "again"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_quantizing_while_loading(tmp_path: Path) -> None:
    model, _ = saved("llama", tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=WeightOnlyQuantConfig())
    assert torch.equal(logits(loaded), logits(model))


def test_other_methods_are_left_alone(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    assert "Linear4bit" in {type(module).__name__ for module in loaded.modules()}


def test_a_device_map_that_the_plan_cannot_follow(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    with pytest.raises(ValueError, match="device_map: expected None, 'auto' or 'cpu'"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=WeightOnlyQuantConfig(), device_map={"model": 0, "lm_head": "cpu"}
        )


@pytest.mark.parametrize(
    "imports",
    [
        "import hf_sparse; from transformers.quantizers.auto import *",
        "from transformers.quantizers.auto import *; import hf_sparse",
    ],
)
def test_the_order_of_imports_does_not_matter(imports: str) -> None:
    code = (
        f"{imports}\nimport sys\n"
        "print(AutoQuantizationConfig.from_dict({'quant_method': 'hf_sparse', 'weight_dtype': 'int8'}).weight_dtype)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "int8"


def test_importing_hf_sparse_imports_neither_torch_nor_transformers() -> None:
    code = "import hf_sparse, sys; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
