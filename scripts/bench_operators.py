"""Speed of the two operators that skip rows, against what the memory gives and against torch's matrix products.

One activation row (decoding): bytes of the weights that are read per second, as a share of the read bandwidth. Each
pass goes once over matrices that together are larger than the caches, and follows a pass over other memory of the same
kind, which pushes the weights out of the caches and is the measure of the bandwidth. Rows are drawn at random, anew for
each pass. The time is that of the whole Python call, checks and all.

Many activation rows (a prompt): GFLOP per second on one matrix, where torch's F.linear multiplies the dequantized
weights, unpacked beforehand, in bf16 and in fp32.

All operators take turns over several rounds: what else the machine does falls on all alike. Weights and activations are
random; which rows are active is random too.

    python scripts/bench_operators.py [--rows 11008] [--cols 4096] [--weight-dtype nf4] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _bench import add_common_arguments, at_least_one, conditions, random_matrix, row, say, spread, write_json
from torch import Tensor

from hf_sparse.quantization import (
    COMPUTE_DTYPES,
    GROUP_SIZES,
    WEIGHT_DTYPES,
    NeuronMatrix,
    gathered_accumulate,
    gathered_row_product,
    memory,
)

OPERATORS: dict[str, Callable[..., Tensor]] = {
    "gathered_row_product": gathered_row_product,
    "gathered_accumulate": gathered_accumulate,
}
GOAL_SPEED_UP = 7.0  # of 10% of the rows over all
CHUNK_BYTES = 64 * 2**20
LONG_ROW = 4096  # of float32, for the reader that multiplies


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# Read bandwidth


class Reader:
    """Reads plain memory as fast as Python can have it read: of a few ways the one that is fastest here."""

    def __init__(self, megabytes: float, generator: torch.Generator) -> None:
        count = max(1, round(megabytes * 1e6 / CHUNK_BYTES))
        self.nbytes = count * CHUNK_BYTES
        self._chunks = [memory.empty((CHUNK_BYTES // 4,), torch.float32, torch.device("cpu")) for _ in range(count)]
        for chunk in self._chunks:
            chunk.uniform_(generator=generator)  # pages that nothing was written to are not read from memory
        self._pool = ThreadPoolExecutor(torch.get_num_threads())
        self._vector = torch.ones(LONG_ROW)
        ways: dict[str, Callable[[Tensor], Any]] = {
            "torch.dot of two halves, float32": lambda chunk: torch.dot(*chunk.chunk(2)),
            "torch.mv, float32": lambda chunk: torch.mv(chunk.view(-1, LONG_ROW), self._vector),
            "torch.sum, int64": lambda chunk: chunk.view(torch.int64).sum(),
            "numpy.max, int64, a part per thread": self._numpy_max,
        }
        tried = {name: min(seconds(lambda way=way: self._read(way)) for _ in range(4)) for name, way in ways.items()}
        self.name = min(tried, key=tried.__getitem__)
        self._way = ways[self.name]

    def _numpy_max(self, chunk: Tensor) -> None:
        parts = chunk.view(torch.int64).chunk(torch.get_num_threads())
        list(self._pool.map(lambda part: part.numpy().max(), parts))

    def _read(self, way: Callable[[Tensor], Any]) -> None:
        for chunk in self._chunks:
            way(chunk)

    def bytes_per_second(self) -> float:
        return self.nbytes / seconds(lambda: self._read(self._way))


# One activation row: passes over matrices that lie in memory


@dataclass(frozen=True)
class Pass:
    """One operator, with this share of rows active, over all the matrices."""

    operator: str
    compute_dtype: str
    percent: float

    @property
    def case(self) -> str:
        return f"{self.operator} {self.compute_dtype}, {self.percent:g}% of the rows, 1 activation"

    def active_rows(self, rows: int) -> int:
        return max(1, round(rows * self.percent / 100))


def arguments_of(one: Pass, matrix: NeuronMatrix, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Activation and index."""
    active = one.active_rows(matrix.rows)
    index = None
    if active < matrix.rows:
        index = torch.randperm(matrix.rows, generator=generator)[:active].sort().values
    width = matrix.cols if one.operator == "gathered_row_product" else active
    return torch.randn(1, width, generator=generator), index


def pass_seconds(
    one: Pass, matrices: list[NeuronMatrix], reader: Reader, generator: torch.Generator
) -> Iterator[float]:
    """First the bandwidth just before in bytes per second, then the seconds of the pass."""
    operator = OPERATORS[one.operator]
    calls = [(matrix, *arguments_of(one, matrix, generator)) for matrix in matrices]

    def work() -> None:
        for matrix, activation, index in calls:
            operator(matrix, activation, index, compute_dtype=one.compute_dtype)

    yield reader.bytes_per_second()
    yield seconds(work)


def bench_passes(arguments: argparse.Namespace, generator: torch.Generator) -> list[dict[str, Any]]:
    shape = (arguments.rows, arguments.cols)
    form = (arguments.weight_dtype, arguments.group_size)
    row_nbytes = NeuronMatrix.row_nbytes(arguments.cols, *form)
    count = max(1, -(-round(arguments.megabytes * 1e6) // (arguments.rows * row_nbytes)))
    model = f"{count} matrices {list(shape)}, {form[0]}, groups of {form[1]}"
    reader = Reader(arguments.megabytes, generator)
    matrices = [random_matrix(*shape, *form, shape[1] ** -0.5, generator) for _ in range(count)]
    total = sum(matrix.nbytes for matrix in matrices)
    say(f"One activation row: {model}: {total / 1e6:,.0f} MB, random.")
    say(f"Bandwidth: {reader.name}, over {reader.nbytes / 1e6:,.0f} MB, before each pass.\n")

    percents = sorted({100.0, *arguments.active}, reverse=True)
    passes = [Pass(o, c, p) for o in OPERATORS for c in arguments.compute_dtype for p in percents]
    times: dict[Pass, list[float]] = {one: [] for one in passes}
    bandwidths: list[float] = []
    for number in range(-1, arguments.rounds):  # the first is the warm-up
        for one in passes:
            bandwidth, taken = pass_seconds(one, matrices, reader, generator)
            if number >= 0:
                bandwidths.append(bandwidth)
                times[one].append(taken)

    rows = [row("read bandwidth", reader.name, "GB/s", [b / 1e9 for b in bandwidths], f"{reader.nbytes} bytes")]
    say(f"{'read bandwidth':50}{spread(rows[0]['figures'])} GB/s")
    for one, taken in times.items():
        nbytes = count * one.active_rows(arguments.rows) * row_nbytes
        speeds = [nbytes / t / 1e9 for t in taken]
        dense = times[Pass(one.operator, one.compute_dtype, 100.0)]
        more = {
            "bytes": nbytes,
            "share_of_bandwidth": statistics.median(speeds) / rows[0]["median"],
            "speed_up_over_dense": statistics.median(dense) / statistics.median(taken),
        }
        rows.append(row(one.case, "hf_sparse", "GB/s", speeds, model, **more))
        name = f"{one.operator} {one.compute_dtype}, {one.percent:g}%"
        print(
            f"{name:50}{spread(speeds)} GB/s, {more['share_of_bandwidth']:.0%} of the bandwidth, "
            f"{more['speed_up_over_dense']:.1f} x as fast as dense",
            flush=True,
        )
    _say_speed_up(rows, arguments)
    return rows


def _say_speed_up(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    found = {made["case"]: made["speed_up_over_dense"] for made in rows[1:]}
    print()
    for operator in OPERATORS:
        for compute_dtype in arguments.compute_dtype:
            speed_up = found.get(Pass(operator, compute_dtype, 10.0).case)
            if speed_up is not None:
                verdict = "reached" if speed_up >= GOAL_SPEED_UP else "missed"
                print(
                    f"speed-up of 10% active over dense, {operator} {compute_dtype}: "
                    f"{speed_up:.1f} x (goal {GOAL_SPEED_UP:g} x: {verdict})"
                )


# Many activation rows: a prompt


def bench_prompt(arguments: argparse.Namespace, generator: torch.Generator) -> list[dict[str, Any]]:
    shape, form = (arguments.rows, arguments.cols), (arguments.weight_dtype, arguments.group_size)
    matrix = random_matrix(*shape, *form, shape[1] ** -0.5, generator)
    model = f"1 matrix {list(shape)}, {form[0]}, groups of {form[1]}"
    wide = torch.randn(arguments.prompt_tokens, arguments.cols, generator=generator)
    tall = torch.randn(arguments.prompt_tokens, arguments.rows, generator=generator)
    say(f"\n{arguments.prompt_tokens} activation rows: {model}, random.")
    say("F.linear multiplies the same weights, unpacked beforehand.\n")

    # A linear layer stores [out, in]: for sums over rows that is the transposed matrix.
    work: dict[tuple[str, str], Callable[[], Any]] = {}
    for operator, activations, transposed in (
        ("gathered_row_product", wide, False),
        ("gathered_accumulate", tall, True),
    ):
        for compute_dtype in arguments.compute_dtype:
            work[operator, f"hf_sparse {compute_dtype}"] = functools.partial(
                OPERATORS[operator], matrix, activations, compute_dtype=compute_dtype
            )
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
            weight = matrix.dequantize(dtype)
            weight = weight.T.contiguous() if transposed else weight
            work[operator, f"F.linear {name}"] = functools.partial(F.linear, activations.to(dtype), weight)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in work}
    for number in range(-1, arguments.rounds):
        for key, call in work.items():
            taken = seconds(call)
            if number >= 0:
                times[key].append(taken)

    operations = 2 * arguments.prompt_tokens * arguments.rows * arguments.cols
    rows = []
    for (operator, system), taken in times.items():
        case = f"{operator}, {arguments.prompt_tokens} activations"
        speeds = [operations / t / 1e9 for t in taken]
        against = statistics.median(times[operator, "F.linear bf16"]) / statistics.median(taken)
        rows.append(row(case, system, "GFLOP/s", speeds, model, speed_over_bf16_linear=against))
        print(f"{operator + ', ' + system:50}{spread(speeds)} GFLOP/s, {against:.2f} x F.linear bf16", flush=True)
    return rows


# The command


def cache_megabytes() -> float:
    """Of the last level, as the system states it; 0 where it does not."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((float(size[:-1]) * 1024 / 1e6 for size in sizes if size.endswith("K")), default=0.0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=at_least_one, default=11008, help="of a matrix (default 11008)")
    parser.add_argument("--cols", type=at_least_one, default=4096, help="of a matrix (default 4096)")
    parser.add_argument("--weight-dtype", choices=WEIGHT_DTYPES, default="nf4")
    parser.add_argument("--group-size", type=int, choices=GROUP_SIZES, default=64)
    parser.add_argument("--compute-dtype", choices=COMPUTE_DTYPES, nargs="+", default=["int8", "fp32"])
    parser.add_argument("--active", type=float, nargs="+", default=[50, 30, 10, 5], help="per cent, beside 100")
    parser.add_argument(
        "--megabytes", type=float, help="of weights, and of memory that is read beside (default: twice the last cache)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=512, help="activation rows of a prompt; 0: no prompt")
    add_common_arguments(parser)
    arguments = parser.parse_args()
    if not all(0 < percent <= 100 for percent in arguments.active):
        parser.error(f"--active: expected percentages above 0 and up to 100, got {arguments.active}")
    if arguments.megabytes is None:
        arguments.megabytes = max(640.0, 2 * cache_megabytes())
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    say(f"{conditions()}{load}; {arguments.rounds} rounds: median (smallest to largest).\n")
    rows = bench_passes(arguments, generator)
    if arguments.prompt_tokens > 0:
        rows += bench_prompt(arguments, generator)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
