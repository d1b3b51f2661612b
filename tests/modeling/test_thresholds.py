"""HybridMLP under rules with thresholds: by operators beside plain PyTorch with masks, natively beside the operators,
and the form in which its weights lie.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Collection

import pytest
import torch
from torch import Tensor, nn

from engine_steps import needs_kernels
from hf_sparse.modeling import HybridMLP, SkipRule, WeightFormat, magnitude, skipping
from hf_sparse.modeling.block import FEW_ROWS
from hf_sparse.modeling.rules import RuleKind
from hf_sparse.quantization import COMPUTE_DTYPES, InputMatrix, NeuronMatrix
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

SUBSETS = (("input",), ("gate",), ("hidden",), ("input", "hidden"), ("input", "gate", "hidden"))
MOST = {"input": 1.2, "gate": 0.4, "hidden": 0.8}
FORMS = {
    "nf4": (WeightFormat("nf4", 64), torch.float32),
    "int4_asym": (WeightFormat("int4_asym", 32), torch.float32),
    "int8": (WeightFormat("int8", 32), torch.float32),
    "bf16": (WeightFormat(None), torch.bfloat16),
}


def thresholds(
    places: Collection[str],
    kind: RuleKind = "magnitude",
    sizes: tuple[int, int] = (D_MODEL, NEURONS),
    most: dict[str, float] = MOST,
) -> SkipRule:
    generator = torch.Generator().manual_seed(11)
    widths = {"input": sizes[0], "gate": sizes[1], "hidden": sizes[1]}
    return SkipRule(kind, {p: torch.rand(widths[p], generator=generator) * most[p] for p in places})


def rows_of(count: int, columns: int = D_MODEL) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count))


class Plain:
    """The block in plain PyTorch, every row by itself and whole: output, and entries kept by place."""

    def __init__(self, block: HybridMLP) -> None:
        matrices, self.biases, self.output_bias = block._whole()
        self.block, self.weights = block, {name: m.dequantize() for name, m in matrices.items()}

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[name].T + self.biases[name]

    def __call__(self, x: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, dict[str, int]]:
        """`chosen`: bool [rows, neurons], what a predictor names."""
        names, below = self.block.names, self.block.rule.below
        kept = x.abs() >= below["input"] if "input" in below else torch.ones_like(x, dtype=torch.bool)
        seen = torch.where(kept, x, 0.0)
        if names.fused:
            gate, up = self._linear(seen, names.up).chunk(2, dim=-1)[0], self._linear(x, names.up).chunk(2, dim=-1)[1]
        else:
            gate, up = self._linear(seen, names.gate or names.up), self._linear(x, names.up) if names.gate else None
        gate = self.block.activation(gate)
        active = gate.abs() >= below["gate"] if "gate" in below else gate != 0
        if chosen is not None:
            active = active & chosen
        hidden = torch.where(active, gate if up is None else gate * up, 0.0)
        stays = active & (hidden.abs() >= below["hidden"]) if "hidden" in below else active
        out = torch.where(stays, hidden, 0.0) @ self.weights[names.down] + self.output_bias
        return out, {"input": int(kept.sum()), "gate": int(active.sum()), "hidden": int(stays.sum())}


def assert_counted(block: HybridMLP, rows: int, expected: dict[str, int]) -> None:
    counted = dict(zip(block.places, block.counters.tolist(), strict=True))
    if "input" in block.rule.below:  # each tier sees the whole input
        tiers = len(block.shards)
        assert counted["input"] == [tiers * expected["input"], tiers * rows * block.projections["down"].columns]
    else:
        assert counted["input"] == [0, 0]
    for name in ("gate", "hidden"):
        assert counted[name] == [expected[name], rows * block.neurons]
    for name in block.places:
        assert block.kept(name) == (counted[name][0] / counted[name][1] if counted[name][1] else 1.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tiers", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 4, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("weight_dtype", [None, "nf4", "int4_asym", "int8"])
def test_entries_below_their_thresholds_are_left_out(
    shape: str, tiers: int, rows: int, weight_dtype: str | None
) -> None:
    block = load(shape, nn.SiLU(), WeightFormat(weight_dtype, 32))
    place(block, tiers)
    x = rows_of(rows)
    for places in SUBSETS:
        block.rule = thresholds(places)
        block.reset_counters()
        with skipping("always"):
            out = by_operators(block, x)
        expected, kept = Plain(block)(x)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert_counted(block, rows, kept)
        for name in places:
            assert 0.2 < block.kept(name) < 0.95
        with skipping("never"):
            block.reset_counters()
            assert (by_operators(block, x) - out).abs().max() > 1e-3 and not block.counters.any()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tiers", [1, 2])
@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS + 1])
@pytest.mark.parametrize("kind", ["exact", "predicted", "magnitude"])
def test_thresholds_beside_exact_zeros_and_predictors(shape: str, tiers: int, rows: int, kind: RuleKind) -> None:
    block = load(shape, nn.ReLU(), WeightFormat("nf4", 32))
    place(block, tiers)
    block.predictor = None if kind == "exact" else predictor_of(block)
    places = ("input", "hidden", *(("gate",) if kind == "magnitude" else ()))
    block.rule = thresholds(places, kind, most=MOST | {"hidden": 4.0})
    x = rows_of(rows)
    chosen = None if block.predictor is None else block.predictor.active(x)
    for compute in (by_operators, HybridMLP.__call__):
        block.reset_counters()
        with skipping("always"):
            out = compute(block, x)
        expected, kept = Plain(block)(x, chosen)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert_counted(block, rows, kept)
        assert 0 < kept["hidden"] < kept["gate"] < rows * NEURONS


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tiers", [1, 2])
@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS + 1])
def test_all_or_nothing_is_below_its_threshold(shape: str, tiers: int, rows: int) -> None:
    block = load(shape, nn.SiLU(), WeightFormat("int8", 32))
    place(block, tiers)
    x = rows_of(rows)
    with skipping("never"):
        dense = block(x)
    with skipping("always"):
        block.rule = magnitude(input=0.0, gate=0.0, hidden=0.0)
        torch.testing.assert_close(block(x), dense, rtol=1e-4, atol=1e-5)
        assert [block.kept(name) for name in block.places] == [1, 1, 1]
        for name in ("gate", "hidden"):
            block.rule = magnitude(**{name: 1e9})
            block.reset_counters()
            torch.testing.assert_close(block(x), block.output_bias.expand(rows, -1), rtol=0, atol=1e-6)
            assert block.kept("hidden") == 0
        block.rule = magnitude(input=1e9)
        block.reset_counters()
        torch.testing.assert_close(block(x), Plain(block)(x)[0], rtol=1e-4, atol=1e-5)  # gates of a zero input
        assert block.kept("input") == 0 < block.kept("gate")


def test_each_row_leaves_out_its_own_entries() -> None:
    for shape, tiers in itertools.product(SHAPES, (1, 2)):
        block = load(shape, nn.SiLU(), WeightFormat("nf4", 32))
        place(block, tiers)
        block.rule, x = thresholds(("input", "gate", "hidden")), rows_of(5)
        with skipping("always"):
            together, counts = block(x), block.counters.tolist()
            block.reset_counters()
            alone = torch.cat([block(row[None]) for row in x])
        torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-4)
        assert counts == block.counters.tolist()


def test_nan_and_infinity_are_never_below_a_threshold() -> None:
    for shape, tiers, value in itertools.product(SHAPES, (1, 2), (torch.nan, torch.inf)):
        block = load(shape, nn.ReLU(), WeightFormat("nf4", 32))
        place(block, tiers)
        block.rule = magnitude(input=1e9, gate=0.1, hidden=0.1)
        x = torch.zeros(2, D_MODEL)
        x[1, 3] = value
        with skipping("always"):
            for out in (block(x), torch.cat((block(x[:1]), block(x[1:])))):
                assert out[0].isfinite().all() and not out[1].isfinite().any()


# Natively


@needs_kernels
@pytest.mark.parametrize("isa", KERNELS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_one_native_call_equals_the_operators(
    isa: str, form: str, compute_dtype: str, use_instruction_set: Callable[[str], None], native_runs: list[int]
) -> None:
    use_instruction_set(isa)
    weights, dtype = FORMS[form]
    weights = dataclasses.replace(weights, compute_dtype=compute_dtype)
    for shape, places, tiers, bias in itertools.product(SHAPES, SUBSETS, (1, 2), (True, False)):
        sizes = (37, 83) if bias else (128, 150)
        block = load(shape, nn.SiLU(), weights, dtype, sizes=sizes, bias=bias)
        place(block, tiers)
        block.rule = thresholds(places, sizes=sizes)
        x = rows_of(1, sizes[0])
        with skipping("always"):
            assert_native_equals_operators(block, x, native_runs, tiers)
        assert all(0.05 < block.kept(name) < 0.95 for name in places)
        with skipping("never"):
            assert_native_equals_operators(block, x, native_runs, tiers)


@needs_kernels
@pytest.mark.parametrize("count", [1, 2, 3])
def test_predictors_and_threads_beside_thresholds(
    count: int, threads: Callable[[int], None], native_runs: list[int]
) -> None:
    threads(count)
    for shape, kind in itertools.product(SHAPES, ("predicted", "magnitude")):
        for weight_dtype, sizes in itertools.product(("nf4", None), ((37, 83), (257, 300))):
            block = load(shape, nn.SiLU(), WeightFormat(weight_dtype, 32), torch.bfloat16, sizes)
            place(block, 1)
            block.predictor = predictor_of(block)
            block.rule = thresholds(("input", "hidden"), kind, sizes)
            turned = isinstance(block.shards[0].matrices.get(block.skips_inputs_of), InputMatrix)
            assert turned == (kind == "magnitude" and weight_dtype is not None and shape != "fused")
            with skipping("always"):  # a predictor chooses rows: weights by input are left to the operators
                assert_native_equals_operators(block, rows_of(1, sizes[0]), native_runs, 0 if turned else 1)
            block.predictor = None
            with skipping("always"):
                assert_native_equals_operators(block, rows_of(1, sizes[0]), native_runs, 1)


@needs_kernels
def test_native_calls_follow_the_thresholds(native_runs: list[int]) -> None:
    block = load("gated", nn.SiLU(), WeightFormat("nf4", 32))
    place(block, 1)
    outs = []
    with skipping("always"):
        for places in ((), ("input",), ("hidden",), ("input", "hidden"), ("input",)):
            block.rule = thresholds(places) if places else SkipRule()
            assert_native_equals_operators(block, rows_of(1), native_runs, 1)
            outs.append(block(rows_of(1)))
    assert torch.equal(outs[1], outs[4])
    assert all((a - b).abs().max() > 1e-3 for a, b in itertools.combinations(outs[:4], 2))


# The form in which weights lie


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_whose_inputs_are_left_out_lie_by_input(shape: str) -> None:
    def forms() -> dict[str, set[type]]:
        return {name: {type(shard.matrices[name]) for shard in block.shards} for name in block.projections}

    block = load(shape, nn.SiLU(), WeightFormat("int4_asym", 32))
    place(block, 2)
    before = {name: tensor.clone() for name, tensor in block.state_dict(prefix="layer.mlp.").items()}
    dense, by_neuron = block(rows_of(3)), forms()
    size = block.bytes_per_neuron()
    assert set().union(*by_neuron.values()) == {NeuronMatrix}
    turned = by_neuron | ({} if shape == "fused" else {block.skips_inputs_of: {InputMatrix}})
    for places, expected in ((("input",), turned), (("gate",), by_neuron), (("input", "hidden"), turned)):
        block.rule = thresholds(places)
        for tiers, seed in ((2, 1), (1, 1), (3, 5)):
            place(block, tiers, seed)
            assert forms() == expected
            assert all(torch.equal(t, before[name]) for name, t in block.state_dict(prefix="layer.mlp.").items())
            assert block.bytes_per_neuron() == size
    torch.testing.assert_close(block(rows_of(3)), dense, rtol=1e-5, atol=1e-6)
    block.rule = thresholds(("input",), "exact")  # masks only
    assert forms() == by_neuron
    block.rule = SkipRule()
    assert forms() == by_neuron
    assert all(torch.equal(t, before[name]) for name, t in block.state_dict(prefix="layer.mlp.").items())


def test_copies_keep_rule_and_form() -> None:
    block = load("gated", nn.SiLU(), WeightFormat("nf4", 32))
    place(block, 2)
    block.rule = thresholds(("input", "hidden"))
    other = copy.deepcopy(block)
    assert other.rule == block.rule and isinstance(other.shards[0].matrices["gate"], InputMatrix)
    with skipping("always"):
        expected = block(rows_of(1))
        block.rule = SkipRule()
        assert torch.equal(other(rows_of(1)), expected)
        assert (block(rows_of(1)) - expected).abs().max() > 1e-3


def test_thresholds_that_do_not_fit_the_block_are_named() -> None:
    block = load("gated", nn.SiLU(), WeightFormat("nf4", 32))
    refused = r"0\.mlp rule: expected thresholds at input, gate, hidden of kind 'magnitude', got output"
    with pytest.raises(ValueError, match=refused):
        block.rule = magnitude(output=0.1)
    for name, width in (("input", D_MODEL), ("gate", NEURONS), ("hidden", NEURONS)):
        for bad in (width - 1, width + 1, 2):
            with pytest.raises(ValueError, match=rf"0\.mlp rule: below\['{name}'\]: expected 1 or {width}.*got {bad}"):
                block.rule = magnitude(**{name: torch.ones(bad)})
        block.rule = magnitude(**{name: torch.ones(width)})
    assert block.rule == magnitude(hidden=torch.ones(NEURONS))
