"""Devices that are not in this machine, by published figures: devices.json, and a file of the user's of the same form.

The file is {"format_version": 1, "devices": [...]}, a device an object with `model`, `kind` ("gpu" or "cpu"),
`memory_gib`, `bandwidth_gb_s` (10**9 bytes per second), `tflops` (10**12 per second, of dense products of bfloat16 or,
where tensor cores know no such, float16 matrices that are summed in float32; of a CPU at its base clock; of a GPU
without tensor cores in float32), `copy_gb_s` (one way between host memory and a GPU; on a CPU from one place to
another: half the bandwidth), and, where they are known, `launch_us` and `sync_us`. What a program reaches of such peaks
is less.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from .hardware import CONSERVATIVE, FORMAT_VERSION, DeviceFigures
from .probes import LARGE

VARIABLE = "HF_SPARSE_DEVICES"
_NUMBERS = ("memory_gib", "bandwidth_gb_s", "tflops", "copy_gb_s")
_OPTIONAL = {"launch_us": "launch_seconds", "sync_us": "sync_seconds"}
_TYPICAL = {"cpu": {"launch_seconds": 3e-5}, "gpu": {"launch_seconds": 1e-4, "sync_seconds": 3e-5}}


def known_devices(extra: str | os.PathLike[str] | None = None) -> dict[str, DeviceFigures]:
    """By model. Devices of the file that the environment variable HF_SPARSE_DEVICES names, then those of `extra`, come
    in addition, or in place of one with the same model.

    Raises OSError for a file that cannot be read and ValueError for one that is not of the form, naming file and field.
    """
    shipped = resources.files("hf_sparse").joinpath("devices.json")
    found = _parse(shipped.read_text(encoding="utf-8"), "devices.json")
    for path in (os.environ.get(VARIABLE), extra):
        if path:
            own = _parse(Path(path).read_text(encoding="utf-8"), os.fspath(path))
            replaced = {model.lower() for model in own}
            found = {model: each for model, each in found.items() if model.lower() not in replaced} | own
    return found


def known_device(name: str, extra: str | os.PathLike[str] | None = None) -> DeviceFigures:
    """The device whose model has `name` in it, in any case. Of several the one that ends with it: "RTX 4090" is no
    "RTX 4090 Laptop GPU".

    Raises ValueError, with the models that are near, where that is none or more than one; and what `known_devices`
    raises.
    """
    devices = known_devices(extra)
    wanted = " ".join(name.lower().split())
    found = [model for model in devices if wanted and wanted in model.lower()]
    ending = [model for model in found if f" {model.lower()}".endswith(f" {wanted}")]
    if not found and (close := _letters(name)):  # "rtx4090"
        found = [model for model in devices if close in _letters(model)]
        ending = [model for model in found if _letters(model).endswith(close)]
    for choice in (found, ending):
        if len(choice) == 1:
            return devices[choice[0]]
    if found:
        raise ValueError(f"device: {name!r} may be any of {_listed(found)}; give more of the name")
    raise ValueError(
        f"device: got {name!r}, near to it are {_listed(_near(wanted, devices))}; others may be given in a file that "
        f"the environment variable {VARIABLE} names"
    )


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


def _near(wanted: str, models: Iterable[str], count: int = 6) -> list[str]:
    def likeness(model: str) -> float:
        words = model.lower().split()
        whole = difflib.SequenceMatcher(None, wanted, model.lower()).ratio()
        return whole + sum(1.0 for word in wanted.split() if any(word in other for other in words))

    return sorted(models, key=likeness, reverse=True)[:count]


def _listed(models: Iterable[str]) -> str:
    return ", ".join(map(repr, models))


def _parse(text: str, where: str) -> dict[str, DeviceFigures]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(fields, dict) or fields.keys() != {"format_version", "devices"}:
        got = sorted(fields) if isinstance(fields, dict) else fields
        raise ValueError(f"{where}: got {got!r:.100}, expected an object with format_version and devices")
    if fields["format_version"] != FORMAT_VERSION:
        raise ValueError(f"{where}: format_version: got {fields['format_version']!r}, expected {FORMAT_VERSION}")
    if not isinstance(fields["devices"], list):
        raise ValueError(f"{where}: devices: got {fields['devices']!r:.100}, expected a list")
    found: dict[str, DeviceFigures] = {}
    for position, device in enumerate(fields["devices"]):
        at = f"{where}: devices[{position}]"
        figures = _figures(device, at)
        if figures.model.lower() in map(str.lower, found):
            raise ValueError(f"{at}.model: {figures.model!r} comes twice")
        found[figures.model] = figures
    return found


def _figures(device: Any, at: str) -> DeviceFigures:
    required = ("model", "kind", *_NUMBERS)
    if not isinstance(device, dict):
        raise ValueError(f"{at}: got {device!r:.100}, expected an object")
    if missing := [name for name in required if name not in device]:
        raise ValueError(f"{at}.{missing[0]}: is missing")
    if unknown := sorted(device.keys() - {*required, *_OPTIONAL}):
        raise ValueError(f"{at}.{unknown[0]}: is unknown, allowed are {', '.join((*required, *_OPTIONAL))}")
    model, kind = device["model"], device["kind"]
    if not isinstance(model, str) or not model.strip():
        raise ValueError(f"{at}.model: got {model!r}, expected a text")
    if kind not in ("gpu", "cpu"):
        raise ValueError(f"{at}.kind: got {kind!r}, expected 'gpu' or 'cpu'")
    for name in (*_NUMBERS, *(name for name in _OPTIONAL if name in device)):
        value = device[name]
        if type(value) not in (int, float) or not 0 < value < 1e9:
            raise ValueError(f"{at}.{name}: got {value!r}, expected a number > 0 and < 1e9")
    times = dict(_TYPICAL[kind])
    given = {figure: device[name] / 1e6 for name, figure in _OPTIONAL.items() if name in device}
    assumed = [figure for figure in times if figure not in given]
    if kind == "gpu":
        times["copy_latency"] = CONSERVATIVE["cuda"]["copy_latency"]
        assumed.append("copy_latency")
    return DeviceFigures(
        name="cpu" if kind == "cpu" else "cuda:0",
        model=" ".join(model.split()),
        memory=int(device["memory_gib"] * 2**30),
        bandwidths=((LARGE, device["bandwidth_gb_s"] * 1e9),),
        flops=device["tflops"] * 1e12,
        copy_to_bandwidth=device["copy_gb_s"] * 1e9,
        copy_from_bandwidth=device["copy_gb_s"] * 1e9,
        measured=False,
        assumed=tuple(assumed),
        **(times | given),
    )
