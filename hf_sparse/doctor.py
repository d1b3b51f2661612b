"""What limits this machine, in words: `hf-sparse doctor`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from rich.table import Table

from hf_sparse.quantization import NeuronMatrix, instruction_set

from .hardware import WEIGHTS, DeviceFigures, figures_file, free_memory, measure_devices
from .probes import COLUMNS, FORMATS, GROUP_SIZE, usable_cores
from .report import format_bytes

PACKAGES = ("torch", "transformers", "triton", "bitsandbytes")
EXAMPLE_WEIGHTS = 7 * 10**9
FEW_CORES = 4
BUSY = 0.75  # a card of which less is free has other work
# How fast a CPU computes beside how fast it reads depends on these.
FAST_SETS = ("amx", "avx512")


@dataclass(frozen=True)
class Machine:
    """What binds beside the devices' figures. `cores`: that the process may use. `threads`: that torch uses.
    `instruction_set`: of the kernels. `free`: bytes by GPU, None where it does not answer.
    """

    cores: int
    threads: int
    instruction_set: str
    free: Mapping[str, int | None]


@dataclass(frozen=True)
class Findings:
    """What the doctor has to say."""

    devices: tuple[DeviceFigures, ...]
    limits: tuple[str, ...]
    versions: Mapping[str, str | None]
    caches: Mapping[str, Path]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "devices": [device.to_dict() for device in self.devices],
            "limits": list(self.limits),
            "versions": dict(self.versions),
            "caches": {name: str(path) for name, path in self.caches.items()},
        }


def examine(remeasure: bool = False) -> Findings:
    """Measures the devices, unless their figures are there already, and looks at the rest."""
    devices = measure_devices(remeasure=remeasure)
    free = {device.name: free_memory(device.name) for device in devices if device.name != "cpu"}
    machine = Machine(usable_cores(), torch.get_num_threads(), instruction_set(), free)
    constants = huggingface_hub.constants
    caches = {
        "figures of devices": figures_file(),
        "plans": Path(constants.HF_ASSETS_CACHE).expanduser() / "hf_sparse",
        "models": Path(constants.HF_HUB_CACHE).expanduser(),
    }
    return Findings(devices, tuple(limits(devices, machine)), dict(_versions(PACKAGES)), caches)


def limits(devices: Sequence[DeviceFigures], machine: Machine) -> Iterable[str]:
    """One line for each thing that limits decoding. The last of `devices` is the CPU."""
    *gpus, cpu = devices
    size = _model_bytes()
    for device in devices:
        speed = device.bandwidth()
        where = "CPU" if device is cpu else device.name
        read = "4-bit weights are read" if device.kernel_bandwidths else "memory is read"
        part = "" if size <= device.memory else f", but its {format_bytes(device.memory)} hold only a part of one"
        yield (
            f"{where}: {read} at {speed / 1e9:.1f} GB/s: a 7B model in 4 bits ({size / 1e9:.1f} GB) decodes at most at "
            f"{speed / size:.1f} tokens/s{part}"
        )
        if device.assumed:
            yield f"{where}: could not be measured and is assumed: {', '.join(device.assumed)}"
    if not gpus:
        yield "No CUDA device that works: all neurons are computed on the CPU"
    for gpu in gpus:
        free = machine.free.get(gpu.name)
        if free is None:
            yield f"{gpu.name}: does not say how much of its memory is free"
        elif free < BUSY * gpu.memory:
            yield (
                f"{gpu.name}: {format_bytes(free)} of {format_bytes(gpu.memory)} are free: other work takes the rest, "
                "and neurons that would fit stay on the CPU"
            )
        if gpu.copy_to_bandwidth < cpu.bandwidth():
            yield (
                f"{gpu.name}: weights are copied to it at {gpu.copy_to_bandwidth / 1e9:.1f} GB/s, slower than the CPU "
                f"reads them itself ({cpu.bandwidth() / 1e9:.1f} GB/s): cold neurons are better computed on the CPU"
            )
    if machine.cores < FEW_CORES:
        yield f"CPU: {machine.cores} core{'s' * (machine.cores != 1)}: prompts and calibration take long"
    if machine.threads < machine.cores:
        yield (
            f"CPU: torch uses {machine.threads} of {machine.cores} cores: set OMP_NUM_THREADS, or call "
            "torch.set_num_threads, to use all"
        )
    if machine.instruction_set == "torch":
        yield "CPU: the kernels are not in use, slow PyTorch operators stand in: reinstall with a C++17 compiler"
    elif not machine.instruction_set.startswith(FAST_SETS):
        yield (
            f"CPU: kernels use {machine.instruction_set}, without AVX-512 or AMX: computing may bind before memory does"
        )


def device_table(devices: Sequence[DeviceFigures]) -> Table:
    """A column for each device. An asterisk marks what is assumed because its probe failed."""
    caption = "* assumed: could not be measured" if any(device.assumed for device in devices) else None
    table = Table(title="Devices", caption=caption)
    table.add_column("")
    for device in devices:
        table.add_column(device.name, justify="right")

    def add(heading: str, figure: str, cells: Iterable[str]) -> None:
        marked = (cell + " *" * (figure in device.assumed) for device, cell in zip(devices, cells, strict=True))
        table.add_row(heading, *marked)

    add("model", "model", (device.model for device in devices))
    add("memory", "memory", (format_bytes(device.memory) for device in devices))
    add("plain reads, GB/s", "bandwidths", (_speeds(device.bandwidths) for device in devices))
    for weights in WEIGHTS:
        cells = [_speeds(device.kernel_bandwidths.get(weights, ())) for device in devices]
        if any(cells):
            add(f"{weights} weights, GB/s", "kernel_bandwidths", cells)
    for heading, figure, unit in (
        ("fixed cost of a block, us", "launch_seconds", 1e-6),
        ("hand over and back, us", "sync_seconds", 1e-6),
        ("latency of a copy, us", "copy_latency", 1e-6),
        ("copies to it, GB/s", "copy_to_bandwidth", 1e9),
        ("copies from it, GB/s", "copy_from_bandwidth", 1e9),
        ("bf16 products, TFLOP/s", "flops", 1e12),
    ):
        add(heading, figure, (f"{getattr(device, figure) / unit:,.4g}" for device in devices))
    return table


def _speeds(points: Iterable[tuple[int, float]]) -> str:
    return "\n".join(f"{speed / 1e9:.1f} of {format_bytes(size)}" for size, speed in points)


def _model_bytes() -> float:
    """Of EXAMPLE_WEIGHTS in 4 bits, scales included."""
    return EXAMPLE_WEIGHTS * NeuronMatrix.row_nbytes(COLUMNS, FORMATS["4-bit"][0], GROUP_SIZE) / COLUMNS


def _versions(packages: Iterable[str]) -> Iterable[tuple[str, str | None]]:
    for package in packages:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, None
