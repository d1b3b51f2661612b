"""What the doctor says of machines that are made up."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hf_sparse.doctor import Machine, device_table, limits
from hf_sparse.hardware import DeviceFigures

CPU = DeviceFigures(
    name="cpu",
    model="A CPU",
    memory=64 * 10**9,
    bandwidths=((2**20, 90e9), (2**28, 40e9)),
    kernel_bandwidths={"4-bit": ((2**28, 37.1875e9),)},
    launch_seconds=3e-5,
    flops=4e11,
    copy_to_bandwidth=12e9,
    copy_from_bandwidth=12e9,
)
GPU = DeviceFigures(
    name="cuda:0",
    model="A card",
    memory=8 * 10**9,
    bandwidths=((2**28, 500e9),),
    launch_seconds=2e-4,
    flops=9e13,
    copy_to_bandwidth=50e9,
    copy_from_bandwidth=51e9,
)
FINE = Machine(cores=16, threads=16, instruction_set="avx512_vnni", free={"cuda:0": 7 * 10**9})


def said(*devices: DeviceFigures, **changes: Any) -> list[str]:
    return list(limits(devices, dataclasses.replace(FINE, **changes)))


def test_a_machine_that_only_memory_limits() -> None:
    # 7 * 10**9 weights of 4 bits and a 16-bit scale for 64 of them: 3.71875 GB
    gpu, cpu = said(GPU, CPU)
    assert gpu.startswith(
        "cuda:0: memory is read at 500.0 GB/s: a 7B model in 4 bits (3.7 GB) decodes at most at 134.5"
    )
    assert cpu.startswith(
        "CPU: 4-bit weights are read at 37.2 GB/s: a 7B model in 4 bits (3.7 GB) decodes at most at 10.0"
    )


@pytest.mark.parametrize(
    ("devices", "changes", "lines"),
    [
        ((CPU,), {}, ["No CUDA device that works"]),
        ((GPU, CPU), {"cores": 2, "threads": 2}, ["CPU: 2 cores: prompts"]),
        ((GPU, CPU), {"cores": 1, "threads": 1}, ["CPU: 1 core: prompts"]),
        ((GPU, CPU), {"threads": 4}, ["CPU: torch uses 4 of 16 cores"]),
        ((GPU, CPU), {"instruction_set": "avx2"}, ["CPU: kernels use avx2, without AVX-512 or AMX"]),
        ((GPU, CPU), {"instruction_set": "torch"}, ["CPU: the kernels are not in use"]),
        ((GPU, CPU), {"instruction_set": "amx"}, []),
        ((GPU, CPU), {"free": {"cuda:0": 10**9}}, ["cuda:0: 1.0 GB of 8.0 GB are free"]),
        ((GPU, CPU), {"free": {"cuda:0": None}}, ["cuda:0: does not say"]),
        (
            (dataclasses.replace(GPU, copy_to_bandwidth=13e9), CPU),
            {},
            ["cuda:0: weights are copied to it at 13.0 GB/s, slower than the CPU reads them itself (37.2 GB/s)"],
        ),
        (
            (dataclasses.replace(GPU, assumed=("flops",)), CPU),
            {},
            ["cuda:0: could not be measured and is assumed: flops"],
        ),
    ],
)
def test_each_limit_is_one_line(devices, changes, lines) -> None:
    rest = [line for line in said(*devices, **changes) if "a 7B model" not in line]
    assert len(rest) == len(lines)
    assert all(line.startswith(start) for line, start in zip(rest, lines, strict=True))


def test_a_card_too_small_for_the_model() -> None:
    small, _ = said(dataclasses.replace(GPU, memory=2 * 10**9), CPU, free={"cuda:0": 2 * 10**9})
    assert "its 2.0 GB hold only a part" in small


def test_the_table_marks_what_is_assumed() -> None:
    plain, marked = device_table((GPU, CPU)), device_table((dataclasses.replace(GPU, assumed=("flops",)), CPU))
    assert plain.caption is None
    assert "assumed" in str(marked.caption)
    cells = [list(column.cells) for column in marked.columns]
    flops = cells[0].index("bf16 products, TFLOP/s")
    assert [column[flops] for column in cells] == ["bf16 products, TFLOP/s", "90 *", "0.4"]
    assert cells[2][cells[0].index("plain reads, GB/s")] == "90.0 of 1.0 MB\n40.0 of 268.4 MB"
    assert not any("int8" in heading for heading in cells[0])  # no device has such a figure
