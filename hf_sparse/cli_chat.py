"""The command `hf-sparse chat`: answers and what was asked for go to stdout, all else to stderr."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from .cli_options import (
    GENERATION,
    STREAMING,
    DoSample,
    Loading,
    MaxNewTokens,
    Model,
    Seed,
    Temperature,
    find_source,
    given,
    stderr,
    stdout,
    takes_loading_options,
)

if TYPE_CHECKING:
    from .chat import Chat

COMMANDS = {
    "/reset": "forget all but the system prompt",
    "/save FILE": "write the conversation, with what the model has computed of it, to one file",
    "/load FILE": "go on with a conversation that was saved with the same model",
    "/stats": "show what was computed and what is held",
    "/help": "show this",
    "/exit": "end, as Ctrl-D does",
}
PROMPT_MARK = "> "


@takes_loading_options
def chat(
    context: typer.Context,
    model: Model,
    loading: Loading,
    ctx_size: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT",
            help="Tokens that the cache holds. Default: 2048, or the model's positions.",
            rich_help_panel=STREAMING,
        ),
    ] = None,
    n_keep: Annotated[
        str,
        typer.Option(
            metavar="COUNT",
            help="How many of the first tokens stay when it is full, or system: the system prompt.",
            rich_help_panel=STREAMING,
        ),
    ] = "4",
    n_discard: Annotated[
        int,
        typer.Option(
            metavar="COUNT", help="How many of the oldest others go at once. -1: half.", rich_help_panel=STREAMING
        ),
    ] = -1,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system prompt.", rich_help_panel=GENERATION)
    ] = None,
    max_new_tokens: MaxNewTokens = 512,
    do_sample: DoSample = None,
    temperature: Temperature = None,
    seed: Seed = None,
) -> None:
    """Talks with the model, without an end: what was said stays computed from turn to turn. /help lists commands."""
    from transformers import AutoTokenizer, set_seed

    from .chat import DEFAULT_CTX_SIZE, Chat
    from .modeling import StreamingOptions

    # What is wrong with these is said now, not after minutes of loading.
    sinks = _sinks(n_keep)
    if sinks == "system" and system is None:
        raise ValueError("n_keep: got system, but there is no --system TEXT")
    StreamingOptions(DEFAULT_CTX_SIZE if ctx_size is None else ctx_size, 4 if sinks == "system" else sinks, n_discard)
    source = find_source(model, loading.gguf_file)
    tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    if not tokenizer.chat_template:
        raise ValueError(f"MODEL: the tokenizer of {model} has no chat template, which says how turns are written")
    sparse = loading.load(source)
    if do_sample is None and temperature is not None:
        do_sample = True
    options = given(ctx_size=ctx_size, do_sample=do_sample, temperature=temperature)
    talk = Chat(
        sparse, tokenizer, n_keep=sinks, n_discard=n_discard, system=system, max_new_tokens=max_new_tokens, **options
    )
    if seed is not None:
        set_seed(seed)
    root = context.find_root()
    _converse(talk, debug=bool(root.params.get("debug")))


def _sinks(n_keep: str) -> Any:
    if n_keep == "system":
        return n_keep
    try:
        return int(n_keep)
    except ValueError:
        raise ValueError(f"n_keep: got {n_keep!r}, expected a number or system") from None


def _converse(talk: Chat, debug: bool) -> None:
    """Until /exit or the end of what comes in. An error ends a line's answer, not the conversation."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    for line in _lines(terminal):
        if not line.strip():
            continue
        try:
            if line.startswith("/"):
                if line.split()[0] == "/exit":
                    return
                _command(talk, line)
            else:
                _answer(talk, line)
        except KeyboardInterrupt:
            if not terminal:
                raise
            stderr.print()
        except (ValueError, OSError, TypeError, ImportError, RuntimeError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            if debug:
                traceback.print_exc()
            stderr.print(Text(f"error: {' '.join(str(error).split())}", style="red"), soft_wrap=True)


def _lines(terminal: bool) -> Iterator[str]:
    """Lines of a terminal, edited with readline where there is one, or of a pipe, where no prompt is shown."""
    if not terminal:
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    try:
        import readline
    except ImportError:
        pass
    else:
        readline.parse_and_bind("set enable-bracketed-paste on")  # several lines that are pasted are one message
    while True:
        try:
            yield input(PROMPT_MARK)
        except EOFError:
            stdout.print()
            return
        except KeyboardInterrupt:  # what was typed is dropped
            stdout.print()


def _answer(talk: Chat, text: str) -> None:
    from transformers import TextStreamer

    talk.send(text, TextStreamer(talk.tokenizer, skip_prompt=True, skip_special_tokens=True))
    turn = talk.turns[-1]
    speed = f" at {turn.tokens_per_second:.1f} tokens/s" if turn.seconds else ""
    parts = (
        f"{turn.new_tokens} tokens{speed}",
        f"{talk.held} of {talk.options.ctx_size} held",
        f"{talk.evicted} evicted",
        *(["stopped"] if turn.interrupted else []),
    )
    stderr.print(" · ".join(parts), style="dim", highlight=False, soft_wrap=True)


def _command(talk: Chat, line: str) -> None:
    name, rest = [*line.split(None, 1), ""][:2]
    if name == "/reset":
        talk.reset()
        _tell("Forgotten")
    elif name == "/save":
        file = _file(name, rest)
        talk.save(file)
        _tell(f"Saved {talk.ids.shape[1]} tokens in {file}")
    elif name == "/load":
        file = _file(name, rest)
        before = talk.options
        talk.load(file)
        changed = "" if talk.options == before else f"; it goes on with its own {talk.options}"
        _tell(f"Loaded {talk.ids.shape[1]} tokens from {file}{changed}")
    elif name == "/stats":
        stdout.print(_table(talk))
    elif name == "/help":
        for command, meaning in COMMANDS.items():
            stdout.print(f"{command:<12}{meaning}", highlight=False, markup=False, soft_wrap=True)
        _tell("Anything else is for the model, a line that begins with a space too. Ctrl-C stops an answer.")
    else:
        raise ValueError(f"{name}: there is no such command; there are {', '.join(COMMANDS)}; a space in front is text")


def _file(name: str, text: str) -> Path:
    if not text:
        raise ValueError(f"{name}: expected the path of a file, got none")
    return Path(text.strip()).expanduser()


def _tell(text: str) -> None:
    stderr.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


def _table(talk: Chat) -> Table:
    table = Table(title="Conversation", show_header=False)
    table.add_column("what")
    table.add_column("figure", justify="right")
    for name, value in talk.stats().items():
        shown = "none" if value != value else f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
        table.add_row(name, shown)
    return table
