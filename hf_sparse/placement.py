"""Which neuron goes to which tier: PowerInfer's integer program (SOSP'24, section 6.3), solved with PuLP.

What the program knows of a block is how many of its neurons lie on each fast tier. All neurons of a block have one
size, so an exchange shows that the best n of them are the n of highest impact: the objective is a concave function of n
for each block. It is drawn as a polyline whose pieces are groups of neurons of similar impact, and only the counts and
the switches of the synchronisation minimum are integers. That is the paper's program (one binary for each group and
unit) with a few hundred integers in place of tens of thousands, and its answers are exact to the neuron and to the
byte.

The cost model: a tier reads a neuron in `bytes_per_neuron / bandwidth` seconds, and a block that uses a fast tier pays
that tier's `sync_seconds` once.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pulp
import torch
from torch import Tensor

from hf_sparse.modeling import BlockId, Placement, Tier

from .log import logger

# Where the solver may stop: impacts are measured on a few thousand tokens and are not known to five digits.
RELATIVE_GAP = 1e-5
# Groups of a block: so many that the polyline is true to 1e-4 or so, so few that 80 layers are solved in seconds.
MIN_GROUPS, MAX_GROUPS = 32, 96


@dataclass(frozen=True, eq=False)
class PlacementBlock:
    """What the solver knows of a block: `impact` (float64 [neurons], >= 0, finite) is what a neuron is worth on a fast
    tier, `active_fraction` (float64 [neurons], in 0..1) how often it is computed for a token, `bytes_per_neuron` (> 0)
    its stored size.

    A block with one neuron is placed whole. Raises ValueError where a field is not as said.
    """

    id: BlockId
    bytes_per_neuron: int
    impact: Tensor
    active_fraction: Tensor

    def __post_init__(self) -> None:
        if (
            isinstance(self.bytes_per_neuron, bool)
            or not isinstance(self.bytes_per_neuron, int)
            or self.bytes_per_neuron < 1
        ):
            raise ValueError(f"block {self.id}: bytes_per_neuron must be an int >= 1, got {self.bytes_per_neuron!r}")
        for name, values in (("impact", self.impact), ("active_fraction", self.active_fraction)):
            if values.dtype != torch.float64 or values.dim() != 1 or not values.numel():
                got = f"{values.dtype} {list(values.shape)}"
                raise ValueError(
                    f"block {self.id}: {name} must be float64 [neurons] with at least one neuron, got {got}"
                )
            if not bool((torch.isfinite(values) & (values >= 0)).all()):
                raise ValueError(f"block {self.id}: {name} must be finite and >= 0 everywhere")
        if self.impact.shape != self.active_fraction.shape:
            lengths = f"{self.impact.numel()} and {self.active_fraction.numel()}"
            raise ValueError(f"block {self.id}: impact and active_fraction must have one length, got {lengths}")
        if bool((self.active_fraction > 1).any()):
            raise ValueError(f"block {self.id}: active_fraction must be <= 1, got {float(self.active_fraction.max())}")

    @property
    def neurons(self) -> int:
        """Number of neurons of the block."""
        return self.impact.numel()


@dataclass(frozen=True, eq=False)
class Solution:
    """A placement, and how good it is known to be.

    `status`: "optimal" (the program was solved to `RELATIVE_GAP`), "feasible" (the time was up: the best found),
    "greedy" (the solver gave nothing of use; logged) or "single tier" (nothing to solve). `objective`: impact on the
    fast tiers. `bound`: no placement within the same constraints has more. `gap`: (bound - objective) / bound.
    `greedy_objective`: what filling the tiers in order of impact reaches under the same constraints (0 where it finds
    no placement). `seconds`: time to solve. `solver`: its name. `token_seconds`: the cost model's time for one token in
    all blocks, the tiers of a block running side by side.
    """

    placement: Placement
    status: str
    objective: float
    bound: float
    gap: float
    greedy_objective: float
    seconds: float
    solver: str
    token_seconds: float


def minimum_neurons(bytes_per_neuron: int, fast: Tier, slow: Tier) -> int | None:
    """The least number of neurons for which a block gains by using `fast` beside `slow`: C with C * t_fast + sync <= C
    * t_slow (PowerInfer, section 6.3). None where no number does: `fast` is slower, or no faster and costs a
    synchronisation.
    """
    gain = bytes_per_neuron / slow.bandwidth - bytes_per_neuron / fast.bandwidth
    if gain < 0 or (gain == 0 and fast.sync_seconds > 0):
        return None
    if fast.sync_seconds == 0:
        return 1
    least = fast.sync_seconds / gain
    # Less a rounding error, so that an exact quotient is not rounded up by one.
    return max(1, math.ceil(least * (1 - 1e-12))) if math.isfinite(least) else None


def token_seconds(blocks: Sequence[PlacementBlock], placement: Placement) -> float:
    """Seconds one token takes in `blocks` by the cost model: for each block the slowest of its tiers, which run side by
    side.
    """
    total = 0.0
    for block in blocks:
        active = torch.zeros(len(placement.tiers), dtype=torch.float64)
        active.index_add_(0, placement.assignment[block.id], block.active_fraction)
        used = placement.assignment[block.id].bincount(minlength=len(placement.tiers)) > 0
        total += max(
            float(amount) * block.bytes_per_neuron / tier.bandwidth + tier.sync_seconds
            for tier, amount, busy in zip(placement.tiers, active, used, strict=True)
            if busy
        )
    return total


def solve_placement(
    blocks: Sequence[PlacementBlock],
    tiers: Sequence[Tier],
    resident_bytes: int,
    *,
    group_size: int = 64,
    time_limit: float = 10.0,
) -> Solution:
    """Places the neurons of `blocks` so that the impact on the fast tiers, all but the last of `tiers`, is largest.

    `resident_bytes` lie on `tiers[0]` whatever happens and count against its budget first. Budgets are honoured to the
    byte. In each block a fast tier holds no neuron or at least `minimum_neurons`. `group_size` is how many neurons of
    similar impact the program values alike on average (a block has MIN_GROUPS to MAX_GROUPS groups, one neuron each
    where it is small). `time_limit` is in seconds, for everything. Never worse than greedy by impact.

    Raises ValueError for bad arguments, where `resident_bytes` exceed the first budget, and where the neurons do not
    fit; RuntimeError where no placement was found in `time_limit`, which takes a last tier with a tight budget.
    """
    started = time.perf_counter()
    _check_arguments(blocks, tiers, resident_bytes, group_size, time_limit)
    problem = _Problem(blocks, tiers, resident_bytes, group_size)
    if len(tiers) == 1:
        placement = problem.placement(torch.zeros(len(blocks), 0, dtype=torch.int64))
        seconds = time.perf_counter() - started
        return Solution(placement, "single tier", 0.0, 0.0, 0.0, 0.0, seconds, "none", token_seconds(blocks, placement))

    greedy = _greedy_counts(problem)
    status, solver, counts, bound = _program_counts(
        problem, max(0.8 * time_limit - (time.perf_counter() - started), 0.2 * time_limit)
    )
    if counts is None and greedy is None:
        if status == "infeasible":
            raise ValueError(
                f"tiers: no placement of {problem.neuron_bytes} bytes of neurons keeps both the budgets and the "
                f"synchronisation minimum; budgets: {_describe(tiers)}; give the last tier more room"
            )
        raise RuntimeError(
            f"no placement found in {time_limit} s ({solver}: {status}); raise time_limit or the budgets"
        )
    if counts is None:
        logger.warning("%s gave no usable placement (%s): neurons are placed greedily by impact", solver, status)
        status = "greedy"
    greedy_objective = problem.objective(greedy) if greedy is not None else 0.0
    best = max((found for found in (counts, greedy) if found is not None), key=problem.objective)
    objective = problem.objective(best)
    bound = max(min(bound, problem.fractional_bound()), objective)
    placement = problem.placement(best)
    return Solution(
        placement=placement,
        status=status,
        objective=objective,
        bound=bound,
        gap=(bound - objective) / bound if bound > 0 else 0.0,
        greedy_objective=greedy_objective,
        seconds=time.perf_counter() - started,
        solver=solver,
        token_seconds=token_seconds(blocks, placement),
    )


def _describe(tiers: Sequence[Tier]) -> str:
    return ", ".join(f"{tier.name}: {'no limit' if tier.budget is None else f'{tier.budget} bytes'}" for tier in tiers)


def _check_arguments(
    blocks: Sequence[PlacementBlock], tiers: Sequence[Tier], resident_bytes: int, group_size: int, time_limit: float
) -> None:
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
    neuron_bytes = sum(block.bytes_per_neuron * block.neurons for block in blocks)
    budget = tiers[0].budget
    others = [tier.budget for tier in tiers[1:]]
    # What the first tier has to hold: the resident bytes and those neurons that fit nowhere else.
    spill = 0 if None in others else max(0, neuron_bytes - sum(limit for limit in others if limit is not None))
    least = resident_bytes + spill
    if budget is not None and resident_bytes > budget:
        raise ValueError(
            f"gpu_budget: tier {tiers[0].name!r} has a budget of {budget} bytes, but what must lie on it (embeddings, "
            f"norms, lm_head, predictors) takes {resident_bytes} bytes; the smallest budget that works is {least} bytes"
        )
    if budget is not None and least > budget:
        raise ValueError(
            f"gpu_budget: {neuron_bytes} bytes of neurons and {resident_bytes} bytes of embeddings, norms, lm_head "
            f"and predictors do not fit into all tiers together ({_describe(tiers)}); tier {tiers[0].name!r} needs at "
            f"least {least} bytes"
        )


class _Problem:
    """The arguments in the shape the solvers want: by block, neurons in falling order of impact, all bytes exact
    integers.

    A choice is `counts`, int64 [blocks, fast tiers]: how many neurons of a block lie on a fast tier.
    """

    def __init__(
        self, blocks: Sequence[PlacementBlock], tiers: Sequence[Tier], resident_bytes: int, group_size: int
    ) -> None:
        self.blocks = blocks
        self.tiers = tuple(tiers)
        self.group_size = group_size
        self.sizes = [block.bytes_per_neuron for block in blocks]
        self.neuron_bytes = sum(block.bytes_per_neuron * block.neurons for block in blocks)
        budgets = [tier.budget for tier in tiers]
        if budgets[0] is not None:
            budgets[0] -= resident_bytes
        self.fast_capacity = budgets[:-1]
        self.last_capacity = budgets[-1]
        orders = [torch.sort(block.impact, descending=True, stable=True) for block in blocks]
        self.impact = [order.values for order in orders]
        self.order = [order.indices for order in orders]
        self.gained = [torch.cat((torch.zeros(1, dtype=torch.float64), impact.cumsum(0))) for impact in self.impact]
        # minimum[block][fast tier]; None where the block cannot use the tier.
        self.minimum: list[list[int | None]] = []
        for block in blocks:
            least = [minimum_neurons(block.bytes_per_neuron, fast, tiers[-1]) for fast in tiers[:-1]]
            self.minimum.append([None if count is None or count > block.neurons else count for count in least])

    def objective(self, counts: Tensor) -> float:
        return sum(float(gained[n]) for gained, n in zip(self.gained, counts.sum(1).tolist(), strict=True))

    def is_allowed(self, counts: Tensor) -> bool:
        """Whether `counts` keep every constraint, in exact integer arithmetic."""
        rows = counts.tolist()
        for block, row, minimum in zip(self.blocks, rows, self.minimum, strict=True):
            if sum(row) > block.neurons:
                return False
            if any(n < 0 or (n > 0 and (least is None or n < least)) for n, least in zip(row, minimum, strict=True)):
                return False
        used = [
            sum(size * row[t] for size, row in zip(self.sizes, rows, strict=True))
            for t in range(len(self.fast_capacity))
        ]
        if any(
            capacity is not None and taken > capacity for taken, capacity in zip(used, self.fast_capacity, strict=True)
        ):
            return False
        return self.last_capacity is None or self.neuron_bytes - sum(used) <= self.last_capacity

    def placement(self, counts: Tensor) -> Placement:
        """The neurons of highest impact on the first tier, the next on the second, and so on."""
        assignment = {}
        for block, order, row in zip(self.blocks, self.order, counts.tolist(), strict=True):
            row = [*row, block.neurons - sum(row)]
            assignment[block.id] = torch.empty(block.neurons, dtype=torch.int64).scatter_(
                0, order, torch.arange(len(row)).repeat_interleave(torch.tensor(row))
            )
        return Placement(self.tiers, assignment)

    @functools.cached_property
    def flat(self) -> tuple[Tensor, Tensor]:
        """All neurons that a fast tier may hold, block after block: impact, and the position of the block."""
        usable = [b for b, minimum in enumerate(self.minimum) if any(least is not None for least in minimum)]
        if not usable:
            return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
        lengths = torch.tensor([self.blocks[b].neurons for b in usable])
        return torch.cat([self.impact[b] for b in usable]), torch.tensor(usable).repeat_interleave(lengths)

    def fractional_bound(self) -> float:
        """What neurons that can be cut could reach, with no synchronisation minimum and all fast tiers as one."""
        impact, owner = self.flat
        limits = [capacity for capacity in self.fast_capacity if capacity is not None]
        if len(limits) < len(self.fast_capacity):
            return float(impact.sum())
        sizes = torch.tensor(self.sizes, dtype=torch.float64)[owner]
        order = torch.argsort(impact / sizes, descending=True)
        ends = sizes[order].cumsum(0)
        share = ((sum(limits) - ends) / sizes[order] + 1).clamp(0, 1)
        return float((impact[order] * share).sum())


def _greedy_counts(problem: _Problem) -> Tensor | None:
    """Fills the fast tiers one after the other in order of impact. A block that ends up below the synchronisation
    minimum leaves the tier, the weaker half of such blocks at a time, and the room is filled again. None where the last
    tier cannot hold the rest.
    """
    impact, owner = problem.flat
    owner = owner[torch.argsort(impact, descending=True, stable=True)]
    sizes = torch.tensor(problem.sizes)
    counts = torch.zeros(len(problem.blocks), len(problem.fast_capacity), dtype=torch.int64)
    for tier, capacity in enumerate(problem.fast_capacity):
        least = torch.tensor([0 if minimum[tier] is None else minimum[tier] for minimum in problem.minimum])
        allowed = torch.tensor([minimum[tier] is not None for minimum in problem.minimum])
        while True:
            filled = _fill(owner[allowed[owner]], sizes, capacity)
            short = torch.nonzero((filled > 0) & (filled < least)).flatten().tolist()
            if not short:
                break
            taken = counts.sum(1)
            short.sort(key=lambda b: float(problem.gained[b][taken[b] + filled[b]] - problem.gained[b][taken[b]]))
            allowed[short[: (len(short) + 1) // 2]] = False
        counts[:, tier] = filled
        owner = _drop_first(owner, filled)
    return counts if problem.is_allowed(counts) else None


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


@functools.cache
def _silence_highs() -> None:
    """highspy prints a line on standard output when a process makes its first solver, before any option can forbid
    it.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        importlib.import_module("highspy").Highs()
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _program_counts(problem: _Problem, seconds: float) -> tuple[str, str, Tensor | None, float]:
    """Builds and solves the integer program: status, the solver's name, counts (None where there are none to trust),
    and a bound on the objective of any choice.
    """
    solver = pulp.HiGHS(msg=False, timeLimit=seconds, gapRel=RELATIVE_GAP)
    if solver.available():
        _silence_highs()
    else:
        solver = pulp.PULP_CBC_CMD(msg=False, timeLimit=seconds, gapRel=RELATIVE_GAP)
    program, on_tier, scale, slack = _build_program(problem)
    try:
        program.solve(solver)
    except pulp.PulpSolverError as error:
        return f"failed: {error}", solver.name, None, math.inf
    if program.status == pulp.LpStatusInfeasible:
        return "infeasible", solver.name, None, math.inf
    if program.status != pulp.LpStatusOptimal:
        return pulp.LpStatus[program.status], solver.name, None, math.inf
    counts = torch.zeros(len(problem.blocks), len(problem.fast_capacity), dtype=torch.int64)
    for (block, tier), variable in on_tier.items():
        counts[block, tier] = round(variable.value())
    # The solver works to a tolerance; budgets do not.
    if not problem.is_allowed(counts):
        return "its answer breaks a constraint", solver.name, None, math.inf
    if program.sol_status == pulp.LpSolutionOptimal:
        # CBC gives an objective without variables no value
        status, value = "optimal", (pulp.value(program.objective) or 0.0) * (1 + RELATIVE_GAP)
    elif solver.name == "HiGHS":  # which minimises the negated objective
        status, value = "feasible", -program.solverModel.getInfo().mip_dual_bound
    else:
        status, value = "feasible", math.inf
    # A program worth nothing has no block that could use a fast tier, and then the polylines hide nothing.
    return status, solver.name, counts, value * scale + slack if value > 0 else 0.0


def _corners(impact: Tensor, group_size: int) -> Tensor:
    """Where the groups of a block begin and end (int64, from 0 to neurons), for `impact` in falling order: they share
    the square root of its steps evenly, which is what brings a polyline nearest to a smooth curve. Small groups where
    impact falls fast, large ones where it hardly differs; one neuron each in a small block.
    """
    neurons = len(impact)
    groups = min(max(math.ceil(neurons / group_size), MIN_GROUPS), MAX_GROUPS)
    if groups >= neurons:
        return torch.arange(neurons + 1)
    bend = (impact[:-1] - impact[1:]).sqrt().cumsum(0)
    inner = torch.searchsorted(bend, torch.linspace(0, float(bend[-1]), groups + 1, dtype=torch.float64)[1:-1]) + 1
    return torch.unique(torch.cat((torch.tensor([0, neurons]), inner.clamp(max=neurons - 1))))


def _build_program(problem: _Problem) -> tuple[pulp.LpProblem, dict[tuple[int, int], pulp.LpVariable], float, float]:
    """The program, its count variables by (block, fast tier), the impact that one unit of its objective stands for, and
    the most by which its polylines lie below the true impact, all blocks together.
    """
    program = pulp.LpProblem("placement", pulp.LpMaximize)
    # Objective coefficients around 1 and bytes in units of their common divisor keep the numbers small, and the bytes
    # exact.
    scale = float(torch.cat(problem.impact).mean()) or 1.0
    unit = math.gcd(*problem.sizes)
    slack = 0.0
    objective, on_tier = [], {}
    for b, (block, impact, gained) in enumerate(zip(problem.blocks, problem.impact, problem.gained, strict=True)):
        usable = [(t, least) for t, least in enumerate(problem.minimum[b]) if least is not None]
        if not usable:
            continue
        corners = _corners(impact, problem.group_size)
        rises = gained[corners].diff()
        slopes = rises / corners.diff()
        pieces = [(pulp.LpVariable(f"g{b}_{g}", 0, size), 1) for g, size in enumerate(corners.diff().tolist())]
        objective += [(piece, slope / scale) for (piece, _), slope in zip(pieces, slopes.tolist(), strict=True)]
        polyline = torch.cat((torch.zeros(1, dtype=torch.float64), slopes.repeat_interleave(corners.diff()).cumsum(0)))
        slack += float((gained - polyline).max())
        for t, least in usable:
            count = pulp.LpVariable(f"n{b}_{t}", 0, block.neurons, pulp.LpInteger)
            on_tier[b, t] = count
            pieces.append((count, -1))
            if least > 1:
                used = pulp.LpVariable(f"z{b}_{t}", cat=pulp.LpBinary)
                program += pulp.LpAffineExpression([(count, 1), (used, -least)]) >= 0
                program += pulp.LpAffineExpression([(count, 1), (used, -block.neurons)]) <= 0
        program += pulp.LpAffineExpression(pieces) == 0
    program.setObjective(pulp.LpAffineExpression(objective))
    for t, capacity in enumerate(problem.fast_capacity):
        if capacity is not None:
            row = [(count, problem.sizes[b] // unit) for (b, tier), count in on_tier.items() if tier == t]
            program += pulp.LpAffineExpression(row) <= capacity // unit
    if problem.last_capacity is not None:
        row = [(count, problem.sizes[b] // unit) for (b, _), count in on_tier.items()]
        program += pulp.LpAffineExpression(row) >= -((problem.last_capacity - problem.neuron_bytes) // unit)
    return program, on_tier, scale, slack
