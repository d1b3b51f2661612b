"""The placement solver: exactness, budgets, the synchronisation minimum, bad input."""

from __future__ import annotations

import functools
import itertools
import math
import random
import subprocess
import sys

import pulp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_sparse import placement
from hf_sparse.cost_model import PlacementBlock, minimum_neurons, token_time
from hf_sparse.modeling import BlockId, Tier
from hf_sparse.placement import Solution
from hf_sparse.program import MAX_GROUPS

solve_placement = functools.partial(placement.solve_placement, goal="impact")


def block(layer: int, impact: list[float] | torch.Tensor, nbytes: int = 10, kind: str = "mlp") -> PlacementBlock:
    impact = torch.as_tensor(impact, dtype=torch.float64)
    return PlacementBlock(BlockId(layer, kind), nbytes, impact, torch.full_like(impact, 0.5 * nbytes))


def tiers_of(*fast_budgets: int | None, sync: float = 0.0, last: int | None = None) -> tuple[Tier, ...]:
    fast = [Tier(f"fast{i}", budget=b, bandwidth=100.0, sync_seconds=sync) for i, b in enumerate(fast_budgets)]
    return (*fast, Tier("cpu", budget=last, bandwidth=10.0))


def check_constraints(blocks, tiers, resident: int, solution: Solution) -> float:
    """Every constraint, counted from the placement alone. Returns the impact on the fast tiers."""
    used = [resident] + [0] * (len(tiers) - 1)
    value = 0.0
    for b in blocks:
        tier_of = solution.placement.assignment[b.id]
        assert tier_of.shape == b.impact.shape
        for t, tier in enumerate(tiers):
            count = int((tier_of == t).sum())
            used[t] += count * b.bytes_per_neuron
            if t < len(tiers) - 1 and count:
                least = minimum_neurons(b.bytes_per_neuron, tier, tiers[-1])
                assert least is not None
                assert count >= least
        value += float(b.impact[tier_of < len(tiers) - 1].sum())
    for tier, taken in zip(tiers, used, strict=True):
        assert tier.budget is None or taken <= tier.budget
    return value


def brute_force(blocks, tiers, resident: int) -> float:
    """The best impact over every assignment of every neuron; -1 where none is allowed."""
    neurons = [(b, i) for b in blocks for i in range(b.neurons)]
    least = {
        (b.id, t): minimum_neurons(b.bytes_per_neuron, tiers[t], tiers[-1])
        for b in blocks
        for t in range(len(tiers) - 1)
    }
    best = -1.0
    for choice in itertools.product(range(len(tiers)), repeat=len(neurons)):
        used = [resident] + [0] * (len(tiers) - 1)
        count = dict.fromkeys(least, 0)
        value = 0.0
        for (b, i), t in zip(neurons, choice, strict=True):
            used[t] += b.bytes_per_neuron
            if t < len(tiers) - 1:
                count[b.id, t] += 1
                value += float(b.impact[i])
        if any(tier.budget is not None and taken > tier.budget for tier, taken in zip(tiers, used, strict=True)):
            continue
        if any(n and (least[k] is None or n < least[k]) for k, n in count.items()):
            continue
        best = max(best, value)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    fast = 1 + seed % 3 // 2  # two fast tiers in every third case
    sizes = [rng.randint(1, 4) for _ in range(3)] if fast == 1 else [rng.randint(1, 3), rng.randint(1, 3)]
    blocks = [
        block(layer, [rng.choice([0.0, rng.random(), 5 * rng.random()]) for _ in range(n)], rng.randint(3, 17))
        for layer, n in enumerate(sizes)
    ]
    total = sum(b.bytes_per_neuron * b.neurons for b in blocks)
    resident = rng.randint(0, 9)
    budgets = [rng.randint(0, total) for _ in range(fast)]
    budgets[0] += resident
    tiers = tiers_of(*budgets, sync=rng.choice([0.0, 1.5, 2.5]), last=rng.choice([None, total]))
    best = brute_force(blocks, tiers, resident)
    solution = solve_placement(blocks, tiers, resident, group_size=1)
    assert solution.status == "optimal"
    assert check_constraints(blocks, tiers, resident, solution) == pytest.approx(solution.value, rel=1e-12)
    assert solution.value == pytest.approx(best, rel=2e-5, abs=1e-6)
    assert solution.bound >= best * (1 - 1e-12)


def test_greedy_loses_to_the_synchronisation_minimum() -> None:
    # A block needs 3 neurons on the fast tier (sync 2.0 s, each gains 0.9 s). Greedy takes two of the first and one of
    # the second, gives the second back and fills up with the first; the program sees which is worth more.
    blocks = [block(0, [9.0, 8.0, 0.1, 0.1]), block(1, [7.0, 6.9, 6.8, 6.7])]
    tiers = tiers_of(30, sync=2.0)
    assert minimum_neurons(10, tiers[0], tiers[-1]) == 3
    solution = solve_placement(blocks, tiers, 0)
    assert solution.greedy_value == pytest.approx(17.1)
    assert solution.value == pytest.approx(20.7)
    assert solution.placement.assignment[BlockId(0, "mlp")].tolist() == [1, 1, 1, 1]
    assert solution.placement.assignment[BlockId(1, "mlp")].tolist() == [0, 0, 0, 1]
    assert solution.status == "optimal"
    assert solution.gap == pytest.approx(0.0, abs=2e-5)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_budgets_hold_to_the_byte(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**31))
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 150), st.integers(1, 123457)), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(seed)
    blocks = [
        block(layer, torch.rand(n, generator=generator, dtype=torch.float64) ** 4, nbytes)
        for layer, (n, nbytes) in enumerate(sizes)
    ]
    total = sum(n * nbytes for n, nbytes in sizes)
    resident = data.draw(st.integers(0, 10**6))
    budgets = [resident + data.draw(st.integers(0, total)), data.draw(st.integers(0, total))]
    tiers = tiers_of(*budgets[: data.draw(st.integers(1, 2))], sync=data.draw(st.sampled_from([0.0, 1e4, 1e5])))
    solution = solve_placement(
        blocks, tiers, resident, group_size=data.draw(st.sampled_from([1, 7, 64])), time_limit=2.0
    )
    value = check_constraints(blocks, tiers, resident, solution)
    assert value == pytest.approx(solution.value, rel=1e-9)
    assert solution.value >= solution.greedy_value
    assert solution.bound >= solution.value
    assert 0 <= solution.gap <= 1


def test_a_budget_that_holds_one_neuron_more() -> None:
    blocks = [block(0, [3.0, 2.0, 1.0], 1_000_003)]
    for budget, expected in ((2_000_005, 3.0), (2_000_006, 5.0), (3_000_008, 5.0), (3_000_009, 6.0)):
        assert solve_placement(blocks, tiers_of(budget), 0).value == expected
    assert solve_placement(blocks, tiers_of(2_000_006 + 11), 11).value == 5.0
    assert solve_placement(blocks, tiers_of(2_000_006 + 10), 11).value == 3.0


def test_grouped_blocks_keep_the_bound_and_beat_greedy() -> None:
    generator = torch.Generator().manual_seed(5)
    blocks = []
    for layer in range(5):
        impact = torch.rand(MAX_GROUPS * 7 + layer, generator=generator, dtype=torch.float64) ** (2 + layer)
        blocks += [block(layer, impact, 1000), block(layer, [20.0, 9.0, 4.0], 40_000, "attention")]
    tiers = tiers_of(1_000_000, sync=5000.0)
    solution = solve_placement(blocks, tiers, 12_345)
    assert check_constraints(blocks, tiers, 12_345, solution) == pytest.approx(solution.value)
    assert solution.status == "solved"
    assert solution.gap < 0.01
    exact = solve_placement(blocks, tiers, 12_345, group_size=1)
    assert exact.value <= solution.bound
    assert solution.value >= 0.999 * exact.value


def test_single_neuron_block_is_all_or_nothing() -> None:
    blocks = [block(0, [5.0], 1000, "attention"), block(0, [1.0, 0.5], 10)]
    assert solve_placement(blocks, tiers_of(999), 0).value == 1.5
    assert solve_placement(blocks, tiers_of(1010), 0).value == 6.0


def test_one_tier_has_nothing_to_solve() -> None:
    blocks = [block(0, [5.0, 1.0])]
    solution = solve_placement(blocks, (Tier("cpu", bandwidth=10.0),), 7)
    assert solution.status == "single tier"
    assert solution.placement.assignment[BlockId(0, "mlp")].tolist() == [0, 0]
    assert solution.token_seconds == pytest.approx(2 * 0.5 * 10 / 10)
    with pytest.raises(ValueError, match=r"gpu_budget.*needs at least 27 bytes"):
        solve_placement(blocks, (Tier("cpu", budget=26),), 7)


def test_everything_fits_on_an_unlimited_fast_tier() -> None:
    blocks = [block(0, [0.0, 5.0, 1.0]), block(1, [1.0, 0.0])]
    solution = solve_placement(blocks, tiers_of(None), 10**12)
    assert solution.value == solution.bound == 7.0
    assert solution.gap == 0


def test_zero_impact_everywhere() -> None:
    solution = solve_placement([block(0, [0.0] * 5)], tiers_of(20), 0)
    assert (solution.value, solution.bound, solution.gap) == (0.0, 0.0, 0.0)


def test_slower_fast_tier_stays_empty() -> None:
    slow = Tier("slow", budget=100, bandwidth=5.0)
    solution = solve_placement([block(0, [4.0, 2.0])], (slow, Tier("cpu", bandwidth=10.0)), 0)
    assert solution.placement.assignment[BlockId(0, "mlp")].tolist() == [1, 1]
    assert solution.bound == 0


def test_last_tier_with_a_budget_pushes_neurons_up() -> None:
    # Nothing is worth anything on the fast tier, and yet two neurons have to go there.
    solution = solve_placement([block(0, [0.0] * 5)], tiers_of(30, last=30), 0)
    assert int((solution.placement.assignment[BlockId(0, "mlp")] == 0).sum()) >= 2


def test_minimum_neurons() -> None:
    cpu = Tier("cpu", bandwidth=10.0)
    assert minimum_neurons(10, Tier("a", bandwidth=100.0, sync_seconds=0.9), cpu) == 1
    assert minimum_neurons(10, Tier("a", bandwidth=100.0, sync_seconds=0.91), cpu) == 2
    assert minimum_neurons(10, Tier("a", bandwidth=100.0, sync_seconds=2.7), cpu) == 3
    assert minimum_neurons(10, Tier("a", bandwidth=100.0), cpu) == 1
    assert minimum_neurons(10, Tier("a", bandwidth=10.0), cpu) == 1
    assert minimum_neurons(10, Tier("a", bandwidth=10.0, sync_seconds=0.1), cpu) is None
    assert minimum_neurons(10, Tier("a", bandwidth=9.0), cpu) is None
    assert minimum_neurons(10, Tier("a", bandwidth=100.0, sync_seconds=math.inf), cpu) is None


def test_token_seconds_takes_the_slowest_tier() -> None:
    blocks = [block(0, [4.0, 3.0, 2.0])]
    tiers = tiers_of(20, sync=1.0)
    solution = solve_placement(blocks, tiers, 0)
    assert solution.placement.assignment[BlockId(0, "mlp")].tolist() == [0, 0, 1]
    # Fast: 2 neurons, read half the time, 0.1 s each. CPU: one neuron, half of 1 s. 1 s to hand over and merge.
    found = token_time(blocks, solution.placement)
    assert found.blocks[BlockId(0, "mlp")] == pytest.approx((0.1, 1.5))
    assert found.seconds == solution.token_seconds == pytest.approx(1.5)


def test_cbc_when_highs_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    solution = solve_placement([block(0, [9.0, 8.0, 0.1]), block(1, [7.0, 6.9, 6.8])], tiers_of(30, sync=2.0), 0)
    assert solution.solver == "PULP_CBC_CMD"
    assert (solution.status, solution.value) == ("optimal", pytest.approx(20.7))


def _break_solver(monkeypatch: pytest.MonkeyPatch, solve) -> None:
    monkeypatch.setattr(pulp.LpProblem, "solve", solve)


def _raise(self, solver) -> None:
    raise pulp.PulpSolverError("no licence")


def _unsolved(self, solver) -> None:
    self.status = pulp.LpStatusNotSolved


def _too_much(self, solver) -> None:
    self.status, self.sol_status = pulp.LpStatusOptimal, pulp.LpSolutionOptimal
    for variable in self.variables():
        variable.varValue = variable.upBound


@pytest.mark.parametrize(("solve", "why"), [(_raise, "no licence"), (_unsolved, "Not Solved"), (_too_much, "breaks")])
def test_a_solver_that_fails_is_reported_and_greedy_used(solve, why, monkeypatch, caplog) -> None:
    _break_solver(monkeypatch, solve)
    blocks, tiers = [block(0, [2.0, 3.0, 1.0])], tiers_of(20)
    solution = solve_placement(blocks, tiers, 0)
    assert (solution.value, solution.greedy_value) == (5.0, 5.0)
    assert solution.status in ("greedy", "optimal")  # the fractional bound may prove it
    assert check_constraints(blocks, tiers, 0, solution) == 5.0
    assert why in caplog.text
    assert len(caplog.records) == 1


def test_no_solver_and_no_greedy_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each block alone is too small for the minimum of greedy's choice, and the CPU cannot take what comes back.
    blocks, tiers = [block(0, [9.0, 8.0, 0.1, 0.1]), block(1, [7.0, 6.9])], tiers_of(40, sync=2.0, last=20)
    assert solve_placement(blocks, tiers, 0).status == "optimal"
    _break_solver(monkeypatch, _unsolved)
    monkeypatch.setattr(placement, "_greedy", lambda choices, worth: None)
    with pytest.raises(RuntimeError, match="time_limit"):
        solve_placement(blocks, tiers, 0)


def test_what_does_not_fit() -> None:
    blocks = [block(0, [1.0, 2.0, 3.0], 100)]
    with pytest.raises(ValueError, match=r"gpu_budget.*budget of 49 bytes.*takes 50 bytes; the smallest.*is 50 bytes"):
        solve_placement(blocks, tiers_of(49), 50)
    with pytest.raises(ValueError, match=r"gpu_budget.*smallest budget that works is 150 bytes"):
        solve_placement(blocks, tiers_of(49, last=200), 50)
    with pytest.raises(
        ValueError,
        match=r"gpu_budget: 300 bytes of neurons, embeddings and head and 50 bytes.*needs at least 150 bytes",
    ):
        solve_placement(blocks, tiers_of(149, last=200), 50)
    assert solve_placement(blocks, tiers_of(150, last=200), 50).value == 3.0
    with pytest.raises(ValueError, match="keeps both the budgets and the synchronisation minimum"):
        solve_placement(blocks, tiers_of(150, last=200, sync=1e9), 50)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"resident_bytes": -1}, "resident_bytes must be an int >= 0, got -1"),
        ({"resident_bytes": 1.5}, "resident_bytes must be an int"),
        ({"resident_bytes": True}, "resident_bytes must be an int"),
        ({"group_size": 0}, "group_size must be an int >= 1, got 0"),
        ({"time_limit": 0.0}, "time_limit must be > 0"),
        ({"time_limit": math.nan}, "time_limit must be > 0"),
        ({"tiers": ()}, "tiers: at least one"),
        ({"blocks": []}, "blocks: at least one"),
        ({"blocks": [block(3, [1.0]), block(3, [2.0])]}, "each id may come once"),
    ],
)
def test_bad_arguments(change, match) -> None:
    arguments = {"blocks": [block(0, [1.0])], "tiers": tiers_of(20), "resident_bytes": 0, **change}
    with pytest.raises(ValueError, match=match):
        solve_placement(**arguments)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bytes_per_neuron": 0}, "bytes_per_neuron must be an int >= 1"),
        ({"bytes_per_neuron": True}, "bytes_per_neuron must be an int >= 1"),
        ({"impact": torch.ones(3)}, "impact must be float64"),
        ({"impact": torch.ones(3, 1, dtype=torch.float64)}, "impact must be float64"),
        ({"impact": torch.ones(0, dtype=torch.float64)}, "at least one neuron"),
        ({"impact": torch.tensor([1.0, math.nan, 0.0], dtype=torch.float64)}, "impact must be finite"),
        ({"impact": torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)}, "impact must be finite and >= 0"),
        ({"impact": torch.ones(4, dtype=torch.float64)}, "one length, got 4 and 3"),
        ({"read_bytes": torch.tensor([0.0, math.inf, 1.1], dtype=torch.float64)}, "read_bytes must be finite"),
        ({"shared_bytes": -1}, "shared_bytes must be an int >= 0"),
    ],
)
def test_bad_blocks(change, match) -> None:
    values = torch.ones(3, dtype=torch.float64)
    arguments = {"id": BlockId(2, "mlp"), "bytes_per_neuron": 4, "impact": values, "read_bytes": values, **change}
    with pytest.raises(ValueError, match=rf"block 2\.mlp: .*{match}"):
        PlacementBlock(**arguments)


def test_the_first_solve_of_a_process_prints_nothing() -> None:
    script = """
import torch
from hf_sparse.modeling import BlockId, Tier
from hf_sparse.cost_model import PlacementBlock
from hf_sparse.placement import solve_placement
block = PlacementBlock(BlockId(0, "mlp"), 10, torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
assert solve_placement([block], (Tier("fast", budget=20, bandwidth=1e12), Tier("cpu")), 0, goal="impact").value == 2
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
