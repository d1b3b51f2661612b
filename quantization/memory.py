"""Where packed weights lie on the CPU: large blocks in order of their making, on huge pages where the system has them.

Decoding reads every weight once per token. With pages of 4 KB the processor spends a good part of that on translating
addresses; with pages of 2 MB it does not. Tensors of a few hundred KB would never get such a page of their own.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK_BYTES = 32 * 2**20
_HUGE_PAGE = 2 * 2**20
_ALIGNMENT = 64


class _Block:
    """Anonymous memory that its tensors keep alive."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self.memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without huge pages
        self.used = 0


_current: _Block | None = None


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, on the CPU from a block that holds what is made before and after it. Each tensor has a storage of
    its own, so that saving, copying and sharing treat it like any other.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes == 0 or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    global _current
    if _current is None or _current.used + nbytes > len(_current.memory):
        _current = _Block(max(_BLOCK_BYTES, -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE))
    start = _current.used
    _current.used = -(-(start + nbytes) // _ALIGNMENT) * _ALIGNMENT
    return torch.frombuffer(_current.memory, dtype=dtype, count=math.prod(shape), offset=start).view(tuple(shape))


def settled(tensor: Tensor) -> Tensor:
    """`tensor`, or a contiguous copy in such a block where it lies on the CPU elsewhere."""
    copy = empty(tensor.shape, tensor.dtype, tensor.device)
    return copy.copy_(tensor) if tensor.device.type == "cpu" else tensor.contiguous()
