"""What the probes make of times, and that each of them measures this machine's CPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from hf_sparse import probes
from hf_sparse.quantization import gathered_row_product

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Working sets that are read in no time."""
    for name, size in (("SMALL", 2**18), ("MIDDLE", 2**20), ("LARGE", 2**21), ("MATRIX_BYTES", 2**18)):
        monkeypatch.setattr(probes, name, size)
    monkeypatch.setattr(probes, "GPU_PRODUCT", (5, 64, 48))
    monkeypatch.setattr(probes, "large_set", lambda: 2**22)


def test_works_take_turns_and_the_best_median_counts() -> None:
    order: list[str] = []
    # Three runs a turn, after a warm-up that no clock sees: medians 5, 3, 4 for a and 8, 7, 9 for b.
    taken = iter([5, 90, 1, 8, 8, 8, 3, 2, 60, 7, 7, 7, 4, 4, 4, 9, 1, 70])
    now = 0.0

    def clock() -> float:
        nonlocal now
        if next(is_end):
            now += next(taken)
        return now

    is_end = itertools.cycle([False, True])
    works = {name: lambda name=name: order.append(name) for name in "ab"}
    assert probes.best_median(works, rounds=3, repeats=3, clock=clock) == {"a": 3, "b": 7}
    assert "".join(order) == "ab" + "aaabbb" * 3


def test_a_clock_that_stands_still_gives_no_division_by_zero() -> None:
    assert 0 < probes.best_median({"a": lambda: None}, clock=lambda: 1.0)["a"] < 1e-6


def test_the_fixed_cost_is_taken_off_but_never_all() -> None:
    assert probes.without_fixed(10.0, 3.0) == 7.0
    assert probes.without_fixed(10.0, 11.0) == 5.0


@pytest.mark.parametrize("weights", probes.FORMATS)
def test_matrices_cover_their_buffer_and_can_be_multiplied(weights: str) -> None:
    buffer = torch.full((3 * 2**18 + 5000,), probes.FILLING, dtype=torch.uint8)
    matrices = probes.matrices_over(buffer, weights, 2**18)
    sizes = {matrix.nbytes for matrix in matrices}
    assert len(matrices) == 3 and len(sizes) == 1
    assert 0.9 * 2**18 < sizes.pop() <= 2**18
    starts = [next(iter(matrix.tensors().values())).data_ptr() for matrix in matrices]
    assert starts == [buffer.data_ptr() + i * matrices[0].nbytes for i in range(3)]
    weight_dtype, compute_dtype = probes.FORMATS[weights]
    assert matrices[0].weight_dtype == weight_dtype
    x = torch.ones(1, probes.COLUMNS)
    out = gathered_row_product(matrices[1], x, compute_dtype=compute_dtype)
    expected = matrices[1].dequantize(torch.float32).sum(1)
    torch.testing.assert_close(out[0], expected, rtol=1e-3, atol=0)
    assert bool((out != 0).all())


@pytest.mark.parametrize("level", ["as it is", "torch"])
def test_kernel_bandwidths_by_format_and_size(level: str, small, use_instruction_set) -> None:
    if level == "torch":
        use_instruction_set("torch")
    found = probes.kernel_bandwidths(CPU)
    assert found.keys() == probes.FORMATS.keys()
    for points in found.values():
        sizes = [size for size, _ in points]
        assert sizes == sorted(set(sizes))
        assert all(0 < speed < math.inf for _, speed in points)


def test_plain_bandwidths_by_size(small) -> None:
    points = probes.cpu_bandwidths(CPU)
    assert [size for size, _ in points] == [2**18, 2**20, 2**22]
    assert all(0 < speed < math.inf for _, speed in points)


@pytest.mark.parametrize("figure", ["launch_seconds", "flops", "copy_to_bandwidth"])
def test_other_figures_are_numbers(figure: str, small) -> None:
    assert 0 < probes.CPU_PROBES[figure](CPU) < math.inf


def test_the_large_set_is_past_the_last_cache_within_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def large(cache: int, memory: int) -> int:
        probes.large_set.cache_clear()
        monkeypatch.setattr(probes, "last_cache", lambda: cache)
        monkeypatch.setattr(probes, "host_memory", lambda: memory)
        return probes.large_set()

    try:
        assert large(30 * 2**20, 2**36) == probes.LARGE
        assert large(300 * 2**20, 2**36) == 600 * 2**20
        assert large(2**33, 2**36) == probes.LARGEST
        assert large(2**33, 2**31) == 2**28
        assert large(0, 2**20) > probes.MIDDLE
    finally:
        probes.large_set.cache_clear()


def test_what_the_system_says() -> None:
    assert probes.cpu_model()
    assert probes.host_memory() > 2**28
    assert probes.last_cache() >= 0
    assert probes.usable_cores() >= 1


@pytest.mark.parametrize("figure", probes.GPU_PROBES)
def test_probes_of_a_gpu_on_a_stand_in(figure: str, small, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU plays the card; memory that CUDA would pin stays as it is."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    found = probes.GPU_PROBES[figure](CPU)
    if figure == "bandwidths":
        assert [size for size, _ in found] == [2**18, 2**20, 2**21]
    assert all(0 < speed < math.inf for speed in ([speed for _, speed in found] if figure == "bandwidths" else [found]))


@pytest.mark.gpu
@pytest.mark.parametrize("figure", probes.GPU_PROBES)
def test_a_real_gpu(figure: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = probes.GPU_PROBES[figure](torch.device("cuda:0"))
    speeds = [speed for _, speed in found] if figure == "bandwidths" else [found]
    assert all(0 < speed < math.inf for speed in speeds)
