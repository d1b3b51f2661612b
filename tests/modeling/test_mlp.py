import pytest
import torch
from torch import nn

from hf_sparse.modeling import BlockId, HybridMLP, Predictor, SkipRule, Tier, WeightFormat, skipping
from hf_sparse.modeling.block import BlockSpec, Projection
from hf_sparse.modeling.mlp import FEW_ROWS, MLPNames

D_MODEL, NEURONS = 40, 70
SHAPES = {
    "gated": (MLPNames(gate="gate", up="up", down="down", activation="act"), {"gate": (1,), "up": (1,), "down": (1,)}),
    "fused": (MLPNames(up="gate_up", down="down", activation="act", fused=True), {"gate_up": (1, 1), "down": (1,)}),
    "plain": (MLPNames(up="up", down="down", activation="act"), {"up": (1,), "down": (1,)}),
}


def make(shape, activation, weight_dtype=None, compute_dtype="fp32", seed=0):
    """A block that is loaded but not placed, and the dense function that it must equal."""
    generator = torch.Generator().manual_seed(seed)
    names, rows = SHAPES[shape]
    projections = tuple(Projection(name, r, D_MODEL, name == "down", True) for name, r in rows.items())
    weights = WeightFormat(weight_dtype, 32, compute_dtype)
    block = HybridMLP(BlockSpec(BlockId(0, "mlp"), "mlp", "mlp.", NEURONS, projections, weights), names, activation)
    for p in projections:
        stored = (sum(p.rows) * NEURONS, D_MODEL)
        block.load(f"{p.name}.weight", torch.randn(stored[::-1] if p.writes else stored, generator=generator) * 0.3)
        block.load(f"{p.name}.bias", torch.randn(D_MODEL if p.writes else stored[0], generator=generator) * 0.1)
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


def place(block, tiers, seed=1):
    tier_of = torch.randint(0, tiers, (NEURONS,), generator=torch.Generator().manual_seed(seed))
    block.place(tuple(Tier(f"tier{i}") for i in range(tiers)), tier_of)


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
    block.rule = SkipRule("magnitude", 0.2)
    x = torch.randn(rows, D_MODEL, generator=torch.Generator().manual_seed(rows))
    with skipping("always"):
        out = block(x)
    torch.testing.assert_close(out, dense(x, keep=lambda gate: gate.abs() >= 0.2), rtol=1e-4, atol=1e-5)
    assert (out - dense(x)).abs().max() > 1e-3


def test_each_row_of_a_batch_equals_its_solo_run():
    block, _ = make("gated", nn.SiLU(), "nf4", "fp32")
    place(block, 2)
    block.rule = SkipRule("magnitude", 0.3)
    x = torch.randn(5, D_MODEL, generator=torch.Generator().manual_seed(7))
    with skipping("always"):
        torch.testing.assert_close(block(x), torch.cat([block(row[None]) for row in x]), rtol=1e-3, atol=1e-4)


def test_nothing_active_and_everything_active():
    block, dense = make("gated", nn.SiLU(), "nf4")
    place(block, 2)
    x = torch.randn(2, D_MODEL, generator=torch.Generator().manual_seed(8))
    with skipping("always"):
        block.rule = SkipRule("magnitude", 1e9)
        torch.testing.assert_close(block(x), block.output_bias.expand(2, -1))
        block.rule = SkipRule("magnitude", 0.0)
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
