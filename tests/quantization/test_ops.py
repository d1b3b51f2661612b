"""The two products against the plain reference in float64, for every instruction set this machine has.

Tolerances are the bound on the rounding of a float32 sum: terms in a chain * 2**-24 * sum of |terms|. Kernels sum in at
least 8 lanes; a wrong weight, row or scale is far outside.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_sparse.quantization import (
    COMPUTE_DTYPES,
    GROUP_SIZES,
    WEIGHT_DTYPES,
    NeuronMatrix,
    gathered_accumulate,
    gathered_row_product,
    instruction_set,
    instruction_sets,
    reference,
)

FORMATS = [(weight_dtype, group_size) for weight_dtype in WEIGHT_DTYPES for group_size in GROUP_SIZES]
FEW, MANY = 5, 70  # activation rows on either side of the change from kernel to matrix product
NATIVE = [name for name in instruction_sets() if name != "torch"]

each_instruction_set = pytest.mark.parametrize("isa", instruction_sets(), indirect=True)
each_kernel = pytest.mark.parametrize("isa", NATIVE, indirect=True)


def matrix_of(
    rows: int, cols: int, weight_dtype: str | None, group_size: int, generator: torch.Generator
) -> NeuronMatrix:
    weight = torch.randn(rows, cols, generator=generator) * torch.rand(rows, 1, generator=generator)
    return NeuronMatrix.quantize(weight, weight_dtype, group_size)


def indices(rows: int, generator: torch.Generator) -> list[Tensor | None]:
    """None, no row, one row, some, all."""
    some = torch.randperm(rows, generator=generator)[: (rows + 1) // 2].sort().values
    return [None, torch.arange(0), torch.tensor([rows - 1]), some.to(torch.int32), torch.arange(rows)]


def assert_product(
    actual: Tensor,
    left: Tensor,
    right: Tensor,
    chain: int,
    *,
    rounded: bool = False,
    summed: Tensor | None = None,
    also: float = 0,
) -> None:
    """`actual` is left @ right; `rounded` where weights and result pass through bfloat16. `summed`: magnitudes of what
    is summed where they are not those of `right`; `also`: an error beside that of the sum.
    """
    left, right = left.double(), right.double()
    unit = 2.0**-7 if rounded else (chain + 16) * 2.0**-24
    magnitudes = right.abs() if summed is None else summed.double()
    assert actual.dtype == torch.float32
    assert actual.shape == (left.shape[0], right.shape[1])
    error = (actual.double() - left @ right).abs()
    assert bool((error <= unit * (left.abs() @ magnitudes) + also + 1e-300).all()), f"largest error {error.max()}"


def rounding_of_factors(matrix: NeuronMatrix, a: Tensor) -> float:
    """What rounding activation x scale to 16 bits, relative to the largest, may cost in a sum over rows."""
    scales = matrix.tensors()["scales"].float().abs().max().item()
    return a.abs().max().item() * scales * a.shape[1] * 128 / 65024


def goes_through_bf16(compute_dtype: str, n: int) -> bool:
    """Whether weights and result may have been rounded to bfloat16, by torch or by AMX."""
    if instruction_set() == "amx" and compute_dtype != "fp32" and n > 1:
        return True
    return compute_dtype == "bf16" and (n == MANY or instruction_set() == "torch")


def check(matrix: NeuronMatrix, n: int, compute_dtype: str, generator: torch.Generator) -> None:
    """Both products, every kind of index."""
    weight = matrix.dequantize()
    magnitudes = weight.abs()
    if matrix.offsets is not None:  # is added up beside what is above it
        offsets = matrix.offsets.float().repeat_interleave(matrix.group_size, dim=1)[:, : matrix.cols]
        magnitudes = (weight - offsets).abs() + offsets.abs()
    # Integer products take weights plus 128 and subtract the same of the sum afterwards.
    scales = matrix.tensors()["scales"].float().abs()
    bias = 128 * scales.repeat_interleave(matrix.group_size, dim=1)[:, : matrix.cols]
    rounded = goes_through_bf16(compute_dtype, n)
    for index in indices(matrix.rows, generator):
        rows = weight if index is None else weight[index.long()]
        x = torch.randn(n, matrix.cols, generator=generator)
        seen = reference.round_activations(x, compute_dtype, matrix.group_size)
        y = gathered_row_product(matrix, x, index, compute_dtype=compute_dtype)
        summed = magnitudes + bias if compute_dtype == "int8" else magnitudes
        summed = summed if index is None else summed[index.long()]
        assert_product(y, seen, rows.T, matrix.cols // 8, rounded=rounded, summed=summed.T)
        a = torch.randn(n, len(rows), generator=generator)
        seen = a.bfloat16().float() if compute_dtype == "bf16" else a
        y = gathered_accumulate(matrix, a, index, compute_dtype=compute_dtype)
        also = rounding_of_factors(matrix, a) if compute_dtype == "int8" and n == 1 and len(rows) else 0
        assert_product(y, seen, rows, matrix.rows, rounded=rounded, summed=summed, also=also)


@each_instruction_set
@pytest.mark.parametrize(("weight_dtype", "group_size"), FORMATS)
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (4, 31), (9, 130), (7, 576)])
def test_products_equal_the_reference(
    isa: str, weight_dtype: str, group_size: int, compute_dtype: str, rows: int, cols: int, generator: torch.Generator
) -> None:
    for n in (1, FEW):
        check(matrix_of(rows, cols, weight_dtype, group_size, generator), n, compute_dtype, generator)


@each_instruction_set
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_products_of_many_activations_equal_the_reference(
    isa: str, weight_dtype: str, compute_dtype: str, generator: torch.Generator
) -> None:
    check(matrix_of(11, 200, weight_dtype, 64, generator), MANY, compute_dtype, generator)


@each_instruction_set
@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 400),
    n=st.integers(0, 9),
    form=st.sampled_from(FORMATS),
    compute_dtype=st.sampled_from(COMPUTE_DTYPES),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_products_equal_the_reference_at_any_shape(
    isa: str, rows: int, cols: int, n: int, form: tuple[str, int], compute_dtype: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    check(matrix_of(rows, cols, *form, generator), n, compute_dtype, generator)


@each_kernel
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_threads_change_no_bit_of_a_row_product_and_company_no_more_than_the_order_of_its_sum(
    isa: str, weight_dtype: str, compute_dtype: str, generator: torch.Generator, threads: Callable[[int], None]
) -> None:
    matrix = matrix_of(131, 1030, weight_dtype, 64, generator)  # enough work for several threads
    x = torch.randn(9, 1030, generator=generator)
    outputs = []
    for count in (1, 2, 3):
        threads(count)
        outputs.append(gathered_row_product(matrix, x, compute_dtype=compute_dtype))
        alone = [gathered_row_product(matrix, x[i : i + 1], compute_dtype=compute_dtype) for i in range(9)]
        tolerance = 2e-2 if goes_through_bf16(compute_dtype, 9) else 1e-5
        torch.testing.assert_close(outputs[-1], torch.cat(alone), rtol=tolerance, atol=100 * tolerance)
    assert torch.equal(outputs[1], outputs[0]) and torch.equal(outputs[2], outputs[0])


@each_kernel
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_a_sum_of_rows_repeats_for_a_number_of_threads(
    isa: str, weight_dtype: str, compute_dtype: str, generator: torch.Generator, threads: Callable[[int], None]
) -> None:
    matrix = matrix_of(301, 1030, weight_dtype, 64, generator)
    a = torch.randn(1, 301, generator=generator)
    for count in (1, 2, 3):
        threads(count)
        first = gathered_accumulate(matrix, a, compute_dtype=compute_dtype)
        for _ in range(5):
            assert torch.equal(gathered_accumulate(matrix, a, compute_dtype=compute_dtype), first)


@each_instruction_set
@pytest.mark.parametrize("n", [1, FEW, MANY])
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_a_number_shows_in_its_row_and_only_there(
    isa: str, n: int, compute_dtype: str, value: float, generator: torch.Generator
) -> None:
    matrix = matrix_of(6, 70, "nf4", 32, generator)
    x, a = torch.randn(n, 70, generator=generator), torch.randn(n, 6, generator=generator)
    x[n // 2, 69], a[n // 2, 3] = value, value
    for y in (
        gathered_row_product(matrix, x, compute_dtype=compute_dtype),
        gathered_accumulate(matrix, a, compute_dtype=compute_dtype),
    ):
        finite = y.isfinite().all(dim=1)
        assert not bool(y[n // 2].isfinite().any())
        assert int((~finite).sum()) == 1
    if compute_dtype == "int8" and not goes_through_bf16(compute_dtype, n):
        assert bool(gathered_row_product(matrix, x, compute_dtype="int8")[n // 2].isnan().all())


@each_instruction_set
@pytest.mark.parametrize("n", [1, FEW, MANY])
def test_int8_keeps_groups_apart_and_takes_tiny_and_huge_activations(
    isa: str, n: int, generator: torch.Generator
) -> None:
    if goes_through_bf16("int8", n):
        pytest.skip("bfloat16 has no groups")
    matrix = matrix_of(6, 4 * 32, "int8", 32, generator)
    x = torch.randn(n, 4, 32, generator=generator)
    x[:, 0] *= 1e30
    x[:, 1] *= 1e-42
    x[:, 2] = 0
    weight = matrix.dequantize().view(6, 4, 32)
    for group in range(4):
        alone = torch.zeros_like(x)
        alone[:, group] = x[:, group]
        y = gathered_row_product(matrix, alone.view(n, -1), compute_dtype="int8")
        seen = reference.fake_quantize(alone[:, group], 32)
        assert_product(y, seen, weight[:, group].T, 4)
        assert (y == 0).all() == (group in (1, 2))


@each_instruction_set
def test_subnormal_activations_are_not_flushed(isa: str) -> None:
    matrix = NeuronMatrix.quantize(torch.full((2, 32), 127.0), "int8", 32)
    assert gathered_row_product(matrix, torch.full((1, 32), 1e-41))[0, 0].item() == pytest.approx(
        127 * 32 * 1e-41, rel=1e-3
    )
    assert gathered_accumulate(matrix, torch.full((1, 2), 1e-41))[0, 0].item() == pytest.approx(
        127 * 2 * 1e-41, rel=1e-3
    )


@each_instruction_set
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_activations_of_any_floating_dtype_and_stride(isa: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    matrix = matrix_of(5, 67, "int4", 64, generator)
    x, a = torch.randn(67, 3, generator=generator).to(dtype).T, torch.randn(5, 3, generator=generator).to(dtype).T
    assert torch.equal(gathered_row_product(matrix, x), gathered_row_product(matrix, x.float().contiguous()))
    assert torch.equal(gathered_accumulate(matrix, a), gathered_accumulate(matrix, a.float().contiguous()))
    index = torch.tensor([0, 9, 1, 9, 4, 9])[::2]
    assert torch.equal(gathered_row_product(matrix, x, index), gathered_row_product(matrix, x)[:, [0, 1, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_an_unpacked_matrix_multiplies_in_its_own_dtype(
    dtype: torch.dtype, compute_dtype: str, generator: torch.Generator
) -> None:
    weight = torch.randn(8, 21, generator=generator).to(dtype)
    matrix = NeuronMatrix.quantize(weight, None)
    x, a = torch.randn(4, 21, generator=generator), torch.randn(4, 3, generator=generator)
    index = torch.tensor([1, 4, 7])
    rounded = dtype == torch.bfloat16
    y = gathered_row_product(matrix, x, index, compute_dtype=compute_dtype)
    assert_product(y, x.to(dtype), weight[index].T, 21, rounded=rounded)
    y = gathered_accumulate(matrix, a, index, compute_dtype=compute_dtype)
    assert_product(y, a.to(dtype), weight[index], 3, rounded=rounded)


@pytest.mark.parametrize("weight_dtype", ["nf4", "int8", None])
def test_gradients_reach_the_activations(weight_dtype: str | None, generator: torch.Generator) -> None:
    matrix = matrix_of(10, 45, weight_dtype, 32, generator)
    index = torch.tensor([0, 3, 9])
    rows = matrix.dequantize()[index]
    x = torch.randn(2, 45, generator=generator, requires_grad=True)
    upstream = torch.randn(2, 3, generator=generator)
    gathered_row_product(matrix, x, index).backward(upstream)
    torch.testing.assert_close(x.grad, upstream @ rows)
    a = torch.randn(2, 3, generator=generator, requires_grad=True)
    upstream = torch.randn(2, 45, generator=generator)
    gathered_accumulate(matrix, a, index).backward(upstream)
    torch.testing.assert_close(a.grad, upstream @ rows.T)
    with torch.no_grad():
        assert not gathered_row_product(matrix, x, index).requires_grad


@each_instruction_set
@pytest.mark.parametrize("weight_dtype", ["nf4", None])
@pytest.mark.parametrize("n", [FEW, MANY])
@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.tensor([2, 1]), "index: expected strictly ascending"),
        (torch.tensor([1, 1]), "index: expected strictly ascending"),
        (torch.tensor([-1, 1]), "index: expected rows of 0..6, got -1..1"),
        (torch.tensor([1, 7]), "index: expected rows of 0..6, got 1..7"),
        (torch.tensor([1, 2**40]), "index: expected rows of 0..6"),
        (torch.tensor([1.0, 2.0]), "index: expected int32 or int64"),
        (torch.tensor([True, False]), "index: expected int32 or int64"),
        (torch.tensor([[1, 2]]), "index: expected int32 or int64"),
    ],
)
def test_bad_indices_are_refused(
    isa: str, weight_dtype: str | None, n: int, index: Tensor, message: str, generator: torch.Generator
) -> None:
    matrix = matrix_of(7, 40, weight_dtype, 32, generator)
    with pytest.raises(ValueError, match=message):
        gathered_row_product(matrix, torch.zeros(n, 40), index)
    with pytest.raises(ValueError, match=message):
        gathered_accumulate(matrix, torch.zeros(n, 2), index)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: gathered_row_product(m, torch.zeros(2, 41)), "x: expected floating \\[n, 40\\]"),
        (lambda m: gathered_row_product(m, torch.zeros(40)), "x: expected floating"),
        (lambda m: gathered_row_product(m, torch.zeros(2, 40, dtype=torch.int32)), "x: expected floating"),
        (lambda m: gathered_row_product(m, torch.zeros(2, 40, device="meta")), "x: on meta, but the matrix is on cpu"),
        (lambda m: gathered_row_product(m, torch.zeros(2, 40), compute_dtype="fp16"), "compute_dtype 'fp16': expected"),
        (lambda m: gathered_accumulate(m, torch.zeros(2, 40)), "a: expected floating \\[n, 7\\]"),
        (lambda m: gathered_accumulate(m, torch.zeros(2, 7), torch.arange(6)), "a: expected floating \\[n, 6\\]"),
        (lambda m: gathered_accumulate(m, torch.zeros(2, 7), compute_dtype=""), "compute_dtype '': expected"),
    ],
)
def test_bad_arguments_are_named(
    call: Callable[[NeuronMatrix], object], message: str, generator: torch.Generator
) -> None:
    matrix = matrix_of(7, 40, "nf4", 32, generator)
    with pytest.raises(ValueError, match=message):
        call(matrix)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_a_matrix_on_a_gpu_gives_the_same_products(compute_dtype: str, generator: torch.Generator) -> None:
    matrix = matrix_of(12, 100, "nf4", 32, generator)
    x, a = torch.randn(3, 100, generator=generator), torch.randn(3, 12, generator=generator)
    there = matrix.to("cuda")
    torch.testing.assert_close(there.dequantize().cpu(), matrix.dequantize(), rtol=0, atol=0)
    y = gathered_row_product(there, x.cuda(), compute_dtype=compute_dtype).cpu()
    torch.testing.assert_close(y, gathered_row_product(matrix, x, compute_dtype=compute_dtype), rtol=2e-2, atol=2e-2)
    y = gathered_accumulate(there, a.cuda(), compute_dtype=compute_dtype).cpu()
    torch.testing.assert_close(y, gathered_accumulate(matrix, a, compute_dtype=compute_dtype), rtol=2e-2, atol=2e-2)
