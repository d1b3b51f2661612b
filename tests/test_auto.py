"""from_pretrained: what it accepts, what it refuses, and where plans are kept."""

import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.hardware import find_tiers
from hf_sparse.log import warn_once
from hf_sparse.modeling import Tier, hybrid_blocks
from tiny_models import prompt_ids, save_checkpoint, save_tokenizer

QUICK = {"calibration_tokens": 64, "max_perplexity_increase": 0}


def load(directory, **options):
    return SparseAutoModelForCausalLM.from_pretrained(directory, **(QUICK | options))


@pytest.fixture
def llama(tmp_path):
    directory = tmp_path / "llama"
    save_checkpoint("llama", directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(autouse=True)
def warnings_come_anew():
    warn_once.cache_clear()


@torch.no_grad()
def logits(model):
    return model(prompt_ids(2, 9)).logits


# Sources


def test_shards_equal_one_file(llama, tmp_path):
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert torch.equal(logits(load(tmp_path / "shards")), logits(load(llama)))


def test_base_model_names_without_prefix_are_understood(tmp_path):
    reference = save_checkpoint("bloom", tmp_path)
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(logits(load(tmp_path)), logits(reference), rtol=1e-5, atol=1e-5)


def test_a_hub_id_in_the_cache_needs_no_network(llama, tmp_path):
    """A snapshot laid out as huggingface_hub caches it, in a process in which every socket is refused."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(llama, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    code = (
        "import socket, sys\n"
        "def refuse(*args): raise AssertionError('network')\n"
        "socket.socket.connect = refuse\n"
        "from hf_sparse import SparseAutoModelForCausalLM as Auto\n"
        "model = Auto.from_pretrained('someone/tiny', calibration_tokens=64)\n"
        "print(type(model).__name__)\n"
    )
    environment = os.environ | {
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
    }
    for expected in ("Calibrating on", "Using the plan in"):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
        assert run.stdout.split() == ["LlamaForCausalLM"]
        assert expected in run.stderr
    assert not list((repository / "snapshots").rglob("hf_sparse_plan"))  # a snapshot is never written to
    (plan,) = (tmp_path / "home").rglob("plan.json")
    assert commit in str(plan)


# Options


def test_dtype_and_attention_mean_what_they_mean_in_transformers(llama):
    model = load(llama, dtype="bfloat16", attn_implementation="eager")
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"
    assert logits(model).dtype == torch.bfloat16
    assert load(llama, torch_dtype=torch.float16).dtype == torch.float16
    assert load(llama).dtype == torch.float32


def test_config_fields_may_be_overridden(llama):
    assert load(llama, rms_norm_eps=1e-4, use_cache=False).config.use_cache is False


@pytest.mark.parametrize("options", [{"lod_in_4bit": True}, {"max_memory": {0: "1GB"}}])
def test_an_unknown_argument_is_an_error(llama, options):
    with pytest.raises(TypeError, match=f"unknown arguments: {next(iter(options))}.*load_in_4bit"):
        load(llama, **options)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_bitsandbytes_config_is_understood(llama, quant_type):
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=quant_type, bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = load(llama, quantization_config=config)
    assert model.config.quantization_config == WeightOnlyQuantConfig(weight_dtype=quant_type, compute_dtype="bf16")


@pytest.mark.parametrize("weight_dtype", ["int4", "nf4", "fp4", "int8"])
@pytest.mark.parametrize("compute_dtype", ["int8", "bf16", "fp32"])
@pytest.mark.parametrize("group_size", [32, 128])
def test_every_way_to_store_and_compute(llama, weight_dtype, compute_dtype, group_size):
    quantization = WeightOnlyQuantConfig(weight_dtype=weight_dtype, compute_dtype=compute_dtype, group_size=group_size)
    model = load(llama, quantization_config=quantization)
    full = logits(AutoModelForCausalLM.from_pretrained(llama))
    error = (logits(model) - full).norm() / full.norm()
    assert error < {"int8": 0.02, "fp4": 0.35}.get(weight_dtype, 0.25)


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}, None])
def test_device_map(llama, device_map):
    load(llama, device_map=device_map)


def test_contradictions_are_errors(llama):
    for options, message in (
        ({"device_map": "sequential"}, "device_map: expected"),
        ({"use_safetensors": False}, "use_safetensors: False"),
        ({"dtype": "int8"}, "dtype: expected"),
        ({"load_in_4bit": True, "quantization_config": WeightOnlyQuantConfig(weight_dtype="int8")}, "load_in_4bit"),
        ({"gpu_budget": "11 potatoes"}, "gpu_budget: got '11 potatoes'"),
        ({"gpu_budget": -1}, "gpu_budget: got -1"),
        ({"tiers": (Tier("fast", budget=1000), Tier("cpu"))}, "1000"),
    ):
        with pytest.raises(ValueError, match=message):
            load(llama, **options)


def test_without_a_gpu_a_budget_is_accepted_with_one_warning(llama, caplog):
    if len(find_tiers(None)) > 1:
        pytest.skip("this machine has a GPU")
    for _ in range(2):
        assert [tier.name for tier in load(llama, gpu_budget="11GB").placement_summary().tiers] == ["cpu"]
    assert caplog.text.count("all neurons stay on the CPU") == 1


def test_loading_info(llama):
    model, info = load(llama, output_loading_info=True)
    assert type(model).__name__ == "LlamaForCausalLM" and info["missing_keys"] == set() == info["unexpected_keys"]


# Broken input


def test_an_architecture_outside_the_table_is_told_what_is_in_it(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'gpt2'.*bloom, falcon, gemma2.*smollm3"):
        load(tmp_path)


def test_missing_things_are_named(llama, tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        load(tmp_path / "nowhere")
    (llama / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        load(llama)


def test_a_truncated_file_is_named_and_nothing_is_left_behind(llama):
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    before = set(llama.rglob("*"))
    with pytest.raises((OSError, ValueError), match=r"model\.safetensors"):
        load(llama)
    assert set(llama.rglob("*")) == before


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_is_named(llama, name, value):
    tensors = load_file(llama / "model.safetensors")
    tensors[name].view(-1)[3] = value
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=name):
        load(llama, load_in_4bit=True)


def test_tensors_that_lack_or_do_not_fit_are_named(llama):
    path = llama / "model.safetensors"
    whole = load_file(path)
    lacking = {k: v for k, v in whole.items() if k != "model.layers.2.self_attn.v_proj.weight"}
    save_file(lacking, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 tensors of the model: model\.layers\.2\.self_attn\.v_proj\.weight"):
        load(llama)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"):
        save_file(whole | {name: whole[name][:-1].contiguous()}, path, {"format": "pt"})
        with pytest.raises(ValueError, match="expected shape"):
            load(llama)


def test_half_a_packed_projection_is_named(llama, tmp_path):
    load(llama, load_in_4bit=True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.scales"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 tensors of the model: model\.layers\.1\.mlp\.up_proj\.scales"):
        SparseAutoModelForCausalLM.from_pretrained(tmp_path)


def test_without_a_word_in_the_config_the_checkpoint_tells_the_dtype(llama):
    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).save_pretrained(llama)
    config = json.loads((llama / "config.json").read_text())
    del config["dtype"]
    (llama / "config.json").write_text(json.dumps(config))
    assert load(llama).dtype == torch.bfloat16


def test_tensors_without_a_place_are_warned_about(llama, caplog):
    path = llama / "model.safetensors"
    save_file(load_file(path) | {"some.extra.weight": torch.zeros(3)}, path, {"format": "pt"})
    load(llama)
    assert "1 tensors of the checkpoint have no place in the model: some.extra.weight" in caplog.text


# Plans


def plan_files(directory):
    return sorted(directory.rglob("plan.json"))


def test_a_plan_is_made_once_and_kept_beside_the_weights(llama, caplog):
    first = load(llama, load_in_4bit=True)
    (plan,) = plan_files(llama)
    assert plan.parent.parent == llama / "hf_sparse_plan"
    before = plan.read_bytes()
    caplog.clear()
    second = load(llama, load_in_4bit=True)
    assert "Using the plan in" in caplog.text and "Calibrating" not in caplog.text
    assert plan.read_bytes() == before and torch.equal(logits(first), logits(second))


def test_plans_are_keyed_on_quantization_and_calibration_not_on_the_budget(llama, caplog):
    load(llama, load_in_4bit=True)
    total = 400_000
    for budget in (total // 2, total // 3):
        caplog.clear()
        load(llama, load_in_4bit=True, tiers=(Tier("fast", budget=budget, bandwidth=1e11), Tier("cpu")))
        assert "Calibrating" not in caplog.text
    for options in ({"load_in_4bit": False}, {"calibration_tokens": 80}, {"calibration_seed": 1}):
        caplog.clear()
        load(llama, **({"load_in_4bit": True} | options))
        assert "Calibrating" in caplog.text
    assert len(plan_files(llama)) == 4


def test_a_changed_checkpoint_is_calibrated_again(llama, caplog):
    load(llama)
    tensors = load_file(llama / "model.safetensors")
    tensors["model.norm.weight"][0] += 0.5
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    caplog.clear()
    load(llama)
    assert "is not used" in caplog.text and "checkpoint" in caplog.text and "Calibrating" in caplog.text
    caplog.clear()
    load(llama)
    assert "is not used" not in caplog.text


def test_a_config_that_was_changed_has_a_plan_of_its_own(llama, caplog):
    relu = load(llama, hidden_act="relu")
    assert {rule.kind for rule in relu.plan.rules.values()} == {"exact"}
    caplog.clear()
    assert {rule.kind for rule in load(llama).plan.rules.values()} == {"none"}
    assert "Calibrating" in caplog.text


def test_a_saved_placement_beyond_the_budget_is_solved_anew(llama, caplog):
    tiers = (Tier("fast", budget=260_000, bandwidth=1e11), Tier("cpu"))
    load(llama, tiers=tiers)
    (path,) = llama.rglob("placements/*.safetensors")
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        save_file({name: torch.zeros_like(file.get_tensor(name)) for name in file.keys()}, path, metadata)  # noqa: SIM118
    caplog.clear()
    model = load(llama, tiers=tiers)
    assert "over its budget; solving anew" in caplog.text
    assert model.placement_summary().tiers[0].nbytes <= 260_000


def test_a_broken_plan_is_reported_by_field_and_replaced(llama, caplog):
    load(llama)
    (plan,) = plan_files(llama)
    fields = json.loads(plan.read_text())
    fields["model_type"] = 7
    plan.write_text(json.dumps(fields))
    caplog.clear()
    load(llama)
    assert "model_type" in caplog.text and "Calibrating" in caplog.text
    assert json.loads(plan.read_text())["model_type"] == "llama"


def test_a_given_plan_is_used_and_a_missing_one_is_an_error(llama, tmp_path, caplog):
    load(llama).plan.save_pretrained(tmp_path / "plan")
    shutil.rmtree(llama / "hf_sparse_plan")
    caplog.clear()
    load(llama, plan=tmp_path / "plan")
    assert f"Using the plan in {tmp_path / 'plan'}" in caplog.text
    with pytest.raises(OSError, match=r"plan: no plan\.json"):
        load(llama, plan=tmp_path / "other")


def test_an_unwritable_place_is_warned_about_once_and_the_model_loads(llama, monkeypatch, caplog):
    from hf_sparse.plan import PlacementPlan

    def refuse(self, directory):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(PlacementPlan, "save_pretrained", refuse)
    for _ in range(2):
        assert logits(load(llama)).isfinite().all()
    assert caplog.text.count("could not be saved") == 1


def test_two_processes_calibrate_once(llama):
    code = (
        "import sys; from hf_sparse import SparseAutoModelForCausalLM as Auto\n"
        f"Auto.from_pretrained({str(llama)!r}, calibration_tokens=640)\n"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    texts = [run.communicate()[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert sorted("Calibrating on" in text for text in texts) == [False, True]


# Saving


def test_saving_writes_what_loads_again_without_calibration(llama, tmp_path, caplog):
    model = load(llama, load_in_4bit=True, max_perplexity_increase=0.3)
    target = tmp_path / "saved"
    model.save_pretrained(target)
    assert not list(target.glob(".*"))  # the folder in which it was written aside is gone
    caplog.clear()
    again = SparseAutoModelForCausalLM.from_pretrained(target)
    assert "Calibrating" not in caplog.text
    options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
    assert torch.equal(model.generate(prompt_ids(1, 5), **options), again.generate(prompt_ids(1, 5), **options))
    assert [b.rule for b in hybrid_blocks(model) if b.id.kind == "mlp"] == [
        b.rule for b in hybrid_blocks(again) if b.id.kind == "mlp"
    ]
    again.save_pretrained(target)  # over itself
    assert torch.equal(logits(SparseAutoModelForCausalLM.from_pretrained(target)), logits(model))
    with pytest.raises(ValueError, match="quantization_config: the checkpoint is stored as"):
        SparseAutoModelForCausalLM.from_pretrained(
            target, quantization_config=WeightOnlyQuantConfig(weight_dtype="int4")
        )


def test_an_unquantized_model_saves_a_plain_checkpoint(llama, tmp_path):
    model = load(llama, tiers=(Tier("fast", budget=300_000, bandwidth=1e11), Tier("cpu")))
    model.save_pretrained(tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(plain), logits(AutoModelForCausalLM.from_pretrained(llama)))


def test_a_smaller_save_leaves_no_old_shards(llama, tmp_path):
    model = load(llama)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


def test_saving_removes_nothing_but_shards_of_its_own(llama, tmp_path):
    model = load(llama)
    for name in ("model_adapter.safetensors", "model.other.safetensors"):
        (tmp_path / name).write_bytes(b"kept")
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, variant="fp16")
    names = {path.name for path in tmp_path.glob("model*")}
    assert names == {
        "model.safetensors",
        "model.fp16.safetensors",
        "model_adapter.safetensors",
        "model.other.safetensors",
    }
    assert torch.equal(logits(load(tmp_path, variant="fp16")), logits(model))


def test_a_pickled_model_computes_the_same(llama):
    model = load(llama, load_in_4bit=True)
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model) and torch.equal(logits(again), logits(model))


def test_the_class_itself_cannot_be_made():
    with pytest.raises(OSError, match="from_pretrained"):
        SparseAutoModelForCausalLM()
