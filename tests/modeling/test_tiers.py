"""Tiers side by side: what runs when, what is waited for, and that threads change nothing of the result."""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar

import pytest
import torch
from torch import nn

from hf_sparse.modeling import (
    BlockId,
    Placement,
    SimulatedTier,
    SkipRule,
    Tier,
    WeightFormat,
    magnitude,
    rules_apply,
    skipping,
)
from hf_sparse.modeling.tiers import HandedOver, all_to_device, merge, run_side_by_side
from mlp_blocks import load, place

CPU = Tier("cpu")
GPU = SimulatedTier("gpu", bandwidth=1e6, sync_seconds=0.5, launch_seconds=2.0)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What simulated tiers would have slept."""
    slept: list[float] = []
    monkeypatch.setattr(SimulatedTier, "wait", staticmethod(lambda seconds: slept.append(seconds)))
    return slept


def nothing_read(position: int):
    return lambda: 0.0


@pytest.mark.parametrize("tiers", [(GPU, CPU), (CPU, GPU)])
def test_both_tiers_work_at_the_same_time(tiers, waits) -> None:
    meeting = threading.Barrier(2, timeout=20)  # broken, an error, where one waits for the other to end

    def compute(position: int) -> tuple[str, int, str]:
        meeting.wait()
        return tiers[position].name, position, threading.current_thread().name

    results = run_side_by_side(tiers, compute, nothing_read)
    assert [result[:2] for result in results] == [(tier.name, i) for i, tier in enumerate(tiers)]
    names = {result[0]: result[2] for result in results}
    assert names["cpu"] == threading.current_thread().name != names["gpu"]


def test_a_simulated_tier_takes_as_long_as_its_figures_say(waits) -> None:
    read = {0: 3e6, 1: 1e9}
    run_side_by_side((GPU, CPU), lambda position: position, lambda position: lambda: read[position])
    # the CPU's hidden states come and its result goes; the rest is the simulated tier's: 2 s and 3 s, less its work
    assert sorted(waits)[:2] == [0.25, 0.25]
    assert sorted(waits)[2] == pytest.approx(5.0, abs=0.5)
    waits.clear()
    run_side_by_side((GPU,), lambda position: position, lambda position: lambda: read[position])
    assert waits == [pytest.approx(5.0, abs=0.5)]
    waits.clear()
    run_side_by_side((CPU, Tier("another")), lambda position: position, nothing_read)
    assert not waits


def test_an_error_on_a_simulated_tier_is_the_callers(waits) -> None:
    def fail(position: int) -> None:
        if position == 0:
            raise torch.OutOfMemoryError("no more")

    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        run_side_by_side((GPU, CPU), fail, nothing_read)


def test_what_belongs_to_a_thread_is_handed_on(waits) -> None:
    said: ContextVar[str] = ContextVar("said")
    said.set("here")

    def compute(position: int) -> tuple[str, bool, bool, bool]:
        return said.get(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), rules_apply()

    with torch.inference_mode(), skipping("always"):
        there, here = run_side_by_side((GPU, CPU), compute, nothing_read)
    assert there == here == ("here", False, True, True)
    assert run_side_by_side((GPU, CPU), compute, nothing_read)[0] == ("here", True, False, False)


def test_merge_and_handing_over_on_one_device_copy_nothing() -> None:
    x = torch.randn(2, 3)
    assert HandedOver(x, (GPU, CPU)).at(CPU.device) is x
    assert all_to_device({"a": (x, [x]), "b": None}, CPU.device)["a"][1][0] is x
    assert torch.equal(merge([x, x, x], CPU.device), x + x + x)


RULES = {
    "none": SkipRule(),
    "exact": SkipRule("exact"),
    "magnitude": magnitude(gate=0.2, hidden=0.3, input=0.4),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_block_on_a_simulated_tier_computes_what_it_does_on_the_cpu(rule, tokens, waits) -> None:
    block = load("gated", nn.SiLU(), WeightFormat("int8", 32))
    x = torch.randn(tokens, block.width_of("input"), generator=torch.Generator().manual_seed(3))
    outputs, counts = [], []
    for tiers in ((CPU,), (GPU, CPU)):
        tier_of = torch.arange(block.neurons) % len(tiers)
        block.place(tiers, tier_of)
        block.rule = RULES[rule]
        block.reset_counters()
        with skipping("always"):
            outputs.append(block(x))
        counts.append(block.counters.tolist())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=2e-5, atol=2e-6)
    for what, one, both in zip(block.counted, *counts, strict=True):
        assert both == ([2 * n for n in one] if what == "input" else one), what  # every tier looks at the input
    read = [seconds for seconds in waits if seconds > 1]
    assert len(read) == 1
    assert read[0] == pytest.approx(2.0 + block.read_bytes_of(block.shards[0], block.counters) / 1e6, abs=0.6)


def test_counts_go_with_a_block_that_moves() -> None:
    block = load("gated", nn.SiLU(), WeightFormat("int8", 32))
    place(block, 2)
    block.rule = magnitude(gate=0.2)
    with skipping("always"):
        block(torch.randn(1, block.width_of("input")))
    before = block.counters.tolist()
    assert before[block.counted.index("gate")][1] == block.neurons
    place(block, 3, seed=2)
    assert block.counters.tolist() == before
    place(block, 1)
    assert block.counters.tolist() == before


def test_a_placement_names_tiers_that_exist() -> None:
    with pytest.raises(ValueError, match=r"assignment\[0.head\]: tier positions must lie in 0..1"):
        Placement((GPU, CPU), {BlockId(0, "head"): torch.tensor([2])})
    with pytest.raises(ValueError, match="kinds are attention, mlp, embedding, head"):
        BlockId.parse("0.tail")
    assert BlockId.parse("0.embedding") == BlockId(0, "embedding")
    with pytest.raises(ValueError, match="launch_seconds must be >= 0"):
        Tier("a", launch_seconds=-1.0)
    with pytest.raises(ValueError, match="flops must be > 0"):
        Tier("a", flops=0.0)


def test_a_tier_that_fails_waits_for_the_others() -> None:
    """What the caller takes back then must not be written to any more."""
    fast, slow = SimulatedTier("waited for"), Tier("cpu")
    done: list[int] = []

    def compute(position: int) -> int:
        if position == 1:
            raise torch.OutOfMemoryError("no more")
        time.sleep(0.2)
        done.append(position)
        return position

    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        run_side_by_side((fast, slow), compute, lambda position: lambda: 0.0)
    assert done == [0]
