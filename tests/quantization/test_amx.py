"""The products in tile registers against float64 sums of the same bfloat16 operands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_sparse.quantization import GROUP_SIZES, WEIGHT_DTYPES, NeuronMatrix

kernels = pytest.importorskip("hf_sparse.quantization._kernels")

if "amx" not in kernels.levels():
    pytest.skip("this CPU or system has no AMX", allow_module_level=True)
LEVEL = kernels.levels()["amx"]

KINDS = [*WEIGHT_DTYPES, "bf16"]


class Weights:
    """Random weights of one kind as the kernels take them, and `dense`: the same rounded to bfloat16, in float32."""

    def __init__(
        self, rows: int, cols: int, kind: str, group_size: int, with_offsets: bool, generator: torch.Generator
    ) -> None:
        weight = torch.randn(rows, cols, generator=generator) * torch.rand(rows, 1, generator=generator)
        self.rows, self.cols, self.group_size = rows, cols, group_size
        self.scales = self.offsets = self.table = None
        if kind == "bf16":
            self.codes = weight.bfloat16()
            self.dense = self.codes.float()
            return
        matrix = NeuronMatrix.quantize(weight, kind, group_size)
        self.codes, self.scales, book = matrix.packed()
        self.offsets = matrix.offsets
        self.table = book.table
        self.dense = matrix.dequantize()
        if with_offsets and self.offsets is None:
            self.offsets = torch.randn(self.scales.shape, generator=generator).bfloat16()
            self.dense = self.dense + self.offsets.float().repeat_interleave(group_size, dim=1)[:, :cols]
        self.dense = self.dense.bfloat16().float()

    def product(
        self, name: str, x: Tensor, index: Tensor | None, threads: int = 2, out: Tensor | None = None
    ) -> Tensor | None:
        """`name`: row_product or accumulate. None where the index is refused."""
        packed = [0 if t is None else t.data_ptr() for t in (self.codes, self.scales, self.offsets, self.table)]
        matrix = kernels.Matrix(*packed, self.rows, self.cols, self.group_size, False)
        count = self.rows if index is None else len(index)
        if out is None:
            out = torch.full((x.shape[0], count if name == "row_product" else self.cols), torch.nan)
        rows = (0 if index is None else index.data_ptr(), count)
        call = getattr(kernels, f"many_{name}")
        return out if call(LEVEL, matrix, *rows, x.data_ptr(), x.shape[0], out.data_ptr(), threads) else None


def activations(weights: Weights, name: str, n: int, index: Tensor | None, generator: torch.Generator) -> Tensor:
    count = weights.rows if index is None else len(index)
    return torch.randn(n, weights.cols if name == "row_product" else count, generator=generator)


def check(weights: Weights, name: str, n: int, index: Tensor | None, generator: torch.Generator) -> None:
    x = activations(weights, name, n, index, generator)
    right = (weights.dense if index is None else weights.dense[index]).double()
    right = right.T if name == "row_product" else right
    left = x.bfloat16().double()
    y = weights.product(name, x, index)
    bound = (x.shape[1] + 16) * 2.0**-24 * (left.abs() @ right.abs()) + 1e-30
    error = (y.double() - left @ right).abs()
    assert bool((error <= bound).all()), f"{name}: largest error {error.max()}"


def some(rows: int, share: float, generator: torch.Generator) -> Tensor:
    return torch.randperm(rows, generator=generator)[: int(rows * share)].sort().values


@pytest.mark.parametrize("name", ["row_product", "accumulate"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_offsets", [False, True])
@given(
    rows=st.integers(1, 150),
    cols=st.integers(1, 300),
    n=st.integers(0, 70),
    group_size=st.sampled_from(GROUP_SIZES),
    share=st.one_of(st.none(), st.floats(0, 1)),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_products_equal_sums_in_float64(
    name: str,
    kind: str,
    with_offsets: bool,
    rows: int,
    cols: int,
    n: int,
    group_size: int,
    share: float | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = Weights(rows, cols, kind, group_size, with_offsets, generator)
    index = None if share is None else some(rows, share, generator)
    check(weights, name, n, index, generator)


@pytest.mark.parametrize("name", ["row_product", "accumulate"])
@pytest.mark.parametrize("kind", ["nf4", "int8", "bf16"])
@pytest.mark.parametrize(
    ("rows", "cols", "n"),
    [(1500, 1100, 33), (700, 2100, 530), (2100, 700, 530), (40, 1056, 1100), (1056, 40, 1100)],
)
def test_sums_that_are_cut_into_slices(
    name: str, kind: str, rows: int, cols: int, n: int, generator: torch.Generator
) -> None:
    weights = Weights(rows, cols, kind, 64, True, generator)
    check(weights, name, n, None, generator)
    check(weights, name, n, some(rows, 0.7, generator), generator)


@pytest.mark.parametrize("name", ["row_product", "accumulate"])
@pytest.mark.parametrize("kind", ["nf4", "int8", "bf16"])
@pytest.mark.parametrize(("rows", "cols"), [(1205, 1301), (70, 2000), (2000, 70)])
def test_neither_threads_nor_company_change_a_bit(
    name: str, kind: str, rows: int, cols: int, generator: torch.Generator
) -> None:
    weights = Weights(rows, cols, kind, 64, True, generator)
    x = activations(weights, name, 550, None, generator)
    expected = weights.product(name, x, None, threads=1)
    for threads in (2, 3, 8, 40):
        assert torch.equal(weights.product(name, x, None, threads=threads), expected)
    for start, stop in ((0, 1), (37, 38), (17, 34), (530, 550)):
        part = x[start:stop].contiguous()
        assert torch.equal(weights.product(name, part, None), expected[start:stop])


@pytest.mark.parametrize("name", ["row_product", "accumulate"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("n", [1, 5, 40])
def test_what_is_not_a_number_shows_in_its_row_and_only_there(
    name: str, kind: str, value: float, n: int, generator: torch.Generator
) -> None:
    weights = Weights(45, 70, kind, 32, True, generator)
    x = activations(weights, name, n, None, generator)
    expected = weights.product(name, x, None)
    for column in (0, x.shape[1] - 1):
        bad = x.clone()
        bad[n // 2, column] = value
        y = weights.product(name, bad, None)
        others = torch.arange(n) != n // 2
        assert not bool(y[n // 2].isfinite().any())
        assert torch.equal(y[others], expected[others])


@pytest.mark.parametrize("name", ["row_product", "accumulate"])
def test_other_users_of_the_tile_registers_are_not_disturbed(name: str, generator: torch.Generator) -> None:
    weights = Weights(200, 300, "nf4", 64, False, generator)
    x = activations(weights, name, 100, None, generator)
    left, right = x.bfloat16(), weights.dense.bfloat16()
    expected, mine = torch.nn.functional.linear(left[:, :200], right[:, :200]), weights.product(name, x, None)
    for _ in range(3):
        assert torch.equal(weights.product(name, x, None), mine)
        assert torch.equal(torch.nn.functional.linear(left[:, :200], right[:, :200]), expected)


@pytest.mark.parametrize("name", ["row_product", "accumulate"])
def test_nothing_is_written_beyond_the_output(name: str, generator: torch.Generator) -> None:
    weights = Weights(37, 43, "nf4", 32, True, generator)
    x = activations(weights, name, 19, None, generator)
    width = 37 if name == "row_product" else 43
    around = torch.full((64 + 19 * width + 64,), 7.0)
    y = weights.product(name, x, None, out=around[64 : 64 + 19 * width].view(19, width))
    assert torch.equal(y, weights.product(name, x, None))
    assert bool((around[:64] == 7).all())
    assert bool((around[-64:] == 7).all())


@pytest.mark.parametrize("name", ["row_product", "accumulate"])
def test_no_rows(name: str, generator: torch.Generator) -> None:
    weights = Weights(37, 43, "nf4", 32, False, generator)
    nothing = torch.arange(0)
    x = activations(weights, name, 3, nothing, generator)
    assert torch.equal(weights.product(name, x, nothing), torch.zeros(3, 0 if name == "row_product" else 43))


@pytest.mark.parametrize("index", [[2, 1], [1, 1], [-1, 1], [1, 37]])
def test_bad_indices_are_refused(index: list[int], generator: torch.Generator) -> None:
    weights = Weights(37, 43, "nf4", 32, False, generator)
    assert weights.product("row_product", torch.zeros(2, 43), torch.tensor(index)) is None
    assert weights.product("accumulate", torch.zeros(2, 2), torch.tensor(index)) is None
