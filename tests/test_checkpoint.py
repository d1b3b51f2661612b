"""Safetensors and the Hub: what was saved is read, nothing lasts in memory, every fault names its file."""

import hashlib
import json
import logging
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_sparse.checkpoint import Checkpoint, open_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LLAMA = LlamaConfig(
    vocab_size=80,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=50,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
def meta_model() -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(LLAMA)


@pytest.fixture(scope="module")
def dense() -> PreTrainedModel:
    torch.manual_seed(11)
    return LlamaForCausalLM(LLAMA)


@pytest.fixture(scope="module")
def saved(dense: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file."""
    folder = tmp_path_factory.mktemp("single")
    dense.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved_in_shards(dense: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    dense.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


@pytest.fixture
def shards(saved_in_shards: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved_in_shards, tmp_path / "copy"))


def assert_reads(checkpoint: Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, tensor in expected.items():
        read = checkpoint.tensor(name)
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor), name


def change_index(folder: Path, change: Callable[[dict], object]) -> Path:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    return path


# safetensors


def test_single_file(saved: Path, dense: PreTrainedModel, meta_model: PreTrainedModel) -> None:
    checkpoint = open_checkpoint(saved, model=meta_model)
    assert checkpoint.directory == saved
    assert checkpoint.files == [saved / "model.safetensors"]
    assert (checkpoint.repo_id, checkpoint.revision_hash) == (None, None)
    assert_reads(checkpoint, dense.state_dict())
    with pytest.raises(KeyError, match="no_such_tensor"):
        checkpoint.tensor("no_such_tensor")


def test_shards(saved_in_shards: Path, dense: PreTrainedModel, meta_model: PreTrainedModel) -> None:
    checkpoint = open_checkpoint(str(saved_in_shards), model=meta_model)
    assert checkpoint.files == sorted(saved_in_shards.glob("model-*.safetensors"))
    assert_reads(checkpoint, dense.state_dict())


def test_subfolder_and_variant(
    saved: Path, dense: PreTrainedModel, meta_model: PreTrainedModel, tmp_path: Path
) -> None:
    (tmp_path / "inner").mkdir()
    shutil.copy(saved / "model.safetensors", tmp_path / "inner" / "model.fp16.safetensors")
    checkpoint = open_checkpoint(tmp_path, model=meta_model, subfolder="inner", variant="fp16")
    assert checkpoint.directory == tmp_path / "inner"
    assert_reads(checkpoint, dense.state_dict())
    with pytest.raises(OSError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path, model=meta_model, subfolder="inner")


def test_every_dtype_is_read_as_stored(meta_model: PreTrainedModel, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(5, 7, generator=generator) * 50
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    kinds += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    expected = {str(kind): values.abs().to(kind) for kind in kinds}
    expected |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "odd": torch.arange(3, dtype=torch.uint8)}
    save_file(expected, tmp_path / "model.safetensors")
    assert_reads(open_checkpoint(tmp_path, model=meta_model), expected)


def test_unknown_dtype_is_named(meta_model: PreTrainedModel, tmp_path: Path) -> None:
    save_file({"w": torch.ones(3, 5).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path, model=meta_model)
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor 'w' has dtype F8_E4M3, allowed are .*BF16"):
        checkpoint.tensor("w")


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
def test_not_finite(fault: float, kind: torch.dtype, meta_model: PreTrainedModel, tmp_path: Path) -> None:
    good, bad = torch.ones(2, 4, 9, dtype=kind)
    bad[2, 8] = fault
    save_file({"good": good.clone(), "bad": bad.clone()}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path, model=meta_model)
    assert torch.equal(checkpoint.tensor("good"), good)
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor 'bad' holds NaN or infinite"):
        checkpoint.tensor("bad")


def test_a_tensor_outlives_its_file(saved: Path, meta_model: PreTrainedModel, tmp_path: Path) -> None:
    """Private memory: a mapped tensor would change (or fault) when its file is overwritten in place."""
    file = tmp_path / "model.safetensors"
    shutil.copy(saved / "model.safetensors", file)
    checkpoint = open_checkpoint(tmp_path, model=meta_model)
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = checkpoint.tensor(name)
    before = tensor.clone()
    with file.open("r+b") as stream:
        stream.write(bytes(file.stat().st_size))
    assert torch.equal(tensor, before)
    assert tensor.data_ptr() % 64 == 0


def test_resident_memory_falls_back(meta_model: PreTrainedModel, tmp_path: Path) -> None:
    """24 tensors of 8 MB, read one by one in a fresh process: at its peak it holds one or two, and nothing stays."""
    count, megabytes = 24, 8
    tensors = {f"w{i}": torch.ones(megabytes << 10, 512, dtype=torch.bfloat16) for i in range(count)}
    save_file(tensors, tmp_path / "model.safetensors")
    program = """
import re, sys
import torch
from pathlib import Path
from transformers import AutoModelForCausalLM, LlamaConfig
from hf_sparse.checkpoint import open_checkpoint

def resident(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

checkpoint = open_checkpoint(sys.argv[1], model=None)
checkpoint.tensor("w0")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
start = resident("VmRSS")
for name in checkpoint.names():
    checkpoint.tensor(name)
print(resident("VmHWM") - start, resident("VmRSS") - start)
"""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("resident memory is read from Linux' /proc")
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    peak, stayed = map(int, run.stdout.split())
    assert peak < 2.5 * megabytes * 2**20
    assert stayed < 2.5 * megabytes * 2**20  # the allocator keeps a little for itself


# faults


def test_truncated_and_corrupt_files_are_named(
    saved: Path, shards: Path, meta_model: PreTrainedModel, tmp_path: Path
) -> None:
    whole = (saved / "model.safetensors").read_bytes()
    header_size = int.from_bytes(whole[:8], "little")
    beyond = whole.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1)
    assert beyond != whole
    damaged = {
        "truncated": whole[:-1],
        "header only": whole[: 8 + header_size],
        "empty": b"",
        "no JSON": whole[:8] + b"x" * (len(whole) - 8),
        "huge header": (2**63 - 1).to_bytes(8, "little") + whole[8:],
        "page of an error": b"<html><body>404: not found</body></html>" * 9,
        "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 34\n",
        "offsets": beyond,
    }
    for fault, content in damaged.items():
        folder = tmp_path / fault.replace(" ", "-")
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors: truncated, corrupt") as refusal:
            open_checkpoint(folder, model=meta_model)
        assert str(folder) in str(refusal.value), fault

    shard = sorted(shards.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ValueError, match=shard.name):
        open_checkpoint(shards, model=meta_model)


def test_file_cut_after_it_was_opened(saved: Path, meta_model: PreTrainedModel, tmp_path: Path) -> None:
    file = Path(shutil.copy(saved / "model.safetensors", tmp_path))
    checkpoint = open_checkpoint(tmp_path, model=meta_model)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)
    last = max(checkpoint.names(), key=lambda name: checkpoint._spans[name].offset)  # type: ignore[attr-defined]
    with pytest.raises(OSError, match=r"model\.safetensors: ended \d+ bytes early"):
        checkpoint.tensor(last)


def test_index_that_names_a_missing_shard(shards: Path, meta_model: PreTrainedModel) -> None:
    gone = sorted(shards.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(OSError, match=rf"index\.json names .*{gone.name}"):
        open_checkpoint(shards, model=meta_model)


def test_index_that_names_a_missing_tensor(shards: Path, meta_model: PreTrainedModel) -> None:
    second = sorted(shards.glob("model-*.safetensors"))[1]
    change_index(shards, lambda index: index["weight_map"].update({"ghost": second.name}))
    with pytest.raises(ValueError, match=rf"{second.name}: the index places tensor 'ghost'"):
        open_checkpoint(shards, model=meta_model)


def test_tensors_that_the_index_lacks_are_said(
    shards: Path, meta_model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    change_index(shards, lambda index: index["weight_map"].pop("model.norm.weight"))
    with caplog.at_level(logging.WARNING, logger="hf_sparse"):
        checkpoint = open_checkpoint(shards, model=meta_model)
    assert "model.norm.weight" not in checkpoint.names()
    assert "'model.norm.weight'" in caplog.text


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/passwd.safetensors", "inner/model.safetensors", "model.bin", 7, ""]
)
def test_index_may_name_files_of_its_folder_only(shards: Path, meta_model: PreTrainedModel, shard: object) -> None:
    change_index(shards, lambda index: index["weight_map"].update({"model.norm.weight": shard}))
    with pytest.raises(ValueError, match=r"index\.json: weight_map\['model\.norm\.weight'\] is "):
        open_checkpoint(shards, model=meta_model)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', "\ufeff{", "[" * 100_000]
)
def test_index_that_is_none(shards: Path, meta_model: PreTrainedModel, content: str) -> None:
    (shards / "model.safetensors.index.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: "):
        open_checkpoint(shards, model=meta_model)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickles_are_never_opened(name: str, meta_model: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    with pytest.raises(OSError, match=rf"{name} but no model\.safetensors: hf_sparse never unpickles.*save_pretrained"):
        open_checkpoint(tmp_path, model=meta_model)


def test_places_without_weights(saved: Path, meta_model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"found neither model\.safetensors nor model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path, model=meta_model)
    for missing in (tmp_path / "nowhere", str(tmp_path / "nowhere"), "./nowhere", "one/two/three"):
        with pytest.raises(OSError, match="there is no such folder"):
            open_checkpoint(missing, model=meta_model)
    with pytest.raises(OSError, match="is a file: give the folder it lies in"):
        open_checkpoint(saved / "model.safetensors", model=meta_model)
    with pytest.raises(OSError, match=r"absent\.gguf"):
        open_checkpoint(saved, model=meta_model, gguf_file="absent.gguf")


# fingerprint


def test_fingerprint_follows_the_content(saved_in_shards: Path, shards: Path, meta_model: PreTrainedModel) -> None:
    original = open_checkpoint(saved_in_shards, model=meta_model).fingerprint()
    assert len(original) == 64
    assert int(original, 16) > 0
    copy = open_checkpoint(shards, model=meta_model)
    assert copy.fingerprint() == original  # not the folder, not the dates

    shard = sorted(shards.glob("model-*.safetensors"))[-1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert copy.fingerprint() == original  # computed once per object
    changed = open_checkpoint(shards, model=meta_model).fingerprint()
    (shards / "config.json").write_text((shards / "config.json").read_text() + " ")
    reconfigured = open_checkpoint(shards, model=meta_model).fingerprint()
    (shards / "config.json").unlink()
    bare = open_checkpoint(shards, model=meta_model).fingerprint()
    (shards / "README.md").write_text("not a weight")
    assert open_checkpoint(shards, model=meta_model).fingerprint() == bare
    assert len({original, changed, reconfigured, bare}) == 4


# the Hub


@pytest.fixture
def hub_cache(saved_in_shards: Path, tmp_path: Path) -> Path:
    """A cache as huggingface_hub lays it out: blobs named by digest, snapshots of links."""
    repo = tmp_path / "cache" / "models--some--llama"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "blobs").mkdir()
    (repo / "snapshots" / COMMIT).mkdir(parents=True)
    for file in saved_in_shards.iterdir():
        content = file.read_bytes()
        large = file.suffix == ".safetensors"
        digest = hashlib.sha256(content).hexdigest() if large else hashlib.sha1(content).hexdigest()
        (repo / "blobs" / digest).write_bytes(content)
        (repo / "snapshots" / COMMIT / file.name).symlink_to(f"../../blobs/{digest}")
    return tmp_path / "cache"


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """No network; the addresses somebody tried."""
    tried: list[object] = []

    def refuse(*address: object, **_: object) -> None:
        tried.append(address)
        raise OSError("the test has no network")

    # with telemetry on, huggingface_hub asks once a day, whatever the caller said, which agents to name in its requests
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


@pytest.mark.parametrize("asked", ["argument", "environment"])
def test_cached_repository_without_network(
    asked: str,
    hub_cache: Path,
    saved_in_shards: Path,
    dense: PreTrainedModel,
    meta_model: PreTrainedModel,
    network: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if asked == "environment":  # what HF_HUB_OFFLINE=1 sets when huggingface_hub is imported
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    options: dict[str, Any] = {"local_files_only": True} if asked == "argument" else {}
    checkpoint = open_checkpoint("some/llama", model=meta_model, cache_dir=hub_cache, **options)
    assert network == []
    assert checkpoint.repo_id == "some/llama"
    assert checkpoint.revision_hash == COMMIT
    assert checkpoint.directory == hub_cache / "models--some--llama" / "snapshots" / COMMIT
    assert_reads(checkpoint, dense.state_dict())
    assert checkpoint.fingerprint() == open_checkpoint(saved_in_shards, model=meta_model).fingerprint()
    by_commit = open_checkpoint("some/llama", model=meta_model, cache_dir=hub_cache, revision=COMMIT, **options)
    assert by_commit.revision_hash == COMMIT
    assert network == []


def test_repository_that_is_not_cached(hub_cache: Path, meta_model: PreTrainedModel, network: list[object]) -> None:
    with pytest.raises(OSError, match="other/llama"):
        open_checkpoint("other/llama", model=meta_model, cache_dir=hub_cache, local_files_only=True)
    with pytest.raises(OSError, match="some/llama"):
        open_checkpoint("some/llama", model=meta_model, cache_dir=hub_cache, local_files_only=True, revision="later")
    assert network == []


def test_cached_repository_with_a_pickle_only(
    hub_cache: Path, meta_model: PreTrainedModel, network: list[object]
) -> None:
    snapshot = hub_cache / "models--some--llama" / "snapshots" / COMMIT
    for file in snapshot.glob("model*"):
        file.unlink()
    (snapshot / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(OSError, match="never unpickles"):
        open_checkpoint("some/llama", model=meta_model, cache_dir=hub_cache, local_files_only=True)
    assert network == []
