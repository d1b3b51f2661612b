"""Where packed weights lie, and what the kernels read far behind the first 2**31 bytes of them."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_sparse.quantization import NeuronMatrix, gathered_accumulate, gathered_row_product, instruction_sets, memory
from workers import put_sum

CPU = torch.device("cpu")
DTYPES = (torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32)


def filled(shape: tuple[int, ...], dtype: torch.dtype, number: int) -> Tensor:
    return memory.empty(shape, dtype, CPU).fill_(number)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_as_torch_makes_them_and_begin_on_a_cache_line(dtype: torch.dtype) -> None:
    for shape in ((1,), (3, 5), (7, 1), (2, 3, 4), (33,)):
        made = memory.empty(shape, dtype, CPU)
        assert (made.shape, made.dtype, made.device, made.is_contiguous()) == (shape, dtype, CPU, True)
        assert made.data_ptr() % 64 == 0 and not made.requires_grad and not made.is_inference()


def test_each_has_a_storage_of_its_own_and_of_its_size() -> None:
    tensors = [filled((n, 3), torch.float32, n) for n in range(1, 30)]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
    for n, tensor in enumerate(tensors, start=1):
        assert tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes
        assert bool((tensor == n).all())  # none was written over by the next


def test_those_made_one_after_the_other_lie_one_after_the_other() -> None:
    first, second = (memory.empty((100,), torch.uint8, CPU) for _ in range(2))
    distance = second.data_ptr() - first.data_ptr()
    assert distance == 128 or distance < 0 or distance > 2**20  # unless a new block was begun between them


def test_what_is_kept_survives_what_is_not() -> None:
    kept = []
    for number in range(200):
        tensors = [filled((1 << 16,), torch.uint8, number) for _ in range(20)]  # several blocks in all
        kept.append((number, tensors[number % 20]))
        del tensors
    gc.collect()
    assert all(bool((tensor == number).all()) for number, tensor in kept)


def test_a_block_is_given_back_when_its_tensors_are_gone() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")

    before = mapped()
    for _ in range(8):
        big = memory.empty((2**30,), torch.uint8, CPU)  # not touched
        del big
    gc.collect()
    assert mapped() - before < 3 * 2**30


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_nothing_is_a_tensor_too(shape: tuple[int, ...]) -> None:
    made = memory.empty(shape, torch.int8, CPU)
    assert made.shape == shape
    assert memory.settled(torch.empty(shape)).shape == shape


@pytest.mark.parametrize("nbytes", [2**25 - 1, 2**25, 2**25 + 1, 100_000_000])
def test_what_no_block_has_room_for_gets_one_of_its_size(nbytes: int) -> None:
    small = filled((10,), torch.uint8, 7)
    made = memory.empty((nbytes,), torch.uint8, CPU)
    made[0], made[-1] = 1, 2
    after = filled((10,), torch.uint8, 9)
    assert made.untyped_storage().nbytes() == nbytes and made[[0, -1]].tolist() == [1, 2]
    assert bool((small == 7).all()) and bool((after == 9).all())


def test_other_devices_have_memory_of_their_own() -> None:
    assert memory.empty((3, 4), torch.int8, torch.device("meta")).is_meta
    settled = memory.settled(torch.empty(4, 3, device="meta").T)
    assert settled.is_meta and settled.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_settled_copies_any_strides(dtype: torch.dtype) -> None:
    base = torch.arange(60).view(6, 10).to(dtype)
    for tensor in (base, base.T, base[1:5, 2:9:3], base[:0], base[3], base.flip(0), base[:1].expand(4, 10)):
        settled = memory.settled(tensor)
        assert torch.equal(settled, tensor) and settled.is_contiguous() and settled.dtype == dtype
        if tensor.numel():
            assert settled.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
            tensor_before = tensor.clone()
            settled.fill_(0)
            assert torch.equal(tensor, tensor_before)


def test_saved_with_safetensors(tmp_path: Path) -> None:
    tensors = {str(number): filled((number + 1, 5), torch.bfloat16, number) for number in range(5)}
    save_file(tensors, tmp_path / "file.safetensors")
    again = load_file(tmp_path / "file.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert (tmp_path / "file.safetensors").stat().st_size < 5000


@pytest.mark.parametrize(
    "how", [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))], ids=["copy", "deepcopy", "pickle"]
)
def test_copied(how: Callable[[Tensor], Tensor]) -> None:
    tensor = filled((7, 9), torch.int8, 3)
    other = how(tensor)
    assert torch.equal(other, tensor) and other.dtype == torch.int8
    if how is not copy.copy:
        other.fill_(4)
        assert bool((tensor == 3).all())
    assert len(pickle.dumps(tensor)) < 2000  # not the whole block


def test_saved_by_torch(tmp_path: Path) -> None:
    torch.save([filled((7,), torch.float32, 1), filled((8,), torch.float32, 2)], tmp_path / "file.pt")
    first, second = torch.load(tmp_path / "file.pt", weights_only=True)
    assert first.tolist() == [1] * 7 and second.tolist() == [2] * 8
    assert (tmp_path / "file.pt").stat().st_size < 10_000


def test_shared_with_a_process(generator: torch.Generator) -> None:
    tensor = filled((5, 6), torch.float32, 2)
    tensor.share_memory_()
    assert tensor.is_shared() and bool((tensor == 2).all())
    matrix = NeuronMatrix.quantize(torch.randn(9, 40, generator=generator), "nf4", 32)
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=put_sum, args=(queue, matrix))
    worker.start()
    try:
        assert queue.get(timeout=60) == float(matrix.dequantize().double().sum())
    finally:
        worker.join(10)


# Matrices whose bytes no 32-bit number counts


def free_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0


needs_memory = pytest.mark.skipif(free_bytes() < 12e9, reason="fewer than 12 GB are free")
EDGES = (0, 2**31, 2**32)  # bytes of codes


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest, use_instruction_set: Callable[[str], None]) -> str:
    use_instruction_set(request.param)
    return str(request.param)


def large_matrix(weight_dtype: str | None, listed: Tensor, weight: Tensor, rows: int) -> NeuronMatrix:
    """Rows of zeros (pages that were never touched), but for `listed`, which hold `weight`."""
    small = NeuronMatrix.quantize(weight, weight_dtype, 128)
    tensors = {}
    for name, held in small.tensors().items():
        whole = memory.empty((rows, held.shape[1]), held.dtype, CPU)  # anonymous memory reads as zeros
        for row, values in zip(listed.tolist(), held, strict=True):
            whole[row] = values
        tensors[name] = whole
    return NeuronMatrix(weight_dtype, 128, rows, weight.shape[1], **tensors)


@needs_memory
@pytest.mark.parametrize("weight_dtype", ["int8", "nf4", "int4_asym", None])
def test_rows_behind_4_gigabytes(weight_dtype: str | None, isa: str, generator: torch.Generator) -> None:
    cols = 4096
    row_bytes = {"int8": cols, None: 2 * cols}.get(weight_dtype, cols // 2)
    rows = 2**33 // row_bytes + 3
    listed = [edge // row_bytes + step for edge in EDGES for step in (-1, 0, 1) if edge or step >= 0]
    index = torch.tensor([*listed, rows - 2, rows - 1])
    weight = torch.randn(len(index), cols, generator=generator)
    if weight_dtype is None:
        if isa == "torch":
            pytest.skip("torch's own operators")
        weight = weight.bfloat16()
    matrix = large_matrix(weight_dtype, index, weight, rows)
    expected = NeuronMatrix.quantize(weight, weight_dtype, 128).dequantize()
    assert torch.equal(matrix.dequantize(index=index), expected)
    for n in (1, 2, 20):
        for compute_dtype in ("fp32", "int8"):
            x = torch.randn(n, cols, generator=generator)
            y = gathered_row_product(matrix, x, index, compute_dtype=compute_dtype)
            torch.testing.assert_close(y, x @ expected.float().T, rtol=2e-2, atol=0.5)
            a = torch.randn(n, len(index), generator=generator)
            y = gathered_accumulate(matrix, a, index, compute_dtype=compute_dtype)
            torch.testing.assert_close(y, a @ expected.float(), rtol=2e-2, atol=0.2)
    tail = matrix.narrow(rows - 2, 2)
    torch.testing.assert_close(gathered_row_product(tail, x), x @ expected[-2:].float().T, rtol=1e-4, atol=1e-2)


@needs_memory
def test_the_last_of_many_columns(isa: str, generator: torch.Generator) -> None:
    """Rows so long that a row's own end lies far away."""
    cols = 2**22 + 5
    weight = torch.zeros(3, cols)
    weight[:, -9:] = torch.randn(3, 9, generator=generator)
    matrix = NeuronMatrix.quantize(weight, "int8", 128)
    x = torch.zeros(1, cols)
    x[:, -9:] = torch.randn(1, 9, generator=generator)
    expected = matrix.dequantize()[:, -9:]
    torch.testing.assert_close(gathered_row_product(matrix, x)[0], (expected @ x[0, -9:]), rtol=1e-4, atol=1e-5)
    sums = gathered_accumulate(matrix, torch.ones(1, 3))
    torch.testing.assert_close(sums[0, -9:], expected.sum(0), rtol=1e-4, atol=1e-5)
