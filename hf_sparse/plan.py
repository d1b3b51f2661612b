"""PlacementPlan: what was calibrated for one checkpoint, and the two files it is kept in.

`plan.safetensors` holds the tensors (`0.mlp.impact`, `0.mlp.active_fraction`, `0.mlp.predictor.fc1`, ...), `plan.json`
everything else and the sha256 of the first, so that a pair that does not belong together is seen. No weight of the
model is in them. A plan may come from anywhere: nothing is unpickled, and no field is believed before it was checked.
`plan_store.py` knows where plans lie on this machine, `hub.py` how they get to the Hub and back.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo
from safetensors.torch import load, save
from torch import Tensor

from hf_sparse.modeling import BlockId, BlockShape, Predictor, SkipRule
from hf_sparse.modeling.rules import PLACES, RULE_KINDS
from hf_sparse.quantization import WEIGHT_DTYPES

from .hub import fetch_plan, is_repo_id, publish

PLAN_JSON, PLAN_TENSORS = "plan.json", "plan.safetensors"
FORMAT, FORMAT_VERSION = "hf_sparse.plan", 2
_LARGEST_JSON = 2**26
_NAME = r"[\w.-]{1,96}(/[\w.-]{1,96})?"
_FILE = r"[\w.()+ -]{1,250}\.gguf"
_PREDICTOR_TENSORS = ("fc1", "fc2", "bias")
LARGEST_WEIGHT = 1e30  # of a predictor: larger ones have no place in every format of weights
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class PlanError(ValueError):
    """A plan that cannot be used. `field` names what is wrong, such as `blocks[3.mlp].rule.kind`."""

    def __init__(self, where: object, field: str, got: object, expected: str) -> None:
        text = got if isinstance(got, str) else repr(got)
        super().__init__(
            f"{where}: {field}: got {text if len(text) < 200 else text[:200] + '...'}, expected {expected}"
        )
        self.field = field


@dataclass(frozen=True)
class PlanKey:
    """What a plan was calibrated for: `checkpoint` is a sha256 in hex, `quantization` ({} for none) and `calibration`
    are JSON values.
    """

    checkpoint: str
    quantization: dict[str, Any]
    calibration: dict[str, Any]


@dataclass(eq=False)
class BlockProfile:
    """What calibration measured of one block, both float32 [neurons]: `impact` (>= 0) is how much a neuron contributes,
    `active_fraction` (0..1) how often it is computed."""

    impact: Tensor
    active_fraction: Tensor


@dataclass(eq=False)
class PlannedPredictor:
    """`tensors`: `fc1` [r, d_model], `fc2` [neurons, r] and `bias` [neurons], floating; of an attention block, query
    heads for neurons, and active are those that count for more than they take to compute. In use fc1, fc2 are stored in
    `weight_dtype` and all take `nbytes`. On held-out text, all None for one that came from elsewhere: `recall`, share
    of the active neurons that it names; `precision`, share of those it names that are active; `kept`, share of all
    neurons that it names; `bytes_saved` for a token, against reading every gate.
    """

    tensors: dict[str, Tensor]
    weight_dtype: str
    nbytes: int
    recall: float | None = None
    precision: float | None = None
    kept: float | None = None
    bytes_saved: int | None = None

    @property
    def width(self) -> int:
        return self.tensors["fc1"].shape[0]

    def build(self, device: torch.device) -> Predictor:
        return Predictor.from_tensors(self.tensors, device, self.weight_dtype)

    def to_dict(self) -> dict[str, Any]:
        """`width` and the fields but for the tensors: JSON values."""
        return {"width": self.width} | {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tensors"}


@dataclass(eq=False, repr=False)
class PlacementPlan:
    """Everything calibrated for one checkpoint. Profile, rules and predictors do not depend on budgets or hardware.

    `rules[id]` is one for each MLP block at least. `predictors[id]` is there exactly where the rule's kind is
    "predicted". `calibration_report` is any JSON value. `base_model` and `base_model_revision` are the Hub id and the
    commit of what was calibrated, where it came from the Hub; `gguf_file` the name of its file, where that is a GGUF.
    """

    key: PlanKey
    model_type: str
    blocks: dict[BlockId, BlockProfile]
    rules: dict[BlockId, SkipRule]
    predictors: dict[BlockId, PlannedPredictor]
    calibration_report: dict[str, Any]
    library_version: str
    base_model: str | None = None
    base_model_revision: str | None = None
    gguf_file: str | None = None

    def __repr__(self) -> str:
        kinds = ", ".join(sorted({rule.kind for rule in self.rules.values()}))
        return f"PlacementPlan({self.model_type}, {len(self.blocks)} blocks, rules: {kinds}, {self.calibration_report})"

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes both files aside and renames them, the tensors first. Raises PlanError for a plan that could not be
        read again.
        """
        _validate(self, "plan")
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        # Copies: safetensors refuses tensors that share their memory.
        packed = save({name: t.detach().to("cpu", copy=True).contiguous() for name, t in _tensors(self).items()})
        text = json.dumps(_to_json(self, hashlib.sha256(packed).hexdigest()), indent=1, sort_keys=True, allow_nan=False)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as aside:
            Path(aside, PLAN_TENSORS).write_bytes(packed)
            Path(aside, PLAN_JSON).write_text(text, encoding="utf-8")
            for name in (PLAN_TENSORS, PLAN_JSON):
                Path(aside, name).replace(directory / name)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> CommitInfo:
        """Publishes the plan's two files in the model repository `repo_id`, in one commit. `model.push_plan_to_hub`
        adds a card. Arguments and errors are those of `hf_sparse.hub.publish`.
        """
        with tempfile.TemporaryDirectory(prefix="hf_sparse-") as folder:
            self.save_pretrained(Path(folder, "plan"))
            return publish(Path(folder, "plan"), repo_id, **({"commit_message": "Upload plan"} | kwargs))

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **kwargs: Any) -> PlacementPlan:
        """Reads what `save_pretrained` or `push_to_hub` wrote, from a folder or a Hub id; further arguments are those
        of `hf_sparse.hub.fetch_plan`, such as `revision` and `token`.

        Raises OSError where there is no plan, and PlanError, which names file, field, what came and what was expected,
        for one that is damaged, incomplete or of another format.
        """
        directory = Path(name_or_path)
        if not directory.is_dir() and is_repo_id(name_or_path):
            directory = fetch_plan(os.fspath(name_or_path), **kwargs)
        where = directory / PLAN_JSON
        if (size := where.stat().st_size) > _LARGEST_JSON:
            raise PlanError(where, "file", f"{size} bytes", f"at most {_LARGEST_JSON} bytes")
        read = JsonReader(where, parse_json(read_file(where), where))
        if (name := read.value("format", str)) != FORMAT:
            raise PlanError(where, "format", name, repr(FORMAT))
        if (version := read.value("format_version", int)) != FORMAT_VERSION:
            raise PlanError(where, "format_version", version, f"{FORMAT_VERSION}; a newer hf_sparse may read it")
        packed = where.with_name(PLAN_TENSORS)
        contents = read_file(packed)
        # Hashed and used are the same bytes, whoever writes the file meanwhile.
        if (sha256 := hashlib.sha256(contents).hexdigest()) != read.value("tensors_sha256", str):
            raise PlanError(
                packed, "tensors_sha256", sha256, f"{read.value('tensors_sha256', str)}, as {PLAN_JSON} says"
            )
        tensors, _ = parse_tensors(contents, packed)
        key = read.inner("key")
        plan = cls(
            key=PlanKey(key.value("checkpoint", str), key.value("quantization", dict), key.value("calibration", dict)),
            model_type=read.value("model_type", str),
            blocks={},
            rules={},
            predictors={},
            calibration_report=read.value("calibration_report", dict),
            library_version=read.value("library_version", str),
            base_model=read.optional("base_model", str),
            base_model_revision=read.optional("base_model_revision", str),
            gguf_file=read.optional("gguf_file", str),
        )
        blocks = read.inner("blocks")
        for text in blocks.fields:
            try:
                id = BlockId.parse(text)
            except ValueError:
                id = None
            if id is None or str(id) != text:  # "07.mlp" would be a second name of "7.mlp"
                raise PlanError(where, f"blocks[{text}]", text, "a block id such as '0.mlp'")
            block = blocks.inner(text)
            plan.blocks[id] = BlockProfile(
                *(take(tensors, packed, f"{id}.{name}") for name in ("impact", "active_fraction"))
            )
            neurons = block.value("neurons", int)
            if neurons != plan.blocks[id].impact.numel():
                raise PlanError(
                    where,
                    f"blocks[{id}].neurons",
                    neurons,
                    f"{plan.blocks[id].impact.numel()}, the length of its impact",
                )
            if block.fields.get("rule") is not None:
                plan.rules[id] = _read_rule(block.inner("rule"), id, tensors, packed)
                if plan.rules[id].kind == "predicted":
                    plan.predictors[id] = _read_predictor(block.inner("predictor"), id, tensors, packed)
        if tensors:
            raise PlanError(packed, sorted(tensors)[0], "a tensor of that name", "only tensors that plan.json asks for")
        _validate(plan, where)
        return plan

    def check_model(self, *, model_type: str, shapes: Mapping[BlockId, BlockShape], key: PlanKey) -> None:
        """Raises PlanError naming the first field that does not fit the model, whose blocks have these `shapes`."""
        for field, got, expected in (
            ("model_type", self.model_type, model_type),
            ("key.checkpoint", self.key.checkpoint, key.checkpoint),
            ("key.quantization", canonical_json(self.key.quantization), canonical_json(key.quantization)),
            ("key.calibration", canonical_json(self.key.calibration), canonical_json(key.calibration)),
        ):
            if got != expected:
                raise PlanError("plan", field, got, expected)
        for id in sorted(set(shapes) ^ set(self.blocks)):
            got, expected = (
                ("no such block", "one of it") if id in shapes else ("a block", "none: the model has no such block")
            )
            raise PlanError("plan", f"blocks[{id}]", got, expected)
        for id, shape in shapes.items():
            if (neurons := self.blocks[id].impact.numel()) != shape.neurons:
                raise PlanError("plan", f"blocks[{id}].neurons", neurons, f"{shape.neurons}, as the model has")
        for id, rule in self.rules.items():
            for place, thresholds in rule.below.items():
                width = shapes[id].widths.get(place, 0)
                if len(thresholds) != width:
                    raise PlanError("plan", f"blocks[{id}].rule.below.{place}", len(thresholds), f"{width} thresholds")
        for id, predictor in self.predictors.items():
            fc1, fc2 = (list(predictor.tensors[name].shape) for name in ("fc1", "fc2"))
            if fc1[1] != shapes[id].reads:
                expected = f"[r, {shapes[id].reads}], the model's hidden size"
                raise PlanError("plan", f"blocks[{id}].predictor.fc1", fc1, expected)
            if fc2[0] != shapes[id].predicts:
                expected = f"[{shapes[id].predicts}, r], what there is to predict"
                raise PlanError("plan", f"blocks[{id}].predictor.fc2", fc2, expected)


def canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _tensors(plan: PlacementPlan) -> dict[str, Tensor]:
    tensors = {}
    for id, profile in plan.blocks.items():
        tensors[f"{id}.impact"], tensors[f"{id}.active_fraction"] = profile.impact, profile.active_fraction
    for id, rule in plan.rules.items():
        tensors.update({f"{id}.below.{place}": thresholds for place, thresholds in rule.below.items()})
    for id, predictor in plan.predictors.items():
        tensors.update({f"{id}.predictor.{name}": predictor.tensors[name] for name in _PREDICTOR_TENSORS})
    return tensors


def _to_json(plan: PlacementPlan, tensors_sha256: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "library_version": plan.library_version,
        "base_model": plan.base_model,
        "base_model_revision": plan.base_model_revision,
        "gguf_file": plan.gguf_file,
        "model_type": plan.model_type,
        "key": vars(plan.key),
        "blocks": {
            str(id): {"neurons": p.impact.numel(), "rule": _rule_to_json(plan.rules.get(id))}
            | ({"predictor": plan.predictors[id].to_dict()} if id in plan.predictors else {})
            for id, p in plan.blocks.items()
        },
        "calibration_report": plan.calibration_report,
        "tensors_sha256": tensors_sha256,
    }


# Checks that hold for a plan in memory as for one that was read


def _validate(plan: PlacementPlan, where: object) -> None:
    if not isinstance(plan.key.checkpoint, str) or not re.fullmatch("[0-9a-f]{64}", plan.key.checkpoint):
        raise PlanError(where, "key.checkpoint", plan.key.checkpoint, "a sha256: 64 hexadecimal digits")
    for field, value in (
        ("key.quantization", plan.key.quantization),
        ("key.calibration", plan.key.calibration),
        ("calibration_report", plan.calibration_report),
    ):
        _check_json(value, where, field)
    for field, text in (("model_type", plan.model_type), ("library_version", plan.library_version)):
        if not isinstance(text, str) or not text:
            raise PlanError(where, field, text, "a text that is not empty")
    for field, name in (("base_model", plan.base_model), ("base_model_revision", plan.base_model_revision)):
        if name is not None and not (isinstance(name, str) and re.fullmatch(_NAME, name)):
            raise PlanError(where, field, name, "a repository id or commit, or null")
    if (file := plan.gguf_file) is not None and not (isinstance(file, str) and re.fullmatch(_FILE, file)):
        raise PlanError(where, "gguf_file", file, "the name of a file that ends in .gguf, or null")
    if not plan.blocks:
        raise PlanError(where, "blocks", "none", "at least one block")
    for id, profile in plan.blocks.items():
        _check_profile(profile, where, f"blocks[{id}]")
        if id.kind == "mlp" and id not in plan.rules:
            raise PlanError(where, f"blocks[{id}].rule", "none", "a rule, as every mlp block has")
    for id in [*plan.rules, *plan.predictors]:
        if id not in plan.blocks:
            raise PlanError(where, f"blocks[{id}]", "a rule or predictor without a profile", "a profile for each block")
    for id, rule in plan.rules.items():
        _check_rule(rule, id, plan.blocks[id].impact.numel(), where)
        if (rule.kind == "predicted") != (id in plan.predictors):
            got = f"rule {rule.kind!r} {'with' if id in plan.predictors else 'without'} a predictor"
            raise PlanError(where, f"blocks[{id}].predictor", got, "a predictor exactly where the rule is 'predicted'")
    for id, predictor in plan.predictors.items():
        neurons = plan.blocks[id].impact.numel() if id.kind == "mlp" else None
        _check_predictor(predictor, neurons, where, f"blocks[{id}].predictor")


def _check_json(value: object, where: object, field: str) -> None:
    try:
        if not isinstance(value, dict) or json.loads(canonical_json(value)) != json.loads(json.dumps(value)):
            raise TypeError
    except (TypeError, ValueError, RecursionError):
        raise PlanError(where, field, value, "an object of JSON values with finite numbers") from None


def check_tensor(
    tensor: object, dtypes: tuple[torch.dtype, ...], shape: list[int], where: object, field: str
) -> Tensor:
    expected = f"{' or '.join(str(dtype) for dtype in dtypes)} {shape}"
    if not isinstance(tensor, Tensor):
        raise PlanError(where, field, tensor, expected)
    if tensor.dtype not in dtypes or list(tensor.shape) != shape:
        raise PlanError(where, field, f"{tensor.dtype} {list(tensor.shape)}", expected)
    if not bool(torch.isfinite(tensor).all()):
        raise PlanError(where, field, "NaN or infinite values", "finite values")
    return tensor


def _check_profile(profile: BlockProfile, where: object, field: str) -> None:
    neurons = max(1, profile.impact.numel())
    impact = check_tensor(profile.impact, (torch.float32,), [neurons], where, f"{field}.impact")
    fraction = check_tensor(profile.active_fraction, (torch.float32,), [neurons], where, f"{field}.active_fraction")
    if float(impact.min()) < 0:
        raise PlanError(where, f"{field}.impact", float(impact.min()), "values >= 0")
    if float(fraction.min()) < 0 or float(fraction.max()) > 1:
        raise PlanError(
            where, f"{field}.active_fraction", f"{float(fraction.min())} to {float(fraction.max())}", "values in 0..1"
        )


def _rule_to_json(rule: SkipRule | None) -> dict[str, Any] | None:
    return None if rule is None else {"kind": rule.kind, "below": sorted(rule.below)}


def _read_rule(read: JsonReader, id: BlockId, tensors: dict[str, Tensor], packed: Path) -> SkipRule:
    kind, places = read.value("kind", str), read.value("below", list)
    if kind not in RULE_KINDS:
        raise PlanError(read.where, read.field("kind"), kind, f"one of {', '.join(RULE_KINDS)}")
    if unknown := sorted(set(read.fields) - {"kind", "below"}):
        raise PlanError(read.where, read.field(unknown[0]), read.fields[unknown[0]], "no such field in a rule")
    if any(place not in PLACES[id.kind] for place in places) or len(set(places)) < len(places):
        raise PlanError(read.where, read.field("below"), places, f"different ones of {', '.join(PLACES[id.kind])}")
    below = {place: take(tensors, packed, f"{id}.below.{place}") for place in places}
    try:
        return SkipRule(kind, below)
    except ValueError as error:
        raise PlanError(packed, read.path, str(error), "thresholds that fit the rule") from error


def _check_rule(rule: object, id: BlockId, neurons: int, where: object) -> None:
    """Widths of "input" and "output" are checked against the model."""
    field = f"blocks[{id}].rule"
    if not isinstance(rule, SkipRule):
        raise PlanError(where, field, rule, "a SkipRule")
    for place, thresholds in rule.below.items():
        if place not in PLACES[id.kind]:
            raise PlanError(where, f"{field}.below", place, f"places of {', '.join(PLACES[id.kind])}")
        if id.kind == "attention" and rule.kind == "predicted" and place == "input":
            raise PlanError(where, f"{field}.below", place, "'output', where query heads are predicted")
        width = neurons if place in ("gate", "hidden") else max(1, len(thresholds))
        check_tensor(thresholds, (torch.float32,), [width], where, f"{field}.below.{place}")


def _read_predictor(read: JsonReader, id: BlockId, tensors: dict[str, Tensor], packed: Path) -> PlannedPredictor:
    names = ["width", *(f.name for f in fields(PlannedPredictor) if f.name != "tensors")]
    for name in names:
        if name not in read.fields:
            raise PlanError(read.where, read.field(name), "nothing", "a field of that name")
    if unknown := sorted(set(read.fields) - set(names)):
        raise PlanError(read.where, read.field(unknown[0]), read.fields[unknown[0]], "no such field in a predictor")
    parts = {name: take(tensors, packed, f"{id}.predictor.{name}") for name in _PREDICTOR_TENSORS}
    width = read.value("width", int)
    if parts["fc1"].dim() == 2 and len(parts["fc1"]) != width:
        raise PlanError(read.where, read.field("width"), width, f"{len(parts['fc1'])}, the rows of its fc1")
    return PlannedPredictor(parts, **{name: read.fields[name] for name in names if name != "width"})


def _check_predictor(predictor: object, neurons: int | None, where: object, field: str) -> None:
    if not isinstance(predictor, PlannedPredictor):
        raise PlanError(where, field, predictor, "a PlannedPredictor")
    if set(predictor.tensors) != set(_PREDICTOR_TENSORS):
        raise PlanError(where, field, sorted(predictor.tensors), f"the tensors {', '.join(_PREDICTOR_TENSORS)}")
    fc1 = predictor.tensors["fc1"]
    rank, width = fc1.shape if isinstance(fc1, Tensor) and fc1.dim() == 2 else (1, 1)
    if neurons is None:  # query heads: the model says how many
        bias = predictor.tensors["bias"]
        neurons = max(1, bias.numel()) if isinstance(bias, Tensor) else 1
    shapes = {"fc1": [max(1, rank), max(1, width)], "fc2": [neurons, max(1, rank)], "bias": [neurons]}
    for name, shape in shapes.items():
        check_tensor(predictor.tensors[name], FLOATS, shape, where, f"{field}.{name}")
        if (largest := float(predictor.tensors[name].abs().max())) > LARGEST_WEIGHT:
            raise PlanError(where, f"{field}.{name}", largest, f"weights within +-{LARGEST_WEIGHT:g}")
    if predictor.weight_dtype not in WEIGHT_DTYPES:
        raise PlanError(where, f"{field}.weight_dtype", predictor.weight_dtype, f"one of {', '.join(WEIGHT_DTYPES)}")
    if type(predictor.nbytes) is not int or predictor.nbytes <= 0:
        raise PlanError(where, f"{field}.nbytes", predictor.nbytes, "an integer > 0")
    if type(predictor.bytes_saved) not in (int, type(None)):
        raise PlanError(where, f"{field}.bytes_saved", predictor.bytes_saved, "an integer or null")
    for name in ("recall", "precision", "kept"):
        share = getattr(predictor, name)
        if share is not None and not (type(share) in (int, float) and 0 <= share <= 1):
            raise PlanError(where, f"{field}.{name}", share, "a number in 0..1 or null")


# Reading


def read_file(path: Path) -> bytes:
    """The contents of a file. Raises PlanError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise PlanError(path, "file", str(error), "a readable file") from error


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def parse_json(text: bytes | str, where: Path) -> dict[str, Any]:
    """A JSON object with no NaN or infinity in it. Raises PlanError."""
    try:
        fields = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PlanError(where, "file", str(error), "JSON") from error
    if not isinstance(fields, dict):
        raise PlanError(where, "file", type(fields).__name__, "a JSON object")
    return fields


def parse_tensors(packed: bytes, where: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file's contents. Raises PlanError."""
    try:
        tensors = load(packed)
    except Exception as error:  # the library has no type for what a damaged file makes it raise
        raise PlanError(where, "file", repr(error), "a safetensors file") from error
    header = json.loads(packed[8 : 8 + int.from_bytes(packed[:8], "little")])
    return tensors, header.get("__metadata__", {})


class JsonReader:
    """A JSON object whose fields are asked for by name and type; `path` is where in the file it lies."""

    def __init__(self, where: Path, fields: dict[str, Any], path: str = "") -> None:
        self.where, self.fields, self.path = where, fields, path

    def field(self, name: str) -> str:
        if self.path == "blocks":
            return f"blocks[{name}]"
        return f"{self.path}.{name}" if self.path else name

    def value(self, name: str, kind: type) -> Any:
        if name not in self.fields:
            raise PlanError(self.where, self.field(name), "nothing", f"a field of type {kind.__name__}")
        value = self.fields[name]
        if type(value) is not kind:
            raise PlanError(self.where, self.field(name), value, kind.__name__)
        return value

    def optional(self, name: str, kind: type) -> Any:
        """None where the field is null or not there."""
        return None if self.fields.get(name) is None else self.value(name, kind)

    def inner(self, name: str) -> JsonReader:
        return JsonReader(self.where, self.value(name, dict), self.field(name))


def take(tensors: dict[str, Tensor], path: Path, name: str) -> Tensor:
    if name not in tensors:
        raise PlanError(path, name, "nothing", "a tensor of that name")
    return tensors.pop(name)
