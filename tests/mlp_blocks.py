"""What tests of HybridMLP share: random blocks of each shape, and their output natively and by operators."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_sparse.modeling import BlockId, HybridMLP, Predictor, Tier, WeightFormat
from hf_sparse.modeling.block import BlockSpec, Projection
from hf_sparse.modeling.mlp import MLPNames
from hf_sparse.quantization import instruction_sets

KERNELS = [name for name in instruction_sets() if name != "torch"]
D_MODEL, NEURONS = 40, 70
SHAPES: dict[str, tuple[MLPNames, dict[str, tuple[int, ...]]]] = {
    "gated": (MLPNames(gate="gate", up="up", down="down", activation="act"), {"gate": (1,), "up": (1,), "down": (1,)}),
    "fused": (MLPNames(up="gate_up", down="down", activation="act", fused=True), {"gate_up": (1, 1), "down": (1,)}),
    "plain": (MLPNames(up="up", down="down", activation="act"), {"up": (1,), "down": (1,)}),
}


def load(
    shape: str,
    activation: nn.Module,
    weights: WeightFormat,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int] = (D_MODEL, NEURONS),
    bias: bool = True,
    seed: int = 0,
) -> HybridMLP:
    """A block that is loaded but not placed."""
    generator = torch.Generator().manual_seed(seed)
    (d_model, neurons), (names, rows) = sizes, SHAPES[shape]
    projections = tuple(Projection(name, r, d_model, name == "down", bias) for name, r in rows.items())
    block = HybridMLP(BlockSpec(BlockId(0, "mlp"), "mlp", "mlp.", neurons, projections, weights), names, activation)
    for p in projections:
        stored = (sum(p.rows) * neurons, d_model)
        weight = torch.randn(stored[::-1] if p.writes else stored, generator=generator) * 0.3
        block.load(f"{p.name}.weight", weight.to(dtype))
        values = torch.randn(d_model if p.writes else stored[0], generator=generator) * 0.1
        if bias:
            block.load(f"{p.name}.bias", values.to(dtype))
    return block


def place(block: HybridMLP, tiers: int, seed: int = 1) -> None:
    tier_of = torch.randint(0, tiers, (block.neurons,), generator=torch.Generator().manual_seed(seed))
    block.place(tuple(Tier(f"tier{i}") for i in range(tiers)), tier_of)


def predictor_of(block: HybridMLP, seed: int = 3) -> Predictor:
    generator = torch.Generator().manual_seed(seed)
    d_model = block.projections["down"].columns
    fc1, fc2 = torch.randn(12, d_model, generator=generator), torch.randn(block.neurons, 12, generator=generator)
    return Predictor(fc1, fc2, torch.randn(block.neurons, generator=generator))


def by_operators(block: HybridMLP, x: Tensor) -> Tensor:
    """The block's output without native calls: someone looks at its activation."""
    handle = block.activation.register_forward_hook(lambda *args: None)
    out = block(x)
    handle.remove()
    return out


def assert_native_equals_operators(block: HybridMLP, x: Tensor, runs: list[int], calls: int) -> None:
    """The same output and counts, natively and not; `calls`: how many shards are computed natively."""
    block.reset_counters()
    before = runs[0]
    out = block(x)
    assert runs[0] - before == calls
    counts = block.counters.tolist()
    block.reset_counters()
    expected = by_operators(block, x)
    assert runs[0] - before == calls
    assert counts == block.counters.tolist()
    assert out.dtype == expected.dtype == x.dtype and out.shape == expected.shape
    # int8: what is rounded may fall the other way for the last bit of what it is computed from. bf16: native code takes
    # the factors of `down` as they are, the operator rounds them.
    tolerance = {"fp32": 1e-5, "int8": 1e-3, "bf16": 1e-4}[block.weights.compute_dtype]
    size = expected.abs().max().item()
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance * size)
