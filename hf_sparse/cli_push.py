"""The command line: `hf-sparse push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_options import Loading, Model, find_source, stdout, takes_loading_options

REPOSITORY = "Repository"


@takes_loading_options
def push(
    model: Model,
    repo_id: Annotated[str, typer.Argument(help="Where on the hub, such as user/name-plan.")],
    loading: Loading,
    base_model: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="The model's hub id, where MODEL is a folder or file.", rich_help_panel=REPOSITORY
        ),
    ] = None,
    license: Annotated[
        str | None, typer.Option(metavar="NAME", help="For the card, such as apache-2.0.", rich_help_panel=REPOSITORY)
    ] = None,
    private: Annotated[
        bool | None, typer.Option(help="Of a repository that is made. Default: the hub's.", rich_help_panel=REPOSITORY)
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="Default: main.", rich_help_panel=REPOSITORY)
    ] = None,
    measure_speed: Annotated[
        bool, typer.Option(help="Decode some tokens, for the card, or not.", rich_help_panel=REPOSITORY)
    ] = True,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write what would be published here, and publish nothing.",
            rich_help_panel=REPOSITORY,
        ),
    ] = None,
) -> None:
    """Publishes the model's plan with a card; calibrates first, if need be."""
    if to is not None and (to.exists() or not to.parent.is_dir()):
        raise ValueError(f"to: got {to}, expected a folder that is not there yet, in one that is")
    sparse = loading.load(find_source(model, loading.gguf_file))
    card: dict[str, Any] = {"base_model": base_model, "license": license, "measure_speed": measure_speed}
    if to is not None:
        sparse.save_plan_with_card(to, repo_id, **card)
        stdout.print(f"Written to {to}", highlight=False, markup=False, soft_wrap=True)
    else:
        commit = sparse.push_plan_to_hub(repo_id, **card, private=private, revision=revision)
        stdout.print(f"Published: {commit.commit_url}", highlight=False, markup=False, soft_wrap=True)
