"""Figures and tiers of this machine, and of machines with GPUs that are played by stand-ins."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch

from hf_sparse import probes
from hf_sparse.hardware import (
    CONSERVATIVE,
    WEIGHTS,
    DeviceFigures,
    figures_file,
    find_tiers,
    measure_devices,
    warn_busy,
)
from hf_sparse.log import warn_once
from hf_sparse.modeling import Tier

TOTAL = [11_000_000_000, 24_000_000_000]
FREE = 10_000_000_000
CPU_FIGURES: dict[str, Any] = {
    "bandwidths": ((2**20, 90e9), (2**28, 30e9)),
    "kernel_bandwidths": {"4-bit": ((2**20, 80e9), (2**28, 20e9)), "int8": ((2**28, 25e9),)},
    "launch_seconds": 3e-5,
    "flops": 4e11,
    "copy_to_bandwidth": 12e9,
}
GPU_FIGURES: dict[str, Any] = {
    "bandwidths": ((2**20, 2e12), (2**28, 1e12)),
    "launch_seconds": 2e-4,
    "sync_seconds": 3e-5,
    "copy_latency": 1e-5,
    "copy_to_bandwidth": 14e9,
    "copy_from_bandwidth": 13e9,
    "flops": 9e13,
}


class Measured(list):
    """(device, figure) of each probe that ran."""

    def probe(self, figure: str, value: Any) -> Callable[[torch.device], Any]:
        def run(device: torch.device) -> Any:
            self.append((str(device), figure))
            return value

        return run


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for each in (warn_once, warn_busy):
        each.cache_clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    return tmp_path / "assets" / "hf_sparse" / "hardware"


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Probes that say what is above, at once."""
    ran = Measured()
    for table, figures in ((probes.CPU_PROBES, CPU_FIGURES), (probes.GPU_PROBES, GPU_FIGURES)):
        for figure, value in figures.items():
            monkeypatch.setitem(table, figure, ran.probe(figure, value))
    return ran


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(total_memory=TOTAL[index], name=f"Card {index}", uuid=f"uuid-{index}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, TOTAL[device]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def fail(*args: object, **kwargs: object) -> Any:
    raise RuntimeError("out of memory\nand a long trace")


def figures(**changes: Any) -> DeviceFigures:
    fields = {"name": "cpu", "model": "a CPU", "memory": 2**34, "copy_from_bandwidth": 11e9, **CPU_FIGURES, **changes}
    return DeviceFigures(**fields)


# Figures


def test_bandwidth_is_linear_in_the_logarithm_of_the_size() -> None:
    cpu = figures()
    assert cpu.bandwidth(2**20) == cpu.bandwidth(1) == 80e9
    assert cpu.bandwidth(2**28) == cpu.bandwidth(2**40) == cpu.bandwidth() == 20e9
    assert cpu.bandwidth(2**24) == pytest.approx(50e9)
    assert cpu.bandwidth(2**22) == pytest.approx(65e9)
    assert cpu.bandwidth(2**22, "int8") == 25e9
    # not measured through the kernel: as plain memory
    assert cpu.bandwidth(2**24, "bf16") == pytest.approx(60e9)


def test_bandwidth_of_what_is_none() -> None:
    with pytest.raises(ValueError, match=r"weights: got 'int3', allowed are '4-bit', 'int8', 'bf16'"):
        figures().bandwidth(5, "int3")
    with pytest.raises(ValueError, match=r"nbytes: got 0"):
        figures().bandwidth(0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("model", 5),
        ("memory", 0),
        ("memory", 1.5),
        ("memory", True),
        ("flops", float("nan")),
        ("flops", "fast"),
        ("copy_to_bandwidth", 0),
        ("copy_from_bandwidth", float("inf")),
        ("launch_seconds", -1e-9),
        ("sync_seconds", None),
        ("copy_latency", True),
        ("measured", 1),
        ("assumed", ("speed",)),
        ("assumed", ["flops"]),
        ("bandwidths", ()),
        ("bandwidths", 5e9),
        ("bandwidths", ((1, 2, 3),)),
        ("bandwidths", ((2, 1.0), (2, 1.0))),
        ("bandwidths", ((2, 1.0), (3, 0.0))),
        ("bandwidths", ((0, 1.0),)),
        ("bandwidths", ((1, float("nan")),)),
        ("kernel_bandwidths", {"int3": ((1, 1.0),)}),
        ("kernel_bandwidths", {"int8": ()}),
        ("kernel_bandwidths", []),
    ],
)
def test_figures_that_are_none(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        figures(**{field: value})


def test_figures_survive_json() -> None:
    cpu = figures(assumed=("flops",), measured=False)
    assert DeviceFigures.from_dict(json.loads(json.dumps(cpu.to_dict()))) == cpu
    for change, match in (({"more": 1}, "^more: is unknown"), ({}, "^flops: is missing")):
        fields = {**cpu.to_dict(), **change}
        if not change:
            del fields["flops"]
        with pytest.raises(ValueError, match=match):
            DeviceFigures.from_dict(fields)


# Measured once


def test_every_device_is_measured_once_and_kept(two_gpus, measured: Measured, cache: Path) -> None:
    found = measure_devices()
    assert [(each.name, each.model, each.memory) for each in found[:2]] == [
        ("cuda:0", "Card 0", TOTAL[0]),
        ("cuda:1", "Card 1", TOTAL[1]),
    ]
    assert (found[2].name, found[2].memory) == ("cpu", probes.host_memory())
    assert sorted(measured) == sorted(
        [(f"cuda:{i}", figure) for i in range(2) for figure in GPU_FIGURES]
        + [("cpu", figure) for figure in CPU_FIGURES]
    )
    for each, expected in ((found[0], GPU_FIGURES), (found[2], CPU_FIGURES)):
        assert {figure: getattr(each, figure) for figure in expected} == expected
        assert each.measured and each.assumed == ()
    assert found[2].copy_from_bandwidth == CPU_FIGURES["copy_to_bandwidth"]
    assert [file.name for file in cache.iterdir()] == [figures_file().name]  # nothing left aside
    runs = len(measured)
    assert measure_devices() == found and len(measured) == runs
    assert measure_devices(remeasure=True) == found and len(measured) == 2 * runs


def test_another_machine_has_another_file(two_gpus, monkeypatch: pytest.MonkeyPatch, threads) -> None:
    seen = {figures_file()}
    changes: list[Callable[[], None]] = [
        lambda: monkeypatch.setattr(probes, "cpu_model", lambda: "another CPU"),
        lambda: monkeypatch.setattr(probes, "host_memory", lambda: 2**33),
        lambda: monkeypatch.setattr(os, "cpu_count", lambda: 77),
        lambda: threads(torch.get_num_threads() + 1),
        lambda: monkeypatch.setattr(torch, "__version__", "2.0"),
        lambda: monkeypatch.setattr(torch.cuda, "device_count", lambda: 1),
        lambda: monkeypatch.setattr(torch.cuda, "get_device_properties", fail),
    ]
    for number, change in enumerate(changes, 2):
        change()
        assert figures_file() == figures_file()
        seen.add(figures_file())
        assert len(seen) == number
    assert len({path.parent for path in seen}) == 1


DAMAGES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda text: text[:50], "JSON|delimiter|Expecting|Unterminated"),
    (lambda text: "[]", "format_version: got None"),
    (lambda text: text.replace('"format_version": 1', '"format_version": 9'), "format_version: got 9"),
    (lambda text: '{"format_version": 1}', "devices: got None"),
    (lambda text: '{"format_version": 1, "devices": []}', r"devices: got \[\]"),
    (lambda text: '{"format_version": 1, "devices": [5]}', r"devices\[0\].*got 5, expected an object"),
    (lambda text: text.replace('"flops": 400000000000.0', '"flops": -4.0'), r"devices\[0\]\.flops: got -4.0"),
    (lambda text: text.replace('"flops": 400000000000.0', '"flops": NaN'), r"devices\[0\]\.flops: got nan"),
    (lambda text: text.replace('"flops"', '"flop"'), r"devices\[0\]\.flop: is unknown"),
    (lambda text: text.replace('"cpu"', '"cuda:0"'), r"devices\[0\]\.name: got 'cuda:0', expected 'cpu'"),
    (lambda text: "[" * 100_000, "."),
    (lambda text: b"\xff\xfe", "."),
]


@pytest.mark.parametrize(("damage", "match"), DAMAGES)
def test_a_damaged_file_is_said_by_field_and_measured_anew(damage, match, no_gpu, measured, caplog) -> None:
    found = measure_devices()
    path = figures_file()
    whole = path.read_text()
    damaged = damage(whole)
    assert damaged != whole
    path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    runs = len(measured)
    assert measure_devices() == found
    assert len(measured) == 2 * runs
    (record,) = caplog.records
    assert record.levelname == "WARNING" and str(path) in record.getMessage()
    assert re.search(match, record.getMessage())
    assert path.read_text() == whole


def test_a_folder_that_cannot_be_written_warns_once(no_gpu, measured, monkeypatch, tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(huggingface_hub.constants, "HF_ASSETS_CACHE", str(tmp_path / "file"))
    found = measure_devices()
    runs = len(measured)
    assert measure_devices() == found and len(measured) == runs  # held by the process all the same
    measure_devices(remeasure=True)
    assert len(measured) == 2 * runs
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "could not be saved" in caplog.text


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_probes_that_fail_are_said_once_and_replaced(kind, two_gpus, monkeypatch, caplog) -> None:
    table = {"cpu": probes.CPU_PROBES, "cuda": probes.GPU_PROBES}[kind]
    assert CONSERVATIVE[kind].keys() == table.keys()
    for figure in list(table):
        monkeypatch.setitem(table, figure, fail)
    name = {"cpu": "cpu", "cuda": "cuda:1"}[kind]
    for _ in range(2):
        (found,) = (each for each in measure_devices(remeasure=True) if each.name == name)
    assert found.assumed == tuple(table)
    assert {figure: getattr(found, figure) for figure in table} == CONSERVATIVE[kind]
    said = [message for message in caplog.messages if message.startswith(name)]
    assert len(said) == len(table)
    for figure, message in zip(table, said, strict=True):
        assert message.startswith(f"{name}: {figure} could not be measured (out of memory), counting on ")
    assert f"{CONSERVATIVE[kind]['flops']:g}" in caplog.text
    assert DeviceFigures.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_one_failing_probe_leaves_the_others(no_gpu, monkeypatch) -> None:
    def no_memory(device: torch.device) -> Any:
        raise MemoryError

    monkeypatch.setitem(probes.CPU_PROBES, "kernel_bandwidths", no_memory)
    (cpu,) = measure_devices()
    assert cpu.assumed == ("kernel_bandwidths",)
    assert cpu.bandwidth(weights="int8") == 30e9  # as plain memory
    assert cpu.flops == CPU_FIGURES["flops"]


def test_a_fault_of_the_program_is_no_failing_probe(no_gpu, monkeypatch) -> None:
    monkeypatch.setitem(probes.CPU_PROBES, "flops", lambda device: [][0])
    with pytest.raises(IndexError):
        measure_devices()


@pytest.mark.parametrize("budget", [None, "80%", 5])
def test_a_driver_that_answers_nothing(budget, two_gpus, monkeypatch, caplog) -> None:
    for name in ("get_device_properties", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, fail)
    for _ in range(2):
        assert [tier.name for tier in find_tiers(budget)] == ["cpu"]
    for index in range(2):
        assert sum(f"cuda:{index}: the device does not answer (out of memory" in m for m in caplog.messages) == 1
    assert len(caplog.messages) == len(set(caplog.messages))


def test_cuda_that_cannot_count_its_devices(two_gpus, monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", fail)
    assert [tier.name for tier in find_tiers(None)] == ["cpu"]
    assert "CUDA devices cannot be counted (out of memory" in caplog.text


def test_free_memory_that_cannot_be_read(two_gpus, monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    assert [tier.name for tier in find_tiers(None)] == ["cpu"]
    assert "cuda:0: no neurons are placed on it; give gpu_budget" in caplog.text
    assert [tier.name for tier in find_tiers("8GB")] == ["cuda:0", "cpu"]


# Tiers


def test_tiers_have_the_figures_that_were_measured(two_gpus) -> None:
    gpu = Tier("cuda:0", torch.device("cuda:0"), 8_000_000_000, 1e12, 3e-5, 2e-4, 9e13, 14e9)
    cpu = Tier("cpu", torch.device("cpu"), None, 20e9, 0.0, 3e-5, 4e11, 12e9)
    assert find_tiers("8GB") == (gpu, cpu)


def test_bandwidths_are_those_of_the_weights(no_gpu) -> None:
    (each,) = measure_devices()
    for weights in WEIGHTS:
        for nbytes in (None, 2**24):
            (cpu,) = find_tiers(None, weights, nbytes)
            assert cpu.bandwidth == each.bandwidth(nbytes, weights)
    assert find_tiers(None, "int8") != find_tiers(None, "4-bit") != find_tiers(None, "4-bit", 2**24)
    with pytest.raises(ValueError, match="weights: got 'int3'"):
        find_tiers(None, "int3")


@pytest.mark.parametrize("budget", ["11GB", "80%", 5, {"cuda:0": "8GB", "cuda:1": "50%"}])
def test_budget_without_a_gpu_warns_once(budget, no_gpu, caplog) -> None:
    for _ in range(3):
        assert [tier.name for tier in find_tiers(budget)] == ["cpu"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "all neurons stay on the CPU" in caplog.text


@pytest.mark.parametrize("budget", [None, 0, "0%", {"cuda:0": 0}])
def test_nothing_asked_of_a_gpu_is_no_warning(budget, no_gpu, caplog) -> None:
    assert [tier.name for tier in find_tiers(budget)] == ["cpu"]
    assert not caplog.records


@pytest.mark.parametrize(
    ("budget", "match"),
    [
        ("11 potatoes", "gpu_budget.*11 potatoes"),
        (-1, "gpu_budget.*-1"),
        (True, "gpu_budget.*True"),
        ("101%", "gpu_budget.*101%"),
        ({"cuda:1": "lots"}, r"gpu_budget\['cuda:1'\].*lots"),
        ({"cpu": "8GB"}, "gpu_budget: got device 'cpu'"),
        ({"cuda:": 1}, "gpu_budget: got device 'cuda:'"),
        ({0: "8GB"}, "gpu_budget: got device 0"),
        ({"cuda": 1, "cuda:0": 1}, "'cuda:0' comes twice"),
        ({}, "empty mapping"),
    ],
)
@pytest.mark.parametrize("machine", ["no_gpu", "two_gpus"])
def test_bad_budgets(budget, match, machine, request) -> None:
    request.getfixturevalue(machine)
    with pytest.raises(ValueError, match=match):
        find_tiers(budget)


def test_mapping_keeps_its_order_and_percentages_are_of_the_total(two_gpus) -> None:
    tiers = find_tiers({"cuda:1": "30%", "cuda": 123})
    assert [(t.name, t.budget) for t in tiers] == [("cuda:1", 7_200_000_000), ("cuda:0", 123), ("cpu", None)]
    assert tiers[0].device == torch.device("cuda", 1)


def test_no_budget_takes_most_of_the_free_memory(two_gpus, caplog) -> None:
    gpu, _ = find_tiers(None)
    assert gpu.name == "cuda:0"
    assert gpu.budget % 2**28 == 0
    assert 0.9 * FREE - 2**28 < gpu.budget <= 0.9 * FREE
    assert not caplog.records


@pytest.mark.parametrize("budget", [0, {"cuda:0": 0, "cuda:1": "0%"}])
def test_budget_of_zero_leaves_the_gpu_out(budget, two_gpus) -> None:
    assert [tier.name for tier in find_tiers(budget)] == ["cpu"]
    assert [tier.name for tier in find_tiers({"cuda:0": 0, "cuda:1": 7})] == ["cuda:1", "cpu"]


def test_more_than_the_card_has(two_gpus) -> None:
    assert find_tiers(TOTAL[0])[0].budget == TOTAL[0]
    with pytest.raises(ValueError, match=f"gpu_budget.*{TOTAL[0] + 1}.*cuda:0 has {TOTAL[0]} bytes"):
        find_tiers(TOTAL[0] + 1)


def test_a_busy_card_is_warned_of_once_and_the_budget_kept(two_gpus, monkeypatch, caplog) -> None:
    assert find_tiers(FREE)[0].budget == FREE
    assert not caplog.records
    for free in (FREE, FREE - 1, FREE - 2):  # it differs from call to call
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, TOTAL[device]))
        assert find_tiers(FREE + 1)[0].budget == FREE + 1
    (message,) = caplog.messages
    assert str(FREE + 1) in message and f"{FREE} bytes" in message and "cuda:0" in message
    assert "run out of memory" in message


def test_absent_device(two_gpus) -> None:
    with pytest.raises(ValueError, match="no device 'cuda:2', allowed are cuda:0, cuda:1"):
        find_tiers({"cuda:0": "1GB", "cuda:2": "1GB"})


@pytest.mark.gpu
def test_a_real_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.undo()
    gpu, cpu = find_tiers("1GB")
    assert gpu.budget == 10**9
    assert gpu.bandwidth > 2 * cpu.bandwidth
    assert 1e-6 < gpu.sync_seconds < 1e-2
