"""`data`: prompts as a run would train on them; nothing is started."""

from pathlib import Path
from typing import Annotated

import typer

from grpo_megatron.cli.inspect_commands import Source
from grpo_megatron.cli.run_commands import Overrides

app = typer.Typer(no_args_is_help=True, help="Look at data sets, templates and rewards.")


@app.callback()
def _group() -> None:
    """Keep `show` a command of its own, although it is the only one."""


@app.command()
def show(
    recipe: Source,
    overrides: Overrides = None,
    completion: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="What the rewards judge, in place of the reference answers."
        ),
    ] = None,
) -> None:
    """Three prompts of every domain as text and tokens, and what its rewards say of the answers; of
    preferences, the answers with their labels."""
    from grpo_megatron.cli.data_show import show_domains
    from grpo_megatron.config.loader import load_recipe, read_resolved

    path = Path(recipe)
    if path.is_dir() or path.suffix == ".json":
        resolved = read_resolved(path, overrides or [])
    else:
        resolved = load_recipe(recipe, overrides or [])
    run_model = resolved.run_path / "model"
    show_domains(resolved.config, run_model, typer.echo, completion=completion)
