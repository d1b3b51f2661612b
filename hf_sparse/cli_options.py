"""What the modules of the command line share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

stdout, stderr = Console(), Console(stderr=True)

LOADING, GENERATION, EVALUATION = "Weights and placement", "Generation", "Evaluation"
WeightDtype = Annotated[
    str,
    typer.Option(
        metavar="TYPE", help="nf4, fp4, int4, int4_asym, int8, or none: as they came.", rich_help_panel=LOADING
    ),
]
GroupSize = Annotated[
    int | None,
    typer.Option(metavar="SIZE", help="32, 64 or 128 weights share a scale. Default: 64.", rich_help_panel=LOADING),
]


def check_parent(json_file: Path | None) -> None:
    if json_file is not None and not json_file.parent.is_dir():
        raise NotADirectoryError(f"json: got {json_file}, but there is no directory {json_file.parent}")


def write_json(json_file: Path | None, fields: dict[str, Any]) -> None:
    if json_file is not None:
        aside = json_file.with_name(f".{json_file.name}.{os.getpid()}")
        aside.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
        aside.replace(json_file)
