"""Query heads that a predictor leaves out: by modules and by native decode steps, beside transformers' own attention
whose heads are set to zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_steps import GREEDY, Save, assert_near, decoded, load, needs_kernels, pages_of, through_modules
from hf_sparse import SparseAutoModelForCausalLM
from hf_sparse.modeling import FAMILIES, HybridAttention, Predictor, SkipRule, hybrid_blocks, magnitude, skipping
from hf_sparse.plan import PlannedPredictor
from hf_sparse.quantization import instruction_sets
from masked_twin import MaskedTwin, always, counts_of, give_thresholds, split
from tiny_models import CASES, prompt_ids

APART = [case for case in CASES if not case.startswith(("phi3", "falcon", "gpt_neox", "bloom", "olmo2"))]
DECODED = [case for case in APART if FAMILIES[CASES[case][0]].decoding is not None]


def attentions(model: Any) -> list[HybridAttention]:
    return [block for block in hybrid_blocks(model) if isinstance(block, HybridAttention)]


def tensors_of(block: HybridAttention, bias: float | None = None) -> dict[str, torch.Tensor]:
    """About half of the heads, others for each token; `bias`: of every head, which decides alone where it is large."""
    generator = torch.Generator().manual_seed(block.id.layer)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    width, heads = block.width_of("input"), block.predicts
    scores = 0.3 * draw(heads) if bias is None else torch.full((heads,), bias)
    return {"fc1": draw(9, width), "fc2": draw(heads, 9), "bias": scores}


def predict_heads(model: Any, bias: float | None = None) -> None:
    """Beside thresholds for what o reads in the first layer."""
    for block in attentions(model):
        below = block.rule.below if block.id.layer == 0 else {}
        block.rule = SkipRule("predicted", {place: t for place, t in below.items() if place == "output"})
        block.predictor = Predictor(**tensors_of(block, bias))


@pytest.mark.parametrize("case", APART)
@pytest.mark.parametrize("tiers", [1, 2])
def test_modules_equal_transformers_with_heads_set_to_zero(case: str, tiers: int, saved: Save) -> None:
    model = load(saved(case))
    give_thresholds(model)
    if tiers == 2:
        split(model)
    predict_heads(model)
    twin = MaskedTwin(model)
    for rows, tokens in ((1, 1), (3, 1), (4, 9)):  # alone, a union of rows, more rows than are gathered
        ids = prompt_ids(rows, tokens, seed=tokens)
        expected = twin(ids)
        assert_near(always(model, ids), expected)
        counted, places = counts_of(model), ("heads", "output")
        of_attention = {at: counts for at, counts in twin.counts.items() if at[1] in places}
        assert {at: counts for at, counts in counted.items() if at[1] in places} == of_attention
    for block in attentions(model):
        assert 0.1 < block.kept("heads") < 0.9
        o = next(m for name, m in block.shards[0].matrices.items() if block.projections[name].writes)
        assert block.read_share_of("q_proj", o) == block.kept("heads") >= block.kept("output")


@needs_kernels
@pytest.mark.parametrize("case", DECODED)
def test_native_steps_equal_transformers_with_heads_set_to_zero(
    case: str, saved: Save, native_steps: list[int]
) -> None:
    model = load(saved(case))
    give_thresholds(model)
    predict_heads(model)
    twin, ids = MaskedTwin(model), prompt_ids(1, 23)
    model.reset_active_fraction()
    with skipping("always"):
        assert_near(decoded(model, ids), twin(ids)[:, 3:])
    assert native_steps == list(range(3, 23))
    assert counts_of(model) == twin.counts


@needs_kernels
@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16", "int8"])
def test_native_steps_leave_out_the_heads_that_modules_leave_out(
    isa: str,
    compute_dtype: str,
    saved: Save,
    use_instruction_set: Callable[[str], None],
    threads: Callable[[int], None],
    native_steps: list[int],
) -> None:
    use_instruction_set(isa)
    model, ids = load(saved("llama"), "nf4", compute_dtype), prompt_ids(1, 300)
    for count, bias in ((1, None), (2, None), (5, None), (3, 1e6), (3, -1e6)):
        threads(count)
        give_thresholds(model, ("output",), certain=True)
        predict_heads(model, bias)
        results, counts = [], []
        for context in (through_modules(model), skipping("decode")):
            model.reset_active_fraction()
            with context:
                results.append(decoded(model, ids, prompt=290))
            counts.append({at: c for at, c in counts_of(model).items() if at[1] in ("heads", "output")})
        assert_near(results[1], results[0], 1e-5 if compute_dtype == "fp32" else 2e-2)
        if compute_dtype == "fp32" or bias is not None:  # rounding turns a score near zero to either side
            assert counts[0] == counts[1]
        kept = [counts[1][block.id, "heads"] for block in attentions(model)]
        assert all(k == (0 if bias == -1e6 else of if bias == 1e6 else k) and of == 60 for k, of in kept)
    assert len(native_steps) == (0 if isa == "torch" else 5 * 10)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_caches_of_few_bits_beside_predicted_heads(dtype: torch.dtype, saved: Save, native_steps: list[int]) -> None:
    model, ids = load(saved("llama")), prompt_ids(1, 20)
    predict_heads(model)
    model.cache_dtype = dtype
    steps = decoded(model, ids, prompt=1)
    assert len(native_steps) == 19
    with through_modules(model):
        assert_near(steps, decoded(model, ids, prompt=1, cache=pages_of(model, dtype)), 2e-2)


def test_all_heads_are_the_dense_model_and_none_is_no_attention(saved: Save) -> None:
    model, ids = load(saved("llama")), prompt_ids(2, 6)
    with torch.no_grad():
        dense = model(ids).logits
    predict_heads(model, 1e6)
    assert_near(always(model, ids), dense)
    assert model.read_share() > 1  # all is read, and the predictors
    predict_heads(model, -1e6)
    twin = MaskedTwin(model)
    for layer in twin.model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    assert_near(always(model, ids), twin(ids))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, dense)  # a prompt
    for block in attentions(model):  # one that no rule asks is not read
        block.rule = SkipRule("magnitude")
    assert_near(always(model, ids), dense)
    assert all(block.read_bytes() == block.weight_bytes for block in attentions(model))


@pytest.mark.parametrize("tiers", [1, 2])
def test_each_row_of_a_batch_generates_as_alone(tiers: int, saved: Save) -> None:
    model, ids = load(saved("llama")), prompt_ids(3, 6)
    if tiers == 2:
        split(model)
    predict_heads(model)
    together = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    for row, expected in zip(ids, together, strict=True):
        alone = model.generate(row[None], attention_mask=torch.ones_like(row)[None], **GREEDY)
        assert torch.equal(alone[0], expected)


def test_a_plan_keeps_predictors_of_heads(saved: Save, tmp_path: Path) -> None:
    model, ids = load(saved("llama")), prompt_ids(1, 9)
    blocks = attentions(model)
    planned = {b.id: PlannedPredictor(tensors_of(b), "int8", nbytes=77, kept=0.5) for b in blocks}
    rules = {b.id: SkipRule("predicted", {"output": torch.full((48,), 1e-3)}) for b in blocks}
    plan = dataclasses.replace(model.plan, rules=model.plan.rules | rules, predictors=planned)
    model.use_plan(plan)
    assert all(block.predictor_in_use is not None for block in blocks)
    model.save_pretrained(tmp_path)
    again = SparseAutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(decoded(again, ids), decoded(model, ids))
    assert again.resident_bytes() == model.resident_bytes() > load(saved("llama")).resident_bytes()
    assert all(counts[0] < counts[1] for (_, what), counts in counts_of(again).items() if what == "heads")


def test_what_cannot_be_predicted_is_refused(saved: Save) -> None:
    for case in ("phi3", "olmo2"):  # one matrix for q, k and v; a norm over all heads
        block = attentions(load(saved(case)))[0]
        assert block.predicts == 0
        with pytest.raises(ValueError, match=r"0\.attention predictor: expected \[inputs, scores\] of \(48, 0\)"):
            block.predictor = Predictor(torch.ones(5, 48), torch.ones(6, 5), torch.ones(6))
    block = attentions(load(saved("llama")))[0]
    for inputs, scores in ((47, 6), (48, 3), (48, 48)):
        with pytest.raises(ValueError, match=rf"expected \[inputs, scores\] of \(48, 6\), got \({inputs}, {scores}\)"):
            block.predictor = Predictor(torch.ones(5, inputs), torch.ones(scores, 5), torch.ones(scores))
    with pytest.raises(ValueError, match=r"thresholds at output of kind 'predicted', got input"):
        block.rule = SkipRule("predicted", magnitude(input=0.1).below)
