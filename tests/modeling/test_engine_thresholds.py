"""Models under rules with thresholds at every place of MLPs and attention: by modules, by native calls and by native
decode steps, beside transformers' own modules with masks; prompts, and models that are saved.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine_steps import (
    GREEDY,
    QUICK,
    Save,
    assert_near,
    decoded,
    load,
    mlps,
    needs_kernels,
    pages_of,
    predictor_of,
    through_modules,
)
from hf_sparse import SparseAutoModelForCausalLM
from hf_sparse.modeling import (
    FAMILIES,
    HybridMLP,
    SkipRule,
    hybrid_blocks,
    magnitude,
    note_forward,
    skipping,
)
from hf_sparse.quantization import InputMatrix, instruction_sets
from masked_twin import EVERYWHERE, MaskedTwin, always, counts_of, give_thresholds, split
from tiny_models import CASES, prompt_ids

DECODED = [case for case, (model_type, _) in CASES.items() if FAMILIES[model_type].decoding is not None]
OTHERS = ["opt", "nemotron", "gpt_neox", "falcon-40b", "bloom"]  # all without gates
SUBSETS = (("input",), ("gate",), ("hidden",), ("output",), EVERYWHERE)


def assert_skips(model: Any, places: tuple[str, ...]) -> None:
    """At each of `places` some entries are left out, and some are kept."""
    for block in hybrid_blocks(model):
        for place in set(places) & set(block.takes("magnitude")):
            assert 0.1 < block.kept(place) < 0.95, (block.id, place)


# By modules, and natively where they call native code for one token


@pytest.mark.parametrize("case", ["llama-tied-bias", "phi3", "gemma3", "olmo2", *OTHERS])
@pytest.mark.parametrize("tiers", [1, 2])
def test_modules_equal_transformers_with_masks(case: str, tiers: int, saved: Save) -> None:
    model = load(saved(case))
    give_thresholds(model)
    if tiers == 2:
        split(model)
    twin = MaskedTwin(model)
    for rows, tokens in ((1, 1), (3, 1), (4, 9)):  # alone, a union of rows, more rows than are gathered
        ids = prompt_ids(rows, tokens, seed=tokens)
        expected = twin(ids)
        for natively in (False, True):
            if natively:
                out = always(model, ids)
            else:
                with through_modules(model):
                    out = always(model, ids)
            assert_near(out, expected)
            counted = counts_of(model)
            if tiers == 2:  # what reads a whole input does so on each tier
                split_blocks = {block.id for block in hybrid_blocks(model) if len(block.shards) == 2}
                for (id, place), counts in counted.items():
                    if place == "input" and id in split_blocks:
                        counts[:] = [count // 2 for count in counts]
            assert counted == twin.counts
    assert_skips(model, EVERYWHERE)


@pytest.mark.parametrize("case", ["llama", "phi3", "opt"])
@pytest.mark.parametrize("places", SUBSETS, ids="+".join)
def test_each_place_by_itself(case: str, places: tuple[str, ...], saved: Save) -> None:
    model, ids = load(saved(case)), prompt_ids(2, 5)
    with skipping("never"), torch.no_grad():
        dense = model(ids).logits
    for alike in (False, True):
        give_thresholds(model, places, alike=alike)
        twin = MaskedTwin(model)
        assert_near(always(model, ids), twin(ids))
        assert counts_of(model) == twin.counts
        assert (twin(ids) - dense).abs().max() > 1e-3
        assert_skips(model, places)


def test_weights_that_are_not_packed(saved: Save) -> None:
    model = copy.deepcopy(SparseAutoModelForCausalLM.from_pretrained(saved("llama"), **QUICK))
    give_thresholds(model)
    twin = MaskedTwin(model)
    for ids in (prompt_ids(1, 1), prompt_ids(3, 4)):
        assert_near(always(model, ids), twin(ids))
        assert counts_of(model) == twin.counts
    assert not any(isinstance(m, InputMatrix) for b in hybrid_blocks(model) for m in b.shards[0].matrices.values())
    ids = prompt_ids(1, 12)
    with skipping("always"):
        assert_near(decoded(model, ids), twin(ids)[:, 3:])


def test_exact_zeros_with_thresholds_beside(saved: Save) -> None:
    model = load(saved("opt"))
    give_thresholds(model, ("input", "hidden", "output"), kind="exact")
    twin, ids = MaskedTwin(model), prompt_ids(3, 3)
    assert_near(always(model, ids), twin(ids))
    assert counts_of(model) == twin.counts
    for layer in range(3):
        kept = {place: twin.counts[mlps(model)[layer].id, place][0] for place in ("gate", "hidden")}
        assert kept["hidden"] < kept["gate"]


# Native decode steps


@needs_kernels
@pytest.mark.parametrize("case", DECODED)
@pytest.mark.parametrize("weight_dtype", ["nf4", "int4_asym"])
def test_native_steps_equal_transformers_with_masks(
    case: str, weight_dtype: str, saved: Save, native_steps: list[int]
) -> None:
    model = load(saved(case), weight_dtype)
    give_thresholds(model)
    twin, ids = MaskedTwin(model), prompt_ids(1, 23)
    model.reset_active_fraction()
    with skipping("always"):
        assert_near(decoded(model, ids), twin(ids)[:, 3:])
    assert native_steps == list(range(3, 23))
    assert counts_of(model) == twin.counts
    assert_skips(model, EVERYWHERE)


@needs_kernels
@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("case", ["llama", "phi3"])
def test_native_steps_leave_out_what_modules_leave_out(
    isa: str,
    compute_dtype: str,
    case: str,
    saved: Save,
    use_instruction_set: Callable[[str], None],
    threads: Callable[[int], None],
    native_steps: list[int],
) -> None:
    use_instruction_set(isa)
    model, ids = load(saved(case), "nf4", compute_dtype), prompt_ids(1, 15)
    settings = ((1, EVERYWHERE, False), (2, EVERYWHERE, True), (3, ("input", "output"), True), (2, ("gate",), False))
    for count, places, certain in settings:
        threads(count)
        give_thresholds(model, places, certain=certain)
        counts, results = [], []
        for context in (through_modules(model), skipping("decode")):
            model.reset_active_fraction()
            with context:
                results.append(decoded(model, ids))
            counts.append(counts_of(model))
        # Of what is rounded, an entry at its threshold may fall to either side.
        tolerance = 1e-5 if compute_dtype == "fp32" else 2e-2 if certain else 0.2
        assert_near(results[1], results[0], tolerance)
        assert counts[0].keys() == counts[1].keys()
        for at, (kept, offered) in counts[0].items():
            natively, also_offered = counts[1][at]
            assert also_offered == offered > 0
            falls = 0 if compute_dtype == "fp32" or (certain and at[1] != "gate") else 0.02 * offered
            assert abs(natively - kept) <= falls, at
    assert len(native_steps) == (0 if isa == "torch" else 4 * 12)


@needs_kernels
def test_rules_of_every_kind_beside_each_other(saved: Save, native_steps: list[int]) -> None:
    """Exact zeros, a predictor and thresholds in three layers of one model."""
    model, ids = load(saved("llama", hidden_act="relu")), prompt_ids(1, 20)
    give_thresholds(model)
    first, second, _ = mlps(model)
    first.rule = SkipRule("exact", {"hidden": first.rule.below["hidden"]})
    second.rule = SkipRule("predicted", {name: second.rule.below[name] for name in ("input", "hidden")})
    second.predictor = predictor_of(second, 7)
    model.reset_active_fraction()
    steps, counts = decoded(model, ids), counts_of(model)
    assert len(native_steps) == 17
    model.reset_active_fraction()
    with through_modules(model):
        assert_near(steps, decoded(model, ids))
    assert counts_of(model) == counts
    assert (first.id, "input") not in counts and counts[second.id, "hidden"][0] < counts[second.id, "gate"][0]
    second.rule = magnitude(input=0.1)  # by input, where a predictor chooses rows: nothing native does both
    steps = decoded(model, ids)
    assert len(native_steps) == 17
    with through_modules(model):
        assert_near(steps, decoded(model, ids))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_caches_of_few_bits_beside_thresholds(dtype: torch.dtype, saved: Save, native_steps: list[int]) -> None:
    model, ids = load(saved("llama")), prompt_ids(1, 20)
    give_thresholds(model, certain=True)
    model.cache_dtype = dtype
    steps = decoded(model, ids, prompt=1)
    assert len(native_steps) == 19
    with through_modules(model):
        assert_near(steps, decoded(model, ids, prompt=1, cache=pages_of(model, dtype)), 2e-2)


@needs_kernels
def test_a_copy_and_another_rule_take_effect_at_once(saved: Save, native_steps: list[int]) -> None:
    model, ids = load(saved("llama")), prompt_ids(1, 12)
    dense = decoded(model, ids)
    give_thresholds(model)
    steps = decoded(model, ids)
    other = copy.deepcopy(model)
    for block in hybrid_blocks(model):
        before = decoded(model, ids)
        block.rule = SkipRule()
        assert (decoded(model, ids) - before).abs().max() > 1e-5
    assert torch.equal(decoded(model, ids), dense)
    assert torch.equal(decoded(other, ids), steps)
    assert (steps - dense).abs().max() > 1e-3
    assert len(native_steps) == 9 * (2 + 2 * 6 + 2)


# Prompts


@pytest.mark.parametrize("case", ["llama", "phi3", "opt"])
def test_prompts_are_computed_whole(case: str, saved: Save) -> None:
    model, ids = load(saved(case)), prompt_ids(2, 7)
    with torch.no_grad():
        dense, alone = model(ids).logits, model(ids[:1, :1]).logits
        give_thresholds(model)
        model.reset_active_fraction()
        assert torch.equal(model(ids).logits, dense)
        assert_near(model(ids[:1, :1]).logits, alone)  # one token may be summed in another order
        assert counts_of(model) == {} and model.read_share() is None
        cached = model(ids, use_cache=True)
        model(input_ids=ids[:, :1], cache=cached.cache)
    counted = counts_of(model)
    assert counted and all(offered % 2 == 0 for _, offered in counted.values())
    for block in hybrid_blocks(model):
        for place in block.takes("magnitude"):
            assert counted[block.id, place][1] == 2 * block.width_of(place)


@pytest.mark.parametrize("case", CASES)
def test_every_family_leaves_out_in_generation_and_not_in_prompts(case: str, saved: Save) -> None:
    note_forward(1, 5)  # as a decode step of another model leaves it
    model, ids = load(saved(case)), prompt_ids(1, 6)
    give_thresholds(model, ("gate", "output"))
    model.reset_active_fraction()
    with torch.no_grad():
        model(ids)
    assert counts_of(model) == {}
    model.generate(ids, attention_mask=torch.ones_like(ids), **(GREEDY | {"max_new_tokens": 5}))
    for (id, place), (_, offered) in counts_of(model).items():
        block = next(block for block in hybrid_blocks(model) if block.id == id)
        assert offered == 4 * block.width_of(place)
    assert len(counts_of(model)) == 9  # gates, hidden states and outputs of three layers


@pytest.mark.parametrize("tiers", [1, 2])
def test_each_row_of_a_batch_generates_as_alone(tiers: int, saved: Save) -> None:
    model, ids = load(saved("llama")), prompt_ids(3, 6)
    give_thresholds(model)
    if tiers == 2:
        split(model)
    together = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    for row, expected in zip(ids, together, strict=True):
        alone = model.generate(row[None], attention_mask=torch.ones_like(row)[None], **GREEDY)
        assert torch.equal(alone[0], expected)


# Saving


@pytest.mark.parametrize("case", ["llama-tied-bias", "phi3", "opt"])
@pytest.mark.parametrize("tiers", [1, 2])
def test_a_model_with_thresholds_is_saved_by_neuron_and_loads_as_it_was(
    case: str, tiers: int, saved: Save, tmp_path: Path
) -> None:
    model, ids = load(saved(case)), prompt_ids(1, 9)
    if tiers == 2:
        split(model)
    model.save_pretrained(tmp_path / "dense")
    give_thresholds(model)
    rules = {block.id: block.rule for block in hybrid_blocks(model)}
    model.use_plan(dataclasses.replace(model.plan, rules=rules))
    model.save_pretrained(tmp_path / "rules")
    dense, stored = (load_file(tmp_path / name / "model.safetensors") for name in ("dense", "rules"))
    assert dense.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in dense.items())
    again = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "rules")
    assert {block.id: block.rule for block in hybrid_blocks(again)} == rules
    for block, loaded in zip(hybrid_blocks(model), hybrid_blocks(again), strict=True):
        names = block.shards[0].matrices
        assert {name: type(m) for name, m in names.items()} == {
            name: type(m) for name, m in loaded.shards[0].matrices.items()
        }
        if isinstance(block, HybridMLP) and case != "phi3":
            assert isinstance(names[block.skips_inputs_of], InputMatrix)
    assert_near(decoded(again, ids), decoded(model, ids), 1e-5 if tiers == 2 else 0)
    assert torch.equal(again.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
    again.save_pretrained(tmp_path / "again")
    rewritten = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(tensor, rewritten[name]) for name, tensor in dense.items())


def test_thresholds_that_an_attention_cannot_use_are_refused(saved: Save) -> None:
    attention = next(block for block in hybrid_blocks(load(saved("phi3"))) if block.id.kind == "attention")
    with pytest.raises(
        ValueError, match=r"0\.attention rule: expected thresholds at output of kind 'magnitude', got input"
    ):
        attention.rule = magnitude(input=0.1)
    with pytest.raises(
        ValueError, match=r"0\.attention rule: expected thresholds at output of kind 'magnitude', got gate, hidden"
    ):
        attention.rule = magnitude(gate=0.1, hidden=0.2)
    with pytest.raises(ValueError, match=r"0\.attention rule: below\['output'\]: expected 1 or 48, got 47"):
        attention.rule = magnitude(output=torch.ones(47))
    assert attention.rule == SkipRule()
