"""The examples of README and docs/ run, word for word, and what they link to is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_models import chat_tokenizer, save_chat_model
from huggingface_hub import HfApi

from hub_user import logged_in

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAME = "HuggingFaceTB/SmolLM2-1.7B-Instruct"  # in the examples; here the name of a tiny model


def examples(page: Path) -> list[str]:
    """Its Python code; what talks to a server runs in test_server.py."""
    code = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [block for block in code if "http://127.0.0.1" not in block]


@pytest.fixture(scope="module")
def after_the_first_example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the README's first example leaves behind, from which other pages go on."""
    folder = tmp_path_factory.mktemp("docs")
    save_chat_model(folder / "model")
    chat_tokenizer(folder / "model").save_pretrained(folder / "model")
    with logged_in(folder) as double:
        double.organizations.add("HuggingFaceTB")
        HfApi().create_repo(NAME)
        HfApi().upload_folder(repo_id=NAME, folder_path=folder / "model")
        found: dict[str, Any] = {}
        exec(examples(ROOT / "README.md")[0], found)
        yield found


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=lambda page: page.stem)
def test_examples(
    page: Path, after_the_first_example: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = dict(after_the_first_example)
    for code in examples(page):
        exec(compile(code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_messages_that_are_explained_are_given() -> None:
    """Every message of the troubleshooting page stands in the code, as far as it is the same each time."""
    code = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("hf_sparse", "modeling", "quantization")
        for path in (ROOT / folder).glob("*.py")
    )
    code = re.sub(r'"\s*\n?\s*f?"', "", code)  # texts that go over lines
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)
    assert len(messages) > 25
    for message in messages:
        longest = max(re.split(r"\.\.\.|: ", message), key=len).strip(" :;,()")
        assert longest in code, message
