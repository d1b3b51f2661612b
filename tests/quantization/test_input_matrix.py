"""InputMatrix: its product against plain PyTorch on dequantized weights, for every instruction set this machine has;
its form, there and back; what is refused; gradients of it and of the products by row.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_sparse.quantization import (
    COMPUTE_DTYPES,
    GROUP_SIZES,
    WEIGHT_DTYPES,
    InputMatrix,
    NeuronMatrix,
    gathered_accumulate,
    gathered_row_product,
    input_product,
    instruction_sets,
)

FORMATS = [(weight_dtype, group_size) for weight_dtype in WEIGHT_DTYPES for group_size in GROUP_SIZES]
SIZES = [(1, 1), (4, 31), (1, 200), (9, 130), (130, 45), (257, 300), (128, 64)]

each_instruction_set = pytest.mark.parametrize("isa", instruction_sets(), indirect=True)


def matrix_of(rows: int, cols: int, weight_dtype: str, group_size: int, generator: torch.Generator) -> NeuronMatrix:
    weight = torch.randn(rows, cols, generator=generator) * torch.rand(rows, 1, generator=generator)
    return NeuronMatrix.quantize(weight, weight_dtype, group_size)


def indices(cols: int, generator: torch.Generator) -> list[Tensor | None]:
    """None, no input, the last one, some, all."""
    some = torch.randperm(cols, generator=generator)[: (cols + 1) // 2].sort().values
    return [None, torch.arange(0), torch.tensor([cols - 1]), some.to(torch.int32), torch.arange(cols)]


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name


@each_instruction_set
@pytest.mark.parametrize(("weight_dtype", "group_size"), FORMATS)
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_products_equal_dequantized_weights(
    isa: str, weight_dtype: str, group_size: int, compute_dtype: str, generator: torch.Generator
) -> None:
    for rows, cols in SIZES:
        matrix = matrix_of(rows, cols, weight_dtype, group_size, generator)
        turned, weight = InputMatrix.by_input(matrix), matrix.dequantize().double()
        # Integer products take weights plus 128 and subtract the same of the sum; offsets go beside what is above them.
        scales = matrix.tensors()["scales"].float().abs().double()
        summed = weight.abs() + 256 * scales.repeat_interleave(group_size, dim=1)[:, :cols]
        if matrix.offsets is not None:
            summed += 2 * matrix.offsets.float().abs().double().repeat_interleave(group_size, dim=1)[:, :cols]
        for n in (1, 3):
            # Of several rows, and where there are no kernels, torch and AMX may round weights and result.
            rounded = compute_dtype != "fp32" and (n > 1 or isa == "torch")
            for index in indices(cols, generator):
                x = torch.randn(n, cols, generator=generator)
                y = input_product(turned, x, index, compute_dtype=compute_dtype)
                assert y.dtype == torch.float32 and y.shape == (n, rows)
                left = (x.bfloat16() if compute_dtype == "bf16" else x).double()
                if index is not None:
                    left = torch.zeros_like(left).index_copy(1, index.long(), left[:, index.long()])
                bound = (2.0**-7 if rounded else (cols + 16) * 2.0**-24) * (left.abs() @ summed.T)
                if compute_dtype == "int8":  # factors of 16 bits, relative to the largest of a group
                    bound += left.abs().amax(1, keepdim=True) / 65000 * summed.sum(1)
                error = (y.double() - left @ weight.T).abs()
                assert bool((error <= bound + 1e-300).all()), f"{rows} x {cols}, {n}: {(error - bound).max()}"
                if index is not None and not len(index):
                    assert not y.any()


@each_instruction_set
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_it_gives_what_the_rows_give(
    isa: str, weight_dtype: str, compute_dtype: str, generator: torch.Generator
) -> None:
    """The product by rows of an x whose other entries are zero."""
    matrix = matrix_of(75, 200, weight_dtype, 32, generator)
    turned = InputMatrix.by_input(matrix)
    for n in (1, 4):
        for index in indices(200, generator)[1:]:
            x = torch.randn(n, 200, generator=generator)
            masked = torch.zeros_like(x).index_copy(1, index.long(), x[:, index.long()])
            expected = gathered_row_product(matrix, masked, compute_dtype=compute_dtype)
            y = input_product(turned, x, index, compute_dtype=compute_dtype)
            torch.testing.assert_close(y, expected, rtol=0, atol=1e-3 * (1 + expected.abs().max()).item())


@each_instruction_set
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_activations_of_any_dtype_and_strides(isa: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    matrix = InputMatrix.by_input(matrix_of(40, 70, "nf4", 32, generator))
    x = torch.randn(70, 2, generator=generator).to(dtype)
    index = torch.arange(70)[::2]
    for rows in (x.T[:1], x.T):
        expected = input_product(matrix, rows.float().contiguous(), index.contiguous())
        torch.testing.assert_close(input_product(matrix, rows, index), expected, rtol=1e-5, atol=1e-5)


@each_instruction_set
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_entries_that_are_not_listed_are_not_seen(isa: str, compute_dtype: str, generator: torch.Generator) -> None:
    matrix = InputMatrix.by_input(matrix_of(40, 90, "int4_asym", 32, generator))
    index = torch.arange(3, 90, 3)
    for n in (1, 2):
        x = torch.randn(n, 90, generator=generator)
        expected = input_product(matrix, x, index, compute_dtype=compute_dtype)
        assert expected.isfinite().all()
        for value in (torch.nan, torch.inf, 1e30):
            dirty = torch.full_like(x, value).index_copy(1, index, x[:, index])
            assert torch.equal(input_product(matrix, dirty, index, compute_dtype=compute_dtype), expected)


@each_instruction_set
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_show(isa: str, compute_dtype: str, value: float, generator: torch.Generator) -> None:
    for weight_dtype in WEIGHT_DTYPES:
        matrix = InputMatrix.by_input(matrix_of(150, 90, weight_dtype, 64, generator))
        for n in (1, 3):
            x = torch.randn(n, 90, generator=generator)
            x[n - 1, 66] = value
            for index in (None, torch.arange(60, 70)):
                y = input_product(matrix, x, index, compute_dtype=compute_dtype)
                assert not y[n - 1].isfinite().any() and y[: n - 1].isfinite().all()
                assert compute_dtype != "int8" or y[n - 1].isnan().all()


@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_threads_share_a_product(
    compute_dtype: str, threads: Callable[[int], None], generator: torch.Generator
) -> None:
    matrix = InputMatrix.by_input(matrix_of(1300, 700, "nf4", 64, generator))
    x, index = torch.randn(1, 700, generator=generator), torch.arange(1, 700, 2)
    found = []
    for count in (1, 2, 3, 5):
        threads(count)
        found.append(input_product(matrix, x, index, compute_dtype=compute_dtype))
    assert all(torch.equal(other, found[0]) for other in found[1:])


# Its form


@each_instruction_set
@pytest.mark.parametrize(("weight_dtype", "group_size"), FORMATS)
def test_there_and_back_bit_for_bit(
    isa: str, weight_dtype: str, group_size: int, generator: torch.Generator, use_instruction_set: Callable[[str], None]
) -> None:
    for rows, cols in (*SIZES, (0, 5)):
        matrix = matrix_of(rows, cols, weight_dtype, group_size, generator)
        turned = InputMatrix.by_input(matrix)
        described = ("weight_dtype", "group_size", "rows", "cols")
        assert [getattr(turned, name) for name in described] == [getattr(matrix, name) for name in described]
        back = turned.by_neuron()
        assert_same_bits(back.tensors(), matrix.tensors())
        assert [getattr(back, name) for name in described] == [getattr(matrix, name) for name in described]
        assert torch.equal(turned.dequantize(), matrix.dequantize())
        assert turned.dequantize(torch.bfloat16).dtype == torch.bfloat16
        assert turned.nbytes == sum(t.numel() * t.element_size() for t in turned.tensors().values())
        use_instruction_set("torch")
        assert_same_bits(InputMatrix.by_input(matrix).tensors(), turned.tensors())
        assert_same_bits(turned.by_neuron().tensors(), matrix.tensors())
        use_instruction_set(isa)


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
def test_weights_lie_by_input(weight_dtype: str, generator: torch.Generator) -> None:
    """Input j's are row j of the codes, side by side as the weights in a row of a NeuronMatrix."""
    matrix = matrix_of(45, 70, weight_dtype, 32, generator)
    turned = InputMatrix.by_input(matrix)
    tensors = turned.tensors()
    assert ("offsets" in tensors) == (weight_dtype == "int4_asym")
    assert all(tensors[name].shape == (3, 128) for name in tensors if name != "codes")
    assert not any(tensors[name][:, 45:].any() for name in tensors if name != "codes")  # padding adds nothing

    def unpacked(codes: Tensor, columns: int) -> Tensor:
        if codes.dtype == torch.int8:
            return codes[:, :columns]
        blocks = codes.view(len(codes), -1, 16)  # low nibbles: 16 columns, high ones: the next 16
        return torch.stack((blocks & 15, blocks >> 4), dim=2).view(len(codes), -1)[:, :columns]

    assert torch.equal(unpacked(turned.codes, 45)[:70], unpacked(matrix.codes, 70).T)
    assert torch.equal(turned.scales[:, :45], matrix.scales.T)


def test_views_of_a_matrix_are_turned(generator: torch.Generator) -> None:
    whole = matrix_of(90, 70, "nf4", 32, generator)
    part = whole.narrow(17, 41)
    assert torch.equal(InputMatrix.by_input(part).dequantize(), whole.dequantize()[17:58])
    assert_same_bits(InputMatrix.by_input(part).by_neuron().tensors(), part.tensors())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda matrix: pickle.loads(pickle.dumps(matrix))])
@pytest.mark.parametrize("weight_dtype", ["int4_asym", "int8"])
def test_copies_and_pickles(
    copied: Callable[[InputMatrix], InputMatrix], weight_dtype: str, generator: torch.Generator
) -> None:
    matrix = InputMatrix.by_input(matrix_of(45, 70, weight_dtype, 32, generator))
    x = torch.randn(1, 70, generator=generator)
    expected, held = input_product(matrix, x), {name: t.clone() for name, t in matrix.tensors().items()}
    other = copied(matrix)
    assert_same_bits(other.tensors(), held)
    if copied is not copy.copy:
        for tensor in matrix.tensors().values():
            tensor.zero_()
    del matrix
    assert_same_bits(other.tensors(), held)
    assert torch.equal(input_product(other, x), expected)


def test_unpacked_weights_have_no_such_form(generator: torch.Generator) -> None:
    with pytest.raises(ValueError, match="not packed"):
        InputMatrix.by_input(NeuronMatrix.quantize(torch.randn(3, 4, generator=generator), None))


@each_instruction_set
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.zeros(70)}, r"x: expected floating \[n, 70\], got torch.float32 \[70\]"),
        ({"x": torch.zeros(1, 69)}, r"x: expected floating \[n, 70\], got torch.float32 \[1, 69\]"),
        ({"x": torch.zeros(1, 70, dtype=torch.int64)}, r"x: expected floating \[n, 70\], got torch.int64"),
        ({"x": torch.zeros(1, 70, device="meta")}, "x: on meta, but the matrix is on cpu"),
        ({"index": torch.zeros(3)}, r"index: expected int32 or int64 \[n\], got torch.float32 \[3\]"),
        ({"index": torch.zeros(1, 3, dtype=torch.int64)}, r"index: expected int32 or int64 \[n\]"),
        ({"index": torch.tensor([0, 70])}, r"index: expected inputs of 0\.\.69, got 0\.\.70"),
        ({"index": torch.tensor([-1, 4])}, r"index: expected inputs of 0\.\.69, got -1\.\.4"),
        ({"index": torch.tensor([4, 4])}, "index: expected strictly ascending inputs"),
        ({"index": torch.tensor([4, 3])}, "index: expected strictly ascending inputs"),
        ({"compute_dtype": "int4"}, "compute_dtype 'int4': expected one of "),
    ],
)
def test_bad_arguments_are_named(isa: str, arguments: dict, message: str, generator: torch.Generator) -> None:
    matrix = InputMatrix.by_input(matrix_of(45, 70, "nf4", 32, generator))
    for rows in (1, 2):
        given = {"x": torch.zeros(rows, 70)} | arguments
        with pytest.raises(ValueError, match=message):
            input_product(matrix, given.pop("x"), **given)


# Gradients of all three products


@each_instruction_set
@pytest.mark.parametrize("weight_dtype", [*WEIGHT_DTYPES, None])
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("n", [1, 5, 70])
def test_gradients_are_those_of_the_dequantized_product(
    isa: str, weight_dtype: str | None, compute_dtype: str, n: int, generator: torch.Generator
) -> None:
    matrix = NeuronMatrix.quantize(torch.randn(45, 70, generator=generator), weight_dtype, 32)
    weight, some = matrix.dequantize(), torch.arange(1, 45, 3)
    products = [
        (lambda x: gathered_row_product(matrix, x, compute_dtype=compute_dtype), weight.T),
        (lambda x: gathered_row_product(matrix, x, some, compute_dtype=compute_dtype), weight[some].T),
        (lambda x: gathered_accumulate(matrix, x, compute_dtype=compute_dtype), weight),
        (lambda x: gathered_accumulate(matrix, x, some, compute_dtype=compute_dtype), weight[some]),
    ]
    if weight_dtype is not None:
        turned, listed = InputMatrix.by_input(matrix), torch.arange(0, 70, 4)
        only = torch.zeros_like(weight).index_copy(1, listed, weight[:, listed])
        products += [
            (lambda x: input_product(turned, x, compute_dtype=compute_dtype), weight.T),
            (lambda x: input_product(turned, x, listed, compute_dtype=compute_dtype), only.T),
        ]
    tolerance = {"fp32": 1e-5, "int8": 1e-3, "bf16": 2e-2}[compute_dtype]
    if isa == "amx" and compute_dtype != "fp32":
        tolerance = 2e-2
    for product, dense in products:
        x = torch.randn(n, len(dense), generator=generator)
        with torch.no_grad():
            expected = product(x.clone().requires_grad_())
        assert not expected.requires_grad
        for dtype in (torch.float32, torch.bfloat16):
            wanting = x.to(dtype).requires_grad_()
            out = product(wanting)
            assert out.requires_grad and out.dtype == torch.float32
            if dtype == torch.float32:  # the same numbers as without a gradient, but for the road taken
                torch.testing.assert_close(out.detach(), expected, rtol=0, atol=tolerance * expected.abs().max().item())
            of_out = torch.randn(out.shape, generator=generator)
            (gradient,) = torch.autograd.grad(out, wanting, of_out)
            assert gradient.dtype == dtype and gradient.shape == x.shape
            plain = of_out @ dense.T
            allowed = max(tolerance, 1e-2 if dtype == torch.bfloat16 else 0) * plain.abs().max().item()
            torch.testing.assert_close(gradient.float(), plain, rtol=0, atol=allowed)


def test_gradients_have_gradients(generator: torch.Generator) -> None:
    matrix = NeuronMatrix.quantize(torch.randn(9, 14, generator=generator), "int8", 32)
    weight = matrix.dequantize()

    def second(product: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.ones(2, 14, requires_grad=True)
        (first,) = torch.autograd.grad(product(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    torch.testing.assert_close(
        second(lambda x: gathered_row_product(matrix, x)), second(lambda x: x @ weight.T), rtol=1e-4, atol=1e-3
    )


def test_stored_weights_want_no_gradient(generator: torch.Generator) -> None:
    matrix = NeuronMatrix.quantize(torch.randn(9, 14, generator=generator), None)
    x = torch.randn(2, 14, generator=generator, requires_grad=True)
    gathered_row_product(matrix, x).sum().backward()
    assert x.grad is not None and all(t.grad is None and not t.requires_grad for t in matrix.tensors().values())
