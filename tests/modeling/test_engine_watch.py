"""What is changed of a model after native code was built from it takes effect; what torch is set to does not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import LogitsProcessorList
from transformers.cache_utils import DynamicCache

from engine_steps import GREEDY, Save, assert_near, decoded, load, needs_kernels, through_modules
from hf_sparse.quantization import NeuronMatrix, active_neurons, native
from tiny_models import prompt_ids

pytestmark = needs_kernels


class Doubled(nn.Module):
    """Like a wrapper of an adapter: adds something to what the module gives."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2


def wrap(path: str) -> Callable[[Any], None]:
    return lambda model: model.set_submodule(path, Doubled(model.get_submodule(path)))


def replace_forward(model: Any) -> None:
    theirs = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda *args, **kwargs: 2 * theirs(*args, **kwargs)


def other_norm(model: Any) -> None:
    model.model.layers[0].input_layernorm = nn.LayerNorm(model.config.hidden_size, bias=False)


def no_weight(model: Any) -> None:
    model.model.norm = Doubled(model.model.norm)


def set_attribute(path: str, name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model.get_submodule(path), name, value)


def scaling(model: Any) -> None:
    for layer in model.model.layers:
        for module in layer.self_attn.modules_of_tiers:
            module.scaling *= 3


def reorder(model: Any) -> None:
    layers = model.model.layers
    model.model.layers = nn.ModuleList([layers[1], layers[0], *layers[2:]])


CHANGES: dict[str, Callable[[Any], Any]] = {
    "norm in place through .data": lambda model: model.model.norm.weight.data.mul_(torch.linspace(0.2, 2, 48)),
    "norm's data replaced": lambda model: setattr(
        model.model.layers[1].input_layernorm.weight, "data", torch.linspace(0.5, 2, 48)
    ),
    "head's data replaced": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.flip(0)),
    "frequencies in place": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
    "epsilon": set_attribute("model.norm", "variance_epsilon", 3.0),
    "scaling": scaling,
    "wrapped mlp": wrap("model.layers.1.mlp"),
    "wrapped attention": wrap("model.layers.1.self_attn"),
    "wrapped layer": wrap("model.layers.1"),
    "wrapped norm": no_weight,
    "another norm": other_norm,
    "forward replaced": replace_forward,
    "layers in another order": reorder,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_takes_effect_at_the_next_step(change: str, saved: Save) -> None:
    model = load(saved("llama"), head_dtype=None)
    ids = prompt_ids(1, 12)
    before = decoded(model, ids)
    with torch.no_grad():
        CHANGES[change](model)
    after = decoded(model, ids)
    with through_modules(model):
        expected = decoded(model, ids)
    assert float((expected - before).abs().max()) > 1e-3
    assert_near(after, expected)


def test_a_change_of_the_config_takes_effect(saved: Save) -> None:
    model = load(saved("gemma2"))
    ids = prompt_ids(1, 12)
    before = decoded(model, ids)
    model.config.final_logit_softcapping = 5.0
    after = decoded(model, ids)
    with through_modules(model):
        assert_near(after, decoded(model, ids))
    assert float((after - before).abs().max()) > 1e-3


def test_weights_of_inference_mode_may_change_too(saved: Save) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(1, 12)
    with torch.inference_mode():
        model.model.norm.weight = nn.Parameter(model.model.norm.weight.clone(), requires_grad=False)
        decoded(model, ids)
        model.model.norm.weight.mul_(torch.linspace(0.2, 2, 48))
    steps = decoded(model, ids)
    with through_modules(model):
        assert_near(steps, decoded(model, ids))


# What is called


def test_generate_calls_hooks_of_the_model_for_every_token(saved: Save) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(1, 6)
    plain = model.generate(ids, **GREEDY)
    calls: list[int] = []

    def only_seven(module: nn.Module, args: Any, output: Any) -> Any:
        calls.append(1)
        output.logits[..., 7] += 100
        return output

    handle = model.register_forward_hook(only_seven)
    assert model.generate(ids, **GREEDY)[0, 6:].tolist() == [7] * 12
    handle.remove()
    assert len(calls) == 12
    assert torch.equal(model.generate(ids, **GREEDY), plain)


def test_generate_calls_a_forward_and_preparations_put_in_place_of_the_models_own(saved: Save) -> None:
    model = load(saved("llama"))
    for name in ("forward", "prepare_inputs_for_generation"):
        calls: list[int] = []
        theirs = getattr(model, name)
        setattr(model, name, lambda *args, theirs=theirs, calls=calls, **kw: (calls.append(1), theirs(*args, **kw))[1])
        model.generate(prompt_ids(1, 6), **GREEDY)
        delattr(model, name)
        assert len(calls) == 12, name


def test_hooks_for_all_modules_are_called(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    calls: list[int] = []
    handle = register_module_forward_pre_hook(lambda module, args: calls.append(1) if module is model.lm_head else None)
    decoded(model, prompt_ids(1, 12))
    handle.remove()
    assert len(calls) == 10 and not native_steps


# What a step is given


@torch.no_grad()
def test_positions_of_logits_may_be_a_tensor(saved: Save) -> None:
    model = load(saved("llama"))
    ids, keep = prompt_ids(1, 6), torch.tensor([1, 3])
    got = model(input_ids=ids, cache=DynamicCache(), logits_to_keep=keep).logits
    assert_near(got, model(input_ids=ids).logits[:, keep])


def test_a_processor_may_give_bfloat16(saved: Save) -> None:
    model = load(saved("llama"))
    processors = LogitsProcessorList([lambda ids, scores: scores.bfloat16()])
    assert model.generate(prompt_ids(1, 6), logits_processor=processors, **GREEDY).shape == (1, 18)


def test_a_model_in_double_precision_generates(saved: Save) -> None:
    assert load(saved("llama")).double().generate(prompt_ids(1, 6), **GREEDY).shape == (1, 18)


def test_logits_are_those_of_the_models_dtype(saved: Save) -> None:
    model = load(saved("llama"), dtype=torch.bfloat16)
    out = model.generate(prompt_ids(1, 6), output_logits=True, return_dict_in_generate=True, **GREEDY)
    assert all(torch.equal(logits, logits.bfloat16().float()) for logits in out.logits)


# Torch's defaults


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_does_not_matter(dtype: torch.dtype, saved: Save) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(1, 12)
    expected = decoded(model, ids)
    with default_dtype(dtype):
        steps = decoded(load(saved("llama")), ids)
        again = decoded(model, ids)
    assert torch.equal(steps, expected) and torch.equal(again, expected)


def test_torchs_default_device_does_not_matter(saved: Save) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(1, 12)
    expected = decoded(model, ids)
    model._engine_tried = False
    with torch.device("meta"):
        steps = decoded(model, ids)
    assert torch.equal(steps, expected)


# Operators and locks


def test_a_predictor_of_no_neuron_finds_none() -> None:
    fc1 = NeuronMatrix.quantize(torch.randn(20000, 32), "int8", 32)
    fc2 = NeuronMatrix.quantize(torch.randn(0, 20000), "int8", 32)
    found = active_neurons(fc1, fc2, torch.zeros(0), torch.randn(1, 32))
    assert found.dtype == torch.int64 and len(found) == 0


def test_a_lock_is_free_in_a_forked_process() -> None:
    lock = native.Lock()
    with lock:
        native._free_locks()  # what a child does first
        taken: list[Tensor] = []

        def take() -> None:
            with lock:
                taken.append(torch.ones(1))

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        thread.join(10)
        assert taken
