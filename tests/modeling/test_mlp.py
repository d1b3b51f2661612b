import copy
import dataclasses
import itertools
import pickle

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from engine_steps import needs_kernels
from hf_sparse.modeling import Predictor, SkipRule, WeightFormat, gives_exact_zeros, magnitude, skipping
from hf_sparse.modeling.block import FEW_ROWS
from hf_sparse.modeling.native_mlp import activation_code
from hf_sparse.quantization import COMPUTE_DTYPES
from mlp_blocks import (
    D_MODEL,
    KERNELS,
    NEURONS,
    SHAPES,
    assert_native_equals_operators,
    by_operators,
    load,
    place,
    predictor_of,
)


def make(shape, activation, weight_dtype=None, compute_dtype="fp32", seed=0):
    """A block that is loaded but not placed, and the dense function that it must equal."""
    names = SHAPES[shape][0]
    block = load(shape, activation, WeightFormat(weight_dtype, 32, compute_dtype), seed=seed)
    matrices, biases, output_bias = block._whole()

    def dense(x, keep=None):
        def linear(name):
            return x @ matrices[name].dequantize().T + biases[name]

        if shape == "fused":
            gate, up = linear("gate_up").chunk(2, dim=-1)
        else:
            gate, up = linear(names.gate or "up"), (linear("up") if names.gate else None)
        gate = activation(gate)
        hidden = gate if up is None else gate * up
        if keep is not None:
            hidden = torch.where(keep(gate), hidden, 0.0)
        return hidden @ matrices["down"].dequantize() + output_bias

    return block, dense


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tiers", [1, 2, 3])
@pytest.mark.parametrize("weight_dtype", [None, "nf4", "int8"])
@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS + 5])
def test_tiers_add_up_to_the_dense_mlp(shape, tiers, weight_dtype, rows):
    block, dense = make(shape, nn.SiLU(), weight_dtype)
    place(block, tiers)
    x = torch.randn(rows, D_MODEL, generator=torch.Generator().manual_seed(rows))
    torch.testing.assert_close(block(x), dense(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tiers", [1, 2])
@pytest.mark.parametrize("rows", [1, 4, FEW_ROWS + 1])
def test_exact_rule_changes_nothing_and_skips(shape, tiers, rows):
    block, dense = make(shape, nn.ReLU(), "int4")
    place(block, tiers)
    block.rule = SkipRule("exact")
    x = torch.randn(rows, D_MODEL, generator=torch.Generator().manual_seed(rows))
    with skipping("always"):
        torch.testing.assert_close(block(x), dense(x), rtol=1e-4, atol=1e-5)
    assert 0.2 < block.active_fraction < 0.8
    block.reset_counters()
    with skipping("never"):
        block(x)
    assert block.active_fraction is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tiers", [1, 2])
@pytest.mark.parametrize("rows", [1, 4, FEW_ROWS + 1])
def test_magnitude_rule_leaves_out_what_lies_below_the_threshold(shape, tiers, rows):
    block, dense = make(shape, nn.SiLU(), "nf4")
    place(block, tiers)
    block.rule = magnitude(gate=0.2)
    x = torch.randn(rows, D_MODEL, generator=torch.Generator().manual_seed(rows))
    with skipping("always"):
        out = block(x)
    torch.testing.assert_close(out, dense(x, keep=lambda gate: gate.abs() >= 0.2), rtol=1e-4, atol=1e-5)
    assert (out - dense(x)).abs().max() > 1e-3


def test_each_row_of_a_batch_equals_its_solo_run():
    block, _ = make("gated", nn.SiLU(), "nf4", "fp32")
    place(block, 2)
    block.rule = magnitude(gate=0.3)
    x = torch.randn(5, D_MODEL, generator=torch.Generator().manual_seed(7))
    with skipping("always"):
        torch.testing.assert_close(block(x), torch.cat([block(row[None]) for row in x]), rtol=1e-3, atol=1e-4)


def test_nothing_active_and_everything_active():
    block, dense = make("gated", nn.SiLU(), "nf4")
    place(block, 2)
    x = torch.randn(2, D_MODEL, generator=torch.Generator().manual_seed(8))
    with skipping("always"):
        block.rule = magnitude(gate=1e9)
        torch.testing.assert_close(block(x), block.output_bias.expand(2, -1))
        block.rule = magnitude(gate=0.0)
        torch.testing.assert_close(block(x), dense(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tiers", [1, 2])
@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS + 1])
def test_predicted_rule_computes_what_the_predictor_names(tiers, rows):
    block, dense = make("gated", nn.ReLU(), "nf4")
    place(block, tiers)
    generator = torch.Generator().manual_seed(3)
    block.predictor = Predictor(
        torch.randn(12, D_MODEL, generator=generator),
        torch.randn(NEURONS, 12, generator=generator),
        torch.zeros(NEURONS),
    )
    block.rule = SkipRule("predicted")
    x = torch.randn(rows, D_MODEL, generator=generator)
    chosen = block.predictor.active(x)
    assert 0 < chosen.float().mean() < 1
    with skipping("always"):
        torch.testing.assert_close(block(x), dense(x, keep=lambda gate: chosen), rtol=1e-4, atol=1e-5)


def test_moving_neurons_keeps_the_block_and_its_saved_form():
    block, dense = make("fused", nn.SiLU(), "nf4")
    x = torch.randn(3, D_MODEL, generator=torch.Generator().manual_seed(9))
    place(block, 1)
    before = {name: tensor.clone() for name, tensor in block.state_dict(prefix="layer.mlp.").items()}
    assert set(before) == {
        f"layer.mlp.{name}"
        for name in ("gate_up.codes", "gate_up.scales", "gate_up.bias", "down.codes", "down.scales", "down.bias")
    }
    for seed in (2, 3):
        place(block, 3, seed)
        torch.testing.assert_close(block(x), dense(x), rtol=1e-4, atol=1e-5)
        after = block.state_dict(prefix="layer.mlp.")
        assert all(torch.equal(after[name], before[name]) for name in before)
    assert sum(shard.nbytes for shard in block.shards) == block.bytes_per_neuron() * NEURONS


def test_a_tensor_of_another_shape_is_refused_by_name():
    block, _ = make("gated", nn.SiLU())
    with pytest.raises(ValueError, match=r"0\.mlp down\.weight: expected shape \[40, 70\], got \[70, 40\]"):
        block.load("down.weight", torch.zeros(NEURONS, D_MODEL))


def test_nan_in_the_input_is_not_hidden_by_a_rule():
    block, _ = make("gated", nn.ReLU(), "nf4")
    place(block, 2)
    block.rule = SkipRule("exact")
    x = torch.zeros(2, D_MODEL)
    x[1, 3] = torch.nan
    with skipping("always"):
        out = block(x)
    assert out[0].isfinite().all() and out[1].isnan().all()


# One native call for one token, beside the operators one by one


FORMS = {
    "nf4": (WeightFormat("nf4", 64), torch.float32),
    "int4_asym": (WeightFormat("int4_asym", 32), torch.float32),
    "int8": (WeightFormat("int8", 32), torch.float32),
    "bf16": (WeightFormat(None), torch.bfloat16),
}
RULES = {
    "none": (SkipRule(), False),
    "magnitude": (magnitude(gate=0.2), False),
    "predicted": (SkipRule("predicted"), True),
}
NAMED_ACTIVATIONS = {
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    "relu": nn.ReLU(),
    "relu_squared": ACT2FN["relu2"],
}


@needs_kernels
@pytest.mark.parametrize("isa", KERNELS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_one_native_call_equals_the_operators(isa, form, compute_dtype, use_instruction_set, native_runs):
    use_instruction_set(isa)
    weights, dtype = FORMS[form]
    weights = dataclasses.replace(weights, compute_dtype=compute_dtype)
    for shape, (rule, predicts), tiers, bias in itertools.product(SHAPES, RULES.values(), (1, 2), (True, False)):
        block = load(shape, nn.SiLU(), weights, dtype, sizes=(37, 83) if bias else (128, 150), bias=bias)
        place(block, tiers)
        block.rule, block.predictor = rule, predictor_of(block) if predicts else None
        x = torch.randn(1, block.projections["down"].columns, generator=torch.Generator().manual_seed(5))
        with skipping("always"):
            assert_native_equals_operators(block, x, native_runs, tiers)
        assert (block.active_fraction is None) == (rule.kind == "none")
        assert block.active_fraction is None or 0.1 < block.active_fraction < 0.9
        with skipping("never"):
            assert_native_equals_operators(block, x, native_runs, tiers)


@needs_kernels
@pytest.mark.parametrize("isa", KERNELS)
@pytest.mark.parametrize("name", NAMED_ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_activation_and_size(isa, name, shape, use_instruction_set, native_runs):
    use_instruction_set(isa)
    for number, sizes in enumerate([(1, 1), (31, 5), (32, 64), (130, 97), (257, 300)]):
        block = load(shape, NAMED_ACTIVATIONS[name], WeightFormat("nf4", 32), sizes=sizes, seed=number)
        place(block, 1)
        x = 2 * torch.randn(1, sizes[0], generator=torch.Generator().manual_seed(number))
        rules = [SkipRule(), magnitude(gate=0.5)]
        if gives_exact_zeros(block.activation):  # others are zero only where they run out of digits
            rules.append(SkipRule("exact"))
        for rule in rules:
            block.rule = rule
            with skipping("always"):
                assert_native_equals_operators(block, x, native_runs, 1)


@needs_kernels
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_share_a_native_call(threads, native_runs):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape, (rule, predicts) in itertools.product(SHAPES, RULES.values()):
            block = load(shape, nn.SiLU(), WeightFormat("nf4", 32), sizes=(257, 300))
            place(block, 1)
            block.rule, block.predictor = rule, predictor_of(block) if predicts else None
            with skipping("always"):
                assert_native_equals_operators(block, torch.ones(1, 1, 257), native_runs, 1)
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_native_calls_follow_the_block(native_runs):
    block = load("gated", nn.ReLU(), WeightFormat("nf4", 32))
    place(block, 1)
    x = torch.randn(1, D_MODEL, generator=torch.Generator().manual_seed(5))
    with skipping("always"):
        assert_native_equals_operators(block, x, native_runs, 1)
        block.rule = SkipRule("exact")
        assert_native_equals_operators(block, x, native_runs, 1)
        exact = block.active_fraction
        block.predictor = predictor_of(block)
        assert_native_equals_operators(block, x, native_runs, 1)
        predicted = block.active_fraction
        block.predictor = predictor_of(block, seed=4)
        assert_native_equals_operators(block, x, native_runs, 1)
        assert predicted < exact and block.active_fraction not in (exact, predicted)
        block.predictor = None
        place(block, 2)
        assert_native_equals_operators(block, x, native_runs, 2)
        place(block, 2, seed=9)
        assert_native_equals_operators(block, x, native_runs, 2)
        block.activation = nn.SiLU()
        assert_native_equals_operators(block, x, native_runs, 2)


@needs_kernels
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))])
def test_a_copy_has_native_calls_of_its_own(copied, native_runs):
    block = load("fused", nn.SiLU(), WeightFormat("nf4", 32))
    place(block, 2)
    x = torch.randn(1, D_MODEL, generator=torch.Generator().manual_seed(5))
    expected = block(x)
    other = copied(block)
    del block
    assert_native_equals_operators(other, x, native_runs, 2)
    assert torch.equal(other(x), expected)


@needs_kernels
def test_operators_compute_what_native_calls_do_not(native_runs):
    def block_of(activation=None, weight_dtype="nf4", dtype=torch.float32):
        block = load("gated", activation or nn.SiLU(), WeightFormat(weight_dtype, 32), dtype)
        place(block, 1)
        return block

    x = torch.randn(1, D_MODEL, generator=torch.Generator().manual_seed(5))
    for block in (block_of(nn.Tanh()), block_of(nn.ReLU6()), block_of(weight_dtype=None)):
        block(x)
    block = block_of()
    block(torch.cat((x, x)))
    seen = []
    block.probe = lambda place, values: seen.append(place) or values
    block(x)
    block.probe = None
    wanting = x.clone().requires_grad_()
    block(wanting).sum().backward()
    assert native_runs == [0] and seen == ["input", "gate", "hidden"] and wanting.grad.abs().sum() > 0
    with torch.no_grad():
        block(wanting)
    assert native_runs == [1]
    half = block(x.bfloat16())
    assert native_runs == [2] and half.dtype == torch.bfloat16
    torch.testing.assert_close(half, block(x.bfloat16().float()).bfloat16())


@needs_kernels
def test_a_native_call_shows_nan_under_a_rule(native_runs):
    for (rule, predicts), tiers in itertools.product(list(RULES.values())[1:], (1, 2)):
        block = load("gated", nn.ReLU(), WeightFormat("nf4", 32))
        place(block, tiers)
        block.rule, block.predictor = rule, predictor_of(block) if predicts else None
        x = torch.zeros(1, D_MODEL)
        x[0, 3] = torch.nan
        with skipping("always"):
            assert block(x).isnan().all()
            assert by_operators(block, x).isnan().all()
            assert block.active_fraction == 1


def test_activations_are_known_by_what_they_compute():
    assert [activation_code(activation) for activation in NAMED_ACTIVATIONS.values()] == [0, 1, 2, 3, 4]
    names = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2")
    assert [activation_code(ACT2FN[name]) for name in names] == [0, 1, 2, 2, 3, 4]
    for name in ("relu6", "gelu_10", "quick_gelu", "mish", "tanh"):
        assert activation_code(ACT2FN[name]) is None
