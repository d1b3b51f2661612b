import json
import math
from pydoc_data.topics import topics

import pytest
import torch
from transformers.utils import logging as transformers_logging

from hf_sparse import SparseAutoModelForCausalLM
from hf_sparse.evaluation import perplexity
from hf_sparse.modeling import HybridMLP, hybrid_blocks, skipping
from tiny_models import prompt_ids, save_checkpoint, save_tokenizer

TEXT = topics["assignment"] + topics["for"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    save_checkpoint("llama", directory)
    save_tokenizer(directory)
    return directory


def mlps(model):
    return [block for block in hybrid_blocks(model) if isinstance(block, HybridMLP)]


def load(directory, **options):
    return SparseAutoModelForCausalLM.from_pretrained(
        directory, **({"calibration_tokens": 512, "load_in_4bit": True} | options)
    )


@pytest.mark.parametrize("increase", [0.002, 0.2])
def test_the_quality_budget_is_kept_and_used(llama, increase):
    model = load(llama, max_perplexity_increase=increase, calibration_texts=[TEXT])
    report = model.plan.calibration_report
    assert report["sparse_perplexity"] <= report["dense_perplexity"] * (1 + increase)
    assert {rule["kind"] for id, rule in model.plan.rules.items()} == {"magnitude"}
    assert all(block.rule.kind == "magnitude" and block.rule.threshold > 0 for block in mlps(model))
    assert report["tokens"] == 480 and report["held_out_tokens"] == 160  # rows of 160, the model's positions
    model.reset_active_fraction()
    with torch.no_grad(), skipping("always"):
        model(prompt_ids(1, 20))
    assert 0.2 < model.active_fraction() < 1


def test_a_larger_budget_skips_more(llama):
    fractions = []
    for increase in (0.002, 0.2):
        model = load(llama, max_perplexity_increase=increase, calibration_texts=[TEXT])
        fractions.append(sum(float(profile.active_fraction.mean()) for profile in model.plan.blocks.values()))
    assert fractions[1] < fractions[0]


def test_no_budget_means_no_rule_for_a_smooth_activation(llama):
    model = load(llama, max_perplexity_increase=0)
    assert all(block.rule.kind == "none" for block in mlps(model))
    report = model.plan.calibration_report
    assert report["sparse_perplexity"] == report["dense_perplexity"]


def test_the_profile_is_what_a_plain_count_gives(llama):
    model = load(llama, max_perplexity_increase=0.2, calibration_texts=[TEXT], load_in_4bit=False)
    tokenizer_ids = torch.tensor(__import__("transformers").AutoTokenizer.from_pretrained(llama)(TEXT).input_ids)
    length = 160
    rows = tokenizer_ids[: 512 // length * length].view(-1, length)
    training = rows[0::2]
    block = mlps(model)[1]
    seen = []
    handle = block.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad(), skipping("always"):
        for row in training:
            model(row[None])
    handle.remove()
    x = torch.cat(seen, dim=1)[0]
    weights = block.dequantize()
    gate = torch.nn.functional.silu(x @ weights["mlp.gate_proj.weight"].T)
    active = (gate.abs() >= block.rule.threshold).float().mean(0)
    torch.testing.assert_close(model.plan.blocks[block.id].active_fraction, active, rtol=0, atol=0.02)


@pytest.mark.parametrize("case", ["opt", "nemotron"])
def test_relu_models_skip_exactly_or_by_a_predictor_that_pays(case, tmp_path):
    save_checkpoint(case, tmp_path)
    model = load(tmp_path, max_perplexity_increase=0.5)
    kinds = {rule["kind"] for rule in model.plan.rules.values()}
    assert kinds <= {"exact", "predicted"}
    assert set(model.plan.predictors) == {id for id, rule in model.plan.rules.items() if rule["kind"] == "predicted"}
    exact = load(tmp_path, max_perplexity_increase=0)
    assert {rule["kind"] for rule in exact.plan.rules.values()} == {"exact"}
    ids = prompt_ids(1, 12)
    with torch.no_grad():
        with skipping("never"):
            dense = exact(ids).logits
        with skipping("always"):
            skipped = exact(ids).logits
    torch.testing.assert_close(dense, skipped, rtol=1e-4, atol=1e-4)
    exact.generate(ids, max_new_tokens=8, do_sample=False)
    assert 0 < exact.active_fraction() < 1


def test_predictors_are_trained_used_and_kept_in_the_plan(tmp_path):
    """An OPT in which few neurons fire, and which depend on few directions of the input: what a predictor can learn."""
    directory = tmp_path / "model"
    reference = save_checkpoint("opt", directory, ffn_dim=320)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in reference.model.decoder.layers:
            directions = torch.randn(3, 48, generator=generator)
            layer.fc1.weight.copy_(directions[torch.randint(0, 3, (320,), generator=generator)] * 0.5)
            layer.fc1.bias.fill_(-5.0)
    reference.save_pretrained(directory)
    model = load(directory, max_perplexity_increase=0.5, load_in_4bit=False, calibration_tokens=1024)
    predicted = [block for block in mlps(model) if block.rule.kind == "predicted"]
    assert predicted and all(block.predictor is not None for block in predicted)
    again = load(directory, max_perplexity_increase=0.5, load_in_4bit=False, calibration_tokens=1024)
    ids = prompt_ids(1, 9)
    out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(out, again.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None))
    assert again.plan.calibration_report == model.plan.calibration_report
    for block in predicted:
        assert 8 * block.predictor.nbytes < block.bytes_per_neuron() * block.neurons


def test_self_generated_text_is_the_same_each_time(llama, tmp_path):
    reports = []
    for copy in ("one", "two"):
        directory = tmp_path / copy
        save_checkpoint("llama", directory)
        save_tokenizer(directory)
        reports.append(load(directory).plan.calibration_report)
    assert reports[0]["dense_perplexity"] == pytest.approx(reports[1]["dense_perplexity"], rel=1e-4)


def test_text_files_are_read(llama, tmp_path):
    txt, jsonl = tmp_path / "text.txt", tmp_path / "texts.jsonl"
    txt.write_text(TEXT)
    jsonl.write_text("\n".join(json.dumps({"text": part}) for part in (topics["assignment"], topics["for"])))
    ours = [
        load(llama, calibration_texts=source).plan.calibration_report["dense_perplexity"] for source in ([TEXT], txt)
    ]
    assert ours[0] == ours[1]
    assert load(llama, calibration_texts=jsonl).plan.calibration_report["tokens"] == 480


def test_bad_texts_are_named(llama, tmp_path):
    with pytest.raises(ValueError, match="calibration_texts: expected at least 4 tokens"):
        load(llama, calibration_texts=["a"])
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"words": 1}\n')
    with pytest.raises(ValueError, match='expected a "text" in every line'):
        load(llama, calibration_texts=bad)
    save_checkpoint("llama", tmp_path / "no_tokenizer")
    with pytest.raises(ValueError, match="calibration_texts: there is no tokenizer"):
        load(tmp_path / "no_tokenizer", calibration_texts=[TEXT])


def test_a_model_that_computes_nan_is_named_by_layer(tmp_path):
    reference = save_checkpoint("llama", tmp_path)
    with torch.no_grad():
        reference.model.layers[1].mlp.up_proj.weight.mul_(1e30)
        reference.model.layers[1].mlp.gate_proj.weight.mul_(1e30)
    reference.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="layer 1: the MLP computes NaN or infinite"):
        load(tmp_path, load_in_4bit=False)


@torch.no_grad()
def test_perplexity_equals_transformers_own_loss(llama):
    model = load(llama)
    rows = prompt_ids(3, 25)
    with skipping("never"):
        losses = [model(row[None], labels=row[None]).loss.item() for row in rows]
    assert perplexity(model, rows, "never") == pytest.approx(math.exp(sum(losses) / 3), rel=1e-5)


def test_bars_may_be_switched_off(tmp_path):
    save_checkpoint("llama", tmp_path)
    transformers_logging.disable_progress_bar()
    try:
        model = load(tmp_path, calibration_tokens=64)
    finally:
        transformers_logging.enable_progress_bar()
    assert model.plan.calibration_report["tokens"] > 0
