"""Decode steps in one native call: the same numbers as transformers' own model on the dequantized weights, and its own
modules wherever a step is not the usual one.
"""

from __future__ import annotations

import copy
import functools
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.modeling import (
    FAMILIES,
    Engine,
    HybridMLP,
    NotUsual,
    PackedHead,
    PagedCacheLayer,
    Placement,
    Predictor,
    SkipRule,
    Tier,
    engine_of,
    hybrid_blocks,
    skipping,
    use_pages,
)
from hf_sparse.quantization import instruction_sets
from tiny_models import CASES, plain_twin, prompt_ids, save_checkpoint

QUICK = {"calibration_tokens": 64, "max_perplexity_increase": 0}
NATIVE = [name for name in instruction_sets() if name != "torch"]
DECODED = [case for case, (model_type, _) in CASES.items() if FAMILIES[model_type].decoding is not None]
ROUNDED = 1e-3  # what int8 activations may cost, relative to the largest logit
GREEDY = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}

pytestmark = pytest.mark.skipif(not NATIVE, reason="the kernels are not there")

Save = Callable[..., Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """`save_checkpoint` with room for 400 positions, once for what it is called with."""
    made: dict[str, Path] = {}

    def save(case: str, **overrides: Any) -> Path:
        key = case + json.dumps(overrides, sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(case)
            save_checkpoint(case, made[key], **({"max_position_embeddings": 400} | overrides))
        return made[key]

    return save


@functools.cache
def _loaded(directory: Path, **options: Any) -> Any:
    fields = {name: options.pop(name) for name in ("weight_dtype", "compute_dtype", "head_dtype") if name in options}
    quantization = WeightOnlyQuantConfig(group_size=32, **fields)  # which 48 columns do not fill
    return SparseAutoModelForCausalLM.from_pretrained(directory, quantization_config=quantization, **QUICK, **options)


def load(directory: Path, weight_dtype: str = "nf4", compute_dtype: str = "fp32", **options: Any) -> Any:
    """A model of one's own; loaded once."""
    return copy.deepcopy(_loaded(directory, weight_dtype=weight_dtype, compute_dtype=compute_dtype, **options))


@pytest.fixture
def native_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of the tokens that were decoded natively."""
    steps: list[int] = []
    logits = Engine.logits

    def counted(self: Engine, token: Tensor, cache: Cache, *args: Any, **kwargs: Any) -> Tensor | None:
        position = cache.get_seq_length()
        result = logits(self, token, cache, *args, **kwargs)
        if result is not None:
            steps.append(position)
        return result

    monkeypatch.setattr(Engine, "logits", counted)
    return steps


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@contextmanager
def through_modules(model: Any) -> Iterator[None]:
    """Hooks on a part of every MLP have everything computed by modules and their operators, one by one."""
    handles = [block.activation.register_forward_hook(lambda *_: None) for block in mlps(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def decoded(model: Any, ids: Tensor, prompt: int = 3, cache: Cache | None = None, **options: Any) -> Tensor:
    """Logits [rows, tokens after the prompt, vocabulary] of `ids` [rows, tokens]: the prompt at once, then one token at
    a time.
    """
    cache = DynamicCache() if cache is None else cache
    if prompt:
        model(input_ids=ids[:, :prompt], cache=cache, **options)
    steps = ids[:, prompt:].split(1, dim=1)
    return torch.cat([model(input_ids=step, cache=cache, **options).logits for step in steps], dim=1)


@torch.no_grad()
def at_once(reference: Any, ids: Tensor, prompt: int = 3) -> Tensor:
    return reference(ids).logits[:, prompt:]


def assert_near(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """`tolerance` is relative to the largest number."""
    error = (got.float() - expected.float()).abs().max()
    assert error <= tolerance * expected.abs().max() + 1e-6, f"{error / expected.abs().max():.2e} off"


def mlps(model: Any) -> list[HybridMLP]:
    return [block for block in hybrid_blocks(model) if isinstance(block, HybridMLP)]


def two_tiers(model: Any) -> Placement:
    generator = torch.Generator().manual_seed(4)
    assignment = {b.id: torch.randint(0, 2, (b.neurons,), generator=generator) for b in hybrid_blocks(model)}
    return Placement((Tier("fast"), Tier("cpu")), assignment)


# Every family, over the ends of parts (64 tokens) and of pages (256 tokens)


def test_the_families_whose_layers_are_not_the_usual_ones_say_so(saved: Save) -> None:
    others = {model_type: case for case, (model_type, _) in CASES.items() if case not in DECODED}
    for model_type, case in others.items():
        model = load(saved(case))
        with pytest.raises(NotUsual, match=f"decoder layers of {model_type} are left to transformers' modules"):
            engine_of(model)
        assert model.engine() is None


@pytest.mark.parametrize("case", DECODED)
@pytest.mark.parametrize(("weight_dtype", "compute_dtype"), [("nf4", "fp32"), ("int4_asym", "fp32"), ("int8", "int8")])
def test_steps_equal_transformers(
    case: str, weight_dtype: str, compute_dtype: str, saved: Save, native_steps: list[int]
) -> None:
    model = load(saved(case), weight_dtype, compute_dtype)
    ids = prompt_ids(1, 262)
    expected = at_once(plain_twin(model), ids)
    assert_near(decoded(model, ids), expected, 1e-5 if compute_dtype == "fp32" else ROUNDED)
    assert native_steps == list(range(3, 262))


@pytest.mark.parametrize("case", ["mistral", "gemma3", "smollm3"])
def test_generation_beyond_the_window_equals_transformers(case: str, saved: Save, native_steps: list[int]) -> None:
    model = load(saved(case))
    ids = prompt_ids(1, 30)  # windows are 7 and 8 tokens
    assert torch.equal(model.generate(ids, **GREEDY), plain_twin(model).generate(ids, **GREEDY))
    assert native_steps == list(range(30, 41))


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16", "int8"])
def test_every_instruction_set_gives_the_same(
    isa: str, compute_dtype: str, saved: Save, use_instruction_set: Callable[[str], None], native_steps: list[int]
) -> None:
    use_instruction_set(isa)
    model = load(saved("gemma3"), "int8" if compute_dtype == "bf16" else "nf4", compute_dtype)
    ids = prompt_ids(1, 30 if isa == "torch" else 80)
    tolerance = {"fp32": 1e-5, "bf16": 2e-2, "int8": ROUNDED}[compute_dtype]
    # Prompts go through bfloat16 where the instruction set has products for it.
    tolerance = 2e-2 if isa in ("amx", "torch") and compute_dtype != "fp32" else tolerance
    assert_near(decoded(model, ids), at_once(plain_twin(model), ids), tolerance)
    assert len(native_steps) == (0 if isa == "torch" else 77)
    if compute_dtype != "fp32" or isa == "torch":
        return
    model.cache_dtype = torch.int8
    steps = decoded(model, ids[:, :70], prompt=1)
    with through_modules(model):
        assert_near(steps, decoded(model, ids[:, :70], prompt=1, cache=pages_of(model, torch.int8)), 2e-2)


@pytest.mark.parametrize("compute_dtype", ["fp32", "int8"])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_any_number_of_threads(
    count: int, compute_dtype: str, saved: Save, threads: Callable[[int], None], native_steps: list[int]
) -> None:
    threads(count)
    model = load(saved("llama"), "nf4", compute_dtype)
    for block in mlps(model):
        block.rule = SkipRule("magnitude", 0.01)
    ids = prompt_ids(1, 75)
    steps = decoded(model, ids)
    assert torch.equal(decoded(model, ids), steps)  # a number of threads repeats itself
    assert len(native_steps) == 2 * 72
    with through_modules(model):
        assert_near(steps, decoded(model, ids), 1e-4 if compute_dtype == "fp32" else 1e-2)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2"])
def test_every_activation_that_native_code_knows(activation: str, saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama", hidden_act=activation))
    for block in mlps(model):
        block.rule = SkipRule()
    ids = prompt_ids(1, 20)
    assert_near(decoded(model, ids), at_once(plain_twin(model), ids))
    assert len(native_steps) == 17


def test_another_activation_is_left_to_modules(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama", hidden_act="mish"))
    ids = prompt_ids(1, 10)
    assert_near(decoded(model, ids), at_once(plain_twin(model), ids))
    assert model.engine() is None and not native_steps


@pytest.mark.parametrize(
    ("rope", "is_native"),
    [
        ({"rope_type": "linear", "factor": 4.0}, True),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, True),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            True,
        ),
        ({"rope_type": "dynamic", "factor": 2.0}, False),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
def test_rotations(rope: dict[str, Any], is_native: bool, saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama", rope_parameters={"rope_theta": 10000.0} | rope))
    ids = prompt_ids(1, 100)
    assert_near(decoded(model, ids), at_once(plain_twin(model), ids))
    assert len(native_steps) == (97 if is_native else 0)


# Caches


def pages_of(model: Any, dtype: torch.dtype | None) -> DynamicCache:
    cache = DynamicCache()
    assert use_pages(cache, model.config.num_hidden_layers, dtype)
    return cache


@pytest.mark.parametrize("case", ["llama", "gemma2"])
@pytest.mark.parametrize(("cache_dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2), ("int8", 5e-2)])
def test_cache_dtypes(case: str, cache_dtype: str, tolerance: float, saved: Save, native_steps: list[int]) -> None:
    model = load(saved(case), cache_dtype=cache_dtype)
    ids = prompt_ids(1, 100)
    cache = pages_of(model, model.cache_dtype)
    steps = decoded(model, ids, cache=cache)
    assert len(native_steps) == 97
    assert {layer.dtype for layer in cache.layers} == {model.cache_dtype}
    assert_near(steps, at_once(plain_twin(model), ids), tolerance)
    with through_modules(model):
        others = pages_of(model, model.cache_dtype)
        # A key or value that lies between two that a page can hold may be stored as either.
        assert_near(steps, decoded(model, ids, cache=others), 1e-5 if cache_dtype == "fp32" else 5e-3)
    assert len(native_steps) == 97
    for mine, other in zip(cache.layers, others.layers, strict=True):
        assert_near(mine.keys, other.keys, tolerance)
        assert_near(mine.values, other.values, tolerance)


@pytest.mark.parametrize("cache_dtype", ["fp32", "bf16", "int8"])
def test_one_step_on_the_same_pages_equals_modules(cache_dtype: str, saved: Save, native_steps: list[int]) -> None:
    model = load(saved("qwen3"), cache_dtype=cache_dtype)
    ids = prompt_ids(1, 300)
    cache = pages_of(model, model.cache_dtype)
    with torch.no_grad(), through_modules(model):
        model(input_ids=ids[:, :299], cache=cache)
        other = copy.deepcopy(cache)
        expected = model(input_ids=ids[:, 299:], cache=other).logits
    assert_near(model(input_ids=ids[:, 299:], cache=cache).logits, expected, 1e-5 if cache_dtype == "fp32" else 1e-3)
    assert native_steps == [299]


def test_a_cache_goes_to_and_fro_between_native_code_and_modules(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("qwen2"))
    ids = prompt_ids(1, 140)
    expected = at_once(plain_twin(model), ids, 0)
    cache = DynamicCache()
    parts = [decoded(model, ids[:, :40], prompt=0, cache=cache)]  # an empty cache is left to modules
    assert native_steps == list(range(1, 40))
    with through_modules(model):
        parts.append(decoded(model, ids[:, 40:70], prompt=0, cache=cache))
    assert len(native_steps) == 39
    with torch.no_grad():
        parts.append(model(input_ids=ids[:, 70:130], cache=cache).logits)  # several tokens
    parts.append(decoded(model, ids[:, 130:], prompt=0, cache=cache))
    assert native_steps[39:] == list(range(130, 140))
    assert_near(torch.cat(parts, dim=1), expected)
    assert all(isinstance(layer, PagedCacheLayer) for layer in cache.layers)


def test_a_cropped_cache_is_continued(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    ids, others = prompt_ids(1, 300), prompt_ids(1, 300, seed=9)
    expected = at_once(plain_twin(model), ids)
    cache = DynamicCache()
    decoded(model, torch.cat((ids[:, :200], others[:, 200:]), dim=1), cache=cache)
    cache.crop(-100)
    assert cache.get_seq_length() == 200
    assert_near(decoded(model, ids[:, 200:], prompt=0, cache=cache), expected[:, 197:])
    assert native_steps == [*range(3, 300), *range(200, 300)]


def test_a_reordered_cache_of_one_row_and_a_reset_one(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(1, 20)
    cache = DynamicCache()
    first = decoded(model, ids[:, :10], cache=cache)
    cache.reorder_cache(torch.tensor([0]))
    rest = decoded(model, ids[:, 10:], prompt=0, cache=cache)
    expected = at_once(plain_twin(model), ids)
    assert_near(torch.cat((first, rest), dim=1), expected)
    cache.reset()
    assert_near(decoded(model, ids, cache=cache), expected)
    assert len(native_steps) == 2 * 17


def test_two_caches_take_turns(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    ids = [prompt_ids(1, 70, seed=seed) for seed in (1, 2)]
    caches, parts = [DynamicCache(), DynamicCache()], [[], []]
    for which in (0, 1):
        decoded(model, ids[which][:, : 4 + which], prompt=3, cache=caches[which])
    for at in range(4, 69):
        for which in (0, 1):
            step = ids[which][:, at + which : at + which + 1]
            with torch.no_grad():
                parts[which].append(model(input_ids=step, cache=caches[which]).logits)
    for which in (0, 1):
        expected = at_once(plain_twin(model), ids[which], 4 + which)[:, : len(parts[which])]
        assert_near(torch.cat(parts[which], dim=1)[:, : expected.shape[1]], expected)
    assert len(native_steps) == 1 + 2 + 2 * 65


def test_a_static_cache_is_left_to_modules(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(1, 20)
    cache = StaticCache(config=model.config, max_cache_len=32)
    assert_near(decoded(model, ids, cache=cache), at_once(plain_twin(model), ids))
    assert not native_steps


def test_a_cache_of_sliding_windows_that_dropped_tokens_is_left_to_modules(
    saved: Save, native_steps: list[int]
) -> None:
    model = load(saved("mistral"))
    ids = prompt_ids(1, 20)
    cache = DynamicCache(config=model.config)
    assert_near(decoded(model, ids, prompt=12, cache=cache), at_once(plain_twin(model), ids, 12))
    assert not native_steps and not any(isinstance(layer, PagedCacheLayer) for layer in cache.layers)
    assert_near(decoded(model, ids, cache=DynamicCache(config=model.config)), at_once(plain_twin(model), ids))
    assert len(native_steps) == 17


# Rules


def predictor_of(block: HybridMLP, seed: int) -> Predictor:
    generator = torch.Generator().manual_seed(seed)
    columns = block.projections[block.names.up].columns
    return Predictor(
        torch.randn(12, columns, generator=generator),
        torch.randn(block.neurons, 12, generator=generator),
        torch.randn(block.neurons, generator=generator),
    )


RULES: dict[str, tuple[SkipRule, bool, str]] = {  # rule, with a predictor, activation
    "magnitude": (SkipRule("magnitude", 0.02), False, "silu"),
    "everything": (SkipRule("magnitude", 0.0), False, "silu"),
    "nothing": (SkipRule("magnitude", 1e9), False, "silu"),
    "exact": (SkipRule("exact"), False, "relu"),
    "predicted": (SkipRule("predicted"), True, "relu"),
    "predicted, silu": (SkipRule("predicted"), True, "silu"),
    "predicted and magnitude": (SkipRule("magnitude", 0.02), True, "silu"),
}


def set_rule(model: Any, name: str) -> None:
    rule, with_predictor, _ = RULES[name]
    for number, block in enumerate(mlps(model)):
        block.predictor = predictor_of(block, number) if with_predictor else None
        block.rule = rule


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("case", ["llama-tied-bias", "phi3"])
@pytest.mark.parametrize("compute_dtype", ["fp32", "int8"])
def test_rules_leave_out_what_the_blocks_leave_out(
    name: str, case: str, compute_dtype: str, saved: Save, native_steps: list[int], threads: Callable[[int], None]
) -> None:
    threads(2)
    model = load(saved(case, hidden_act=RULES[name][2]), "nf4", compute_dtype)
    set_rule(model, name)
    ids = prompt_ids(1, 23)
    fractions, results = [], []
    for context in (through_modules(model), skipping("decode")):
        model.reset_active_fraction()
        with context:
            results.append(decoded(model, ids))
        fractions.append([block.counters.tolist() for block in mlps(model)])
    assert len(native_steps) == 20
    by_modules, natively = results
    # With activations rounded, a neuron at the threshold may fall to either side.
    assert_near(natively, by_modules, 1e-5 if compute_dtype == "fp32" else 1e-2)
    for (expected, offered), (computed, also_offered) in zip(*fractions, strict=True):
        assert also_offered == offered == 20 * 88
        assert abs(computed - expected) <= (0 if compute_dtype == "fp32" else 8)
    share = model.active_fraction()
    assert share == 1 if name == "everything" else share == 0 if name == "nothing" else 0 < share < 1


@pytest.mark.parametrize("name", ["magnitude", "predicted, silu"])
def test_skipping_says_whether_rules_apply(name: str, saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    set_rule(model, name)
    ids = prompt_ids(1, 20)
    model.reset_active_fraction()
    with skipping("never"):
        assert_near(decoded(model, ids), at_once(plain_twin(model), ids))
    assert model.active_fraction() is None
    with skipping("always"):
        always = decoded(model, ids)
        with through_modules(model):
            assert_near(always, decoded(model, ids))
    assert (always - decoded(model, ids)).abs().max() > 1e-3  # the prompt too leaves out neurons
    assert len(native_steps) == 3 * 17


def test_another_rule_or_predictor_takes_effect_at_once(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(1, 12)
    dense = decoded(model, ids)
    for name in ("magnitude", "predicted, silu", "predicted and magnitude", "nothing"):
        set_rule(model, name)
        steps = decoded(model, ids)
        assert (steps - dense).abs().max() > 1e-3
        with through_modules(model):
            assert_near(steps, decoded(model, ids))
    set_rule(model, "magnitude")
    before = decoded(model, ids)
    mlps(model)[1].rule = SkipRule("magnitude", 0.04)  # one block is enough
    assert (decoded(model, ids) - before).abs().max() > 1e-4
    for block in mlps(model):
        block.rule, block.predictor = SkipRule(), None
    assert torch.equal(decoded(model, ids), dense)
    assert len(native_steps) == 8 * 9


def test_counts_go_on_when_the_engine_is_made_anew(saved: Save) -> None:
    model = load(saved("llama"))
    ids = prompt_ids(1, 13)
    set_rule(model, "magnitude")
    decoded(model, ids)
    first = [block.counters.tolist() for block in mlps(model)]
    set_rule(model, "nothing")
    decoded(model, ids)
    assert [block.counters.tolist() for block in mlps(model)] == [[n, 2 * offered] for n, offered in first]
    model.reset_active_fraction()
    assert model.active_fraction() is None
    decoded(model, ids)
    assert model.active_fraction() == 0


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


def test_an_observer_sees_every_step(saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"))
    seen: list[int] = []
    mlps(model)[1].observer = lambda x, gate, hidden: seen.append(len(x))
    decoded(model, prompt_ids(1, 12))
    mlps(model)[1].observer = None
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


# Unquantized models


def test_bfloat16_rows_are_multiplied_natively(saved: Save, native_steps: list[int]) -> None:
    directory = saved("llama")
    ids = prompt_ids(1, 80)
    model = SparseAutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **QUICK)
    steps = decoded(model, ids)
    assert len(native_steps) == 77 and steps.dtype == torch.bfloat16
    assert {m.dtype for b in hybrid_blocks(model) for m in b.shards[0].matrices.values()} == {torch.bfloat16}
    exact = at_once(plain_twin(model).float(), ids)
    with through_modules(model):
        by_modules = decoded(model, ids)
    assert_near(steps, exact, 2e-2)
    # States stay in float32 between the products: no worse than modules that round each of them.
    assert (steps - exact).square().mean() <= 1.1 * (by_modules - exact).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_left_to_modules(dtype: torch.dtype, saved: Save, native_steps: list[int]) -> None:
    model = SparseAutoModelForCausalLM.from_pretrained(saved("llama"), dtype=dtype, **QUICK)
    ids = prompt_ids(1, 12)
    assert_near(decoded(model, ids), at_once(plain_twin(model), ids), 1e-5 if dtype == torch.float32 else 2e-2)
    assert model.engine() is None and not native_steps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantized_models_of_half_precision(dtype: torch.dtype, saved: Save, native_steps: list[int]) -> None:
    model = load(saved("llama"), dtype=dtype)
    ids = prompt_ids(1, 20)
    steps = decoded(model, ids)
    # Pages of float16 are not known to native code.
    assert len(native_steps) == (17 if dtype == torch.bfloat16 else 0)
    assert steps.dtype == dtype
    assert_near(steps, at_once(plain_twin(model).float(), ids), 3e-2)


# The language modeling head


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
