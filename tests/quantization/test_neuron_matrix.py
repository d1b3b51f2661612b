"""NeuronMatrix: what goes in, how rows are taken apart and put together, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_sparse.quantization import GROUP_SIZES, WEIGHT_DTYPES, NeuronMatrix

FORMATS: list[tuple[str | None, int]] = [
    *((weight_dtype, group_size) for weight_dtype in WEIGHT_DTYPES for group_size in GROUP_SIZES),
    (None, 64),
]


def matrix_of(
    rows: int, cols: int, weight_dtype: str | None, group_size: int, generator: torch.Generator
) -> NeuronMatrix:
    return NeuronMatrix.quantize(torch.randn(rows, cols, generator=generator), weight_dtype, group_size)


def assert_same(actual: NeuronMatrix, expected: NeuronMatrix) -> None:
    described = ("weight_dtype", "group_size", "rows", "cols", "dtype")
    assert [getattr(actual, name) for name in described] == [getattr(expected, name) for name in described]
    assert actual.tensors().keys() == expected.tensors().keys()
    for name, tensor in expected.tensors().items():
        assert torch.equal(actual.tensors()[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [*WEIGHT_DTYPES, None])
def test_strides_do_not_matter(weight_dtype: str | None, dtype: torch.dtype, generator: torch.Generator) -> None:
    weight = torch.randn(75, 11, generator=generator).to(dtype)
    expected = NeuronMatrix.quantize(weight.T.contiguous(), weight_dtype, 32)
    assert_same(NeuronMatrix.quantize(weight.T, weight_dtype, 32), expected)
    wide = torch.zeros(22, 150, dtype=dtype)
    wide[::2, ::2] = weight.T
    assert_same(NeuronMatrix.quantize(wide[::2, ::2], weight_dtype, 32), expected)


def test_an_unpacked_matrix_keeps_the_weights_as_they_came(generator: torch.Generator) -> None:
    weight = torch.randn(9, 14, generator=generator).to(torch.bfloat16)
    matrix = NeuronMatrix.quantize(weight, None)
    assert matrix.dtype == torch.bfloat16
    assert torch.equal(matrix.tensors()["weight"], weight)
    assert torch.equal(matrix.dequantize(), weight.float())
    assert matrix.nbytes == 9 * NeuronMatrix.row_nbytes(14, None, 64, torch.bfloat16) == 9 * 28


def test_a_matrix_of_many_chunks_is_packed_like_its_parts(generator: torch.Generator) -> None:
    weight = torch.randn(700, 3001, generator=generator)  # two chunks of rows
    whole = NeuronMatrix.quantize(weight, "nf4", 128)
    for start in (0, 340, 699):
        assert_same(whole.narrow(start, 1), NeuronMatrix.quantize(weight[start : start + 1], "nf4", 128))


@pytest.mark.parametrize(("weight_dtype", "group_size"), FORMATS)
@pytest.mark.parametrize("cols", [1, 33, 128, 300])
def test_bytes_are_foretold(weight_dtype: str | None, group_size: int, cols: int, generator: torch.Generator) -> None:
    matrix = matrix_of(7, cols, weight_dtype, group_size, generator)
    assert matrix.nbytes == 7 * NeuronMatrix.row_nbytes(cols, weight_dtype, group_size, torch.float32)
    assert matrix.nbytes == sum(tensor.numel() * tensor.element_size() for tensor in matrix.tensors().values())


def test_bytes_of_a_row_by_hand() -> None:
    assert NeuronMatrix.row_nbytes(4096, "nf4", 64) == 2048 + 128
    assert NeuronMatrix.row_nbytes(100, "int8", 32) == 128 + 8
    assert NeuronMatrix.row_nbytes(100, None, 32) == 200


@pytest.mark.parametrize(("weight_dtype", "group_size"), FORMATS)
def test_rows_are_selected_and_put_together_again(
    weight_dtype: str | None, group_size: int, generator: torch.Generator
) -> None:
    matrix = matrix_of(23, 70, weight_dtype, group_size, generator)
    order = torch.randperm(23, generator=generator)
    pieces = [order[:5], order[5:5], order[5:].sort().values]
    parts = [(index, matrix.select(index)) for index in pieces]
    assert [part.rows for _, part in parts] == [5, 0, 18]
    assert torch.equal(parts[0][1].dequantize(), matrix.dequantize()[order[:5]])
    assert_same(NeuronMatrix.scatter(parts), matrix)


@pytest.mark.parametrize(("weight_dtype", "group_size"), FORMATS)
def test_narrow_is_a_view(weight_dtype: str | None, group_size: int, generator: torch.Generator) -> None:
    matrix = matrix_of(12, 37, weight_dtype, group_size, generator)
    part = matrix.narrow(3, 6)
    assert torch.equal(part.dequantize(), matrix.dequantize()[3:9])
    for name, tensor in part.tensors().items():
        assert tensor.untyped_storage().data_ptr() == matrix.tensors()[name].untyped_storage().data_ptr()
    assert matrix.narrow(12, 0).dequantize().shape == (0, 37)


@pytest.mark.parametrize(("weight_dtype", "group_size"), FORMATS)
def test_tensors_go_out_and_come_in(weight_dtype: str | None, group_size: int, generator: torch.Generator) -> None:
    matrix = matrix_of(8, 45, weight_dtype, group_size, generator)
    assert_same(NeuronMatrix.from_tensors(matrix.tensors(), weight_dtype, group_size, 8, 45), matrix)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": None}, "tensors: expected"),
        ({"weight": torch.zeros(8, 45)}, "tensors: expected"),
        ({"codes": torch.zeros(8, 48, dtype=torch.uint8)}, "codes: expected torch.uint8 \\[8, 32\\]"),
        ({"codes": torch.zeros(8, 32, dtype=torch.int8)}, "codes: expected torch.uint8"),
        ({"scales": torch.zeros(8, 1)}, "scales: expected torch.bfloat16"),
        ({"scales": torch.zeros(1, 8, dtype=torch.bfloat16)}, "scales: expected torch.bfloat16 \\[8, 1\\]"),
        ({"scales": torch.full((8, 1), torch.inf, dtype=torch.bfloat16)}, "scales: holds NaN or infinite"),
        ({"scales": torch.full((8, 1), torch.nan, dtype=torch.bfloat16)}, "scales: holds NaN or infinite"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    change: dict[str, Tensor | None], message: str, generator: torch.Generator
) -> None:
    tensors: dict[str, Tensor | None] = {**matrix_of(8, 45, "nf4", 64, generator).tensors(), **change}
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        NeuronMatrix.from_tensors(present, "nf4", 64, 8, 45)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.select(torch.tensor([0, 6])), "index: expected rows of 0..5"),
        (lambda m: m.select(torch.tensor([-1])), "index: expected rows of 0..5"),
        (lambda m: m.select(torch.tensor([1], dtype=torch.int32)), "index: expected int64"),
        (lambda m: m.select(torch.tensor([[1]])), "index: expected int64"),
        (lambda m: m.narrow(4, 3), "4 and 3 do not fit 6 rows"),
        (lambda m: m.narrow(-1, 3), "-1 and 3 do not fit"),
        (lambda m: m.dequantize(index=torch.tensor([2, 2])), "index: expected strictly ascending"),
        (lambda m: m.dequantize(index=torch.tensor([2, 6])), "index: expected rows of 0..5"),
        (lambda m: m.dequantize(torch.int8), "dtype: expected"),
        (lambda m: NeuronMatrix.scatter([]), "parts: expected at least one"),
        (lambda m: NeuronMatrix.scatter([(torch.arange(5), m)]), "parts\\[0\\]: expected an int64 index of its 6 rows"),
        (lambda m: NeuronMatrix.scatter([(torch.arange(1, 7), m)]), "parts: their indices must cover"),
        (lambda m: NeuronMatrix.scatter([(torch.tensor([0, 1, 2, 3, 4, 4]), m)]), "parts: their indices must cover"),
        (
            lambda m: NeuronMatrix.scatter(
                [(torch.arange(6), m), (torch.arange(6, 12), NeuronMatrix.quantize(m.dequantize(), "int8"))]
            ),
            "parts\\[1\\]: weight_dtype",
        ),
        (lambda m: NeuronMatrix.quantize(torch.zeros(3, 4), "nf5"), "weight_dtype 'nf5': expected one of nf4"),
        (lambda m: NeuronMatrix.quantize(torch.zeros(3, 4), "nf4", 48), "group_size 48: expected one of 32"),
        (lambda m: NeuronMatrix.quantize(torch.zeros(3, 4, dtype=torch.int32), "nf4"), "weight: expected float32"),
        (lambda m: NeuronMatrix.quantize(torch.zeros(3), "nf4"), "weight: expected float32"),
        (lambda m: NeuronMatrix.quantize(torch.zeros(3, 0), "nf4"), "weight: expected float32"),
        (lambda m: NeuronMatrix.quantize(torch.tensor([[torch.nan]]), None), "weight: NaN"),
        (lambda m: NeuronMatrix.from_tensors({}, None, 64, 3, 0), "cols >= 1"),
    ],
)
def test_bad_arguments_are_named(
    call: Callable[[NeuronMatrix], object], message: str, generator: torch.Generator
) -> None:
    matrix = matrix_of(6, 20, "nf4", 32, generator)
    with pytest.raises(ValueError, match=message):
        call(matrix)


def test_to_a_device_it_is_on_already_is_itself(generator: torch.Generator) -> None:
    matrix = matrix_of(3, 5, "fp4", 32, generator)
    assert matrix.to("cpu") is matrix
    assert matrix.to("meta").device.type == "meta"
