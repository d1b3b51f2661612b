"""Calls the CPU kernels at random shapes, where no byte around their buffers may be touched, and compares what they
give with plain PyTorch.

    python tests/quantization/fuzz_kernels.py [--seconds N] [--seed N] [--case N] [--kernels FILE.so] [--log FILE]

Every buffer is exactly as long as it is said to be: it ends (or begins) at a page that no one may touch, or is memory
of its own from malloc, for a sanitizer to watch; the first kind shows what sanitizers do not see (masked loads, tile
registers) and needs none. Tensors that hf_sparse makes lie in large blocks, where a read past the end goes unseen.

Cases go round what the kernels offer and every instruction set of this CPU. One is a matter of --seed and its number
alone; the log holds the one that runs. scripts/sanitize_kernels.py runs this on kernels built with sanitizers.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib.util
import mmap
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIBC = ctypes.CDLL(None, use_errno=True)
PAGE_TOKENS = 256
COMPUTES = ("fp32", "bf16", "int8")
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2, "int8": 1e-2}
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.nn.functional.silu,
    torch.nn.functional.gelu,
    lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    torch.relu,
    lambda x: torch.relu(x).square(),
)


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


# What is called


def quantize(case: Case) -> str:
    rows, cols, (kind, group_size) = case.size(40), case.size(700), case.format()
    kind = kind or "int8"
    weight = case.normal(rows, cols) * 10.0 ** case.random.randint(-40, 30)
    if case.random.random() < 0.2:
        weight[case.random.randrange(rows)] = case.random.choice((0.0, 1e-44, 1.0))
    book, weight = case.codebooks.codebook(kind), case.place(weight)
    expected = case.reference.quantize(weight, book, group_size)
    out = [None if tensor is None else case.buffer(*tensor.shape, dtype=tensor.dtype) for tensor in expected]
    case.native.quantize(case.level, weight, book, group_size, *out)
    for got, wanted in zip(out, expected, strict=True):
        if wanted is not None and not torch.equal(got.view(torch.uint8), wanted.contiguous().view(torch.uint8)):
            raise AssertionError("quantize: other bits than the reference")
    return f"{kind} {group_size} [{rows}, {cols}]"


def dequantize(case: Case) -> str:
    rows, cols, form = case.size(40), case.size(2300), case.format()
    matrix = case.matrix(rows, cols, form if form[0] else ("nf4", 64))
    index = case.index(rows)
    dtype = case.random.choice((torch.float32, torch.bfloat16))
    out = case.buffer(rows if index is None else len(index), cols, dtype=dtype)
    if not matrix.native().dequantize(case.level, index, out):
        raise AssertionError("dequantize: a good index is refused")
    expected = matrix._dequantize_in_torch(dtype, index)
    if not torch.equal(out, expected):
        raise AssertionError("dequantize: other bits than the reference")
    return f"{matrix} index {None if index is None else len(index)}"


def products(case: Case) -> str:
    large = case.random.random() < 0.1  # enough for several threads
    rows, cols = case.size(300 if large else 40), case.size(2300 if large else 500)
    matrix = case.matrix(rows, cols, case.format())
    index, n = case.index(rows), case.random.choice((0, 1, 1, 1, 2, 3, 4, 5, 9, 17, 33))
    chosen = rows if index is None else len(index)
    weight = matrix._dequantize_in_torch(torch.float32, index).double()
    x, a = case.place(case.normal(n, cols)), case.place(case.normal(n, chosen))
    native, text = matrix.native(), f"{case.compute} {n} x {matrix} index {None if index is None else chosen}"
    many = case.native.has_many(case.level) and case.random.random() < 0.5
    compute = "bf16" if many else case.compute
    y, sums = case.buffer(n, chosen), case.buffer(n, cols)
    how = () if many else (case.compute,)
    # Weights 4 to 16 times as far from zero as they are, for offsets and for the bias of integer products.
    magnitude = weight.abs() + (matrix.scales.float().abs().max().item() * 256 if matrix.scales is not None else 0)
    if not getattr(native, "many_row_product" if many else "row_product")(case.level, x, index, *how, y):
        raise AssertionError(f"row product: a good index is refused; {text}")
    left = x.bfloat16().double() if many else case.rounded(x, matrix)
    unit = 2.0**-7 if many else 2.0**-20
    near(f"row product (many: {many}), {text}", y, left @ weight.T, unit * (left.abs() @ magnitude.T) + 1e-30)
    if not getattr(native, "many_accumulate" if many else "accumulate")(case.level, a, index, *how, sums):
        raise AssertionError(f"accumulate: a good index is refused; {text}")
    left = a.bfloat16().double() if many else a.double()
    also = 0.0
    if compute == "int8" and n == 1 and chosen and matrix.scales is not None:  # factors of 16 bits
        also = a.abs().max().item() * matrix.scales.float().abs().max().item() * chosen * 128 / 65024
    near(f"accumulate (many: {many}), {text}", sums, left @ weight, unit * (left.abs() @ magnitude) + also + 1e-30)
    bad = case.place(torch.tensor(case.random.choice(([rows], [-1], [0, 0], [2**40]))))
    before = y.clone()
    wide = case.buffer(n, len(bad))
    if getattr(native, "many_row_product" if many else "row_product")(case.level, x, bad, *how, wide):
        raise AssertionError(f"row product: index {bad.tolist()} is taken; {text}")
    if not torch.equal(before.nan_to_num(), y.nan_to_num()):
        raise AssertionError("row product: an index that is refused changes what was there")
    return text


def active_neurons(case: Case) -> str:
    hidden, width, neurons = case.size(400), case.size(60), case.size(500)
    form = ("int8", 32) if case.random.random() < 0.7 else case.format()
    fc1, fc2 = case.matrix(width, hidden, form), case.matrix(neurons, width, form)
    bias, x = case.place(case.normal(neurons) * 3), case.place(case.normal(1, hidden))
    got = case.native.active_neurons(case.level, fc1.native(), fc2.native(), bias, x, case.compute)
    scores = predicted_scores(case, fc1, fc2, bias, x.flatten())
    check_active(case, got, scores)
    return f"{hidden} {fc1} {fc2} {case.compute}"


def predicted_scores(case: Case, fc1: Any, fc2: Any, bias: Tensor, x: Tensor) -> Tensor:
    inner = torch.relu(dense(fc1) @ case.rounded(x[None], fc1)[0])
    return dense(fc2) @ case.rounded(inner[None], fc2)[0] + bias.double()


def check_active(case: Case, got: Tensor, scores: Tensor) -> None:
    margin = TOLERANCE[case.compute] * scores.abs().max()
    mask = torch.zeros(len(scores), dtype=torch.bool)
    mask[got] = True
    if not bool((got[1:] > got[:-1]).all()) or bool((mask & (scores < -margin)).any()):
        raise AssertionError("active_neurons: not ascending, or one that is not active")
    if bool((~mask & (scores > margin)).any()):
        raise AssertionError("active_neurons: one is missing")


def dense(matrix: Any) -> Tensor:
    return matrix._dequantize_in_torch(torch.float32, None).double()


class Linear:
    def __init__(self, case: Case, rows: int, cols: int, form: tuple[str | None, int], by_neuron: bool = False) -> None:
        self.matrix = case.matrix(rows, cols, form, (rows if by_neuron else cols) ** -0.5)
        width = cols if by_neuron else rows
        self.bias = case.place(case.normal(width)) if case.random.random() < 0.5 else None
        self.case = case
        bias = 0 if self.bias is None else self.bias.data_ptr()
        self.handle = case.kernels.Linear(self.matrix.native().handle, bias)

    def __call__(self, x: Tensor) -> Tensor:
        y = dense(self.matrix) @ self.case.rounded(x[None], self.matrix)[0]
        return y if self.bias is None else y + self.bias.double()

    def sum_of_rows(self, a: Tensor) -> Tensor:
        y = a.double() @ dense(self.matrix)
        return y if self.bias is None else y + self.bias.double()


def rms(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return x if weight is None else x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.double()


class Attention:
    def __init__(self, case: Case, hidden: int, form: tuple[str | None, int], position: int) -> None:
        rng = case.random
        self.case, self.position = case, position
        self.kv_heads, self.queries, self.head_dim = rng.randint(1, 3), rng.randint(1, 4), case.size(70)
        heads, dim = self.kv_heads * self.queries, self.head_dim
        widths = (heads * dim, self.kv_heads * dim, self.kv_heads * dim)
        self.qkv = [Linear(case, width, hidden, form) for width in widths]
        self.out = Linear(case, heads * dim, hidden, form, by_neuron=True)
        self.scaling, self.softcap = dim**-0.5, rng.choice((0.0, 0.0, 2.0))
        self.window = rng.choice((0, 0, 1, rng.randint(1, 300)))
        self.norms: list[Tensor | None] = [None, None]
        self.all_heads = rng.random() < 0.5
        self.made = case.kernels.Attention(
            *(part.handle for part in (*self.qkv, self.out)),
            heads,
            self.kv_heads,
            dim,
            self.scaling,
            COMPUTES.index(case.compute),
        )
        if rng.random() < 0.5:
            self.norms = [case.place(1 + case.normal(n if self.all_heads else dim)) for n in widths[:2]]
            self.made.set_norms(*(norm.data_ptr() for norm in self.norms), self.all_heads, 0.01)
        self.rotary = 2 * rng.randint(0, dim // 2)
        self.rotation = rng.randint(0, 1) if self.rotary else -1
        if self.rotary:
            self.made.set_rotation(self.rotation, self.rotary)
        self.made.softcap, self.made.window = self.softcap, self.window
        self._make_cache()

    def _make_cache(self) -> None:
        case = self.case
        self.dtype = case.random.choice((torch.float32, torch.bfloat16, torch.int8))
        pages, shape = self.position // PAGE_TOKENS + 1, (self.kv_heads, PAGE_TOKENS, self.head_dim)
        self.pages: list[list[Tensor]] = [[], [], [], []]  # keys, values, their scales
        for _ in range(pages):
            for side in (0, 1):
                states = case.normal(*shape)
                if self.dtype == torch.int8:
                    scales = states.abs().amax(-1) / 127
                    self.pages[2 + side].append(case.place(scales))
                    states = (states / scales[..., None]).round()
                self.pages[side].append(case.place(states.to(self.dtype)))
        addresses = [[t.data_ptr() for t in column] or [0] * pages for column in self.pages]
        self.table = case.place(torch.tensor(addresses).T.contiguous())
        self.code = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}[self.dtype]
        self.before = [[t.clone() for t in column] for column in self.pages]

    def _held(self, side: int, pages: list[list[Tensor]]) -> Tensor:
        """[kv_heads, tokens, head_dim]"""
        values = torch.cat(pages[side], dim=1).double()
        return values * torch.cat(pages[2 + side], dim=1).double()[..., None] if self.dtype == torch.int8 else values

    def __call__(self, x: Tensor, rotations: list[tuple[Tensor, Tensor]]) -> Tensor:
        """After the kernel has run, whose new keys and values are looked at here, and then used."""
        q, k, v = (part(x) for part in self.qkv)
        q, k = (self._turned(states, norm, rotations) for states, norm in zip((q, k), self.norms, strict=True))
        at, stop = self.position, self.position + 1
        held = [self._held(side, self.pages)[:, :stop] for side in (0, 1)]
        for states, new in ((held[0], k), (held[1], v.view(self.kv_heads, -1))):
            peak = new.abs().amax(-1, keepdim=True)
            step = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.int8: 1 / 127}[self.dtype]
            near(
                "new key or value", states[:, at], new, (TOLERANCE[self.case.compute] * 10 + step) * peak.clamp_min(0.1)
            )
        for column, was in zip(self.pages, self.before, strict=True):
            for number, (page, before) in enumerate(zip(column, was, strict=True)):
                rest = torch.arange(PAGE_TOKENS) != at - number * PAGE_TOKENS
                if not torch.equal(page[:, rest], before[:, rest]):
                    raise AssertionError("another token of the cache was changed")
        start = max(0, stop - self.window) if self.window else 0
        scores = (
            torch.einsum("kqd,ktd->kqt", q.view(self.kv_heads, self.queries, -1), held[0][:, start:]) * self.scaling
        )
        if self.softcap:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        attended = torch.einsum("kqt,ktd->kqd", scores.softmax(-1), held[1][:, start:])
        return self.out.sum_of_rows(attended.flatten())

    def _turned(self, states: Tensor, norm: Tensor | None, rotations: list[tuple[Tensor, Tensor]]) -> Tensor:
        states = rms(states, norm, 0.01) if self.all_heads else states
        states = states.view(-1, self.head_dim)
        states = states if self.all_heads else rms(states, norm, 0.01)
        if not self.rotary:
            return states
        cos, sin = (t.double() for t in rotations[self.rotation])
        half = self.rotary // 2
        a, b, rest = states.split((half, half, self.head_dim - self.rotary), dim=1)
        cos, sin = cos[:half], sin[:half]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=1)


class Mlp:
    def __init__(self, case: Case, hidden: int, form: tuple[str | None, int]) -> None:
        rng, self.case, self.neurons = case.random, case, case.size(300)
        self.gate = Linear(case, self.neurons, hidden, form) if rng.random() < 0.6 else None
        self.up = Linear(case, self.neurons, hidden, form)
        down_form = form if rng.random() < 0.7 else case.format()
        self.down = Linear(case, self.neurons, hidden, down_form, by_neuron=True)
        self.activation = rng.randrange(len(ACTIVATIONS))
        self.made = case.kernels.Mlp(self.up.handle, self.down.handle, self.activation, COMPUTES.index(case.compute))
        if self.gate is not None:
            self.made.gate = self.gate.handle
        self.made.rule = self.rule = rng.random() < 0.6
        self.made.threshold = self.threshold = rng.choice((0.0, 0.05, 0.3, 1e9)) if self.rule else 0.0
        self.predictor = None
        if self.rule and rng.random() < 0.5:
            width = case.size(40)
            fc1, fc2 = case.matrix(width, hidden, ("int8", 32)), case.matrix(self.neurons, width, ("int8", 32))
            bias = case.place(case.normal(self.neurons) + rng.choice((-100, 0, 100)))
            self.predictor = fc1, fc2, bias
            self.made.predictor = case.kernels.Predictor(fc1.native().handle, fc2.native().handle, bias.data_ptr())
        # Whether rounding may have a neuron fall to the other side of what decides.
        self.sharp = self.rule and (self.threshold not in (0.0, 1e9) or self.predictor is not None)

    def __call__(self, x: Tensor, rules: bool) -> tuple[Tensor, int]:
        """What it adds, and how many neurons were computed."""
        gate = ACTIVATIONS[self.activation]((self.gate or self.up)(x))
        hidden = gate if self.gate is None else gate * self.up(x)
        if not (self.rule and rules):
            return self.down.sum_of_rows(hidden), 0
        kept = gate.abs() >= self.threshold if self.threshold else gate != 0
        if self.predictor is not None:
            kept &= predicted_scores(self.case, *self.predictor, x) > 0
        return self.down.sum_of_rows(torch.where(kept, hidden, 0.0)), int(kept.sum())


def decode(case: Case) -> str:
    """Layers and a head, or parts of one layer."""
    rng, hidden, form = case.random, case.size(150), case.format()
    part = rng.choice(("layers", "layers", "layers and head", "layers and head", "attention", "mlp"))
    position = rng.choice((0, rng.randint(1, 70), rng.randint(1, 600), 63, 64, 255, 256))
    count = rng.randint(1, 3) if part.startswith("layers") else 1
    decoder = case.kernels.Decoder(case.level, hidden)
    layers: list[tuple[list[Tensor | None], Attention | None, Mlp | None]] = []
    for _ in range(count):
        made = case.kernels.Layer()
        norms = [case.place(1 + case.normal(hidden)) if rng.random() < 0.7 else None for _ in range(4)]
        made.set_norms(*(0 if norm is None else norm.data_ptr() for norm in norms), 0.01)
        attention = None if part == "mlp" else Attention(case, hidden, form, position)
        mlp = None if part == "attention" else Mlp(case, hidden, form)
        if attention is not None:
            made.attention = attention.made
        if mlp is not None:
            made.mlp = mlp.made
        if not part.startswith("layers"):
            norms = [None] * 4
            made.set_norms(0, 0, 0, 0, 0.01)
        decoder.add(made)
        layers.append((norms, attention, mlp))
    head = final = None
    if part == "layers and head":
        head, final = Linear(case, case.size(400), hidden, case.format()), case.place(1 + case.normal(hidden))
        cap = rng.choice((0.0, 5.0))
        decoder.set_head(case.kernels.Head(final.data_ptr(), 0.01, head.handle, cap, COMPUTES.index(case.compute)))

    x, rules, threads = case.place(case.normal(hidden)), rng.random() < 0.8, rng.choice((1, 2, 3, 4, 7))
    rotations = []
    for _ in range(2):
        angles = case.normal(max(attention.rotary // 2 if attention else 0 for _, attention, _ in layers))
        rotations.append((case.place(angles.cos()), case.place(angles.sin())))
    rotation_table = case.place(torch.tensor([[cos.data_ptr(), sin.data_ptr()] for cos, sin in rotations]))
    tables = case.place(torch.tensor([[a.table.data_ptr(), a.code] if a else [0, 0] for _, a, _ in layers]))
    computed = case.place(torch.zeros(count, 2, dtype=torch.int64)) if rng.random() < 0.7 else None
    out = case.buffer(hidden if head is None else head.matrix.rows)
    decoder.run(
        0,
        count,
        part.startswith("layers"),
        x.data_ptr(),
        out.data_ptr() if head is None else 0,
        0 if head is None else out.data_ptr(),
        position,
        rotation_table.data_ptr(),
        tables.data_ptr(),
        rules,
        0 if computed is None else computed.data_ptr(),
        threads,
    )

    text = f"{part} x {count}, hidden {hidden}, {form}, {case.compute}, position {position}, {threads} threads"
    states, sharp = x.double(), False
    for number, (norms, attention, mlp) in enumerate(layers):
        added = None
        if attention is not None:
            # Errors of what came before grow where a norm blows up small states.
            added = attention(rms(states, norms[0], 0.01), rotations) if not sharp else None
        if sharp:
            break
        if added is not None:
            states = states + rms(added, norms[1], 0.01) if part != "attention" else added
        if mlp is not None:
            added, kept = mlp(rms(states, norms[2], 0.01), rules)
            states = states + rms(added, norms[3], 0.01) if part != "mlp" else added
            sharp = sharp or (mlp.sharp and rules and case.compute != "fp32")
            if computed is not None:
                offered = mlp.neurons if mlp.rule and rules else 0
                # A sum that is zero may come out as less than nothing, and a small GELU as zero.
                off = abs(int(computed[number, 0]) - kept) if case.compute == "fp32" and mlp.activation >= 3 else 0
                if int(computed[number, 1]) != offered or not 0 <= int(computed[number, 0]) <= offered or off > 3:
                    raise AssertionError(f"counted {computed[number].tolist()}, not {[kept, offered]}; {text}")
    if not bool(out.isfinite().all()):
        raise AssertionError(f"not finite; {text}")
    if sharp:
        return text
    if head is not None:
        states = head(rms(states, final, 0.01))
        states = torch.tanh(states / cap) * cap if cap else states
    slack = {"fp32": 1e-3, "bf16": 0.3, "int8": 0.1}[case.compute]
    wide = any(attention is not None and attention.dtype != torch.float32 for _, attention, _ in layers)
    near(text, out, states, (slack + 0.05 * wide) * (1 + states.abs().max()))
    return text


CALLS = (products, decode, quantize, decode, dequantize, products, decode, active_neurons)


def load(kernels: Path | None) -> tuple[Any, ...]:
    """hf_sparse.quantization and what is tested of it, with the extension of that file if one is named."""
    name = "hf_sparse.quantization._kernels"
    if kernels is not None:
        spec = importlib.util.spec_from_file_location(name, kernels)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    from hf_sparse import quantization
    from hf_sparse.quantization import codebooks, native, reference

    made = native.kernels()
    if kernels is not None and made.__file__ != str(kernels):
        raise RuntimeError(f"{made.__file__} was loaded in the place of {kernels}")
    return quantization, native, reference, codebooks, made


def numbers(only: int | None, seconds: float) -> Iterator[int]:
    if only is not None:
        yield only
        return
    start, number = time.monotonic(), 0
    while time.monotonic() - start < seconds:
        yield number
        number += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int)
    parser.add_argument("--kernels", type=Path)
    parser.add_argument("--log", type=Path)
    arguments = parser.parse_args()
    if arguments.kernels is None:
        faulthandler.enable()  # a sanitizer reports by itself
    modules = load(arguments.kernels)
    log = None if arguments.log is None else os.open(arguments.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    done: Counter[str] = Counter()
    for number in numbers(arguments.case, arguments.seconds):
        case = Case(arguments.seed, number, modules)
        # The number of calls shares no factor with that of most instruction sets' turn, so that all pairs come up.
        call = CALLS[number // len(modules[-1].levels()) % len(CALLS)]
        where = f"--seed {arguments.seed} --case {number}: {call.__name__}, {case.isa}, guarded: {case.guarded}"
        if log is not None:
            os.pwrite(log, f"{where:200}\n".encode(), 0)
        try:
            text = call(case)
        except Exception:
            sys.stdout.write(f"FAILED {where}\n")
            raise
        if arguments.case is not None:
            sys.stdout.write(f"{where}: {text}\n")
        done[f"{call.__name__} {case.isa}"] += 1
    sys.stdout.write(f"{sum(done.values())} cases: {', '.join(f'{n} {name}' for name, n in sorted(done.items()))}\n")


if __name__ == "__main__":
    main()
