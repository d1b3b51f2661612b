"""Perplexity over a long text, beside direct computations in plain torch."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from rich.console import Console
from streaming_reference import Reference, reference_logits
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.cli import app
from hf_sparse.streaming_evaluation import Curve, StreamingEvaluation, evaluate_streaming
from tiny_models import plain_twin, save_checkpoint, save_tokenizer

TEXT = topics["while"] + topics["with"]


@pytest.fixture(scope="module", params=["llama", "opt"])
def directory(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streaming") / request.param
    save_checkpoint(request.param, folder)
    save_tokenizer(folder)
    return folder


def load(directory: Path) -> Any:
    form = WeightOnlyQuantConfig(compute_dtype="fp32", head_dtype=None)
    return SparseAutoModelForCausalLM.from_pretrained(directory, quantization_config=form, calibration_tokens=64)


def test_every_way_beside_plain_torch(directory: Path) -> None:
    model, tokenizer = load(directory), AutoTokenizer.from_pretrained(directory)
    found = evaluate_streaming(model, tokenizer, [TEXT], tokens=200, ctx_size=24, n_keep=(0, 4), window_step=10)
    assert [curve.name for curve in found.curves] == ["dense", "window", "0 sinks", "4 sinks"]
    twin, ids = plain_twin(model), tokenizer(TEXT, add_special_tokens=False, return_tensors="pt").input_ids[:, :200]

    def losses(logits: torch.Tensor, first: int = 0) -> list[float]:
        targets = ids[0, first + 1 : first + 1 + logits.shape[1]]
        result: list[float] = torch.nn.functional.cross_entropy(logits[0], targets, reduction="none").tolist()
        return result

    with torch.no_grad():
        dense = losses(twin(ids[:, :160]).logits[:, :-1])  # as far as there are positions
        window = [losses(twin(ids[:, at - 23 : at]).logits[:, -1:], at - 1)[0] for at in range(24, 200, 10)]
    expected = {"dense": dense, "window": window}
    if model.config.model_type == "llama":
        for keep in (0, 4):
            logits = reference_logits(twin, ids[:, :199], Reference(twin, 24, keep, -1))
            expected[f"{keep} sinks"] = losses(logits)
    for name, values in expected.items():
        assert found.of(name).losses == pytest.approx(values, rel=1e-4)
        assert found.of(name).perplexity() == pytest.approx(math.exp(sum(values) / len(values)), rel=1e-4)
    assert found.of("window").places == tuple(range(24, 200, 10))
    assert found.of("4 sinks").places == tuple(range(1, 200))


def test_what_a_report_says(tmp_path: Path) -> None:
    """Quarters, stretches and comparisons of made-up losses."""
    places = tuple(range(1, 4001))
    flat = Curve("4 sinks", places, tuple(2.0 for _ in places), 2.0)
    window = Curve("window", places[::10], tuple(1.9 for _ in places[::10]), 3.0)
    worse = Curve("0 sinks", places, tuple(2.0 if at < 2000 else 1e9 for at in places), 2.0)
    short = Curve("dense", places[:2200], tuple(2.0 for _ in places[:2200]), 2.0)
    report = StreamingEvaluation("a text", 4001, 1, -1, "nf4", (window, flat, worse, short))
    rows = {row["name"]: row for row in report.to_dict()["rows"]}
    assert rows["4 sinks"]["by_window"] == pytest.approx(math.exp(0.1)) and rows["window"]["by_window"] == "nan"
    assert rows["4 sinks"]["first_quarter"] == rows["4 sinks"]["last_quarter"] == pytest.approx(math.exp(2))
    assert rows["0 sinks"]["first_quarter"] == pytest.approx(math.exp(2)) and rows["0 sinks"]["last_quarter"] == "inf"
    assert [at for at, _ in rows["4 sinks"]["running"]] == list(range(1000, 4001, 500))
    assert [at for at, _ in rows["dense"]["running"]] == [1000, 1500, 2000]
    assert rows["window"]["running"][-1][0] == 4000
    json.dumps(rows, allow_nan=False)
    console = Console(width=150, record=True)
    console.print(report)
    assert "1.105 x" in console.export_text()
    report.plot(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 24}, "tokens: expected more than ctx_size=24, got 24"),
        ({"tokens": 10**6}, "texts: expected at least 1000000 tokens"),
        ({"window_step": -1}, "window_step: expected 0 or more, got -1"),
        ({"ctx_size": 200}, "ctx_size=200, n_keep=4, n_discard=-1: expected a ctx_size of at most the model's 160"),
        ({"n_discard": 0}, "n_discard=0"),
    ],
)
def test_options_that_are_refused(directory: Path, options: dict[str, Any], message: str) -> None:
    model, tokenizer = load(directory), AutoTokenizer.from_pretrained(directory)
    given: dict[str, Any] = {"tokens": 100, "ctx_size": 24, "n_keep": (4,)} | options
    with pytest.raises(ValueError, match=message):
        evaluate_streaming(model, tokenizer, [TEXT], **given)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    report, plot = tmp_path / "report.json", tmp_path / "plot.svg"
    options = ["--streaming", "--texts", text, "--tokens", 120, "--calibration-tokens", 64]
    result = invoke("eval", directory, *options, "--ctx-size", 24, "--n-keep", 3, "--json", report, "--plot", plot)
    assert result.exit_code == 0, result.output
    fields = json.loads(report.read_text())
    assert [row["name"] for row in fields["rows"]] == ["dense", "window", "0 sinks", "1 sink", "3 sinks"]
    assert (fields["tokens"], fields["ctx_size"], fields["n_discard"]) == (120, 24, -1)
    assert "3 sinks" in result.stdout and plot.read_text().startswith("<?xml")
    for wrong, named in (
        (["--ctx-size", 24], "ctx_size: only with --streaming"),
        (["--streaming", "--window", 24], "window: only without --streaming"),
        (["--streaming", "--no-full-precision"], "full_precision: only without --streaming"),
        (["--streaming", "--plot", tmp_path / "a.txt"], "plot: expected a name that ends in .png"),
        (["--streaming", "--plot", tmp_path / "none" / "a.png"], "there is no directory"),
    ):
        refused = invoke("eval", directory, *wrong)
        assert refused.exit_code == 1 and named in refused.stderr
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = invoke("eval", directory, "--streaming", "--plot", plot)
    assert refused.exit_code == 1 and "pip install 'hf_sparse[plots]'" in refused.stderr
