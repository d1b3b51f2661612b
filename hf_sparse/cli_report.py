"""The command line: `hf-sparse report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_options import (
    Loading,
    Model,
    find_source,
    stdout,
    takes_loading_options,
)

Output = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the page.")]


@takes_loading_options
def report(
    model: Model,
    loading: Loading,
    output: Output = Path("report.html"),
) -> None:
    """Writes one HTML page that shows the plan: activation frequencies, placement, predicted time, quality."""
    from .html_report import check_output, write_report

    check_output(output)  # said now, not after minutes of loading
    source = find_source(model, loading.gguf_file)
    sparse = loading.load(source)
    file, folder = source["gguf_file"], Path(model)
    name = Path(file).stem if file else folder.resolve().name if folder.exists() else model
    write_report(sparse, output, name=sparse.plan.base_model or name)
    stdout.print(f"Written to {output}", highlight=False, markup=False, soft_wrap=True)
