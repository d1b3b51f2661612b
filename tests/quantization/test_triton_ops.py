"""The Triton operators in Triton's interpreter, beside the reference."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_sparse.modeling.native_mlp import ACTIVATIONS
from hf_sparse.quantization import (
    NeuronMatrix,
    active_neurons,
    gathered_accumulate,
    gathered_row_product,
    reference,
    triton_ops,
)

pytest.importorskip("triton", reason="Triton is not installed")

FORMS: list[tuple[str | None, torch.dtype]] = [
    *((name, torch.float32) for name in ("nf4", "fp4", "int4", "int4_asym", "int8")),
    (None, torch.float32),
    (None, torch.bfloat16),
    (None, torch.float16),
]
SHAPES = [(1, 1), (1, 40), (7, 33), (66, 130), (9, 257)]
NAMES = [f"{name or dtype}" for name, dtype in FORMS]


def random_matrix(
    form: tuple[str | None, torch.dtype], rows: int, cols: int, group_size: int, seed: int
) -> NeuronMatrix:
    generator = torch.Generator().manual_seed(seed)
    return NeuronMatrix.quantize(torch.randn(rows, cols, generator=generator).to(form[1]), form[0], group_size)


def random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def some_rows(rows: int, share: float, seed: int = 2) -> Tensor:
    return (torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < share).nonzero().flatten()


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert got.dtype == torch.float32 and got.shape == expected.shape
    largest = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(got, expected.float(), rtol=tolerance, atol=tolerance * max(1.0, largest))


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tensors of the CPU go where those of a GPU would; the names of the operators that ran."""
    ran: list[str] = []
    monkeypatch.setattr(triton_ops, "runs_on", lambda device: True)
    for name in ("row_product", "accumulate", "many_row_product", "many_accumulate"):
        operator = getattr(triton_ops, name)

        def counted(*args: Any, operator: Any = operator, name: str = name, **kwargs: Any) -> Tensor:
            ran.append(name)
            return operator(*args, **kwargs)

        monkeypatch.setattr(triton_ops, name, counted)
    return ran


# The two products, as ops.py offers them


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize("group_size", [32, 128])
def test_products_equal_the_reference(form, group_size: int, on_a_gpu: list[str]) -> None:
    for seed, (rows, cols) in enumerate(SHAPES):
        matrix = random_matrix(form, rows, cols, group_size, seed)
        weight = matrix.dequantize()
        for share in (0.0, 0.4, None):
            index = None if share is None else some_rows(rows, share, seed)
            chosen = weight if index is None else weight[index]
            n = 1 + seed % 3
            x, a = random(n, cols, seed=seed), random(n, len(chosen), seed=seed + 9)
            if form[0] is None and form[1] != torch.float32:  # weights of 16 bits multiply what has 16 bits
                x, a = x.to(form[1]).float(), a.to(form[1]).float()
            tolerance = 1e-5 if form[0] is not None or form[1] == torch.float32 or index is not None else 2e-2
            close(gathered_row_product(matrix, x, index, compute_dtype="int8"), x @ chosen.T, tolerance)
            close(gathered_accumulate(matrix, a, index, compute_dtype="int8"), a @ chosen, tolerance)
            rounded = x if form[0] is None else reference.round_activations(x, "bf16", group_size)
            close(gathered_row_product(matrix, x, index, compute_dtype="bf16"), rounded @ chosen.T, tolerance)
    assert {"row_product", "accumulate"} <= set(on_a_gpu)


@pytest.mark.parametrize("form", FORMS[:5], ids=NAMES[:5])
@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16", "int8"])
def test_products_of_many_rows(form, compute_dtype: str, on_a_gpu: list[str]) -> None:
    full = compute_dtype == "fp32"
    rounding = (lambda t: t) if full else (lambda t: t.to(torch.bfloat16).float())
    for seed, (rows, cols, n) in enumerate([(70, 130, 33), (1, 1, 5), (65, 31, 70)]):
        matrix = random_matrix(form, rows, cols, 64, seed)
        for index in (None, some_rows(rows, 0.6), some_rows(rows, 0.0)):
            chosen = rounding(matrix.dequantize() if index is None else matrix.dequantize()[index])
            x, a = random(n, cols), random(n, len(chosen))
            close(gathered_row_product(matrix, x, index, compute_dtype=compute_dtype), rounding(x) @ chosen.T)
            close(gathered_accumulate(matrix, a, index, compute_dtype=compute_dtype), rounding(a) @ chosen)
    assert set(on_a_gpu) == {"many_row_product", "many_accumulate"}


def test_what_cublas_has_is_left_to_it(on_a_gpu: list[str]) -> None:
    matrix = random_matrix((None, torch.bfloat16), 20, 30, 64, 0)
    gathered_row_product(matrix, random(1, 30))
    gathered_accumulate(matrix, random(40, 20))
    assert not on_a_gpu
    gathered_row_product(matrix, random(1, 30), torch.tensor([1, 4]))
    assert on_a_gpu == ["row_product"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_activations_of_any_dtype_and_stride(dtype: torch.dtype, on_a_gpu: list[str]) -> None:
    matrix = random_matrix(("nf4", torch.float32), 40, 70, 32, 3)
    x, a = random(140, 2, dtype=dtype)[::2].T, random(80, 2, dtype=dtype)[::2].T
    close(gathered_row_product(matrix, x), x.float() @ matrix.dequantize().T)
    close(gathered_accumulate(matrix, a), a.float() @ matrix.dequantize())


def test_a_part_of_a_matrix(on_a_gpu: list[str]) -> None:
    matrix = random_matrix(("int4_asym", torch.float32), 40, 70, 32, 3).narrow(11, 20)
    close(gathered_row_product(matrix, random(1, 70)), random(1, 70) @ matrix.dequantize().T)
    close(gathered_accumulate(matrix, random(1, 20)), random(1, 20) @ matrix.dequantize())


def test_nan_and_infinity_come_through(on_a_gpu: list[str]) -> None:
    matrix = random_matrix(("nf4", torch.float32), 40, 70, 32, 3)
    x = random(2, 70)
    x[1, 5] = math.nan
    got = gathered_row_product(matrix, x)
    assert got[0].isfinite().all() and got[1].isnan().all()
    a = random(2, 40)
    a[0, 3] = math.inf
    got = gathered_accumulate(matrix, a)
    assert not got[0].isfinite().any() and got[1].isfinite().all()


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ([1, 1], "strictly ascending"),
        ([3, 2], "strictly ascending"),
        ([-1, 2], "rows of 0..39"),
        ([40], "rows of 0..39"),
    ],
)
def test_bad_indices(index: list[int], match: str, on_a_gpu: list[str]) -> None:
    matrix = random_matrix(("nf4", torch.float32), 40, 70, 32, 3)
    with pytest.raises(ValueError, match=match):
        gathered_row_product(matrix, random(1, 70), torch.tensor(index))
    with pytest.raises(ValueError, match=match):
        gathered_accumulate(matrix, random(1, len(index)), torch.tensor(index))
    assert not on_a_gpu


# Counts that the device alone knows


@pytest.mark.parametrize("count", [0, 1, 5, 11])
def test_no_more_than_count_entries_are_used(count: int) -> None:
    matrix = random_matrix(("nf4", torch.float32), 40, 70, 32, 3)
    valid = some_rows(40, 0.3)[:11]
    index = torch.cat((valid, torch.full((9,), 10**6))).int()  # what lies behind is not looked at
    on_device = torch.tensor([min(count, len(valid))], dtype=torch.int32)
    chosen, n = matrix.dequantize()[valid[:count]], min(count, len(valid))
    got = triton_ops.row_product(matrix, random(2, 70), index, on_device)
    close(got[:, :n], random(2, 70) @ chosen.T)
    assert not got[:, n:].any()
    a = random(2, len(index))
    close(triton_ops.accumulate(matrix, a, index, on_device), a[:, :n] @ chosen)
    by_row = random(2, 40)
    close(triton_ops.accumulate(matrix, by_row, index, on_device, by_row=True), by_row[:, valid[:count]] @ chosen)


def test_sums_are_the_same_bits_each_time() -> None:
    matrix = random_matrix(("int8", torch.float32), 300, 40, 32, 3)
    a = random(1, 300)
    assert all(torch.equal(triton_ops.accumulate(matrix, a), triton_ops.accumulate(matrix, a)) for _ in range(3))


@pytest.mark.parametrize("length", [1, 5, 1024, 1025, 3000])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_compaction(length: int, share: float) -> None:
    scores, bias = random(length), random(length, seed=5)
    scores = torch.where(torch.rand(length, generator=torch.Generator().manual_seed(1)) < share, scores.abs(), -1.0)
    scores[length // 2] = math.nan if share else -1.0
    for given in (None, bias.abs() * 1e-3):
        index, count = triton_ops.compact(scores, given)
        expected = (~(scores + (0.0 if given is None else given) <= 0)).nonzero().flatten()
        assert index[: int(count)].tolist() == expected.tolist()
        assert index.dtype == count.dtype == torch.int32


@pytest.mark.parametrize("neurons", [1, 90, 1100])
def test_prediction(neurons: int) -> None:
    fc1, fc2 = (random_matrix(("int8", torch.float32), *shape, 32, 5) for shape in ((12, 70), (neurons, 12)))
    bias, x = random(neurons, seed=7), random(1, 70)
    index, count = triton_ops.predict(fc1, fc2, bias, x)
    assert index[: int(count)].tolist() == active_neurons(fc1, fc2, bias, x, "fp32").tolist()


# The fused operator


@pytest.mark.parametrize(
    ("form", "activation"),
    [*((form, 0) for form in FORMS), *((FORMS[0], activation) for activation in range(1, len(ACTIVATIONS)))],
)
def test_gate_and_up(form, activation: int) -> None:
    rows, cols = 37, 70
    gate, up = (random_matrix(form, rows, cols, 32, seed) for seed in (1, 2))
    x, seen = random(1, cols), random(1, cols, seed=3)
    gate_bias, up_bias = random(rows, seed=4), random(rows, seed=5)
    below, hidden_below = random(rows, seed=6).abs(), random(rows, seed=7).abs()
    index = some_rows(rows, 0.7).int()
    count = torch.tensor([len(index) - 2], dtype=torch.int32)
    act = ACTIVATIONS[activation]
    for chosen, counted in ((None, None), (index, None), (index, count)):
        at = torch.arange(rows) if chosen is None else chosen.long()
        valid = at if counted is None else at[: int(counted)]
        for options in ({}, {"gate_bias": gate_bias, "up_bias": up_bias, "x_gate": seen}):
            first = act(options.get("x_gate", x) @ gate.dequantize().T + options.get("gate_bias", 0.0))[0]
            whole = first * (x @ up.dequantize().T + options.get("up_bias", 0.0))[0]
            exact = [{"skips": True}] if activation >= 3 else []  # elsewhere nothing is a certain zero
            for rule in ({}, *exact, {"skips": True, "gates_below": below, "hidden_below": hidden_below}):
                hidden, kept = triton_ops.gate_up(
                    gate, up, x, activation, index=chosen, count=counted, **options, **rule
                )
                gates = torch.ones(rows, dtype=torch.bool)
                if rule:
                    gates = ~(first.abs() < below) if "gates_below" in rule else first != 0
                stays = gates & ~(whole.abs() < hidden_below) if "hidden_below" in rule else gates
                expected = torch.where(stays, whole, 0.0)
                close(hidden[: len(valid)], expected[valid], 3e-5)
                assert not hidden[len(valid) :].any() and not kept[len(valid) :].any()
                assert kept[: len(valid)].tolist() == (gates.int() + stays.int())[valid].tolist()
    hidden, _ = triton_ops.gate_up(gate, None, x, activation)
    close(hidden, act(x @ gate.dequantize().T)[0], 3e-5)


def test_rows_of_inactive_neurons_are_not_read() -> None:
    """Weights that would poison the sum if they were multiplied by zero."""
    weight = torch.randn(8, 40)
    gate = NeuronMatrix.quantize(torch.cat((weight[:4].abs(), -weight[4:].abs())), None, 32)
    poisoned = torch.cat((weight[:4], torch.full((4, 40), math.inf)))
    up = NeuronMatrix(None, 32, 8, 40, weight=poisoned)
    x = torch.rand(1, 40) + 0.1
    hidden, kept = triton_ops.gate_up(gate, up, x, 3, skips=True)
    assert hidden.isfinite().all() and kept.tolist() == [2] * 4 + [0] * 4
    assert triton_ops.accumulate(up, hidden[None]).isfinite().all()


def test_nan_is_not_left_out() -> None:
    gate, up = (random_matrix(("nf4", torch.float32), 9, 40, 32, seed) for seed in (1, 2))
    x = random(1, 40)
    x[0, 7] = math.nan
    hidden, kept = triton_ops.gate_up(gate, up, x, 3, skips=True, gates_below=torch.full((9,), 0.1))
    assert hidden.isnan().all() and kept.tolist() == [2] * 9


# Without the interpreter


@pytest.mark.parametrize("capability", [75, 89])
def test_every_kernel_compiles_for_a_gpu_that_is_not_there(capability: int, tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script), str(capability)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) >= 14
    shared = {75: 64, 89: 99}[capability]  # KB a block may use
    assert max(int(line.split()[-1]) for line in lines) <= shared * 1024


def test_importing_the_package_compiles_nothing() -> None:
    kernels = "hf_sparse.quantization.triton_kernels"
    script = f"import sys, hf_sparse.modeling, hf_sparse.quantization; assert {kernels!r} not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_gpu_without_triton_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    triton_ops.is_installed.cache_clear()
    with pytest.warns(UserWarning, match="triton is not installed") as said:
        found = [triton_ops.runs_on(torch.device("cuda")) for _ in range(2)]
    assert found == [False, False] and len(said) == 1
    assert not triton_ops.runs_on(torch.device("cpu"))
    triton_ops.is_installed.cache_clear()
