"""The command `hf-sparse serve`: what it tells goes to stderr."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_options import (
    STREAMING,
    Loading,
    Model,
    NDiscard,
    NKeep,
    find_source,
    given,
    stderr,
    takes_loading_options,
)

SERVER = "Server"


@takes_loading_options
def serve(
    model: Model,
    loading: Loading,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen.", rich_help_panel=SERVER)] = (
        "127.0.0.1"
    ),
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="NUMBER", help="0: any that is free.", rich_help_panel=SERVER)
    ] = 8000,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What clients call the model. Default: MODEL; of a path its end.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    ctx_size: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT",
            help="Go on without an end, on a cache of so many tokens. Default: the model's positions are the end.",
            rich_help_panel=STREAMING,
        ),
    ] = None,
    n_keep: NKeep = None,
    n_discard: NDiscard = None,
) -> None:
    """Serves the model to OpenAI's clients: chat and text completions, one at a time, in turns. Ctrl-C ends it."""
    from transformers import AutoTokenizer

    from .modeling import StreamingOptions
    from .server import Server, bound_socket, make_app

    # What is wrong with these is said now, not after minutes of loading.
    endless = given(n_keep=n_keep, n_discard=n_discard)
    if endless and ctx_size is None:
        raise ValueError(f"{', '.join(endless)}: only with --ctx-size")
    streaming = None if ctx_size is None else StreamingOptions(ctx_size, **endless)
    source = find_source(model, loading.gguf_file)
    with contextlib.closing(bound_socket(host, port)) as bound:
        tokenizer: Any = AutoTokenizer.from_pretrained(**source)
        sparse = loading.load(source)
        called = name or (Path(model).resolve().name if Path(model).exists() else model)
        server = Server(make_app(sparse, tokenizer, called, streaming))
        address = bound.getsockname()
        where = f"[{address[0]}]" if ":" in address[0] else address[0]
        line = f"Serving {called} at http://{where}:{address[1]}/v1; Ctrl-C ends it"
        stderr.print(line, highlight=False, markup=False, soft_wrap=True)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again when all has ended
            server.run(sockets=[bound])
