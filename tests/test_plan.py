"""PlacementPlan: the round trip, and every way a plan can be broken, by field."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from hf_sparse.modeling import BlockId, BlockShape, SkipRule
from hf_sparse.plan import BlockProfile, PlacementPlan, PlanError, PlanKey, PlannedPredictor

MLP, EXACT, LAST, HEADS = BlockId(0, "mlp"), BlockId(5, "mlp"), BlockId(10, "mlp"), BlockId(2, "attention")
NEURONS = {MLP: 11, EXACT: 17, LAST: 13, HEADS: 3}
HIDDEN, RANK, ATTENDED = 7, 5, 6


def make_plan(seed: int = 0) -> PlacementPlan:
    g = torch.Generator().manual_seed(seed)
    shapes = {"fc1": (RANK, HIDDEN), "fc2": (NEURONS[LAST], RANK), "bias": (NEURONS[LAST],)}
    return PlacementPlan(
        key=PlanKey("ab" * 32, {"weight_dtype": "nf4", "group_size": 64, "compute_dtype": "int8"}, {"tokens": 4096}),
        model_type="llama",
        blocks={
            id: BlockProfile(torch.rand(n, generator=g) * 9, torch.rand(n, generator=g)) for id, n in NEURONS.items()
        },
        rules={
            MLP: SkipRule(
                "magnitude",
                {
                    "input": torch.rand(HIDDEN, generator=g),
                    "gate": torch.rand(NEURONS[MLP], generator=g),
                    "hidden": torch.rand(NEURONS[MLP], generator=g),
                },
            ),
            EXACT: SkipRule("exact"),
            LAST: SkipRule("predicted", {"hidden": torch.rand(NEURONS[LAST], generator=g)}),
            HEADS: SkipRule("magnitude", {"output": torch.rand(ATTENDED, generator=g)}),
        },
        predictors={
            LAST: PlannedPredictor(
                {name: torch.randn(shape, generator=g) for name, shape in shapes.items()},
                "int8",
                nbytes=240,
                recall=0.98,
                precision=0.5,
                kept=0.25,
                bytes_saved=77,
            )
        },
        calibration_report={"tokens": 4096, "dense_perplexity": 12.5, "by_layer": [0.1, None, True]},
        library_version="0.1.0",
        base_model="someone/model",
        base_model_revision="0f" * 20,
        gguf_file="model (1).Q4_0.gguf",
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    make_plan().save_pretrained(tmp_path / "plan")
    return tmp_path / "plan"


def rewrite(directory: Path, *, fields=None, tensors=None, rehash: bool = True) -> None:
    """Lets `fields` change the JSON and `tensors` the tensors of a saved plan, with a hash that fits."""
    content = json.loads((directory / "plan.json").read_text())
    if tensors is not None:
        stored = load_file(directory / "plan.safetensors")
        tensors(stored)
        packed = save(stored)
        (directory / "plan.safetensors").write_bytes(packed)
        if rehash:
            content["tensors_sha256"] = hashlib.sha256(packed).hexdigest()
    if fields is not None:
        fields(content)
    (directory / "plan.json").write_text(json.dumps(content))


def error_of(directory: Path) -> PlanError:
    with pytest.raises(PlanError) as caught:
        PlacementPlan.from_pretrained(directory)
    assert f"{caught.value.field}: got " in str(caught.value)
    assert ", expected " in str(caught.value)
    return caught.value


def test_round_trip(saved: Path) -> None:
    plan, read = make_plan(), PlacementPlan.from_pretrained(saved)
    assert (read.key, read.model_type, read.rules) == (plan.key, plan.model_type, plan.rules)
    assert (read.calibration_report, read.library_version) == (plan.calibration_report, plan.library_version)
    assert (read.base_model, read.base_model_revision) == (plan.base_model, plan.base_model_revision)
    assert read.gguf_file == plan.gguf_file
    assert set(read.blocks) == set(plan.blocks)
    for id, profile in plan.blocks.items():
        assert torch.equal(read.blocks[id].impact, profile.impact)
        assert torch.equal(read.blocks[id].active_fraction, profile.active_fraction)
    assert set(read.predictors) == {LAST}
    planned, as_read = plan.predictors[LAST], read.predictors[LAST]
    assert as_read.to_dict() == planned.to_dict()
    for name, tensor in planned.tensors.items():
        assert torch.equal(as_read.tensors[name], tensor)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["plan"]
    assert sorted(path.name for path in saved.iterdir()) == ["plan.json", "plan.safetensors"]


def test_thresholds_are_tensors_and_kinds_and_places_are_text(saved: Path) -> None:
    blocks = json.loads((saved / "plan.json").read_text())["blocks"]
    assert blocks["0.mlp"]["rule"] == {"kind": "magnitude", "below": ["gate", "hidden", "input"]}
    assert blocks["2.attention"]["rule"] == {"kind": "magnitude", "below": ["output"]}
    stored = load_file(saved / "plan.safetensors")
    below = {f"{id}.below.{place}": t for id, rule in make_plan().rules.items() for place, t in rule.below.items()}
    assert len(below) == 5 and {name for name in stored if ".below." in name} == set(below)
    assert all(torch.equal(stored[name], thresholds) for name, thresholds in below.items())


@pytest.mark.parametrize("rule", [SkipRule(), SkipRule("exact"), SkipRule("magnitude"), None])
def test_rules_without_thresholds_and_attention_without_a_rule(tmp_path: Path, rule: SkipRule | None) -> None:
    plan = make_plan()
    plan.rules = {MLP: rule or SkipRule(), EXACT: SkipRule("exact"), LAST: SkipRule("predicted")}
    plan.rules |= {} if rule is None else {HEADS: rule}
    plan.save_pretrained(tmp_path)
    assert PlacementPlan.from_pretrained(tmp_path).rules == plan.rules


def test_a_plan_replaces_an_older_one(saved: Path) -> None:
    newer = make_plan(seed=1)
    newer.save_pretrained(saved)
    assert torch.equal(PlacementPlan.from_pretrained(saved).blocks[MLP].impact, newer.blocks[MLP].impact)


def test_tensors_that_share_memory_or_are_views_are_saved(tmp_path: Path) -> None:
    plan = make_plan()
    both = torch.rand(NEURONS[MLP], 2)
    plan.blocks[MLP] = BlockProfile(both[:, 0], both[:, 0])
    plan.predictors[LAST].tensors["fc1"] = torch.randn(HIDDEN, RANK).to(torch.bfloat16).T
    plan.rules[MLP] = SkipRule("magnitude", {"gate": both[:, 0], "hidden": both[:, 0]})
    plan.save_pretrained(tmp_path)
    read = PlacementPlan.from_pretrained(tmp_path)
    assert torch.equal(read.blocks[MLP].active_fraction, both[:, 0])
    assert torch.equal(read.rules[MLP].below["hidden"], both[:, 0])
    assert torch.equal(read.predictors[LAST].tensors["fc1"], plan.predictors[LAST].tensors["fc1"])


def test_no_plan_is_not_a_broken_plan(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PlacementPlan.from_pretrained(tmp_path)


# Broken files


def test_truncated_json(saved: Path) -> None:
    text = (saved / "plan.json").read_text()
    for length in (0, 1, len(text) // 2, len(text) - 1):
        (saved / "plan.json").write_text(text[:length])
        error = error_of(saved)
        assert error.field == "file"
        assert "plan.json" in str(error)


@pytest.mark.parametrize("text", ["[1]", "null", '"plan"', "[" * 100_000, b"\xff\xfe", '{"a": NaN}', '{"a": Infinity}'])
def test_json_of_another_kind(saved: Path, text: str | bytes) -> None:
    (saved / "plan.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert error_of(saved).field == "file"


def test_torn_pair(saved: Path, tmp_path: Path) -> None:
    make_plan(seed=1).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "plan.safetensors").replace(saved / "plan.safetensors")
    assert error_of(saved).field == "tensors_sha256"


def test_missing_tensors_file(saved: Path) -> None:
    (saved / "plan.safetensors").unlink()
    error = error_of(saved)
    assert error.field == "file"
    assert "plan.safetensors" in str(error)


def test_tensors_file_of_another_kind(saved: Path) -> None:
    for content in (b"", b"junk", b"\xff" * 64, (saved / "plan.safetensors").read_bytes()[:-1]):
        (saved / "plan.safetensors").write_bytes(content)
        rewrite(saved, fields=lambda f, c=content: f.update(tensors_sha256=hashlib.sha256(c).hexdigest()))
        assert error_of(saved).field == "file"


def test_oversized_json(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_sparse.plan._LARGEST_JSON", 100)
    assert error_of(saved).field == "file"


def _paths(value: dict, path: tuple = ()) -> list[tuple]:
    """Every field of the JSON that must be there."""
    optional = {("calibration_report",), ("key", "quantization"), ("key", "calibration")}
    found = []
    for name, inner in value.items():
        here = (*path, name)
        if here[-1] != "rule" and not (len(here) == 2 and here[0] == "blocks"):
            found.append(here)
        if isinstance(inner, dict) and here not in optional and name not in ("rule", "predictor"):
            found += _paths(inner, here)
    return found


def _field(path: tuple) -> str:
    return (
        f"blocks[{path[1]}]" + "".join(f".{p}" for p in path[2:])
        if path[0] == "blocks" and path[1:]
        else ".".join(path)
    )


def test_every_missing_field_and_every_wrong_type_is_named(saved: Path) -> None:
    text = (saved / "plan.json").read_text()
    paths = _paths(json.loads(text))
    assert ("blocks", "10.mlp", "neurons") in paths
    assert len(paths) == 19
    for path in paths:
        for wrong in (None, "remove", "7", 7.0, True, [], {"a": 1}):
            if path[0] in ("base_model", "base_model_revision", "gguf_file") and wrong in (None, "remove"):
                continue  # a plan of a local model has none
            content = json.loads(text)
            inner = content
            for name in path[:-1]:
                inner = inner[name]
            if isinstance(wrong, type(inner[path[-1]])):
                continue
            if wrong == "remove":
                del inner[path[-1]]
            else:
                inner[path[-1]] = wrong
            (saved / "plan.json").write_text(json.dumps(content))
            assert error_of(saved).field == _field(path), (path, wrong)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("format", lambda f: f.update(format="other")),
        ("format_version", lambda f: f.update(format_version=1)),
        ("model_type", lambda f: f.update(model_type="")),
        ("key.checkpoint", lambda f: f["key"].update(checkpoint="xyz")),
        ("0.mlp.active_fraction", lambda f: f.update(blocks={})),
        ("blocks[00.mlp]", lambda f: f["blocks"].update({"00.mlp": f["blocks"].pop("0.mlp")})),
        ("blocks[٣.mlp]", lambda f: f["blocks"].update({"٣.mlp": f["blocks"]["0.mlp"]})),
        ("blocks[0.moe]", lambda f: f["blocks"].update({"0.moe": f["blocks"]["0.mlp"]})),
        ("blocks[../0.mlp]", lambda f: f["blocks"].update({"../0.mlp": f["blocks"]["0.mlp"]})),
        ("3.mlp.impact", lambda f: f["blocks"].update({"3.mlp": f["blocks"]["0.mlp"]})),
        ("10.mlp.active_fraction", lambda f: f["blocks"].pop("10.mlp")),
        ("blocks[0.mlp].neurons", lambda f: f["blocks"]["0.mlp"].update(neurons=12)),
        ("blocks[0.mlp].neurons", lambda f: f["blocks"]["0.mlp"].update(neurons="11")),
        ("blocks[5.mlp].rule", lambda f: f["blocks"]["5.mlp"].update(rule=None)),
        ("blocks[5.mlp].rule", lambda f: f["blocks"]["5.mlp"].pop("rule")),
        ("0.mlp.below.gate", lambda f: f["blocks"]["0.mlp"].pop("rule")),
        ("blocks[0.mlp].rule", lambda f: f["blocks"]["0.mlp"].update(rule="exact")),
        ("blocks[0.mlp].rule.kind", lambda f: f["blocks"]["0.mlp"].update(rule={})),
        ("blocks[0.mlp].rule.kind", lambda f: f["blocks"]["0.mlp"]["rule"].update(kind="oracle")),
        ("blocks[0.mlp].rule.kind", lambda f: f["blocks"]["0.mlp"]["rule"].update(kind=["exact"])),
        ("blocks[0.mlp].rule.below", lambda f: f["blocks"]["0.mlp"].update(rule={"kind": "magnitude"})),
        ("blocks[0.mlp].rule.below", lambda f: f["blocks"]["0.mlp"]["rule"].update(below="gate")),
        ("blocks[0.mlp].rule.below", lambda f: f["blocks"]["0.mlp"]["rule"].update(below={"gate": 0.1})),
        ("blocks[0.mlp].rule.below", lambda f: f["blocks"]["0.mlp"]["rule"]["below"].append("output")),
        ("blocks[0.mlp].rule.below", lambda f: f["blocks"]["0.mlp"]["rule"]["below"].append("gate")),
        ("blocks[0.mlp].rule.below", lambda f: f["blocks"]["0.mlp"]["rule"]["below"].append(None)),
        ("blocks[0.mlp].rule.below", lambda f: f["blocks"]["0.mlp"]["rule"]["below"].append([])),
        ("blocks[2.attention].rule.below", lambda f: f["blocks"]["2.attention"]["rule"]["below"].append("hidden")),
        ("2.attention.below.input", lambda f: f["blocks"]["2.attention"]["rule"]["below"].append("input")),
        ("0.mlp.below.hidden", lambda f: f["blocks"]["0.mlp"]["rule"]["below"].remove("hidden")),
        ("2.attention.below.output", lambda f: f["blocks"]["2.attention"].update(rule=None)),
        ("blocks[0.mlp].rule", lambda f: f["blocks"]["0.mlp"]["rule"].update(kind="exact")),  # with gate thresholds
        ("blocks[2.attention].rule", lambda f: f["blocks"]["2.attention"]["rule"].update(kind="none")),
        ("blocks[0.mlp].rule.extra", lambda f: f["blocks"]["0.mlp"]["rule"].update(extra=1)),
        ("blocks[0.mlp].rule.threshold", lambda f: f["blocks"]["0.mlp"]["rule"].update(threshold=0.031)),
        ("blocks[0.mlp].predictor", lambda f: f["blocks"]["0.mlp"].update(rule={"kind": "predicted", "below": []})),
        ("10.mlp.predictor.bias", lambda f: f["blocks"]["10.mlp"]["rule"].update(kind="exact")),
    ],
)
def test_bad_fields(saved: Path, field: str, change) -> None:
    rewrite(saved, fields=change)
    assert error_of(saved).field == field


def _with(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[1] = value
    return tensor


@pytest.mark.parametrize(
    ("name", "field", "change"),
    [
        ("0.mlp.impact", "0.mlp.impact", None),
        ("0.mlp.impact", "blocks[0.mlp].impact", lambda t: t.double()),
        ("0.mlp.impact", "blocks[0.mlp].impact", lambda t: t.long()),
        ("0.mlp.impact", "blocks[0.mlp].impact", lambda t: t[:, None]),
        ("0.mlp.impact", "blocks[0.mlp].neurons", lambda t: t[:10]),
        ("0.mlp.impact", "blocks[0.mlp].impact", lambda t: _with(t, float("nan"))),
        ("0.mlp.impact", "blocks[0.mlp].impact", lambda t: _with(t, float("inf"))),
        ("0.mlp.impact", "blocks[0.mlp].impact", lambda t: _with(t, -1.0)),
        ("2.attention.active_fraction", "2.attention.active_fraction", None),
        ("2.attention.active_fraction", "blocks[2.attention].active_fraction", lambda t: t[:2]),
        ("2.attention.active_fraction", "blocks[2.attention].active_fraction", lambda t: _with(t, 1.5)),
        ("2.attention.active_fraction", "blocks[2.attention].active_fraction", lambda t: _with(t, -0.5)),
        ("0.mlp.below.gate", "0.mlp.below.gate", None),
        ("0.mlp.below.gate", "blocks[0.mlp].rule.below.gate", lambda t: t[:10]),
        ("0.mlp.below.gate", "blocks[0.mlp].rule.below.gate", lambda t: t[:1]),
        ("0.mlp.below.hidden", "blocks[0.mlp].rule.below.hidden", lambda t: torch.cat((t, t))),
        ("0.mlp.below.hidden", "blocks[0.mlp].rule.below.hidden", lambda t: _with(t, float("inf"))),
        ("0.mlp.below.gate", "blocks[0.mlp].rule", lambda t: _with(t, float("nan"))),
        ("0.mlp.below.gate", "blocks[0.mlp].rule", lambda t: _with(t, -0.1)),
        ("0.mlp.below.input", "0.mlp.below.input", None),
        ("0.mlp.below.input", "blocks[0.mlp].rule", lambda t: t.half()),
        ("0.mlp.below.input", "blocks[0.mlp].rule", lambda t: t[None]),
        ("0.mlp.below.input", "blocks[0.mlp].rule.below.input", lambda t: t[:0]),
        ("2.attention.below.output", "2.attention.below.output", None),
        ("2.attention.below.output", "blocks[2.attention].rule", lambda t: t.double()),
        ("2.attention.below.hidden", "2.attention.below.hidden", lambda t: torch.ones(2)),
        ("10.mlp.predictor.fc1", "10.mlp.predictor.fc1", None),
        ("10.mlp.predictor.fc1", "blocks[10.mlp].predictor.fc1", lambda t: t.flatten()),
        ("10.mlp.predictor.fc1", "blocks[10.mlp].predictor.fc1", lambda t: t.to(torch.int8)),
        ("10.mlp.predictor.fc1", "blocks[10.mlp].predictor.width", lambda t: t[:0]),
        ("10.mlp.predictor.fc1", "blocks[10.mlp].predictor.fc1", lambda t: _with(t, 3e38)),
        ("10.mlp.predictor.fc2", "blocks[10.mlp].predictor.fc2", lambda t: t.T),
        ("10.mlp.predictor.fc2", "blocks[10.mlp].predictor.fc2", lambda t: t[:, :4]),
        ("10.mlp.predictor.bias", "blocks[10.mlp].predictor.bias", lambda t: t[:12]),
        ("10.mlp.predictor.bias", "blocks[10.mlp].predictor.bias", lambda t: _with(t, float("nan"))),
        ("foreign", "foreign", lambda t: torch.ones(2)),
    ],
)
def test_bad_tensors(saved: Path, name: str, field: str, change) -> None:
    def tensors(stored: dict[str, torch.Tensor]) -> None:
        old = stored.pop(name, None)
        if change is not None:
            stored[name] = change(old).contiguous()

    rewrite(saved, tensors=tensors)
    assert error_of(saved).field == field


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), in_json=st.booleans())
def test_damage_is_never_anything_but_a_plan_error(tmp_path_factory, seed: int, in_json: bool) -> None:
    rng = random.Random(seed)
    directory = tmp_path_factory.mktemp("damage")
    make_plan().save_pretrained(directory)
    path = directory / ("plan.json" if in_json else "plan.safetensors")
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(content))
        content[at : at + rng.randint(0, 2)] = bytes(rng.randrange(256) for _ in range(rng.randint(0, 2)))
    path.write_bytes(content)
    if not in_json:  # past the checksum, so that the tensors' own checks are what is tested
        rewrite(directory, fields=lambda f: f.update(tensors_sha256=hashlib.sha256(content).hexdigest()))
    try:
        read = PlacementPlan.from_pretrained(directory)
    except PlanError:
        return
    assert {id: p.impact.numel() for id, p in read.blocks.items()} == NEURONS


# Plans that may not be saved


def _rule(place: str, width: int) -> SkipRule:
    return SkipRule("magnitude", {place: torch.ones(width)})


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("key.checkpoint", lambda p: replace(p, key=replace(p.key, checkpoint="AB" * 32))),
        ("key.quantization", lambda p: replace(p, key=replace(p.key, quantization={"a": float("nan")}))),
        ("key.calibration", lambda p: replace(p, key=replace(p.key, calibration={"a": torch.ones(1)}))),
        ("calibration_report", lambda p: replace(p, calibration_report={"loss": float("inf")})),
        ("calibration_report", lambda p: replace(p, calibration_report=[1])),
        ("model_type", lambda p: replace(p, model_type=None)),
        ("blocks[10.mlp].predictor", lambda p: replace(p, predictors={})),
        ("blocks[0.mlp].predictor", lambda p: replace(p, predictors={**p.predictors, MLP: p.predictors[LAST]})),
        (
            "blocks[10.mlp].predictor",
            lambda p: replace(p, predictors={LAST: PlannedPredictor({"fc1": torch.ones(2, 3)}, "nf4", 1)}),
        ),
        ("blocks", lambda p: replace(p, blocks={}, rules={}, predictors={})),
        ("blocks[4.mlp]", lambda p: replace(p, rules={**p.rules, BlockId(4, "mlp"): SkipRule()})),
        ("blocks[10.mlp].rule", lambda p: replace(p, rules={MLP: SkipRule(), EXACT: SkipRule()}, predictors={})),
        ("blocks[0.mlp].rule", lambda p: replace(p, rules={**p.rules, MLP: {"kind": "exact", "below": []}})),
        ("blocks[0.mlp].rule.below", lambda p: replace(p, rules={**p.rules, MLP: _rule("output", NEURONS[MLP])})),
        ("blocks[0.mlp].rule.below.gate", lambda p: replace(p, rules={**p.rules, MLP: _rule("gate", 1)})),
        ("blocks[0.mlp].rule.below.hidden", lambda p: replace(p, rules={**p.rules, MLP: _rule("hidden", 12)})),
        ("blocks[0.mlp].rule.below.input", lambda p: replace(p, rules={**p.rules, MLP: _rule("input", 0)})),
        ("blocks[2.attention].rule.below", lambda p: replace(p, rules={**p.rules, HEADS: _rule("gate", 3)})),
    ],
)
def test_a_bad_plan_is_not_saved(tmp_path: Path, field: str, change) -> None:
    with pytest.raises(PlanError) as caught:
        change(make_plan()).save_pretrained(tmp_path / "plan")
    assert caught.value.field == field
    assert not (tmp_path / "plan").exists()


# Against a model


def shapes(neurons=NEURONS, hidden: int = HIDDEN, attended: int = ATTENDED, heads: int = 6):
    mlp, attention = ("input", "gate", "hidden"), {"input": hidden, "output": attended}
    return {
        id: BlockShape(n, {p: hidden if p == "input" else n for p in mlp}, hidden, n)
        if id.kind == "mlp"
        else BlockShape(n, attention, hidden, heads)
        for id, n in neurons.items()
    }


MODEL = {
    "model_type": "llama",
    "shapes": shapes(),
    "key": make_plan().key,
}


def test_a_plan_that_fits_its_model() -> None:
    make_plan().check_model(**MODEL)


@pytest.mark.parametrize(
    ("field", "model"),
    [
        ("model_type", {"model_type": "opt"}),
        ("key.checkpoint", {"key": replace(make_plan().key, checkpoint="cd" * 32)}),
        ("key.quantization", {"key": replace(make_plan().key, quantization={})}),
        ("key.calibration", {"key": replace(make_plan().key, calibration={"tokens": 4097})}),
        ("blocks[10.mlp]", {"shapes": shapes({id: n for id, n in NEURONS.items() if id != LAST})}),
        ("blocks[11.mlp]", {"shapes": shapes({**NEURONS, BlockId(11, "mlp"): 13})}),
        ("blocks[2.attention].neurons", {"shapes": shapes({**NEURONS, HEADS: 4})}),
        ("blocks[0.mlp].rule.below.input", {"shapes": shapes(hidden=HIDDEN + 1)}),
        ("blocks[2.attention].rule.below.output", {"shapes": shapes(attended=ATTENDED + 2)}),
        (
            "blocks[2.attention].rule.below.output",
            {"shapes": {**shapes(), HEADS: BlockShape(NEURONS[HEADS], {}, HIDDEN, 0)}},
        ),
    ],
)
def test_a_plan_that_does_not_fit(field: str, model) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan().check_model(**(MODEL | model))
    assert caught.value.field == field


def test_a_predictor_of_another_width_does_not_fit() -> None:
    plan = make_plan()
    plan.rules[MLP] = SkipRule("exact")
    with pytest.raises(PlanError) as caught:
        plan.check_model(**(MODEL | {"shapes": shapes(hidden=HIDDEN + 1)}))
    assert caught.value.field == "blocks[10.mlp].predictor.fc1"


@pytest.mark.parametrize("heads", [0, 5, 7])
def test_a_predictor_of_other_heads_does_not_fit(heads: int) -> None:
    plan = make_plan()
    plan.rules[HEADS] = SkipRule("predicted", {"output": torch.rand(ATTENDED)})
    tensors = {"fc1": torch.randn(RANK, HIDDEN), "fc2": torch.randn(6, RANK), "bias": torch.randn(6)}
    plan.predictors[HEADS] = replace(plan.predictors[LAST], tensors=tensors)
    plan.check_model(**MODEL)
    with pytest.raises(PlanError) as caught:
        plan.check_model(**(MODEL | {"shapes": shapes(heads=heads)}))
    assert caught.value.field == "blocks[2.attention].predictor.fc2"
