import json
import logging
import math
import shutil
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from hf_sparse import SparseAutoModelForCausalLM, activation_profile, calibration
from hf_sparse.activation_profile import ActivationProfile
from hf_sparse.evaluation import perplexity
from hf_sparse.modeling import HybridMLP, hybrid_blocks, skipping
from masked_twin import MaskedTwin, magnitudes
from tiny_models import learn, prompt_ids, save_checkpoint, save_tokenizer

TEXT = topics["assignment"] + topics["for"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    save_checkpoint("llama", directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Knows TEXT: what is left out costs."""
    directory = tmp_path_factory.mktemp("learned")
    model = save_checkpoint("llama", directory)
    save_tokenizer(directory)
    learn(model, token_rows(directory)).save_pretrained(directory)
    return directory


def mlps(model):
    return [block for block in hybrid_blocks(model) if isinstance(block, HybridMLP)]


def load(directory, **options):
    return SparseAutoModelForCausalLM.from_pretrained(
        directory, **({"calibration_tokens": 512, "load_in_4bit": True} | options)
    )


@pytest.mark.parametrize("increase", [0.002, 0.2])
def test_the_quality_budget_is_kept_and_used(learned, increase):
    model = load(learned, max_perplexity_increase=increase, calibration_texts=[TEXT])
    report = model.plan.calibration_report
    assert report["dense_perplexity"] < 50
    assert 1 + increase / 5 < report["sparse_perplexity"] / report["dense_perplexity"] <= 1 + increase
    assert set(model.plan.rules) == {block.id for block in hybrid_blocks(model)}
    for block in hybrid_blocks(model):
        assert block.rule == model.plan.rules[block.id] and block.rule.kind == "magnitude"
        assert set(block.rule.below) == set(block.places)
        assert all(bool((below > 0).all()) for below in block.rule.below.values())
    assert report["tokens"] == 480 and report["held_out_tokens"] == 160  # rows of 160, the model's positions
    model.reset_active_fraction()
    with torch.no_grad(), skipping("always"):
        model(token_rows(learned)[:1, :20])
    assert 0.2 < model.active_fraction() < 1


def test_a_larger_budget_skips_more(learned):
    fractions, shares = [], []
    for increase in (0.002, 0.2):
        model = load(learned, max_perplexity_increase=increase, calibration_texts=[TEXT])
        fractions.append(sum(float(profile.active_fraction.mean()) for profile in model.plan.blocks.values()))
        shares.append(model.plan.calibration_report["bytes_read_share"])
    assert fractions[1] < fractions[0]
    assert 0.05 < shares[1] < shares[0] < 1


@pytest.mark.parametrize("wanted", [0.15, 0.5])
def test_a_share_to_leave_unread_is_hit_whatever_it_costs(learned, wanted):
    model = load(learned, target_sparsity=wanted, calibration_texts=[TEXT])
    report = model.plan.calibration_report
    assert 1 - wanted <= report["bytes_read_share"] < 1 - wanted + 0.02
    assert report["target_sparsity"] == wanted and report["max_perplexity_increase"] is None
    assert report["sparse_perplexity"] != report["dense_perplexity"]
    assert report["read_shares"].keys() == {str(block.id) for block in hybrid_blocks(model)}
    sizes = {str(b.id): sum(m.nbytes for m in b.shards[0].matrices.values()) for b in hybrid_blocks(model)}
    mean = sum(report["read_shares"][id] * size for id, size in sizes.items()) / sum(sizes.values())
    assert mean == pytest.approx(report["bytes_read_share"], abs=1e-3)
    rows = held_out_rows(learned)
    model.reset_active_fraction()
    assert perplexity(model, rows, "always") == pytest.approx(report["sparse_perplexity"], rel=1e-4)
    assert model.read_share() == pytest.approx(report["bytes_read_share"], abs=1e-3)


def test_no_budget_means_no_rule_for_a_smooth_activation(llama):
    model = load(llama, max_perplexity_increase=0)
    assert all(block.rule.kind == "none" for block in hybrid_blocks(model))
    assert model.plan.calibration_report["bytes_read_share"] == 1
    report = model.plan.calibration_report
    assert report["sparse_perplexity"] == report["dense_perplexity"]


def token_rows(directory):
    """The calibration's rows of TEXT: 160 tokens, the model's positions."""
    ids = AutoTokenizer.from_pretrained(directory)(TEXT).input_ids
    return torch.tensor(ids[:480]).view(3, 160)


def held_out_rows(directory):
    return token_rows(directory)[1::2]


def test_the_profile_is_what_a_plain_count_gives(llama):
    model = load(llama, max_perplexity_increase=0.2, calibration_texts=[TEXT], load_in_4bit=False)
    training = token_rows(llama)[0::2]
    assert len(training) == 2
    seen = [magnitudes(model, row[None]) for row in training]
    for block in hybrid_blocks(model):
        passed = {
            place: torch.cat([of_row[block.id, place] for of_row in seen]) for place in block.takes("magnitude")[-1:]
        }
        if isinstance(block, HybridMLP):
            impact = passed["hidden"].mean(0) * block.dequantize()["mlp.down_proj.weight"].norm(dim=0)
        else:
            impact = passed["output"].mean(0).view(3, 16).mean(1)
        profile = model.plan.blocks[block.id]
        torch.testing.assert_close(profile.impact, impact, rtol=1e-3, atol=1e-5)
    twin = MaskedTwin(model)
    twin(held_out_rows(llama))
    for block in hybrid_blocks(model):
        active = model.plan.blocks[block.id].active_fraction
        kept, offered = twin.counts[block.id, "gate"] if isinstance(block, HybridMLP) else (1, 1)
        torch.testing.assert_close(active, torch.full_like(active, kept / offered), rtol=0, atol=1e-3)


@pytest.mark.parametrize("case", ["opt", "nemotron"])
def test_relu_models_skip_exactly_or_by_a_predictor_that_pays(case, tmp_path):
    save_checkpoint(case, tmp_path)
    model = load(tmp_path, max_perplexity_increase=0.5)
    kinds = {rule.kind for rule in model.plan.rules.values()}
    assert kinds <= {"exact", "predicted"}
    assert set(model.plan.predictors) == {id for id, rule in model.plan.rules.items() if rule.kind == "predicted"}
    exact = load(tmp_path, max_perplexity_increase=0)
    assert {rule.kind for rule in exact.plan.rules.values()} == {"exact"}
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


class Killed(Exception):  # noqa: N818
    pass


def killed(*args, **kwargs):
    raise Killed


@pytest.mark.parametrize("texts", [None, [TEXT]])
def test_a_killed_calibration_goes_on_with_what_it_had(texts, tmp_path, monkeypatch, caplog):
    directory = tmp_path / "model"
    save_checkpoint("llama", directory)
    save_tokenizer(directory)
    options = {"calibration_texts": texts, "max_perplexity_increase": 0.05}
    expected = load(directory, **options)
    shutil.rmtree(directory / "hf_sparse_plan")
    monkeypatch.setattr(activation_profile, "SAVE_SECONDS", -1.0)
    save, rows = ActivationProfile._save, []

    def save_and_die(self, *args):
        save(self, *args)
        rows.append(self.rows)
        if len(rows) == 1:
            raise Killed

    monkeypatch.setattr(ActivationProfile, "_save", save_and_die)
    with pytest.raises(Killed):
        load(directory, **options)
    kept = {path.name for path in directory.rglob("calibration_*")}
    assert kept == {"calibration_profile.safetensors"} | ({"calibration_text.safetensors"} if texts is None else set())
    monkeypatch.setattr(calibration, "_self_generated", killed)  # its text is there already
    caplog.set_level(logging.INFO, logger="hf_sparse")
    again = load(directory, **options)
    assert "Calibration goes on after 1 rows" in caplog.text and rows == sorted(rows)
    assert not list(directory.rglob("calibration_*"))
    assert again.plan.rules == expected.plan.rules
    for id, profile in expected.plan.blocks.items():
        assert torch.equal(again.plan.blocks[id].impact, profile.impact)


def test_what_a_killed_calibration_of_other_weights_left_is_not_used(tmp_path, monkeypatch):
    save_checkpoint("llama", tmp_path, seed=1)
    save_tokenizer(tmp_path)
    expected = load(tmp_path)
    shutil.rmtree(tmp_path / "hf_sparse_plan")
    save_checkpoint("llama", tmp_path, seed=2)
    with monkeypatch.context() as during:
        during.setattr(activation_profile, "SAVE_SECONDS", -1.0)
        during.setattr(ActivationProfile, "at", killed)  # once all is measured
        during.setattr(Path, "unlink", lambda *args, **kwargs: None)
        with pytest.raises(Killed):
            load(tmp_path)
    assert len(list(tmp_path.rglob("calibration_*.safetensors"))) == 2
    save_checkpoint("llama", tmp_path, seed=1)
    again = load(tmp_path)
    report = again.plan.calibration_report
    assert report["dense_perplexity"] == expected.plan.calibration_report["dense_perplexity"]
    assert again.plan.rules == expected.plan.rules


def test_a_text_kept_aside_that_is_damaged_is_made_anew(tmp_path, monkeypatch, caplog):
    save_checkpoint("llama", tmp_path)
    save_tokenizer(tmp_path)
    with monkeypatch.context() as during:
        during.setattr(calibration, "perplexity", killed)
        with pytest.raises(Killed):
            load(tmp_path)
    (aside,) = tmp_path.rglob("calibration_text.safetensors")
    aside.write_bytes(aside.read_bytes()[:100])
    model = load(tmp_path)
    assert f"in {aside} cannot be read" in caplog.text
    assert model.plan.calibration_report["tokens"] > 0 and not aside.exists()


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
    save_tokenizer(tmp_path)
    for texts in (None, [TEXT]):  # before anything is sampled, and where nothing is
        with pytest.raises(ValueError, match="layer 1: the MLP computes NaN or infinite"):
            load(tmp_path, load_in_4bit=False, calibration_texts=texts)


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
