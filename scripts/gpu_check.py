"""What a machine with a GPU says: whether every operator is right on the device, and how fast it is.

First correctness: each Triton operator beside the plain PyTorch reference on the CPU; an MLP's step, recorded in a CUDA
graph, beside the block's operators; a model on two tiers beside the same on the CPU; memory that is allocated, beside
the budget. Then two tables: operators with 100, 50 and 10% of the rows active beside cuBLAS in bf16 and bitsandbytes in
nf4; decoding of 7B shapes (random weights, sparsity set on purpose) with budgets of 100, 50 and 25% of the model,
beside bitsandbytes (all on the GPU) and accelerate's offloading in bf16 with as many bytes.

The exit status is 1 where something is wrong; speed decides nothing. `--simulate` plays the GPU on the CPU: kernels in
Triton's interpreter, a simulated tier, small shapes.

    python scripts/gpu_check.py [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

if "--simulate" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import torch
import torch.nn.functional as F
from _bench import add_common_arguments, at_least_one, random_matrix, row, say, spread, write_json
from _random_models import RANDOM_CASES, load_random, mlps
from bench_decode import dequantized, generate, in_bitsandbytes, random_ids
from check_cost_model import measured_profile
from torch import Tensor

from hf_sparse import WeightOnlyQuantConfig
from hf_sparse.modeling import HybridMLP, SimulatedTier, Tier, hybrid_blocks, skipping
from hf_sparse.modeling import triton_mlp as recording
from hf_sparse.modeling.native_mlp import ACTIVATIONS
from hf_sparse.modeling.triton_mlp import TritonMLP
from hf_sparse.quantization import NeuronMatrix, active_neurons, triton_ops
from hf_sparse.report import format_bytes

CPU = torch.device("cpu")
CASE = "llama-7b-relu"
FORMATS = ("nf4", "int4", "int4_asym", "int8", None)
SHAPES, SMALL_SHAPES = ((1, 64), (7, 33), (300, 1000)), ((1, 64), (7, 33), (40, 70))
SLACK = 2**23  # the allocator rounds each tensor up
Failures = list[str]


class Machine:
    """The device, and how to wait for it."""

    def __init__(self, simulate: bool) -> None:
        self.simulated = simulate
        self.device = CPU if simulate else torch.device("cuda:0")
        self.name = "a simulated GPU" if simulate else torch.cuda.get_device_name(0)
        if simulate:  # tensors of the CPU go where those of a GPU would
            triton_ops.runs_on = lambda device: True

    def wait(self) -> None:
        if not self.simulated:
            torch.cuda.synchronize()

    def allocated(self) -> int | None:
        return None if self.simulated else torch.cuda.memory_allocated()

    def tiers(self, budget: int) -> tuple[Tier, ...]:
        figures = {"bandwidth": 5e11, "sync_seconds": 3e-5, "launch_seconds": 5e-5, "flops": 5e13}
        kind = SimulatedTier if self.simulated else Tier
        return kind("cuda:0", self.device, budget, **figures), Tier("cpu", bandwidth=3e10)

    def seconds(self, work: Callable[[], Any], repeats: int) -> float:
        """Of one run, the device's work included."""
        self.wait()
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        self.wait()
        return (time.perf_counter() - began) / repeats


# Correctness


def check(name: str, got: Tensor, expected: Tensor, tolerance: float, failures: Failures) -> None:
    """Notes where they differ by more than `tolerance`, relative to the largest."""
    got, expected = got.detach().float().cpu(), expected.detach().float().cpu()
    largest = max(1e-6, float(expected.abs().max())) if expected.numel() else 1.0
    error = float((got - expected).abs().max()) / largest if expected.numel() else 0.0
    if got.shape != expected.shape or not error <= tolerance:
        failures.append(f"{name}: off by {error:.2e} of the largest (allowed {tolerance:.0e})")


def check_operators(machine: Machine, failures: Failures) -> int:
    """Every operator, over formats and shapes. Returns how many comparisons there were."""
    generator, count, device = torch.Generator().manual_seed(0), 0, machine.device
    for weight_dtype in FORMATS:
        for rows, cols in SMALL_SHAPES if machine.simulated else SHAPES:
            weight = torch.randn(rows, cols, generator=generator)
            made = weight.bfloat16() if weight_dtype is None else weight
            matrix, up = (NeuronMatrix.quantize(m, weight_dtype, 64) for m in (made, made.flip(0)))
            plain, plain_up = matrix.dequantize(), up.dequantize()
            matrix, up = matrix.to(device), up.to(device)
            index = (torch.rand(rows, generator=generator) < 0.4).nonzero().flatten()
            x, a = torch.randn(9, cols, generator=generator), torch.randn(9, rows, generator=generator)
            on, chosen = x.to(device), index.to(device)
            label = f"{weight_dtype} [{rows}, {cols}]"
            pairs: list[tuple[str, Tensor, Tensor, float]] = [
                ("row product", triton_ops.row_product(matrix, on[:2], chosen), x[:2] @ plain[index].T, 1e-4),
                ("accumulate", triton_ops.accumulate(matrix, a[:2].to(device)), a[:2] @ plain, 1e-4),
                (
                    "rows",
                    triton_ops.accumulate(matrix, a[:, index].to(device), chosen),
                    a[:, index] @ plain[index],
                    1e-4,
                ),
                ("many rows", triton_ops.many_row_product(matrix, on, None, False), x @ plain.T, 2e-2),
                ("many rows, fp32", triton_ops.many_row_product(matrix, on, chosen, True), x @ plain[index].T, 1e-4),
                ("many sums", triton_ops.many_accumulate(matrix, a.to(device), None, True), a @ plain, 1e-4),
            ]
            below = torch.full((rows,), 0.1)
            for number, activation in enumerate(ACTIVATIONS):
                hidden, _ = triton_ops.gate_up(matrix, up, on[:1], number, skips=True, gates_below=below.to(device))
                gate = activation(x[:1] @ plain.T)[0]
                expected = torch.where(gate.abs() < below, 0.0, gate * (x[:1] @ plain_up.T)[0])
                pairs.append((f"gate and up, activation {number}", hidden, expected, 1e-3))
            for name, got, expected, tolerance in pairs:
                check(f"{name}, {label}", got, expected, tolerance, failures)
            count += len(pairs)
    fc1, fc2 = (NeuronMatrix.quantize(torch.randn(*s, generator=generator), "int8", 32) for s in ((16, 64), (2500, 16)))
    bias, x = torch.randn(2500, generator=generator), torch.randn(1, 64, generator=generator)
    index, found = triton_ops.predict(fc1.to(device), fc2.to(device), bias.to(device), x.to(device))
    expected = active_neurons(fc1, fc2, bias, x)
    wrong = set(index[: int(found)].tolist()) ^ set(expected.tolist())
    if len(wrong) > 2:  # scores that are zero but for rounding
        failures.append(f"predictor: {len(wrong)} of {len(expected)} neurons differ")
    return count + 1


def check_block(machine: Machine, block: HybridMLP, failures: Failures) -> None:
    """An MLP's step on the device beside the block on the CPU: first run, replays, and what was counted."""
    tier = machine.tiers(1)[0]
    xs = [torch.randn(1, block.width_of("input"), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    block.reset_counters()
    with torch.no_grad(), skipping("always"):
        expected = [block(x) for x in xs]
    counted = block.counters.clone()
    shard = block.part_of(block.shards[0], 0, block.neurons, tier)
    shard.predictor = None if block.predictor is None else block.predictor.of(None, machine.device)
    if machine.simulated:
        recording.record = lambda work, device: work
        recording.records_on = lambda device: True
    step, counters = TritonMLP(block, shard), torch.zeros_like(counted, device=machine.device)
    with torch.no_grad():
        for i, x in enumerate(xs):
            check(f"MLP step, token {i}", step.run(x.to(machine.device), True, counters), expected[i], 2e-2, failures)
    gates = (int(counters[1, 0]), int(counted[1, 0]))
    if abs(gates[0] - gates[1]) > 0.01 * gates[1] + 2:
        failures.append(f"MLP step: counted {gates[0]} active neurons, the CPU {gates[1]}")


def check_model(machine: Machine, model: Any, expected: Tensor, ids: Tensor, budget: int, failures: Failures) -> None:
    """Logits on two tiers beside those on the CPU, and the memory that the placement takes."""
    before = machine.allocated()
    model.solve(machine.tiers(budget))
    taken = machine.allocated()
    fast = model.placement_summary().tiers[0]
    if fast.nbytes + fast.cache_bytes > budget:
        failures.append(f"budget {budget}: the placement takes {fast.nbytes + fast.cache_bytes} bytes")
    if taken is not None and before is not None and taken > budget + SLACK:
        failures.append(f"budget {budget}: {taken} bytes are allocated")
    with torch.no_grad():
        got = model(ids.to(model.device)).logits
    check(f"logits, budget {format_bytes(budget)}", got, expected, 5e-2, failures)


# Operators


def bench_operators(machine: Machine, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    import bitsandbytes.functional as bnb

    rows, cols = arguments.rows, arguments.cols
    generator = torch.Generator().manual_seed(0)
    matrix = random_matrix(rows, cols, "nf4", 64, cols**-0.5, generator)
    dense = matrix.dequantize(torch.bfloat16).to(machine.device)
    packed, state = bnb.quantize_4bit(dense, blocksize=64, quant_type="nf4")
    matrix = matrix.to(machine.device)
    x = torch.randn(1, cols, generator=generator).to(machine.device)
    many = torch.randn(arguments.prompt, cols, generator=generator).to(machine.device)
    import bitsandbytes

    work: dict[tuple[str, str], Callable[[], Any]] = {
        ("row product, 1 activation", "cuBLAS bf16"): functools.partial(F.linear, x.bfloat16(), dense),
        ("row product, 1 activation", "bitsandbytes nf4"): functools.partial(
            bitsandbytes.matmul_4bit, x.bfloat16(), packed.t(), quant_state=state
        ),
        (f"row product, {arguments.prompt} activations", "cuBLAS bf16"): functools.partial(
            F.linear, many.bfloat16(), dense
        ),
        (f"row product, {arguments.prompt} activations", "bitsandbytes nf4"): functools.partial(
            bitsandbytes.matmul_4bit, many.bfloat16(), packed.t(), quant_state=state
        ),
        (f"row product, {arguments.prompt} activations", "hf_sparse nf4"): functools.partial(
            triton_ops.many_row_product, matrix, many, None, False
        ),
    }
    for percent in (100, 50, 10):
        chosen = torch.randperm(rows, generator=generator)[: max(1, rows * percent // 100)].sort().values
        index = None if percent == 100 else chosen.to(machine.device)
        a = torch.randn(1, len(chosen), generator=generator).to(machine.device)
        name = f"hf_sparse nf4, {percent}%"
        work["row product, 1 activation", name] = functools.partial(triton_ops.row_product, matrix, x, index)
        work["sum over rows, 1 activation", name] = functools.partial(triton_ops.accumulate, matrix, a, index)
    whole = torch.randn(1, rows, generator=generator).bfloat16().to(machine.device)
    work["sum over rows, 1 activation", "cuBLAS bf16"] = functools.partial(torch.matmul, whole, dense)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in work}
    for number in range(-1, arguments.rounds):
        for key, call in work.items():
            taken = machine.seconds(call, arguments.repeats)
            if number >= 0:
                times[key].append(taken)
    say(f"\nOperators, [{rows}, {cols}], microseconds, on {machine.name}; x: of cuBLAS in bf16")
    made = []
    for (case, system), taken in sorted(times.items()):
        ratio = statistics.median(times[case, "cuBLAS bf16"]) / statistics.median(taken)
        figures = [seconds * 1e6 for seconds in taken]
        print(f"{case:32}{system:24}{spread(figures)}  {ratio:.2f} x", flush=True)
        made.append(row(case, system, "us", figures, f"[{rows}, {cols}]", ratio=ratio, device=machine.name))
    return made


# Decoding


def decode_speed(machine: Machine, model: Any, ids: Tensor, tokens: int) -> float:
    machine.wait()
    return generate(model, ids.to(machine.device), tokens + 1).tokens_per_second


def offloaded(plain: Any, machine: Machine, nbytes: int) -> Any:
    """`plain` with as many of its layers on the device as `nbytes` hold, the others fetched for every token."""
    import accelerate

    fast: int | str = "cpu" if machine.simulated else 0
    memory = {fast: nbytes} if machine.simulated else {fast: nbytes, "cpu": 2**40}
    if machine.simulated:
        memory = {"cpu": 2**40}
    places = accelerate.infer_auto_device_map(plain, max_memory=memory, no_split_module_classes=plain._no_split_modules)
    return accelerate.dispatch_model(plain, device_map=places, main_device=fast, force_hooks=True)


def bench_decode(machine: Machine, model: Any, description: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    total = model.get_memory_footprint()
    ids = random_ids(4, model.config.vocab_size)
    say(f"\nDecoding, {description}, {format_bytes(total)} in nf4, on {machine.name}: tokens/s")
    made = []

    def measure(case: str, system: str, one: Any) -> None:
        decode_speed(machine, one, ids, 2)
        figures = [decode_speed(machine, one, ids, arguments.tokens) for _ in range(arguments.rounds)]
        print(f"{case:32}{system:24}{spread(figures)}", flush=True)
        made.append(row(case, system, "tokens/s", figures, description, device=machine.name))

    for share in arguments.budgets:
        model.solve(machine.tiers(int(share * total * 1.05)))  # room for the cache and what is rounded up
        measure(f"budget {share:.0%}", "hf_sparse", model)
    for share in arguments.budgets:
        plain = dequantized(model)
        measure(f"budget {share:.0%}", "accelerate bf16", offloaded(plain, machine, int(share * total)))
        del plain
    measure("all on the GPU", "bitsandbytes nf4", in_bitsandbytes(dequantized(model)).to(machine.device))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--simulate", action="store_true", help="play the GPU on the CPU, with small shapes")
    parser.add_argument("--layers", type=at_least_one, default=8, help="of the 7B shapes (default 8)")
    parser.add_argument("--active", type=float, default=0.1, help="share of the neurons that are computed")
    parser.add_argument("--tokens", type=at_least_one, default=24, help="to decode in a round (default 24)")
    parser.add_argument("--prompt", type=at_least_one, default=512, help="activations of a prompt (default 512)")
    parser.add_argument("--rows", type=at_least_one, default=11008)
    parser.add_argument("--cols", type=at_least_one, default=4096)
    parser.add_argument("--repeats", type=at_least_one, default=50, help="runs of an operator in a round")
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.0, 0.5, 0.25], help="shares of the model")
    parser.add_argument("--shrink", type=at_least_one, default=1, help="make the model so many times narrower")
    arguments = parser.parse_args()
    arguments.rank, arguments.predictor_dtype = max(8, 256 // arguments.shrink), "nf4"
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if not arguments.simulate and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device; --simulate plays one on the CPU")
    machine, failures = Machine(arguments.simulate), Failures()

    began = time.perf_counter()
    count = check_operators(machine, failures)
    say(f"{count} comparisons of operators on {machine.name}, {len(failures)} failed")

    def decode(model: Any, tokens: int) -> None:
        generate(model, random_ids(4, model.config.vocab_size), tokens)

    triton_on, triton_ops.runs_on = triton_ops.runs_on, lambda device: device.type == "cuda"  # the CPU's part first
    form = WeightOnlyQuantConfig()
    model, description, _ = load_random(RANDOM_CASES[CASE].shrunk(arguments.shrink), form, arguments, decode)
    model.plan, model.cache_tokens = _Plan(measured_profile(model)), 64
    ids = random_ids(9, model.config.vocab_size)
    with torch.no_grad():
        expected = model(ids).logits
    block = mlps(model)[0]
    triton_ops.runs_on = triton_on
    check_block(machine, block, failures)
    if machine.simulated:
        triton_ops.runs_on = lambda device: device.type == "cuda"
    for share in arguments.budgets:
        budget = int(share * model.get_memory_footprint() * 1.05)
        check_model(machine, model, expected, ids, budget, failures)
    say(f"{len(list(hybrid_blocks(model)))} blocks on two tiers checked")

    rows = bench_operators(machine, arguments) + bench_decode(machine, model, description, arguments)
    write_json(arguments.json, rows)
    say(f"\n{time.perf_counter() - began:.0f} s in all")
    for failure in failures:
        say(f"FAIL: {failure}")
    if failures:
        raise SystemExit(1)
    say("PASS: everything computes what the reference does")


class _Plan:
    """As much of a plan as a placement needs."""

    def __init__(self, blocks: dict[Any, Any]) -> None:
        self.blocks = blocks


if __name__ == "__main__":
    main()
