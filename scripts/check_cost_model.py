"""Whether the cost model says how fast a model decodes: tokens per second predicted and measured, on the CPU alone and
with a simulated GPU beside it.

Predicted from what is measured apart from the model, in the same round: the bandwidth at which the kernels read weights
of its size (hf_sparse/probes.py), and the fixed costs of a token, which are those of a model as deep whose layers are
tiny, placed in the same way. The simulated GPU is a part of the CPU's memory whose neurons take as long as its figures
say; its placements are solved for several budgets. Then, how much of the shorter side's time is saved by running both
sides at once.

    python scripts/check_cost_model.py [--cases cpu two-tiers overlap] [--layers 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from _bench import add_common_arguments, at_least_one, conditions, row, say, smollm2, write_json
from _random_models import RANDOM_CASES, Shapes, load_random
from bench_decode import generate

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig, probes
from hf_sparse.cost_model import token_time
from hf_sparse.hardware import DeviceFigures
from hf_sparse.modeling import HybridMLP, Placement, SimulatedTier, Tier, hybrid_blocks
from hf_sparse.placement import solve_placement
from hf_sparse.placing import placement_blocks
from hf_sparse.plan import BlockProfile

CPU = torch.device("cpu")
GOAL, OVERLAP_GOAL = 0.15, 0.8
CACHE_TOKENS = 64
FORM = WeightOnlyQuantConfig()
TINY = Shapes("tiny", 64, 2, 64, relu=False, hidden=64, heads=2)
PROMPT = torch.arange(1, 5)[None]


def seconds_per_token(model: Any, tokens: int) -> float:
    return 1 / generate(model, PROMPT, tokens + 1).tokens_per_second


def cpu_bandwidth(nbytes: int) -> float:
    """At which the kernels read 4-bit weights of that size now."""
    points = probes.kernel_bandwidths(CPU)
    figures = DeviceFigures("cpu", "this one", 1, points["bf16"], 0.0, 1.0, 1.0, 1.0, kernel_bandwidths=points)
    return figures.bandwidth(nbytes)


class Case:
    """A model, and one as deep with tiny layers."""

    def __init__(self, name: str, model: Any, tiny: Any) -> None:
        self.name, self.model, self.tiny = name, model, tiny
        for one in (model, tiny):
            if not hasattr(one, "plan"):
                one.plan = SimpleNamespace(blocks=measured_profile(one))
            one.cache_tokens = CACHE_TOKENS


def measured_profile(model: Any) -> dict[Any, BlockProfile]:
    """As active as the neurons of each layer were while it decoded; which of them is not asked."""
    model.reset_active_fraction()
    seconds_per_token(model, 8)
    found = {}
    for block in hybrid_blocks(model):
        share = (block.active_fraction or 1.0) if isinstance(block, HybridMLP) else 1.0
        found[block.id] = BlockProfile(torch.rand(block.neurons) + 0.5, torch.full((block.neurons,), share))
    return found


def random_case(name: str, arguments: argparse.Namespace) -> Case:
    model, description, _ = load_random(RANDOM_CASES[name], FORM, arguments, seconds_per_token)
    tiny_shapes = dataclasses.replace(TINY, relu=RANDOM_CASES[name].relu)
    options = copy.copy(arguments)
    options.rank = 8
    tiny, _, _ = load_random(tiny_shapes, FORM, options, seconds_per_token)
    return Case(description, model, tiny)


def smollm2_case(arguments: argparse.Namespace) -> Case:
    model = SparseAutoModelForCausalLM.from_pretrained(
        **smollm2(),
        quantization_config=FORM,
        max_perplexity_increase=0,
        calibration_tokens=64,
    )
    options = copy.copy(arguments)
    options.layers = model.config.num_hidden_layers
    tiny, _, _ = load_random(TINY, FORM, options, seconds_per_token)
    return Case("SmolLM2-135M, all neurons", model, tiny)


# Predicted and measured


def compare(case: Case, tiers_of: Callable[[float], tuple[Tier, ...]] | None, arguments: Any) -> list[dict[str, Any]]:
    """`tiers_of`: the tiers, given the CPU's bandwidth; None: the CPU alone."""
    blocks, total = placement_blocks(case.model, CACHE_TOKENS), case.model.get_memory_footprint()
    placements: list[tuple[str, Placement]] = []
    if tiers_of is None:
        assignment = {block.id: torch.zeros(block.neurons, dtype=torch.int64) for block in blocks}
        placements = [("CPU", Placement((Tier("cpu"),), assignment))]
    else:
        tiers = tiers_of(cpu_bandwidth(total))
        for share in arguments.budgets:
            budgeted = dataclasses.replace(tiers[0], budget=int(share * total))
            solution = solve_placement(blocks, (budgeted, *tiers[1:]), case.model.resident_bytes())
            placements.append((f"CPU and simulated GPU, budget {share:.0%} of the model", solution.placement))
    rows = []
    for name, placement in placements:
        case.model.place(placement)
        place_alike(case, placement)
        found: dict[str, list[float]] = {"predicted": [], "measured": [], "fixed": []}
        seconds_per_token(case.model, 2)
        for _ in range(arguments.rounds):
            bandwidth = cpu_bandwidth(total)
            fixed = seconds_per_token(case.tiny, arguments.tokens)
            cpu = dataclasses.replace(placement.tiers[-1], bandwidth=bandwidth)
            asked = Placement((*placement.tiers[:-1], cpu), placement.assignment)
            found["fixed"].append(fixed)
            found["predicted"].append(1 / (fixed + token_time(blocks, asked).seconds))
            found["measured"].append(1 / seconds_per_token(case.model, arguments.tokens))
        ratio = statistics.median(p / m for p, m in zip(found["predicted"], found["measured"], strict=True))
        predicted, measured = (statistics.median(found[of]) for of in ("predicted", "measured"))
        verdict = "within" if abs(ratio - 1) <= GOAL else "BEYOND"
        say(f"{case.name}: {name}")
        say(
            f"  predicted {predicted:.1f} tokens/s, measured {measured:.1f}; ratio {ratio:.2f}, {verdict} {GOAL:.0%} "
            f"(fixed costs {statistics.median(found['fixed']) * 1e3:.2f} ms)"
        )
        for system in ("predicted", "measured"):
            rows.append(row(name, f"cost model, {system}", "tokens/s", found[system], case.name, ratio=ratio))
    return rows


def place_alike(case: Case, placement: Placement) -> None:
    """The tiny model on the same tiers, at no cost: blocks split where those of the model are."""
    tiers = tuple(
        SimulatedTier(tier.name, bandwidth=1e15) if isinstance(tier, SimulatedTier) else Tier(tier.name)
        for tier in placement.tiers
    )
    assignment = {}
    for block in placement_blocks(case.tiny, CACHE_TOKENS):
        used = placement.assignment[block.id].unique() if block.id in placement.assignment else torch.tensor([0])
        assignment[block.id] = used[torch.arange(block.neurons) % len(used)]
    case.tiny.place(Placement(tiers, assignment))


# Side by side


def overlap(case: Case, tiers_of: Callable[[float], tuple[Tier, ...]], arguments: Any) -> list[dict[str, Any]]:
    """One MLP, split so that both sides take about as long: each side alone, and together, in turns."""
    block = next(block for block in hybrid_blocks(case.model) if isinstance(block, HybridMLP))
    x = torch.randn(1, block.width_of("input"))
    # the GPU is as often slower than the CPU as its share of the neurons is smaller
    split = (torch.arange(block.neurons) % round(arguments.slower + 1) > 0).long()
    block.place(tiers_of(cpu_bandwidth(block.weight_bytes)), split)
    sides = {"gpu": copy.deepcopy(block), "cpu": copy.deepcopy(block), "both": block}
    for position, name in enumerate(("gpu", "cpu")):
        sides[name].shards = sides[name].shards[position : position + 1]
    times: dict[str, list[float]] = {name: [] for name in sides}
    with torch.no_grad():
        for number in range(-2, 20 * arguments.rounds):
            for name, side in sides.items():
                began = time.perf_counter()
                side(x)
                if number >= 0:
                    times[name].append(time.perf_counter() - began)
    gpu, cpu, both = (statistics.median(times[name]) for name in sides)
    saved = (gpu + cpu - both) / min(gpu, cpu)
    verdict = "reached" if saved >= OVERLAP_GOAL else "missed"
    say(f"One MLP, {case.name}: GPU side {gpu * 1e3:.2f} ms, CPU side {cpu * 1e3:.2f} ms, together")
    say(f"  {both * 1e3:.2f} ms: {saved:.0%} of the shorter side saved (goal {OVERLAP_GOAL:.0%}: {verdict})")
    return [row("one MLP on two tiers", name, "s", times[name], case.name, saved=saved) for name in sides]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument(
        "--cases", nargs="+", choices=("cpu", "two-tiers", "overlap"), default=["cpu", "two-tiers", "overlap"]
    )
    parser.add_argument("--layers", type=at_least_one, default=4, help="of the random models (default 4)")
    parser.add_argument("--tokens", type=at_least_one, default=16, help="tokens to decode in a round (default 16)")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.25], help="shares of the model")
    parser.add_argument("--slower", type=float, default=4.0, help="how much slower the simulated GPU is than the CPU")
    parser.add_argument("--active", type=float, default=0.1, help="share of the neurons that the ReLU model computes")
    parser.add_argument("--shrink", type=at_least_one, default=1, help="make the random models so many times narrower")
    arguments = parser.parse_args()
    arguments.rank, arguments.predictor_dtype = 256, "nf4"
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.shrink > 1:
        for name, shapes in RANDOM_CASES.items():
            RANDOM_CASES[name] = shapes.shrunk(arguments.shrink)
    say(f"{conditions()}\n")

    def tiers_of(bandwidth: float) -> tuple[Tier, ...]:
        gpu = SimulatedTier("gpu", bandwidth=bandwidth / arguments.slower, sync_seconds=1e-4, launch_seconds=1e-4)
        return gpu, Tier("cpu", bandwidth=bandwidth)

    rows: list[dict[str, Any]] = []
    cases = [] if arguments.cases == ["overlap"] else [random_case("llama-7b-relu", arguments)]
    dense = random_case("llama-7b", arguments)
    if "cpu" in arguments.cases:
        for case in (smollm2_case(arguments), dense, *cases):
            rows += compare(case, None, arguments)
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    if "two-tiers" in arguments.cases:
        for case in (dense, *cases):
            rows += compare(case, tiers_of, arguments)
    if "overlap" in arguments.cases:
        rows += overlap(dense, tiers_of, arguments)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
