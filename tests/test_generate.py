"""generate() of a loaded model, beside transformers' own on the same weights."""

import copy
import threading

import pytest
import torch
from transformers import (
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.log import warn_once
from hf_sparse.modeling import Placement, SkipRule, Tier, hybrid_blocks, magnitude
from tiny_models import plain_twin, prompt_ids, save_checkpoint, save_tokenizer

QUICK = {"calibration_tokens": 64, "max_perplexity_increase": 0}
GREEDY = {"do_sample": False, "max_new_tokens": 14, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def tokenizer_and_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    save_checkpoint("llama", directory)
    return save_tokenizer(directory), directory


@pytest.fixture(scope="module", params=["one tier", "two tiers"])
def pair(request, tokenizer_and_directory):
    """A 4-bit model, on one tier or split between two, and transformers' model of the dequantized weights."""
    _, directory = tokenizer_and_directory
    quantization = WeightOnlyQuantConfig(group_size=32, compute_dtype="fp32")
    model = SparseAutoModelForCausalLM.from_pretrained(directory, quantization_config=quantization, **QUICK)
    if request.param == "two tiers":
        generator = torch.Generator().manual_seed(4)
        assignment = {b.id: torch.randint(0, 2, (b.neurons,), generator=generator) for b in hybrid_blocks(model)}
        model.place(Placement((Tier("fast"), Tier("cpu")), assignment))
        assert {b.id.kind for b in hybrid_blocks(model) if len(b.shards) == 2} == {"attention", "mlp"}
    reference = plain_twin(model)
    return model, reference


@pytest.fixture
def model(pair):
    return pair[0]


def test_what_comes_back_is_a_transformers_model_of_the_same_class(pair):
    model, reference = pair
    assert isinstance(model, PreTrainedModel) and isinstance(model, type(reference))
    assert type(model).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"use_cache": False},
        {"cache_implementation": "static", "disable_compile": True},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_greedy_and_beams_equal_transformers(pair, options):
    model, reference = pair
    ids = prompt_ids(1 if "prompt_lookup_num_tokens" in options else 2, 7)
    assert torch.equal(model.generate(ids, **GREEDY, **options), reference.generate(ids, **GREEDY, **options))


def test_sampling_equals_transformers_from_the_same_seed(pair):
    model, reference = pair
    options = {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 20,
        "max_new_tokens": 12,
        "num_return_sequences": 3,
        "pad_token_id": 0,
    }
    results = []
    for one in (model, reference):
        torch.manual_seed(5)
        results.append(one.generate(prompt_ids(1, 5), **options))
    assert torch.equal(*results)


def test_scores_and_hidden_states_are_returned(pair):
    model, reference = pair
    options = GREEDY | {
        "output_scores": True,
        "output_logits": True,
        "output_attentions": True,
        "output_hidden_states": True,
        "return_dict_in_generate": True,
    }
    options["max_new_tokens"] = 4
    for one in (model, reference):
        one.set_attn_implementation("eager")
    got, expected = (one.generate(prompt_ids(2, 6), **options) for one in (model, reference))
    for one in (model, reference):
        one.set_attn_implementation("sdpa")
    torch.testing.assert_close(got.scores, expected.scores, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(got.attentions, expected.attentions, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(got.hidden_states, expected.hidden_states, rtol=1e-3, atol=1e-4)


def test_each_row_of_a_left_padded_batch_equals_its_solo_run(model):
    for block in hybrid_blocks(model):
        if block.id.kind == "mlp":
            block.rule = magnitude(gate=0.02)
    prompts = [prompt_ids(1, length, seed=length)[0] for length in (1, 4, 9)]
    width = max(map(len, prompts))
    ids = torch.stack([torch.cat([torch.zeros(width - len(p), dtype=torch.long), p]) for p in prompts])
    mask = torch.stack(
        [torch.cat([torch.zeros(width - len(p), dtype=torch.long), torch.ones_like(p)]) for p in prompts]
    )
    model.reset_active_fraction()
    batch = model.generate(ids, attention_mask=mask, **GREEDY)[:, width:]
    assert 0 < model.active_fraction() < 1
    for row, prompt in zip(batch, prompts, strict=True):
        assert torch.equal(row, model.generate(prompt[None], **GREEDY)[0, len(prompt) :])
    for block in hybrid_blocks(model):
        if block.id.kind == "mlp":
            block.rule = SkipRule()


def test_a_returned_cache_is_continued(pair):
    model, _ = pair
    ids = prompt_ids(1, 6)
    options = GREEDY | {"return_dict_in_generate": True}
    whole = model.generate(ids, **options).sequences
    first = model.generate(ids, **(options | {"max_new_tokens": 5}))
    cache = first.get("cache", first.get("past_key_values"))
    assert cache.get_seq_length() == first.sequences.shape[1] - 1
    rest = model.generate(first.sequences, cache=cache, **(options | {"max_new_tokens": 9}))
    assert torch.equal(rest.sequences, whole)


def test_text_streamers(model, tokenizer_and_directory, capsys):
    tokenizer, _ = tokenizer_and_directory
    inputs = tokenizer("for x in the", return_tensors="pt")
    text = tokenizer.decode(model.generate(**inputs, **GREEDY)[0, inputs.input_ids.shape[1] :])
    model.generate(**inputs, streamer=TextStreamer(tokenizer, skip_prompt=True), **GREEDY)
    assert capsys.readouterr().out == text + "\n"
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    thread = threading.Thread(target=model.generate, kwargs={**inputs, **GREEDY, "streamer": streamer})
    thread.start()
    assert "".join(streamer) == text
    thread.join()


def test_stopping_criteria(model):
    class AtLength(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 10)

    out = model.generate(prompt_ids(1, 6), stopping_criteria=StoppingCriteriaList([AtLength()]), **GREEDY)
    assert out.shape == (1, 10)


def test_pipeline(model, tokenizer_and_directory):
    tokenizer, _ = tokenizer_and_directory
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    (answer,) = generator("for x in", max_new_tokens=5, do_sample=False)
    assert answer["generated_text"].startswith("for x in") and len(answer["generated_text"]) > len("for x in")


@pytest.mark.parametrize(
    "ids", [torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, 3, dtype=torch.long), torch.ones(4, dtype=torch.long)]
)
def test_an_empty_prompt_is_an_error(model, ids):
    with pytest.raises(ValueError, match=r"inputs: expected token ids \[batch, tokens\]"):
        model.generate(ids, max_new_tokens=2)


def test_a_prompt_beyond_the_positions(model, tmp_path, caplog):
    warn_once.cache_clear()
    ids = prompt_ids(1, 165)
    assert model.generate(ids, **(GREEDY | {"max_new_tokens": 2})).shape[1] == 167
    assert "165 tokens, the model 160 positions" in caplog.text
    save_checkpoint("opt", tmp_path)
    opt = SparseAutoModelForCausalLM.from_pretrained(tmp_path, **QUICK)
    with pytest.raises(ValueError, match="165 tokens, the model 160 positions"):
        opt.generate(ids, max_new_tokens=2)
    with pytest.raises(ValueError, match="150 tokens, the model 160 positions, max_new_tokens is 11"):
        opt.generate(ids[:, :150], max_new_tokens=11)
    assert opt.generate(ids[:, :150], **(GREEDY | {"max_new_tokens": 10})).shape[1] == 160


def test_right_padding_is_warned_about(model, caplog):
    ids = prompt_ids(2, 6)
    ids[1, 4:] = 0
    from transformers.utils import logging as transformers_logging

    transformers_logging.get_logger("transformers").propagate = True
    try:
        model.generate(ids, attention_mask=(ids != 0).long(), **GREEDY)
    finally:
        transformers_logging.get_logger("transformers").propagate = False
    assert "right-padding was detected" in caplog.text


def test_moving_the_model_elsewhere_is_refused(model):
    assert model.to("cpu") is model
    with pytest.raises(ValueError, match="placed on cpu by its plan"):
        model.to("meta")


def test_a_copy_computes_the_same(model):
    ids = prompt_ids(2, 7)
    expected = model.generate(ids, **GREEDY)
    other = copy.deepcopy(model)
    assert type(other) is type(model)
    assert torch.equal(other.generate(ids, **GREEDY), expected)


def test_sizes_count_the_neurons(pair):
    model, reference = pair
    assert model.num_parameters() == reference.num_parameters()
    assert model.get_memory_footprint() == sum(tier.nbytes for tier in model.placement_summary().tiers)
    with pytest.raises(ValueError, match="load_state_dict"):
        model.load_state_dict(model.state_dict())


def test_a_forward_pass_with_gradients_is_not_silently_wrong(model):
    embeddings = torch.randn(1, 5, 48, requires_grad=True)
    model(inputs_embeds=embeddings).logits.sum().backward()
    assert embeddings.grad.abs().min() > 0
