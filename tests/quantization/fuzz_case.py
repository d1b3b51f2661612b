"""A random case for the kernels: its numbers, and buffers around which no byte may be touched."""

from __future__ import annotations

import ctypes
import mmap
import random
from typing import Any

import torch
from torch import Tensor

LIBC = ctypes.CDLL(None, use_errno=True)
COMPUTES = ("fp32", "bf16", "int8")
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2, "int8": 1e-2}


class Case:
    """One call or a few, with its own source of randomness and its own buffers."""

    def __init__(self, seed: int, number: int, modules: Any) -> None:
        self.random = random.Random(f"{seed} {number}")
        self.generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        self.quantization, self.native, self.reference, self.codebooks, self.kernels = modules
        levels = self.kernels.levels()
        self.isa = sorted(levels)[number % len(levels)]
        self.level = levels[self.isa]
        self.guarded = self.random.random() < 0.5
        self.compute = self.random.choice(COMPUTES)
        torch.set_num_threads(self.random.choice((1, 1, 2, 3)))
        self.kept: list[Tensor] = []  # what the kernels are given addresses of

    # Buffers

    def place(self, tensor: Tensor) -> Tensor:
        """The same numbers in a buffer of exactly their size."""
        placed = self.buffer(*tensor.shape, dtype=tensor.dtype)
        placed.copy_(tensor)
        return placed

    def buffer(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Filled with bytes that stand for no sensible number."""
        count = torch.Size(shape).numel()
        nbytes = count * dtype.itemsize
        if not self.guarded or not nbytes:
            made = torch.empty(shape, dtype=dtype)
        else:
            page = mmap.PAGESIZE
            pages = -(-nbytes // page)
            memory = mmap.mmap(-1, (pages + 2) * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            at_end = self.random.random() < 0.8
            start = page + (pages * page - nbytes if at_end else 0)
            made = torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)
            first = made.data_ptr() - start
            for guard in (first, first + (pages + 1) * page):
                if LIBC.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0):
                    raise OSError(ctypes.get_errno(), "mprotect")
        if nbytes:
            made.view(torch.uint8 if made.dim() else made.dtype).fill_(0xFF)  # NaN as floats, -1 as whole numbers
        self.kept.append(made)
        return made

    # Random things

    def size(self, most: int) -> int:
        """1..most, small ones and those beside powers of two more often."""
        if self.random.random() < 0.3:
            return min(most, max(1, 2 ** self.random.randint(0, 10) + self.random.randint(-1, 1)))
        return self.random.randint(1, self.random.choice((min(most, 40), most)))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def format(self) -> tuple[str | None, int]:
        kind = self.random.choice((*self.quantization.WEIGHT_DTYPES, None))
        return kind, self.random.choice(self.quantization.GROUP_SIZES)

    def matrix(self, rows: int, cols: int, form: tuple[str | None, int], scale: float = 1.0) -> Any:
        """A NeuronMatrix whose tensors are buffers of their own."""
        kind, group_size = form
        weight = self.normal(rows, cols) * scale
        if self.random.random() < 0.2:
            weight[self.random.randrange(rows)] = 0
        return self.placed(weight, kind, group_size)

    def placed(self, weight: Tensor, kind: str | None, group_size: int) -> Any:
        rows, cols = weight.shape
        matrix_of = self.quantization.NeuronMatrix
        if kind is None:
            return matrix_of(None, group_size, rows, cols, weight=self.place(weight.bfloat16()))
        codes, scales, offsets = self.reference.quantize(weight, self.codebooks.codebook(kind), group_size)
        held = {"codes": codes, "scales": scales, "offsets": offsets}
        return matrix_of(
            kind, group_size, rows, cols, **{name: self.place(t) for name, t in held.items() if t is not None}
        )

    def turned(self, matrix: Any) -> Any:
        """The InputMatrix with the same weights, in buffers of their own."""
        made = self.quantization.InputMatrix.by_input(matrix)
        tensors = {name: self.place(tensor) for name, tensor in made.tensors().items()}
        return type(made)(made.weight_dtype, made.group_size, made.rows, made.cols, tensors)

    def index(self, rows: int) -> Tensor | None:
        which = self.random.randrange(5)
        if which == 0:
            return None
        if which == 1:
            return self.buffer(0, dtype=torch.int64)
        if which == 2:
            return self.place(torch.tensor([rows - 1]))
        if which == 3:
            return self.place(torch.arange(rows))
        return self.place(torch.randperm(rows, generator=self.generator)[: (rows + 1) // 2].sort().values)

    def rounded(self, x: Tensor, matrix: Any, compute: str | None = None) -> Tensor:
        """Activations as the product sees them."""
        compute = compute or self.compute
        if compute == "int8" and matrix.weight is not None:
            return x.double()
        return self.reference.round_activations(x.float(), compute, matrix.group_size).double()


def near(what: str, got: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    error = (got.double() - expected.double()).abs()
    if not bool((error <= bound).all()):
        raise AssertionError(f"{what}: {float(error.max()):.3e} off, of {float(expected.abs().max()):.3e}")


def dense(matrix: Any) -> Tensor:
    return matrix._dequantize_in_torch(torch.float32, None).double()


def predicted_scores(case: Case, fc1: Any, fc2: Any, bias: Tensor, x: Tensor) -> Tensor:
    inner = torch.relu(dense(fc1) @ case.rounded(x[None], fc1)[0])
    return dense(fc2) @ case.rounded(inner[None], fc2)[0] + bias.double()
