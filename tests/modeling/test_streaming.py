"""StreamingCache, token by token, beside a cache that turns every key anew at every step."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from streaming_reference import Reference, reference_logits
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engine_steps import Save
from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.modeling import (
    HybridMLP,
    Placement,
    SimulatedTier,
    StreamingCache,
    StreamingOptions,
    Tier,
    hybrid_blocks,
)
from hf_sparse.modeling.streaming import Row, stored
from hf_sparse.quantization import instruction_sets
from tiny_models import CASES, VOCABULARY, plain_twin, prompt_ids

QUICK = {"calibration_tokens": 64, "max_perplexity_increase": 0}
STREAMED = [case for case in CASES if not case.startswith("opt")]
NATIVE = [case for case in STREAMED if not case.startswith(("falcon", "gpt_neox", "bloom", "nemotron"))]
# model_type and config of families that hf_sparse does not swap, and that a plain model may be of
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "phi": ("phi", {"partial_rotary_factor": 0.5, "intermediate_size": 88}),
    "cohere": ("cohere", {"num_key_value_heads": 3, "intermediate_size": 88}),
    "glm": ("glm", {"num_key_value_heads": 3, "head_dim": 8, "partial_rotary_factor": 0.5, "intermediate_size": 88}),
    "glm4": ("glm4", {"num_key_value_heads": 3, "head_dim": 8, "partial_rotary_factor": 0.5, "intermediate_size": 88}),
    "mpt": ("mpt", {"d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 400}),
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 100,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
}


def load(directory: Path, **options: Any) -> Any:
    quantization = WeightOnlyQuantConfig(group_size=32, compute_dtype="fp32", head_dtype=None)
    return SparseAutoModelForCausalLM.from_pretrained(directory, quantization_config=quantization, **QUICK, **options)


@torch.no_grad()
def logits(model: Any, ids: Tensor, cache: StreamingCache) -> Tensor:
    """[batch, tokens, vocabulary], one token at a time."""
    steps = [model(input_ids=token[:, None], past_key_values=cache).logits[:, -1] for token in ids.unbind(1)]
    return torch.stack(steps, dim=1)


def same(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


def plain(kind: str, fields: dict[str, Any]) -> Any:
    base = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": VOCABULARY}
    config = AutoConfig.for_model(kind, **(base | {"max_position_embeddings": 400, "pad_token_id": 0} | fields))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("n_discard", [-1, 1, 5])
@pytest.mark.parametrize("case", STREAMED)
def test_every_family_streams_as_if_its_keys_were_turned_anew(
    saved: Save, case: str, n_discard: int, native_steps: list[int]
) -> None:
    model = load(saved(case))
    twin, ids = plain_twin(model), prompt_ids(1, 70)
    expected = reference_logits(twin, ids, Reference(twin, 24, 4, n_discard))
    cache = StreamingCache(model, 24, 4, n_discard)
    same(logits(model, ids, cache), expected, 2e-5)
    assert cache.evicted[0] + cache.held[0] == 70 and cache.evicted[0] >= 46 and cache.reevaluated_tokens == 0
    assert len(native_steps) == (69 if case in NATIVE else 0)
    same(logits(twin, ids, StreamingCache(twin, 24, 4, n_discard)), expected)


@pytest.mark.parametrize("n_keep", [0, 1, 7])
@pytest.mark.parametrize("case", ["gemma2", "qwen3"])
def test_windows_that_are_shorter_than_the_cache_and_any_number_of_sinks(saved: Save, case: str, n_keep: int) -> None:
    """Gemma's window of 8 tokens ends between sinks and ring, and within either piece of the ring."""
    model = load(saved(case))
    twin, ids = plain_twin(model), prompt_ids(1, 60)
    for ctx_size, n_discard in ((9, 1), (10, 2), (30, 7)):
        expected = reference_logits(twin, ids, Reference(twin, ctx_size, n_keep, n_discard))
        same(logits(model, ids, StreamingCache(model, ctx_size, n_keep, n_discard)), expected, 2e-5)


@pytest.mark.skipif(instruction_sets() == ["torch"], reason="the kernels are not there")
@pytest.mark.parametrize("isa", [name for name in instruction_sets() if name != "torch"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_every_instruction_set_and_type_of_cache(
    saved: Save, isa: str, dtype: torch.dtype, native_steps: list[int]
) -> None:
    """More than one page, so that the ring turns over page ends; beside the modules, which read the same pages."""
    model, ids = load(saved("llama")), prompt_ids(1, 700)
    cache = StreamingCache(model, 300, 4, 33, dtype=dtype)
    found = logits(model, ids, cache)
    assert len(native_steps) == 699
    hook = model.model.layers[0].register_forward_hook(lambda *args: None)
    expected = logits(model, ids, StreamingCache(model, 300, 4, 33, dtype=dtype))
    hook.remove()
    same(found, expected, {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.int8: 2e-2}[dtype])


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_models_of_other_families(kind: str) -> None:
    """Halves and neighbours as pairs, parts of a head, ALiBi."""
    model, ids = plain(*PLAIN[kind]), prompt_ids(1, 60)
    for n_discard in (-1, 1):
        expected = reference_logits(model, ids, Reference(model, 20, 4, n_discard))
        same(logits(model, ids, StreamingCache(model, 20, 4, n_discard)), expected)


@pytest.mark.parametrize("kind", SCALINGS)
def test_scaled_rotations(saved: Save, kind: str) -> None:
    """The text is longer than the 160 positions, after which dynamic frequencies would change."""
    directory = saved("llama", rope_parameters=SCALINGS[kind], max_position_embeddings=160)
    model, ids = load(directory), prompt_ids(1, 200)
    twin = plain_twin(model)
    expected = reference_logits(twin, ids, Reference(twin, 40, 4, 9))
    same(logits(model, ids, StreamingCache(model, 40, 4, 9)), expected, 2e-5)
    same(logits(twin, ids, StreamingCache(twin, 40, 4, 9)), expected)


@pytest.mark.parametrize("ctx_size", [20, 60])
def test_factors_for_short_and_long_texts(ctx_size: int) -> None:
    """LongRoPE: those of the cache's size, from the first token on; the model's own change at 40 tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 40,
        "factor": 4.0,
    }
    fields = {"original_max_position_embeddings": 40, "rope_parameters": rope, "eos_token_id": 2}
    model = plain("phi3", {"num_key_value_heads": 3, "intermediate_size": 88, **fields})
    short, long = (copy.deepcopy(model) for _ in range(2))
    factors = "short_factor" if ctx_size == 20 else "long_factor"
    only = copy.deepcopy(model.config)
    only.rope_parameters = dict(rope, short_factor=rope[factors], long_factor=rope[factors])
    twin = AutoModelForCausalLM.from_config(only, dtype=torch.float32).eval()
    twin.load_state_dict(model.state_dict())
    ids = prompt_ids(1, 100)
    expected = reference_logits(twin, ids, Reference(twin, ctx_size, 4, 6))
    for tried in (short, long):
        same(logits(tried, ids, StreamingCache(tried, ctx_size, 4, 6)), expected)


def test_a_key_does_not_drift(saved: Save) -> None:
    """After 100,000 evictions a sink's key differs from one that was turned once by less than 1e-6 of its size, and
    those of the ring were never touched.
    """
    model = load(saved("llama"))
    cache = StreamingCache(model, 8, 2, 1)
    layer: Any = cache.layers[1]
    rotation = layer.rotation
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(1, 3, 2, 8, generator=generator)
    layer.update(base, base)
    states = torch.zeros(1, 3, 1, 8)
    for _ in range(100_006):
        layer.update(states, states)
    assert layer.held.rows[0].evicted == 100_001
    angles = 100_001 * rotation.frequencies
    a, b = base.double().split(4, dim=-1)
    expected = torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)
    found = layer.keys[:, :, :2].double()
    assert float((found - expected).norm() / expected.norm()) < 1e-6
    with torch.no_grad():
        cos, sin = rotation.tables(torch.tensor([[100_003]]), torch.float64)
    exact = 100_003 * rotation.frequencies
    assert torch.allclose(cos[0, 0, :4], exact.cos(), atol=1e-9) and torch.allclose(
        sin[0, 0, 4:], exact.sin(), atol=1e-9
    )


@given(
    st.integers(2, 12), st.integers(0, 5), st.integers(-1, 12), st.lists(st.integers(1, 30), max_size=12), st.booleans()
)
def test_where_tokens_go(ring: int, n_keep: int, n_discard: int, counts: list[int], prompting: bool) -> None:
    """However a text is cut, beside a list of tokens from which the oldest are taken."""
    if n_discard == 0 or n_discard > ring or n_keep + ring <= n_keep + 1:
        return
    options = StreamingOptions(n_keep + ring, n_keep, n_discard)
    row, slots, held, token = Row(), {}, [], 0
    for count in counts:
        runs, after = stored(options, row, count, prompting)
        for start, slot, tokens in runs:
            slots.update({slot + i: token + start + i for i in range(tokens)})
        for new in range(token, token + count):
            held.append(new)
            if len(held) == options.ctx_size:
                del held[n_keep : n_keep + options.discarded(prompting)]
        token, row = token + count, after
        assert (row.held, row.position) == (len(held), token)
        found = [slots[slot + i] for slot, n in options.slots(row.first, 0, row.held) for i in range(n)]
        assert found == held and max(slots) < options.ctx_size


@pytest.mark.parametrize("case", ["llama", "bloom", "falcon-40b", "gemma3"])
def test_split_between_tiers(saved: Save, case: str) -> None:
    model, ids = load(saved(case)), prompt_ids(1, 60)
    twin = plain_twin(model)
    expected = reference_logits(twin, ids, Reference(twin, 20, 4, 3))
    cache = StreamingCache(model, 20, 4, 3)
    same(logits(model, ids[:, :25], cache), expected[:, :25], 2e-5)
    for seed in (1, 2):  # the cache goes with its heads, then back to one tier
        generator = torch.Generator().manual_seed(seed)
        assignment = {b.id: torch.randint(0, 2, (b.neurons,), generator=generator) for b in hybrid_blocks(model)}
        model.place(Placement((Tier("fast"), Tier("cpu")), assignment))
        part = slice(15 + 10 * seed, 25 + 10 * seed)
        same(logits(model, ids[:, part], cache), expected[:, part], 2e-5)
    model.place(
        Placement((Tier("cpu"),), {b.id: torch.zeros(b.neurons, dtype=torch.int64) for b in hybrid_blocks(model)})
    )
    same(logits(model, ids[:, 45:], cache), expected[:, 45:], 2e-5)


@pytest.fixture
def streamed(saved: Save) -> tuple[Any, StreamingCache, Tensor]:
    """A model, a cache that has evicted tokens of a text, and what follows."""
    model, ids = load(saved("llama")), prompt_ids(1, 80)
    cache = StreamingCache(model, 24, 4, 5)
    logits(model, ids[:, :50], cache)
    return model, cache, ids[:, 50:]


def test_copies_go_their_own_way(streamed: Any) -> None:
    model, cache, rest = streamed
    copies = [copy.deepcopy(cache), copy.copy(copy.deepcopy(cache)), pickle.loads(pickle.dumps(cache))]
    expected = logits(model, rest, cache)
    for other in copies:
        assert torch.equal(logits(model, rest, other), expected)


def test_tokens_are_taken_off_the_end(streamed: Any) -> None:
    model, cache, rest = streamed
    expected = logits(model, rest[:, :1], copy.deepcopy(cache))
    held = cache.held[0]
    logits(model, rest[:, 5:7], cache)
    cache.crop(-2)
    assert cache.held == (held,) and cache.columns == 50
    assert torch.equal(logits(model, rest[:, :1], cache), expected)
    most = cache.held[0] - 4
    with pytest.raises(ValueError, match=f"{most + 1} tokens, but behind the sinks the cache holds {most}$"):
        cache.crop(-most - 1)  # a sink could not follow what is gone
    with pytest.raises(ValueError, match="tokens_to_remove: expected 0 or less, got 3"):
        cache.crop(3)


def test_rows_are_chosen_and_repeated(streamed: Any) -> None:
    model, cache, rest = streamed
    expected = logits(model, rest, copy.deepcopy(cache))
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_select_indices(torch.tensor([0, 2]))
    assert cache.held == cache.held[:1] * 2
    found = logits(model, rest.expand(2, -1), cache)
    same(found[0:1], expected)
    same(found[1:2], expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.int8])
def test_saved_and_loaded(saved: Save, tmp_path: Path, dtype: torch.dtype | None) -> None:
    model, ids = load(saved("llama")), prompt_ids(1, 80)
    cache = StreamingCache(model, 24, 4, 5, dtype=dtype)
    logits(model, ids[:, :50], cache)
    cache.save(tmp_path / "made" / "cache.safetensors")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["cache.safetensors"]
    loaded = StreamingCache.load(tmp_path / "made" / "cache.safetensors", model, dtype=dtype)
    assert loaded.state == cache.state and loaded.options == cache.options
    assert torch.equal(logits(model, ids[:, 50:], loaded), logits(model, ids[:, 50:], cache))


def test_files_that_are_no_cache(streamed: Any, saved: Save, tmp_path: Path) -> None:
    model, cache, _ = streamed
    path = tmp_path / "cache.safetensors"
    with pytest.raises(FileNotFoundError, match="is no file"):
        StreamingCache.load(path, model)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="no safetensors file"):
        StreamingCache.load(path, model)
    with pytest.raises(ValueError, match="the cache is empty"):
        StreamingCache(model, 24).save(path)
    cache.save(path)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    about = json.loads(metadata["cache"])

    def refuse(message: str, changed: dict[str, Tensor] | None = None, **fields: Any) -> None:
        save_file(changed or tensors, path, metadata={**metadata, "cache": json.dumps({**about, **fields})})
        with pytest.raises(ValueError, match=message):
            StreamingCache.load(path, model)

    row = about["rows"][0]
    refuse("holds more than ctx_size", rows=[{**row, "held": 24}])
    refuse("holds more than ctx_size", rows=[{**row, "first": 20}])
    refuse("at least 0", rows=[{**row, "first": -1}])
    refuse("at least 0", rows=[{**row, "held": True}])
    refuse("at least 0", rows=[])
    refuse("longer than the text", columns=3)
    refuse("longer than the text, or than any", rows=[{**row, "evicted": 10**25}], columns=10**26)
    refuse("does not follow from what it evicted", rows=[{**row, "evicted": row["evicted"] + 1}], columns=99)
    refuse("does not follow from what it evicted", rows=[{**row, "held": 3}])
    refuse("does not begin at the beginning", rows=[{**row, "evicted": 0, "first": 2}])
    refuse("nothing sensible", options={"ctx_size": 3, "n_keep": 4, "n_discard": 1})
    refuse("nothing sensible", rows=[{"held": 3}, {"nothing": 4}])
    refuse(
        "expected 19 to 24 slots|expected 24 to 24 slots", {**tensors, "1.keys": tensors["1.keys"][:, :, :5].clone()}
    )
    refuse("of 1 rows", {**tensors, "1.values": tensors["1.values"].repeat(2, 1, 1, 1)})
    refuse("torch.float32, got torch.float16", {**tensors, "1.values": tensors["1.values"].half()})
    refuse("other tensors", {name: tensor for name, tensor in tensors.items() if name != "2.values"})
    wide = {name: tensor.repeat(1, 2, 1, 1) for name, tensor in tensors.items()}
    refuse(r"KV heads and head_dim \(3, 8\) of the model, got \(6, 8\)", wide)
    refuse("other tensors", {**tensors, "9.values": tensors["2.values"].clone()})
    for text in ("", "[" * 100_000, "[]", "3"):
        save_file(tensors, path, metadata={**metadata, "cache": text})
        with pytest.raises(ValueError, match="says nothing sensible of a cache"):
            StreamingCache.load(path, model)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="no streaming cache of this version"):
        StreamingCache.load(path, model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((5, 4, -1), r"ctx_size=5, n_keep=4, n_discard=-1: expected n_keep >= 0 and ctx_size > n_keep \+ 1"),
        ((24, -1, -1), "ctx_size=24, n_keep=-1, n_discard=-1: expected n_keep >= 0"),
        ((24, 4, 0), "ctx_size=24, n_keep=4, n_discard=0: expected n_discard of -1"),
        ((24, 4, -2), "n_discard=-2: expected n_discard"),
        ((24, 4, 21), "of 1 to ctx_size - n_keep = 20"),
        ((24.0, 4, 1), "ctx_size=24.0.*whole numbers"),
        ((24, True, 1), "n_keep=True.*whole numbers"),
        (
            (401, 4, -1),
            "ctx_size=401, n_keep=4, n_discard=-1: expected a ctx_size of at most the model's 400",
        ),
    ],
)
def test_options_that_do_not_go_together(saved: Save, options: Any, message: str) -> None:
    model = load(saved("llama"))
    with pytest.raises(ValueError, match=message):
        StreamingCache(model, *options)


def test_models_that_do_not_stream() -> None:
    gpt2 = plain("gpt2", {"n_embd": 48, "n_layer": 3, "n_head": 6})
    with pytest.raises(ValueError, match="gpt2 has learned positions"):
        StreamingCache(gpt2, 24)
    mamba = plain("mamba", {"state_size": 4})
    with pytest.raises(ValueError, match="it is not known how positions of 'mamba' stream; expected one of llama"):
        StreamingCache(mamba, 24)


def test_states_of_another_shape(streamed: Any) -> None:
    _, cache, _ = streamed
    before = cache.state
    with pytest.raises(ValueError, match="key_states: batch, kv_heads, head_dim"):
        cache.update(torch.zeros(2, 3, 1, 8), torch.zeros(2, 3, 1, 8), 0)
    with pytest.raises(ValueError, match="value_states: 2 tokens, but key_states has 1"):
        cache.update(torch.zeros(1, 3, 1, 8), torch.zeros(1, 3, 2, 8), 0)
    assert cache.layers[0].held == before


def test_padding_that_nobody_told_of(saved: Save) -> None:
    for case in ("llama", "bloom", "plain"):
        model, ids = load(saved("llama" if case == "plain" else case)), prompt_ids(2, 9)
        if case == "plain":
            model = plain_twin(model)
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        with pytest.raises(ValueError, match="attention_mask: rows with padding stream in generate"):
            model(ids, attention_mask=mask, past_key_values=StreamingCache(model, 24))
        if case == "plain":
            with pytest.raises(ValueError, match="attention_mask: rows with padding stream in generate"):
                model.generate(ids, attention_mask=mask, past_key_values=StreamingCache(model, 24), max_new_tokens=3)
            continue
        for rows in (slice(0, 2), slice(1, 2)):
            cache = StreamingCache(model, 24)
            options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0}
            text = model.generate(ids[rows], attention_mask=mask[rows], past_key_values=cache, **options)
            with pytest.raises(ValueError, match="attention_mask: rows with padding"):
                model(text[:, -2:], past_key_values=cache)


def test_learned_positions_outside_of_generate(saved: Save, tmp_path: Path) -> None:
    model = load(saved("opt"))
    with pytest.raises(ValueError, match="opt has learned positions"):
        StreamingCache(model, 24)
    cache = model.streaming_cache(StreamingOptions(24))
    logits(model, prompt_ids(1, 24), cache)
    with pytest.raises(ValueError, match="positions are learned, and the tokens that stayed have to be computed again"):
        logits(model, prompt_ids(1, 1), cache)
    with pytest.raises(ValueError, match="save: a cache of learned positions"):
        cache.save(tmp_path / "cache.safetensors")


@pytest.mark.parametrize("case", ["llama", "bloom", "falcon-rw"])
def test_a_mask_of_ones_may_be_as_long_as_the_text(saved: Save, case: str) -> None:
    model, ids = load(saved(case)), prompt_ids(1, 60)
    expected = logits(model, ids, StreamingCache(model, 24))
    for tried in (model, plain_twin(model)):
        cache = StreamingCache(tried, 24)
        for i, token in enumerate(ids.unbind(1)):
            with torch.no_grad():
                mask = torch.ones(1, i + 1, dtype=torch.int64)
                found = tried(input_ids=token[:, None], attention_mask=mask, past_key_values=cache).logits[:, -1]
            same(found, expected[:, i], 2e-5)


def test_a_pass_that_cannot_be_taken_back(saved: Save, tmp_path: Path, monkeypatch: Any) -> None:
    """More tokens than there is room overwrite what was held: the cache does not go on."""
    model = load(saved("bloom"), tiers=(SimulatedTier("gpu", budget=100_000, bandwidth=1e12), Tier("cpu")))
    ids, cache = prompt_ids(1, 90), StreamingCache(model, 24)
    logits(model, ids[:, :50], cache)
    forward, calls = HybridMLP.forward, []

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no more")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(HybridMLP, "forward", fails)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        model(ids[:, 50:], past_key_values=cache)
    monkeypatch.undo()
    for going_on in (
        lambda: logits(model, ids[:, :1], cache),
        lambda: cache.crop(-1),
        lambda: cache.save(tmp_path / "cache.safetensors"),
    ):
        with pytest.raises(ValueError, match="a pass through the model has failed halfway"):
            going_on()
