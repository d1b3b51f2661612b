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
import faulthandler
import importlib.util
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuzz_case import TOLERANCE, Case, near, predicted_scores
from fuzz_decode import decode

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


def by_input(case: Case) -> str:
    large = case.random.random() < 0.1  # enough for several threads
    rows, cols, (kind, group_size) = case.size(1300 if large else 300), case.size(700 if large else 200), case.format()
    matrix = case.matrix(rows, cols, (kind or "nf4", group_size))
    four_bit, turned = matrix.codes.dtype == torch.uint8, case.turned(matrix)
    text = f"{case.compute} {matrix}"
    for codes, of, columns in ((turned.codes, matrix.codes, len(turned.codes)), (matrix.codes, turned.codes, rows)):
        out = case.buffer(*codes.shape, dtype=codes.dtype)
        case.native.turn(case.level, of, four_bit, columns, out)
        if not torch.equal(out, codes):
            raise AssertionError(f"turn: other bits there or back; {text}")
    x, index = case.place(case.normal(1, cols)), case.index(cols)
    if index is None:
        index = case.place(torch.arange(cols))
    y = case.buffer(1, turned.scales.shape[1])
    if not turned.native().input_product(case.level, x, index, case.compute, y):
        raise AssertionError(f"input product: a good index is refused; {text}")
    left, weight = x[:, index].double(), matrix._dequantize_in_torch(torch.float32, None).double()[:, index]
    magnitude = weight.abs() + matrix.scales.float().abs().max().item() * 256
    bound = 2.0**-20 * (left.abs() @ magnitude.T) + 1e-30
    if case.compute == "int8" and len(index):  # factors of 16 bits
        bound = bound + left.abs().max() / 65024 * magnitude.sum(1)
    near(f"input product, {text}, {len(index)} inputs", y[:, :rows], left @ weight.T, bound)
    before, bad = y.clone(), case.place(torch.tensor(case.random.choice(([cols], [-1], [0, 0], [2**40]))))
    if turned.native().input_product(case.level, x, bad, case.compute, y):
        raise AssertionError(f"input product: index {bad.tolist()} is taken; {text}")
    if not torch.equal(before, y):
        raise AssertionError("input product: an index that is refused changes what was there")
    return f"{text} index {len(index)}"


def active_neurons(case: Case) -> str:
    hidden, width, neurons = case.size(400), case.size(60), case.size(500)
    form = ("int8", 32) if case.random.random() < 0.7 else case.format()
    fc1, fc2 = case.matrix(width, hidden, form), case.matrix(neurons, width, form)
    bias, x = case.place(case.normal(neurons) * 3), case.place(case.normal(1, hidden))
    got = case.native.active_neurons(case.level, fc1.native(), fc2.native(), bias, x, case.compute)
    scores = predicted_scores(case, fc1, fc2, bias, x.flatten())
    check_active(case, got, scores)
    return f"{hidden} {fc1} {fc2} {case.compute}"


def check_active(case: Case, got: Tensor, scores: Tensor) -> None:
    margin = TOLERANCE[case.compute] * scores.abs().max()
    mask = torch.zeros(len(scores), dtype=torch.bool)
    mask[got] = True
    if not bool((got[1:] > got[:-1]).all()) or bool((mask & (scores < -margin)).any()):
        raise AssertionError("active_neurons: not ascending, or one that is not active")
    if bool((~mask & (scores > margin)).any()):
        raise AssertionError("active_neurons: one is missing")


CALLS = (products, decode, quantize, by_input, decode, dequantize, products, decode, active_neurons)


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
