"""Plans on the Hub, against a double of it on 127.0.0.1."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from safetensors import safe_open
from typer.testing import CliRunner

from hf_sparse import PlacementPlan, SparseAutoModelForCausalLM
from hf_sparse.cli import app
from hf_sparse.hub import is_repo_id
from hub_double import TOKEN, HubDouble
from hub_user import logged_in
from tiny_models import prompt_ids, save_checkpoint, save_tokenizer

NAME = "user/tiny-plan"
QUICK = {"calibration_tokens": 64, "max_perplexity_increase": 0.02}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubDouble]:
    """A Hub with nothing on it, a user who is logged in, and an empty cache."""
    with logged_in(tmp_path) as double:
        yield double


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_checkpoint("llama", directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return SparseAutoModelForCausalLM.from_pretrained(folder, load_in_4bit=True, **QUICK)


def upload(folder: Path, name: str) -> str:
    """The model in `folder`, without plans, as a repository; transformers remembers revisions: a name for each test."""
    api = HfApi()
    api.create_repo(name)
    return api.upload_folder(repo_id=name, folder_path=folder, ignore_patterns=["hf_sparse_plan/*"]).oid


def calibrated(caplog: pytest.LogCaptureFixture) -> bool:
    return any("Calibrated in" in record.getMessage() for record in caplog.records)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(prompt_ids(1, 9)).logits


# There and back


def test_a_plan_comes_back_as_it_went(hub: HubDouble, model: Any) -> None:
    commit = model.plan.push_to_hub(NAME, private=True)
    files = hub.repositories[NAME].commits[commit.oid]
    assert {"plan.json", "plan.safetensors"} <= set(files) and hub.repositories[NAME].private
    plan = PlacementPlan.from_pretrained(NAME)
    assert plan.key == model.plan.key and plan.calibration_report == model.plan.calibration_report
    assert plan.library_version and plan.base_model is None
    for id, profile in model.plan.blocks.items():
        assert torch.equal(plan.blocks[id].impact, profile.impact)


def test_a_fresh_process_with_an_empty_cache_needs_no_calibration(
    hub: HubDouble, model: Any, folder: Path, tmp_path: Path
) -> None:
    upload(folder, "user/tiny")
    model.push_plan_to_hub(NAME, measure_speed=False)
    code = (
        "import logging, sys\n"
        "from transformers import AutoTokenizer\n"
        "from hf_sparse import SparseAutoModelForCausalLM as Auto\n"
        "from hf_sparse.log import logger\n"
        "logger.setLevel(logging.INFO)\n"
        "model = Auto.from_pretrained('user/tiny', load_in_4bit=True, plan='user/tiny-plan')\n"
        "ids = AutoTokenizer.from_pretrained('user/tiny')('The', return_tensors='pt').input_ids\n"
        "print(model.generate(ids, max_new_tokens=12, do_sample=False).tolist())\n"
    )
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Using the plan in" in done.stderr and "Calibrated in" not in done.stderr
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)("The", return_tensors="pt").input_ids
    assert json.loads(done.stdout) == model.generate(ids, max_new_tokens=12, do_sample=False).tolist()


def test_a_plan_in_the_models_repository_is_found(
    hub: HubDouble, model: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    upload(folder, "user/beside")
    path = model.plan_directory
    HfApi().upload_folder(repo_id="user/beside", folder_path=path, path_in_repo="hf_sparse_plan")
    with caplog.at_level(logging.INFO, "hf_sparse"):
        loaded = SparseAutoModelForCausalLM.from_pretrained("user/beside", load_in_4bit=True)
    assert not calibrated(caplog)
    assert torch.equal(logits(loaded), logits(model))


def test_a_plan_made_from_a_repository_names_it(hub: HubDouble, folder: Path) -> None:
    commit = upload(folder, "user/named")
    loaded = SparseAutoModelForCausalLM.from_pretrained("user/named", load_in_4bit=True, **QUICK)
    assert (loaded.plan.base_model, loaded.plan.base_model_revision) == ("user/named", commit)
    loaded.push_plan_to_hub(NAME, measure_speed=False)
    card = ModelCard.load(NAME)
    assert card.data.base_model == "user/named" and commit in card.text


def test_a_model_pushed_whole_is_loaded_at_once(
    hub: HubDouble, model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="user/packed")
    with caplog.at_level(logging.INFO, "hf_sparse"):
        loaded = SparseAutoModelForCausalLM.from_pretrained("user/packed")
    assert not calibrated(caplog)
    assert torch.equal(logits(loaded), logits(model))


def test_revisions(hub: HubDouble, model: Any) -> None:
    first = model.plan.push_to_hub(NAME).oid
    changed = replace(model.plan, calibration_report=model.plan.calibration_report | {"seconds": 1.5})
    changed.push_to_hub(NAME, revision="next")
    assert PlacementPlan.from_pretrained(NAME, revision="next").calibration_report["seconds"] == 1.5
    for revision in (None, "main", first):
        plan = PlacementPlan.from_pretrained(NAME, revision=revision)
        assert plan.calibration_report == model.plan.calibration_report


def test_a_plan_that_does_not_fit_is_named_by_field_and_not_used(
    hub: HubDouble, model: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replace(model.plan, key=replace(model.plan.key, checkpoint="cd" * 32)).push_to_hub(NAME)
    with caplog.at_level(logging.WARNING, "hf_sparse"):
        SparseAutoModelForCausalLM.from_pretrained(folder, load_in_4bit=True, plan=NAME, **QUICK)
    assert "key.checkpoint" in caplog.text


# The card


def test_the_card_says_what_the_plan_is(hub: HubDouble, model: Any, tmp_path: Path) -> None:
    model.push_plan_to_hub(NAME, base_model="someone/tiny-llama", license="apache-2.0")
    card, report = ModelCard.load(NAME), model.plan.calibration_report
    fields = card.data.to_dict()
    assert fields["base_model"] == "someone/tiny-llama" and fields["library_name"] == "hf_sparse"
    assert fields["license"] == "apache-2.0" and "hf_sparse" in fields["tags"]
    for figure in (report["dense_perplexity"], report["sparse_perplexity"]):
        assert f"{figure:.4f}" in card.text
    assert model.plan.key.checkpoint in card.text and f"{report['bytes_read_share']:.1%}" in card.text
    assert "tokens/s with the plan" in card.text
    files = hub.repositories[NAME].commits[hub.repositories[NAME].branches["main"]]
    plots = re.findall(r"!\[[^]]+\]\((plots/\w+\.png)\)", card.text)
    assert len(plots) >= 4 and all(files[plot].startswith(b"\x89PNG") for plot in plots)
    (code,) = [block.partition("```")[0] for block in card.text.split("```python\n")[1:]]
    compile(code, "card", "exec")
    assert f'plan="{NAME}"' in code
    plan = PlacementPlan.from_pretrained(NAME)
    assert plan.base_model == "someone/tiny-llama"


def test_a_plan_holds_no_weights(hub: HubDouble, model: Any, tmp_path: Path) -> None:
    model.plan.save_pretrained(tmp_path / "plan")
    with safe_open(tmp_path / "plan" / "plan.safetensors", framework="pt") as tensors:
        assert {name.partition(".")[2].partition(".")[2].partition(".")[0] for name in tensors.keys()} <= {  # noqa: SIM118
            "impact",
            "active_fraction",
            "below",
            "predictor",
        }


# The command line


def test_pushing_and_loading_by_commands(hub: HubDouble, folder: Path, model: Any, tmp_path: Path) -> None:
    def command(*arguments: object) -> str:
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert done.exit_code == 0, done.output
        return done.output

    quick = ("--calibration-tokens", 64, "--max-perplexity-increase", 0.02)
    command("push", folder, NAME, *quick, "--no-measure-speed", "--license", "mit", "--base-model", "someone/llama")
    card = ModelCard.load(NAME)
    assert card.data.license == "mit" and card.data.base_model == "someone/llama"
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("hf_sparse_plan"))
    output = command("plan", copy, "--plan", NAME).replace("\n", "")
    assert f"Saved in {huggingface_hub.constants.HF_HUB_CACHE}" in output  # nothing was calibrated
    assert not list(copy.rglob("plan.json"))
    requests = len(hub.requests)
    command("push", folder, "user/other", *quick, "--no-measure-speed", "--to", tmp_path / "card")
    assert {"README.md", "plan.json", "plan.safetensors", "plots"} == {p.name for p in (tmp_path / "card").iterdir()}
    assert len(hub.requests) == requests
    again = CliRunner().invoke(app, ["push", str(folder), "user/other", "--to", str(tmp_path / "card")])
    assert again.exit_code == 1 and "expected a folder that is not there yet" in again.output.replace("\n", " ")


# What goes wrong


def test_an_interrupted_upload_publishes_nothing_and_can_be_repeated(hub: HubDouble, model: Any) -> None:
    hub.drop_uploads = 100
    with pytest.raises(OSError, match=r"nothing was published in user/tiny-plan.*try again"):
        model.plan.push_to_hub(NAME)
    assert all("plan.json" not in files for files in hub.repositories[NAME].commits.values())
    with pytest.raises(OSError, match="holds no plan"):
        PlacementPlan.from_pretrained(NAME)
    hub.drop_uploads = 0
    model.plan.push_to_hub(NAME)
    assert PlacementPlan.from_pretrained(NAME).key == model.plan.key


def test_without_a_token_nothing_is_published(hub: HubDouble, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OSError, match="hf auth login"):
        model.plan.push_to_hub(NAME)
    with pytest.raises(OSError, match="hf auth login"):
        model.plan.push_to_hub(NAME, token="hf_wrong")
    assert not hub.repositories


def test_a_place_that_is_not_ones_own(hub: HubDouble, model: Any) -> None:
    with pytest.raises(OSError, match=r"may not write there.*rights"):
        model.plan.push_to_hub("someone/plan")
    with pytest.raises(ValueError, match="repo_id: got 'a b', expected 'user/name'"):
        model.plan.push_to_hub("a b")


def test_what_cannot_be_fetched_says_why(
    hub: HubDouble, model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error(name: str = NAME, **options: Any) -> str:
        with pytest.raises(OSError) as caught:  # noqa: PT011  # texts are compared below
            PlacementPlan.from_pretrained(name, **options)
        return str(caught.value)

    assert "the Hub has no repository user/tiny-plan, or it is private" in error()
    with pytest.raises(OSError, match="the Hub has no repository user/nothing"):
        SparseAutoModelForCausalLM.from_pretrained(folder, load_in_4bit=True, plan="user/nothing")
    model.plan.push_to_hub(NAME)
    assert "has no branch, tag or commit 'nowhere'" in error(revision="nowhere")
    hub.repositories[NAME].gated = True
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "is gated: accept its conditions" in error()
    hub.repositories[NAME].private = True
    assert "or it is private" in error()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "not in the cache" in error(local_files_only=True)
    HfApi().create_repo("user/empty")
    assert "holds no plan" in error("user/empty")


def test_a_downloaded_plan_is_not_believed(hub: HubDouble, model: Any) -> None:
    commit = model.plan.push_to_hub(NAME)
    hub.repositories[NAME].commits[commit.oid]["plan.safetensors"] = b"something else"
    with pytest.raises(ValueError, match="tensors_sha256"):
        PlacementPlan.from_pretrained(NAME)


def test_the_cache_serves_without_the_hub(hub: HubDouble, model: Any) -> None:
    model.plan.push_to_hub(NAME)
    PlacementPlan.from_pretrained(NAME)
    hub.repositories.clear()
    asked = len(hub.requests)
    assert PlacementPlan.from_pretrained(NAME, local_files_only=True).key == model.plan.key
    assert len(hub.requests) == asked


@pytest.mark.parametrize(
    ("name", "expected"),
    [("user/plan", True), ("plan", False), ("./user/plan", False), ("/a/b", False), ("a/b/c", False), ("a/b c", False)],
)
def test_what_can_be_a_repository(name: str, expected: bool) -> None:
    assert is_repo_id(name) is expected
    assert not is_repo_id(Path("user/plan"))
