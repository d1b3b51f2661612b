"""Where plans lie, who may write them, and the placements solved from them.

Beside a plan lies `placements/`, one small safetensors file for each choice of tiers, its figures as JSON in the
header. A placement is checked like a plan, and one that is damaged is solved anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import torch
from filelock import FileLock, Timeout
from safetensors.torch import save
from torch import Tensor

from hf_sparse.modeling import BlockId, Placement, Tier

from .cost_model import PlacementBlock
from .log import logger, warn_once
from .placement import Solution
from .plan import (
    PLAN_JSON,
    JsonReader,
    PlacementPlan,
    PlanError,
    PlanKey,
    canonical_json,
    check_tensor,
    parse_json,
    parse_tensors,
    read_file,
    take,
)

PLAN_FOLDER = "hf_sparse_plan"
_FORMAT_VERSION = 2
_FIGURES = ("value", "bound", "gap", "seconds", "token_seconds", "fast_impact")
_TEXTS = ("goal", "status", "solver")


def plan_directory(
    checkpoint_directory: Path, *, local: bool, key: PlanKey, repo_id: str | None, revision_hash: str | None
) -> Path:
    """Where the plan for `key` belongs; creates nothing.

    A local checkpoint has it beside its weights, in `hf_sparse_plan/<settings>`, where that folder can be written or
    holds it already. Otherwise (a Hub snapshot, weights in an installed package, a read-only folder) it belongs to the
    assets cache of huggingface_hub, where `cached_assets_path("hf_sparse", namespace, subfolder)` points, by checkpoint
    fingerprint.
    """
    readable = [key.quantization.get("weight_dtype", "unquantized")]
    if "group_size" in key.quantization:
        readable.append(f"g{key.quantization['group_size']}")
    if "compute_dtype" in key.quantization:
        readable.append(key.quantization["compute_dtype"])
    digest = hashlib.sha256(canonical_json([key.quantization, key.calibration]).encode()).hexdigest()
    settings = _as_file_name("-".join([*map(str, readable), digest[:8]]))
    if local:
        beside = Path(checkpoint_directory) / PLAN_FOLDER / settings
        if (beside / PLAN_JSON).is_file():
            return beside
        installed = {"site-packages", "dist-packages"} & set(Path(checkpoint_directory).resolve().parts)
        if not installed and os.access(checkpoint_directory, os.W_OK):
            return beside
    # Not cached_assets_path itself: it creates the folder, and raises where it cannot.
    cache = Path(huggingface_hub.constants.HF_ASSETS_CACHE).expanduser() / "hf_sparse"
    return (
        cache
        / _as_file_name(repo_id or "local")
        / _as_file_name(revision_hash or "default")
        / key.checkpoint[:16]
        / settings
    )


def _as_file_name(text: str) -> str:
    return re.sub(r"[^\w.-]", "--", text).lstrip(".") or "default"


@contextmanager
def plan_lock(directory: Path, what: str = "plan") -> Iterator[None]:
    """Held while a plan (or `what`) is looked for and calibrated: of two processes that load at once the second waits
    and finds it. Where no lock file can be written a warning says so once, and nothing is locked.
    """
    lock = FileLock(directory.with_name(f"{directory.name}.lock"))
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=1)
        except Timeout:
            logger.info("Another process is making the %s in %s: waiting for it", what, directory)
            lock.acquire()
    except (OSError, NotImplementedError) as error:
        warn_once(
            f"{directory}: no lock file can be written there ({error}); processes that load at once will each calibrate"
        )
    try:
        yield
    finally:
        lock.release()


def save_or_warn(plan: PlacementPlan, directory: Path) -> bool:
    """Saves `plan`, or warns once where the directory cannot be written. Returns whether it was saved."""
    return _written(lambda: plan.save_pretrained(directory), directory, "plan", "the next load calibrates again")


def keep_aside(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str], what: str) -> None:
    """Writes what a calibration has so far, for one that is killed. Where that cannot be done, warns once."""
    packed = save(tensors, metadata)
    _written(lambda: _replace(file, packed), file.parent, what, "a calibration that is killed begins anew")


def _replace(file: Path, contents: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=file.parent) as aside:
        Path(aside, file.name).write_bytes(contents)
        Path(aside, file.name).replace(file)


def _written(write: Callable[[], None], directory: Path, what: str, consequence: str) -> bool:
    try:
        write()
    except OSError as error:
        warn_once(f"{directory}: the {what} could not be saved ({error}); {consequence}")
        return False
    return True


# Placements solved from a plan


def placement_key(blocks: Sequence[PlacementBlock], tiers: Sequence[Tier], resident_bytes: int) -> str:
    """A sha256 of everything a placement depends on: profile and sizes of the blocks, the tiers, what is resident.
    Bandwidths and synchronisation costs count to two digits, for they are measured anew by each process.
    """
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(f"{block.id} {block.bytes_per_neuron} {block.neurons} {block.shared_bytes};".encode())
        digest.update(torch.cat((block.impact, block.read_bytes)).numpy().tobytes())
    for tier in tiers:
        speeds = (tier.bandwidth, tier.sync_seconds, tier.launch_seconds)
        figures = " ".join(f"{figure:.1e}" for figure in speeds)
        digest.update(f"{tier.name} {tier.device} {tier.budget} {figures};".encode())
    digest.update(str(resident_bytes).encode())
    return digest.hexdigest()


def _placement_file(directory: Path, key: str) -> Path:
    return directory / "placements" / f"{key[:32]}.safetensors"


def save_placement(directory: Path, key: str, solution: Solution) -> bool:
    """Keeps `solution` for `load_placement(directory, key, ...)`. Where that cannot be written, warns once and returns
    False.
    """
    path = _placement_file(directory, key)
    figures = {name: getattr(solution, name) for name in (*_FIGURES, *_TEXTS)}
    fields = {
        **figures,
        "greedy_value": solution.greedy_value,
        "format_version": _FORMAT_VERSION,
        "key": key,
        "tiers": [tier.name for tier in solution.placement.tiers],
    }
    tensors = {str(id): tier_of.to(torch.uint8) for id, tier_of in solution.placement.assignment.items()}
    packed = save(tensors, {"placement": json.dumps(fields, allow_nan=False)})

    return _written(lambda: _replace(path, packed), directory, "placement", "the next load solves it again")


def load_placement(directory: Path, key: str, tiers: Sequence[Tier], neurons: Mapping[BlockId, int]) -> Solution | None:
    """The solution kept for `key`, on `tiers`, for a model with `neurons` by block; None where there is none. A damaged
    one is reported with the field that is wrong, and None comes back.
    """
    path = _placement_file(directory, key)
    if not path.is_file():
        return None
    try:
        return _read_placement(path, key, tuple(tiers), neurons)
    except PlanError as error:
        logger.warning("A saved placement is not used: %s", error)
        return None


def _read_placement(path: Path, key: str, tiers: tuple[Tier, ...], neurons: Mapping[BlockId, int]) -> Solution:
    tensors, metadata = parse_tensors(read_file(path), path)
    read = JsonReader(path, parse_json(metadata.get("placement", ""), path))
    for name, expected in (("format_version", _FORMAT_VERSION), ("key", key), ("tiers", [tier.name for tier in tiers])):
        if (got := read.value(name, type(expected))) != expected:
            raise PlanError(path, name, got, repr(expected))
    figures = {name: read.value(name, float) for name in _FIGURES} | {name: read.value(name, str) for name in _TEXTS}
    greedy = read.fields.get("greedy_value")
    if greedy is not None:
        greedy = read.value("greedy_value", float)
    assignment = {}
    for id, count in neurons.items():
        tier_of = check_tensor(take(tensors, path, str(id)), (torch.uint8,), [count], path, str(id))
        if int(tier_of.max()) >= len(tiers):
            raise PlanError(path, str(id), f"tier {int(tier_of.max())}", f"positions in 0..{len(tiers) - 1}")
        assignment[id] = tier_of.long()
    if tensors:
        raise PlanError(path, sorted(tensors)[0], "a tensor of that name", "only blocks that the model has")
    return Solution(placement=Placement(tiers, assignment), greedy_value=greedy, **figures)
