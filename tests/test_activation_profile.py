"""ActivationProfile beside autograd on transformers' own model; the thresholds and the search that follow from it."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine_steps import load
from hf_sparse import SparseAutoModelForCausalLM, activation_profile
from hf_sparse.activation_profile import KINDS, QUANTILES, ActivationProfile, column_norms, row_bytes, thresholds
from hf_sparse.calibration import Search
from hf_sparse.log import warn_once
from hf_sparse.modeling import BlockId, HybridBlock, HybridMLP, SkipRule, hybrid_blocks
from hf_sparse.quantization import NeuronMatrix
from masked_twin import MaskedTwin, magnitudes
from tiny_models import learn, plain_twin, prompt_ids, save_checkpoint

ROWS, TOKENS = 5, 23
At = tuple[BlockId, str]


@pytest.fixture(autouse=True)
def _fresh_warnings() -> None:
    warn_once.cache_clear()


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {case: tmp_path_factory.mktemp(case) for case in ("llama-tied-bias", "phi3", "opt", "gpt_neox")}
    for case, directory in made.items():
        save_checkpoint(case, directory)
    return made


@pytest.fixture
def model(directories: dict[str, Path]) -> Any:
    return load(directories["llama-tied-bias"])


def text() -> tuple[Tensor, Tensor]:
    """Rows, and which tokens a model wrote: in every row another share."""
    generated = torch.arange(TOKENS) >= torch.tensor([3, 9, 23, 0, 14])[:, None]
    return prompt_ids(ROWS, TOKENS, seed=2), generated


def measured(model: Any, rows: Tensor | None = None, generated: Tensor | None = None, **options: Any) -> Any:
    profile = ActivationProfile(model)
    given = text() if rows is None else (rows, torch.zeros_like(rows, dtype=torch.bool))
    profile.measure(given[0], given[1] if generated is None else generated, **options)
    return profile


class Watched:
    """transformers' own model: what passes each place, and the loss's gradient there, [tokens, entries] of all rows."""

    def __init__(self, model: Any) -> None:
        self.twin = plain_twin(model)
        self.passed: dict[At, list[Tensor]] = defaultdict(list)
        for path, block in model.named_modules():
            if isinstance(block, HybridBlock):
                self._watch(path.removesuffix(block.path) + block.prefix, block)

    def _watch(self, prefix: str, block: HybridBlock) -> None:
        writes = next(name for name, p in block.projections.items() if p.writes)
        part = self.twin.get_submodule
        if isinstance(block, HybridMLP):
            names = block.names
            reads = part(prefix + (names.gate or names.up))
            if names.fused:
                reads.register_forward_hook(lambda module, args, out: self._gates_apart(block, module, args[0], out))
            else:
                reads.register_forward_pre_hook(lambda _, args: (self._note(block, "input", args[0]),))
            part(prefix + names.activation).register_forward_hook(lambda _, args, out: self._note(block, "gate", out))
            part(prefix + writes).register_forward_pre_hook(lambda _, args: (self._note(block, "hidden", args[0]),))
        else:
            if block.skips_inputs_of is not None:
                part(prefix + block.skips_inputs_of).register_forward_pre_hook(
                    lambda _, args: (self._note(block, "input", args[0]),)
                )
            part(prefix + writes).register_forward_pre_hook(lambda _, args: (self._note(block, "output", args[0]),))

    def _gates_apart(self, block: HybridMLP, module: nn.Module, x: Tensor, out: Tensor) -> Tensor:
        gates = self._note(block, "input", x) @ module.weight[: block.neurons].T
        return torch.cat((gates, out[..., block.neurons :]), dim=-1)

    def _note(self, block: HybridBlock, place: str, values: Tensor) -> Tensor:
        values = values.view_as(values)
        values.retain_grad()
        self.passed[block.id, place].append(values)
        return values

    def __call__(self, rows: Tensor) -> dict[At, tuple[Tensor, Tensor]]:
        for row in rows:
            logits = self.twin(row[None]).logits[0, :-1]
            (-logits.log_softmax(-1).gather(1, row[1:, None]).sum()).backward()
        found = {}
        for at, passed in self.passed.items():
            values, gradients = ([t.flatten(0, -2) for t in part] for part in (passed, [t.grad for t in passed]))
            found[at] = torch.cat(values).detach(), torch.cat(gradients)
        return found


@pytest.mark.parametrize("case", ["llama-tied-bias", "phi3", "opt", "gpt_neox"])
def test_sums_equal_autograd_on_transformers_own_model(case: str, directories: dict[str, Path]) -> None:
    model, (rows, generated) = load(directories[case]), text()
    profile, plain = measured(model), Watched(model)(rows)
    by_kind = torch.stack((~generated.flatten(), generated.flatten())).float()
    assert profile.sums.keys() == plain.keys() and len(KINDS) == len(by_kind)
    assert profile.tokens.tolist() == by_kind.sum(1).tolist()
    assert [(block.id, place) for block, place in profile.places()] == list(profile.sums)
    for at, (values, gradients) in plain.items():
        size, found = values.abs(), profile.at(*at)
        parts = ((values != 0).float(), size, size.square(), gradients.square())
        for got, part in zip(profile.sums[at].unbind(1), parts, strict=True):
            expected = by_kind @ part
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 * expected.max().item())
        for got, expected in (
            (found.active, parts[0].mean(0)),
            (found.mean, size.mean(0)),
            (found.spread, size.std(0, correction=0)),
            (found.sensitivity, gradients.square().mean(0).sqrt()),
            *((found.by_kind[kind], size[by_kind[i].bool()].mean(0)) for i, kind in enumerate(KINDS)),
        ):
            torch.testing.assert_close(got, expected, rtol=2e-3, atol=1e-3 * expected.max().item())
        for q, got in zip(QUANTILES, found.quantiles, strict=True):  # of a sample
            low, high = (torch.quantile(size.flatten(), min(1.0, max(0.0, q + d))).item() for d in (-0.03, 0.03))
            assert low <= got <= high


def test_a_kind_of_token_that_is_not_there_has_no_mean(model: Any) -> None:
    rows = text()[0]
    found = [measured(model, rows, torch.full_like(rows, kind, dtype=torch.bool)) for kind in (False, True)]
    for block, place in found[0].places():
        profiles = [profile.at(block.id, place) for profile in found]
        assert [list(profile.by_kind) for profile in profiles] == [["prompt"], ["generated"]]
        torch.testing.assert_close(profiles[0].by_kind["prompt"], profiles[1].by_kind["generated"])
        torch.testing.assert_close(profiles[0].mean, profiles[0].by_kind["prompt"])


def test_impact_is_what_neurons_and_groups_contribute(model: Any) -> None:
    rows, _ = text()
    profile, plain = measured(model), Watched(model)(rows)
    for block in hybrid_blocks(model):
        if isinstance(block, HybridMLP):
            down = block.dequantize()["mlp.down_proj.weight"]
            torch.testing.assert_close(column_norms(block), down.norm(dim=0))
            expected = plain[block.id, "hidden"][0].abs().mean(0) * down.norm(dim=0)
        else:
            attended = plain[block.id, "output"][0].abs().mean(0)
            heads = profile.heads(block, 8)
            torch.testing.assert_close(heads, attended.view(6, 8).mean(1), rtol=1e-3, atol=1e-6)
            expected = attended.view(2, 24).mean(1)  # two groups of three heads
        assert profile.impact(block).shape == (block.neurons,)
        torch.testing.assert_close(profile.impact(block), expected, rtol=1e-3, atol=1e-6)


def test_many_rows_are_sampled_alike() -> None:
    """Whatever the width is a multiple of, and early rows as well as late ones."""
    profile, at = ActivationProfile(nn.Module()), (BlockId(0, "mlp"), "hidden")  # type: ignore[arg-type]
    for row in range(24):
        profile.rows = row
        entries = torch.arange(1536).expand(256, -1) / 1536  # uniform in 0..1 over entries
        profile._sample(*at, entries + row)
    sample = profile.samples[at]
    of_rows = torch.bincount(sample.floor().int(), minlength=24) / len(sample)
    assert of_rows.min() > 0.5 / 24 and of_rows.max() < 1.5 / 24
    inside = sample - sample.floor()
    for q in QUANTILES:
        assert abs(torch.quantile(inside, q) - q) < 0.03
    assert len((inside * 1536).round().unique()) > 1000


def test_nothing_is_left_on_the_model(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.get_input_embeddings().requires_grad_(True)
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    rules = [block.rule for block in hybrid_blocks(model)]
    assert any(wanted.values()) and not all(wanted.values())

    def unchanged() -> bool:
        assert all(block.probe is None and not block.counters.any() for block in hybrid_blocks(model))
        assert all(p.grad is None for p in model.parameters())
        assert rules == [block.rule for block in hybrid_blocks(model)]
        return {name: p.requires_grad for name, p in model.named_parameters()} == wanted

    with torch.no_grad():  # as calibration calls it
        measured(model)
    assert unchanged()
    monkeypatch.setattr(ActivationProfile, "_sample", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measured(model)
    assert unchanged()


@pytest.mark.parametrize("part", ["MLP", "attention"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_activations_that_are_not_finite_name_the_layer(part: str, value: float, model: Any) -> None:
    name = "mlp.up_proj" if part == "MLP" else "self_attn.o_proj"
    block = model.get_submodule(f"model.layers.1.{name.split('.')[0]}")
    shard = block.shards[0]
    if part == "MLP":
        shard.biases["up_proj"][3] = value
    else:
        shard.biases["v_proj"][3] = value
    with pytest.raises(ValueError, match=f"layer 1: the {part} computes NaN or infinite activations"):
        measured(model)


# Killed and resumed


class Killed(Exception):  # noqa: N818
    pass


def assert_same(profile: ActivationProfile, expected: ActivationProfile) -> None:
    assert (profile.rows, profile.tokens.tolist()) == (expected.rows, expected.tokens.tolist())
    for name in ("sums", "samples"):
        got, wanted = getattr(profile, name), getattr(expected, name)
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[at], tensor) for at, tensor in wanted.items())


def interrupted(model: Any, aside: Path, rows: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    monkeypatch.setattr(activation_profile, "SAVE_SECONDS", -1.0)
    measure_row = ActivationProfile._measure_row

    def killed(self: ActivationProfile, *args: Any) -> None:
        if self.rows == rows:
            raise Killed
        measure_row(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ActivationProfile, "_measure_row", killed)
        with pytest.raises(Killed):
            measured(model, aside=aside, **options)
    assert aside.is_file() and [path.name for path in aside.parent.iterdir()] == [aside.name]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_killed_run_goes_on_where_it_was(
    rows: int, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hf_sparse")
    expected, aside = measured(model), tmp_path / "new" / "profile.safetensors"
    interrupted(model, aside, rows, monkeypatch)
    interrupted(model, aside, rows + 1, monkeypatch)  # once more
    assert_same(measured(model, aside=aside), expected)
    assert f"Calibration goes on after {rows + 1} rows" in caplog.text
    assert not aside.exists()


def test_what_is_aside_of_another_text_or_model_is_not_used(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside, (rows, generated) = tmp_path / "profile.safetensors", text()
    others = (
        {"rows": rows.flip(0), "generated": generated},
        {"rows": rows, "generated": ~generated},
        {"rows": rows, "generated": generated, "of": "another checkpoint"},
    )
    for other in others:
        interrupted(model, aside, 2, monkeypatch)
        assert_same(measured(model, aside=aside, **other), measured(model, **other))


def test_a_damaged_file_is_said_and_it_begins_anew(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    aside, expected = tmp_path / "profile.safetensors", measured(model)
    interrupted(model, aside, 2, monkeypatch)
    whole, tensors = aside.read_bytes(), load_file(aside)
    key = _metadata(whole)

    def rewritten(change: Any, metadata: dict[str, str]) -> bytes:
        changed = dict(tensors)
        change(changed)
        save_file(changed, aside, metadata=metadata)
        return aside.read_bytes()

    first = next(name for name in tensors if name.endswith("sums"))
    sample = next(name for name in tensors if name.endswith("samples"))
    for content in (
        b"",
        b"junk",
        whole[:-1],
        whole[: len(whole) // 2],
        rewritten(lambda t: t.pop("tokens"), key),
        rewritten(lambda t: t.pop(sample), key),
        rewritten(lambda t: t.update({first: t[first][..., 1:].contiguous()}), key),
        rewritten(lambda t: t.update({first: t[first][:1].contiguous()}), key),
        rewritten(lambda t: t.update({sample: t[sample][:7].contiguous()}), key),
        rewritten(lambda t: None, key | {"rows": "two"}),
    ):
        aside.write_bytes(content)
        caplog.clear()
        assert_same(measured(model, aside=aside), expected)
        assert f"in {aside} cannot be read" in caplog.text
        assert not aside.exists()


def _metadata(content: bytes) -> dict[str, str]:
    import json

    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]


def test_a_file_that_cannot_be_written_is_said_once(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(activation_profile, "SAVE_SECONDS", -1.0)
    (tmp_path / "file").write_text("in the way")
    assert_same(measured(model, aside=tmp_path / "file" / "profile.safetensors"), measured(model))
    assert caplog.text.count("a calibration that is killed begins anew") == 1


# Thresholds


def passed_by_place(model: Any, rows: Tensor) -> dict[At, Tensor]:
    """float32 [tokens, entries]: magnitudes of the dense model."""
    found: dict[At, list[Tensor]] = defaultdict(list)
    for row in rows:
        for at, values in magnitudes(model, row[None]).items():
            found[at].append(values)
    return {at: torch.cat(values) for at, values in found.items()}


def expected_bytes(block: HybridBlock, place: str) -> int:
    """Of one stored row, in the sizes of the tiny llama: 48, 88 neurons, nf4 in groups of 32."""
    wide, of_hidden = NeuronMatrix.row_nbytes(48, "nf4", 32), 88
    if place == "input":
        return (of_hidden if isinstance(block, HybridMLP) else 48) * wide // 48
    return wide


def test_thresholds_are_the_greedy_choice(model: Any) -> None:
    """What a level leaves out are the first entries in the order of what they cost by what they save."""
    rows = text()[0]
    profile, passed = measured(model), passed_by_place(model, rows)
    costs = {}
    for block, place in profile.places():
        assert row_bytes(block, place) == expected_bytes(block, place)
        spent = (passed[block.id, place] * profile.at(block.id, place).sensitivity).double().square() / 2
        costs[block.id, place] = spent / expected_bytes(block, place)
    everything = torch.cat([cost.flatten() for cost in costs.values()])
    ordered, order = everything.sort()
    for count in (len(order) // 50, len(order) // 4, len(order) // 2, 9 * len(order) // 10):
        level = math.sqrt(float(ordered[count - 1] + ordered[count]))  # between the two: cost is half a square
        rules = thresholds(profile, level)
        assert {(id, place) for id, below in rules.items() for place in below} == costs.keys()
        left_out = torch.cat([(passed[at] < rules[at[0]][at[1]]).flatten() for at in costs])
        brute = torch.zeros_like(left_out)
        brute[order[:count]] = True
        assert int((left_out != brute).sum()) <= 2  # near ties
    assert all(not below.any() for of_block in thresholds(profile, 0.0).values() for below in of_block.values())


def test_entries_that_do_not_matter_are_left_out_first_and_thresholds_stay_finite(model: Any) -> None:
    profile = measured(model)
    id = BlockId(1, "mlp")
    profile.sums[id, "hidden"][:, 3, 5] = 0
    below = thresholds(profile, 1e-4)[id]["hidden"]
    assert below[5] == below.max() > 1e20 and (below > 1e20).sum() == 1
    assert all(bool(t.isfinite().all()) for b in thresholds(profile, 1e30).values() for t in b.values())
    SkipRule("magnitude", thresholds(profile, 1e30)[id])


@pytest.mark.parametrize(
    ("case", "weights", "places"),
    [
        ("llama-tied-bias", "nf4", {"attention": {"input", "output"}, "mlp": {"input", "gate", "hidden"}}),
        ("phi3", "nf4", {"attention": {"output"}, "mlp": {"gate", "hidden"}}),
        ("gpt_neox", "nf4", {"attention": {"output"}, "mlp": {"input", "hidden"}}),
        ("llama-tied-bias", None, {"attention": {"output"}, "mlp": {"gate", "hidden"}}),
    ],
)
def test_thresholds_are_where_they_spare_bytes(
    case: str, weights: str | None, places: dict[str, set[str]], directories: dict[str, Path]
) -> None:
    if weights is None:
        model = SparseAutoModelForCausalLM.from_pretrained(
            directories[case], calibration_tokens=64, max_perplexity_increase=0
        )
    else:
        model = load(directories[case])
    found = thresholds(measured(model), 1e-3)
    assert found.keys() == {block.id for block in hybrid_blocks(model)}
    for block in hybrid_blocks(model):
        assert set(found[block.id]) == places[block.id.kind]
        for place, below in found[block.id].items():
            assert below.shape == (block.width_of(place),) and below.dtype == torch.float32
        block.rule = SkipRule("magnitude", found[block.id])


# The search


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A model that knows these rows, so that what is left out costs."""
    directory, rows = tmp_path_factory.mktemp("learned"), prompt_ids(6, TOKENS, seed=8)
    learn(save_checkpoint("llama", directory), rows).save_pretrained(directory)
    return directory, rows


@pytest.fixture
def search(learned: tuple[Path, Tensor]) -> Search:
    directory, rows = learned
    model = load(directory)
    return Search(model, measured(model, rows[::2]), {}, rows[1::2])


def test_the_cost_of_a_level_is_what_masks_cost(search: Search) -> None:
    for level in (search._start() / 2, search._start()):
        perplexity, unread = search.cost(level)
        model = search.model
        assert {block.id: block.rule for block in hybrid_blocks(model)} == search.rules(level)
        twin, losses = MaskedTwin(model), []
        kept: dict[At, list[int]] = defaultdict(lambda: [0, 0])
        for row in search.held_out:
            losses += (-twin(row[None])[0, :-1].log_softmax(-1).gather(1, row[1:, None]))[:, 0].tolist()
            for at, counts in twin.counts.items():
                kept[at] = [a + b for a, b in zip(kept[at], counts, strict=True)]
        assert perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
        read = whole = 0.0
        share = {at: a / b for at, (a, b) in kept.items()}
        reads = {"q_proj": "input", "o_proj": "output", "gate_proj": "input", "up_proj": "gate", "down_proj": "hidden"}
        for block in hybrid_blocks(model):
            for name, matrix in block.shards[0].matrices.items():
                whole += matrix.nbytes
                read += matrix.nbytes * (share[block.id, reads[name]] if name in reads else 1.0)
        assert unread == pytest.approx(1 - read / whole, abs=1e-3)


def test_more_is_left_out_at_a_higher_level(search: Search) -> None:
    levels = [search._start() * 2.0**power for power in range(-6, 7)]
    unread = [search.cost(level)[1] for level in levels]
    assert unread == sorted(unread) and unread[0] < 0.1 and unread[-1] > 0.5
    assert search.cost(levels[-1])[0] > 2 * search.cost(0.0)[0]
    assert search.cost(0.0)[1] == 0 and search.rules(0.0) == {}
    assert search.cost(levels[0])[0] == pytest.approx(search.cost(0.0)[0], rel=0.02)


def test_rules_of_a_level_do_not_depend_on_what_was_tried_before(search: Search) -> None:
    before = search.rules(1e-4)
    search.cost(1e-3)  # weights now lie by input
    assert search.rules(1e-4) == before


@pytest.mark.parametrize("wanted", [0.05, 0.3, 0.6])
def test_a_share_to_leave_unread_is_hit(wanted: float, search: Search) -> None:
    level = search.find(lambda perplexity, unread: unread <= wanted)
    assert wanted - 0.02 < search.cost(level)[1] <= wanted


@pytest.mark.parametrize("increase", [0.001, 0.02, 0.5])
def test_the_highest_level_within_the_budget_is_found(increase: float, search: Search) -> None:
    dense = search.cost(0.0)[0]
    limit = dense * (1 + increase)
    level = search.find(lambda perplexity, unread: perplexity <= limit)
    assert dense < 10 and level > 0
    assert search.cost(level)[0] <= limit < search.cost(1.03 * level)[0] * 1.01


@pytest.mark.parametrize("best", [3e-3, 1.0, 40.0])
def test_the_search_closes_in_on_the_last_level_that_fits(best: float, search: Search, monkeypatch: Any) -> None:
    limit, tried = best * search._start(), []
    monkeypatch.setattr(search, "cost", lambda level: tried.append(level) or (level, 0.0))
    found = search.find(lambda perplexity, unread: perplexity <= limit)
    assert limit / 1.03 < found <= limit and found in tried and len(tried) < 40


def test_the_search_ends_where_all_or_nothing_fits(search: Search, monkeypatch: Any) -> None:
    monkeypatch.setattr(search, "cost", lambda level: (level, 0.0))
    assert search.find(lambda perplexity, unread: False) == 0
    assert 1e3 * search._start() < search.find(lambda perplexity, unread: True) < math.inf


def test_exact_layers_keep_their_rules(search: Search) -> None:
    exact = {BlockId(1, "mlp"): SkipRule("exact")}
    rules = Search(search.model, search.profile, exact, search.held_out).rules(1e-3)
    assert rules[BlockId(1, "mlp")] == SkipRule("exact") and BlockId(1, "attention") not in rules
    assert {id.layer for id, rule in rules.items() if rule.kind == "magnitude"} == {0, 2}
    assert Search(search.model, search.profile, exact, search.held_out).rules(0.0) == exact
