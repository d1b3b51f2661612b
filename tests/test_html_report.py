"""The page of `hf-sparse report`, on a tiny llama: it says what the plan says, and holds no script."""

from __future__ import annotations

import dataclasses
import re
import struct
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_sparse import SparseAutoModelForCausalLM
from hf_sparse.cli import app
from hf_sparse.cost_model import token_time
from hf_sparse.html_report import figure_bytes, figure_texts, html_report, write_report
from hf_sparse.modeling import BlockId, SimulatedTier, SkipRule, Tier
from hf_sparse.placing import placement_blocks
from hf_sparse.plan import PlannedPredictor
from tiny_models import save_checkpoint, save_tokenizer

NASTY = "<script>alert('$x_1$')</script>\"&amp;"
CALIBRATION = ("--calibration-tokens", "320")
VOID = {"meta", "br", "img", "link"}


class Page(HTMLParser):
    """Text, tags, headings, and the tables below each heading."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.headings: list[str] = []
        self.texts: dict[str, str] = {}
        self.feed(html)
        assert self.open == []  # every tag is closed

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.tables.setdefault(self.headings[-1], []).append([])
        elif tag in ("td", "th"):
            self.tables[self.headings[-1]][-1].append("")
        elif tag in ("h1", "h2"):
            self.headings.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.tables[self.headings[-1]][-1][-1] += data
        elif {"h1", "h2"} & set(self.open):
            self.headings[-1] += data
        elif "p" in self.open:
            self.texts[self.headings[-1]] = self.texts.get(self.headings[-1], "") + data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose plan was made."""
    directory = tmp_path_factory.mktemp("report") / "tiny"
    save_checkpoint("llama", directory)
    save_tokenizer(directory)
    load(directory)
    return directory


def load(folder: Path, *tiers: Tier) -> Any:
    options = {"tiers": tiers} if tiers else {}
    return SparseAutoModelForCausalLM.from_pretrained(folder, load_in_4bit=True, calibration_tokens=320, **options)


@pytest.fixture(scope="module")
def split(folder: Path) -> Any:
    """On two tiers of which the first has an alarming name and room for a part; its plan is found, not made."""
    whole = load(folder, Tier("cpu", bandwidth=1e10))
    budget = int(0.6 * whole.placement_summary().tiers[0].nbytes)
    tiers = SimulatedTier(NASTY, budget=budget, bandwidth=1e12), Tier("cpu", bandwidth=1e10)
    return load(folder, *tiers)


@pytest.fixture(scope="module")
def html(split: Any) -> str:
    return html_report(split, name=NASTY)


def percent(value: float) -> str:
    return f"{value:.1%}"


def test_the_command_writes_what_the_function_gives(folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(folder), "-o", str(tmp_path / "a.html"), *CALIBRATION])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"Written to {tmp_path / 'a.html'}\n"
    assert (tmp_path / "a.html").read_text() == html_report(load(folder))  # and always the same
    assert [file.name for file in tmp_path.iterdir()] == ["a.html"]


def test_nothing_comes_from_elsewhere_and_nothing_runs(html: str) -> None:
    page = Page(html)
    assert "script" not in {tag for tag, _ in page.seen}
    assert page.headings[0] == NASTY  # as text
    assert "<script" not in html
    assert "http:" not in html and "https:" not in html
    for _, attributes in page.seen:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href", "data", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/png;base64,"))
    ids = [attributes["id"] for _, attributes in page.seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', html))
    assert used <= set(ids)
    assert set(re.findall(r"var\(--([\w-]+)\)", html)) <= set(re.findall(r"--([\w-]+):", html))
    assert "default-src 'none'" in html


def test_plots_have_a_text_in_their_place(split: Any, html: str) -> None:
    page = Page(html)
    pictures = [attributes for tag, attributes in page.seen if tag == "svg"]
    assert [picture["aria-label"] for picture in pictures] == list(figure_texts(split).values())
    assert all(picture["role"] == "img" for picture in pictures)
    assert [tag for tag, _ in page.seen if tag in ("h1", "h2")][:2] == ["h1", "h2"]


def test_tables_hold_what_the_plan_holds(split: Any, html: str) -> None:
    plan, page = split.plan, Page(html)
    report, facts = plan.calibration_report, dict(page.tables["The plan"])
    increase = report["sparse_perplexity"] / report["dense_perplexity"] - 1
    assert facts["Achieved"].startswith(f"{increase:+.2%} perplexity")
    assert f"{report['held_out_tokens']}" in facts["Achieved"]
    assert facts["Budget asked"] == "at most +1% perplexity"
    assert facts["Plan made by"] == f"hf_sparse {plan.library_version}"
    assert "weight_dtype nf4" in facts["Weights"]
    frequency = page.tables["How often neurons are active"][1:]
    for row, layer in zip(frequency, range(3), strict=True):
        active = plan.blocks[BlockId(layer, "mlp")].active_fraction
        expected = [percent(float(v)) for v in (active.max(), active.median(), active.min(), active.double().mean())]
        assert row == [str(layer), str(len(active)), *expected, str(int((active == 0).sum()))]
    every = torch.cat([plan.blocks[BlockId(layer, "mlp")].active_fraction.double() for layer in range(3)])
    most = every.sort(descending=True).values
    half = float(most[: len(most) // 2].sum() / most.sum())
    assert page.tables["What the hottest neurons take"][1][3] == percent(half)
    unread = {row[0]: row[1] for row in page.tables["Quality and what is left unread"][1:]}
    for id in plan.blocks:
        name = f"{id.layer}, {'MLP' if id.kind == 'mlp' else 'attention'}"
        assert unread[name] == percent(1 - report["read_shares"][str(id)])


def test_two_tiers_are_told_apart(split: Any, html: str) -> None:
    page = Page(html)
    summary = split.placement_summary()
    rows = page.tables["The tiers"][1:]
    assert [row[0] for row in rows] == [NASTY, "cpu"]
    counts = [int(row[1].split()[0]) for row in rows]
    assert counts == [tier.mlp_neurons for tier in summary.tiers] and min(counts) > 0
    lie = page.tables["Where neurons lie"][1:]
    assert [sum(int(row[1 + tier]) for row in lie) for tier in range(2)] == counts
    for row in lie:
        id = BlockId(int(row[0]), "mlp")
        on = split.placement.assignment[id] == 1
        active = split.plan.blocks[id].active_fraction.double()[on]
        assert row[4] == (percent(float(active.mean())) if len(active) else "–")
    time = token_time(placement_blocks(split, split.cache_tokens), split.placement)
    shown = page.tables["Predicted time of a token"][1:]
    assert [row[1:] for row in shown] == [
        [*(f"{1e6 * seconds:.1f}" for seconds in of), f"{1e6 * max(of):.1f}"] for of in time.blocks.values()
    ]
    assert f"{1e3 * time.seconds:.2f} ms" in page.texts["Predicted time of a token"]


def test_predictors_are_shown_where_there_are_some_and_a_calibration_report_may_hold_anything(
    split: Any, html: str
) -> None:
    before = split.plan
    assert "no predictors" in Page(html).texts["Predictors"]
    id = BlockId(1, "mlp")
    tensors = {"fc1": torch.ones(5, 48), "fc2": torch.ones(88, 5), "bias": torch.ones(88)}
    split.plan = dataclasses.replace(
        before,
        rules=before.rules | {id: SkipRule("predicted", {"hidden": torch.ones(88)})},
        predictors={id: PlannedPredictor(tensors, "int8", nbytes=4321, recall=0.917, precision=None, kept=0.25)},
        calibration_report={"dense_perplexity": NASTY, "sparse_perplexity": 10**400, "read_shares": {"0.mlp": None}},
        library_version=NASTY,
    )
    try:
        changed = html_report(split)
    finally:
        split.plan = before
    assert "<script" not in changed
    page = Page(changed)
    rows = page.tables["Predictors"][1:]
    assert rows == [["1, neurons", "5", "4,321", "91.7%", "unknown", "25.0%", "unknown"]]
    pictures = [attributes["aria-label"] for tag, attributes in page.seen if tag == "svg"]
    assert sum("predictors" in str(label) for label in pictures) == 1
    facts = dict(page.tables["The plan"])
    assert facts["Plan made by"] == f"hf_sparse {NASTY}"
    assert facts["Budget asked"] == "unknown"
    assert facts["Achieved"].startswith("unknown")


def test_the_curve_is_what_calibration_tried(split: Any) -> None:
    report = split.plan.calibration_report
    assert len(report["curve"]) > 2 and report["curve"] == sorted(report["curve"])
    rows = Page(html_report(split)).tables["Quality against sparsity"][1:]
    assert [row[:2] for row in rows] == [[f"{unread:.1%}", f"{found:.4f}"] for unread, found in report["curve"]]
    chosen = 1 - report["bytes_read_share"], report["sparse_perplexity"]
    assert any(abs(a - chosen[0]) < 1e-3 and abs(b / chosen[1] - 1) < 1e-3 for a, b in report["curve"])


def test_pictures_are_png(split: Any) -> None:
    pictures = figure_bytes(split)
    assert list(pictures) == list(figure_texts(split))
    drawn = {"activation_frequency", "activation_shares", "placement", "predicted_time", "quality", "curve"}
    assert drawn == set(pictures)
    for png in pictures.values():
        assert png.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", png[16:24])
        assert width > height / 2 and width >= 800


def test_paths_that_cannot_be_written_are_named(split: Any, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match=r"path: got .*there is no directory"):
        write_report(split, tmp_path / "missing" / "report.html")
    with pytest.raises(IsADirectoryError, match=r"path: got .*expected the name of a file"):
        write_report(split, tmp_path)
    result = CliRunner().invoke(app, ["report", str(folder), "-o", str(tmp_path / "missing" / "report.html")])
    assert result.exit_code == 1 and result.stderr.startswith("error: path: got")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_it_says_how_to_get_it(split: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    for call in (lambda: write_report(split, tmp_path / "report.html"), lambda: figure_bytes(split)):
        with pytest.raises(ImportError, match=re.escape('pip install "hf_sparse[plots]"')):
            call()
    assert list(tmp_path.iterdir()) == []
