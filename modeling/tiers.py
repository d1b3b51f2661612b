"""Runs the tiers of a block side by side and merges once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it (tuples, lists and dicts are entered) on `device`; what is there already is not
    copied.
    """
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(to_device(item, device) for item in value)
    return value


def run_side_by_side(
    shards: Sequence[T], compute: Callable[[T], Any], device_of: Callable[[T], torch.device]
) -> list[Any]:
    """`compute` of every shard, in the order of `shards`.

    Accelerators are started first: their kernels are queued and run while the CPU's part is computed.
    """
    results: list[Any] = [None] * len(shards)
    for position in sorted(range(len(shards)), key=lambda i: device_of(shards[i]).type == "cpu"):
        results[position] = compute(shards[position])
    return results


def merge(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of the tiers' partial outputs, on `device`."""
    total = parts[0].to(device)
    for part in parts[1:]:
        total = total + part.to(device)
    return total
