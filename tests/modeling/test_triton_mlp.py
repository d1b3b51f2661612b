"""The step of an MLP on a GPU, in Triton's interpreter, beside the block's own operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hf_sparse.modeling import HybridMLP, SimulatedTier, SkipRule, Tier, WeightFormat, magnitude, skipping
from hf_sparse.modeling import triton_mlp as module
from hf_sparse.modeling.native_mlp import NotUsual
from hf_sparse.modeling.triton_mlp import TritonMLP
from hf_sparse.quantization import triton_ops
from mlp_blocks import D_MODEL, NEURONS, load, predictor_of

pytest.importorskip("triton", reason="Triton is not installed")

GPU, CPU = SimulatedTier("gpu"), Tier("cpu")
RULES: dict[str, SkipRule] = {
    "none": SkipRule(),
    "exact": SkipRule("exact"),
    "gate": magnitude(gate=0.15),
    "everything": magnitude(
        input=torch.rand(D_MODEL, generator=torch.Generator().manual_seed(1)),
        gate=0.6 * torch.rand(NEURONS, generator=torch.Generator().manual_seed(2)),
        hidden=0.3,
    ),
    "predicted": SkipRule("predicted"),
}
CASES = [
    ("gated", nn.SiLU(), "none"),
    ("gated", nn.SiLU(), "everything"),
    ("gated", nn.SiLU(), "predicted"),
    ("gated", nn.ReLU(), "exact"),
    ("gated", nn.ReLU(), "predicted"),
    ("fused", nn.GELU(), "none"),
    ("fused", nn.SiLU(), "gate"),
    ("plain", nn.ReLU(), "exact"),
    ("plain", nn.ReLU(), "predicted"),
    ("plain", nn.ReLU(), "none"),
]


def block_of(shape: str, activation: nn.Module, rule: str, split: bool, weights: WeightFormat) -> HybridMLP:
    block = load(shape, activation, weights)
    tier_of = torch.arange(NEURONS) % 3 // 2 if split else torch.zeros(NEURONS, dtype=torch.int64)
    block.place((GPU, CPU), tier_of)
    block.rule = RULES[rule]
    if rule == "predicted":
        block.predictor = predictor_of(block)
    # native code on the CPU would bring weights into a form by input; on a GPU they stay as they are
    for shard in block.shards:
        shard.matrices = {name: shard.by_neuron(name) for name in shard.matrices}
    return block


def token(seed: int = 4) -> Tensor:
    return torch.randn(1, D_MODEL, generator=torch.Generator().manual_seed(seed))


def by_operators(block: HybridMLP, x: Tensor) -> tuple[Tensor, list[list[int]]]:
    handle = block.activation.register_forward_hook(lambda *args: None)  # then nothing is fused
    block.reset_counters()
    with skipping("always"):
        out = block(x)
    handle.remove()
    counts = block.counters.tolist()
    block.reset_counters()
    return out, counts


@pytest.mark.parametrize(("shape", "activation", "rule"), CASES)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
def test_it_equals_the_operators(shape, activation, rule, split: bool, compute_dtype: str) -> None:
    block = block_of(shape, activation, rule, split, WeightFormat("nf4", 32, compute_dtype))
    for seed in range(3):
        expected, counts = by_operators(block, token(seed))
        out = torch.zeros(1, D_MODEL)
        for shard in block.shards:
            out = out + TritonMLP(block, shard).run(token(seed), rule != "none", block.counters_of(shard))
        if block.output_bias is not None:
            out = out + block.output_bias
        tolerance = 1e-5 if compute_dtype == "fp32" else 1e-2
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
        assert block.counters.tolist() == counts
        block.reset_counters()


@pytest.mark.parametrize("weights", [WeightFormat(), WeightFormat("int4_asym", 64), WeightFormat("int8", 32)])
def test_every_form_of_weights(weights: WeightFormat) -> None:
    block = block_of("gated", nn.SiLU(), "gate", True, weights)
    expected, _ = by_operators(block, token())
    steps = [TritonMLP(block, shard).run(token(), True, block.counters_of(shard)) for shard in block.shards]
    torch.testing.assert_close(sum(steps) + block.output_bias, expected, rtol=1e-3, atol=1e-4)


def test_no_neuron_and_all_neurons() -> None:
    for below in (0.0, 1e9):
        block = load("gated", nn.SiLU(), WeightFormat("nf4", 32, "fp32"))
        block.place((GPU,), torch.zeros(NEURONS, dtype=torch.int64))
        block.rule = magnitude(gate=below)
        counters = block.counters_of(block.shards[0])
        out = TritonMLP(block, block.shards[0]).run(token(), True, counters)
        expected, _ = by_operators(block, token())
        torch.testing.assert_close(out + block.output_bias, expected, rtol=1e-5, atol=1e-5)


def test_what_the_kernels_do_not_know_is_left_to_operators() -> None:
    block = load("gated", nn.Softplus(), WeightFormat("nf4", 32))
    block.place((GPU,), torch.zeros(NEURONS, dtype=torch.int64))
    with pytest.raises(NotUsual, match="Softplus"):
        TritonMLP(block, block.shards[0])


# Graphs


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Simulated tiers record and replay; how often each recording was replayed."""
    replays: list[int] = []

    def record(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
        for _ in range(module.WARM_UPS):
            step()
        output, number = step(), len(replays)
        replays.append(0)

        def replay() -> Tensor:
            replays[number] += 1
            output.copy_(step())
            return output

        return replay

    monkeypatch.setattr(module, "record", record)
    monkeypatch.setattr(module, "records_on", lambda device: True)
    monkeypatch.setattr(triton_ops, "runs_on", lambda device: True)
    return replays


def test_a_recorded_step_is_replayed_for_other_tokens(graphs: list[int]) -> None:
    block = block_of("gated", nn.ReLU(), "exact", False, WeightFormat("nf4", 32, "fp32"))
    expected = [by_operators(block, token(seed)) for seed in range(4)]
    outputs = []
    with skipping("always"):
        outputs = [block(token(seed)) for seed in range(4)]
    for out, (wanted, _) in zip(outputs, expected, strict=True):  # none was overwritten by a later replay
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    assert graphs == [4]
    assert block.counters.tolist() == torch.tensor([counts for _, counts in expected]).sum(0).tolist()
    with skipping("never"):
        block(token())
    assert graphs == [4, 1]


def test_a_rule_that_changes_is_recorded_anew(graphs: list[int]) -> None:
    block = block_of("gated", nn.SiLU(), "gate", False, WeightFormat("nf4", 32, "fp32"))
    with skipping("always"):
        block(token())
        block.rule = magnitude(gate=0.5)
        expected, _ = by_operators(block, token())
        torch.testing.assert_close(block(token()), expected, rtol=1e-5, atol=1e-5)
    assert graphs == [1, 1]


def test_a_gpu_gets_several_tokens_by_operators(graphs: list[int]) -> None:
    block = block_of("gated", nn.SiLU(), "none", False, WeightFormat("nf4", 32, "fp32"))
    x = torch.cat([token(seed) for seed in range(6)])
    together = block(x)
    assert not graphs
    torch.testing.assert_close(together[2:3], block(token(2)), rtol=1e-4, atol=1e-5)
