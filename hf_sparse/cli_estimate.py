"""The command `hf-sparse estimate`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_options import EVALUATION, LOADING, GroupSize, WeightDtype, check_parent, stdout, write_json

MACHINE, ACTIVITY = "Machine", "How active neurons are"


def estimate(
    model: Annotated[
        str, typer.Argument(help="A directory, a hub id, or the path of a config.json: no weights are read.")
    ],
    gpu: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            help='A known GPU such as "RTX 4090"; may come again. none: no GPU.',
            rich_help_panel=MACHINE,
        ),
    ],
    gpu_budget: Annotated[
        list[str] | None,
        typer.Option(metavar="BYTES", help="Of each GPU. Default: 90% of its memory.", rich_help_panel=MACHINE),
    ] = None,
    cpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A known CPU. Default: this machine's, as measured.", rich_help_panel=MACHINE
        ),
    ] = None,
    cpu_bandwidth: Annotated[
        float | None,
        typer.Option(
            metavar="GB_PER_S", help="Of the host's memory, as published: 80% of it counts.", rich_help_panel=MACHINE
        ),
    ] = None,
    devices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="More known devices, as JSON.", rich_help_panel=MACHINE)
    ] = None,
    weight_dtype: WeightDtype = None,
    group_size: GroupSize = None,
    cache_tokens: Annotated[
        int, typer.Option(min=0, metavar="COUNT", help="Tokens to leave room for.", rich_help_panel=LOADING)
    ] = 2048,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A calibrated plan. Default: one beside MODEL.", rich_help_panel=ACTIVITY),
    ] = None,
    active: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Of MLP neurons per token. Default: 0.1 with ReLU, else 1.", rich_help_panel=ACTIVITY
        ),
    ] = None,
    hottest: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="With --active: these neurons, by default 0.26, ...", rich_help_panel=ACTIVITY
        ),
    ] = None,
    takes: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="... make this share of activations, by default 0.8.", rich_help_panel=ACTIVITY
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here.", rich_help_panel=EVALUATION)
    ] = None,
) -> None:
    """Computes what a machine that is not at hand would do with a model."""
    check_parent(json_file)
    from transformers import AutoConfig

    from . import estimate as estimating
    from .catalogue import known_device
    from .config import parse_bytes
    from .hardware import measure_devices

    if active is None and (hottest, takes) != (None, None):
        raise ValueError("hottest, takes: say how the neurons that --active counts are spread; give it too")
    if active is not None and plan is not None:
        raise ValueError("active: got a share together with --plan, which measured it; give one of them")
    names = [] if gpu == ["none"] else gpu
    budgets: list[Any] = list(gpu_budget or ["90%"] * len(names))
    if len(budgets) != len(names):
        raise ValueError(f"gpu_budget: got {len(budgets)} for {len(names)} GPUs, expected one for each")
    gpus = []
    for name, text in zip(names, budgets, strict=True):
        figures = known_device(name, devices)
        budget = parse_bytes(text, total=figures.memory)
        if not 0 < budget <= figures.memory:
            raise ValueError(
                f"gpu_budget: got {text!r}, allowed are budgets above 0 and up to the {figures.memory} bytes of "
                f"{figures.model}; without a GPU, --gpu none"
            )
        gpus.append((figures, budget))
    host = measure_devices()[-1] if cpu is None else known_device(cpu, devices)
    if cpu_bandwidth is not None:
        if not cpu_bandwidth > 0:
            raise ValueError(f"cpu_bandwidth: got {cpu_bandwidth}, expected GB per second > 0")
        speeds: dict[str, Any] = {"bandwidths": ((1, cpu_bandwidth * 1e9),), "kernel_bandwidths": {}, "measured": False}
        host = dataclasses.replace(host, **speeds)
    spread = {name: value for name, value in (("hottest", hottest), ("takes", takes)) if value is not None}
    activity = None if active is None else estimating.Activity(active, predicted=active < 1, **spread)
    folder = Path(model).parent if Path(model).is_file() else Path(model)
    if not folder.is_dir() and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise FileNotFoundError(f"MODEL: there is no directory or config.json {model}")
    config = AutoConfig.from_pretrained(folder if folder.is_dir() else model)
    found = estimating.estimate_model(
        config,
        gpus,
        host,
        None if weight_dtype == "none" else weight_dtype or "nf4",
        64 if group_size is None else group_size,
        estimating.find_plan(folder, plan) if active is None else None,
        activity,
        cache_tokens,
    )
    stdout.print(found.table(model))
    for note in found.notes:
        stdout.print(f"- {note}", highlight=False, markup=False, soft_wrap=True)
    write_json(json_file, {"model": model, **found.to_dict()})
