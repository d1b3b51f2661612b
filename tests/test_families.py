"""The family table is the test matrix: each case is a checkpoint saved by transformers, and transformers' output is the
reference.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.modeling import FAMILIES, Placement, Tier, hybrid_blocks
from tiny_models import CASES, plain_twin, prompt_ids, save_checkpoint

QUICK = {"calibration_tokens": 64, "max_perplexity_increase": 0}


def two_tiers(budget=None):
    """A second CPU tier in the GPU's place: the code path is the same."""
    return (Tier("fast", budget=budget, bandwidth=100e9), Tier("cpu"))


def half_budget(model):
    total = sum(tier.nbytes for tier in model.placement_summary().tiers)
    return (total + model.resident_bytes()) // 2


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    return directory, save_checkpoint(request.param, directory)


def test_every_family_of_the_table_is_tested():
    assert {model_type for model_type, _ in CASES.values()} == set(FAMILIES)


@torch.no_grad()
def same_logits(model, reference, tolerance=2e-6):
    ids = prompt_ids(2, 13)
    expected, got = reference(ids).logits, model(ids).logits
    assert (expected - got).abs().max() <= tolerance * expected.abs().max() + 1e-6


def same_text(model, reference):
    ids = prompt_ids(2, 9, seed=1)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))


def test_unquantized_equals_transformers(checkpoint):
    directory, reference = checkpoint
    model = SparseAutoModelForCausalLM.from_pretrained(directory, **QUICK)
    same_logits(model, reference)
    same_text(model, reference)


@pytest.mark.parametrize("weight_dtype", ["nf4", "int8"])
def test_quantized_equals_transformers_on_the_dequantized_weights(checkpoint, weight_dtype):
    directory, _ = checkpoint
    quantization = WeightOnlyQuantConfig(weight_dtype=weight_dtype, compute_dtype="fp32", group_size=32)
    model = SparseAutoModelForCausalLM.from_pretrained(directory, quantization_config=quantization, **QUICK)
    reference = plain_twin(model)
    same_logits(model, reference, tolerance=1e-5)
    same_text(model, reference)


def test_two_tiers_equal_one_within_the_budget(checkpoint):
    directory, reference = checkpoint
    whole = SparseAutoModelForCausalLM.from_pretrained(directory, **QUICK)
    budget = half_budget(whole)
    model = SparseAutoModelForCausalLM.from_pretrained(directory, tiers=two_tiers(budget), **QUICK)
    fast, cpu = model.placement_summary().tiers
    assert 0.8 * budget < fast.nbytes <= budget and cpu.nbytes > 0
    same_logits(model, reference, tolerance=5e-6)
    same_text(model, reference)


def test_attention_weights_of_two_tiers_equal_transformers(checkpoint):
    directory, _ = checkpoint
    whole = SparseAutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", **QUICK)
    reference = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    generator = torch.Generator().manual_seed(6)
    assignment = {b.id: torch.randint(0, 2, (b.neurons,), generator=generator) for b in hybrid_blocks(whole)}
    whole.place(Placement(two_tiers(), assignment))
    ids = prompt_ids(2, 9)
    with torch.no_grad():
        got, expected = (one(ids, output_attentions=True).attentions for one in (whole, reference))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_saved_model_loads_again_as_it_was(checkpoint, tmp_path):
    directory, _ = checkpoint
    quantization = WeightOnlyQuantConfig(group_size=32)
    model = SparseAutoModelForCausalLM.from_pretrained(directory, quantization_config=quantization, **QUICK)
    model.save_pretrained(tmp_path / "saved")
    again = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.quantization_config == quantization
    assert again.plan.calibration_report == model.plan.calibration_report  # not calibrated again
    ids = prompt_ids(2, 13)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    heads = [one.get_output_embeddings() for one in (model, again)]
    assert [head.tied for head in heads] == [model.config.tie_word_embeddings] * 2
