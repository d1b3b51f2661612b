"""Formats: tables, the choice of scale and code, the layout of bytes; native against reference, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_sparse.quantization import GROUP_SIZES, WEIGHT_DTYPES, NeuronMatrix, instruction_sets, reference
from hf_sparse.quantization.codebooks import codebook

# QLoRA, appendix E.
NF4_QUANTILES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FORMATS = [(weight_dtype, group_size) for weight_dtype in WEIGHT_DTYPES for group_size in GROUP_SIZES]


def table_of(weight_dtype: str) -> Tensor:
    table = codebook(weight_dtype).table
    return torch.arange(-127.0, 128.0) if table is None else table.to(torch.float32)


def test_nf4_is_the_published_table_in_127ths() -> None:
    assert table_of("nf4").tolist() == [round(127 * value) for value in NF4_QUANTILES]


def test_fp4_keeps_the_ratios_of_its_floating_point_format() -> None:
    halves = [value / 20 for value in table_of("fp4").tolist() if value > 1]
    assert halves == [1, 1.5, 2, 3, 4, 6]
    assert table_of("fp4").tolist() == (-table_of("fp4").flip(0)).tolist()


@pytest.mark.parametrize(("weight_dtype", "group_size"), FORMATS)
def test_each_weight_gets_the_nearest_value(weight_dtype: str, group_size: int, generator: torch.Generator) -> None:
    weight = torch.randn(5, 3 * group_size - 7, generator=generator)
    matrix = NeuronMatrix.quantize(weight, weight_dtype, group_size)
    scales = matrix.tensors()["scales"].float().repeat_interleave(group_size, dim=1)[:, : weight.shape[1]]
    candidates = scales.double().unsqueeze(2) * table_of(weight_dtype).double()
    if (offsets := matrix.tensors().get("offsets")) is not None:
        repeated = offsets.double().repeat_interleave(group_size, dim=1)[:, : weight.shape[1]]
        candidates = candidates + repeated.unsqueeze(2)
    best = (candidates - weight.double().unsqueeze(2)).abs().amin(dim=2)
    error = (matrix.dequantize().double() - weight.double()).abs()
    # The code is chosen in float32, so that a near tie may go the other way.
    torch.testing.assert_close(error, best, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("weight_dtype", "group_size"), FORMATS)
def test_what_was_packed_once_is_packed_again_to_the_same_bytes(
    weight_dtype: str, group_size: int, generator: torch.Generator
) -> None:
    first = NeuronMatrix.quantize(torch.randn(6, 2 * group_size, generator=generator), weight_dtype, group_size)
    second = NeuronMatrix.quantize(first.dequantize(), weight_dtype, group_size)
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, second.tensors()[name]), name


def test_int4_uses_its_lowest_value_for_the_peak(generator: torch.Generator) -> None:
    weight = torch.rand(4, 32, generator=generator)
    weight[:, 9] = torch.tensor([2.0, -2.0, 8.0, -8.0])
    matrix = NeuronMatrix.quantize(weight, "int4", 32)
    assert matrix.tensors()["scales"].flatten().tolist() == [-0.25, 0.25, -1.0, 1.0]
    assert (matrix.tensors()["codes"][:, 9] & 15).tolist() == [0, 0, 0, 0]


def test_a_byte_holds_a_column_and_the_one_16_further() -> None:
    row = torch.arange(96) % 15 - 8  # every int4 value but 7, the peak in every group
    matrix = NeuronMatrix.quantize(row.float().repeat(2, 1)[:, :90], "int4", 32)
    codes = matrix.tensors()["codes"]
    assert codes.shape == (2, 48)
    assert codes.dtype == torch.uint8
    signs = matrix.tensors()["scales"][0].sign().to(torch.int64).repeat_interleave(32)
    expected = torch.where(torch.arange(96) < 90, row * signs, 0) + 8
    for byte in range(48):
        low = byte // 16 * 32 + byte % 16
        assert int(codes[0, byte]) == int(expected[low]) | int(expected[low + 16]) << 4


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize(("weight_dtype", "group_size"), FORMATS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 31), (5, 33), (2, 129), (7, 288), (13, 1100)])
def test_native_packs_and_unpacks_as_the_reference_does(
    isa: str,
    weight_dtype: str,
    group_size: int,
    rows: int,
    cols: int,
    generator: torch.Generator,
    use_instruction_set: Callable[[str], None],
) -> None:
    use_instruction_set(isa)
    weight = torch.randn(rows, cols, generator=generator) * torch.logspace(-44, 37, rows * cols).view(cols, rows).T
    weight[0, cols // 2 :] = 0
    matrix = NeuronMatrix.quantize(weight, weight_dtype, group_size)
    book = codebook(weight_dtype)
    codes, scales, offsets = reference.quantize(weight, book, group_size)
    assert torch.equal(matrix.tensors()["codes"], codes)
    assert torch.equal(matrix.tensors()["scales"], scales)
    expected = reference.dequantize(codes, scales, offsets, cols, book, group_size)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(matrix.dequantize(dtype), expected.to(dtype))
    some = torch.arange(0, rows, 2)
    assert torch.equal(matrix.dequantize(index=some), expected[some])


@pytest.mark.parametrize("isa", instruction_sets())
@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_native_packs_any_numbers_as_the_reference_does(
    isa: str, use_instruction_set: Callable[[str], None], data: st.DataObject
) -> None:
    use_instruction_set(isa)
    weight_dtype, group_size = data.draw(st.sampled_from(FORMATS))
    rows, cols = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 70))
    limit = codebook(weight_dtype).weight_limit
    numbers = st.floats(-limit, limit, width=32)
    weight = torch.tensor(data.draw(st.lists(numbers, min_size=rows * cols, max_size=rows * cols))).view(rows, cols)
    matrix = NeuronMatrix.quantize(weight, weight_dtype, group_size)
    codes, scales, _ = reference.quantize(weight, codebook(weight_dtype), group_size)
    assert torch.equal(matrix.tensors()["codes"], codes)
    assert torch.equal(matrix.tensors()["scales"], scales)
    assert bool(matrix.dequantize().isfinite().all())


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-38, -9e-38])
def test_groups_of_zeros_and_of_next_to_nothing_are_zeros(
    isa: str, weight_dtype: str, value: float, use_instruction_set: Callable[[str], None]
) -> None:
    use_instruction_set(isa)
    weight = torch.full((2, 96), value)
    weight[:, 32:64] = 1.0
    matrix = NeuronMatrix.quantize(weight, weight_dtype, 32)
    assert matrix.tensors()["scales"][:, [0, 2]].abs().max() == 0
    dequantized = matrix.dequantize()
    if weight_dtype == "int4_asym":  # whose offset is the number itself
        torch.testing.assert_close(dequantized[:, :32], weight[:, :32].bfloat16().float(), rtol=0, atol=0)
    else:
        assert dequantized[:, :32].abs().max() == 0
    torch.testing.assert_close(dequantized[:, 32:64], weight[:, 32:64], rtol=2**-8, atol=0)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_weights_that_no_scale_can_hold_are_refused(
    isa: str, weight_dtype: str, value: float, use_instruction_set: Callable[[str], None]
) -> None:
    use_instruction_set(isa)
    weight = torch.ones(3, 65)
    weight[2, 64] = value
    with pytest.raises(ValueError, match="weight: NaN, infinite"):
        NeuronMatrix.quantize(weight, weight_dtype, 64)
