"""Estimates for machines that are not at hand: the activity assumed, what a config says of a model, the placements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.catalogue import known_device
from hf_sparse.cost_model import PlacementBlock
from hf_sparse.estimate import EFFICIENCY, Activity, find_plan, layer_split, model_blocks, neuron_split, tiers_of
from hf_sparse.modeling import Tier, WeightFormat
from hf_sparse.placing import placement_blocks
from tiny_models import CASES, save_checkpoint

CACHE_TOKENS = 37
FAMILIES = ("llama", "llama-tied-bias", "phi3", "opt", "falcon-40b", "gpt_neox", "bloom", "gemma2")


@given(
    mean=st.floats(0.02, 0.5),
    hottest=st.floats(0.1, 0.45),
    more=st.floats(0.1, 0.9),
    neurons=st.integers(500, 3000),
    seed=st.integers(0, 9),
)
@settings(deadline=None, max_examples=30)
def test_fractions_have_the_mean_and_the_skew(
    mean: float, hottest: float, more: float, neurons: int, seed: int
) -> None:
    top = round(hottest * neurons)
    # none is active for more than every token, so that the hottest can take no more than this
    most = min(1.0, hottest / mean)
    takes = hottest + more * (most - hottest) * 0.9
    found = Activity(mean, hottest, takes).fractions(neurons, seed)
    assert found.shape == (neurons,) and float(found.min()) >= 0 and float(found.max()) <= 1
    assert float(found.mean()) == pytest.approx(mean, rel=1e-6)
    share = float(found.sort(descending=True).values[:top].sum() / found.sum())
    assert share == pytest.approx(takes, abs=0.01)


def test_every_neuron_active() -> None:
    assert Activity().fractions(11).tolist() == [1.0] * 11


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"mean": 0.0}, "mean: expected a share above 0 and at most 1, got 0.0"),
        ({"mean": 1.1}, "mean: .* got 1.1"),
        ({"mean": float("nan")}, "mean: .* got nan"),
        ({"hottest": -0.2}, "hottest: .* got -0.2"),
        ({"takes": 2.0}, "takes: .* got 2.0"),
        ({"hottest": 0.5, "takes": 0.4}, "takes: the hottest 50% take at least as much, got 40%"),
    ],
)
def test_activities_that_cannot_be(fields: dict[str, float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Activity(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("weight_dtype", [None, "nf4"])
@pytest.mark.parametrize("case", FAMILIES)
def test_a_config_says_what_the_loaded_model_says(case: str, weight_dtype: str | None, tmp_path: Path) -> None:
    save_checkpoint(case, tmp_path)
    quantization = None if weight_dtype is None else WeightOnlyQuantConfig(weight_dtype=weight_dtype, group_size=32)
    model = SparseAutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=quantization, max_perplexity_increase=0, calibration_tokens=64
    )
    loaded = placement_blocks(model, CACHE_TOKENS)
    head = None if weight_dtype is None else WeightFormat("int8", 32, "int8")
    made = model_blocks(
        AutoConfig.from_pretrained(tmp_path),
        WeightFormat(weight_dtype, 32, "int8"),
        head,
        Activity(predicted=bool(model.plan.predictors)),
        model.plan,
        dtype=model.cache_dtype or model.dtype,
        cache_tokens=CACHE_TOKENS,
    )
    assert [block.id for block in made] == [block.id for block in loaded]
    for mine, theirs in zip(made, loaded, strict=True):
        assert mine.bytes_per_neuron == theirs.bytes_per_neuron, mine.id
        torch.testing.assert_close(mine.read_bytes, theirs.read_bytes, rtol=1e-9, atol=0, msg=str(mine.id))


def blocks_and_tiers(share: float) -> tuple[list[PlacementBlock], tuple[Tier, Tier], list[int]]:
    """A random power law on a tiny llama, a GPU with room for `share` of it, and the bytes of each block."""
    model_type, fields = CASES["llama"]
    blocks = model_blocks(
        AutoConfig.for_model(model_type, **fields | {"hidden_act": "relu"}),
        WeightFormat(),
        None,
        Activity(0.2, predicted=True),
        cache_tokens=CACHE_TOKENS,
    )
    sizes = [block.bytes_per_neuron * block.neurons + block.shared_bytes for block in blocks]
    gpu = Tier("cuda:0", budget=int(share * sum(sizes)), bandwidth=1e9, sync_seconds=1e-9, launch_seconds=1e-9)
    return blocks, (gpu, Tier("cpu", bandwidth=1e8)), sizes


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 2.0])
def test_layers_fill_the_gpu_from_the_last(share: float) -> None:
    blocks, tiers, sizes = blocks_and_tiers(share)
    budget = tiers[0].budget
    assert budget is not None
    found = layer_split(blocks, tiers, dense=False)
    assert found.fast_bytes <= budget
    # the head, then whole layers from the last on, while there is room
    layers = [size for block, size in zip(blocks, sizes, strict=True) if block.id.kind in ("mlp", "attention")]
    groups = [sizes[-1], *(sum(layers[at : at + 2]) for at in range(len(layers) - 2, -1, -2))]
    expected = 0
    for group in groups:
        if expected + group > budget:
            break
        expected += group
    assert found.fast_bytes == expected
    assert layer_split(blocks, tiers, dense=True).fast_bytes == expected


def test_a_plan_beside_the_model_is_found_and_must_fit(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    assert find_plan(tmp_path, None) is None
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path, max_perplexity_increase=0, calibration_tokens=64)
    plan = find_plan(tmp_path, None)
    assert plan is not None and plan.blocks.keys() == model.plan.blocks.keys()
    assert find_plan(tmp_path / "nowhere", model.plan_directory) is not None
    other = AutoConfig.from_pretrained(tmp_path, intermediate_size=96)
    with pytest.raises(ValueError, match=r"plan: block 0.mlp of the model has 96 neurons"):
        model_blocks(other, WeightFormat(), None, Activity(), plan)


def test_devices_and_their_efficiency() -> None:
    gpu, cpu, budget = known_device("RTX 4090"), known_device("i9-13900K"), 10**9
    tiers = tiers_of([(gpu, budget), (gpu, budget // 2)], cpu)
    assert [(tier.name, tier.budget) for tier in tiers] == [("cuda:0", budget), ("cuda:1", budget // 2), ("cpu", None)]
    assert tiers[0].bandwidth == EFFICIENCY * gpu.bandwidth() and tiers[0].copy_bandwidth == gpu.copy_to_bandwidth
    measured = tiers_of([], replace(cpu, measured=True))
    assert measured[0].bandwidth == cpu.bandwidth()


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.9])
def test_neurons_are_never_slower_than_layers(share: float) -> None:
    blocks, tiers, _ = blocks_and_tiers(share)
    ours, solution = neuron_split(blocks, tiers)
    assert ours.fast_bytes <= (tiers[0].budget or 0)
    assert ours.token_seconds <= layer_split(blocks, tiers, dense=False).token_seconds * (1 + solution.gap + 1e-9)
