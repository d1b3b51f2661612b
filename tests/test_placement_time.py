"""The cost model, and placements that minimise it: exactness, bounds, never worse than greedy."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_sparse.cost_model import PlacementBlock, token_time
from hf_sparse.modeling import BlockId, Placement, Tier, streams_weights
from hf_sparse.placement import Solution, solve_placement
from hf_sparse.program import RELATIVE_GAP


def block(layer: int, read: list[float] | torch.Tensor, nbytes: int = 10, shared: int = 0) -> PlacementBlock:
    read = torch.as_tensor(read, dtype=torch.float64)
    return PlacementBlock(BlockId(layer, "mlp"), nbytes, read, read, shared)


def used_bytes(blocks, assignment, tier: int) -> int:
    counts = [int((assignment[b.id] == tier).sum()) for b in blocks]
    return sum(n * b.bytes_per_neuron + (b.shared_bytes if n else 0) for n, b in zip(counts, blocks, strict=True))


def check(blocks, tiers, resident: int, solution: Solution) -> None:
    assignment = solution.placement.assignment
    for t, tier in enumerate(tiers):
        assert tier.budget is None or used_bytes(blocks, assignment, t) + resident * (t == 0) <= tier.budget
    assert solution.value == token_time(blocks, solution.placement).seconds
    assert solution.bound <= solution.value
    assert solution.greedy_value is None or solution.value <= solution.greedy_value


def brute_force(blocks, tiers, resident: int) -> float:
    ways = [list(itertools.product(range(len(tiers)), repeat=b.neurons)) for b in blocks]
    best = math.inf
    for choice in itertools.product(*ways):
        assignment = {b.id: torch.tensor(of) for b, of in zip(blocks, choice, strict=True)}
        room = all(
            tier.budget is None or used_bytes(blocks, assignment, t) + resident * (t == 0) <= tier.budget
            for t, tier in enumerate(tiers)
        )
        if room:
            best = min(best, token_time(blocks, Placement(tiers, assignment)).seconds)
    return best


@pytest.mark.parametrize("seed", range(14))
def test_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 5) for _ in range(2 + seed % 2)]
    sizes = [min(n, 3) for n in sizes] if len(sizes) > 2 else sizes
    blocks = [
        block(layer, [rng.choice([0.0, rng.random(), 10 * rng.random()]) for _ in range(n)], rng.randint(3, 17), shared)
        for layer, n in enumerate(sizes)
        for shared in [rng.choice([0, 0, 4])]
    ]
    total = sum(b.bytes_per_neuron * b.neurons + b.shared_bytes for b in blocks)
    sync, launch = rng.choice([0.0, 0.02, 0.3]), rng.choice([0.0, 0.05])
    fast = Tier("fast", budget=3 + rng.randint(0, total), bandwidth=100.0, sync_seconds=sync, launch_seconds=launch)
    last = Tier("cpu", budget=rng.choice([None, total]), bandwidth=10.0, launch_seconds=0.01)
    solution = solve_placement(blocks, (fast, last), 3, group_size=1)
    check(blocks, (fast, last), 3, solution)
    best = brute_force(blocks, (fast, last), 3)
    assert solution.value == pytest.approx(best, rel=1e-3)
    assert solution.bound <= best * (1 + 1e-9)
    assert solution.status == ("optimal" if solution.gap <= RELATIVE_GAP["time"] else "solved")


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_whatever_beats_the_bound(seed: int) -> None:
    """Also where neurons that are not those read most would let both tiers finish together."""
    rng = random.Random(seed)
    blocks = [
        block(
            layer, [rng.choice([1.0, 5 * rng.random(), 4.0]) for _ in range(rng.randint(1, 4))], 10, rng.choice([0, 3])
        )
        for layer in range(rng.randint(1, 2))
    ]
    figures = {"sync_seconds": rng.choice([0.0, 0.05]), "launch_seconds": rng.choice([0.0, 0.1])}
    fast = Tier("fast", budget=rng.choice([None, 30]), bandwidth=rng.choice([5.0, 10.0, 20.0]), **figures)
    tiers = (fast, Tier("cpu", bandwidth=10.0))
    solution = solve_placement(blocks, tiers, 0)
    check(blocks, tiers, 0, solution)
    assert solution.bound <= brute_force(blocks, tiers, 0) * (1 + 1e-9) <= solution.value * (1 + 2e-9)


def test_one_tier_keeps_its_budget_with_what_is_shared() -> None:
    blocks = [block(0, [1.0] * 4, 10, shared=1000)]
    with pytest.raises(ValueError, match="needs at least 1040 bytes"):
        solve_placement(blocks, (Tier("one", budget=1039),), 0)
    assert solve_placement(blocks, (Tier("one", budget=1040),), 0).status == "single tier"


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_never_worse_than_greedy_and_never_better_than_the_bound(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**31))
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 9999)), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(seed)
    blocks = [
        block(layer, nbytes * torch.rand(n, generator=generator, dtype=torch.float64) ** 5, nbytes, shared=layer % 2)
        for layer, (n, nbytes) in enumerate(sizes)
    ]
    total = sum(n * nbytes + 1 for n, nbytes in sizes)
    syncs = data.draw(st.lists(st.sampled_from([0.0, 5.0, 1e3]), min_size=1, max_size=3))
    fast = [
        Tier(f"fast{i}", budget=data.draw(st.integers(0, total)), bandwidth=100.0 * (i + 1), sync_seconds=sync)
        for i, sync in enumerate(syncs)
    ]
    tiers = (*fast, Tier("cpu", bandwidth=10.0))
    check(blocks, tiers, 0, solve_placement(blocks, tiers, 0, time_limit=3.0))


def test_greedy_loses_to_the_synchronisation() -> None:
    # Room for three neurons. By frequency two of the first block and one of the second would go up, and both blocks
    # would hand over; the second alone is worth more.
    blocks = [block(0, [9.0, 8.0, 0.1, 0.1]), block(1, [8.5, 7.8, 7.7, 7.6])]
    tiers = (Tier("fast", budget=30, bandwidth=100.0, sync_seconds=0.6), Tier("cpu", bandwidth=10.0))
    solution = solve_placement(blocks, tiers, 0)
    check(blocks, tiers, 0, solution)
    assert solution.value < 0.97 * solution.greedy_value
    assert len({int((of == 0).sum()) for of in solution.placement.assignment.values()} - {0}) == 1


def test_neurons_that_many_layers_share_a_budget_go_to_where_they_are_read() -> None:
    read = torch.linspace(1, 0, 500, dtype=torch.float64)
    blocks = [block(0, 10 * read**4), block(1, 10 * read), block(2, torch.zeros(500))]
    tiers = (Tier("fast", budget=4000, bandwidth=1e6), Tier("cpu", bandwidth=1e3))
    counts = {
        id.layer: int((of == 0).sum()) for id, of in solve_placement(blocks, tiers, 0).placement.assignment.items()
    }
    assert counts[1] > counts[0] > 0
    assert counts[2] == 0


def test_two_fast_tiers_share_a_block_and_finish_together() -> None:
    blocks = [block(0, torch.ones(300) * 10)]
    tiers = (
        Tier("a", budget=3000, bandwidth=200.0),
        Tier("b", budget=3000, bandwidth=100.0),
        Tier("cpu", bandwidth=1.0),
    )
    solution = solve_placement(blocks, tiers, 0)
    check(blocks, tiers, 0, solution)
    assert solution.placement.assignment[BlockId(0, "mlp")].bincount(minlength=3).tolist() == [200, 100, 0]
    assert solution.value == pytest.approx(10.0)


def test_a_fast_tier_that_costs_more_than_it_saves_stays_empty() -> None:
    tiers = (Tier("fast", budget=100, bandwidth=1e6, launch_seconds=9.0), Tier("cpu", bandwidth=10.0))
    solution = solve_placement([block(0, [9.0, 9.0])], tiers, 0)
    assert solution.placement.assignment[BlockId(0, "mlp")].tolist() == [1, 1]
    assert solution.value == pytest.approx(1.8)


def test_block_time_by_hand() -> None:
    tiers = (
        Tier("a", bandwidth=100.0, sync_seconds=1.0, launch_seconds=0.5),
        Tier("b", bandwidth=50.0, sync_seconds=2.0),
        Tier("cpu", bandwidth=10.0, launch_seconds=0.25),
    )
    made = block(0, [40.0, 30.0, 20.0, 10.0], shared=5)
    times = {
        (0, 0, 0, 0): (1.55, 0.0, 0.0),
        (2, 2, 2, 2): (0.0, 0.0, 10.75),
        (0, 2, 2, 2): (0.95, 0.0, 7.75),
        (0, 1, 2, 2): (0.95, 2.7, 4.75),
        (1, 1, 1, 1): (0.0, 4.1, 0.0),
    }
    for tier_of, seconds in times.items():
        found = token_time([made], Placement(tiers, {made.id: torch.tensor(tier_of)}))
        assert found.blocks[made.id] == pytest.approx(seconds)
        assert found.seconds == pytest.approx(max(seconds))


def test_hidden_states_that_change_their_home() -> None:
    blocks = [block(layer, [1.0]) for layer in range(4)]
    tiers = (Tier("fast", bandwidth=1e9, sync_seconds=2.0), Tier("cpu", bandwidth=1e9))
    for homes, changes in (((0, 0, 0, 0), 0), ((1, 1, 1, 1), 0), ((1, 0, 0, 1), 2), ((0, 1, 0, 1), 3)):
        assignment = {b.id: torch.tensor([home]) for b, home in zip(blocks, homes, strict=True)}
        found = token_time(blocks, Placement(tiers, assignment))
        assert found.moves == changes


def test_prompts_stream_weights_where_that_is_sooner() -> None:
    gpu, cpu = Tier("gpu", flops=1e14, copy_bandwidth=2e10), Tier("cpu", flops=1e12)
    # 4 bits: 1e9 weights in 5e8 bytes are copied in 25 ms; the CPU takes 2 ms a token
    assert not streams_weights(12, 5 * 10**8, 10**9, gpu, cpu)
    assert streams_weights(14, 5 * 10**8, 10**9, gpu, cpu)


def test_an_unknown_goal() -> None:
    with pytest.raises(ValueError, match="goal: expected one of 'time', 'impact', got 'speed'"):
        solve_placement([block(0, [1.0])], (Tier("cpu"),), 0, goal="speed")
