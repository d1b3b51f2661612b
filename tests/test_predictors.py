"""Predictors: trained where they pay, told in the plan, and loaded from elsewhere."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_sparse import PlacementPlan, SparseAutoModelForCausalLM, load_predictors, predictor_training
from hf_sparse.evaluation import perplexity
from hf_sparse.modeling import BlockId, HybridMLP, SkipRule, hybrid_blocks, skipping
from hf_sparse.plan import PlanError, PlannedPredictor
from hf_sparse.predictor_training import train_predictors
from tiny_models import prompt_ids, save_checkpoint

NEURONS, HIDDEN = 320, 48


def low_rank_opt(directory: Path) -> None:
    """An OPT of which few neurons fire, and which depend on few directions of the input: what a predictor can learn.
    The more layers came before, the more directions.
    """
    reference = save_checkpoint("opt", directory, ffn_dim=NEURONS)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for number, layer in enumerate(reference.model.decoder.layers):
            count = 2 + 2 * number
            directions = torch.randn(count, HIDDEN, generator=generator)
            layer.fc1.weight.copy_(directions[torch.randint(0, count, (NEURONS,), generator=generator)] * 0.5)
            layer.fc1.bias.fill_(-5.0)
    reference.save_pretrained(directory)


@pytest.fixture(scope="module")
def sparse_checkpoint(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("opt")
    low_rank_opt(directory)
    return directory


def load(directory: Path, **options):
    options = {"calibration_tokens": 64, "max_perplexity_increase": 0} | options
    return SparseAutoModelForCausalLM.from_pretrained(directory, **options)


def mlps(model) -> dict:
    return {block.id: block for block in hybrid_blocks(model) if isinstance(block, HybridMLP)}


TRAINING, HELD_OUT = prompt_ids(8, 100, seed=1), prompt_ids(4, 100, seed=2)


def train(model, limit: float = math.inf):
    with torch.no_grad():
        return train_predictors(model, mlps(model), TRAINING, HELD_OUT, limit, 0)


def seen_by(block: HybridMLP, model, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the block reads on `rows` and which neurons are active then."""
    inputs = []
    handle = block.register_forward_pre_hook(lambda module, args: inputs.append(args[0].flatten(0, -2)))
    with torch.no_grad(), skipping("never"):
        model(rows)
    handle.remove()
    x = torch.cat(inputs)
    weights, (shard,) = block.dequantize(), block.shards
    name = block.names.gate or block.names.up
    gates = x @ weights[f"{block.prefix}{name}.weight"].T + shard.biases.get(name, torch.zeros(()))
    return x, gates > 0


# Training


def test_what_is_told_of_a_predictor_is_what_it_does(sparse_checkpoint, monkeypatch):
    monkeypatch.setattr(predictor_training, "PREDICTOR_INCREASE", 1.0)
    model = load(sparse_checkpoint)
    planned, rules = train(model)
    assert len(planned) >= 2 and rules == dict.fromkeys(planned, SkipRule("predicted"))
    for id, block in mlps(model).items():
        assert (block.rule.kind, block.predictor is None) == (
            ("predicted", False) if id in planned else ("exact", True)
        )
    for id, told in planned.items():
        block = mlps(model)[id]
        x, active = seen_by(block, model, HELD_OUT)
        chosen = block.predictor.active(x)
        assert told.recall == pytest.approx(float(chosen[active].float().mean()), abs=2e-3) and told.recall >= 0.95
        assert told.precision == pytest.approx(float(active[chosen].float().mean()), abs=2e-3)
        assert told.kept == pytest.approx(float(chosen.float().mean()), abs=2e-3)
        assert told.nbytes == block.predictor.nbytes and told.width == block.predictor.fc1.rows
        assert told.weight_dtype == block.predictor.fc1.weight_dtype == block.predictor.fc2.weight_dtype
        # read: without a predictor all of fc1 and the active rows of fc2, with one the predictor and rows it names
        whole = block.bytes_per_neuron() * block.neurons / 2
        share, hits = float(active.float().mean()), float((active & chosen).float().mean())
        saved = whole * (1 + share) - (told.nbytes + whole * (float(chosen.float().mean()) + hits))
        assert told.bytes_saved == pytest.approx(saved, abs=0.005 * whole) and told.bytes_saved > 0
    blocks = sum(block.bytes_per_neuron() * block.neurons for block in hybrid_blocks(model))
    assert sum(told.nbytes for told in planned.values()) <= 0.08 * blocks


def test_perplexity_stays_within_a_thousandth_of_the_exact_rule(sparse_checkpoint):
    model = load(sparse_checkpoint)
    exact = perplexity(model, HELD_OUT, "always")
    train(model)
    assert perplexity(model, HELD_OUT, "always") <= exact * 1.001


def test_no_predictor_pays_that_costs_more_than_it_saves(tmp_path, monkeypatch):
    """In a layer as narrow as this one a predictor is nearly as large as the gates that it could save."""
    monkeypatch.setattr(predictor_training, "PREDICTOR_INCREASE", 1.0)
    save_checkpoint("opt", tmp_path)
    model = load(tmp_path, load_in_4bit=True)
    assert train(model) == ({}, {})  # by their size
    monkeypatch.setattr(predictor_training, "WEIGHT_SHARE", 1.0)
    assert train(model) == ({}, {})  # by what they save
    assert all(block.rule == SkipRule("exact") and block.predictor is None for block in mlps(model).values())


def test_no_predictor_is_larger_than_the_budget(sparse_checkpoint, monkeypatch):
    monkeypatch.setattr(predictor_training, "PREDICTOR_INCREASE", 1.0)
    model = load(sparse_checkpoint)
    blocks = sum(block.bytes_per_neuron() * block.neurons for block in hybrid_blocks(model))
    free, _ = train(model)
    share = 0.7 * sum(told.nbytes for told in free.values()) / blocks
    monkeypatch.setattr(predictor_training, "WEIGHT_SHARE", share)
    planned, _ = train(model)
    assert 0 < sum(told.nbytes for told in planned.values()) <= share * blocks


def test_a_limit_that_nothing_keeps_leaves_the_exact_rule(sparse_checkpoint):
    model = load(sparse_checkpoint)
    assert train(model, limit=0.0) == ({}, {})
    assert all(block.rule == SkipRule("exact") and block.predictor is None for block in mlps(model).values())


def test_a_limit_takes_off_the_layers_that_lose_most(sparse_checkpoint, monkeypatch):
    """Perplexity as if only so much lost output were allowed: recall rises, or predictors go, until that holds."""
    monkeypatch.setattr(predictor_training, "PREDICTOR_INCREASE", 1.0)
    model = load(sparse_checkpoint)
    free, _ = train(model)
    missed = lambda: sum(1 - told for told in recalls(model).values())  # noqa: E731

    def recalls(model) -> dict:
        found = {}
        for id, block in mlps(model).items():
            if block.predictor is not None:
                x, active = seen_by(block, model, HELD_OUT)
                found[id] = float(block.predictor.active(x)[active].float().mean())
        return found

    allowed = missed() / 3
    monkeypatch.setattr(predictor_training, "perplexity", lambda *_: 1.0 + missed())
    planned, _ = train(model, limit=1.0 + allowed)
    assert missed() <= allowed and set(planned) <= set(free)
    assert all(planned[id].recall >= free[id].recall for id in planned)
    monkeypatch.setattr(predictor_training, "perplexity", lambda *_: 1.0 + (len(recalls(model)) > 1))
    planned, _ = train(model, limit=1.5)
    assert len(planned) <= 1 < len(free)


def test_the_storage_that_reads_less_is_taken(sparse_checkpoint, monkeypatch):
    monkeypatch.setattr(predictor_training, "PREDICTOR_INCREASE", 1.0)
    monkeypatch.setattr(predictor_training, "WEIGHT_SHARE", 0.3)  # so that it does not decide
    model = load(sparse_checkpoint)
    saved = {}
    for allowed in (("nf4",), ("int8",), ("nf4", "int8")):
        monkeypatch.setattr(predictor_training, "WEIGHT_DTYPES", allowed)
        planned, _ = train(model)
        assert {told.weight_dtype for told in planned.values()} <= set(allowed)
        saved[allowed] = {id: told.bytes_saved for id, told in planned.items()}
    nf4, int8, both = saved.values()
    assert both and both == {id: max(nf4.get(id, 0), int8.get(id, 0)) for id in nf4.keys() | int8.keys()}


def test_training_is_the_same_each_time(sparse_checkpoint):
    first, second = (train(load(sparse_checkpoint))[0] for _ in range(2))
    assert {id: told.to_dict() for id, told in first.items()} == {id: told.to_dict() for id, told in second.items()}


# In the plan


@pytest.fixture
def plan(sparse_checkpoint, monkeypatch, tmp_path):
    """A plan with predictors, and where it is saved."""
    monkeypatch.setattr(predictor_training, "PREDICTOR_INCREASE", 1.0)
    model = load(sparse_checkpoint)
    planned, rules = train(model)
    plan = dataclasses.replace(model.plan, rules=model.plan.rules | rules, predictors=planned)
    plan.save_pretrained(tmp_path / "plan")
    return plan, tmp_path / "plan"


def test_a_plan_tells_of_its_predictors(plan, sparse_checkpoint):
    plan, directory = plan
    content = json.loads((directory / "plan.json").read_text())
    for id, told in plan.predictors.items():
        assert content["blocks"][str(id)]["predictor"] == told.to_dict()
    assert all(
        ("predictor" in fields) == (fields["rule"] or {"kind": ""})["kind"].startswith("predicted")
        for fields in content["blocks"].values()
    )
    read = PlacementPlan.from_pretrained(directory)
    assert {id: told.to_dict() for id, told in read.predictors.items()} == {
        id: told.to_dict() for id, told in plan.predictors.items()
    }
    model = load(sparse_checkpoint, plan=directory)
    for id, told in plan.predictors.items():
        predictor = mlps(model)[id].predictor
        assert (predictor.fc1.weight_dtype, predictor.nbytes) == (told.weight_dtype, told.nbytes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("width", 7),
        ("width", None),
        ("weight_dtype", "int7"),
        ("weight_dtype", None),
        ("weight_dtype", ["nf4"]),
        ("nbytes", 0),
        ("nbytes", 1.5),
        ("nbytes", True),
        ("recall", 1.01),
        ("recall", "1"),
        ("precision", -0.1),
        ("kept", True),
        ("bytes_saved", 0.5),
        ("skill", 1.0),
    ],
)
def test_what_is_told_of_a_predictor_is_checked(plan, field, value):
    plan, directory = plan
    block = str(next(iter(plan.predictors)))
    content = json.loads((directory / "plan.json").read_text())
    content["blocks"][block]["predictor"][field] = value
    (directory / "plan.json").write_text(json.dumps(content))
    with pytest.raises(PlanError) as caught:
        PlacementPlan.from_pretrained(directory)
    assert caught.value.field == f"blocks[{block}].predictor.{field}"


@pytest.mark.parametrize("field", ["width", "weight_dtype", "nbytes", "recall", "precision", "kept", "bytes_saved"])
def test_what_is_not_told_of_a_predictor_is_missed(plan, field):
    plan, directory = plan
    block = str(next(iter(plan.predictors)))
    content = json.loads((directory / "plan.json").read_text())
    del content["blocks"][block]["predictor"][field]
    (directory / "plan.json").write_text(json.dumps(content))
    with pytest.raises(PlanError, match=r"got nothing, expected a field"):
        PlacementPlan.from_pretrained(directory)


# From elsewhere

RANK, GATES = 20, 88


@pytest.fixture(scope="module")
def relu_checkpoint(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("relu")
    save_checkpoint("llama", directory, hidden_act="relu")
    return directory


def save_predictors(folder: Path, layers: int = 3, form: str = "safetensors", seed: int = 0) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for layer in range(layers):
        fc1 = torch.randn(RANK, HIDDEN, generator=generator)
        fc2 = torch.randn(GATES, RANK, generator=generator) - 0.3
        made.append({"fc1.weight": fc1, "fc2.weight": fc2})
        if form == "pt":
            torch.save(made[-1], folder / f"model_{layer}.pt")
        else:
            save_file(made[-1], folder / f"model_{layer}.safetensors")
    return made


@pytest.mark.parametrize("form", ["safetensors", "pt"])
@pytest.mark.parametrize("reads", ["residual", "block"])
def test_published_predictors_decide_as_they_do_where_they_come_from(relu_checkpoint, tmp_path, form, reads):
    made = save_predictors(tmp_path, form=form)
    model = load(relu_checkpoint)
    load_predictors(tmp_path, model, reads=reads)
    inputs = {}
    for number, layer in enumerate(model.model.layers):
        norm = layer.post_attention_layernorm
        norm.register_forward_hook(lambda module, args, out, n=number: inputs.update({n: (args[0], out)}))
    with torch.no_grad(), skipping("never"):
        model(prompt_ids(2, 30))
    for id, block in mlps(model).items():
        assert block.rule == SkipRule("predicted")
        before, behind = (x.flatten(0, 1) for x in inputs[id.layer])
        fed = before if reads == "residual" else behind
        scores = (fed @ made[id.layer]["fc1.weight"].T).relu() @ made[id.layer]["fc2.weight"].T
        clear = scores.abs() > 0.05 * scores.abs().amax(1, keepdim=True)
        assert 0.1 < float((scores > 0).float().mean()) < 0.9 and float(clear.float().mean()) > 0.7
        assert torch.equal(block.predictor.active(behind)[clear], (scores > 0)[clear])


def test_loaded_predictors_are_used_and_saved(relu_checkpoint, tmp_path):
    (tmp_path / "predictors").mkdir()
    save_predictors(tmp_path / "predictors")
    model = load(relu_checkpoint)
    load_predictors(tmp_path / "predictors", model, weight_dtype="nf4")
    assert all(told.recall is None and told.weight_dtype == "nf4" for told in model.plan.predictors.values())
    out = model.generate(prompt_ids(1, 9), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert 0 < model.active_fraction() < 0.5  # of half that ReLU lets pass, those that are named
    model.save_pretrained(tmp_path / "saved")
    again = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(block.predictor.fc1.weight_dtype == "nf4" for block in mlps(again).values())
    assert torch.equal(out, again.generate(prompt_ids(1, 9), max_new_tokens=6, do_sample=False, eos_token_id=None))


def test_the_threshold_of_their_config_counts(relu_checkpoint, tmp_path, caplog):
    save_predictors(tmp_path)
    (tmp_path / "config.json").write_text('{"sparse_threshold": -0.5}')
    model = load(relu_checkpoint)
    load_predictors(tmp_path, model, reads="block")
    assert all(float(block.predictor.bias.unique()) == 0.5 for block in mlps(model).values())
    load_predictors(tmp_path, model)
    assert all(not block.predictor.bias.any() for block in mlps(model).values())
    assert "sparse_threshold -0.5 is taken for 0" in caplog.text
    (tmp_path / "config.json").write_text('{"sparse_threshold": "low"}')
    with pytest.raises(ValueError, match=r"config.json: sparse_threshold: got 'low', expected a number within"):
        load_predictors(tmp_path, model)


class Evil:
    """Unpickled, it would leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_nothing_but_tensors_is_unpickled(relu_checkpoint, tmp_path):
    save_predictors(tmp_path, form="pt")
    mark = tmp_path / "mark"
    torch.save({"fc1.weight": Evil(mark), "fc2.weight": torch.zeros(GATES, RANK)}, tmp_path / "model_1.pt")
    model = load(relu_checkpoint)
    with pytest.raises(ValueError, match=r"model_1.pt: cannot be read as tensors alone"):
        load_predictors(tmp_path, model)
    assert not mark.exists()
    assert all(block.rule == SkipRule("exact") and block.predictor is None for block in mlps(model).values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc1.weight": torch.zeros(RANK, 47)}, r"fc1.weight: got torch.float32 \[20, 47\], expected .* \[20, 48\]"),
        ({"fc1.weight": torch.zeros(48)}, r"fc1.weight: got torch.float32 \[48\], expected .* \[r, 48\]"),
        ({"fc2.weight": torch.zeros(87, RANK)}, r"fc2.weight: got torch.float32 \[87, 20\], expected .* \[88, 20\]"),
        ({"fc2.weight": torch.zeros(GATES, 21)}, r"fc2.weight: got torch.float32 \[88, 21\], expected .* \[88, 20\]"),
        ({"fc2.weight": torch.zeros(GATES, RANK, dtype=torch.int8)}, r"fc2.weight: got torch.int8"),
        ({"fc1.weight": torch.full((RANK, HIDDEN), math.nan)}, r"fc1.weight: got .* within \+-1e\+30"),
        ({"fc1.weight": torch.full((RANK, HIDDEN), 3e38)}, r"fc1.weight: got .* within \+-1e\+30"),
        ({"fc1.weight": torch.zeros(RANK, HIDDEN, dtype=torch.float64)}, r"fc1.weight: got torch.float64"),
        ({"fc1.weight": torch.zeros(RANK, HIDDEN).to(torch.float8_e4m3fn)}, r"fc1.weight: got torch.float8"),
        ({"fc1.bias": torch.zeros(RANK)}, r"got \['fc1.bias', .*expected the tensors fc1.weight, fc2.weight"),
    ],
)
def test_a_predictor_that_does_not_fit_is_named(relu_checkpoint, tmp_path, change, message):
    made = save_predictors(tmp_path)
    save_file(made[1] | change, tmp_path / "model_1.safetensors")
    model = load(relu_checkpoint)
    with pytest.raises(ValueError, match=rf"model_1.safetensors: {message}"):
        load_predictors(tmp_path, model)
    assert all(block.rule == SkipRule("exact") and block.predictor is None for block in mlps(model).values())


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model_1.pt", b"hello world, this is no archive", "model_1.pt: cannot be read as tensors alone"),
        (
            "model_1.pt",
            {"fc1.weight": torch.zeros(RANK, HIDDEN).to_sparse()},
            "fc1.weight: got sparse or absent torch.float32",
        ),
        ("model_01.pt", {}, "got model_01.pt and model_1.pt, expected one file for layer 1"),
        ("config.json", b'{"sparse_threshold": ' + b"9" * 400 + b"}", "config.json: sparse_threshold: got 9999"),
        ("config.json", b'{"sparse_threshold": 1e39}', "config.json: sparse_threshold: got 1e+39"),
        ("config.json", b"[" * 100_000, "config.json: expected a JSON object"),
    ],
)
def test_files_that_hold_something_else_are_named(relu_checkpoint, tmp_path, file, content, message):
    save_predictors(tmp_path, form="pt")
    if isinstance(content, bytes):
        (tmp_path / file).write_bytes(content)
    else:
        torch.save({"fc2.weight": torch.zeros(GATES, RANK)} | content, tmp_path / file)
    model = load(relu_checkpoint)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_predictors(tmp_path, model)
    assert all(block.rule == SkipRule("exact") and block.predictor is None for block in mlps(model).values())


@pytest.mark.parametrize("weight_dtype", [None, ["int8"], "int3"])
def test_a_storage_that_there_is_not_is_refused(relu_checkpoint, tmp_path, weight_dtype):
    save_predictors(tmp_path)
    with pytest.raises(ValueError, match=r"weight_dtype: got .*, allowed are"):
        load_predictors(tmp_path, load(relu_checkpoint), weight_dtype=weight_dtype)


def test_predictors_of_heads_stay(relu_checkpoint, tmp_path):
    model = load(relu_checkpoint)
    attention = BlockId(1, "attention")
    tensors = {"fc1": torch.randn(5, HIDDEN), "fc2": torch.randn(6, 5), "bias": torch.zeros(6)}
    plan = dataclasses.replace(
        model.plan,
        rules=model.plan.rules | {attention: SkipRule("predicted")},
        predictors={attention: PlannedPredictor(tensors, "int8", nbytes=99)},
    )
    model.use_plan(plan)
    save_predictors(tmp_path)
    load_predictors(tmp_path, model)
    assert len(model.plan.predictors) == 4
    assert next(block for block in hybrid_blocks(model) if block.id == attention).predictor is not None
    model.save_pretrained(tmp_path / "saved")


def test_files_that_are_missing_or_too_many_are_named(relu_checkpoint, tmp_path):
    model = load(relu_checkpoint)
    save_predictors(tmp_path, layers=2)
    with pytest.raises(ValueError, match=r"got no model_2.safetensors or .pt, expected one for each of 3 layers"):
        load_predictors(tmp_path, model)
    save_predictors(tmp_path, layers=11)
    with pytest.raises(ValueError, match=r"model_3.safetensors: the model has no layer 3"):
        load_predictors(tmp_path, model)
    with pytest.raises(FileNotFoundError):
        load_predictors(tmp_path / "nowhere", model)
    with pytest.raises(ValueError, match="reads: got 'norm', allowed are 'residual', 'block'"):
        load_predictors(tmp_path, model, reads="norm")
    (tmp_path / "model_0.safetensors").write_bytes(b"junk")
    for extra in range(3, 11):
        (tmp_path / f"model_{extra}.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model_0.safetensors: cannot be read"):
        load_predictors(tmp_path, model)


def test_models_that_no_such_predictor_serves_are_refused(sparse_checkpoint, tmp_path):
    save_predictors(tmp_path)
    for layer in range(3):
        tensors = {"fc1.weight": torch.zeros(RANK, HIDDEN), "fc2.weight": torch.zeros(NEURONS, RANK)}
        save_file(tensors, tmp_path / f"model_{layer}.safetensors")
    with pytest.raises(ValueError, match="reads: 'residual' needs an RMS norm in front of the MLP, which opt lacks"):
        load_predictors(tmp_path, load(sparse_checkpoint))
    save_checkpoint("llama", tmp_path / "silu")
    with pytest.raises(ValueError, match="model: predictors serve activations that are exactly zero"):
        load_predictors(tmp_path, load(tmp_path / "silu"))
