"""Rules in decode steps of one native call: what they leave out and what is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine_steps import (
    RULES,
    Save,
    assert_near,
    at_once,
    decoded,
    load,
    mlps,
    needs_kernels,
    set_rule,
    through_modules,
)
from hf_sparse.modeling import SkipRule, magnitude, skipping
from tiny_models import plain_twin, prompt_ids

pytestmark = needs_kernels


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("case", ["llama-tied-bias", "phi3"])
@pytest.mark.parametrize("compute_dtype", ["fp32", "int8"])
def test_rules_leave_out_what_the_blocks_leave_out(
    name: str, case: str, compute_dtype: str, saved: Save, native_steps: list[int], threads: Callable[[int], None]
) -> None:
    threads(2)
    model = load(saved(case, hidden_act=RULES[name][2]), "nf4", compute_dtype)
    set_rule(model, name)
    ids = prompt_ids(1, 23)
    fractions, results = [], []
    for context in (through_modules(model), skipping("decode")):
        model.reset_active_fraction()
        with context:
            results.append(decoded(model, ids))
        fractions.append([block.counters.tolist() for block in mlps(model)])
    assert len(native_steps) == 20
    by_modules, natively = results
    # With activations rounded, a neuron at the threshold may fall to either side.
    assert_near(natively, by_modules, 1e-5 if compute_dtype == "fp32" else 1e-2)
    for by_module, of_native in zip(*fractions, strict=True):
        assert [offered for _, offered in by_module] == [offered for _, offered in of_native] == [0, 20 * 88, 20 * 88]
        for (expected, _), (computed, _) in zip(by_module, of_native, strict=True):
            assert abs(computed - expected) <= (0 if compute_dtype == "fp32" else 8)
        assert of_native[1] == of_native[2]  # a gate that stays has its neuron computed to the end
    share = model.active_fraction()
    assert share == 1 if name == "everything" else share == 0 if name == "nothing" else 0 < share < 1


@pytest.mark.parametrize("name", ["magnitude", "predicted, silu"])
def test_skipping_says_whether_rules_apply(name: str, saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    set_rule(model, name)
    ids = prompt_ids(1, 20)
    model.reset_active_fraction()
    with skipping("never"):
        assert_near(decoded(model, ids), at_once(plain_twin(model), ids))
    assert model.active_fraction() is None
    with skipping("always"):
        always = decoded(model, ids)
        with through_modules(model):
            assert_near(always, decoded(model, ids))
    assert (always - decoded(model, ids)).abs().max() > 1e-3  # the prompt too leaves out neurons
    assert len(native_steps) == 3 * 17


def test_another_rule_or_predictor_takes_effect_at_once(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(1, 12)
    dense = decoded(model, ids)
    for name in ("magnitude", "predicted, silu", "predicted and magnitude", "nothing"):
        set_rule(model, name)
        steps = decoded(model, ids)
        assert (steps - dense).abs().max() > 1e-3
        with through_modules(model):
            assert_near(steps, decoded(model, ids))
    set_rule(model, "magnitude")
    before = decoded(model, ids)
    mlps(model)[1].rule = magnitude(gate=0.04)  # one block is enough
    assert (decoded(model, ids) - before).abs().max() > 1e-4
    for block in mlps(model):
        block.rule, block.predictor = SkipRule(), None
    assert torch.equal(decoded(model, ids), dense)
    assert len(native_steps) == 8 * 9


def test_counts_go_on_when_the_engine_is_made_anew(saved: Save) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(1, 13)
    set_rule(model, "magnitude")
    decoded(model, ids)
    first = [block.counters.tolist() for block in mlps(model)]
    set_rule(model, "nothing")
    decoded(model, ids)
    again = [block.counters.tolist() for block in mlps(model)]
    assert again == [[[kept, 2 * offered] for kept, offered in of_block] for of_block in first]
    assert all(kept and offered for of_block in first for kept, offered in of_block[1:])
    model.reset_active_fraction()
    assert model.active_fraction() is None
    decoded(model, ids)
    assert model.active_fraction() == 0
