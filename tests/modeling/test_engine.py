"""Decode steps in one native call: the same numbers as transformers' own model on the dequantized weights, and its own
modules wherever a step is not the usual one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine_steps import (
    GREEDY,
    QUICK,
    Save,
    assert_near,
    at_once,
    decoded,
    load,
    mlps,
    needs_kernels,
    pages_of,
    through_modules,
)
from hf_sparse import SparseAutoModelForCausalLM
from hf_sparse.modeling import FAMILIES, NotUsual, SkipRule, engine_of, hybrid_blocks, magnitude
from hf_sparse.quantization import instruction_sets
from tiny_models import CASES, plain_twin, prompt_ids

DECODED = [case for case, (model_type, _) in CASES.items() if FAMILIES[model_type].decoding is not None]
ROUNDED = 1e-3  # what int8 activations may cost, relative to the largest logit

pytestmark = needs_kernels


# Every family, over the ends of parts (64 tokens) and of pages (256 tokens)


def test_the_families_whose_layers_are_not_the_usual_ones_say_so(saved: Save) -> None:
    others = {model_type: case for case, (model_type, _) in CASES.items() if case not in DECODED}
    for model_type, case in others.items():
        model = load(saved(case))
        with pytest.raises(NotUsual, match=f"decoder layers of {model_type} are left to transformers' modules"):
            engine_of(model)
        assert model.engine() is None


@pytest.mark.parametrize("case", DECODED)
@pytest.mark.parametrize(("weight_dtype", "compute_dtype"), [("nf4", "fp32"), ("int4_asym", "fp32"), ("int8", "int8")])
def test_steps_equal_transformers(
    case: str, weight_dtype: str, compute_dtype: str, saved: Save, native_steps: list[int]
) -> None:
    model = load(saved(case), weight_dtype, compute_dtype)
    ids = prompt_ids(1, 262)
    expected = at_once(plain_twin(model), ids)
    assert_near(decoded(model, ids), expected, 1e-5 if compute_dtype == "fp32" else ROUNDED)
    assert native_steps == list(range(3, 262))


@pytest.mark.parametrize("case", ["mistral", "gemma3", "smollm3"])
def test_generation_beyond_the_window_equals_transformers(case: str, saved: Save, native_steps: list[int]) -> None:
    model = load(saved(case))
    ids = prompt_ids(1, 30)  # windows are 7 and 8 tokens
    assert torch.equal(model.generate(ids, **GREEDY), plain_twin(model).generate(ids, **GREEDY))
    assert native_steps == list(range(30, 41))


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16", "int8"])
def test_every_instruction_set_gives_the_same(
    isa: str, compute_dtype: str, saved: Save, use_instruction_set: Callable[[str], None], native_steps: list[int]
) -> None:
    use_instruction_set(isa)
    model = load(saved("gemma3"), "int8" if compute_dtype == "bf16" else "nf4", compute_dtype)
    ids = prompt_ids(1, 30 if isa == "torch" else 80)
    tolerance = {"fp32": 1e-5, "bf16": 2e-2, "int8": ROUNDED}[compute_dtype]
    # Prompts go through bfloat16 where the instruction set has products for it.
    tolerance = 2e-2 if isa in ("amx", "torch") and compute_dtype != "fp32" else tolerance
    assert_near(decoded(model, ids), at_once(plain_twin(model), ids), tolerance)
    assert len(native_steps) == (0 if isa == "torch" else 77)
    if compute_dtype != "fp32" or isa == "torch":
        return
    model.cache_dtype = torch.int8
    steps = decoded(model, ids[:, :70], prompt=1)
    with through_modules(model):
        assert_near(steps, decoded(model, ids[:, :70], prompt=1, cache=pages_of(model, torch.int8)), 2e-2)


@pytest.mark.parametrize("compute_dtype", ["fp32", "int8"])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_any_number_of_threads(
    count: int, compute_dtype: str, saved: Save, threads: Callable[[int], None], native_steps: list[int]
) -> None:
    threads(count)
    model = load(saved("llama"), "nf4", compute_dtype)
    for block in mlps(model):
        block.rule = magnitude(gate=0.01)
    ids = prompt_ids(1, 75)
    steps = decoded(model, ids)
    assert torch.equal(decoded(model, ids), steps)  # a number of threads repeats itself
    assert len(native_steps) == 2 * 72
    with through_modules(model):
        assert_near(steps, decoded(model, ids), 1e-4 if compute_dtype == "fp32" else 1e-2)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2"])
def test_every_activation_that_native_code_knows(activation: str, saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama", hidden_act=activation))
    for block in mlps(model):
        block.rule = SkipRule()
    ids = prompt_ids(1, 20)
    assert_near(decoded(model, ids), at_once(plain_twin(model), ids))
    assert len(native_steps) == 17


def test_another_activation_is_left_to_modules(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama", hidden_act="mish"))
    ids = prompt_ids(1, 10)
    assert_near(decoded(model, ids), at_once(plain_twin(model), ids))
    assert model.engine() is None and not native_steps


@pytest.mark.parametrize(
    ("rope", "is_native"),
    [
        ({"rope_type": "linear", "factor": 4.0}, True),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, True),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            True,
        ),
        ({"rope_type": "dynamic", "factor": 2.0}, False),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
def test_rotations(rope: dict[str, Any], is_native: bool, saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama", rope_parameters={"rope_theta": 10000.0} | rope))
    ids = prompt_ids(1, 100)
    assert_near(decoded(model, ids), at_once(plain_twin(model), ids))
    assert len(native_steps) == (97 if is_native else 0)


# Unquantized models


def test_bfloat16_rows_are_multiplied_natively(saved: Save, native_steps: list[int]) -> None:
    directory = saved("llama")
    ids = prompt_ids(1, 80)
    model = SparseAutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **QUICK)
    steps = decoded(model, ids)
    assert len(native_steps) == 77 and steps.dtype == torch.bfloat16
    assert {m.dtype for b in hybrid_blocks(model) for m in b.shards[0].matrices.values()} == {torch.bfloat16}
    exact = at_once(plain_twin(model).float(), ids)
    with through_modules(model):
        by_modules = decoded(model, ids)
    assert_near(steps, exact, 2e-2)
    # States stay in float32 between the products: no worse than modules that round each of them.
    assert (steps - exact).square().mean() <= 1.1 * (by_modules - exact).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_left_to_modules(dtype: torch.dtype, saved: Save, native_steps: list[int]) -> None:
    model = SparseAutoModelForCausalLM.from_pretrained(saved("llama"), dtype=dtype, **QUICK)
    ids = prompt_ids(1, 12)
    assert_near(decoded(model, ids), at_once(plain_twin(model), ids), 1e-5 if dtype == torch.float32 else 2e-2)
    assert model.engine() is None and not native_steps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantized_models_of_half_precision(dtype: torch.dtype, saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"), dtype=dtype)
    ids = prompt_ids(1, 20)
    steps = decoded(model, ids)
    # Pages of float16 are not known to native code.
    assert len(native_steps) == (17 if dtype == torch.bfloat16 else 0)
    assert steps.dtype == dtype
    assert_near(steps, at_once(plain_twin(model).float(), ids), 3e-2)
