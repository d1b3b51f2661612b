"""Which neuron goes to which tier: PowerInfer's integer program (SOSP'24, section 6.3) and one that minimises the time
of a token, each beside greedy choices under the same budgets.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hf_sparse.modeling import Placement, Tier

from .cost_model import PlacementBlock, bytes_by_tier, minimum_neurons, token_time
from .log import logger
from .program import RELATIVE_GAP, Answer, by_impact, by_time

Goal = Literal["time", "impact"]
GOALS: tuple[Goal, ...] = ("time", "impact")


@dataclass(frozen=True, eq=False)
class Solution:
    """A placement, and how good it is known to be.

    `goal`: "time" (least seconds per token by the cost model) or "impact" (the paper's: most impact on the fast
    tiers). `value` is what was reached of it, `bound` what no placement within the same constraints surpasses, `gap`
    the distance from one to the other, relative to the larger. `greedy_value`: what filling the tiers in order of
    impact reaches (None where that finds no placement). `status`: "optimal" (no more than `program.RELATIVE_GAP` from
    the bound), "solved" (the best of what the program chooses between), "feasible" (the time was up: the best found),
    "greedy" (the solver gave nothing of use, or nothing better) or "single tier" (nothing to solve). `seconds`: time to
    solve. `solver`: its name. `token_seconds`: the cost model's time for one token. `fast_impact`: share of all impact
    that lies on the fast tiers.
    """

    placement: Placement
    goal: Goal
    status: str
    value: float
    bound: float
    gap: float
    greedy_value: float | None
    seconds: float
    solver: str
    token_seconds: float
    fast_impact: float

    def __str__(self) -> str:
        if self.status == "single tier":
            return f"one tier, nothing to solve; {self.token_seconds * 1e3:.2f} ms per token by the cost model"
        value = f"{self.value * 1e3:.2f} ms per token" if self.goal == "time" else f"an impact of {self.value:.6g}"
        return (
            f"{self.status}, by {self.solver} in {self.seconds:.1f} s: {value} by the cost model, at most "
            f"{self.gap:.2%} from the best; {self.fast_impact:.0%} of the neurons' load on the fast tiers"
        )


def solve_placement(
    blocks: Sequence[PlacementBlock],
    tiers: Sequence[Tier],
    resident_bytes: int,
    *,
    goal: Goal = "time",
    group_size: int = 64,
    time_limit: float = 10.0,
) -> Solution:
    """Places the neurons of `blocks`, which are in the order in which a token goes through them.

    `resident_bytes` lie on `tiers[0]` whatever happens and count against its budget first. Budgets are honoured to the
    byte. With the goal "impact" a fast tier, all but the last, holds of each block no neuron or at least
    `minimum_neurons`. `group_size` is how many neurons of similar worth the program values alike on average (a block
    has MIN_GROUPS to MAX_GROUPS groups, one neuron each where it is small). `time_limit` is in seconds, for everything.
    Never worse than greedy by impact.

    Raises ValueError for bad arguments, where `resident_bytes` exceed the first budget, and where the neurons do not
    fit; RuntimeError where no placement was found in `time_limit`, which takes a last tier with a tight budget.
    """
    started = time.perf_counter()
    _check_arguments(blocks, tiers, resident_bytes, goal, group_size, time_limit)
    choices = _Choices(blocks, tiers, resident_bytes, goal)
    if len(tiers) == 1:
        whole = choices.on_the_last()
        seconds = choices.token_seconds(whole)
        value = seconds if goal == "time" else 0.0
        spent = time.perf_counter() - started
        return Solution(
            choices.placement(whole), goal, "single tier", value, value, 0.0, value, spent, "none", seconds, 0.0
        )

    greedy = _greedy(choices, [block.impact for block in blocks])
    left = max(0.55 * time_limit - (time.perf_counter() - started), 0.2 * time_limit)
    answer = (by_time if goal == "time" else by_impact)(blocks, tiers, resident_bytes, group_size, left)
    status, solved = answer.status, None
    if answer.counts is not None:
        # The solver works to a tolerance; budgets do not.
        solved = choices.allowed(_split(choices, choices.orders, torch.stack(answer.counts)))
        status = status if solved is not None else "its answer breaks a constraint"
    others = [greedy]
    if goal == "time":
        density = [block.read_bytes / block.bytes_per_neuron for block in blocks]
        others += [_greedy(choices, density), choices.allowed(choices.on_the_last())]
    best = min((found for found in (solved, *others) if found is not None), key=choices.cost, default=None)
    if best is None:
        if status == "infeasible":
            raise ValueError(
                f"tiers: no placement of {choices.neuron_bytes} bytes of neurons keeps both the budgets and the "
                f"synchronisation minimum; budgets: {_describe(tiers)}; give the last tier more room"
            )
        raise RuntimeError(
            f"no placement found in {time_limit} s ({answer.solver}: {status}); raise time_limit or the budgets"
        )
    if solved is None:
        logger.warning("%s gave no usable placement (%s): neurons are placed greedily", answer.solver, status)
    return _solution(choices, goal, best, greedy, answer, best is solved, status, time.perf_counter() - started)


def _solution(
    choices: _Choices,
    goal: Goal,
    best: list[Tensor],
    greedy: list[Tensor] | None,
    answer: Answer,
    solved: bool,
    status: str,
    seconds: float,
) -> Solution:
    impact, token_seconds = choices.impact(best), choices.token_seconds(best)
    greedy_value: float | None = None
    if goal == "time":
        value, bound = token_seconds, min(max(answer.bound, 0.0), token_seconds)
        if greedy is not None:
            greedy_value = choices.token_seconds(greedy)
    else:
        value, bound = impact, max(min(answer.bound, choices.fractional_bound()), impact)
        if greedy is not None:
            greedy_value = choices.impact(greedy)
    gap = abs(bound - value) / max(value, bound) if max(value, bound) > 0 else 0.0
    if gap <= RELATIVE_GAP[goal]:
        status = "optimal"
    elif not solved:
        status = "greedy"
    elif status == "optimal":
        status = "solved"
    return Solution(
        placement=choices.placement(best),
        goal=goal,
        status=status,
        value=value,
        bound=bound,
        gap=gap,
        greedy_value=greedy_value,
        seconds=seconds,
        solver=answer.solver,
        token_seconds=token_seconds,
        fast_impact=impact / choices.all_impact if choices.all_impact else 0.0,
    )


def _describe(tiers: Sequence[Tier]) -> str:
    return ", ".join(f"{tier.name}: {'no limit' if tier.budget is None else f'{tier.budget} bytes'}" for tier in tiers)


def _check_arguments(
    blocks: Sequence[PlacementBlock],
    tiers: Sequence[Tier],
    resident_bytes: int,
    goal: str,
    group_size: int,
    time_limit: float,
) -> None:
    if goal not in GOALS:
        raise ValueError(f"goal: expected one of {', '.join(map(repr, GOALS))}, got {goal!r}")
    for name, value, smallest in (("resident_bytes", resident_bytes, 0), ("group_size", group_size, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise ValueError(f"{name} must be an int >= {smallest}, got {value!r}")
    if not time_limit > 0:
        raise ValueError(f"time_limit must be > 0 seconds, got {time_limit!r}")
    if not tiers:
        raise ValueError("tiers: at least one is needed, got none")
    if not blocks:
        raise ValueError("blocks: at least one is needed, got none")
    if len({block.id for block in blocks}) != len(blocks):
        raise ValueError(f"blocks: each id may come once, got {[str(block.id) for block in blocks]}")
    neuron_bytes = sum(block.bytes_per_neuron * block.neurons + block.shared_bytes for block in blocks)
    budget = tiers[0].budget
    others = [tier.budget for tier in tiers[1:]]
    # What the first tier has to hold: the resident bytes and those neurons that fit nowhere else.
    spill = 0 if None in others else max(0, neuron_bytes - sum(limit for limit in others if limit is not None))
    least = resident_bytes + spill
    if budget is not None and resident_bytes > budget:
        raise ValueError(
            f"gpu_budget: tier {tiers[0].name!r} has a budget of {budget} bytes, but what must lie on it (norms and "
            f"other small tensors) takes {resident_bytes} bytes; the smallest budget that works is {least} bytes"
        )
    if budget is not None and least > budget:
        raise ValueError(
            f"gpu_budget: {neuron_bytes} bytes of neurons, embeddings and head and {resident_bytes} bytes that must "
            f"lie on the first tier do not fit into all tiers together ({_describe(tiers)}); tier {tiers[0].name!r} "
            f"needs at least {least} bytes"
        )


class _Choices:
    """Ways to place the neurons: what is allowed, and what it is worth. A choice is, block by block, int64 [neurons]:
    positions in `tiers`.
    """

    def __init__(
        self, blocks: Sequence[PlacementBlock], tiers: Sequence[Tier], resident_bytes: int, goal: Goal
    ) -> None:
        self.blocks, self.tiers, self.goal = blocks, tuple(tiers), goal
        self.last = len(tiers) - 1
        by_impact = lambda block: torch.argsort(block.impact, descending=True, stable=True)  # noqa: E731
        self.orders = [block.order if goal == "time" else by_impact(block) for block in blocks]
        self.neuron_bytes = sum(block.bytes_per_neuron * block.neurons for block in blocks)
        self.all_impact = sum(float(block.impact.sum()) for block in blocks)
        self.capacities = [tier.budget for tier in tiers]
        if self.capacities[0] is not None:
            self.capacities[0] -= resident_bytes
        # least[block][fast tier]: None where the block cannot use the tier
        self.least: list[list[int | None]] = [[1] * self.last for _ in blocks]
        if goal == "impact":
            for b, block in enumerate(blocks):
                counts = [minimum_neurons(block.bytes_per_neuron, fast, tiers[-1]) for fast in tiers[:-1]]
                self.least[b] = [None if n is None or n > block.neurons else n for n in counts]

    def on_the_last(self) -> list[Tensor]:
        return [torch.full((block.neurons,), self.last) for block in self.blocks]

    def placement(self, choice: list[Tensor]) -> Placement:
        ids = [block.id for block in self.blocks]
        return Placement(self.tiers, dict(zip(ids, choice, strict=True)))

    def token_seconds(self, choice: list[Tensor]) -> float:
        return token_time(self.blocks, self.placement(choice)).seconds

    def impact(self, choice: list[Tensor]) -> float:
        pairs = zip(self.blocks, choice, strict=True)
        return sum(float(block.impact[tier_of < self.last].sum()) for block, tier_of in pairs)

    def cost(self, choice: list[Tensor]) -> float:
        return self.token_seconds(choice) if self.goal == "time" else -self.impact(choice)

    def excess(self, choice: list[Tensor]) -> list[int]:
        """By tier: bytes over its budget, in exact integers; not above 0 where it is kept."""
        used = bytes_by_tier(self.blocks, self.placement(choice))
        return [0 if limit is None else taken - limit for taken, limit in zip(used, self.capacities, strict=True)]

    def allowed(self, choice: list[Tensor]) -> list[Tensor] | None:
        """`choice`, or None where it breaks a constraint."""
        if max(self.excess(choice)) > 0:
            return None
        for least, tier_of in zip(self.least, choice, strict=True):
            counts = tier_of.bincount(minlength=len(self.tiers)).tolist()[: self.last]
            if any(n and (needed is None or n < needed) for n, needed in zip(counts, least, strict=True)):
                return None
        return choice

    def fractional_bound(self) -> float:
        """What neurons that can be cut could reach, with no synchronisation minimum and all fast tiers as one."""
        usable = [b for b, least in enumerate(self.least) if any(n is not None for n in least)]
        if not usable:
            return 0.0
        impact = torch.cat([self.blocks[b].impact for b in usable])
        limits = [capacity for capacity in self.capacities[: self.last] if capacity is not None]
        if len(limits) < self.last:
            return float(impact.sum())
        each = [torch.full((self.blocks[b].neurons,), float(self.blocks[b].bytes_per_neuron)) for b in usable]
        sizes = torch.cat(each).double()
        order = torch.argsort(impact / sizes, descending=True)
        ends = sizes[order].cumsum(0)
        share = ((sum(limits) - ends) / sizes[order] + 1).clamp(0, 1)
        return float((impact[order] * share).sum())


def _split(choices: _Choices, orders: list[Tensor], counts: Tensor) -> list[Tensor]:
    """The first neurons of each order on the first tier, the next on the second, and so on. `counts`: int64 [blocks,
    fast tiers].
    """
    found = []
    for block, order, row in zip(choices.blocks, orders, counts.tolist(), strict=True):
        tiers = torch.arange(len(row) + 1).repeat_interleave(torch.tensor([*row, block.neurons - sum(row)]))
        found.append(torch.empty(block.neurons, dtype=torch.int64).scatter_(0, order, tiers))
    return found


# Greedy


def _greedy(choices: _Choices, worth: Sequence[Tensor]) -> list[Tensor] | None:
    """Fills the fast tiers one after the other in order of `worth`. A block that ends up below the synchronisation
    minimum leaves the tier, the weaker half of such blocks at a time, and the room is filled again. None where the last
    tier cannot hold the rest.
    """
    sizes = torch.tensor([block.bytes_per_neuron for block in choices.blocks])
    shared = sum(block.shared_bytes for block in choices.blocks)
    lengths = torch.tensor([block.neurons for block in choices.blocks])
    owner = torch.arange(len(choices.blocks)).repeat_interleave(lengths)
    owner = owner[torch.argsort(torch.cat(list(worth)), descending=True, stable=True)]
    gained = [
        torch.cat((torch.zeros(1, dtype=torch.float64), torch.sort(w, descending=True).values.cumsum(0))) for w in worth
    ]
    counts = torch.zeros(len(choices.blocks), choices.last, dtype=torch.int64)
    for tier in range(choices.last):
        needed = [least[tier] for least in choices.least]
        allowed = torch.tensor([n is not None for n in needed])
        least = torch.tensor([n or 0 for n in needed])
        limit = choices.capacities[tier]
        while True:
            room = None if limit is None else max(0, limit - shared)
            filled = _fill(owner[allowed[owner]], sizes, room)
            short = torch.nonzero((filled > 0) & (filled < least)).flatten().tolist()
            if not short:
                break
            taken = counts.sum(1)
            short.sort(key=lambda b: float(gained[b][taken[b] + filled[b]] - gained[b][taken[b]]))
            allowed[short[: (len(short) + 1) // 2]] = False
        counts[:, tier] = filled
        owner = _drop_first(owner, filled)
    orders = [torch.argsort(of_block, descending=True, stable=True) for of_block in worth]
    return choices.allowed(_split(choices, orders, counts))


def _fill(owner: Tensor, sizes: Tensor, capacity: int | None) -> Tensor:
    """How many neurons of each block fit when they come in the order of `owner` (int64 [n], positions in `sizes`) and
    what does not fit is passed over.
    """
    if capacity is None:
        return owner.bincount(minlength=len(sizes))
    counts = torch.zeros(len(sizes), dtype=torch.int64)
    while owner.numel():
        ends = sizes[owner].cumsum(0)
        fitting = int(torch.searchsorted(ends, capacity, right=True))
        counts += owner[:fitting].bincount(minlength=len(sizes))
        capacity -= int(ends[fitting - 1]) if fitting else 0
        # The neuron after these is too large, and with it all that are not smaller: each pass ends one size at least.
        owner = owner[fitting:]
        owner = owner[sizes[owner] <= capacity]
    return counts


def _drop_first(owner: Tensor, counts: Tensor) -> Tensor:
    """`owner` without the first `counts[b]` entries of each block b."""
    order = torch.argsort(owner, stable=True)
    lengths = owner.bincount(minlength=len(counts))
    starts = lengths.cumsum(0) - lengths
    rank = torch.empty_like(owner).scatter_(0, order, torch.arange(len(owner)) - starts[owner[order]])
    return owner[rank >= counts[owner]]
