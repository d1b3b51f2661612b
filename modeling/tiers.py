"""Runs the tiers of a block side by side and merges once."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from .neurons import Tier

T = TypeVar("T")


# From one device to another


def to_host(value: Tensor) -> Callable[[], Tensor]:
    """Begins to copy `value` to the CPU, through pinned memory and behind what its stream has queued; what comes back
    waits for the copy alone and returns it.
    """
    if value.device.type == "cpu":
        return lambda: value
    copy = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
    copy.copy_(value, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(value.device))

    def wait() -> Tensor:
        copied.synchronize()
        return copy

    return wait


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """`value` on `device`: itself where it is there already; from the CPU through pinned memory, without a wait."""
    if value.device == device:
        return value
    if device.type == "cpu":
        return to_host(value)()
    if value.device.type == "cpu":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


class _Copies:
    """Copies of tensors that all layers of a forward pass are given (masks, cosines and sines): one per device."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.device], tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def of(self, value: Tensor, device: torch.device) -> Tensor:
        if value.device == device:
            return value
        if value.is_inference():  # has no count of changes in place
            return to_device(value, device)
        key = (id(value), device)
        known = self._known.get(key)
        if known is not None and known[0]() is value and known[1] == value._version:
            return known[2]
        self._known = {k: v for k, v in self._known.items() if v[0]() is not None}
        copy = to_device(value, device)
        self._known[key] = weakref.ref(value), value._version, copy
        return copy


_copies = _Copies()


def all_to_device(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it (tuples, lists and dicts are entered) on `device`. Tensors that come again, not
    changed in between, are copied once.
    """
    if isinstance(value, Tensor):
        return _copies.of(value, device)
    if isinstance(value, dict):
        return {key: all_to_device(item, device) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(all_to_device(item, device) for item in value)
    return value


# Side by side


@dataclass(frozen=True)
class SimulatedTier(Tier):
    """Plays an accelerator in the CPU's memory: its part of a block runs on a thread of its own and takes as long as
    `launch_seconds`, `bandwidth` and the bytes that it reads say; what is handed to another tier, and what comes back,
    takes half of `sync_seconds` each.
    """

    @property
    def accelerates(self) -> bool:
        return True

    def run(self, work: Callable[[], T], read_bytes: Callable[[], float]) -> T:
        """`work()`, not before the time is over that this tier would take. `read_bytes`: asked afterwards."""
        began = time.perf_counter()
        result = work()
        self.wait(self.launch_seconds + read_bytes() / self.bandwidth - (time.perf_counter() - began))
        return result

    @staticmethod
    def wait(seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)

    def start(self, work: Callable[[], T], read_bytes: Callable[[], float]) -> Callable[[], T]:
        """As `run`, beside the caller; what comes back waits for the result."""
        thread = _threads.get(self.name)
        if thread is None:
            # One thread in kernels too: the CPU tier, which works at the same time, has the others.
            thread = ThreadPoolExecutor(1, f"tier {self.name}", initializer=lambda: torch.set_num_threads(1))
            _threads[self.name] = thread
        context, grad, inference = (
            contextvars.copy_context(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )

        def there() -> T:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                return self.run(work, read_bytes)

        return thread.submit(context.run, there).result


_threads: dict[str, ThreadPoolExecutor] = {}


def run_side_by_side(
    tiers: Sequence[Tier],
    compute: Callable[[int], T],
    read_bytes: Callable[[int], Callable[[], float]],
) -> list[T]:
    """`compute(position)` of every position in `tiers`, in their order. `read_bytes(position)`, called before, gives
    what says afterwards how many bytes of weights were read.

    Accelerators are started first: their kernels are queued and run while the CPU's part is computed.
    """
    results: dict[int, Callable[[], T]] = {}
    simulated = next((tier for tier in tiers if isinstance(tier, SimulatedTier)), None)
    try:
        for position in sorted(range(len(tiers)), key=lambda i: not tiers[i].accelerates):
            tier = tiers[position]
            if isinstance(tier, SimulatedTier):
                work, read = functools.partial(compute, position), read_bytes(position)
                results[position] = tier.start(work, read) if len(tiers) > 1 else _known(tier.run(work, read))
                continue
            if simulated is not None:
                simulated.wait(simulated.sync_seconds / 2)
            results[position] = _known(compute(position))
            if simulated is not None:
                simulated.wait(simulated.sync_seconds / 2)
        return [results[position]() for position in range(len(tiers))]
    except BaseException:
        for result in results.values():  # none goes on with what the caller may take back now
            with contextlib.suppress(Exception):
                result()
        raise


def _known(value: T) -> Callable[[], T]:
    return lambda: value


class HandedOver:
    """A tensor [tokens, ...] that several tiers get: on its way to the CPU before accelerators are given work, so that
    the CPU need not wait for that.
    """

    def __init__(self, value: Tensor, tiers: Sequence[Tier]) -> None:
        self.tokens = value.shape[0]
        self._at: dict[torch.device, Callable[[], Tensor]] = {value.device: lambda: value}
        for device in {tier.device for tier in tiers} - {value.device}:
            moved = to_host(value) if device.type == "cpu" else _known(to_device(value, device))
            self._at[device] = moved

    def at(self, device: torch.device) -> Tensor:
        if device not in self._at:
            self._at[device] = _known(to_device(next(iter(self._at.values()))(), device))
        return self._at[device]()


def merge(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of the tiers' partial outputs, on `device`."""
    total = to_device(parts[0], device)
    for part in parts[1:]:
        total = total + to_device(part, device)
    return total


def streams_weights(tokens: int, nbytes: int, weights: int, fast: Tier, slow: Tier) -> bool:
    """Whether a prompt of `tokens` is through sooner where `weights` numbers that live on `slow`, in `nbytes`, are
    copied to `fast` and multiplied there than where they are multiplied in place.
    """
    operations = 2 * tokens * weights
    return nbytes / fast.copy_bandwidth + operations / fast.flops < operations / slow.flops
