"""Blocks whose projections are stored in different ways, natively and by operators: what reads the same activations may
want them rounded in other groups, or laid out for another kind of code.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine_steps import QUICK, Save, assert_near, at_once, decoded, through_modules
from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.modeling import Tier, WeightFormat, magnitude, skipping
from hf_sparse.modeling.native_mlp import NotUsual
from hf_sparse.modeling.triton_mlp import TritonMLP
from masked_twin import give_thresholds
from mlp_blocks import KERNELS, assert_native_equals_operators, by_operators, load, place, predictor_of
from tiny_models import plain_twin, prompt_ids

OF_MLP = {
    "groups": {"mlp.gate": ("nf4", 32), "mlp.up": ("nf4", 64), "mlp.down": ("int8", 32)},
    "kinds": {"mlp.gate": ("int8", 64), "mlp.up": ("int4_asym", 64), "mlp.down": ("iq4_nl", 128)},
    "both": {"mlp.gate": ("iq4_nl", 128), "mlp.up": ("int8", 32)},
}
OF_MODELS = {
    "self_attn.q_proj": "int4:64",
    "self_attn.k_proj": "int8:32",
    "1.self_attn.k_proj": "int8:128",
    "self_attn.v_proj": "int4_asym:32",
    "self_attn.o_proj": "int8:32",
    "mlp.up_proj": "int8:64",
    "2.mlp.up_proj": "iq4_nl:32",
    "mlp.down_proj": "int8:32",
}
TOLERANCE = {"fp32": 1e-5, "int8": 2e-2}


@pytest.mark.parametrize("isa", KERNELS, indirect=True)
@pytest.mark.parametrize("forms", OF_MLP)
@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16", "int8"])
def test_mlps(isa: str, forms: str, compute_dtype: str, native_runs: list[int], generator: torch.Generator) -> None:
    block = load("gated", nn.SiLU(), WeightFormat("int4", 64, compute_dtype, OF_MLP[forms]), sizes=(140, 70))
    place(block, 2)
    x = torch.randn(1, 1, 140, generator=generator)
    assert_native_equals_operators(block, x, native_runs, 2)
    with skipping("always"):
        block.rule = magnitude(gate=0.05)
        assert_native_equals_operators(block, x, native_runs, 2)
        block.rule = magnitude(gate=0.05, input=0.4)
        assert_native_equals_operators(block, x, native_runs, 2)
        block.rule = magnitude(gate=0.05)
        block.predictor = predictor_of(block)
        assert_native_equals_operators(block, x, native_runs, 2)


def test_on_a_gpu(generator: torch.Generator) -> None:
    """Kernels take another format of down; where gate and up differ the operators compute."""
    pytest.importorskip("triton", reason="Triton is not installed")
    for forms, taken in (({"mlp.down": ("int8", 32)}, True), (OF_MLP["groups"], False), (OF_MLP["kinds"], False)):
        block = load("gated", nn.SiLU(), WeightFormat("nf4", 64, "fp32", forms))
        block.place((Tier("cpu"),), torch.zeros(block.neurons, dtype=torch.int64))
        if not taken:
            with pytest.raises(NotUsual, match="gate and up are stored in different ways"):
                TritonMLP(block, block.shards[0])
            continue
        x = torch.randn(1, block.projections["down"].columns, generator=generator)
        got = TritonMLP(block, block.shards[0]).run(x, False, block.counters) + block.output_bias
        torch.testing.assert_close(got, by_operators(block, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("isa", KERNELS, indirect=True)
@pytest.mark.parametrize("compute_dtype", ["fp32", "int8"])
def test_steps(isa: str, compute_dtype: str, saved: Save, native_steps: list[int]) -> None:
    quantization = WeightOnlyQuantConfig(compute_dtype=compute_dtype, formats=OF_MODELS)
    model = SparseAutoModelForCausalLM.from_pretrained(saved("llama"), quantization_config=quantization, **QUICK)
    ids = prompt_ids(1, 24)
    steps = decoded(model, ids)
    assert native_steps == list(range(3, 24))
    assert_near(steps, at_once(plain_twin(model), ids), TOLERANCE[compute_dtype])
    give_thresholds(model)
    steps = decoded(model, ids)
    assert len(native_steps) == 42
    with through_modules(model):
        assert_near(steps, decoded(model, ids), TOLERANCE[compute_dtype])
