"""What a machine that is not at hand would do with a model: the cost model, asked about known devices.

Only the model's config is read. How often neurons are active is that of a calibrated plan, where there is one, or a
power law with a given mean and skew (PowerInfer, SOSP'24, section 2.2: in OPT-30B 26% of the neurons of a layer make
80% of its activations, in LLaMA(ReGLU)-70B 43%).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_sparse.modeling import (
    BlockId,
    HybridAttention,
    HybridBlock,
    HybridMLP,
    Placement,
    Tier,
    WeightFormat,
    has_exact_zeros,
    swap_blocks,
)
from hf_sparse.modeling.block import INDEX_BYTES
from hf_sparse.quantization import NeuronMatrix

from .cost_model import PlacementBlock, TokenTime, token_time
from .hardware import DeviceFigures
from .placement import Solution, solve_placement
from .plan import PLAN_JSON, PlacementPlan
from .plan_store import PLAN_FOLDER
from .report import format_bytes
from .weights import skeleton

PREDICTOR_SHARE = 0.06  # of an MLP's weights: PowerInfer's take 5% to 9%
EFFICIENCY = 0.8  # of the published bandwidth, what kernels reach


@dataclass(frozen=True)
class Activity:
    """How often the MLP's neurons are active. `mean`: share of them for an average token, in 0..1. `hottest`, `takes`:
    this share of the neurons makes that share of all activations. `predicted`: predictors foretell them, so that rows
    of the gate are left out too.
    """

    mean: float = 1.0
    hottest: float = 0.26
    takes: float = 0.8
    predicted: bool = False

    def __post_init__(self) -> None:
        for name in ("mean", "hottest", "takes"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a share above 0 and at most 1, got {getattr(self, name)}")
        if self.takes < self.hottest:
            raise ValueError(f"takes: the hottest {self.hottest:.0%} take at least as much, got {self.takes:.0%}")

    def fractions(self, neurons: int, seed: int = 0) -> Tensor:
        """float64 [neurons] in 0..1: a power law that was cut at 1, in random order."""
        if self.mean == 1:
            return torch.ones(neurons, dtype=torch.float64)
        ranks = torch.arange(1, neurons + 1, dtype=torch.float64)
        top, low, high = max(1, round(self.hottest * neurons)), 0.0, 8.0
        for _ in range(40):
            exponent = (low + high) / 2
            found = _with_mean(ranks**-exponent, self.mean)
            low, high = (exponent, high) if found[:top].sum() < self.takes * found.sum() else (low, exponent)
        return found[torch.randperm(neurons, generator=torch.Generator().manual_seed(seed))]


def _with_mean(shape: Tensor, mean: float) -> Tensor:
    """A multiple of `shape`, none of it above 1, with this mean."""
    low, high = 0.0, 1.0 / float(shape.min())
    for _ in range(60):
        factor = (low + high) / 2
        low, high = (factor, high) if (shape * factor).clamp(max=1).mean() < mean else (low, factor)
    return (shape * high).clamp(max=1)


@dataclass(frozen=True)
class Estimate:
    """Of one way to place a model. `load`: share of what a token reads of active neurons, KV groups among them, that
    lies on the fast tiers; `binds`: the tier that most of the time is waited for, and how much.
    """

    name: str
    token_seconds: float
    load: float
    fast_bytes: int
    binds: str

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.token_seconds


def model_blocks(
    config: Any,
    weights: WeightFormat,
    head: WeightFormat | None,
    activity: Activity,
    plan: PlacementPlan | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    cache_tokens: int = 2048,
) -> list[PlacementBlock]:
    """What the solver is told of a model of which there is only a config. Keys and values are in `dtype`."""
    model = skeleton(config, dtype, None, None)
    embeddings: Any = model.get_input_embeddings()
    lm_head = model.get_output_embeddings()
    hybrid = swap_blocks(model, weights)
    made = []
    for number, block in enumerate(sorted(hybrid.values(), key=lambda block: block.id)):
        active = activity.fractions(block.neurons, seed=number) if block.id.kind == "mlp" else None
        if plan is not None:
            active = _planned(plan, block)
        made.append(_block(block, weights, activity, active, dtype, cache_tokens))
    rows, cols = embeddings.num_embeddings, embeddings.embedding_dim
    row = cols * dtype.itemsize
    tied = model.config.tie_word_embeddings and head is None
    extra = sum(buffer.nbytes for buffer in embeddings.buffers())  # such as Gemma's scale; it lies with the embeddings
    parts = [] if tied else [PlacementBlock.whole(BlockId(0, "embedding"), rows * row + extra, row)]
    last = BlockId(model.config.num_hidden_layers - 1, "head")
    if lm_head is not None:
        form = WeightFormat() if head is None else head
        size = rows * NeuronMatrix.row_nbytes(cols, form.weight_dtype, form.group_size, dtype)
        if getattr(lm_head, "bias", None) is not None:
            size += rows * dtype.itemsize
        made.append(PlacementBlock.whole(last, size + (extra if tied else 0), size))
    return [*parts, *made]


def _planned(plan: PlacementPlan, block: HybridBlock) -> Tensor:
    found = plan.blocks.get(block.id)
    if found is None or len(found.active_fraction) != block.neurons:
        raise ValueError(
            f"plan: block {block.id} of the model has {block.neurons} neurons, the plan is of another model"
        )
    return found.active_fraction.double()


def _block(
    block: HybridBlock,
    weights: WeightFormat,
    activity: Activity,
    active: Tensor | None,
    dtype: torch.dtype,
    cache_tokens: int,
) -> PlacementBlock:
    form = (weights.weight_dtype, weights.group_size, dtype)
    sizes = {p.name: sum(p.rows) * NeuronMatrix.row_nbytes(p.columns, *form) for p in block.projections.values()}
    whole = sum(sizes.values())
    # those of what writes are added once, after the merge, on the primary tier
    biases = sum(sum(p.rows) for p in block.projections.values() if p.bias and not p.writes) * dtype.itemsize
    if isinstance(block, HybridAttention):
        cached = block.cache_bytes_per_token(dtype) * cache_tokens
        read = torch.full((block.neurons,), whole + biases + cached / 2, dtype=torch.float64)
        return PlacementBlock(block.id, whole + biases + cached + INDEX_BYTES, read, read)
    assert active is not None and isinstance(block, HybridMLP)
    names = block.names
    if activity.predicted:
        foretelling = int(PREDICTOR_SHARE * whole)
        read = foretelling + whole * active
        return PlacementBlock(block.id, whole + biases + foretelling + INDEX_BYTES, whole * active, read)
    gate = sizes[names.up] // 2 if names.fused else sizes[names.gate or names.up]
    read = gate + (whole - gate) * active
    if bool((active == 1).all()):  # nothing is left out: all that a neuron has is read
        read = torch.full_like(active, whole + biases)
    return PlacementBlock(block.id, whole + biases + INDEX_BYTES, whole * active, read)


def tiers_of(gpus: Sequence[tuple[DeviceFigures, int]], cpu: DeviceFigures) -> tuple[Tier, ...]:
    """Tiers of known devices, GPUs with their budgets in bytes: `EFFICIENCY` of the published bandwidths."""
    made = []
    for number, (figures, budget) in enumerate([*gpus, (cpu, None)]):
        name = "cpu" if budget is None else f"cuda:{number}"
        made.append(
            Tier(
                name,
                budget=budget,
                bandwidth=figures.bandwidth() * (1.0 if figures.measured else EFFICIENCY),
                sync_seconds=figures.sync_seconds,
                launch_seconds=figures.launch_seconds,
                flops=figures.flops,
                copy_bandwidth=figures.copy_to_bandwidth,
            )
        )
    return tuple(made)


def layer_split(blocks: Sequence[PlacementBlock], tiers: Sequence[Tier], dense: bool) -> Estimate:
    """As many of the last layers as there is room for lie whole on the first tier, head first, and nothing is split;
    `dense`: every neuron is computed for every token (llama.cpp does both).
    """
    room, last = tiers[0].budget, len(tiers) - 1
    assignment = {block.id: torch.full((block.neurons,), last) for block in blocks}
    by_layer: dict[Any, list[PlacementBlock]] = {}
    for block in reversed(blocks):
        key = block.id.kind if block.id.kind in ("head", "embedding") else block.id.layer
        by_layer.setdefault(key, []).append(block)
    for key, of_layer in by_layer.items():
        nbytes = sum(block.bytes_per_neuron * block.neurons + block.shared_bytes for block in of_layer)
        if key == "embedding" or (room is not None and nbytes > room):
            break
        room = None if room is None else room - nbytes
        for block in of_layer:
            assignment[block.id][:] = 0
    read = list(blocks)
    if dense:
        read = [
            block
            if block.id.kind == "embedding"
            else PlacementBlock(
                block.id,
                block.bytes_per_neuron,
                block.impact,
                torch.full_like(block.read_bytes, block.bytes_per_neuron),
            )
            for block in blocks
        ]
    name = "layers, dense" if dense else "layers, sparse"
    return _estimate(name, read, Placement(tuple(tiers), assignment))


def neuron_split(
    blocks: Sequence[PlacementBlock], tiers: Sequence[Tier], time_limit: float = 10.0
) -> tuple[Estimate, Solution]:
    """The placement that this package would solve."""
    solution = solve_placement(blocks, tiers, 0, time_limit=time_limit)
    return _estimate("neurons, sparse", blocks, solution.placement), solution


def _estimate(name: str, blocks: Sequence[PlacementBlock], placement: Placement) -> Estimate:
    time = token_time(blocks, placement)
    last = len(placement.tiers) - 1
    on_fast = everything = 0.0
    fast_bytes = 0
    for block in blocks:
        fast = placement.assignment[block.id] < last
        fast_bytes += int(fast.sum()) * block.bytes_per_neuron
        if block.id.kind in ("mlp", "attention"):
            everything += float(block.impact.sum())
            on_fast += float(block.impact[fast].sum())
    return Estimate(
        name, time.seconds, on_fast / everything if everything else 0.0, fast_bytes, _binding(time, placement)
    )


def _binding(time: TokenTime, placement: Placement) -> str:
    """The tier that most of the time is waited for."""
    waited = [0.0] * len(placement.tiers)
    for seconds in time.blocks.values():
        waited[max(range(len(seconds)), key=seconds.__getitem__)] += max(seconds)
    slowest = max(range(len(waited)), key=waited.__getitem__)
    return f"{placement.tiers[slowest].name} ({waited[slowest] / time.seconds:.0%})"


@dataclass(frozen=True)
class Estimates:
    """Of a model on a machine: three placements, the one that is solved last. `notes`: what they rest on."""

    rows: tuple[Estimate, ...]
    solution: Solution | None  # None: without a GPU there is nothing to solve
    notes: tuple[str, ...]

    def table(self, title: str) -> Table:
        return table(title, self.rows, "" if self.solution is None else str(self.solution))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        rows = [{**asdict(one), "tokens_per_second": one.tokens_per_second} for one in self.rows]
        solved = {} if self.solution is None else {"status": self.solution.status, "gap": self.solution.gap}
        return {"placements": rows, "solution": solved, "notes": list(self.notes)}


def estimate_model(
    config: Any,
    gpus: Sequence[tuple[DeviceFigures, int]],
    host: DeviceFigures,
    weight_dtype: str | None,
    group_size: int,
    plan: PlacementPlan | None,
    activity: Activity | None,
    cache_tokens: int,
) -> Estimates:
    """`gpus`: with their budgets in bytes. `activity`: None for that of `plan`, and without one for every neuron, or a
    tenth of them with predictors where activations are exactly zero (ReLU).

    Raises ValueError where the model does not fit into the budgets and the host's memory.
    """
    weights = WeightFormat(weight_dtype, group_size, "int8")
    head = None if weight_dtype is None else WeightFormat("int8", group_size, "int8")
    if plan is not None:
        activity, told = Activity(predicted=bool(plan.predictors)), "as the plan measured"
    elif activity is None:
        zeros = any(map(has_exact_zeros, swap_blocks(skeleton(config, torch.bfloat16, None, None), weights).values()))
        activity, told = (Activity(0.1, predicted=True), "assumed") if zeros else (Activity(), "assumed")
    else:
        told = "as asked"
    blocks = model_blocks(config, weights, head, activity, plan, cache_tokens=cache_tokens)
    total = sum(block.bytes_per_neuron * block.neurons + block.shared_bytes for block in blocks)
    tiers = tiers_of(gpus, host)
    room = sum(budget for _, budget in gpus) + host.memory
    if total > room:
        raise ValueError(
            f"MODEL: takes {format_bytes(total)} with room for {cache_tokens} tokens, but GPUs and host have "
            f"{format_bytes(room)}"
        )
    if plan is None:
        told += f": {activity.mean:.0%} of the MLP neurons for a token"
        if activity.mean < 1:
            told += f", the hottest {activity.hottest:.0%} of them {activity.takes:.0%} of the activations"
    published = [figures.model for figures in (*(figures for figures, _ in gpus), host) if not figures.measured]
    notes = [f"{format_bytes(total)}, room for {cache_tokens} tokens of keys and values included", f"Activity {told}"]
    if published:
        notes.append(
            f"By published figures, {EFFICIENCY:.0%} of their bandwidth, and not measured: {', '.join(published)}"
        )
    split = [layer_split(blocks, tiers, dense=True), layer_split(blocks, tiers, dense=False)]
    if len(tiers) == 1:
        return Estimates(tuple(split), None, tuple(notes))
    ours, solution = neuron_split(blocks, tiers)
    return Estimates((*split, ours), solution, tuple(notes))


def find_plan(folder: Path, given: Path | None) -> PlacementPlan | None:
    """The plan in `given`, else one beside the model in `folder`, of any settings; None where there is none."""
    if given is not None:
        return PlacementPlan.from_pretrained(given)
    beside = folder / PLAN_FOLDER
    for candidate in (beside, *sorted(beside.glob("*"))):
        if (candidate / PLAN_JSON).is_file():
            return PlacementPlan.from_pretrained(candidate)
    return None


def table(title: str, estimates: Sequence[Estimate], caption: str) -> Table:
    made = Table(title=title, caption=caption)
    headings = ("placement", "tokens/s", "GPU load", "GPU bytes", "waits for", "speed-up")
    for heading in headings:
        made.add_column(heading, justify="left" if heading in ("placement", "waits for") else "right")
    for one in estimates:
        made.add_row(
            one.name,
            f"{one.tokens_per_second:.1f}",
            f"{one.load:.0%}",
            format_bytes(one.fast_bytes),
            one.binds,
            f"{estimates[0].token_seconds / one.token_seconds:.2f} x",
        )
    return made


def as_text(made: Table) -> str:
    console = Console(width=110, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(made)
    return capture.get().rstrip()
