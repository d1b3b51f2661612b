"""How fast this machine's devices are, by short measurements; and what the operating system says of its CPU.

A probe takes a device and returns one figure of `hf_sparse.hardware.DeviceFigures`, under whose name it stands in
CPU_PROBES or GPU_PROBES; it raises RuntimeError, MemoryError or OSError where the device does not let itself be
measured. What a machine does besides comes in bursts: works take turns over a few rounds, each round gives a work its
median, and the best of these counts.
"""

from __future__ import annotations

import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sparse.modeling import BlockId, HybridMLP, Tier, WeightFormat
from hf_sparse.modeling.block import BlockSpec, Projection
from hf_sparse.modeling.mlp import MLPNames
from hf_sparse.quantization import NeuronMatrix, gathered_row_product, memory, native

Bandwidths = tuple[tuple[int, float], ...]  # (bytes of the working set, bytes per second), the smallest set first
Key = TypeVar("Key")

# How weights lie that are read in this format, and what they are multiplied in.
FORMATS: dict[str, tuple[str | None, str]] = {
    "4-bit": ("nf4", "int8"),
    "int8": ("int8", "int8"),
    "bf16": (None, "fp32"),
}
GROUP_SIZE = 64
SMALL, MIDDLE, LARGE = 2**20, 2**24, 2**28  # working sets: in a core's cache, in the shared one, in memory
LARGEST = 2**30  # what the large one is at most raised to where the last cache would hold it
MATRIX_BYTES = 4 * 2**20
COLUMNS = 4096
FILLING = 0x3C  # a byte that makes 0.0115 of two as bfloat16: neither a denormal number nor NaN
HIDDEN_STATE = 4096  # numbers in bfloat16
CPU_PRODUCT, GPU_PRODUCT = (128, 1024, 2048), (512, 4096, 4096)  # rows of activations, outputs, inputs


def best_median(
    works: Mapping[Key, Callable[[], Any]],
    rounds: int = 3,
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, float]:
    """Seconds of each work: the smallest of its `rounds` medians of `repeats` runs. The works take turns, a round each;
    all run once before that is not counted.
    """
    for work in works.values():
        work()
    medians: dict[Key, list[float]] = {key: [] for key in works}
    for _ in range(rounds):
        for key, work in works.items():
            taken = []
            for _ in range(repeats):
                began = clock()
                work()
                taken.append(clock() - began)
            medians[key].append(statistics.median(taken))
    return {key: max(min(found), 1e-9) for key, found in medians.items()}


def without_fixed(seconds: float, fixed: float) -> float:
    """`seconds` less what calls cost by themselves, of which no more than half is believed."""
    return max(seconds - fixed, seconds / 2)


# The CPU


@functools.cache
def large_set() -> int:
    """Bytes that neither the last cache nor an eighth of the memory holds, LARGEST at most."""
    wanted = max(LARGE, min(2 * last_cache(), LARGEST))
    return max(MIDDLE * 2, min(wanted, host_memory() // 8))


def _filled(nbytes: int) -> Tensor:
    """uint8 [nbytes] on pages like those of weights, each of them written to: others would not be read from memory."""
    return memory.empty((nbytes,), torch.uint8, torch.device("cpu")).fill_(FILLING)


def cpu_bandwidths(device: torch.device) -> Bandwidths:
    """Of plain reads, by whichever of a few ways is fastest here, with the threads torch uses."""
    buffer = _filled(large_set())
    vector = torch.ones(COLUMNS)
    ways: dict[str, Callable[[Tensor], Any]] = {
        "dot": lambda part: torch.dot(*part.view(torch.float32).chunk(2)),
        "mv": lambda part: torch.mv(part.view(torch.float32).view(-1, COLUMNS), vector),
        "sum": lambda part: part.view(torch.int64).sum(),
    }
    row = buffer[: COLUMNS * 4]
    fixed = best_median({name: functools.partial(way, row) for name, way in ways.items()}, repeats=9)
    found = []
    for size in (SMALL, MIDDLE, len(buffer)):
        part = buffer[: size // len(row) * len(row)]
        works = {name: functools.partial(way, part) for name, way in ways.items()}
        seconds = best_median(works, rounds=5, repeats=5 if size == SMALL else 1)
        net = {name: without_fixed(seconds[name], fixed[name]) for name in works}
        best = min(net, key=net.__getitem__)
        found.append((len(part), len(part) / net[best]))
        if size == MIDDLE:
            ways = {best: ways[best]}  # what is fastest here is so in memory, and reading that takes long
    return tuple(found)


def matrices_over(buffer: Tensor, weights: str, matrix_bytes: int = MATRIX_BYTES) -> list[NeuronMatrix]:
    """Matrices [rows, COLUMNS] of about `matrix_bytes` whose weights, in a format of FORMATS, are the bytes of
    `buffer`, uint8 [nbytes]: as many as fit.
    """
    weight_dtype, _ = FORMATS[weights]
    row_bytes = NeuronMatrix.row_nbytes(COLUMNS, weight_dtype, GROUP_SIZE)
    groups = COLUMNS // GROUP_SIZE
    rows = max(1, min(matrix_bytes, len(buffer)) // row_bytes)
    found = []
    for start in range(0, len(buffer) - rows * row_bytes + 1, rows * row_bytes):
        part = buffer[start : start + rows * row_bytes]
        if weight_dtype is None:
            tensors = {"weight": part.view(torch.bfloat16).view(rows, COLUMNS)}
        else:
            codes, scales = part[: -rows * groups * 2].view(rows, -1), part[-rows * groups * 2 :]
            tensors = {
                "codes": codes.view(torch.int8) if weight_dtype == "int8" else codes,
                "scales": scales.view(torch.bfloat16).view(rows, groups),
            }
        found.append(NeuronMatrix(weight_dtype, GROUP_SIZE, rows, COLUMNS, **tensors))
    return found


def kernel_bandwidths(device: torch.device) -> dict[str, Bandwidths]:
    """By format of weights: as decoding reads them, one activation row by whole matrices, less the cost of a call."""
    # Without kernels weights are unpacked by torch: so slow that no cache matters.
    sizes = (SMALL, MIDDLE, large_set()) if native.level() is not None else (SMALL,)
    buffer = _filled(sizes[-1])
    x = torch.ones(1, COLUMNS)
    works: dict[tuple[str, int], Callable[[], Any]] = {}
    sets: dict[tuple[str, int], tuple[int, int]] = {}  # how many matrices, how many bytes

    def read(matrices: list[NeuronMatrix], compute_dtype: str) -> None:
        for matrix in matrices:
            gathered_row_product(matrix, x, compute_dtype=compute_dtype)

    for weights, (_, compute_dtype) in FORMATS.items():
        for size in (0, *sizes):
            part = buffer[: size or SMALL // 8]
            matrices = matrices_over(part, weights) if size else matrices_over(part, weights)[:1]
            works[weights, size] = functools.partial(read, matrices, compute_dtype)
            sets[weights, size] = len(matrices), sum(matrix.nbytes for matrix in matrices)
    small = {key: work for key, work in works.items() if key[1] < MIDDLE}
    seconds = best_median(small, repeats=15 if native.level() is not None else 1)
    seconds |= best_median({key: work for key, work in works.items() if key not in small}, rounds=5, repeats=1)
    found = {}
    for weights in FORMATS:
        points = []
        for size in sizes:
            calls, nbytes = sets[weights, size]
            points.append((nbytes, nbytes / without_fixed(seconds[weights, size], calls * seconds[weights, 0])))
        found[weights] = tuple(points)
    return found


def cpu_flops(device: torch.device) -> float:
    return _product_flops(device, CPU_PRODUCT, calls=1)


def cpu_copy(device: torch.device) -> float:
    source, target = _filled(2 * MIDDLE), _filled(2 * MIDDLE)
    return len(source) / best_median({"copy": lambda: target.copy_(source)})["copy"]


# What both have


def tiny_block(device: torch.device) -> HybridMLP:
    """An MLP with 64 neurons and a hidden size of 64, packed in 4 bits, placed on `device`."""
    size, rows = 64, {"gate": (1,), "up": (1,), "down": (1,)}
    weights = WeightFormat("nf4", GROUP_SIZE, "int8")
    projections = tuple(Projection(name, count, size, name == "down", False) for name, count in rows.items())
    spec = BlockSpec(BlockId(0, "mlp"), "mlp", "mlp.", size, projections, weights)
    block = HybridMLP(spec, MLPNames(gate="gate", up="up", down="down", activation="act"), nn.SiLU())
    for projection in projections:
        block.load(f"{projection.name}.weight", torch.eye(size))
    block.place((Tier(str(device), device),), torch.zeros(size, dtype=torch.int64))
    return block


def launch_seconds(device: torch.device) -> float:
    """What a block costs that reads next to nothing."""
    block, x, calls = tiny_block(device), torch.ones(1, 64, device=device), 50

    @torch.no_grad()
    def work() -> None:
        for _ in range(calls):
            block(x)
        _wait_for(device)

    return best_median({"block": work})["block"] / calls


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _product_flops(device: torch.device, shape: tuple[int, int, int], calls: int) -> float:
    m, n, k = shape
    x, weight = (torch.ones(rows, k, dtype=torch.bfloat16, device=device) for rows in (m, n))

    def work() -> None:
        for _ in range(calls):
            F.linear(x, weight)
        _wait_for(device)

    return 2 * m * n * k * calls / best_median({"product": work})["product"]


# A GPU


def gpu_bandwidths(device: torch.device) -> Bandwidths:
    buffer, calls = torch.ones(LARGE // 4, device=device), 20

    def read(part: Tensor) -> None:
        for _ in range(calls):
            part.sum()
        _wait_for(device)

    sizes = (SMALL, MIDDLE, LARGE)
    seconds = best_median({size: functools.partial(read, buffer[: size // 4]) for size in (4, *sizes)})
    return tuple((size, size * calls / without_fixed(seconds[size], seconds[4])) for size in sizes)


def gpu_flops(device: torch.device) -> float:
    return _product_flops(device, GPU_PRODUCT, calls=10)


def _copy_seconds(device: torch.device, nbytes: int, to: bool, back: bool) -> float:
    """Of `nbytes` from pinned host memory to `device`, or back, or there and back."""
    here = torch.ones(nbytes, dtype=torch.uint8).pin_memory()
    there = torch.ones(nbytes, dtype=torch.uint8, device=device)

    def work() -> None:
        if to:
            there.copy_(here, non_blocking=True)
        if back:
            here.copy_(there, non_blocking=True)
        _wait_for(device)

    return best_median({"copy": work}, repeats=25 if nbytes < SMALL else 3)["copy"]


def sync_seconds(device: torch.device) -> float:
    """One token's hidden state to `device` and a partial result back."""
    return _copy_seconds(device, HIDDEN_STATE * 2, True, True)


def copy_latency(device: torch.device) -> float:
    return _copy_seconds(device, 4, True, False)


def _copy_bandwidth(device: torch.device, to: bool) -> float:
    nbytes = 4 * MIDDLE
    latency = _copy_seconds(device, 4, to, not to)
    return nbytes / without_fixed(_copy_seconds(device, nbytes, to, not to), latency)


def copy_to_bandwidth(device: torch.device) -> float:
    return _copy_bandwidth(device, True)


def copy_from_bandwidth(device: torch.device) -> float:
    return _copy_bandwidth(device, False)


Probes = dict[str, Callable[[torch.device], Any]]
CPU_PROBES: Probes = {
    "bandwidths": cpu_bandwidths,
    "kernel_bandwidths": kernel_bandwidths,
    "launch_seconds": launch_seconds,
    "flops": cpu_flops,
    "copy_to_bandwidth": cpu_copy,
}
GPU_PROBES: Probes = {
    "bandwidths": gpu_bandwidths,
    "launch_seconds": launch_seconds,
    "sync_seconds": sync_seconds,
    "copy_latency": copy_latency,
    "copy_to_bandwidth": copy_to_bandwidth,
    "copy_from_bandwidth": copy_from_bandwidth,
    "flops": gpu_flops,
}


# What the system says of the CPU


def cpu_model() -> str:
    """ "Intel(R) Xeon(R) Processor", or what else there is to call it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine() or "unknown CPU"


def host_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def last_cache() -> int:
    """Bytes of the largest cache of the first core; 0 where the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdecimal():
            sizes.append(int(text[:-1]) * 1024)
    return max(sizes, default=0)


def usable_cores() -> int:
    """Cores that this process may use; threads that share one count once where the system says which do."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = set()
    for cpu in usable:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            siblings.add(path.read_text())
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)
