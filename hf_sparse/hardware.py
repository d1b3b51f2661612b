"""Which devices this machine has, how fast each is, and the tiers made of them.

Figures are measured once per machine (hf_sparse/probes.py) and kept as JSON beside the plans in the assets cache of
huggingface_hub, under a key of everything that they depend on.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import torch

from hf_sparse.modeling import Tier
from hf_sparse.quantization import instruction_set

from . import probes
from .config import parse_bytes
from .log import logger, warn_once

FORMAT_VERSION = 1
WEIGHTS = tuple(probes.FORMATS)
# What a probe that fails is replaced by: at the lower end of what is in use, so that a plan never counts on speed that
# is not there.
CONSERVATIVE: dict[str, dict[str, Any]] = {
    "cpu": {
        "bandwidths": ((probes.LARGE, 8e9),),
        "kernel_bandwidths": {},
        "launch_seconds": 5e-5,
        "flops": 2e10,
        "copy_to_bandwidth": 4e9,
    },
    "cuda": {
        "bandwidths": ((probes.LARGE, 200e9),),
        "launch_seconds": 5e-4,
        "sync_seconds": 1e-4,
        "copy_latency": 5e-5,
        "copy_to_bandwidth": 4e9,
        "copy_from_bandwidth": 4e9,
        "flops": 4e12,
    },
}
# A free budget is rounded down to this, so that the few megabytes that differ from run to run do not make another
# budget of it.
_BUDGET_STEP = 2**28


@dataclass(frozen=True)
class DeviceFigures:
    """A device and its speed. Sizes are in bytes, times in seconds, the rest is per second.

    `name`: "cpu" or "cuda:0". `bandwidths`: of plain reads, (bytes of the working set, bytes per second), the smallest
    set first. `kernel_bandwidths`: the like by format of weights (WEIGHTS), read as decoding reads them, without the
    cost of a call; empty where it was not measured. `launch_seconds`: what a block's part costs however little it
    reads. `sync_seconds`: a hidden state of 4096 bfloat16 numbers there and the result back. `copy_latency`: of any
    copy from host memory. `copy_to_bandwidth`, `copy_from_bandwidth`: from pinned host memory and back; on the CPU from
    one place to another. `flops`: of a dense product of bfloat16 matrices, 2 m n k per [m, k] by [k, n]. `measured`: on
    this machine, not published. `assumed`: the names of figures that are neither.

    Raises ValueError naming the field that is not as said.
    """

    name: str
    model: str
    memory: int
    bandwidths: probes.Bandwidths
    launch_seconds: float
    flops: float
    copy_to_bandwidth: float
    copy_from_bandwidth: float
    sync_seconds: float = 0.0
    copy_latency: float = 0.0
    kernel_bandwidths: Mapping[str, probes.Bandwidths] = field(default_factory=dict)
    measured: bool = True
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("name", "model"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise ValueError(f"{name}: got {value!r}, expected a text")
        if type(self.memory) is not int or self.memory <= 0:
            raise ValueError(f"memory: got {self.memory!r}, expected a number of bytes > 0")
        if type(self.measured) is not bool:
            raise ValueError(f"measured: got {self.measured!r}, expected true or false")
        for name in ("flops", "copy_to_bandwidth", "copy_from_bandwidth"):
            if not _is_number(value := getattr(self, name)) or value <= 0:
                raise ValueError(f"{name}: got {value!r}, expected a number > 0")
        for name in ("launch_seconds", "sync_seconds", "copy_latency"):
            if not _is_number(value := getattr(self, name)) or value < 0:
                raise ValueError(f"{name}: got {value!r}, expected a number of seconds >= 0")
        _check_bandwidths("bandwidths", self.bandwidths)
        if not isinstance(self.kernel_bandwidths, Mapping) or not set(self.kernel_bandwidths) <= set(WEIGHTS):
            raise ValueError(f"kernel_bandwidths: got {self.kernel_bandwidths!r}, expected bandwidths by {WEIGHTS}")
        for weights, bandwidths in self.kernel_bandwidths.items():
            _check_bandwidths(f"kernel_bandwidths[{weights!r}]", bandwidths)
        figures = {each.name for each in dataclasses.fields(self)}
        if not isinstance(self.assumed, tuple) or not all(name in figures for name in self.assumed):
            raise ValueError(f"assumed: got {self.assumed!r}, expected names of figures")

    def bandwidth(self, nbytes: int | None = None, weights: str = "4-bit") -> float:
        """Bytes per second at which weights of this format, `nbytes` in all, are read again and again; None: as many as
        were measured at most. Linear in the logarithm of the size between the sizes measured, constant beyond.

        Raises ValueError for a format that is none and for nbytes < 1.
        """
        if weights not in WEIGHTS:
            raise ValueError(f"weights: got {weights!r}, allowed are {', '.join(map(repr, WEIGHTS))}")
        points = self.kernel_bandwidths.get(weights, self.bandwidths)
        if nbytes is None:
            return points[-1][1]
        if nbytes < 1:
            raise ValueError(f"nbytes: got {nbytes!r}, expected at least 1")
        below, slow = points[0]
        for size, speed in points:
            if nbytes <= size:
                part = math.log(nbytes / below) / math.log(size / below) if size > below else 1.0
                return slow + part * (speed - slow)
            below, slow = size, speed
        return slow

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: object) -> DeviceFigures:
        """The inverse of `to_dict`. Raises ValueError naming a field that is missing, unknown or not as it should
        be.
        """
        if not isinstance(fields, dict):
            raise ValueError(f"got {fields!r:.100}, expected an object")
        names = {each.name for each in dataclasses.fields(cls)}
        if names != fields.keys():
            name = min(names ^ fields.keys())
            raise ValueError(f"{name}: {'is missing' if name in names else 'is unknown'}")
        lists = {name: _as_tuple(fields[name]) for name in ("bandwidths", "assumed")}
        kernels = fields["kernel_bandwidths"]
        if isinstance(kernels, dict):
            kernels = {weights: _as_tuple(points) for weights, points in kernels.items()}
        return cls(**{**fields, **lists, "kernel_bandwidths": kernels})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _as_tuple(value: object) -> object:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _check_bandwidths(name: str, points: object) -> None:
    pairs = points if isinstance(points, tuple) else ()
    if not pairs or not all(
        isinstance(pair, tuple) and len(pair) == 2 and all(map(_is_number, pair)) for pair in pairs
    ):
        raise ValueError(f"{name}: got {points!r:.100}, expected pairs of bytes and bytes per second, at least one")
    sizes, speeds = zip(*pairs, strict=True)
    if sizes[0] <= 0 or list(sizes) != sorted(set(sizes)) or min(speeds) <= 0:
        raise ValueError(f"{name}: got {points!r:.100}, expected ascending sizes and speeds > 0")


# Measured once per machine


def measure_devices(*, remeasure: bool = False) -> tuple[DeviceFigures, ...]:
    """The figures of every CUDA device, in order, then of the CPU: those kept from an earlier measuring on this
    machine, unless `remeasure` is set. A CUDA device that answers nothing is left out, which is said once.
    """
    path = figures_file()
    found = None if remeasure else _unsaved.get(path) or _load(path)
    if found is None:
        gpus = [figures for index in range(device_count()) if (figures := _measure_gpu(index)) is not None]
        found = (*gpus, _measure("cpu", probes.cpu_model(), probes.host_memory(), probes.CPU_PROBES))
        _save(path, found)
    return found


_unsaved: dict[Path, tuple[DeviceFigures, ...]] = {}  # by the file that could not be written


def figures_file() -> Path:
    """Where this machine's figures are kept: HF_ASSETS_CACHE/hf_sparse/hardware/<key>.json. The key is a sha256 of what
    the figures depend on.
    """
    driver = Path("/proc/driver/nvidia/version")
    machine = {
        "cpu": probes.cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": instruction_set(),
        "memory": probes.host_memory(),
        "torch": torch.__version__,
        "gpus": [_identity(index) for index in range(device_count())],
        "driver": driver.read_text().partition("\n")[0] if driver.is_file() else None,
    }
    key = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()
    return Path(huggingface_hub.constants.HF_ASSETS_CACHE).expanduser() / "hf_sparse" / "hardware" / f"{key}.json"


def device_count() -> int:
    """Number of CUDA devices, 0 where CUDA does not work."""
    try:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    except RuntimeError as error:
        warn_once(f"CUDA devices cannot be counted ({error}): the CPU alone is used")
        return 0


def _identity(index: int) -> list[str]:
    try:
        properties = torch.cuda.get_device_properties(index)
    except RuntimeError as error:
        return [f"no answer: {type(error).__name__}"]
    return [properties.name, str(properties.uuid)]


def _measure_gpu(index: int) -> DeviceFigures | None:
    name = f"cuda:{index}"
    try:
        properties = torch.cuda.get_device_properties(index)
    except RuntimeError as error:
        warn_once(f"{name}: the device does not answer ({error}) and is not used")
        return None
    figures = _measure(name, properties.name, properties.total_memory, probes.GPU_PROBES)
    try:
        torch.cuda.empty_cache()  # what the probes held is free for the model
    except RuntimeError:
        pass  # a device so broken has failed its probes, which was said
    return figures


def _measure(name: str, model: str, memory: int, work: probes.Probes) -> DeviceFigures:
    """Runs the probes. One that fails is replaced by a conservative figure, which is said once."""
    device = torch.device(name)
    figures, assumed = {}, []
    for figure, probe in work.items():
        try:
            figures[figure] = probe(device)
        except (RuntimeError, MemoryError, OSError) as error:  # out of memory, or a driver that fails
            figures[figure] = value = CONSERVATIVE[device.type][figure]
            assumed.append(figure)
            reason = str(error).partition("\n")[0] or type(error).__name__
            warn_once(f"{name}: {figure} could not be measured ({reason}), counting on {_readable(value)}")
    figures.setdefault("copy_from_bandwidth", figures["copy_to_bandwidth"])
    return DeviceFigures(name=name, model=model, memory=memory, assumed=tuple(assumed), **figures)


def _readable(value: Any) -> str:
    if value == {}:
        return "plain reads"
    return f"{value[0][1]:g} bytes per second" if isinstance(value, tuple) else f"{value:g}"


def _load(path: Path) -> tuple[DeviceFigures, ...] | None:
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(fields, dict) or fields.get("format_version") != FORMAT_VERSION:
            version = fields.get("format_version") if isinstance(fields, dict) else None
            raise ValueError(f"format_version: got {version!r}, expected {FORMAT_VERSION}")
        devices = fields.get("devices")
        if not isinstance(devices, list) or not devices:
            raise ValueError(f"devices: got {devices!r:.100}, expected a list of at least one")
        found = []
        for position, device in enumerate(devices):
            try:
                found.append(DeviceFigures.from_dict(device))
            except (ValueError, OverflowError) as error:
                raise ValueError(f"devices[{position}].{error}") from error
        if found[-1].name != "cpu":
            raise ValueError(f"devices[{len(found) - 1}].name: got {found[-1].name!r}, expected 'cpu'")
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("The figures in %s are not used, the devices are measured anew: %s", path, error)
        return None
    return tuple(found)


def _save(path: Path, found: tuple[DeviceFigures, ...]) -> None:
    text = json.dumps({"format_version": FORMAT_VERSION, "devices": [each.to_dict() for each in found]}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as aside:
            file = Path(aside, path.name)
            file.write_text(text + "\n", encoding="utf-8")
            file.replace(path)
        _unsaved.pop(path, None)
    except OSError as error:
        _unsaved[path] = found
        warn_once(f"{path.parent}: the devices' figures could not be saved ({error}); each process measures them anew")


# Tiers


def find_tiers(
    gpu_budget: int | str | Mapping[str, int | str] | None, weights: str = "4-bit", nbytes: int | None = None
) -> tuple[Tier, ...]:
    """The CUDA devices that `gpu_budget` asks for, in its order, then the CPU, with their figures as measured, for
    weights of this format, `nbytes` of them in all (see `DeviceFigures.bandwidth`).

    None: 90% of the free memory of cuda:0, if there is one. A plain budget is for cuda:0; a mapping names devices
    ("cuda:1"). A percentage is of the device's total memory, and a device with a budget of 0 is left out. Without a GPU
    a budget is checked, a warning says once that all neurons stay on the CPU, and the CPU is the only tier. A warning
    also says once where a budget is more than is free now.

    Raises ValueError for a budget that is none, for one larger than its device, and for a device that is not there.
    """
    count = device_count()
    if count == 0:
        budgets = {} if gpu_budget is None else _budgets(gpu_budget, lambda index: None)
        if any(budgets.values()):
            warn_once("gpu_budget: this machine has no CUDA device, all neurons stay on the CPU")
    elif gpu_budget is None:
        budgets = {0: _most_of_what_is_free()}
    else:
        budgets = _budgets(gpu_budget, functools.partial(_total_memory, count=count))
    figures = {each.name: each for each in measure_devices()}
    tiers = []
    for name, budget in [*((f"cuda:{index}", budget) for index, budget in budgets.items()), ("cpu", None)]:
        if budget == 0 or name not in figures:
            continue
        if gpu_budget is not None and budget is not None:
            _check_free(name, budget)
        of = figures[name]
        tiers.append(
            Tier(
                name,
                torch.device(name),
                budget,
                of.bandwidth(nbytes, weights),
                of.sync_seconds,
                of.launch_seconds,
                of.flops,
                of.copy_to_bandwidth,
            )
        )
    return tuple(tiers)


def free_memory(name: str) -> int | None:
    """Bytes that are free now on a CUDA device; None, said once, where it does not answer."""
    try:
        return torch.cuda.mem_get_info(torch.device(name).index)[0]
    except RuntimeError as error:
        warn_once(f"{name}: how much memory is free cannot be read ({error})")
        return None


def _most_of_what_is_free() -> int:
    free = free_memory("cuda:0")
    if free is None:
        warn_once("cuda:0: no neurons are placed on it; give gpu_budget to use it all the same")
        return 0
    return free * 9 // 10 // _BUDGET_STEP * _BUDGET_STEP


def _check_free(name: str, budget: int) -> None:
    free = free_memory(name)
    if free is not None and budget > free:
        warn_busy(name, budget)


@functools.cache
def warn_busy(name: str, budget: int) -> None:
    """Warns once per device and budget, whatever the free memory by then."""
    logger.warning(
        "gpu_budget: %d bytes are asked of %s, but only %s bytes of it are free now: it is likely to run out of memory",
        budget,
        name,
        free_memory(name),
    )


def _total_memory(index: int, count: int) -> int | None:
    if index >= count:
        present = ", ".join(f"cuda:{i}" for i in range(count))
        raise ValueError(f"gpu_budget: there is no device 'cuda:{index}', allowed are {present}")
    try:
        return torch.cuda.get_device_properties(index).total_memory
    except RuntimeError:
        return None  # measure_devices says so


def _budgets(
    gpu_budget: int | str | Mapping[str, int | str], total_memory: Callable[[int], int | None]
) -> dict[int, int]:
    """Bytes by device index. `total_memory` gives a device's bytes, None where they are not known and nothing is too
    large.
    """
    wanted = gpu_budget if isinstance(gpu_budget, Mapping) else {"cuda:0": gpu_budget}
    if not wanted:
        raise ValueError(
            "gpu_budget: got an empty mapping, expected devices and their budgets such as {'cuda:0': '8GB'}"
        )
    budgets: dict[int, int] = {}
    for device, value in wanted.items():
        parts = re.fullmatch(r"cuda(?::([0-9]{1,4}))?", device) if isinstance(device, str) else None
        if parts is None:
            raise ValueError(f"gpu_budget: got device {device!r}, expected CUDA devices such as 'cuda:0'")
        index = int(parts[1] or 0)
        if index in budgets:
            raise ValueError(f"gpu_budget: device 'cuda:{index}' comes twice in {list(wanted)}")
        name = f"gpu_budget[{device!r}]" if isinstance(gpu_budget, Mapping) else "gpu_budget"
        total = total_memory(index)
        # Without a device any total does: only whether the percentage is one is asked.
        budgets[index] = parse_bytes(value, total=100 if total is None else total, name=name)
        if total is not None and budgets[index] > total:
            raise ValueError(
                f"{name}: got {value!r} = {budgets[index]} bytes, but cuda:{index} has {total} bytes in all"
            )
    return budgets
