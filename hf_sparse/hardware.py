"""Which tiers this machine has, what they may hold, and how fast they are. Probes run once per process."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Mapping

import torch

from hf_sparse.modeling import Tier

from .config import parse_bytes
from .log import warn_once

# What a probe that fails is replaced by: at the lower end of what is in use, so that a plan never counts on speed that
# is not there.
_CPU_BANDWIDTH, _GPU_BANDWIDTH, _GPU_SYNC_SECONDS = 8e9, 200e9, 1e-4
# A free budget is rounded down to this, so that the few megabytes that differ from run to run do not make another
# budget of it.
_BUDGET_STEP = 2**28


def find_tiers(gpu_budget: int | str | Mapping[str, int | str] | None) -> tuple[Tier, ...]:
    """The CUDA devices that `gpu_budget` asks for, in its order, then the CPU.

    None: 90% of the free memory of cuda:0, if there is one. A plain budget is for cuda:0; a mapping names devices
    ("cuda:1"). A percentage is of the device's total memory, and a device with a budget of 0 is left out. Without a GPU
    a budget is checked, a warning says once that all neurons stay on the CPU, and the CPU is the only tier.

    Raises ValueError for a budget that is none, for one larger than its device, and for a device that is not there.
    """
    cpu = Tier("cpu", bandwidth=_bandwidth("cpu"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        budgets = {} if gpu_budget is None else _budgets(gpu_budget, lambda index: None)
        if any(budgets.values()):
            warn_once("gpu_budget: this machine has no CUDA device, all neurons stay on the CPU")
        return (cpu,)
    if gpu_budget is None:
        free, _ = torch.cuda.mem_get_info(0)
        budgets = {0: free * 9 // 10 // _BUDGET_STEP * _BUDGET_STEP}
    else:
        budgets = _budgets(gpu_budget, functools.partial(_total_memory, count=count))
    gpus = []
    for index, budget in budgets.items():
        if budget:
            device = f"cuda:{index}"
            gpus.append(Tier(device, torch.device(device), budget, _bandwidth(device), _sync_seconds(device)))
    return (*gpus, cpu)


def _total_memory(index: int, count: int) -> int:
    if index >= count:
        present = ", ".join(f"cuda:{i}" for i in range(count))
        raise ValueError(f"gpu_budget: there is no device 'cuda:{index}', allowed are {present}")
    return torch.cuda.get_device_properties(index).total_memory


def _budgets(
    gpu_budget: int | str | Mapping[str, int | str], total_memory: Callable[[int], int | None]
) -> dict[int, int]:
    """Bytes by device index. `total_memory` gives a device's bytes, None where they are not known and nothing is too
    large.
    """
    wanted = gpu_budget if isinstance(gpu_budget, Mapping) else {"cuda:0": gpu_budget}
    if not wanted:
        raise ValueError(
            "gpu_budget: got an empty mapping, expected devices and their budgets such as {'cuda:0': '8GB'}"
        )
    budgets: dict[int, int] = {}
    for device, value in wanted.items():
        parts = re.fullmatch(r"cuda(?::([0-9]{1,4}))?", device) if isinstance(device, str) else None
        if parts is None:
            raise ValueError(f"gpu_budget: got device {device!r}, expected CUDA devices such as 'cuda:0'")
        index = int(parts[1] or 0)
        if index in budgets:
            raise ValueError(f"gpu_budget: device 'cuda:{index}' comes twice in {list(wanted)}")
        name = f"gpu_budget[{device!r}]" if isinstance(gpu_budget, Mapping) else "gpu_budget"
        total = total_memory(index)
        # Without a device any total does: only whether the percentage is one is asked.
        budgets[index] = parse_bytes(value, total=100 if total is None else total, name=name)
        if total is not None and budgets[index] > total:
            raise ValueError(
                f"{name}: got {value!r} = {budgets[index]} bytes, but cuda:{index} has {total} bytes in all"
            )
    return budgets


def _fastest(work: Callable[[], object], tries: int) -> float:
    """Seconds of the fastest of `tries` runs, after one that is not counted."""
    work()
    seconds = []
    for _ in range(tries):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return max(min(seconds), 1e-9)


@functools.cache
def _bandwidth(device: str) -> float:
    """Bytes per second read by a sum over a buffer larger than the usual last cache, with the threads torch uses."""
    on_gpu = device != "cpu"
    try:
        # 64 MB; on a GPU, whose cache may hold that, 512 MB, which also makes the time to launch small.
        buffer = torch.ones(2**27 if on_gpu else 2**24, dtype=torch.float32, device=device)

        def read() -> None:
            total = buffer.sum()
            if on_gpu:
                total.item()

        return buffer.nbytes / _fastest(read, 5)
    except RuntimeError as error:  # out of memory, or a device that fails
        figure = _GPU_BANDWIDTH if on_gpu else _CPU_BANDWIDTH
        warn_once(f"{device}: the bandwidth could not be measured ({error}), counting on {figure / 1e9:.0f} GB/s")
        return figure


@functools.cache
def _sync_seconds(device: str) -> float:
    """What a block pays to use `device` beside the CPU: one token's hidden state there and the partial result back."""
    try:
        there = torch.ones(1, 4096, dtype=torch.bfloat16, device=device)
        here = torch.ones(1, 4096, dtype=torch.bfloat16)
        return _fastest(lambda: there.add_(here.to(device)).cpu(), 20)
    except RuntimeError as error:
        warn_once(
            f"{device}: the synchronisation could not be timed ({error}), counting on {_GPU_SYNC_SECONDS * 1e6:.0f} us"
        )
        return _GPU_SYNC_SECONDS
