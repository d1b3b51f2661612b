"""When decode steps are left to transformers' own modules, and what takes effect though an engine was made before."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from engine_steps import (
    GREEDY,
    Save,
    assert_near,
    at_once,
    decoded,
    load,
    mlps,
    needs_kernels,
    set_rule,
    through_modules,
)
from hf_sparse.modeling import Placement, Tier, hybrid_blocks
from tiny_models import plain_twin, prompt_ids

pytestmark = needs_kernels


def two_tiers(model: Any) -> Placement:
    generator = torch.Generator().manual_seed(4)
    assignment = {b.id: torch.randint(0, 2, (b.neurons,), generator=generator) for b in hybrid_blocks(model)}
    return Placement((Tier("fast"), Tier("cpu")), assignment)


# Where native code does not apply


def test_two_tiers_are_left_to_modules_and_one_tier_again_is_not(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(1, 12)
    expected = at_once(plain_twin(model), ids)
    one_tier = model.placement
    assert_near(decoded(model, ids), expected)
    assert model.engine() is not None and len(native_steps) == 9
    model.place(two_tiers(model))
    assert model.engine() is None
    assert_near(decoded(model, ids), expected)
    assert len(native_steps) == 9
    model.place(one_tier)
    assert_near(decoded(model, ids), expected)
    assert len(native_steps) == 18


@pytest.mark.parametrize(
    "path", ["lm_head", "model.norm", "model.embed_tokens", "model.layers.1", "model.layers.2.mlp.activation"]
)
def test_a_hook_on_a_part_of_the_model_is_called(path: str, saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(1, 12)
    expected = decoded(model, ids)
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        calls: list[str] = []
        native_steps.clear()
        handle = getattr(model.get_submodule(path), register)(lambda *_, calls=calls: calls.append(path))
        assert_near(decoded(model, ids), expected)
        handle.remove()
        assert calls == [path] * 10 and not native_steps
    decoded(model, ids)
    assert len(native_steps) == 9


def test_a_hook_may_change_what_is_computed(saved: Save) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(1, 12)
    decoded(model, ids)
    handle = model.lm_head.register_forward_hook(lambda module, args, out: out + 1)
    shifted = decoded(model, ids)
    handle.remove()
    assert_near(shifted, decoded(model, ids) + 1)


def test_a_hook_on_the_whole_model_is_called_and_leaves_steps_native(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    calls: list[int] = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    decoded(model, prompt_ids(1, 12))
    handle.remove()
    assert len(calls) == 10 and len(native_steps) == 9


def test_a_hook_on_the_base_model_is_called(saved: Save) -> None:
    model = load(saved("llama"))
    calls: list[int] = []
    model.base_model.register_forward_hook(lambda *_: calls.append(1))
    decoded(model, prompt_ids(1, 12))
    assert len(calls) == 10


def test_steps_are_native_again_after_hidden_states_were_asked_for(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    model(input_ids=prompt_ids(1, 5), output_hidden_states=True)
    decoded(model, prompt_ids(1, 12))
    assert len(native_steps) == 9


def test_a_probe_sees_every_step(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    seen: list[int] = []

    def look(place: str, values: Tensor) -> Tensor:
        seen.extend([len(values)] if place == "hidden" else [])
        return values

    mlps(model)[1].probe = look
    decoded(model, prompt_ids(1, 12))
    mlps(model)[1].probe = None
    assert sum(seen) == 12 and not native_steps


def test_two_rows_are_left_to_modules(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(2, 12)
    assert_near(decoded(model, ids), at_once(plain_twin(model), ids))
    assert not native_steps


@torch.no_grad()
def test_a_padded_row_is_left_to_modules(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    twin = plain_twin(model)
    ids = prompt_ids(1, 12)
    mask = torch.ones_like(ids)
    mask[:, :2] = 0
    caches = DynamicCache(), DynamicCache()
    for stop in (5, *range(6, 13)):
        start = 0 if stop == 5 else stop - 1
        got, expected = (
            one(input_ids=ids[:, start:stop], attention_mask=mask[:, :stop], cache=cache).logits
            for one, cache in zip((model, twin), caches, strict=True)
        )
        assert_near(got[:, -1], expected[:, -1])
    assert not native_steps
    padded = torch.cat((torch.zeros(1, 2, dtype=torch.long), ids[:, 2:]), dim=1)
    assert torch.equal(
        model.generate(padded, attention_mask=mask, **GREEDY), twin.generate(padded, attention_mask=mask, **GREEDY)
    )
    assert not native_steps


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"position_ids": torch.tensor([[9]])},
        {"output_hidden_states": True},
        {"output_attentions": True, "attn_implementation": "eager"},
        {"labels": torch.tensor([[5]])},
        {"return_dict": False},
        {"use_cache": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_a_step_is_asked_for_is_what_it_gives(
    options: dict[str, Any], saved: Save, native_steps: list[int]
) -> None:
    implementation = options.get("attn_implementation", "sdpa")
    options = {name: value for name, value in options.items() if name != "attn_implementation"}
    model = load(saved("llama"), attn_implementation=implementation)
    twin = plain_twin(model)
    twin.set_attn_implementation(implementation)
    ids = prompt_ids(1, 6)
    results = []
    for one in (model, twin):
        cache = DynamicCache()
        one(input_ids=ids[:, :5], cache=cache)
        results.append(one(input_ids=ids[:, 5:], cache=cache, **options))
    assert bool(native_steps) == ("use_cache" in options)
    got, expected = results
    if isinstance(expected, tuple):
        assert isinstance(got, tuple) and len(got) == len(expected)
        return assert_near(got[0], expected[0])
    assert got.keys() == expected.keys()
    assert_near(got.logits, expected.logits)
    for name in ("hidden_states", "attentions"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-3, atol=1e-4)
    return None


def test_training_mode_and_inputs_embeds_are_left_to_modules(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(1, 8)
    model.train()
    decoded(model, ids)
    model.eval()
    with torch.no_grad():
        cache = DynamicCache()
        model(input_ids=ids[:, :7], cache=cache)
        embedded = model(inputs_embeds=model.get_input_embeddings()(ids[:, 7:]), cache=cache).logits
    assert not native_steps
    assert_near(embedded, decoded(model, ids)[:, -1:])


# The model as an object


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_made_after_the_engine_was_used(how: Callable[[Any], Any], saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    set_rule(model, "magnitude")
    ids = prompt_ids(1, 12)
    expected = decoded(model, ids)
    counted = model.active_fraction()
    other = how(model)
    assert other.active_fraction() == counted
    other.reset_active_fraction()
    assert model.active_fraction() == counted  # counters are the copy's own
    del model
    assert torch.equal(decoded(other, ids), expected)
    assert other.engine() is not None and len(native_steps) == 18
    assert 0 < other.active_fraction() < 1


def test_another_head_takes_effect_at_once(saved: Save) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(1, 12)
    before = decoded(model, ids)
    head = nn.Linear(48, 7, bias=False).requires_grad_(False)
    model.set_output_embeddings(head)
    assert decoded(model, ids).shape[-1] == 7 != before.shape[-1]


@pytest.mark.parametrize("path", ["model.embed_tokens", "model.norm", "model.layers.1.input_layernorm"])
def test_another_module_or_weight_takes_effect_at_once(path: str, saved: Save) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(1, 12)
    decoded(model, ids)
    other = copy.deepcopy(model.get_submodule(path))
    other.weight.data = other.weight.data.flip(0)
    model.set_submodule(path, other)
    steps = decoded(model, ids)
    with through_modules(model):
        assert_near(steps, decoded(model, ids))
