"""The command line: `hf-sparse eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_options import (
    EVALUATION,
    STREAMING,
    Loading,
    Model,
    NDiscard,
    NKeep,
    check_parent,
    find_source,
    given,
    stdout,
    takes_loading_options,
    write_json,
)

Texts = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A .txt or .jsonl file, or a dataset. Default: Python's documentation.",
        rich_help_panel=EVALUATION,
    ),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        metavar="COUNT",
        help="Tokens to read at most. Default: 4096, or 20000 with --streaming.",
        rich_help_panel=EVALUATION,
    ),
]
Window = Annotated[
    int | None,
    typer.Option(
        metavar="COUNT",
        help="Tokens read together. Default: 512, or the model's positions.",
        rich_help_panel=EVALUATION,
    ),
]
FullPrecision = Annotated[
    bool | None,
    typer.Option(
        help="Compare with the weights as they came too, loaded beside, or not. Default: compare.",
        rich_help_panel=EVALUATION,
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here.", rich_help_panel=EVALUATION)
]
Streaming = Annotated[
    bool,
    typer.Option(
        "--streaming",
        help="Feed one long text token by token: to a cache that keeps all, to caches with no sinks, one, and --n-keep "
        "sinks, and to a window computed anew.",
        rich_help_panel=STREAMING,
    ),
]
CtxSize = Annotated[
    int | None,
    typer.Option(metavar="COUNT", help="Tokens that the cache holds. Default: 256.", rich_help_panel=STREAMING),
]
WindowStep = Annotated[
    int | None,
    typer.Option(
        metavar="COUNT",
        help="The window is computed at one token in so many; 0: not. Default: 16.",
        rich_help_panel=STREAMING,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw the running perplexity here, as .png.", rich_help_panel=STREAMING),
]


@takes_loading_options
def evaluate(
    model: Model,
    loading: Loading,
    texts: Texts = None,
    tokens: Tokens = None,
    window: Window = None,
    full_precision: FullPrecision = None,
    json_file: JsonFile = None,
    streaming: Streaming = False,
    ctx_size: CtxSize = None,
    n_keep: NKeep = None,
    n_discard: NDiscard = None,
    window_step: WindowStep = None,
    plot: Plot = None,
) -> None:
    """Compares the model with its rules, without them, and with the weights as they came; or caches that forget."""
    from transformers import AutoTokenizer

    from .texts import read_texts

    # What is wrong with these is said now, not after minutes of loading.
    of_streams = given(ctx_size=ctx_size, n_keep=n_keep, n_discard=n_discard, window_step=window_step, plot=plot)
    others = of_streams if not streaming else given(window=window, full_precision=full_precision)
    if others:
        needed = "without --streaming" if streaming else "with --streaming"
        raise ValueError(f"{', '.join(others)}: only {needed}")
    tokens = tokens if tokens is not None else 20_000 if streaming else 4096
    if texts is not None:
        read_texts(texts, name="texts", tokens=tokens)
    check_parent(json_file)
    if plot is not None:
        check_plot(plot)
    source = find_source(model, loading.gguf_file)
    sparse = loading.load(source)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if streaming:
        from .streaming_evaluation import evaluate_streaming

        of_streams.pop("plot", None)
        sinks = sorted({0, 1, of_streams.pop("n_keep", 4)})
        streamed = evaluate_streaming(sparse, tokenizer, texts, tokens=tokens, n_keep=sinks, **of_streams)
        found: Any = streamed
        if plot is not None:
            streamed.plot(plot)
    else:
        from . import evaluation

        wanted = full_precision is not False
        reference = evaluation.full_precision(*source.values(), dtype=sparse.dtype) if wanted else None
        found = evaluation.evaluate(sparse, tokenizer, texts, tokens=tokens, window=window, reference=reference)
    stdout.print(found, highlight=False, soft_wrap=True)
    write_json(json_file, {"model": model, **found.to_dict()})


def check_plot(plot: Path) -> None:
    import importlib.util

    if not plot.parent.is_dir():
        raise NotADirectoryError(f"plot: got {plot}, but there is no directory {plot.parent}")
    if plot.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"plot: expected a name that ends in .png, .svg or .pdf, got {plot}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("plot: needs matplotlib: pip install 'hf_sparse[plots]'")
