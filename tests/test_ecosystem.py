"""Libraries that people use around transformers, with a tiny model: PEFT, accelerate, torch.compile, pipelines."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
from chat_models import CHATML, chat_tokenizer, load, save_chat_model
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, TextIteratorStreamer, TextStreamer, pipeline

from hf_sparse import SparseAutoModelForCausalLM, auto
from hf_sparse.adapters import CONFIG, WEIGHTS, AdapterMerger, MergedCheckpoint, is_adapter
from hub_user import logged_in
from tiny_models import prompt_ids, save_checkpoint

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
TOOLS = (
    "{% for t in tools or [] %}{{ t.function.name + '(' + t.function.parameters.properties | join + ')' }}{% endfor %}"
)
QUESTION = [{"role": "user", "content": "Is it assigned?"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ecosystem") / "tiny"
    save_chat_model(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    made = chat_tokenizer(directory)
    made.chat_template = TOOLS + CHATML
    made.save_pretrained(directory)
    return made


@pytest.fixture(scope="module")
def model(directory: Path, tokenizer: Any) -> Any:
    return load(directory)


def said(model: Any, tokenizer: Any, **template: Any) -> str:
    """What `generate` answers to QUESTION."""
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    inputs = tokenizer.apply_chat_template(QUESTION, **options, **template)
    ids = model.generate(**inputs, **GREEDY)
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


# transformers and accelerate


def test_a_pipeline_talks(model: Any, tokenizer: Any) -> None:
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    (answer,) = generator(QUESTION, return_full_text=True, **GREEDY)
    assert answer["generated_text"] == [*QUESTION, {"role": "assistant", "content": said(model, tokenizer)}]
    both = generator(["for x in", "The value"], batch_size=2, return_full_text=False, **GREEDY)
    assert [answers[0].keys() for answers in both] == [{"generated_text"}] * 2


def test_streamers_and_tools(model: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def look_up(name: str) -> str:
        """
        Looks something up.

        Args:
            name: What.
        """
        return name

    text = said(model, tokenizer, tools=[look_up])
    options = {"tools": [look_up], "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    inputs = tokenizer.apply_chat_template(QUESTION, **options)
    assert tokenizer.decode(inputs["input_ids"][0]).startswith("look_up(name)<|im_start|>user")
    model.generate(**inputs, **GREEDY, streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    assert capsys.readouterr().out == text + "\n"
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60, skip_special_tokens=True)
    thread = threading.Thread(target=model.generate, kwargs={**inputs, **GREEDY, "streamer": streamer})
    thread.start()
    assert "".join(streamer) == text
    thread.join()


def test_accelerate_leaves_it_where_it_is(model: Any) -> None:
    ids = prompt_ids(1, 9)
    expected, text = model(ids).logits, model.generate(ids, **GREEDY)
    assert accelerate.infer_auto_device_map(model) == {"": "cpu"}
    for dispatched in (
        accelerate.dispatch_model(copy.deepcopy(model), {"": "cpu"}),
        accelerate.Accelerator(cpu=True).prepare(copy.deepcopy(model)),
    ):
        assert torch.equal(dispatched(ids).logits, expected)
        assert torch.equal(dispatched.generate(ids, **GREEDY), text)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's, of what it does not trace
def test_torch_compile_changes_nothing(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path, num_hidden_layers=1)  # tracing takes seconds for each
    model, ids = load(tmp_path), prompt_ids(1, 9)
    expected, text = model(ids).logits, model.generate(ids, **GREEDY)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(ids).logits, expected)
    assert torch.equal(compiled.generate(ids, **GREEDY), text)
    torch.compiler.reset()


# PEFT


def save_adapter(base: Path, folder: Path, targets: Any, **options: Any) -> Any:
    """A LoRA adapter whose B is not zero, saved by PEFT; returns PEFT's own model of it."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        made = AutoModelForCausalLM.from_pretrained(base)
        config = peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **({"r": 3, "lora_alpha": 5} | options))
        adapted = peft.get_peft_model(made, config)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "lora_embedding" in name or parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.fixture(scope="module")
def unquantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("peft") / "base"
    save_checkpoint("llama", directory, attention_bias=True)
    return directory


def load_unquantized(directory: str | Path) -> Any:
    return SparseAutoModelForCausalLM.from_pretrained(directory, calibration_tokens=64, max_perplexity_increase=0)


BY_MODULE = {
    "rank_pattern": {"down_proj": 4},
    "alpha_pattern": {r"layers\.1\.mlp\.gate_proj": 2},
    "layers_to_transform": [1],
}
ADAPTERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "attention": (["q_proj", "v_proj"], {}),
    "all linear": ("all-linear", {"use_rslora": True}),
    "by module": (["q_proj", "gate_proj", "down_proj"], BY_MODULE),
    "embeddings and head": (["embed_tokens", "lm_head", "o_proj"], {}),
    "biases": (["q_proj", "up_proj"], {"bias": "all"}),
    "saved whole": (["k_proj"], {"modules_to_save": ["lm_head", "norm"]}),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_is_merged_tensor_by_tensor(unquantized: Path, tmp_path: Path, case: str) -> None:
    targets, options = ADAPTERS[case]
    adapted = save_adapter(unquantized, tmp_path, targets, **options)
    merger = AdapterMerger(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(unquantized)
    ids = prompt_ids(2, 11)
    before, expected = plain(ids).logits, adapted(ids).logits
    state = plain.state_dict()
    merger.check(state)
    merged = {name: merger.merge(name, tensor) for name, tensor in state.items()}
    assert {name for name in state if merged[name] is not state[name]} == merger.targets
    plain.load_state_dict(merged)
    found = plain(ids).logits
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max() < 0.01 * (found - before).abs().max()
    assert merger.base_model == str(unquantized) and is_adapter(tmp_path) and not is_adapter(unquantized)


@pytest.mark.parametrize("case", ["llama", "phi3", "falcon-7b", "opt"])
def test_a_model_is_loaded_with_an_adapter(case: str, tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    save_checkpoint(case, base, num_hidden_layers=2)
    adapted = save_adapter(base, folder, "all-linear")
    ids = prompt_ids(2, 11)
    before, model = load_unquantized(base), load_unquantized(folder)
    expected = adapted(ids).logits
    assert (model(ids).logits - expected).abs().max() < 1e-4 * (before(ids).logits - expected).abs().max()
    assert model.plan.key != before.plan.key
    assert model.plan_directory.parent.parent == folder  # beside the adapter: the base model has another


def test_an_adapter_on_the_hub(unquantized: Path, tmp_path: Path) -> None:
    adapted = save_adapter(unquantized, tmp_path / "adapter", ["q_proj", "down_proj"])
    with logged_in(tmp_path):
        HfApi().create_repo("user/adapter")
        HfApi().upload_folder(repo_id="user/adapter", folder_path=tmp_path / "adapter")
        model = load_unquantized("user/adapter")
    ids = prompt_ids(2, 11)
    expected = adapted(ids).logits
    assert (model(ids).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert model.plan.base_model == "user/adapter"


def test_tied_embeddings_are_not_merged(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    model = save_checkpoint("llama-tied-bias", base)
    save_adapter(base, folder, ["embed_tokens"])
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight, which is embeddings and head at once"):
        MergedCheckpoint(auto.open_checkpoint(base, model=model), AdapterMerger(folder), model)


def test_a_merged_tensor_keeps_its_dtype_and_its_shape(unquantized: Path, tmp_path: Path) -> None:
    save_adapter(unquantized, tmp_path, ["q_proj"])
    merger = AdapterMerger(tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert merger.merge(name, torch.zeros(48, 48, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=rf"{name}: expected factors of shape \[48, 40\], got \[48, 3\] and \[3, 48\]"):
        merger.merge(name, torch.zeros(48, 40))
    with pytest.raises(ValueError, match=r"q_proj.weight, .* which the checkpoint does not have"):
        merger.check({name})
    with pytest.raises(ValueError, match="embeddings and head at once"):
        merger.check(merger.targets, tied={name})


def test_the_digest_is_of_config_and_weights(unquantized: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    save_adapter(unquantized, folder, ["q_proj"])
    digests = [AdapterMerger(folder).digest, AdapterMerger(folder).digest]
    change_config(folder, lora_alpha=6)
    digests.append(AdapterMerger(folder).digest)
    tensors = load_file(folder / WEIGHTS)
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, folder / WEIGHTS)
    digests.append(AdapterMerger(folder).digest)
    assert len(set(digests)) == 3 and digests[0] == digests[1]


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_text()) | fields
    (folder / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora: not merged here; merge the adapter with PEFT"),
        (
            {"target_parameters": ["x"], "layer_replication": [[0, 1]]},
            "layer_replication, target_parameters: not merged",
        ),
        ({"something_new": 1}, "something_new: not merged here"),
        ({"peft_type": "IA3"}, "peft_type: expected LORA, got 'IA3'"),
        ({"task_type": "SEQ_CLS"}, "task_type: expected CAUSAL_LM, got 'SEQ_CLS'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: got 'pissa', which changes the base weights"),
        ({"lora_alpha": None}, "lora_alpha: expected a number, got None"),
    ],
)
def test_adapters_that_are_refused(unquantized: Path, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    save_adapter(unquantized, tmp_path, ["q_proj"])
    change_config(tmp_path, **fields)
    with pytest.raises(ValueError, match=message):
        AdapterMerger(tmp_path)


def test_files_that_are_refused(unquantized: Path, tmp_path: Path) -> None:
    save_adapter(unquantized, tmp_path, ["q_proj"])
    tensors = load_file(tmp_path / WEIGHTS)
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    for changed, message in (
        ({key: value for key, value in tensors.items() if key != name}, "expected both lora_A and lora_B"),
        (tensors | {name.replace("lora_B.weight", "lora_magnitude_vector"): torch.ones(1)}, "lora_magnitude_vector"),
        (tensors | {name.replace("lora_B.weight", "lora_B.bias"): torch.ones(1)}, r"lora_B\.bias: not merged here"),
        ({"x": torch.ones(1)}, "x: expected a name that begins with base_model.model."),
    ):
        save_file(changed, tmp_path / WEIGHTS)
        with pytest.raises(ValueError, match=message):
            AdapterMerger(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match=r"has no adapter_model\.safetensors; pickled adapters are never read"):
        AdapterMerger(tmp_path)


def test_peft_wraps_what_is_no_projection_of_a_block(unquantized: Path, tmp_path: Path) -> None:
    adapted = save_adapter(unquantized, tmp_path, ["embed_tokens", "lm_head"])
    model = load_unquantized(unquantized)
    ids = prompt_ids(2, 11)
    before, expected = model(ids).logits, adapted(ids).logits
    found = peft.PeftModel.from_pretrained(model, tmp_path)(ids).logits
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max() < 0.01 * (found - before).abs().max()


@pytest.mark.parametrize("targets", [["q_proj"], ["embed_tokens", "down_proj"]])
def test_where_peft_would_miss_projections_it_says_what_to_do(
    unquantized: Path, tmp_path: Path, targets: list[str]
) -> None:
    save_adapter(unquantized, tmp_path, targets)
    model = load_unquantized(unquantized)
    ids = prompt_ids(1, 9)
    logits, text, names = model(ids).logits, model.generate(ids, **GREEDY), model.state_dict().keys()
    assert torch.equal(model(ids).logits, logits) and torch.equal(model.generate(ids, **GREEDY), text)
    assert model.state_dict().keys() == names
    with pytest.raises(ValueError, match=r"load adapters by SparseAutoModelForCausalLM\.from_pretrained\(ADAPTER\)"):
        peft.PeftModel.from_pretrained(model, tmp_path)
