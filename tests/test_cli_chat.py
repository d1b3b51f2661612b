"""`hf-sparse chat`, on a tiny llama: what goes in through a pipe or a terminal, and what comes out where."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, TextStreamer
from typer.testing import CliRunner, Result

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig, cli_chat
from hf_sparse.chat import Chat
from hf_sparse.cli import app
from hf_sparse.cli_options import Loading
from tiny_models import save_checkpoint, save_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
QUICK = ("--calibration-tokens", 64, "--max-perplexity-increase", 0, "--no-do-sample")
COMMANDS = "/reset, /save FILE, /load FILE, /stats, /help, /exit"

pytestmark = pytest.mark.usefixtures("interruptible")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cli_chat") / "tiny"
    save_checkpoint("llama", directory, max_position_embeddings=600)
    tokenizer = save_tokenizer(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def talk(directory: Path, text: str, *options: object, globally: tuple[str, ...] = ()) -> Result:
    arguments = [*globally, "chat", directory, *QUICK, *options]
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)


def succeed(directory: Path, text: str, *options: object) -> Result:
    result = talk(directory, text, *options)
    assert result.exit_code == 0 and "Traceback" not in result.stderr, result.output
    return result


def errors(result: Result) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


def library(directory: Path, *questions: str, **options: Any) -> list[str]:
    """What the library answers."""
    quantization = WeightOnlyQuantConfig(weight_dtype="nf4")
    model = SparseAutoModelForCausalLM.from_pretrained(
        directory, quantization_config=quantization, calibration_tokens=64, max_perplexity_increase=0
    )
    chat = Chat(model, AutoTokenizer.from_pretrained(directory), do_sample=False, **options)
    return [chat.send(question) for question in questions]


def printed(*answers: str) -> str:
    return "".join(f"{answer}\n" for answer in answers).replace("\r\n", "\n")  # as CliRunner has it


def test_a_pipe_gets_answers_and_what_it_asked_for_and_nothing_else(directory: Path) -> None:
    result = succeed(directory, "Is it?\n\n  \nWhy?\r\n/stats\n", "--max-new-tokens", 9)
    first, second = library(directory, "Is it?", "Why?", max_new_tokens=9)
    assert result.stdout.startswith(printed(first, second))
    table = dict(re.findall(r"│ ([a-z_/ ]+?) +│ +([\d.,]+) │", result.stdout.removeprefix(printed(first, second))))
    assert float(table.pop("tokens/s of decode").replace(",", "")) > 0
    held = table.pop("tokens held")
    assert table.pop("tokens computed") == held and int(held) <= int(table.pop("tokens in the conversation"))
    assert table == {"turns": "2", "tokens evicted": "0", "n_keep": "4", "ctx_size": "600"}
    closing = [line for line in result.stderr.splitlines() if "held" in line]
    assert len(closing) == 2
    assert re.fullmatch(rf"\d tokens at [\d.]+ tokens/s · {held} of 600 held · 0 evicted", closing[1])


def test_a_conversation_is_saved_forgotten_and_taken_up_again(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "with a space.safetensors"
    script = f"Is it?\n/save {file}\nWhy?\n/reset\nWhy?\n/load {file}\nWhy?\n/exit\nNever read\n"
    result = succeed(directory, script, "--max-new-tokens", 9, "--ctx-size", 40)
    first, second = library(directory, "Is it?", "Why?", max_new_tokens=9, ctx_size=40)
    afresh = library(directory, "Why?", max_new_tokens=9, ctx_size=40)[0]
    assert result.stdout == printed(first, second, afresh, second)
    told = [line for line in result.stderr.splitlines() if re.match("Saved|Loaded|Forgotten", line)]
    assert re.fullmatch(rf"Saved \d+ tokens in {re.escape(str(file))}", told[0])
    assert told[1] == "Forgotten" and told[2] == told[0].replace("Saved", "Loaded").replace(" in ", " from ")
    assert succeed(directory, f"/load {file}\nWhy?\n", "--max-new-tokens", 9).stdout == printed(second)


def test_an_error_ends_a_line_not_the_chat(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("something else")
    script = f"/save\n/save {tmp_path}\n/quit now\n/load {tmp_path / 'other'}\n/load {tmp_path / 'absent'}\n/\nIs it?\n"
    result = succeed(directory, script, "--max-new-tokens", 5)
    assert result.stdout == printed(*library(directory, "Is it?", max_new_tokens=5))
    expected = [
        "error: /save: expected the path of a file, got none",
        "error: save: nothing has been said yet",
        f"error: /quit: there is no such command; there are {COMMANDS}; a space in front is text",
        f"error: path: {tmp_path / 'other'} is no saved chat",
        f"error: path: {tmp_path / 'absent'} is no file",
        f"error: /: there is no such command; there are {COMMANDS}; a space in front is text",
    ]
    found = errors(result)
    assert len(found) == len(expected) and all(map(str.startswith, found, expected)), found


def test_help_names_every_command(directory: Path) -> None:
    result = succeed(directory, "/help\n")
    assert ", ".join(re.findall(r"^(/\w+(?: FILE)?) ", result.stdout, re.MULTILINE)) == COMMANDS
    assert "Ctrl-C stops an answer" in result.stderr


def test_long_lines_and_those_that_begin_with_a_space_are_text(directory: Path) -> None:
    long = "name " * 800
    result = succeed(directory, f" /reset\n{long}\n/stats\n", "--max-new-tokens", 4, "--ctx-size", 64)
    first, second = library(directory, " /reset", long, max_new_tokens=4, ctx_size=64)
    assert result.stdout.startswith(printed(first, second)) and not errors(result)
    assert re.search(r"\d+ of 64 held · \d{3,} evicted", result.stderr)


def test_the_system_prompt_stays(directory: Path) -> None:
    options = ("--system", "Be short.", "--n-keep", "system", "--ctx-size", 50, "--max-new-tokens", 9)
    result = succeed(directory, "Is it?\nWhy?\nIs it?\n/stats\n", *options)
    answers = library(
        directory, "Is it?", "Why?", "Is it?", system="Be short.", n_keep="system", ctx_size=50, max_new_tokens=9
    )
    assert result.stdout.startswith(printed(*answers))
    count = len(AutoTokenizer.from_pretrained(directory)("system: Be short.</s>").input_ids)
    assert re.search(rf"n_keep +│ +{count} │", result.stdout)


def test_a_seed_repeats_a_conversation(directory: Path) -> None:
    options = ("--max-new-tokens", 9, "--do-sample", "--temperature", 2.5, "--seed")
    first = succeed(directory, "Is it?\nWhy?\n", *options, 1).stdout
    torch.manual_seed(5)
    assert succeed(directory, "Is it?\nWhy?\n", *options, 1).stdout == first
    assert succeed(directory, "Is it?\nWhy?\n", *options, 2).stdout != first


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, calls = TextStreamer.put, 0

    def interrupts(self: Any, value: Any) -> None:
        nonlocal calls
        calls += 1
        put(self, value)
        if calls == 4:  # the prompt and three tokens
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TextStreamer, "put", interrupts)
    result = succeed(directory, "Is it?\nWhy?\n", "--max-new-tokens", 30)
    closing = [line for line in result.stderr.splitlines() if "held" in line]
    assert closing[0].startswith("4 tokens at ") and closing[0].endswith(" · stopped")
    assert closing[1].startswith("30 tokens at ") and closing[1].endswith(" evicted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_debug_shows_the_traceback_and_goes_on(directory: Path) -> None:
    result = talk(directory, "/none\n/help\n", globally=("--debug",))
    assert result.exit_code == 0 and "/reset" in result.stdout
    assert "Traceback" in result.stderr and errors(result)[0].startswith("error: /none: there is no such command")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--n-keep", "all"], "n_keep: got 'all', expected a number or system"),
        (["--n-keep", "system"], "n_keep: got system, but there is no --system TEXT"),
        (["--n-keep", "30", "--ctx-size", "31"], "ctx_size=31, n_keep=30, n_discard=-1: expected n_keep >= 0"),
        (["--n-discard", "0"], "n_discard=0: expected n_discard of -1"),
        (["--gguf-file", "absent.gguf"], "absent.gguf"),
    ],
)
def test_what_is_refused_before_anything_is_loaded(
    directory: Path, options: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loading, "load", lambda *_: pytest.fail("loaded"))
    result = talk(directory, "Is it?\n", *options)
    assert result.exit_code == 1 and result.stdout == "" and named in errors(result)[0]


def test_a_model_without_a_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint("llama", tmp_path)
    save_tokenizer(tmp_path)
    monkeypatch.setattr(Loading, "load", lambda *_: pytest.fail("loaded"))
    result = talk(tmp_path, "Is it?\n")
    assert result.exit_code == 1 and "has no chat template, which says how turns are written" in errors(result)[0]


# A terminal


def test_ctrl_c_drops_a_line_and_ctrl_d_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    typed: Iterator[Any] = iter(["Is it?", KeyboardInterrupt(), "Why?", EOFError(), "Never read"])

    def read(mark: str) -> str:
        assert mark == "> "
        value = next(typed)
        if isinstance(value, BaseException):
            raise value
        return str(value)

    monkeypatch.setattr("builtins.input", read)
    assert list(cli_chat._lines(True)) == ["Is it?", "Why?"]


def test_several_lines_that_are_pasted_are_one_message() -> None:
    pytest.importorskip("readline")
    ours, theirs = pty.openpty()
    code = "from hf_sparse.cli_chat import _lines; print('got', [line for line in _lines(True)])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, env={**os.environ, "TERM": "vt100"}
    )
    os.close(theirs)
    seen = b""
    for awaited, answer in ((b"> ", b"\x1b[200~one\ntwo\x1b[201~\r"), (b"> ", b"\x04"), (b"']\r\n", b"")):
        start = len(seen)
        while awaited not in seen[start:]:
            seen += os.read(ours, 1024)
        os.write(ours, answer)
    assert process.wait(timeout=60) == 0
    os.close(ours)
    assert b"got ['one\\ntwo']" in seen
