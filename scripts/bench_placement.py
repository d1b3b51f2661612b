"""How long placements take to solve, and what they are worth beside greedy ones: LLaMA-70B's shapes (80 layers of
28,672 neurons) with a power law of activity, on one GPU and on two, by both goals.

    python scripts/bench_placement.py [--layers 80] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from _bench import add_common_arguments, at_least_one, row, say, write_json
from transformers import LlamaConfig

from hf_sparse.estimate import Activity, model_blocks
from hf_sparse.modeling import Tier, WeightFormat
from hf_sparse.placement import GOALS, Solution, solve_placement

GOAL_SECONDS = 10.0
GPU = {"sync_seconds": 3e-5, "launch_seconds": 5e-5}
MACHINES = {
    "one GPU of 11 GB": (Tier("cuda:0", budget=11 * 10**9, bandwidth=5e11, **GPU),),
    "two GPUs of 11 and 8 GB": (
        Tier("cuda:0", budget=11 * 10**9, bandwidth=5e11, **GPU),
        Tier("cuda:1", budget=8 * 10**9, bandwidth=3e11, **GPU),
    ),
}
CPU = Tier("cpu", bandwidth=5e10, launch_seconds=3e-5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--layers", type=at_least_one, default=80)
    parser.add_argument("--neurons", type=at_least_one, default=28672)
    arguments = parser.parse_args()
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=arguments.neurons,
        num_hidden_layers=arguments.layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        hidden_act="relu",
    )
    weights, head = WeightFormat("nf4", 64, "int8"), WeightFormat("int8", 64, "int8")
    blocks = model_blocks(config, weights, head, Activity(0.15, 0.43, 0.8, predicted=True))
    total = sum(block.bytes_per_neuron * block.neurons for block in blocks)
    model = f"{arguments.layers} layers of {arguments.neurons:,} neurons, {total / 1e9:.1f} GB"
    say(f"{model}\n")
    rows: list[dict[str, Any]] = []
    for machine, gpus in MACHINES.items():
        for goal in GOALS:
            solutions = [solve_placement(blocks, (*gpus, CPU), 0, goal=goal) for _ in range(arguments.rounds)]
            say(f"{machine}, goal {goal!r}: {describe(solutions)}")
            first = solutions[0]
            facts = {"value": first.value, "greedy_value": first.greedy_value, "gap": first.gap, "status": first.status}
            rows.append(row(f"{machine}, {goal}", "placement", "s", [s.seconds for s in solutions], model, **facts))
    write_json(arguments.json, rows)


def describe(solutions: list[Solution]) -> str:
    first, seconds = solutions[0], [solution.seconds for solution in solutions]
    verdict = "reached" if max(seconds) < GOAL_SECONDS else "missed"
    better = "no greedy placement"
    if first.greedy_value:
        ratio = first.greedy_value / first.value if first.goal == "time" else first.value / first.greedy_value
        better = f"{ratio:.3f} x as good as greedy"
    return (
        f"solved in {statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s "
        f"(goal {GOAL_SECONDS:g} s: {verdict}), {first.status}, at most {first.gap:.2%} from the best, {better}; "
        f"{first.token_seconds * 1e3:.1f} ms per token, {first.fast_impact:.0%} of the load on the GPUs"
    )


if __name__ == "__main__":
    main()
