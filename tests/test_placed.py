"""Loaded models whose parts lie on several tiers: budgets, moving, running out of memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.cost_model import PlacementBlock, bytes_by_tier
from hf_sparse.log import warn_once
from hf_sparse.modeling import (
    BlockId,
    HybridAttention,
    HybridBlock,
    HybridMLP,
    PackedHead,
    Placement,
    Predictor,
    SimulatedTier,
    SkipRule,
    Tier,
    hybrid_blocks,
    magnitude,
)
from hf_sparse.placing import placement_blocks, without_coldest
from tiny_models import CASES, plain_twin, prompt_ids, save_checkpoint

QUICK = {"calibration_tokens": 64, "max_perplexity_increase": 0}
GREEDY = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}


def tiers(budget: int | None, **figures: Any) -> tuple[Tier, ...]:
    return SimulatedTier("gpu", budget=budget, bandwidth=1e12, **figures), Tier("cpu", bandwidth=1e10)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedTier, "wait", staticmethod(lambda seconds: None))


@pytest.fixture(scope="module", params=["llama", "llama-tied-bias", "gemma2", "opt", "falcon-40b", "bloom"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_checkpoint(request.param, directory)
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_checkpoint("llama", directory, num_hidden_layers=4)
    return directory


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gemma2")
    save_checkpoint("gemma2", directory, num_hidden_layers=4)
    return directory


def load(directory: Path, **options: Any) -> Any:
    quantization = WeightOnlyQuantConfig(group_size=32, compute_dtype="fp32")
    return SparseAutoModelForCausalLM.from_pretrained(directory, quantization_config=quantization, **QUICK, **options)


def total_bytes(model: Any) -> int:
    return sum(tier.nbytes + tier.cache_bytes for tier in model.placement_summary().tiers)


def check_budgets(model: Any) -> None:
    for tier in model.placement_summary().tiers:
        assert tier.budget is None or tier.nbytes + tier.cache_bytes <= tier.budget


@torch.no_grad()
def logits(model: Any, ids: Tensor | None = None) -> Tensor:
    return model(prompt_ids(2, 9) if ids is None else ids).logits


def same(first: Tensor, second: Tensor) -> None:
    assert (first - second).abs().max() <= 1e-5 * first.abs().max() + 1e-6


# Budgets


def test_every_budget_is_kept_and_gives_the_same_output(checkpoint: Path) -> None:
    whole = load(checkpoint)
    expected, text = logits(whole), whole.generate(prompt_ids(1, 9), **GREEDY)
    total = total_bytes(whole)
    for share in (0.15, 0.5, 0.8, 1.0):
        model = load(checkpoint, tiers=tiers(int(share * total)))
        check_budgets(model)
        fast = model.placement_summary().tiers[0]
        assert fast.nbytes + fast.cache_bytes > 0.75 * share * total
        same(expected, logits(model))
        assert torch.equal(model.generate(prompt_ids(1, 9), **GREEDY), text)
        assert total_bytes(model) == pytest.approx(total, rel=0.01)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_the_room_for_the_cache_is_what_it_takes(case: str, cache_dtype: str | None, tmp_path: Path) -> None:
    save_checkpoint(case, tmp_path, **({"sliding_window": 160} if CASES[case][1].get("sliding_window") else {}))
    model = load(tmp_path, cache_tokens=21, cache_dtype=cache_dtype)
    room = model.placement_summary().tiers[0].cache_bytes
    cache = model.generate(
        prompt_ids(1, 9), return_dict_in_generate=True, **GREEDY | {"max_new_tokens": 13}
    ).past_key_values
    held = 0
    for layer in cache.layers:
        assert layer.get_seq_length() == 21
        held += sum(tensor.numel() * tensor.element_size() for tensor in (layer.keys, layer.values))
        if cache_dtype == "int8":  # given out as numbers; held in one byte, with a scale for each head and token
            heads = layer.keys.shape[1]
            held += 2 * 21 * heads * (layer.keys.shape[3] + 4) - 2 * layer.keys.numel() * layer.keys.element_size()
    assert room == held


def test_embeddings_and_head_compete_with_neurons(llama: Path) -> None:
    model = load(llama, tiers=tiers(None))
    fast, cpu = model.placement_summary().tiers
    assert (fast.whole, cpu.whole) == (("embedding", "head"), ())
    parts = model.part_bytes()
    # a token reads the head whole, and one row of the embeddings
    budget = total_bytes(model) - parts[BlockId(0, "embedding")][0]
    model.set_gpu_budget(budget)
    assert [tier.whole for tier in model.placement_summary().tiers] == [("head",), ("embedding",)]
    check_budgets(model)
    same(logits(load(llama)), logits(model))


def test_a_placement_tells_how_it_was_solved(llama: Path) -> None:
    model = load(llama, tiers=tiers(100_000))
    assert model.solution.placement is model.placement
    text = " ".join(str(model.placement_summary()).split())
    assert f"{model.solution.status}, by {model.solution.solver}" in text and "from the best" in text
    model.place(model.placement)
    assert model.solution is None and "from the best" not in str(model.placement_summary())


def test_a_longer_cache_leaves_less_room_for_neurons(llama: Path) -> None:
    budget = total_bytes(load(llama, cache_tokens=0)) // 2
    neurons = []
    for cache_tokens in (0, 400):
        model = load(llama, tiers=tiers(budget), cache_tokens=cache_tokens)
        check_budgets(model)
        neurons.append(model.placement_summary().tiers[0].nbytes)
    assert neurons[0] > neurons[1]


@pytest.mark.parametrize(
    ("option", "match"),
    [({"cache_tokens": -1}, "cache_tokens: got -1"), ({"cache_tokens": True}, "cache_tokens: got True")],
)
def test_bad_room_for_a_cache(llama: Path, option: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        load(llama, **option)


@pytest.mark.parametrize("case", ["qwen2", "qwen3", "gemma2", "gemma3", "smollm3"])
def test_static_caches_whose_masks_differ_by_layer(case: str, tmp_path: Path) -> None:
    save_checkpoint(case, tmp_path)
    model = load(tmp_path)
    expected = plain_twin(model).generate(prompt_ids(1, 9), cache_implementation="static", **GREEDY)
    assert torch.equal(model.generate(prompt_ids(1, 9), cache_implementation="static", **GREEDY), expected)


# Homes


def test_layers_without_a_neuron_on_a_fast_tier_cross_nothing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(llama, tiers=tiers(None, sync_seconds=1.0))
    expected = logits(model)
    crossed: list[float] = []
    # layers 1 and 2 on the CPU, of layer 3 the MLP is split
    homes = {0: 0, 1: 1, 2: 1, 3: 0}
    assignment = {id: torch.full_like(of, homes[id.layer]) for id, of in model.placement.assignment.items()}
    assignment[BlockId(3, "mlp")][::2] = 1
    model.place(Placement(model.placement.tiers, assignment))
    monkeypatch.setattr(SimulatedTier, "wait", staticmethod(lambda s: crossed.append(s) if s == 0.5 else None))
    same(expected, logits(model))
    assert len(crossed) == 4  # to the CPU, back, and to and fro in the one block that is split


def test_moving_leaves_no_hooks_behind(llama: Path) -> None:
    model = load(llama, tiers=tiers(100_000))
    for budget in (None, 60_000, 150_000):
        model.set_gpu_budget(budget)
    model.place(Placement((Tier("cpu"),), {id: torch.zeros_like(of) for id, of in model.placement.assignment.items()}))
    assert not model._home_hooks
    hooks = [hook for m in model.modules() if m is not model for hook in m._forward_hooks.values()]
    assert all(getattr(hook, "of_hf_sparse", False) for hook in hooks)  # which turn keys of endless texts
    assert model.engine() is not None
    same(logits(load(llama)), logits(model))


# Moving


def test_a_new_budget_moves_neurons_and_loads_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(checkpoint, tiers=tiers(None))
    expected, total = logits(model), total_bytes(model)
    monkeypatch.setattr("hf_sparse.auto.open_checkpoint", lambda *_, **__: pytest.fail("loaded again"))
    for share in (0.6, 0.2, 0.9):
        model.set_gpu_budget(int(share * total))
        check_budgets(model)
        same(expected, logits(model))


def test_a_conversation_goes_on_under_another_budget(checkpoint: Path) -> None:
    whole = load(checkpoint)
    model = load(checkpoint, tiers=tiers(total_bytes(whole) // 2))
    ids = prompt_ids(1, 9)
    outputs = []
    for one, moves in ((whole, False), (model, True)):
        cache = DynamicCache()
        with torch.no_grad():
            one(ids, past_key_values=cache)
            steps = []
            for step, budget in enumerate((0.3, 1.0, 0.5, 0.7)):
                if moves:
                    one.set_gpu_budget(int(budget * total_bytes(whole)))
                steps.append(one(ids[:, step : step + 1], past_key_values=cache).logits)
        outputs.append(torch.cat(steps))
    same(*outputs)


@pytest.mark.parametrize(
    ("budget", "match"),
    [
        ("many", r"gpu_budget\['gpu'\]: got 'many'"),
        (-5, r"gpu_budget\['gpu'\]: got -5"),
        ("50%", "a percentage needs a device"),
        (10, "the smallest budget that works is"),
        ({"cuda:7": 1}, "got {'cuda:7': 1}, expected budgets of the model's tiers gpu, cpu"),
        ({0: 5}, "got {0: 5}, expected budgets of the model's tiers"),
        ({}, "got {}, expected budgets of the model's tiers"),
        (10**30, r"gpu_budget\['gpu'\]: got 1000"),
    ],
)
def test_a_bad_budget_moves_nothing(llama: Path, budget: Any, match: str) -> None:
    model = load(llama, tiers=tiers(100_000))
    before, given = model.placement, model.given_tiers
    with pytest.raises(ValueError, match=match):
        model.set_gpu_budget(budget)
    assert model.placement is before
    assert model.given_tiers == given


def changed(model: Any, change: Any) -> Placement:
    assignment = dict(model.placement.assignment)
    change(assignment)
    return Placement(model.placement.tiers, assignment)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a: a.update({BlockId(1, "mlp"): a[BlockId(1, "mlp")][:-1]}), r"assignment\[1.mlp\]: .* 88 .* got 87"),
        (lambda a: a.update({BlockId(1, "attention"): torch.zeros(2, dtype=torch.int64)}), r"\[1.attention\]: .* 3 "),
        (lambda a: a.update({BlockId(99, "mlp"): torch.zeros(1, dtype=torch.int64)}), r"\[99.mlp\]: the model has no"),
        (lambda a: a.pop(BlockId(2, "mlp")), "expected every block of the model, 2.mlp are missing"),
    ],
)
def test_a_placement_that_does_not_fit_moves_nothing(llama: Path, change: Any, match: str) -> None:
    model = load(llama, tiers=tiers(100_000))
    before, hooks = model.placement, [len(module._forward_pre_hooks) for module in model.modules()]
    with pytest.raises(ValueError, match=match):
        model.place(changed(model, change))
    assert model.placement is before
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    same(logits(load(llama)), logits(model))


@pytest.mark.parametrize("times", [1, 3, 6])
def test_memory_that_runs_out_while_neurons_move(llama: Path, monkeypatch, times: int) -> None:
    model = load(llama, tiers=tiers(60_000))
    calls, original = [], HybridBlock.place

    def fail(self: Any, *args: Any) -> None:
        calls.append(1)
        if len(calls) == times:
            raise torch.OutOfMemoryError("moving")
        original(self, *args)

    monkeypatch.setattr(HybridBlock, "place", fail)
    with pytest.raises(torch.OutOfMemoryError, match="moving"):
        model.set_gpu_budget(120_000)
    for block in hybrid_blocks(model):  # what is said is where it is
        for shard in block.shards:
            position = [tier.name for tier in model.placement.tiers].index(shard.tier.name)
            where = model.placement.assignment[block.id] == position
            assert where.nonzero().flatten().tolist() == shard.neurons.tolist()
    same(logits(load(llama)), logits(model))
    model.set_gpu_budget(120_000)
    check_budgets(model)
    same(logits(load(llama)), logits(model))


def test_moving_neurons_off_may_run_out_of_memory_too(llama: Path, monkeypatch) -> None:
    """A part of a block needs memory on the GPU to be moved; then a whole block goes."""
    model = load(llama, tiers=tiers(100_000))
    expected = load(llama).generate(prompt_ids(1, 9), **GREEDY)
    out_of_memory_beyond(monkeypatch, model, 80_000)
    original = HybridBlock.place

    def fail(self: Any, placed: Any, tier_of: Tensor) -> None:
        on_gpu = torch.cat([s.neurons.long() for s in self.shards if s.tier.name == "gpu"] or [torch.empty(0).long()])
        moves = not torch.equal(on_gpu, (tier_of == 0).nonzero().flatten())
        if moves and not bool((tier_of == 1).all()) and len(self.shards) == 2:
            raise torch.OutOfMemoryError("moving")
        original(self, placed, tier_of)

    monkeypatch.setattr(HybridBlock, "place", fail)
    assert torch.equal(model.generate(prompt_ids(1, 9), **GREEDY), expected)
    monkeypatch.undo()
    same(logits(load(llama)), logits(model))


@pytest.mark.parametrize("budget", [50_000, None])
def test_inference_mode_leaves_nothing_behind(gemma2: Path, budget: int | None) -> None:
    model = load(gemma2, tiers=tiers(60_000))
    for block in hybrid_blocks(model):
        if block.id.kind == "mlp":
            block.rule = magnitude(gate=0.01)
    expected = model.generate(prompt_ids(1, 9), **GREEDY)
    with torch.inference_mode():
        model.set_gpu_budget(budget)
        assert torch.equal(model.generate(prompt_ids(1, 9), **GREEDY), expected)
    for other in (70_000, None):
        model.set_gpu_budget(other)
        assert torch.equal(model.generate(prompt_ids(1, 9), **GREEDY), expected)
        assert 0 < model.active_fraction() <= 1


def test_a_budget_that_changes_while_a_text_is_made(llama: Path) -> None:
    model = load(llama, tiers=tiers(100_000))
    prompts = [prompt_ids(1, 9, seed=seed) for seed in range(3)]
    expected = [model.generate(prompt, **GREEDY) for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(model.generate, prompt, **GREEDY) for prompt in prompts]
        for budget in (60_000, 150_000, 40_000, 120_000):
            model.set_gpu_budget(budget)
        assert all(torch.equal(one.result(), wanted) for one, wanted in zip(running, expected, strict=True))


def test_without_a_gpu_a_budget_is_a_warning(llama: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    warn_once.cache_clear()
    model = load(llama)
    model.set_gpu_budget("8GB")
    assert "all neurons stay on the CPU" in caplog.text
    assert [tier.name for tier in model.placement.tiers] == ["cpu"]


# Out of memory


def out_of_memory_beyond(monkeypatch: pytest.MonkeyPatch, model: Any, nbytes: int) -> list[int]:
    """MLPs of the third layer on run out of memory while more than `nbytes` lie on the first tier; a list of what lay
    there each time.
    """
    seen: list[int] = []
    partial = HybridMLP._partial

    def _partial(self: HybridMLP, shard: Any, *args: Any) -> Tensor:
        if self.id.layer >= 2 and shard.tier.name == "gpu":
            used = bytes_by_tier(placement_blocks(model, model.cache_tokens), model.placement)[0]
            if used > nbytes:
                seen.append(used)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has ...")
        return partial(self, shard, *args)

    monkeypatch.setattr(HybridMLP, "_partial", _partial)
    return seen


@pytest.mark.parametrize("step", ["prompt", "decoding"])
def test_running_out_of_memory_moves_neurons_and_goes_on(llama: Path, monkeypatch, caplog, step: str) -> None:
    warn_once.cache_clear()
    expected = load(llama).generate(prompt_ids(1, 9), **GREEDY)
    model = load(llama, tiers=tiers(None))
    budget = total_bytes(model) // 2
    model.set_gpu_budget(budget)
    if step == "prompt":
        seen = out_of_memory_beyond(monkeypatch, model, budget // 2)
        found = model.generate(prompt_ids(1, 9), **GREEDY)
    else:
        cache, found = DynamicCache(), prompt_ids(1, 9)
        with torch.no_grad():
            for new in range(12):
                if new == 3:
                    seen = out_of_memory_beyond(monkeypatch, model, budget // 2)
                last = model(found[:, cache.get_seq_length() :], past_key_values=cache).logits[:, -1:]
                found = torch.cat((found, last.argmax(-1)), dim=1)
        assert [layer.get_seq_length() for layer in cache.layers] == [20] * 4
    assert torch.equal(found, expected)
    assert len(seen) >= 3 and seen == sorted(seen, reverse=True)
    assert caplog.text.count("gpu ran out of memory") == 1
    monkeypatch.undo()
    model.set_gpu_budget(budget)
    assert bytes_by_tier(placement_blocks(model, model.cache_tokens), model.placement)[0] >= max(seen[0] * 0.9, 1)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"use_cache": False}, {"num_beams": 3}])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(
    ("where", "method", "times"),
    [(HybridMLP, "_partial", (7, 30)), (HybridAttention, "_partial", (7, 30)), (PackedHead, "forward", (2, 5))],
)
def test_wherever_memory_runs_out(
    llama: Path, gemma2: Path, monkeypatch, windowed: bool, where: Any, method: str, times: Any, options: Any
) -> None:
    directory = gemma2 if windowed else llama
    model = load(directory, tiers=tiers(100_000))
    ids, options = prompt_ids(2, 9), GREEDY | options
    expected = load(directory).generate(ids, **options)
    calls, original = [], getattr(where, method)

    def fail(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) in times:
            raise torch.OutOfMemoryError("no more")
        return original(self, *args)

    monkeypatch.setattr(where, method, fail)
    before = model.placement_summary().tiers[0].nbytes
    if windowed and "cache_implementation" in options:  # it overwrites its window
        with pytest.raises(torch.OutOfMemoryError, match="no more"):
            model.generate(ids, **options)
        return
    assert torch.equal(model.generate(ids, **options), expected)
    assert model.placement_summary().tiers[0].nbytes < before


def test_out_of_memory_with_nothing_left_to_move_is_raised(llama: Path, monkeypatch) -> None:
    model = load(llama, tiers=tiers(100_000))
    monkeypatch.setattr(HybridMLP, "forward", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no more")))
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match="no more"):
        model(prompt_ids(1, 5))
    assert all(bool(of.all()) for of in model.placement.assignment.values())
    whole = load(llama)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match="no more"):
        whole(prompt_ids(1, 5))


def test_the_coldest_neurons_go_first() -> None:
    read = torch.tensor([5.0, 1.0, 4.0, 2.0], dtype=torch.float64)
    blocks = [
        PlacementBlock(BlockId(0, "mlp"), 10, read, read),
        PlacementBlock(BlockId(1, "mlp"), 10, read * 2, read * 2),
    ]
    placement = Placement(tiers(None), {block.id: torch.zeros(4, dtype=torch.int64) for block in blocks})
    for nbytes, kept in ((1, (3, 4)), (20, (2, 4)), (21, (2, 3)), (10**6, (0, 0))):
        left = without_coldest(placement, blocks, 0, nbytes)
        assert tuple(int((left.assignment[block.id] == 0).sum()) for block in blocks) == kept
    assert not any(of.any() for of in placement.assignment.values())


# Prompts


@pytest.mark.parametrize("rows", [1, 3])
def test_a_prompt_streams_the_weights_of_cold_neurons_where_that_is_sooner(checkpoint: Path, monkeypatch, rows) -> None:
    monkeypatch.setattr("hf_sparse.modeling.mlp.STREAMED_BYTES", 1000)  # in several pieces
    parts: list[str] = []
    part_of = HybridMLP.part_of
    monkeypatch.setattr(HybridMLP, "part_of", lambda *args: (parts.append(args[-1].name), part_of(*args))[1])
    ids = prompt_ids(rows, 50)
    expected = logits(load(checkpoint), ids)
    for flops, streams in ((1e15, True), (1e9, False)):
        model = load(checkpoint, tiers=tiers(None, flops=flops, copy_bandwidth=1e15))
        assignment = {id: torch.arange(len(of)) % 2 for id, of in model.placement.assignment.items()}
        model.place(Placement(model.placement.tiers, assignment))
        same(expected, logits(model, ids))
        assert (len(parts) > 3 and set(parts) == {"gpu"}) if streams else not parts
        parts.clear()
        logits(model, ids[:1, :20])  # too short
        assert not parts


# Rules and predictors


def test_rules_leave_out_the_same_on_two_tiers(llama: Path) -> None:
    texts = []
    for options in ({}, {"tiers": tiers(120_000)}):
        model = load(llama, **options)
        for block in hybrid_blocks(model):
            if block.id.kind == "mlp":
                block.rule = magnitude(gate=0.01, hidden=0.005)
        texts.append(model.generate(prompt_ids(1, 9), **GREEDY))
        assert 0.05 < model.active_fraction() < 0.999
        assert 0 < model.read_share() < 1
    assert torch.equal(*texts)


def test_predictors_are_split_like_their_neurons(llama: Path) -> None:
    texts, bytes_read = [], []
    for options in ({}, {"tiers": tiers(120_000)}):
        model = load(llama, **options)
        for block in hybrid_blocks(model):
            if block.id.kind == "mlp":
                generator = torch.Generator().manual_seed(block.id.layer)
                sizes = ((8, block.width_of("input")), (block.neurons, 8), (block.neurons,))
                block.rule = SkipRule("predicted")
                block.predictor = Predictor(*(torch.randn(*size, generator=generator) for size in sizes))
        split = [shard for block in hybrid_blocks(model) for shard in block.shards if shard.predictor is not None]
        assert all(shard.predictor.fc2.rows == len(shard.neurons) for shard in split)
        model.solve(model.placement.tiers)  # predictors are part of what is placed
        check_budgets(model)
        texts.append(model.generate(prompt_ids(1, 9), **GREEDY))
        assert 0.2 < model.active_fraction() < 0.8
        bytes_read.append(model.read_share())
    assert torch.equal(*texts)
    assert bytes_read[0] == pytest.approx(bytes_read[1], rel=0.1)  # fc1 is read on both tiers


def test_two_texts_at_once(llama: Path) -> None:
    model = load(llama, tiers=tiers(120_000))
    prompts = [prompt_ids(1, 9, seed=seed) for seed in range(4)]
    expected = [model.generate(prompt, **GREEDY) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: model.generate(prompt, **GREEDY), prompts))
    assert all(map(torch.equal, found, expected))
