"""The language modeling head, packed or not, in decode steps of one native call and in files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from engine_steps import Save, assert_near, at_once, decoded, load, needs_kernels
from hf_sparse import SparseAutoModelForCausalLM
from hf_sparse.modeling import PackedHead
from tiny_models import plain_twin, prompt_ids, save_checkpoint

pytestmark = needs_kernels


@pytest.mark.parametrize("case", ["llama", "llama-tied-bias", "gemma2"])
@pytest.mark.parametrize("head_dtype", [None, "int8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads(
    case: str, head_dtype: str | None, dtype: torch.dtype, saved: Save, native_steps: list[int], tmp_path: Path
) -> None:
    model = load(saved(case), head_dtype=head_dtype, dtype=dtype)
    head = model.get_output_embeddings()
    assert type(head) is (nn.Linear if head_dtype is None else PackedHead)
    if head_dtype is not None:
        assert head.matrix.weight_dtype == head_dtype and head.tied == model.config.tie_word_embeddings
    ids = prompt_ids(1, 20)
    steps = decoded(model, ids)
    assert len(native_steps) == 17
    twin = plain_twin(model)
    assert_near(steps, at_once(twin.float(), ids), 1e-5 if dtype == torch.float32 else 3e-2)

    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = {name for name in file.keys() if name.startswith("lm_head")}  # noqa: SIM118  # no mapping
    packed = head_dtype is not None
    if model.config.tie_word_embeddings:
        assert not names
    else:
        assert names == ({"lm_head.codes", "lm_head.scales"} if packed else {"lm_head.weight"})
    again = SparseAutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again.get_output_embeddings()) is type(head)
    assert torch.equal(decoded(again, ids), steps)
    if packed:
        held = again.get_output_embeddings()
        assert held.tied == head.tied
        assert all(
            torch.equal(held.matrix.tensors()[name], head.matrix.tensors()[name]) for name in ("codes", "scales")
        )


def test_a_head_that_packing_would_change_too_much_stays_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, generator: torch.Generator
) -> None:
    reference = save_checkpoint("llama", tmp_path)
    with torch.no_grad():  # one large number in each group of small ones
        reference.lm_head.weight.copy_(torch.rand(331, 48, generator=generator) * 0.04 + 0.03)
        reference.lm_head.weight[:, ::32] = 1.0
    reference.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert type(model.get_output_embeddings()) is nn.Linear
    assert "lm_head in int8 would be" in caplog.text and "at most 1% are allowed): it stays unpacked" in caplog.text
    ids = prompt_ids(1, 12)
    assert_near(decoded(model, ids), at_once(plain_twin(model), ids))
    model.save_pretrained(tmp_path / "saved")
    again = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("head_dtype", ["int4_asym", "int8"])
def test_weights_with_offsets_are_saved_and_loaded(head_dtype: str, saved: Save, tmp_path: Path) -> None:
    model = load(saved("phi3"), "int4_asym", head_dtype=head_dtype)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.layers.0.mlp.gate_up_proj.offsets" in names
    assert ("lm_head.offsets" in names) == (head_dtype == "int4_asym")
    again = SparseAutoModelForCausalLM.from_pretrained(tmp_path)
    ids = prompt_ids(1, 12)
    assert torch.equal(decoded(again, ids), decoded(model, ids))
    assert_near(decoded(again, ids), at_once(plain_twin(again), ids))
