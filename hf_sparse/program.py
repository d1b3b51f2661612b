"""The integer programs of placement, built and solved with PuLP: HiGHS where it is installed, else the CBC that PuLP
carries.

What a program knows of a block is how many of its neurons lie on each fast tier. All neurons of a block have one size,
so an exchange shows that the best n of them are the n of highest worth.

For the paper's objective the worth of n neurons is a concave function of n, drawn as a polyline whose pieces are groups
of neurons of similar worth, and only the counts and a switch per block and tier are integers. That is the paper's
program (one binary for each group and unit) with a few hundred integers in place of tens of thousands, and its answers
are exact to the neuron and to the byte. The time of a block is neither concave nor convex in n (tiers that run side by
side, fixed costs): there the program chooses between ways to split each block, whose time is known.
"""

from __future__ import annotations

import functools
import importlib
import itertools
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

from hf_sparse.modeling import Tier

from .cost_model import PlacementBlock, minimum_neurons, split_seconds

# Where the solver may stop: profiles are measured on a few thousand tokens and are not known to five digits.
RELATIVE_GAP = {"impact": 1e-5, "time": 1e-3}
# Groups of a block: so many that the polyline is true to 1e-4 or so, so few that 80 layers are solved in seconds.
MIN_GROUPS, MAX_GROUPS = 32, 96

FEW_FAST_TIERS = 4  # of which every subset is looked at
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Answer:
    """What a solver says. `counts`: of each block int64 [fast tiers], how many of its neurons, in falling order of
    worth, lie on the first of them, the next, and so on; None where there is nothing to trust. `bound`: no placement is
    better. `status`: "optimal", "feasible", or why there is nothing.
    """

    status: str
    solver: str
    counts: list[Tensor] | None
    bound: float


def corners(worth: Tensor, group_size: int) -> Tensor:
    """Where the groups of a block begin and end (int64, from 0 to neurons), for `worth` in falling order: they share
    the square root of its steps evenly, which is what brings a polyline nearest to a smooth curve. Small groups where
    it falls fast, large ones where it hardly differs; one neuron each in a small block.
    """
    neurons = len(worth)
    groups = min(max(math.ceil(neurons / group_size), MIN_GROUPS), MAX_GROUPS)
    if groups >= neurons:
        return torch.arange(neurons + 1)
    bend = (worth[:-1] - worth[1:]).sqrt().cumsum(0)
    inner = torch.searchsorted(bend, torch.linspace(0, float(bend[-1]), groups + 1, dtype=torch.float64)[1:-1]) + 1
    return torch.unique(torch.cat((torch.tensor([0, neurons]), inner.clamp(max=neurons - 1))))


class _Curve:
    """A block's neurons in falling order of worth, as a polyline: `sizes` of its groups (int64), their `slopes` (mean
    worth of a neuron), and `slack`, the most by which it lies below the truth.
    """

    def __init__(self, worth: Tensor, group_size: int) -> None:
        falling = torch.sort(worth, descending=True, stable=True).values
        at = corners(falling, group_size)
        gained = torch.cat((torch.zeros(1, dtype=torch.float64), falling.cumsum(0)))
        self.sizes = at.diff()
        self.slopes = gained[at].diff() / self.sizes
        line = torch.cat((torch.zeros(1, dtype=torch.float64), self.slopes.repeat_interleave(self.sizes).cumsum(0)))
        self.slack = float((gained - line).max())


# Most impact on the fast tiers


def by_impact(
    blocks: Sequence[PlacementBlock], tiers: Sequence[Tier], resident_bytes: int, group_size: int, seconds: float
) -> Answer:
    """PowerInfer's program (SOSP'24, section 6.3): most impact on the fast tiers, where each holds no neuron of a block
    or at least `minimum_neurons`. `bound`: no more impact is possible.
    """
    problem = pulp.LpProblem("placement")
    scale = float(torch.cat([block.impact for block in blocks]).mean()) or 1.0
    unit = math.gcd(*(n for block in blocks for n in (block.bytes_per_neuron, block.shared_bytes)))
    slack, objective = 0.0, []
    counts: dict[tuple[int, int], pulp.LpVariable] = {}
    used_bytes: list[list[tuple[pulp.LpVariable, int]]] = [[] for _ in tiers]
    total = 0  # bytes on the last tier where nothing is moved
    for b, block in enumerate(blocks):
        total += block.bytes_per_neuron * block.neurons + block.shared_bytes
        least = {t: minimum_neurons(block.bytes_per_neuron, tier, tiers[-1]) for t, tier in enumerate(tiers[:-1])}
        usable = [t for t, count in least.items() if count is not None and count <= block.neurons]
        if not usable:
            continue
        curve = _Curve(block.impact, group_size)
        slack += curve.slack
        pieces = [(pulp.LpVariable(f"g{b}_{g}", 0, size), 1) for g, size in enumerate(curve.sizes.tolist())]
        objective += [(piece, -slope / scale) for (piece, _), slope in zip(pieces, curve.slopes.tolist(), strict=True)]
        for t in usable:
            count = counts[b, t] = pulp.LpVariable(f"n{b}_{t}", 0, block.neurons, pulp.LpInteger)
            pieces.append((count, -1))
            used_bytes[t].append((count, block.bytes_per_neuron // unit))
            used_bytes[-1].append((count, -(block.bytes_per_neuron // unit)))
            if (fewest := least[t] or 1) > 1 or block.shared_bytes:
                used = pulp.LpVariable(f"z{b}_{t}", cat=pulp.LpBinary)
                problem += pulp.LpAffineExpression([(count, 1), (used, -fewest)]) >= 0
                problem += pulp.LpAffineExpression([(count, 1), (used, -block.neurons)]) <= 0
                used_bytes[t].append((used, block.shared_bytes // unit))
        problem += pulp.LpAffineExpression(pieces) == 0
    problem.setObjective(pulp.LpAffineExpression(objective))
    for t, tier in enumerate(tiers):
        if tier.budget is not None:
            capacity = tier.budget - (resident_bytes if t == 0 else 0) - (total if t == len(tiers) - 1 else 0)
            problem += pulp.LpAffineExpression(used_bytes[t]) <= capacity // unit
    status, solver = solve(problem, seconds, RELATIVE_GAP["impact"])
    if status not in ("optimal", "feasible"):
        return Answer(status, solver, None, math.inf)
    found = [torch.zeros(len(tiers) - 1, dtype=torch.int64) for _ in blocks]
    for (b, t), count in counts.items():
        found[b][t] = round(count.value() or 0.0)
    # CBC gives an objective without variables no value
    value = -(pulp.value(problem.objective) or 0.0)
    if status == "optimal":
        bound = value * (1 + RELATIVE_GAP["impact"])
    else:
        bound = -problem.solverModel.getInfo().mip_dual_bound if solver == "HiGHS" else math.inf
    # A program worth nothing has no block that could use a fast tier, and then the polylines hide nothing.
    return Answer(status, solver, found, bound * scale + slack if value > 0 else 0.0)


# Least time per token


@dataclass(frozen=True)
class _Options:
    """Ways to split one block. `counts` int64 [options, fast tiers]: neurons on each; `seconds` float64 [options]."""

    counts: Tensor
    seconds: Tensor


def _options(block: PlacementBlock, tiers: Sequence[Tier], totals: Tensor) -> _Options:
    """Splits with `totals` (int64, ascending, from 0) neurons, those read most, on the fast tiers: all on one of them,
    or shared between all so that they finish together.
    """
    fast = tiers[:-1]
    read = block.read_of_first
    bandwidths = torch.tensor([tier.bandwidth for tier in fast], dtype=torch.float64)
    shares = [*torch.eye(len(fast), dtype=torch.float64)]
    if len(fast) > 1:
        shares.append(bandwidths / bandwidths.sum())
    counts, seconds = [], []
    for share in shares:
        of_all = share.cumsum(0).clamp(max=1)
        # of neurons in falling order the first tier takes the first ones, the next the next
        ends = torch.searchsorted(read, read[totals][:, None] * of_all).clamp(max=totals[:, None])
        ends = torch.where(of_all >= 1, totals[:, None], torch.where(of_all <= 0, 0, ends))
        starts = torch.cat((torch.zeros_like(ends[:, :1]), ends[:, :-1]), dim=1)
        counts.append(ends - starts)
        seconds.append(_seconds(block, tiers, ends - starts, read[ends] - read[starts]))
    return _Options(torch.cat(counts), torch.cat(seconds))


def _seconds(block: PlacementBlock, tiers: Sequence[Tier], counts: Tensor, read: Tensor) -> Tensor:
    """float64 [splits]: the block's time, its tiers side by side. `counts`, `read`: [splits, fast tiers]."""
    counts = torch.cat((counts, block.neurons - counts.sum(1, keepdim=True)), dim=1)
    rest = (block.read_of_first[-1] - read.sum(1, keepdim=True)).clamp_min(0)
    return split_seconds(block, tiers, counts, torch.cat((read, rest), dim=1)).amax(1)


def by_time(
    blocks: Sequence[PlacementBlock], tiers: Sequence[Tier], resident_bytes: int, group_size: int, seconds: float
) -> Answer:
    """Least seconds per token by the cost model: each block chooses one of its ways to be split (a multiple-choice
    knapsack, whose relaxation is whole but for a block or two), first by groups, then, near what was chosen, by neuron.
    """
    began = time.perf_counter()
    ways = 1 if len(tiers) == 2 else len(tiers)  # of sharing neurons between the fast tiers, each with its options
    totals = [_thinned(corners(block.read_bytes[block.order], group_size), ways) for block in blocks]
    choice: list[Tensor] | None = None
    status = solver = ""
    for zoom in range(2):
        options = [_options(block, tiers, at) for block, at in zip(blocks, totals, strict=True)]
        left = seconds - (time.perf_counter() - began)
        found = _choose(blocks, tiers, resident_bytes, options, max(left if zoom else left / 2, 0.1))
        if found[2] is None and choice is not None:
            break
        status, solver, choice = found
        if choice is None or all(len(at) == block.neurons + 1 for at, block in zip(totals, blocks, strict=True)):
            break
        totals = [
            _around(at, int(counts.sum()), block.neurons, MAX_GROUPS // ways)
            for block, at, counts in zip(blocks, totals, choice, strict=True)
        ]
    return Answer(status, solver, choice, least_seconds(blocks, tiers, resident_bytes))


def _thinned(totals: Tensor, step: int) -> Tensor:
    """Every `step`-th of many, and the last."""
    return totals if len(totals) <= MIN_GROUPS else torch.unique(torch.cat((totals[::step], totals[-1:])))


def _around(totals: Tensor, chosen: int, neurons: int, most: int) -> Tensor:
    """0, all, and at most `most` numbers from the one before `chosen` in `totals` to the one after."""
    at = int(torch.searchsorted(totals, chosen))
    low, high = int(totals[max(at - 1, 0)]), int(totals[min(at + 1, len(totals) - 1)])
    inner = torch.linspace(low, high, min(high - low + 1, most)).round().long()
    return torch.unique(torch.cat((torch.tensor([0, chosen, neurons]), inner)))


def _choose(
    blocks: Sequence[PlacementBlock],
    tiers: Sequence[Tier],
    resident_bytes: int,
    options: Sequence[_Options],
    seconds: float,
) -> tuple[str, str, list[Tensor] | None]:
    """Status, the solver's name, and of each block the counts (int64 [fast tiers]) that it chooses."""
    problem = pulp.LpProblem("placement")
    scale = sum(float(of.seconds.min()) for of in options) / len(blocks) or 1.0
    unit = math.gcd(*(n for block in blocks for n in (block.bytes_per_neuron, block.shared_bytes)))
    used_bytes: list[list[tuple[pulp.LpVariable, int]]] = [[] for _ in tiers]
    objective, homes, choices = [], [], []
    for b, (block, of) in enumerate(zip(blocks, options, strict=True)):
        kept = _worth_having(block, of)
        variables = [pulp.LpVariable(f"x{b}_{i}", cat=pulp.LpBinary) for i in range(len(kept))]
        problem += pulp.LpAffineExpression([(x, 1) for x in variables]) == 1
        objective += [(x, s / scale) for x, s in zip(variables, of.seconds[kept].tolist(), strict=True)]
        for x, counts in zip(variables, of.counts[kept].tolist(), strict=True):
            for t, n in enumerate((*counts, block.neurons - sum(counts))):
                if n:
                    used_bytes[t].append((x, (n * block.bytes_per_neuron + block.shared_bytes) // unit))
        homes.append([x for x, counts in zip(variables, of.counts[kept].tolist(), strict=True) if any(counts)])
        choices.append((variables, of.counts[kept]))
    if cost := tiers[0].sync_seconds / 2 / scale:
        for b, (before, after) in enumerate(itertools.pairwise(homes)):
            move = pulp.LpVariable(f"m{b}", 0)
            for sign in (1, -1):
                row = [(move, 1), *((x, -sign) for x in before), *((x, sign) for x in after)]
                problem += pulp.LpAffineExpression(row) >= 0
            objective.append((move, cost))
    problem.setObjective(pulp.LpAffineExpression(objective))
    for t, tier in enumerate(tiers):
        if tier.budget is not None:
            capacity = tier.budget - (resident_bytes if t == 0 else 0)
            problem += pulp.LpAffineExpression(used_bytes[t]) <= capacity // unit
    status, solver = solve(problem, seconds, RELATIVE_GAP["time"])
    if status not in ("optimal", "feasible"):
        return status, solver, None
    chosen = [max(range(len(xs)), key=lambda i: xs[i].value() or 0.0) for xs, _ in choices]
    return status, solver, [counts[i] for (_, counts), i in zip(choices, chosen, strict=True)]


def _worth_having(block: PlacementBlock, options: _Options) -> list[int]:
    """Positions of the options that are not both larger on every fast tier and no faster than another, and of the one
    that leaves all on the last tier and those that take all of it, for budgets may ask for them.
    """
    order = sorted(range(len(options.seconds)), key=lambda i: (int(options.counts[i].sum()), float(options.seconds[i])))
    best: dict[tuple[bool, ...], float] = {}  # by which tiers are used
    kept: list[int] = []
    for i, counts, seconds in zip(order, options.counts[order].tolist(), options.seconds[order].tolist(), strict=True):
        tiers = tuple(n > 0 for n in counts)
        if seconds < best.get(tiers, math.inf) * (1 - 1e-9) or sum(counts) in (0, block.neurons):
            best[tiers] = min(seconds, best.get(tiers, math.inf))
            if any(tiers) or not kept:
                kept.append(i)
    return kept


def least_seconds(blocks: Sequence[PlacementBlock], tiers: Sequence[Tier], resident_bytes: int) -> float:
    """No placement takes less: the Lagrangian bound with a price for a byte on the fast tiers, whose memory is taken as
    one. Of any n neurons of a block it is only asked that what they read lies between what the n of most and of least
    do; and those of the fast tiers that a block uses cannot finish before an even share of bytes and fixed costs.
    """
    fast = tiers[:-1]
    limits = [tier.budget for tier in fast if tier.budget is not None]
    room = sum(limits) - resident_bytes if len(limits) == len(fast) else None
    pools = []
    if len(fast) > FEW_FAST_TIERS:  # all together, at the least of their fixed costs
        launch = min(tier.launch_seconds for tier in fast)
        pools = [Tier("pool", CPU, None, sum(tier.bandwidth for tier in fast), tiers[0].sync_seconds, launch)]
    for size in range(1, len(fast) + 1 if not pools else 1):
        for used in itertools.combinations(range(len(fast)), size):
            bandwidth = sum(fast[t].bandwidth for t in used)
            fixed = [fast[t].launch_seconds + (fast[t].sync_seconds if t else 0.0) for t in used]
            even = sum(seconds * fast[t].bandwidth for t, seconds in zip(used, fixed, strict=True)) / bandwidth
            pools.append(Tier("pool", CPU, None, bandwidth, tiers[0].sync_seconds, even))
    curves = []
    for block in blocks:
        counts = torch.arange(block.neurons + 1)[:, None]
        most = block.read_of_first[:, None]  # that n neurons can read; the least is what the others leave
        seconds = torch.stack([_balanced(block, pool, tiers[-1], counts, most) for pool in pools]).amin(0)
        nbytes = counts[:, 0].double() * block.bytes_per_neuron + block.shared_bytes * (counts[:, 0] > 0)
        curves.append((seconds, nbytes))
    if room is None:
        return sum(float(seconds.min()) for seconds, _ in curves)

    def bound(price: float) -> float:
        return sum(float((seconds + price * nbytes).min()) for seconds, nbytes in curves) - price * max(room, 0)

    # concave in the price, which is at most what a byte takes of the last tier's time, fixed costs and all
    low = 0.0
    high = max(0.0, *(float(((seconds[0] - seconds[1:]) / nbytes[1:]).max()) for seconds, nbytes in curves))
    best = bound(low)
    for _ in range(20):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        of_a, of_b = bound(a), bound(b)
        best = max(best, of_a, of_b)
        low, high = (a, high) if of_a < of_b else (low, b)
    return best


def _balanced(block: PlacementBlock, fast: Tier, last: Tier, counts: Tensor, most: Tensor) -> Tensor:
    """float64 [splits]: no choice of `counts` neurons for `fast` takes less; the best one lets both tiers finish
    together, as far as n neurons can.
    """
    whole = block.read_of_first[-1]
    least = (whole - most.flip(0)).clamp_min(0)
    fixed = last.launch_seconds + fast.sync_seconds - fast.launch_seconds
    fixed += block.shared_bytes * (1 / last.bandwidth - 1 / fast.bandwidth)
    even = (fixed + whole / last.bandwidth) / (1 / fast.bandwidth + 1 / last.bandwidth)
    return _seconds(block, (fast, last), counts, torch.minimum(torch.maximum(even.expand_as(least), least), most))


def solve(problem: pulp.LpProblem, seconds: float, gap: float) -> tuple[str, str]:
    """Status ("optimal", "feasible", or why there is nothing) and the solver's name."""
    solver = pulp.HiGHS(msg=False, timeLimit=seconds, gapRel=gap)
    if solver.available():
        _silence_highs()
    else:
        solver = pulp.PULP_CBC_CMD(msg=False, timeLimit=seconds, gapRel=gap)
    try:
        problem.solve(solver)
    except pulp.PulpSolverError as error:
        return f"failed: {error}", solver.name
    if problem.status == pulp.LpStatusInfeasible:
        return "infeasible", solver.name
    if problem.status != pulp.LpStatusOptimal:
        return pulp.LpStatus[problem.status], solver.name
    return ("optimal" if problem.sol_status == pulp.LpSolutionOptimal else "feasible"), solver.name


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
