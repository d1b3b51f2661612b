"""Devices by published figures: the ones that ship, and a user's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_sparse.catalogue import VARIABLE, known_device, known_devices

OWN = {
    "model": "Example Card 9",
    "kind": "gpu",
    "memory_gib": 7,
    "bandwidth_gb_s": 321.5,
    "tflops": 12,
    "copy_gb_s": 9,
}


@pytest.fixture(autouse=True)
def _no_file_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def write(path: Path, *devices: Any, **fields: Any) -> Path:
    path.write_text(json.dumps({"format_version": 1, "devices": list(devices), **fields}))
    return path


def test_spelling_without_blanks() -> None:
    assert known_device("rtx4090") == known_device("RTX 4090")
    assert known_device("i9 13900k") == known_device("i9-13900K")


def test_what_ships() -> None:
    devices = known_devices()
    assert all(model == each.model and not each.measured for model, each in devices.items())
    kinds = [each.name for each in devices.values()]
    assert kinds.count("cuda:0") >= 25 and kinds.count("cpu") >= 5 and set(kinds) == {"cuda:0", "cpu"}
    for each in devices.values():
        # what a wrong unit or a slipped digit would leave
        fast, slow = (5e12, 90e9) if each.name == "cuda:0" else (1e12, 40e9)
        assert slow < each.bandwidth() < fast
        assert 4 * 2**30 <= each.memory <= 2**40
        assert 3e11 < each.flops < 2e15
        assert each.copy_to_bandwidth < each.bandwidth()
        assert set(each.assumed) <= {"launch_seconds", "sync_seconds", "copy_latency"}


def test_published_figures_come_in_units_of_the_library() -> None:
    card = known_device("RTX 4090")
    assert (card.name, card.memory, card.bandwidth(1), card.flops) == ("cuda:0", 24 * 2**30, 1008e9, 165.2e12)
    assert card.copy_to_bandwidth == card.copy_from_bandwidth == 31.5e9
    cpu = known_device("i7-12700k")
    assert (cpu.name, cpu.bandwidth(), cpu.sync_seconds) == ("cpu", 57.6e9, 0.0)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("  rtx   4090 laptop ", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        ("4070 Ti", "NVIDIA GeForce RTX 4070 Ti"),
        ("A10", "NVIDIA A10"),
        ("l4", "NVIDIA L4"),
        ("i9-13900K", "Intel Core i9-13900K, 2 x DDR5-5600"),
    ],
)
def test_devices_by_part_of_their_name(name: str, model: str) -> None:
    assert known_device(name).model == model


def test_names_of_none_and_of_several() -> None:
    with pytest.raises(ValueError, match=r"'a100' may be any of .*A100-PCIE-40GB.*A100-SXM4-80GB"):
        known_device("a100")
    with pytest.raises(ValueError, match=rf"got 'RTX 4091', near to it are .*RTX 40.*{VARIABLE}"):
        known_device("RTX 4091")
    with pytest.raises(ValueError, match="got ''"):
        known_device("")


def test_a_file_of_ones_own_adds_and_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faster = {**OWN, "model": "nvidia geforce rtx 4090", "launch_us": 50, "sync_us": 8}
    file = write(tmp_path / "own.json", OWN, faster)
    assert known_device("example card", file).memory == 7 * 2**30
    card = known_device("RTX 4090", str(file))
    assert (card.bandwidth(), card.launch_seconds, card.sync_seconds) == (321.5e9, 5e-5, 8e-6)
    assert card.assumed == ("copy_latency",)
    assert len(known_devices(file)) == len(known_devices()) + 1
    monkeypatch.setenv(VARIABLE, str(file))
    assert known_device("example card").bandwidth() == 321.5e9
    second = write(tmp_path / "second.json", {**OWN, "tflops": 13})
    assert known_device("example card", second).flops == 13e12
    assert known_device("RTX 4090", second).bandwidth() == 321.5e9


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in OWN.items() if key != name}


@pytest.mark.parametrize(
    ("devices", "match"),
    [
        ([without("tflops")], r"devices\[0\]\.tflops: is missing"),
        ([OWN, {**OWN, "model": "B", "speed": 5}], r"devices\[1\]\.speed: is unknown, allowed are model, kind"),
        ([OWN, {**OWN, "model": "example CARD 9"}], r"devices\[1\]\.model: 'example CARD 9' comes twice"),
        ([{**OWN, "model": " "}], r"devices\[0\]\.model: got ' '"),
        ([{**OWN, "model": 9}], r"devices\[0\]\.model: got 9"),
        ([{**OWN, "kind": "tpu"}], r"devices\[0\]\.kind: got 'tpu', expected 'gpu' or 'cpu'"),
        ([{**OWN, "memory_gib": 0}], r"devices\[0\]\.memory_gib: got 0"),
        ([{**OWN, "bandwidth_gb_s": "321"}], r"devices\[0\]\.bandwidth_gb_s: got '321'"),
        ([{**OWN, "copy_gb_s": float("nan")}], r"devices\[0\]\.copy_gb_s: got nan"),
        ([{**OWN, "tflops": True}], r"devices\[0\]\.tflops: got True"),
        ([{**OWN, "launch_us": -1}], r"devices\[0\]\.launch_us: got -1"),
        (["card"], r"devices\[0\]: got 'card', expected an object"),
    ],
)
def test_files_with_wrong_devices(devices: list[Any], match: str, tmp_path: Path) -> None:
    file = write(tmp_path / "own.json", *devices)
    with pytest.raises(ValueError, match=f"{file}: {match}"):
        known_devices(file)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", r"got \[\], expected an object"),
        ('{"devices": []}', r"got \['devices'\]"),
        ('{"format_version": 2, "devices": []}', "format_version: got 2, expected 1"),
        ('{"format_version": 1, "devices": {}}', r"devices: got \{\}, expected a list"),
    ],
)
def test_files_of_another_form(text: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "own.json"
    file.write_text(text)
    monkeypatch.setenv(VARIABLE, str(file))
    with pytest.raises(ValueError, match=f"{file}: {match}"):
        known_device("RTX 4090")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        known_devices(tmp_path / "absent.json")
