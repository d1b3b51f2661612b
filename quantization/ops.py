"""The two products that skip rows, and what finds the rows: one function each; few activations go to a native kernel,
many to a dense matrix product.

Both multiply by the weights that `NeuronMatrix.dequantize` gives and sum in float32; they agree with reference.py up to
the order of that sum and, where many bf16 activations go through torch's bf16 matrix product, up to its rounding of
weights and result. A result depends on the number of threads only in the order in which a sum over rows is formed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import native, reference, triton_ops
from .codebooks import COMPUTE_DTYPES
from .input_matrix import InputMatrix
from .neuron_matrix import NeuronMatrix, index_fault, row_chunks

# Up to this many activation rows the kernels, which read packed weights, are faster than unpacking for a matrix product
# (nf4, 2048 x 2048, one thread of a CPU with AMX, which makes torch's bf16 product a fast one).
_FEW = {"fp32": 32, "bf16": 16, "int8": 64}
# Up to this many where the instruction set has matrix products in bfloat16 (AMX) and no full precision is asked for.
_FEW_BESIDE_AMX = {"row_product": {"bf16": 1, "int8": 12}, "accumulate": {"bf16": 3, "int8": 3}}


def gathered_row_product(
    matrix: NeuronMatrix, x: Tensor, index: Tensor | None = None, *, compute_dtype: str = "fp32"
) -> Tensor:
    """y[i, j] = <x[i], W[index[j]]>: `x` [n, cols] floating -> float32 [n, len(index)].

    `index`: int32 or int64, strictly ascending rows of `matrix`; None for all rows. `compute_dtype`: "fp32" takes x as
    it is; "bf16" rounds it to bfloat16; "int8" rounds each group of `matrix.group_size` columns of a row to whole
    multiples of its absmax / 32512, held in two signed bytes, and multiplies integers (a row that holds NaN or infinity
    becomes NaN); with many rows, on a CPU with AMX, it is what "bf16" is. An unpacked matrix takes x as it is, or
    multiplies in its own dtype. The gradient is that of the product without rounding, computed with `compute_dtype` in
    turn. On a GPU "int8" takes a few rows of x as they are, and many rows are what "bf16" is.

    Raises ValueError for another shape, dtype, device or index.
    """
    index = _checked(matrix, x, "x", matrix.cols, index, compute_dtype)
    count = matrix.rows if index is None else index.shape[0]
    if _wants_gradient(x):
        return _Differentiable.apply(x, matrix, index, compute_dtype, (gathered_row_product, gathered_accumulate))
    if (on_gpu := _in_triton("row_product", matrix, x, index, compute_dtype)) is not None:
        return on_gpu
    if (natively := _natively("row_product", matrix, x, index, compute_dtype, _FEW[compute_dtype], count)) is not None:
        return natively
    if fault := index_fault(index, matrix.rows):
        raise ValueError(fault)
    if matrix.weight is not None:
        return torch.nn.functional.linear(x.to(matrix.weight.dtype), _rows(matrix.weight, index)).to(torch.float32)
    dtype = _product_dtype(compute_dtype)
    rounded = reference.round_activations(x, compute_dtype, matrix.group_size).to(dtype)
    out, start = torch.empty(x.shape[0], count, dtype=torch.float32, device=x.device), 0
    for rows in _dequantized_spans(matrix, index, dtype):
        out[:, start : start + len(rows)] = rounded @ rows.T
        start += len(rows)
    return out


def gathered_accumulate(
    matrix: NeuronMatrix, a: Tensor, index: Tensor | None = None, *, compute_dtype: str = "fp32"
) -> Tensor:
    """y[i] = sum_j a[i, j] * W[index[j]]: `a` [n, len(index)] floating -> float32 [n, cols].

    `index` and `compute_dtype` as for `gathered_row_product`, but that an activation is one scalar here: "int8" takes
    it as it is, or rounds activation x scale to 16 bits, relative to the largest of 64 rows.

    Raises ValueError for another shape, dtype, device or index.
    """
    index = _checked(matrix, a, "a", matrix.rows if index is None else index.numel(), index, compute_dtype)
    if _wants_gradient(a):
        return _Differentiable.apply(a, matrix, index, compute_dtype, (gathered_accumulate, gathered_row_product))
    rounding = "bf16" if compute_dtype == "bf16" else "fp32"
    factors = a.to(torch.bfloat16) if rounding == "bf16" else a
    few = _FEW[rounding]
    if (on_gpu := _in_triton("accumulate", matrix, a, index, compute_dtype)) is not None:
        return on_gpu
    if (natively := _natively("accumulate", matrix, factors, index, compute_dtype, few, matrix.cols)) is not None:
        return natively
    if fault := index_fault(index, matrix.rows):
        raise ValueError(fault)
    if matrix.weight is not None:
        return (a.to(matrix.weight.dtype) @ _rows(matrix.weight, index)).to(torch.float32)
    dtype = _product_dtype(rounding)
    out, start = torch.zeros(a.shape[0], matrix.cols, dtype=torch.float32, device=a.device), 0
    for rows in _dequantized_spans(matrix, index, dtype):
        out += a[:, start : start + len(rows)].to(dtype) @ rows
        start += len(rows)
    return out


def input_product(
    matrix: InputMatrix, x: Tensor, index: Tensor | None = None, *, compute_dtype: str = "fp32"
) -> Tensor:
    """y[i] = sum over the listed inputs j of x[i, j] * W[:, j]: `x` [n, cols] floating -> float32 [n, rows]. Inputs
    that are not listed are neither read nor multiplied.

    `index`: int32 or int64, strictly ascending columns of W; None for all. `compute_dtype` as for
    `gathered_row_product`, which gives the same for an x whose other entries are zero; where an instruction set sums
    floats only, "int8" takes x as it is.

    Raises ValueError for another shape, dtype, device or index.
    """
    index = _checked(matrix, x, "x", matrix.cols, index, compute_dtype)
    if fault := index_fault(index, matrix.cols):
        raise ValueError(fault.replace("rows", "inputs"))
    if index is not None:
        kept = torch.zeros_like(x)
        kept[:, index] = x[:, index]
        x = kept
    level, packed = native.level(), matrix.native()
    if level is None or packed is None or x.shape[0] > 1 or _wants_gradient(x):
        return gathered_row_product(matrix.by_neuron(), x, compute_dtype=compute_dtype)
    if index is None:
        index = torch.arange(matrix.cols, device="cpu")
    out = torch.empty(1, matrix.scales.shape[1], dtype=torch.float32, device="cpu")
    rounded = reference.round_activations(x, "bf16", 0) if compute_dtype == "bf16" else x.to(torch.float32)
    packed.input_product(level, rounded.contiguous(), index, compute_dtype, out)
    return out[:, : matrix.rows]


def active_neurons(
    fc1: NeuronMatrix, fc2: NeuronMatrix, bias: Tensor, x: Tensor, compute_dtype: str = "fp32"
) -> Tensor:
    """int64, ascending: the rows of `fc2` whose score fc2 @ relu(fc1 @ x) + bias is above zero. NaN counts as above it,
    so that it is not hidden.

    `fc1` [r, cols], `fc2` [neurons, r], `bias` floating [neurons], `x` floating [1, cols], one token. `compute_dtype`
    as for `gathered_row_product`, for both products.

    Raises ValueError for another shape, dtype or device.
    """
    if fc2.cols != fc1.rows:
        raise ValueError(f"fc2: expected [neurons, {fc1.rows}], the rows of fc1, got [{fc2.rows}, {fc2.cols}]")
    if bias.shape != (fc2.rows,) or not bias.is_floating_point():
        raise ValueError(f"bias: expected floating [{fc2.rows}], got {bias.dtype} {list(bias.shape)}")
    for name, device in (("fc2", fc2.device), ("bias", bias.device)):
        if device != fc1.device:
            raise ValueError(f"{name}: on {device}, but fc1 is on {fc1.device}")
    _checked(fc1, x, "x", fc1.cols, None, compute_dtype)
    if x.shape[0] != 1:
        raise ValueError(f"x: expected one token, floating [1, {fc1.cols}], got {list(x.shape)}")
    x = x.detach()  # a choice has no gradient
    level, packed1, packed2 = native.level(), fc1.native(), fc2.native()
    if level is not None and packed1 is not None and packed2 is not None:
        bias, x = bias.detach().to(torch.float32).contiguous(), x.to(torch.float32).contiguous()
        return native.active_neurons(level, packed1, packed2, bias, x, compute_dtype)
    hidden = gathered_row_product(fc1, x, compute_dtype=compute_dtype).relu_()
    scores = gathered_row_product(fc2, hidden, compute_dtype=compute_dtype) + bias
    return (~(scores <= 0))[0].nonzero().flatten()


def _checked(
    matrix: NeuronMatrix | InputMatrix, x: Tensor, name: str, width: int, index: Tensor | None, compute_dtype: str
) -> Tensor | None:
    """Raises ValueError for arguments that do not fit `matrix`, the numbers in `index` excepted. Returns the index as
    contiguous int64 on the matrix's device.
    """
    if compute_dtype not in COMPUTE_DTYPES:
        raise ValueError(f"compute_dtype {compute_dtype!r}: expected one of {', '.join(COMPUTE_DTYPES)}")
    if index is not None and (index.dtype not in (torch.int32, torch.int64) or index.dim() != 1):
        raise ValueError(f"index: expected int32 or int64 [n], got {index.dtype} {list(index.shape)}")
    if x.dim() != 2 or x.shape[1] != width or not x.is_floating_point():
        raise ValueError(f"{name}: expected floating [n, {width}], got {x.dtype} {list(x.shape)}")
    if x.device != matrix.device:
        raise ValueError(f"{name}: on {x.device}, but the matrix is on {matrix.device}")
    return None if index is None else index.to(matrix.device, torch.int64).contiguous()


class _Differentiable(torch.autograd.Function):
    """One of the two products: each is the gradient of the other, so that weights stay packed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrix: NeuronMatrix, index: Tensor | None, compute_dtype: str, ways: Any
    ) -> Tensor:
        ctx.rest, ctx.dtype = (matrix, index, compute_dtype, ways[::-1]), x.dtype
        return ways[0](matrix, x, index, compute_dtype=compute_dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        matrix, index, compute_dtype, ways = ctx.rest
        found = ways[0](matrix, gradients[0], index, compute_dtype=compute_dtype)
        return found.to(ctx.dtype), None, None, None, None


def _wants_gradient(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _natively(
    operator: str, matrix: NeuronMatrix, x: Tensor, index: Tensor | None, compute_dtype: str, few: int, width: int
) -> Tensor | None:
    """float32 [n, width] from the native kernel of that name; None where another road is taken: no kernel, a gradient
    wanted, more than `few` rows of activations. Raises ValueError for a bad index.
    """
    level, packed = native.level(), matrix.native()
    if level is None or packed is None:
        return None
    many = _prefers_amx(level, operator, matrix, x.shape[0], compute_dtype)
    if not many and x.shape[0] > few:
        return None
    out = torch.empty(x.shape[0], width, dtype=torch.float32, device="cpu")
    x = x.to(torch.float32).contiguous()
    if many:
        product = packed.many_row_product if operator == "row_product" else packed.many_accumulate
        fits = product(level, x, index, out)
    else:
        plain = packed.row_product if operator == "row_product" else packed.accumulate
        fits = plain(level, x, index, compute_dtype, out)
    if not fits:
        raise ValueError(index_fault(index, matrix.rows))
    return out


def _in_triton(
    operator: str, matrix: NeuronMatrix, x: Tensor, index: Tensor | None, compute_dtype: str
) -> Tensor | None:
    """float32 [n, width] from the Triton kernel of that name; None where another road is taken: no GPU, or a product
    that cuBLAS has. Raises ValueError for a bad index.
    """
    if not triton_ops.runs_on(matrix.device):
        return None
    few = x.shape[0] <= triton_ops.FEW
    if matrix.weight is not None and not (few and index is not None):
        return None
    if fault := index_fault(index, matrix.rows):
        raise ValueError(fault)
    if not few:
        many = triton_ops.many_row_product if operator == "row_product" else triton_ops.many_accumulate
        return many(matrix, x, index, compute_dtype == "fp32")
    plain = triton_ops.row_product if operator == "row_product" else triton_ops.accumulate
    rounds = compute_dtype == "bf16" and matrix.weight is None
    return plain(matrix, x.to(torch.bfloat16) if rounds else x, index)


def _prefers_amx(level: int, operator: str, matrix: NeuronMatrix, n: int, compute_dtype: str) -> bool:
    if compute_dtype == "fp32" or not native.has_many(level):
        return False
    return n > (1 if matrix.weight is not None else _FEW_BESIDE_AMX[operator][compute_dtype])


def _product_dtype(compute_dtype: str) -> torch.dtype:
    return torch.bfloat16 if compute_dtype == "bf16" else torch.float32


def _rows(weight: Tensor, index: Tensor | None) -> Tensor:
    return weight if index is None else weight[index]


def _dequantized_spans(matrix: NeuronMatrix, index: Tensor | None, dtype: torch.dtype) -> Iterator[Tensor]:
    """The chosen rows as numbers, a few at a time, so that the whole matrix never stands unpacked."""
    for start, stop in row_chunks(matrix.rows if index is None else len(index), matrix.cols):
        if index is None:
            yield matrix.narrow(start, stop - start).dequantize(dtype)
        else:
            yield matrix.dequantize(dtype, index[start:stop])
