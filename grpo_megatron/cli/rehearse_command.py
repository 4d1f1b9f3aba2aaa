"""`rehearse`: a recipe or a graph, run whole on this machine before it is queued."""

from pathlib import Path
from typing import Annotated

import typer

from grpo_megatron.cli.run_commands import Overrides


def rehearse(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE_OR_GRAPH", help="Path or name of a recipe, or of a graph of stages."
        ),
    ],
    overrides: Overrides = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint to start from; default: a tiny random one of the recipe's family."
        ),
    ] = None,
    site: Annotated[
        str | None, typer.Option(help="Site for which the job script is rendered, as for submit.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where it runs; default: runs_dir/rehearsal/NAME."),
    ] = None,
) -> None:
    """Run a cluster's recipe on this machine: three steps, a resume, an export, with a tiny model.

    Says what it changed and what it showed. Exit code 11 if something was not shown."""
    from grpo_megatron.rehearsal.rehearse import rehearse_recipe
    from grpo_megatron.rehearsal.rehearse_graph import (
        is_graph,
        refuse_unknown,
        rehearse_graph,
    )

    refuse_unknown(target)
    settings = overrides or []
    if is_graph(target):
        done = rehearse_graph(target, settings, model=model, folder=to, site=site, say=typer.echo)
    else:
        done = rehearse_recipe(target, settings, model=model, folder=to, site=site, say=typer.echo)
    typer.echo(f"{target}: rehearsed in {done.seconds:.0f} s, {len(done.findings)} things shown")
