"""scripts/bench_quality.py: rules drop and count what they say, equal bytes are equal, searches find what is better."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_sparse import SparseAutoModelForCausalLM
from hf_sparse.activation_profile import ActivationProfile, thresholds
from hf_sparse.evaluation import perplexity
from hf_sparse.modeling import BlockId
from tiny_models import prompt_ids, save_checkpoint, save_tokenizer

SCRIPTS = Path(__file__).parents[1] / "scripts"
ALL = float("inf")


@pytest.fixture(scope="module")
def quality(script_module: Callable[[str], Any]) -> Any:
    return script_module("_quality")


@pytest.fixture(scope="module")
def searches(script_module: Callable[[str], Any]) -> Any:
    return script_module("_quality_search")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    save_checkpoint("llama", directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return save_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def dropper(quality: Any, model: PreTrainedModel) -> Any:
    return quality.Dropper(model)


@pytest.fixture(scope="module")
def loaded(source: Path) -> Any:
    return SparseAutoModelForCausalLM.from_pretrained(
        source, load_in_4bit=True, max_perplexity_increase=0, calibration_tokens=64
    )


@pytest.fixture(scope="module")
def calibration(quality: Any, dropper: Any, loaded: Any) -> Any:
    rows = prompt_ids(6, 40)
    return quality.Calibration(quality.sample(dropper, rows), quality.library_thresholds(loaded, rows), rows)


def weights(model: PreTrainedModel, *names: str) -> int:
    """Of the matrices that end in one of `names`."""
    return sum(p.numel() for name, p in model.named_parameters() if name.removesuffix(".weight").endswith(names))


def block_weights(model: PreTrainedModel) -> int:
    return weights(model, "_proj")


def without(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """A copy whose matrix `name` is zero."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    with torch.no_grad():
        twin.get_parameter(f"{name}.weight").zero_()
    return twin


# Dropping


def test_nothing_dropped_is_the_dense_model(dropper: Any, model: PreTrainedModel) -> None:
    rows = prompt_ids(5, 30)
    found = dropper.measure(rows, {}, dropper.last_hidden_states(rows))
    assert found.perplexity == pytest.approx(perplexity(model, rows, "never"), rel=1e-4)
    assert found.read == 1 and found.kl == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("places", "zeroed", "spared"),
    [
        (["o_proj"], "self_attn.o_proj", ["1.self_attn.o_proj"]),
        (["down_proj"], "mlp.down_proj", ["1.mlp.down_proj"]),
        (["act"], "mlp.down_proj", ["1.mlp.down_proj", "1.mlp.up_proj"]),
        (["act", "down_proj"], "mlp.down_proj", ["1.mlp.down_proj", "1.mlp.up_proj"]),
        (["q_proj"], "self_attn.q_proj", ["1.self_attn.q_proj"]),  # keys and values have the same input, and stay
    ],
)
def test_what_is_dropped_is_zero_and_not_read(
    dropper: Any, model: PreTrainedModel, places: list[str], zeroed: str, spared: list[str]
) -> None:
    rows = prompt_ids(4, 30)
    found = dropper.measure(rows, {(1, place): torch.tensor(ALL) for place in places})
    expected = perplexity(without(model, f"model.layers.1.{zeroed}"), rows, "never")
    assert found.perplexity == pytest.approx(expected, rel=1e-4)
    assert found.read == pytest.approx(1 - weights(model, *spared) / block_weights(model), abs=1e-6)
    assert dropper.measure(rows, {}).read == 1


def test_rows_of_down_are_spared_by_either_threshold_once(dropper: Any, model: PreTrainedModel) -> None:
    rows = prompt_ids(4, 30)
    half = torch.zeros(88)
    half[:44] = ALL  # the first half by the gate, the second by hidden
    found = dropper.measure(rows, {(2, "act"): half, (2, "down_proj"): half.flip(0)})
    spared = weights(model, "2.mlp.down_proj") + weights(model, "2.mlp.up_proj") / 2
    assert found.read == pytest.approx(1 - spared / block_weights(model), abs=1e-6)


def test_divergence_is_that_of_the_distributions(dropper: Any, model: PreTrainedModel) -> None:
    rows = prompt_ids(3, 20)
    found = dropper.measure(rows, {(0, "o_proj"): torch.tensor(ALL)}, dropper.last_hidden_states(rows))
    twin = without(model, "model.layers.0.self_attn.o_proj")
    with torch.no_grad():
        log_p, log_q = (m(rows).logits[:, :-1].log_softmax(-1) for m in (model, twin))
    assert found.kl == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()), rel=1e-3)
    assert found.kl > 0.001


def test_another_build_of_model_is_refused(quality: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected (layers|self_attn\.\w+)"):
        quality.Dropper(save_checkpoint("bloom", tmp_path))


# Calibration and rules


def test_our_thresholds_are_the_librarys(quality: Any, loaded: Any, calibration: Any) -> None:
    assert set(calibration.ours) == {(layer, place) for layer in range(3) for place in quality.OURS.values()}
    rows = prompt_ids(6, 40)
    profile = ActivationProfile(loaded)
    profile.measure(rows, torch.zeros_like(rows, dtype=torch.bool))
    wanted = thresholds(profile, 1.0)
    for kind, place, name in (("mlp", "gate", "act"), ("mlp", "hidden", "down_proj"), ("attention", "input", "q_proj")):
        torch.testing.assert_close(calibration.ours[1, name], wanted[BlockId(1, kind)][place])


@pytest.mark.parametrize("name", ["ours", "cats", "teal", "wina", "predicted"])
def test_rules_read_what_is_asked_for(quality: Any, dropper: Any, calibration: Any, name: str) -> None:
    rule = getattr(quality, name)(dropper, calibration)
    rows = prompt_ids(6, 40, seed=1)
    for read in (0.95, 0.8):
        found = quality.at_equal_bytes(read, 0.005, dropper, calibration.samples, rule, rows)
        assert found.read == pytest.approx(read, abs=0.005)
    assert dropper.measure(rows, rule.setting(0.0)).read > 0.999


def test_a_rule_that_cannot_read_so_little_says_so(quality: Any, dropper: Any, calibration: Any) -> None:
    least = 1 - (88 * 48 * 2) / (88 * 48 * 3 + 48 * 48 * 2 + 48 * 24 * 2)  # gates and attention stay
    rule = quality.cats(dropper, calibration)
    assert quality.level_for(least - 0.02, dropper, calibration.samples, rule) is None
    assert quality.level_for(least + 0.02, dropper, calibration.samples, rule) is not None


def test_teal_and_wina_drop_by_their_scores(quality: Any, dropper: Any, calibration: Any) -> None:
    norms = dropper.modules[1, "down_proj"].weight.norm(dim=0)
    values = calibration.samples[1, "down_proj"].abs()
    for name, scores in (("teal", values), ("wina", values * norms)):
        threshold = getattr(quality, name)(dropper, calibration).setting(0.4)[1, "down_proj"]
        dropped = values < threshold
        assert float(dropped.float().mean()) == pytest.approx(0.4, abs=0.01)
        assert float(scores[dropped].max()) <= float(scores[~dropped].min()) * (1 + 1e-5)


def test_predicted_neurons_are_spared_whole(quality: Any, dropper: Any, calibration: Any) -> None:
    rule = quality.predicted(dropper, calibration)
    rows, none = prompt_ids(3, 30), {(1, "neurons"): torch.tensor(ALL)}
    found = dropper.measure(rows, none)
    predictor = sum(p.numel() for p in dropper.predictors[1].parameters())
    assert 0.03 < predictor / (88 * 48 * 3) <= 0.08
    mlp = weights(dropper.model, "1.mlp.gate_proj", "1.mlp.up_proj", "1.mlp.down_proj")
    assert found.read == pytest.approx(1 - (mlp - predictor) / block_weights(dropper.model), abs=1e-6)
    expected = perplexity(without(dropper.model, "model.layers.1.mlp.down_proj"), rows, "never")
    assert found.perplexity == pytest.approx(expected, rel=1e-4)
    # what it scores low adds less than what it scores high
    x, sizes = calibration.samples[1, "gate_proj"], calibration.samples[1, "down_proj"].abs()
    scores, cut = dropper.predictors[1](x), rule.setting(0.5)[1, "neurons"]
    assert sizes[scores < cut].mean() < 0.9 * sizes[scores >= cut].mean()


# Searches


def test_greedy_path(quality: Any, searches: Any, dropper: Any, calibration: Any) -> None:
    row, step = prompt_ids(1, 40), 0.02
    path = searches.greedy_path(dropper, calibration, row, 1, step, 0.5)
    total = sum(dropper.weights[1, name] for name in quality.LINEARS)
    assert len(path) == 25
    for name in set(path):
        assert path.count(name) * step * total <= dropper.weights[1, name]
    rule = quality.teal_greedy(dropper, calibration, dict.fromkeys(range(3), path), step)
    assert quality.foreseen(dropper, calibration.samples, rule.setting(1.0)) == pytest.approx(0.5, abs=0.01)
    assert quality.foreseen(dropper, calibration.samples, rule.setting(0.5)) == pytest.approx(0.75, abs=0.01)
    only = {site: t for site, t in rule.setting(1 / 25).items() if site[0] == 1}
    assert list(only) == [(1, path[0])]


def test_search_goes_on_and_is_never_worse(quality: Any, searches: Any, dropper: Any, calibration: Any) -> None:
    rule, rows = quality.ours(dropper, calibration), prompt_ids(3, 30, seed=2)
    whole = searches.Search()
    assert searches.search(dropper, rule, rows, 0.02, whole, ALL)
    parts, calls = searches.Search(), 0
    while not searches.search(dropper, rule, rows, 0.02, parts, 0):
        parts = searches.Search(**json.loads(json.dumps(asdict(parts))))
        calls += 1
    assert parts == whole and calls == whole.tried
    assert whole.ours["perplexity"] <= whole.dense * 1.02
    assert whole.found["kl"] <= whole.ours["kl"]
    assert whole.tried == len(list(searches._moves(dropper)))
    assert whole.accepted == 0 or any(whole.exponents.values())


def test_passes_from_a_layer_on_equal_whole_ones(searches: Any, dropper: Any) -> None:
    rows, early, late = prompt_ids(3, 30, seed=3), torch.tensor(0.05), torch.tensor(0.2)
    passes = searches.Passes(dropper, rows)
    before = passes.run({(0, "o_proj"): early, (2, "act"): early})
    setting = {(0, "o_proj"): early, (1, "down_proj"): late, (2, "q_proj"): late}
    whole, part = passes.run(setting), passes.run(setting, 1, before)
    assert part.divergence == pytest.approx(whole.divergence) and part.read == pytest.approx(whole.read)
    assert whole.read == pytest.approx(dropper.measure(rows, setting).read) and whole.read < before.read < 1
    assert passes.run({}).divergence == 0 and passes.run({}).read == 1


# The command


def run_bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench_quality.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_rules_and_oracle(source: Path, tmp_path: Path) -> None:
    report, work = tmp_path / "report.json", tmp_path / "work"
    sizes = ("--model", source, "--tokens", 200, "--oracle-tokens", 320, "--work", work, "--json", report)
    options = ("--part", "rules", "oracle", "--rules", "ours", "cats", "teal-greedy", "--shares", 0.9, 0.5)
    stopped = run_bench(*sizes, *options, "--seconds", 0)
    assert stopped.returncode == 0, stopped.stderr
    assert "rules: stopped by --seconds" in stopped.stdout and "oracle: stopped by --seconds" in stopped.stdout
    assert [(row["case"], row["system"]) for row in json.loads(report.read_text())] == [
        ("quality rules 90% generated", "ours")
    ]
    bench = run_bench(*sizes, *options)
    assert bench.returncode == 0, bench.stderr
    made = json.loads(report.read_text())
    found = {(row["case"], row["system"]): row for row in made}
    for text in ("generated", "documentation"):
        for system, shares in (("ours", ("90%", "50%")), ("cats", ("90%",)), ("teal-greedy", ("90%", "50%"))):
            for share in shares:  # CATS cannot read so little as half
                row = found.pop((f"quality rules {share} {text}", system))
                assert row["equal"] == (abs(row["read"] - row["asked"]) <= 0.002)
                assert row["unit"] == "perplexity" and row["tokens"] == 200
    saved = {system: row["median"] for (_, system), row in found.items()}
    assert set(saved) == {"ours", "oracle"}
    left = found["quality oracle", "ours"]["left"]
    assert left == pytest.approx(max(0.0, 1 - saved["ours"] / saved["oracle"]))


def test_speed(source: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    sizes = ("--tokens", 200, "--new-tokens", 6, "--rounds", 2, "--work", tmp_path)
    bench = run_bench("--model", source, "--part", "speed", *sizes, "--json", report)
    assert bench.returncode == 0, bench.stderr
    made = {row["system"]: row for row in json.loads(report.read_text())}
    assert list(made) == ["dense", "budget-0.1%", "budget-1%", "budget-5%", "fixed-25%", "fixed-40%", "fixed-50%"]
    for text in ("generated", "documentation"):
        assert made["dense"][text]["read"] == 1 and made["dense"][text]["increase"] == 0
        shares = [made[name][text]["read"] for name in ("fixed-25%", "fixed-40%", "fixed-50%")]
        assert shares == sorted(shares, reverse=True) and shares[-1] < 0.7
    assert all(len(row["figures"]) == 2 and min(row["figures"]) > 0 for row in made.values())
    assert made["dense"]["speedup"] == 1 == made["dense"]["speedup_by_bytes"] < made["fixed-50%"]["speedup_by_bytes"]
    assert made["fixed-40%"]["calibration"]["bytes_read_share"] == pytest.approx(0.6, abs=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--part", "magic"), "--part: invalid choice: 'magic'"),
        (("--tokens", 3), "--tokens: expected at least 16, got 3"),
        (("--shares", 1.5), "--shares: expected a share above 0 and below 1, got 1.5"),
        (("--budget", 0), "--budget: expected a share above 0 and below 1, got 0"),
        (("--seconds", 5), "--seconds: give --work"),
        (("--new-tokens", 1), "--new-tokens: expected at least 2, got 1"),
        (("--gguf-file", "a.gguf"), "--gguf-file: give the --model"),
        (("--json", "/nowhere/a.json"), "--json: there is no directory /nowhere"),
        (("--rounds", 0), "--rounds: expected at least 1, got 0"),
    ],
)
def test_bad_arguments(arguments: tuple[object, ...], message: str) -> None:
    bench = run_bench(*arguments)
    assert bench.returncode == 2
    assert message in bench.stderr
