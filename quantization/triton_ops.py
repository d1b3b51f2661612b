"""The operators on a GPU, in Triton. Activations are floating: "bf16" rounds them, "int8" and "fp32" take them as they
are. Nothing here waits for the device, and no grid depends on data, so that a CUDA graph can replay all of it.

Rows that an index does not list, and rows of `up` and `down` whose neuron turned out inactive, are not read
(PowerInfer, SOSP'24, section 5.4: neuron-aware operators). Where a `count` on the device says how many entries of
`index` are valid, whoever made both answers for them; other arguments are checked by ops.py.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from .codebooks import codebook
from .neuron_matrix import NeuronMatrix

Operator = TypeVar("Operator", bound=Callable[..., Any])

ROWS, WIDTH = 4, 128  # of a tile for one activation row: rows, and bytes of 4-bit codes or columns
SUM_ROWS, MOST_SPLITS = 32, 64  # rows that are added at a time; shares of the rows that are added beside each other
PROGRAMS = 1024  # that are enough to fill a large GPU
TILE = 1024  # scores that are looked at together
DOT = {"TOKENS": 32, "ROWS": 64, "WIDTH": 64}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FEW = 4  # up to so many activation rows each reads the weights for itself


@functools.cache
def is_installed() -> bool:
    if importlib.util.find_spec("triton") is None:
        warnings.warn("triton is not installed: on a GPU slow PyTorch operators stand in for its kernels", stacklevel=4)
        return False
    return True


def runs_on(device: torch.device) -> bool:
    """Whether these operators serve tensors there. Where only Triton is missing, a warning says so once."""
    return device.type == "cuda" and is_installed()


@functools.cache
def _kernels() -> Any:
    from . import triton_kernels

    return triton_kernels


@functools.cache
def _prompt_kernels() -> Any:
    from . import triton_prompt_kernels

    return triton_prompt_kernels


@functools.cache
def _table(weight_dtype: str, device: torch.device) -> Tensor:
    table = codebook(weight_dtype).table
    return torch.zeros(1, device=device) if table is None else table.to(device, torch.float32)


def _stored(matrix: NeuronMatrix) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, dict[str, Any]]:
    """Codes, scales, offsets, table, strides, and what a kernel is compiled for."""
    if matrix.weight is not None:
        weight = matrix.weight
        form = {"GROUP": 32, "FORMAT": 2, "HAS_OFFSET": False}
        return weight, weight, weight, weight, weight.stride(0), 0, form
    codes, scales, book = matrix.packed()
    assert matrix.weight_dtype is not None
    offsets = scales if matrix.offsets is None else matrix.offsets
    form = {"GROUP": matrix.group_size, "FORMAT": 1 if book.table is None else 0, "HAS_OFFSET": book.offset}
    table = _table(matrix.weight_dtype, matrix.device)
    return codes, scales, offsets, table, codes.stride(0), scales.stride(0), form


def _selection(matrix: NeuronMatrix, index: Tensor | None, count: Tensor | None) -> tuple[Tensor, Tensor, int, dict]:
    nothing = matrix.codes if matrix.weight is None else matrix.weight
    assert nothing is not None
    maximum = matrix.rows if index is None else index.shape[0]
    form = {"HAS_INDEX": index is not None, "HAS_COUNT": count is not None}
    return nothing if index is None else index, nothing if count is None else count, maximum, form


def _there(operator: Operator) -> Operator:
    """`operator` with the device of its first argument as the current one: Triton launches on that."""

    @functools.wraps(operator)
    def run(first: NeuronMatrix | Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device(first.device) if first.device.type == "cuda" else nullcontext():
            return operator(first, *args, **kwargs)

    return run  # type: ignore[return-value]


def _up(number: int, step: int) -> int:
    return -(-number // step)


@_there
def row_product(matrix: NeuronMatrix, x: Tensor, index: Tensor | None = None, count: Tensor | None = None) -> Tensor:
    """y[i, j] = <x[i], W[index[j]]>: `x` [n, cols] -> float32 [n, listed], 0 from `count` (int32 [1]) on."""
    *stored, code_stride, scale_stride, form = _stored(matrix)
    listed, counted, maximum, chosen = _selection(matrix, index, count)
    x = x.contiguous()
    out = torch.empty(x.shape[0], maximum, dtype=torch.float32, device=x.device)
    if out.numel():
        grid = (_up(maximum, ROWS), x.shape[0])
        sizes = (maximum, matrix.cols, x.stride(0), code_stride, scale_stride)
        _kernels().row_product[grid](x, *stored, listed, counted, out, *sizes, **form, **chosen, ROWS=ROWS, WIDTH=WIDTH)
    return out


@_there
def accumulate(
    matrix: NeuronMatrix,
    a: Tensor,
    index: Tensor | None = None,
    count: Tensor | None = None,
    *,
    by_row: bool = False,
) -> Tensor:
    """y[i] = sum_j a[i, j] * W[index[j]] for j below `count`: `a` [n, listed] (`by_row`: [n, rows], a[i, index[j]]) ->
    float32 [n, cols]. Sums of shares of the rows, then their sum: the same bits each time. A row whose factor is 0 is
    not read.
    """
    *stored, code_stride, scale_stride, form = _stored(matrix)
    listed, counted, maximum, chosen = _selection(matrix, index, count)
    a = a.contiguous()
    n = a.shape[0]
    units = _up(matrix.cols, 32) * 16 if form["FORMAT"] == 0 else matrix.cols
    blocks = _up(units, WIDTH)
    wanted = min(MOST_SPLITS, _up(maximum, SUM_ROWS), _up(PROGRAMS, blocks * max(n, 1)))
    splits = 1 << (max(wanted, 1) - 1).bit_length()  # compiled for a few numbers only
    partial = torch.empty(n, splits, matrix.cols, dtype=torch.float32, device=a.device)
    if n:
        sizes = (maximum, matrix.cols, a.stride(0), code_stride, scale_stride)
        _kernels().accumulate[(blocks, splits, n)](
            a,
            *stored,
            listed,
            counted,
            partial,
            *sizes,
            **form,
            **chosen,
            BY_ROW=by_row,
            SPLITS=splits,
            ROWS=SUM_ROWS,
            WIDTH=WIDTH,
        )
    return partial.sum(1)


@_there
def gate_up(
    gate: NeuronMatrix,
    up: NeuronMatrix | None,
    x: Tensor,
    activation: int,
    *,
    x_gate: Tensor | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    index: Tensor | None = None,
    count: Tensor | None = None,
    skips: bool = False,
    gates_below: Tensor | None = None,
    hidden_below: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden float32 [listed]: act(<x_gate, gate[index[j]]> + bias) * (<x, up[index[j]]> + bias), without the second
    factor where `up` is None; and int8 [listed]: 2 for a neuron that stays, 1 for one that only its hidden state's
    threshold leaves out, 0 for the others, whose hidden state is 0.

    `x` [1, cols]; `x_gate` what the gate sees instead. `activation`: a number of modeling/native_mlp.py's. Thresholds
    and biases are float32 [rows]. `skips`: a neuron is left out, and its row of `up` not read, where its activated gate
    is below `gates_below`, or 0 without thresholds.
    """
    codes, scales, offsets, table, code_stride, scale_stride, form = _stored(gate)
    other = _stored(gate if up is None else up)
    listed, counted, maximum, chosen = _selection(gate, index, count)
    x = x.contiguous()
    hidden = torch.empty(maximum, dtype=torch.float32, device=x.device)
    kept = torch.empty(maximum, dtype=torch.int8, device=x.device)
    nothing = hidden
    if maximum:
        _kernels().gate_up[(_up(maximum, ROWS),)](
            x,
            x if x_gate is None else x_gate.contiguous(),
            codes,
            scales,
            offsets,
            nothing if gate_bias is None else gate_bias,
            *other[:3],
            nothing if up_bias is None else up_bias,
            table,
            listed,
            counted,
            nothing if gates_below is None else gates_below,
            nothing if hidden_below is None else hidden_below,
            hidden,
            kept,
            maximum,
            gate.cols,
            code_stride,
            scale_stride,
            **form,
            **chosen,
            HAS_GATE_BIAS=gate_bias is not None,
            HAS_UP=up is not None,
            HAS_UP_BIAS=up_bias is not None,
            SKIPS=skips,
            HAS_GATES_BELOW=gates_below is not None,
            HAS_HIDDEN_BELOW=hidden_below is not None,
            ACTIVATION=activation,
            ROWS=ROWS,
            WIDTH=WIDTH,
        )
    return hidden, kept


@_there
def compact(scores: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Where `scores` [length] (with `bias`) are above zero, or NaN: int32 [length], ascending, of which the first
    `count`, int32 [1], are valid.
    """
    length = scores.shape[0]
    index = torch.zeros(length, dtype=torch.int32, device=scores.device)
    count = torch.zeros(1, dtype=torch.int32, device=scores.device)
    tiles = _up(length, TILE)
    if tiles:
        counts = torch.empty(tiles, dtype=torch.int32, device=scores.device)
        given, form = scores if bias is None else bias, {"HAS_BIAS": bias is not None, "TILE": TILE}
        _kernels().count_set[(tiles,)](scores, given, counts, length, **form)
        rounded = 1 << (tiles - 1).bit_length()
        _kernels().place_set[(tiles,)](scores, given, counts, index, count, length, tiles, **form, TILES=rounded)
    return index, count


def predict(
    fc1: NeuronMatrix, fc2: NeuronMatrix, bias: Tensor, x: Tensor, rounds: bool = False
) -> tuple[Tensor, Tensor]:
    """The rows of `fc2` whose score fc2 @ relu(fc1 @ x) + bias is above zero (or NaN), as `compact` gives them. `x`
    [1, cols], `bias` float32 [rows of fc2]. `rounds`: activations to bfloat16.
    """
    hidden = row_product(fc1, x.to(torch.bfloat16) if rounds else x).relu_()
    return compact(row_product(fc2, hidden.to(torch.bfloat16) if rounds else hidden)[0], bias)


@_there
def many_row_product(matrix: NeuronMatrix, x: Tensor, index: Tensor | None, full: bool) -> Tensor:
    """As `row_product`, for many rows of `x`: a matrix product with weights that are unpacked tile by tile, in float32
    (`full`) or bfloat16.
    """
    *stored, code_stride, scale_stride, form = _stored(matrix)
    listed, _, maximum, chosen = _selection(matrix, index, None)
    x = x.contiguous()
    n = x.shape[0]
    out = torch.empty(n, maximum, dtype=torch.float32, device=x.device)
    if out.numel():
        sizes = (n, maximum, matrix.cols, x.stride(0), code_stride, scale_stride)
        grid = (_up(maximum, DOT["ROWS"]), _up(n, DOT["TOKENS"]))
        how = {"HAS_INDEX": chosen["HAS_INDEX"], "FULL": full, "INTERPRETED": INTERPRETED, **DOT}
        _prompt_kernels().many_row_product[grid](x, *stored, listed, out, *sizes, **form, **how)
    return out


@_there
def many_accumulate(matrix: NeuronMatrix, a: Tensor, index: Tensor | None, full: bool) -> Tensor:
    """As `accumulate`, for many rows of `a`."""
    *stored, code_stride, scale_stride, form = _stored(matrix)
    listed, _, maximum, chosen = _selection(matrix, index, None)
    a = a.contiguous()
    n = a.shape[0]
    out = torch.empty(n, matrix.cols, dtype=torch.float32, device=a.device)
    if out.numel():
        sizes = (n, maximum, matrix.cols, a.stride(0), code_stride, scale_stride)
        grid = (_up(matrix.cols, DOT["WIDTH"]), _up(n, DOT["TOKENS"]))
        how = {"HAS_INDEX": chosen["HAS_INDEX"], "FULL": full, "INTERPRETED": INTERPRETED, **DOT}
        _prompt_kernels().many_accumulate[grid](a, *stored, listed, out, *sizes, **form, **how)
    return out
