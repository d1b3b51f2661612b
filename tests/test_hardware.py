"""Tiers found on this machine, and on machines with GPUs that are played by stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_sparse import hardware
from hf_sparse.hardware import find_tiers
from hf_sparse.log import warn_once
from hf_sparse.modeling import Tier

TOTAL = [11_000_000_000, 24_000_000_000]
FREE = 10_000_000_000


@pytest.fixture(autouse=True)
def _fresh_caches():
    caches = (hardware._bandwidth, hardware._sync_seconds, warn_once)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, TOTAL[device]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=TOTAL[i]))
    monkeypatch.setattr(hardware, "_bandwidth", {"cpu": 20e9, "cuda:0": 1e12, "cuda:1": 2e12}.__getitem__)
    monkeypatch.setattr(hardware, "_sync_seconds", {"cuda:0": 3e-5, "cuda:1": 4e-5}.__getitem__)


def test_cpu_is_measured_once(no_gpu, monkeypatch) -> None:
    (cpu,) = find_tiers(None)
    assert cpu.device == torch.device("cpu")
    assert (cpu.name, cpu.budget, cpu.sync_seconds) == ("cpu", None, 0.0)
    assert 1e8 < cpu.bandwidth < 1e13
    monkeypatch.setattr(hardware, "_fastest", lambda work, tries: pytest.fail("measured twice"))
    assert find_tiers(None) == (cpu,)


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


def test_plain_budget_is_for_the_first_gpu(two_gpus) -> None:
    expected = Tier("cuda:0", torch.device("cuda:0"), 8_000_000_000, 1e12, 3e-5)
    assert find_tiers("8GB") == (expected, Tier("cpu", bandwidth=20e9))


def test_mapping_keeps_its_order_and_percentages_are_of_the_total(two_gpus) -> None:
    tiers = find_tiers({"cuda:1": "50%", "cuda": 123})
    assert [(t.name, t.budget) for t in tiers] == [("cuda:1", 12_000_000_000), ("cuda:0", 123), ("cpu", None)]
    assert tiers[0].device == torch.device("cuda", 1)
    assert [t.bandwidth for t in tiers] == [2e12, 1e12, 20e9]


def test_no_budget_takes_most_of_the_free_memory(two_gpus) -> None:
    gpu, _ = find_tiers(None)
    assert gpu.name == "cuda:0"
    assert gpu.budget % 2**28 == 0
    assert 0.9 * FREE - 2**28 < gpu.budget <= 0.9 * FREE


def test_budget_of_zero_leaves_the_gpu_out(two_gpus) -> None:
    assert [tier.name for tier in find_tiers(0)] == ["cpu"]


def test_more_than_the_card_has(two_gpus) -> None:
    assert find_tiers(TOTAL[0])[0].budget == TOTAL[0]
    with pytest.raises(ValueError, match=f"gpu_budget.*{TOTAL[0] + 1}.*cuda:0 has {TOTAL[0]} bytes"):
        find_tiers(TOTAL[0] + 1)


def test_absent_device(two_gpus) -> None:
    with pytest.raises(ValueError, match="no device 'cuda:2', allowed are cuda:0, cuda:1"):
        find_tiers({"cuda:0": "1GB", "cuda:2": "1GB"})


def test_probes_that_fail_are_said(no_gpu, monkeypatch, caplog) -> None:
    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "ones", fail)
    (cpu,) = find_tiers(None)
    assert cpu.bandwidth == 8e9
    assert "cpu: the bandwidth could not be measured (out of memory), counting on 8 GB/s" in caplog.text
    assert hardware._sync_seconds("cuda:0") == 1e-4
    assert hardware._bandwidth("cuda:0") == 200e9
    assert len(caplog.records) == 3


@pytest.mark.gpu
def test_a_real_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    gpu, cpu = find_tiers("1GB")
    assert gpu.budget == 10**9
    assert gpu.bandwidth > 2 * cpu.bandwidth
    assert 1e-6 < gpu.sync_seconds < 1e-2
