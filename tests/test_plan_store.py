"""Where plans lie, the lock between processes, and the placements kept beside a plan."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_sparse.log import warn_once
from hf_sparse.modeling import BlockId, SkipRule, Tier
from hf_sparse.placement import PlacementBlock, Solution, solve_placement
from hf_sparse.plan import BlockProfile, PlacementPlan, PlanKey
from hf_sparse.plan_store import (
    load_placement,
    placement_key,
    plan_directory,
    plan_lock,
    save_or_warn,
    save_placement,
)

KEY = PlanKey("0123456789abcdef" * 4, {"weight_dtype": "nf4", "group_size": 64, "compute_dtype": "int8"}, {"tokens": 9})
MLP, HEADS = BlockId(0, "mlp"), BlockId(3, "attention")
NEURONS = {MLP: 11, HEADS: 5}
TIERS = (Tier("a", budget=700, bandwidth=2e12), Tier("b", budget=300, bandwidth=1e12), Tier("cpu", bandwidth=2e10))


@pytest.fixture(autouse=True)
def _fresh_warnings():
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


@pytest.fixture(autouse=True)
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    return tmp_path / "assets"


def make_plan() -> PlacementPlan:
    profile = BlockProfile(torch.ones(7), torch.ones(7))
    return PlacementPlan(KEY, "llama", {MLP: profile}, {MLP: SkipRule("exact")}, {}, {}, "0.1.0")


# Directories


def test_beside_a_local_checkpoint(tmp_path: Path) -> None:
    found = plan_directory(tmp_path, local=True, key=KEY, repo_id=None, revision_hash=None)
    assert found.parent == tmp_path / "hf_sparse_plan"
    assert found.name.startswith("nf4-g64-int8-")
    assert len(found.name) == len("nf4-g64-int8-") + 8
    assert list(tmp_path.iterdir()) == []


def test_settings_choose_the_directory_and_the_fingerprint_does_not(tmp_path: Path) -> None:
    def name(key: PlanKey) -> Path:
        return plan_directory(tmp_path, local=True, key=key, repo_id=None, revision_hash=None)

    assert name(replace(KEY, calibration={"tokens": 10})) != name(KEY)
    assert name(replace(KEY, quantization={**KEY.quantization, "group_size": 32})) != name(KEY)
    assert name(replace(KEY, quantization={})).name.startswith("unquantized-")
    assert name(replace(KEY, checkpoint="f" * 64)) == name(KEY)


def test_hub_snapshots_have_it_in_the_assets_cache(tmp_path: Path, assets: Path) -> None:
    arguments = {"local": False, "key": KEY, "repo_id": "org/some model", "revision_hash": "c0ffee"}
    found = plan_directory(tmp_path, **arguments)
    assert not assets.exists()
    of_hub = huggingface_hub.cached_assets_path("hf_sparse", "org/some model", "c0ffee", assets_dir=assets)
    assert found.relative_to(of_hub).parts[0] == KEY.checkpoint[:16]
    assert plan_directory(tmp_path, **{**arguments, "key": replace(KEY, checkpoint="f" * 64)}) != found


@pytest.mark.parametrize("repo_id", ["../../etc", "..", "/", "a\\b"])
def test_no_name_leaves_the_cache(tmp_path: Path, assets: Path, repo_id: str) -> None:
    found = plan_directory(tmp_path, local=False, key=KEY, repo_id=repo_id, revision_hash="../..")
    assert ".." not in found.parts
    assert len(found.relative_to(assets).parts) == 5


def test_installed_and_read_only_checkpoints_use_the_cache(tmp_path: Path, assets: Path, monkeypatch) -> None:
    installed = tmp_path / "lib" / "site-packages" / "weights"
    installed.mkdir(parents=True)
    arguments = {"local": True, "key": KEY, "repo_id": None, "revision_hash": None}
    assert assets in plan_directory(installed, **arguments).parents
    beside = plan_directory(tmp_path, **arguments)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert assets in plan_directory(tmp_path, **arguments).parents
    make_plan().save_pretrained(beside)  # a plan that came with the weights is used, writable or not
    assert plan_directory(tmp_path, **arguments) == beside


# Saving where nothing can be written


def test_an_unwritable_directory_is_said_once(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("in the way")
    directory = tmp_path / "file" / "plan"
    for _ in range(2):
        assert not save_or_warn(make_plan(), directory)
    assert len(caplog.records) == 1
    assert "could not be saved" in caplog.text
    assert not save_placement(directory, "0" * 64, solution())
    assert len(caplog.records) == 2
    with plan_lock(directory):
        assert len(caplog.records) == 3
    assert "no lock file" in caplog.text
    assert load_placement(directory, "0" * 64, TIERS, NEURONS) is None
    assert save_or_warn(make_plan(), tmp_path / "free")
    assert len(caplog.records) == 3


def test_an_interrupted_save_leaves_the_old_plan(tmp_path: Path, monkeypatch) -> None:
    make_plan().save_pretrained(tmp_path / "plan")
    monkeypatch.setattr(Path, "write_text", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("disk full")))
    assert not save_or_warn(replace(make_plan(), model_type="opt"), tmp_path / "plan")
    assert PlacementPlan.from_pretrained(tmp_path / "plan").model_type == "llama"
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]


# The lock

LOADER = """
import sys, time
from pathlib import Path
from hf_sparse.plan_store import plan_lock
directory = Path(sys.argv[1])
with plan_lock(directory):
    if (directory / "plan.json").is_file():
        print("found")
    else:
        print("calibrating")
        time.sleep(0.5)
        directory.mkdir()
        (directory / "plan.json").touch()
"""
HOLDER = """
import sys, time
from pathlib import Path
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(1.5)
    Path(sys.argv[2]).touch()
"""


def test_two_processes_calibrate_once(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", LOADER, str(tmp_path / "new" / "plan")]
    both = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(told) == ["calibrating\n", "found\n"]


def test_the_second_says_that_it_waits(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    arguments = [sys.executable, "-c", HOLDER, str(tmp_path / "plan.lock"), str(tmp_path / "done")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with plan_lock(tmp_path / "plan"):
            assert (tmp_path / "done").exists()
    assert caplog.text.count("waiting for it") == 1


def test_the_lock_is_free_again_after_an_error(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(KeyError), plan_lock(tmp_path / "plan"):
        raise KeyError
    with plan_lock(tmp_path / "plan"):
        pass
    assert not caplog.records


# Placements


def blocks(seed: int = 0, nbytes: int = 100) -> list[PlacementBlock]:
    g = torch.Generator().manual_seed(seed)
    return [
        PlacementBlock(id, nbytes, *(torch.rand(n, generator=g, dtype=torch.float64) for _ in range(2)))
        for id, n in NEURONS.items()
    ]


def solution() -> Solution:
    return solve_placement(blocks(), TIERS, 50)


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, str]:
    key = placement_key(blocks(), TIERS, 50)
    assert save_placement(tmp_path / "plan", key, solution())
    return tmp_path / "plan", key


def test_placement_round_trip(kept) -> None:
    directory, key = kept
    expected, found = solution(), load_placement(directory, key, TIERS, NEURONS)
    assert found.placement.tiers == TIERS
    for id, tier_of in expected.placement.assignment.items():
        assert set(tier_of.tolist()) <= {0, 1, 2}
        assert torch.equal(found.placement.assignment[id], tier_of)
    for name in ("status", "value", "bound", "gap", "greedy_value", "solver", "goal", "fast_impact", "token_seconds"):
        assert getattr(found, name) == getattr(expected, name)
    assert load_placement(directory, placement_key(blocks(), TIERS, 51), TIERS, NEURONS) is None
    assert [path.suffix for path in (directory / "placements").iterdir()] == [".safetensors"]


def test_placement_key_names_all_that_matters() -> None:
    a, b, cpu = TIERS
    keys = [
        placement_key(blocks(), TIERS, 50),
        placement_key(blocks(), TIERS, 51),
        placement_key(blocks(1), TIERS, 50),
        placement_key(blocks(nbytes=101), TIERS, 50),
        placement_key(blocks(), (a, cpu), 50),
        placement_key(blocks(), (b, a, cpu), 50),
        placement_key(blocks(), (replace(a, budget=701), b, cpu), 50),
        placement_key(blocks(), (replace(a, bandwidth=2.1e12), b, cpu), 50),
        placement_key(blocks(), (replace(a, sync_seconds=1e-5), b, cpu), 50),
    ]
    assert len(set(keys)) == len(keys)
    assert placement_key(blocks(), (replace(a, bandwidth=2.01e12), b, cpu), 50) == keys[0]


def _edit(path: Path, tensors=None, fields=None, metadata=True) -> None:
    stored = load_file(path)
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    content = json.loads(header["__metadata__"]["placement"])
    if tensors:
        tensors(stored)
    if fields:
        fields(content)
    save_file(stored, path, {"placement": json.dumps(content)} if metadata else None)


@pytest.mark.parametrize(
    ("field", "edit"),
    [
        ("0.mlp", {"tensors": lambda t: t.update({"0.mlp": torch.full((11,), 3, dtype=torch.uint8)})}),
        ("0.mlp", {"tensors": lambda t: t.update({"0.mlp": torch.zeros(11, dtype=torch.int64)})}),
        ("0.mlp", {"tensors": lambda t: t.update({"0.mlp": torch.zeros(12, dtype=torch.uint8)})}),
        ("3.attention", {"tensors": lambda t: t.pop("3.attention")}),
        ("4.mlp", {"tensors": lambda t: t.update({"4.mlp": torch.zeros(2, dtype=torch.uint8)})}),
        ("value", {"fields": lambda f: f.update(value="1.5")}),
        ("value", {"fields": lambda f: f.pop("value")}),
        ("file", {"fields": lambda f: f.update(gap=float("nan"))}),
        ("status", {"fields": lambda f: f.update(status=1)}),
        ("tiers", {"fields": lambda f: f.update(tiers=["a", "cpu"])}),
        ("key", {"fields": lambda f: f.update(key="0" * 64)}),
        ("format_version", {"fields": lambda f: f.update(format_version=3)}),
        ("file", {"metadata": False}),
    ],
)
def test_a_broken_placement_is_named_and_not_used(kept, caplog, field: str, edit) -> None:
    directory, key = kept
    (path,) = (directory / "placements").iterdir()
    _edit(path, **edit)
    assert load_placement(directory, key, TIERS, NEURONS) is None
    assert f"{path}: {field}: got " in caplog.text
    assert len(caplog.records) == 1


def test_a_truncated_placement(kept, caplog) -> None:
    directory, key = kept
    (path,) = (directory / "placements").iterdir()
    for length in (0, 5, 40, len(path.read_bytes()) - 1):
        path.write_bytes(path.read_bytes()[:length])
        assert load_placement(directory, key, TIERS, NEURONS) is None
    assert len(caplog.records) == 4
    assert save_placement(directory, key, solution())
    assert load_placement(directory, key, TIERS, NEURONS) is not None
