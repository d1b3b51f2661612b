"""Heads whose cost is foretold: the regression, the choice of what to leave out, and a calibration that uses it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sparse import SparseAutoModelForCausalLM, calibration, probing
from hf_sparse.activation_profile import ActivationProfile
from hf_sparse.calibration import Search
from hf_sparse.evaluation import perplexity
from hf_sparse.head_prediction import Foretold, fit_costs, foretell_heads
from hf_sparse.modeling import BlockId, HybridAttention, Predictor, SkipRule, hybrid_blocks
from tiny_models import learn, save_checkpoint, save_tokenizer

TEXT = topics["assignment"] + topics["for"]
IDLE = (1, 2, 5, 6)  # of 8 heads


@pytest.mark.parametrize("tokens", [40, 300])  # fewer than inputs, and more
def test_costs_that_are_linear_in_the_input_are_foretold(tokens: int, generator: torch.Generator) -> None:
    x = torch.randn(tokens + 50, 64, generator=generator)
    x[::17] *= 300  # as of first tokens
    w = torch.randn(3, 64, generator=generator) * (torch.arange(64) < 4)
    costs = (x @ w.T / 10 - 7).clamp(-60, 60).exp()
    tensors = fit_costs(x[:tokens], costs[:tokens])
    assert {name: list(t.shape) for name, t in tensors.items()} == {"fc1": [32, 64], "fc2": [3, 32], "bias": [3]}
    usual = torch.arange(tokens, tokens + 50) % 17 != 0
    scores = Predictor(**tensors).scores(x[tokens:][usual])
    expected = costs[tokens:][usual].log()
    error = ((scores - expected) ** 2).mean() / expected.var()
    assert error < (0.8 if tokens == 40 else 0.05)  # 40 tokens say little of 64 weights


def foretold(generator: torch.Generator, **changes: Any) -> Foretold:
    costs = torch.rand(200, 5, generator=generator)
    scores = costs.log() + 0.3 * torch.randn(200, 5, generator=generator)
    tensors = {"fc1": torch.zeros(32, 8), "fc2": torch.zeros(5, 32), "bias": torch.arange(5.0)}
    whole = Foretold(tensors, nbytes=10, scores=scores, costs=costs, spared=100.0, instead=0.0)
    return dataclasses.replace(whole, **changes)


def test_what_is_left_out_spares_the_most_for_what_it_costs(generator: torch.Generator) -> None:
    found, level = foretold(generator), 0.06
    planned = found.at(level)
    assert planned is not None
    cuts = found.tensors["bias"] - planned.tensors["bias"]

    def net(head: int, cut: float) -> float:
        left_out = found.scores[:, head] <= cut
        return float((left_out * (found.spared - found.costs[:, head] / level**2)).sum())

    for head in range(5):
        best = max(net(head, float(cut)) for cut in found.scores[:, head])
        assert net(head, float(cuts[head])) == pytest.approx(best, rel=1e-3)
    computed = found.scores > cuts
    assert planned.kept == pytest.approx(float(computed.float().mean()))
    assert planned.bytes_saved == round(500 * (1 - planned.kept) - 10)
    counting = found.costs > level**2 * 100
    assert planned.recall == pytest.approx(float((computed & counting).sum() / counting.sum()))
    assert planned.precision == pytest.approx(float((computed & counting).sum() / computed.sum()))


def test_equal_scores_are_not_parted(generator: torch.Generator) -> None:
    whole, level = foretold(generator), 0.06
    found = dataclasses.replace(whole, scores=whole.scores.mul(2).round())
    planned = found.at(level)
    assert planned is not None
    cuts = found.tensors["bias"] - planned.tensors["bias"]
    net = ((found.scores <= cuts) * (found.spared - found.costs / level**2)).sum(0)
    each = found.scores.unique()
    for head in range(5):
        of_cuts = [float(((found.scores <= cut) * (100 - found.costs / level**2))[:, head].sum()) for cut in each]
        assert float(net[head]) == pytest.approx(max(0.0, *of_cuts), rel=1e-3, abs=1e-2)
    blind = foretold(generator, scores=torch.zeros(200, 5), costs=torch.linspace(0, 0.8, 200)[:, None].expand(200, 5))
    assert blind.at(level) is None  # all or none: all cost more than they spare


@pytest.mark.parametrize("x", [torch.zeros(20, 64), torch.ones(20, 64), torch.zeros(1, 64)])
def test_inputs_that_tell_nothing_are_fitted_all_the_same(x: torch.Tensor) -> None:
    costs = torch.full((len(x), 3), 0.25)
    assert torch.allclose(Predictor(**fit_costs(x, costs)).scores(x), costs.log(), atol=1e-3)


def test_a_predictor_that_does_not_pay_is_none(generator: torch.Generator) -> None:
    found = foretold(generator)
    assert found.at(1e-4) is None  # every head costs more than it spares
    assert found.at(0.06) is not None
    assert dataclasses.replace(found, nbytes=400).at(0.06) is None
    assert dataclasses.replace(found, instead=400.0).at(0.06) is None
    everything = found.at(1e3)
    assert everything is not None and everything.kept == 0 and everything.recall == everything.precision == 1.0


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows TEXT, in which four of eight heads write next to nothing."""
    directory = tmp_path_factory.mktemp("idle")
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2}
    model = save_checkpoint("llama", directory, **sizes)
    save_tokenizer(directory)
    ids = torch.tensor(AutoTokenizer.from_pretrained(directory)(TEXT).input_ids)
    for layer in model.model.layers:
        for head in IDLE:
            layer.self_attn.o_proj.weight.data[:, 32 * head : 32 * head + 32] *= 1e-3
    learn(model, ids[: len(ids) // 128 * 128].view(-1, 128), steps=12).save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    for layer in model.model.layers:  # learning may have woken them
        for head in IDLE:
            layer.self_attn.o_proj.weight.data[:, 32 * head : 32 * head + 32] *= 1e-3
    model.save_pretrained(directory)
    return directory


def load(directory: Path, **options: Any) -> Any:
    """Weights that are not packed: inputs of q cannot be left out."""
    settings = {"calibration_tokens": 512, "load_in_4bit": False, "calibration_texts": [TEXT]}
    return SparseAutoModelForCausalLM.from_pretrained(directory, **(settings | options))


def test_calibration_leaves_out_idle_heads(idle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(idle, max_perplexity_increase=0.05)
    report = model.plan.calibration_report
    assert report["sparse_perplexity"] <= 1.05 * report["dense_perplexity"]
    blocks = [block for block in hybrid_blocks(model) if isinstance(block, HybridAttention)]
    for block in blocks:
        assert block.rule.kind == "predicted" and set(block.rule.below) == {"output"}
        planned = model.plan.predictors[block.id]
        assert planned.kept <= 0.55 and planned.bytes_saved > 0 and planned.nbytes == block.predictor.nbytes
    ids = torch.tensor(AutoTokenizer.from_pretrained(idle)(topics["while"]).input_ids)[None, :100]
    model.reset_active_fraction()
    perplexity(model, ids, "always")
    assert all(block.kept("heads") <= 0.6 for block in blocks)
    monkeypatch.setattr(calibration, "foretell_heads", lambda *_: {})
    without = load(idle, max_perplexity_increase=0.05, calibration_seed=1)
    assert not without.plan.predictors
    assert report["bytes_read_share"] < without.plan.calibration_report["bytes_read_share"]


def test_heads_that_turn_out_to_cost_more_are_computed_again(idle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.tensor(AutoTokenizer.from_pretrained(idle)(TEXT).input_ids)[:320].view(4, 80)
    model = load(idle, max_perplexity_increase=0)
    profile = ActivationProfile(model)
    profile.measure(rows, torch.zeros_like(rows, dtype=torch.bool))

    def too_good(*_: Any) -> dict[Any, Foretold]:
        tensors = {"fc1": torch.zeros(32, 256), "fc2": torch.zeros(8, 32), "bias": torch.zeros(8)}
        nothing = torch.zeros(320, 8)
        return {
            b.id: Foretold(tensors, 9000, nothing, nothing, 1e5, 0.0)
            for b in hybrid_blocks(model)
            if b.id.kind == "attention"
        }

    def found(saves: bool) -> tuple[Search, dict[Any, Any], dict[Any, Any]]:
        search = Search(model, profile, {}, rows)
        dense = perplexity(model, rows, "never")
        if saves:
            return search, *search.run(lambda p, unread: p <= 1.02 * dense, rows, saves=True)
        return search, *search.run(lambda p, unread: unread <= 0.3, rows, saves=False)

    for saves in (True, False):
        monkeypatch.setattr(calibration, "foretell_heads", lambda *_: {})
        _, rules, _ = found(saves)
        monkeypatch.setattr(calibration, "foretell_heads", too_good)
        search, again, predictors = found(saves)
        assert not predictors and again == rules and not search.heads


def test_layers_with_exact_zeros_keep_their_heads(idle: Path) -> None:
    model = load(idle, max_perplexity_increase=0)
    rows = torch.tensor(AutoTokenizer.from_pretrained(idle)(TEXT).input_ids)[:320].view(4, 80)
    profile = ActivationProfile(model)
    profile.measure(rows, torch.zeros_like(rows, dtype=torch.bool))
    search = Search(model, profile, {BlockId(0, "mlp"): SkipRule("exact")}, rows)
    rules, predictors = search.run(lambda perplexity, unread: unread <= 0.4, rows, saves=True)
    assert set(predictors) <= {BlockId(1, "attention")} and BlockId(0, "attention") not in rules


def test_layers_are_collected_in_groups_that_fit(idle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(idle, max_perplexity_increase=0.05).plan.predictors
    monkeypatch.setattr(probing, "COLLECTED_BYTES", 1)
    one_by_one = load(idle, max_perplexity_increase=0.05, calibration_seed=2).plan.predictors
    assert whole.keys() == one_by_one.keys() and len(whole) == 2
    for id, planned in whole.items():
        for name, tensor in planned.tensors.items():
            torch.testing.assert_close(one_by_one[id].tensors[name], tensor, rtol=1e-2, atol=1e-2)


def test_at_a_low_level_no_head_is_a_candidate(idle: Path) -> None:
    model = load(idle, max_perplexity_increase=0)
    rows = torch.tensor(AutoTokenizer.from_pretrained(idle)(TEXT).input_ids)[:320].view(4, 80)
    profile = ActivationProfile(model)
    profile.measure(rows, torch.zeros_like(rows, dtype=torch.bool))
    assert foretell_heads(model, profile, rows, rows, 1e-9) == {}
    found = foretell_heads(model, profile, rows, rows, 1e-4)
    assert len(found) == 2 and all(foretold.at(1e-4) is not None for foretold in found.values())
